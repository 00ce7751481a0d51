"""Every kernel family on small shapes, in a few seconds: what to run under a memory or race checker.

compute-sanitizer --tool memcheck  python tests/tools/sanitize.py
compute-sanitizer --tool racecheck python tests/tools/sanitize.py
compute-sanitizer --tool synccheck python tests/tools/sanitize.py

Results are compared with sbnet.reference. `--device cpu` runs the same cases there (for a sanitized build), and
`--only conv` those of the families whose names begin so: racecheck wants a family a process.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.utils._pytree as pytree

import sbnet
from sbnet import AttentionLayout, BlockGrid, reference
from sbnet.engine.inputs import Inputs
from sbnet.ops.masked.rearrange import rearrange_whole

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/
sys.path.insert(0, str(Path(__file__).parent))  # which `python -P` leaves out
import sanitize_convs as convs
from sanitize_convs import some_active
from sanitize_gradients import GRADIENTS

from support.op_samples import op_samples
from support.window_cases import Case as WindowCase
from support.window_cases import squares


def reduce_mask(device: str) -> None:
    grids = {
        (2, 37, 45): BlockGrid.cover((37, 45), 16),
        (1, 64, 96): BlockGrid((3, 4), (2, 3), (-1, -2), (9, 9)),
        (1, 128, 128): BlockGrid((96, 64), (8, 8), (0, 0), (3, 3)),
    }
    for dtype, (size, grid), average in itertools.product(
        (torch.bool, torch.float16, torch.float32, torch.float64), grids.items(), (False, True)
    ):
        mask = (torch.rand(size, device=device) > 0.97).to(dtype)
        for capacity in (None, 7):
            got = sbnet.reduce_mask(mask, grid, 0.01, average, capacity)
            want = reference.reduce_mask(mask, grid, 0.01, average, capacity)
            for name in ("indices", "count", "total", "block_map"):
                assert torch.equal(getattr(got, name), getattr(want, name)), (name, dtype, size, average, capacity)


def copies(device: str) -> None:
    grids = (
        BlockGrid((16, 16), (16, 16), (0, 0), (3, 3)),
        BlockGrid((18, 18), (16, 16), (-1, -1), (3, 3)),
        BlockGrid((5, 7), (5, 9), (-2, 1), (8, 5)),
        BlockGrid((40, 24), (40, 24), (0, 0), (1, 2)),
    )
    for dtype, channels, channels_last, grid in itertools.product(
        (torch.float16, torch.float32, torch.uint8), (64, 17), (False, True), grids
    ):
        x = (torch.randn(2, channels, 40, 48, device=device) * 9).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        active = some_active((2, 40, 48), grid, 0.01, device)
        for transpose in (False, True):
            stack = sbnet.sparse_gather(x, active, transpose)
            assert torch.equal(stack, reference.sparse_gather(x, active))
            base = torch.full_like(x, 3)
            if not grid.overlaps:
                assert torch.equal(
                    sbnet.sparse_scatter(stack, active, base), reference.sparse_scatter(stack, active, base)
                )
            if dtype.is_floating_point:
                want = reference.sparse_scatter(stack.double(), active, base.double(), add=True)
                for atomic in (False, True):
                    got = sbnet.sparse_scatter(stack, active, base, add=True, atomic=atomic)
                    assert float((got - want).norm() / want.norm()) < 2e-3
    if device == "cuda":
        given = [torch.rand(2, 3, 37, 41, device=device).half(), torch.rand(2, 37, 41, device=device) < 0.5]
        own = [torch.empty_like(x) for x in given]
        Inputs(own, given[0].device)(given)
        assert all(map(torch.equal, own, given))


def fringe_and_fill(device: str) -> None:
    for size, block in (((37, 45), 8), ((64, 64), 16), ((50, 88), 16)):
        active = some_active((1, *size), BlockGrid.cover(size, block), 0.005, device)
        got, want = (op(active, active, size, 3, 1, 1) for op in (sbnet.fringe, reference.fringe))
        assert torch.equal(got.pixels, want.pixels)
        x = torch.randn(1, 17, *size, device=device)
        assert torch.equal(sbnet.sparse_fill(x, active, 2.0), reference.sparse_fill(x, active, 2.0))


def motion(device: str) -> None:
    for size, smooth in (((37, 45), 5), ((64, 64), 31), ((1, 300), 1)):
        frame = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, device=device)
        background = torch.rand(2, *size, device=device)
        mask, following = sbnet.motion_mask(frame, background, 0.1, 0.5, 0.9, smooth)
        wanted, then = reference.motion_mask(frame, background, 0.1, 0.5, 0.9, smooth)
        assert float((mask != wanted).float().mean()) < 0.01
        torch.testing.assert_close(following, then, rtol=0, atol=1e-5)


def pyramid(device: str) -> None:
    for dtype, (height, width) in itertools.product((torch.bool, torch.float32), ((128, 192), (93, 155))):
        mask = (torch.rand(2, height, width, device=device) < 0.0005).to(dtype)
        half = ((height + 1) // 2, (width + 1) // 2)
        planes = [(height, width, 16), (*half, 8), (11, 17, 4), (1, 1, 1)]
        fringes = [(0, [(1, 3, 2, 1), (1, 1, 2)]), (1, [(1, 7, 1, 3)])]
        got = sbnet.mask_pyramid(mask, planes, 0.5, fringes, 5)
        want = reference.mask_pyramid(mask, planes, 0.5, fringes, 5)
        for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert torch.equal(mine, theirs), (dtype, height, width)


def pool(device: str) -> None:
    windows = ((3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 2, 2), (2, 12, 1))
    for dtype, channels, channels_last, (kernel, stride, padding), ceil in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), (64, 17), (False, True), windows, (False, True)
    ):
        size = (26, 31)
        x = torch.randn(1, channels, *size, device=device).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        out = sbnet.pool_output_size(size, kernel, stride, padding, 1, ceil)
        active = some_active((1, *out), BlockGrid.cover(out, 8), 0.02, device)
        edge = sbnet.fringe(active, active, out, 3, 1, 1)
        for kind in ("max", "avg"):
            name, window = f"sparse_{kind}_pool2d", {"kernel_size": kernel, "stride": stride, "padding": padding}
            want = getattr(reference, name)(x.float(), active, **window, ceil_mode=ceil)
            got = torch.zeros_like(want, dtype=dtype, memory_format=torch.preserve_format)
            getattr(sbnet, name + "_")(x, active, got, **window, ceil_mode=ceil, fringe=edge)
            torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


def resize(device: str) -> None:
    """Every mode, in words of channels and not, up and down."""
    for dtype, channels, (mode, corners), scale in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32),
        (64, 5),
        (("nearest", None), ("bilinear", False), ("bicubic", True)),
        (2, 0.7),
    ):
        x = torch.randn(1, channels, 13, 18, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        how = {"scale_factor": scale, "mode": mode, "align_corners": corners}
        out = sbnet.resize_output_size((13, 18), scale)
        active = some_active((1, *out), BlockGrid.cover(out, 8), 0.5, device)
        edge = sbnet.fringe(active, active, out, 3, 1, 1)
        got = torch.zeros(1, channels, *out, device=device, dtype=dtype)
        sbnet.sparse_resize2d_(x, active, got, **how, fringe=edge)
        torch.testing.assert_close(
            got.float(), reference.sparse_resize2d(x.float(), active, **how), rtol=2e-2, atol=2e-2
        )


def adaptive_pool(device: str) -> None:
    """Averages and maxima, in words of channels and not, of the whole plane and of windows that overlap."""
    for dtype, channels, size in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), (64, 5, 300), (1, (3, 5))
    ):
        x = torch.randn(2, channels, 29, 34, device=device).to(dtype)
        active = some_active((2, 29, 34), BlockGrid.cover((29, 34), 8), 0.5, device)
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            for kind in ("avg", "max"):
                got = getattr(sbnet, f"sparse_adaptive_{kind}_pool2d")(given, active, size)
                want = getattr(reference, f"sparse_adaptive_{kind}_pool2d")(given.float(), active, size)
                torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def squeeze_excite(device: str) -> None:
    """Rows of the weights in words and not, one sample's channels over several CTAs and in one."""
    for dtype, channels, hidden in itertools.product((torch.float16, torch.float32), (64, 5, 600), (16, 7)):
        planes = torch.randn(2, channels, 29, 34, device=device).to(dtype)
        active = some_active((2, 29, 34), BlockGrid.cover((29, 34), 8), 0.5, device)
        weight1 = (torch.randn(hidden, channels, device=device) / channels).to(dtype)
        weight2, bias = torch.randn(channels, hidden, device=device).to(dtype), torch.randn(hidden, device=device)
        for x in (planes, planes.contiguous(memory_format=torch.channels_last)):
            got = sbnet.sparse_squeeze_excite2d(x, active, weight1, bias, weight2, None)
            want = reference.sparse_squeeze_excite2d(x.float(), active, weight1.float(), bias, weight2.float(), None)
            torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
            scaled = torch.zeros_like(x)
            sbnet.sparse_squeeze_excite2d_(x, active, weight1, bias, weight2, None, scaled)
            assert torch.equal(scaled, torch.where(active.pixel_mask((29, 34)), x * got, 0))


def norm(device: str) -> None:
    """Every normalisation, in words of channels and not."""
    for dtype, channels in itertools.product((torch.float16, torch.bfloat16, torch.float32), (64, 6, 300)):
        x = torch.randn(2, channels, 29, 34, device=device).to(dtype)
        weight, bias = (torch.randn(channels, device=device).to(dtype) for _ in range(2))
        active = some_active((2, 29, 34), BlockGrid.cover((29, 34), 8), 0.5, device)
        edge = sbnet.fringe(active, active, (29, 34), 3, 1, 1)
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            for name, arguments in (
                ("group_norm", (2, weight, bias)),
                ("response_norm", (weight, bias)),
                ("layer_norm2d", (weight, None)),
                ("softmax2d", ()),
            ):
                got = torch.zeros_like(given)
                getattr(sbnet, f"sparse_{name}_")(given, active, got, *arguments, fringe=edge)
                wide = [t.float() if isinstance(t, torch.Tensor) else t for t in arguments]
                want = getattr(reference, f"sparse_{name}")(given.float(), active, *wide)
                torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def rearrange(device: str) -> None:
    """Every map, in words of channels and not."""
    maps = ({"up": 2}, {"down": 2}, {"groups": 4}, {"pad": (1, -2, 3, 0), "value": 0.5}, {"up": 2, "groups": 2})
    for dtype, channels, how in itertools.product((torch.float16, torch.bfloat16, torch.float32), (64, 24), maps):
        x = torch.randn(1, channels, 12, 18, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        like = rearrange_whole(x, **how)
        size = tuple(like.shape[2:])
        active = some_active((1, *size), BlockGrid.cover(size, 8), 0.5, device)
        edge = sbnet.fringe(active, active, size, 3, 1, 1)
        got = torch.zeros_like(like)
        sbnet.sparse_rearrange_(x, active, got, **how, fringe=edge)
        assert torch.equal(got, reference.sparse_rearrange(x, active, **how))


def pointwise(device: str) -> None:
    """Operands of every kind, in words of channels, of pixels and not."""
    mixed = "mul a; save s; add b; tanh; mul c; save t; add d; mul s; add t"
    for dtype, channels in itertools.product((torch.float16, torch.bfloat16, torch.float32), (64, 5, 3)):
        x, a = (torch.randn(1, channels, 13, 24, device=device).to(dtype) for _ in range(2))
        last = torch.channels_last
        others = a.contiguous(memory_format=last), a[:, :, :1, :1], a[:, :1], a[:, :1, :1, :1]
        active = some_active((1, 13, 24), BlockGrid.cover((13, 24), 8), 0.5, device)
        edge = sbnet.fringe(active, active, (13, 24), 3, 1, 1)
        for given, program in itertools.product((x, x.contiguous(memory_format=last)), (mixed, "mul a; add d")):
            got = torch.zeros_like(given)
            sbnet.sparse_pointwise_(given, active, program, *others, out=got, fringe=edge)
            want = reference.sparse_pointwise(given.float(), active, program, *(t.float() for t in others))
            torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def attention(device: str) -> None:
    """Forward and backward of every kernel: halves of 64 and 128 features (Hopper's own), of others, float32."""
    lengths = torch.tensor([70, 200], dtype=torch.int32, device=device)
    seed = torch.tensor([3, 4], device=device)
    blocks = torch.rand(1, 2, 4, 4, device=device) < 0.6
    layouts = [
        (AttentionLayout.causal(), {}),
        (AttentionLayout.local(70), {"k_lengths": lengths, "q_lengths": lengths}),
        (AttentionLayout.strided(5), {"dropout_p": 0.2, "seed": seed}),
        (AttentionLayout.fixed(40, 2, 1, 8), {"deterministic": True}),
        (AttentionLayout.from_mask(torch.rand(2, 200, 200) < 0.2, 32), {}),
        (AttentionLayout.from_tensor(blocks, 64), {"k_lengths": lengths, "dropout_p": 0.1, "seed": seed}),
    ]
    kinds = [(torch.float16, 64), (torch.float32, 72)]
    if device == "cuda":
        kinds += [(torch.bfloat16, 128), (torch.bfloat16, 40), (torch.float16, 200)]
    for (layout, options), (dtype, dim) in itertools.product(layouts, kinds):
        q, k, v, grad = (torch.randn(2, h, 200, dim, device=device) for h in (2, 1, 1, 2))
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = sbnet.block_attention(*leaves, layout, **options)
        got = (out, *torch.autograd.grad(out, leaves, grad.to(out.dtype)))
        wide = [t.detach().cpu().double().requires_grad_() for t in leaves]  # checkers are slow in others' kernels
        options = {name: value for name, value in options.items() if name != "deterministic"}
        exact = reference.block_attention(*wide, layout, **options)
        for mine, theirs in zip(got, (exact, *torch.autograd.grad(exact, wide, grad.cpu().double())), strict=True):
            error = float((mine.detach().cpu() - theirs).detach().norm() / theirs.detach().norm())
            assert error < 2e-2, (layout, dtype, dim, error)


def windows(device: str) -> None:
    """Attention in windows, and of listed pixels to listed ones: few rows, and more than multiprocessors."""
    for dtype, dim in ((torch.float16, 64), (torch.bfloat16, 24), (torch.float32, 32)):
        WindowCase(device, dtype, (14, 21), squares(14, 21, 7), dim=dim, bias=torch.randn(1, 2, 49, 49)).check()
        for size, heads in (((9, 11), 2), ((64, 64), 12)):
            rows = torch.arange(1, size[0] * size[1] + 1)[None]
            WindowCase(device, dtype, size, rows, heads=heads, dim=dim, listed=True, density=0.2, batch=1).check()
    q, k, v = (torch.randn(3, 300, 64, device=device).half() for _ in range(3))
    lengths = torch.tensor([300, 0, 131], dtype=torch.int32, device=device)
    got = sbnet.block_attention(q, k, v, AttentionLayout.dense(), heads=1, q_lengths=lengths, k_lengths=lengths)
    for n, length in enumerate(lengths.tolist()):
        scores = q[n, :length].double() @ k[n, :length].double().T / 8
        torch.testing.assert_close(
            got[n, :length].double(), scores.softmax(-1) @ v[n, :length].double(), rtol=0, atol=1e-2
        )
        assert not got[n, length:].any()


def weights(device: str) -> None:
    """Products of every block size, their weights' gradients, 1x1 convolutions on active blocks."""
    for size, dtype, ragged in itertools.product(
        (8, 16, 32, 64, 128), (torch.float16, torch.bfloat16, torch.float32), (0, 3)
    ):
        features = {"in_features": 3 * size - ragged, "out_features": 4 * size - ragged}
        mask = torch.rand(3, 4) < 0.6
        mask[0, 0] = True
        layout = sbnet.BlockLayout(mask, size, **features)
        weight = (torch.randn(layout.weight_shape, device=device) / (2 * size) ** 0.5).to(dtype).requires_grad_()
        for rows in (13, 150):
            x = torch.randn(rows, layout.in_features, device=device).to(dtype).requires_grad_()
            got = sbnet.blocksparse_matmul(x, weight, layout)
            grads = torch.autograd.grad(got, (x, weight), torch.ones_like(got))
            wide = [t.detach().cpu().double().requires_grad_() for t in (x, weight)]
            want = reference.blocksparse_matmul(*wide, layout)
            exact = torch.autograd.grad(want, wide, torch.ones_like(want))
            for mine, theirs in zip((got, *grads), (want, *exact), strict=True):
                error = float((mine.detach().cpu() - theirs).detach().norm() / theirs.detach().norm())
                assert error < 2e-2, (size, dtype, ragged, rows, error)
        if ragged or size < 16:
            continue
        x = torch.randn(1, layout.in_features, 13, 18, device=device).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        active = some_active((1, 13, 18), BlockGrid.cover((13, 18), 4), 0.3, device)
        got = sbnet.sparse_conv2d(x, weight.detach(), None, active, layout=layout)
        dense = layout.to_dense(weight.detach()).t()[:, :, None, None].float()
        with torch.backends.cudnn.flags(enabled=False):  # racecheck finds hazards in cuDNN's kernels
            want = reference.sparse_conv2d(x.float(), dense, None, active)
        assert float((got.float() - want).norm() / want.norm()) < 2e-2, ("conv1x1", size, dtype)


def blockconv(device: str) -> None:
    """Block-sparse convolutions of one to three axes, their transposes and gradients, and those on active blocks."""
    blocks = [((0, 5, 3), (1, 0)), ((1, 2, 3, 4), (2, 1, 4)), ((4,), (3,))]
    cases = [(sbnet.ConvLayout(blocks, kernel), 2) for kernel in ((3,), (3, 2), (1, 3, 2))]
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
    cases.append((sbnet.ConvLayout.from_mask(mask, 44, 42, 16, (3, 3)), 1))  # by Winograd's products on CPUs
    cases.append((sbnet.ConvLayout.from_mask(mask, 48, 48, 16, (3, 3)), 1))  # Hopper's kernel
    for (layout, stride), dtype in itertools.product(cases, (torch.float16, torch.bfloat16, torch.float32)):
        image = (7, 6, 9)[: len(layout.kernel_size)]
        x = torch.randn(2, layout.in_channels, *image, device=device).to(dtype)
        if len(image) == 2:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        weight = torch.randn(layout.weights, device=device).to(dtype).requires_grad_()
        got = sbnet.blocksparse_conv(x, weight, layout, stride=stride)
        wide = [t.detach().cpu().double().requires_grad_() for t in (x, weight)]
        want = reference.blocksparse_conv(*wide, layout, stride=stride)
        grads = torch.autograd.grad(got, (x, weight), torch.ones_like(got))
        exact = torch.autograd.grad(want, wide, torch.ones_like(want))
        for mine, theirs in zip((got, *grads), (want, *exact), strict=True):
            error = float((mine.detach().cpu() - theirs).detach().norm() / theirs.detach().norm())
            assert error < 2e-2, (layout.kernel_size, dtype, error)
        if len(image) == 2:
            padding = (1, 1)
            plane = [side + 2 - k + 1 for side, k in zip(image, layout.kernel_size, strict=True)]
            active = some_active((2, *plane), BlockGrid.cover(tuple(plane), 4), 0.5, device)
            sbnet.sparse_conv2d(x.detach(), weight.detach(), None, active, layout=layout, padding=padding)


def samples(device: str) -> None:
    """The sample calls of every op and their gradients, so that no op is left out; tests compare their results."""
    for name, calls in op_samples(device).items():
        for arguments in calls:
            results = pytree.tree_leaves(getattr(torch.ops.sbnet, name)(*arguments))
            differentiable = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            if differentiable:
                torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])


def main() -> None:
    lists = (reduce_mask, copies, fringe_and_fill, motion, pyramid)
    plain = (
        *lists, pool, adaptive_pool, squeeze_excite, norm, convs.conv_quantized, convs.conv_float8,
        convs.conv_transpose, resize, rearrange, pointwise, convs.bottleneck,
    )  # fmt: skip
    families = {
        f.__name__: f for f in (*plain, attention, windows, weights, blockconv, samples, *GRADIENTS, *convs.TILES)
    }
    families |= {name: functools.partial(convs.conv, name) for name in convs.CONVS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="PREFIX", help=", ".join(families))
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, family in families.items():
        if name.startswith(options.only):
            start = time.monotonic()
            family(options.device)
            if options.device == "cuda":
                torch.cuda.synchronize()
            print(f"{name}: right, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
