"""Gradients of sparse_resize2d against PyTorch's of the whole plane, in float64."""

import pytest
import torch
import torch.nn.functional as F
from masked.test_resize import MODES, PLANE, SIZES, make

import sbnet
from sbnet import BlockGrid, reference, sparse_resize2d
from sbnet.ops.masked.resize import resize_arguments
from support.helpers import (
    assert_as_accurate_as_torch,
    assert_bitwise,
    laid_out,
    one_block,
    poison,
    random_active,
    tensor,
)
from support.layer_checks import assert_gradients, assert_same_bits_on_any_threads

OPS = torch.ops.sbnet
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def numbers_of(x, by, how):
    """mode, align_corners and ratios as the op takes them."""
    by = by.get("size"), by.get("scale_factor")
    return resize_arguments("test", x, *by, how["mode"], how.get("align_corners"))[1]


def whole(x, dy, active, by, how):
    """PyTorch's gradient of the masked whole plane. By the weights of each axis where PyTorch's is not that of its
    forward pass: of nearest modes on a GPU, whose scale it rounds, and of bicubic ones on a CPU, where a scale that is
    not 1 keeps the sides."""
    inside = active.pixel_mask(dy.shape[2:])
    dy = torch.where(inside, dy, 0.0).to(x.dtype)
    kept = dy.shape[2:] == x.shape[2:]
    if how["mode"].startswith("nearest") if x.is_cuda else how["mode"] == "bicubic" and kept:
        sizes, scales = (
            v if isinstance(v, tuple) or v is None else (v, v) for v in (by.get("size"), by.get("scale_factor"))
        )
        axes = []
        for d, side in enumerate(x.shape[2:]):
            to = {"size": (sizes[d], 1)} if sizes else {"scale_factor": (scales[d], 1)}
            eye = torch.eye(side, dtype=x.dtype, device=x.device)[None, :, :, None]
            axes.append(F.interpolate(eye, **to, **how)[0, :, :, 0])
        return torch.einsum("nchw,ih,jw->ncij", dy, *axes)
    leaf = x.detach().clone().requires_grad_()
    size = by.get("size")
    y = F.interpolate(leaf, size=size, scale_factor=by.get("scale_factor"), **how)
    return torch.autograd.grad(y, leaf, dy)[0]


def check(x, dy, active, by, how):
    leaf, inside = x.detach().requires_grad_(), active.pixel_mask(dy.shape[2:])
    y = sparse_resize2d(leaf, active, **by, **how)
    (got,) = torch.autograd.grad(y, leaf, torch.where(inside, dy, torch.nan))
    assert_as_accurate_as_torch(got, whole(x, dy, active, by, how), whole(x.double(), dy, active, by, how))
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", SIZES)
def test_all_sizes(device, by, mode):
    for dtype in FLOATS:
        for density in (0.4, 1.0):
            x, active, out = make(SIZES[by], device, dtype, density=density)
            dy = laid_out(tensor((2, 8, *out), dtype, device), "channels_last")
            got = check(x, dy, active, SIZES[by], MODES[mode])
            assert got.stride() == x.stride()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("side", "out"), [((1, 1), (30, 41)), ((60, 70), (3, 2)), ((5, 7), (5, 40)), ((64, 3), (17, 96))], ids=str
)
def test_far_up_and_down(device, side, out, mode):
    x, dy = tensor((2, 5, *side), torch.float32, device), tensor((2, 5, *out), torch.float32, device)
    active = random_active(BlockGrid.cover(out, (3, 8)), 2, 0.7, device)
    check(x, dy, active, {"size": out}, MODES[mode])


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "odd_channel_slice", "channels_last"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_any_memory_and_channels(device, mode, layout):
    for channels in (1, 5, 16, 72, 200):
        x, active, out = make(SIZES["x2"], device, torch.float16, channels, 0.4, layout, (3, 16))
        dy = laid_out(tensor((2, channels, *out), torch.float16, device), layout)
        check(x, dy, active, SIZES["x2"], {"mode": mode})


@pytest.mark.parametrize("by", ["x2", "x0.7"])
@pytest.mark.parametrize("mode", MODES)
def test_lists_of_nothing_and_of_one_block(device, mode, by):
    how = MODES[mode]
    x, active, out = make(SIZES[by], device, torch.float32, density=0.0)
    dy = tensor((2, 8, *out), torch.float32, device)
    assert not check(x, dy, active, SIZES[by], how).any()
    assert check(x, dy, one_block(active.grid, 2, device), SIZES[by], how).any()
    empty = x[:0].requires_grad_()
    none = random_active(active.grid, 0, 0.0, device)
    sparse_resize2d(empty, none, **SIZES[by], **how).sum().backward()
    assert empty.grad.shape == empty.shape


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("by", ["x2", "x0.7", "up to 17x30"])
@pytest.mark.parametrize("mode", MODES)
def test_in_place_on_a_list_of_x(device, mode, by, layout):
    """Its blocks and the fringe are written, nothing else, and nothing that is not active is read."""
    for dtype in FLOATS:
        for channels in (5, 16):
            x, active, out = make(SIZES[by], device, dtype, channels, layout=layout)
            own = random_active(BlockGrid.cover(PLANE, (3, 4)), 2, 0.5, device)
            ring = sbnet.fringe(own, own, PLANE, 3, 1, 1)
            dy = laid_out(tensor((2, channels, *out), dtype, device), layout)
            dirty = torch.where(active.pixel_mask(out), dy, torch.nan)
            numbers = numbers_of(x, SIZES[by], MODES[mode])
            lists = active.block_map, active.grid.numbers()
            want = OPS.sparse_resize2d_grad(dirty, *lists, list(PLANE), *numbers, layout == "channels_last")
            got = poison(x.shape, dtype, device, layout)
            before, inside = got.clone(), own.pixel_mask(PLANE)
            OPS.sparse_resize2d_grad_(
                dirty, *lists, *numbers, own.indices, own.count, own.grid.numbers(), got, ring.pixels, ring.count
            )
            edge = torch.zeros_like(inside).contiguous()
            edge.view(-1)[ring.pixels[: int(ring.count)].long()] = True
            assert_bitwise(got, torch.where(inside, want, torch.where(edge, 0.0, before)))


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives(device, mode):
    x, active, out = make(SIZES["up to 17x30"], device, torch.float32)
    weights = tensor((2, 8, *out), torch.float32, device)

    def curved(op, x):
        (slope,) = torch.autograd.grad(
            (op(x, active, size=out, **MODES[mode]).pow(3) * weights).sum(), x, create_graph=True
        )
        return slope

    assert_gradients(lambda x: curved(sparse_resize2d, x), lambda x: curved(reference.sparse_resize2d, x), [x])


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_the_same_bits_each_time(device, mode):
    x, active, out = make(SIZES["x3 and half"], device, torch.float32, 40, 0.7)
    dy = tensor((2, 40, *out), torch.float32, device)
    numbers = numbers_of(x, SIZES["x3 and half"], {"mode": mode})

    def run():
        return OPS.sparse_resize2d_grad(dy, active.block_map, active.grid.numbers(), list(PLANE), *numbers, True)

    if device == "cpu":
        assert_same_bits_on_any_threads(run)
    first = run()
    for _ in range(20):
        assert_bitwise(run(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_inside_a_cuda_graph(mode):
    """Its list changes between replays."""
    x, active, out = make(SIZES["x2"], "cuda", torch.bfloat16, 64)
    other = random_active(active.grid, 2, 0.3, "cuda")
    leaf, dy = x.requires_grad_(), laid_out(tensor((2, 64, *out), torch.bfloat16, "cuda"), "channels_last")

    def run():
        y = sparse_resize2d(leaf, active, scale_factor=2, mode=mode)
        return torch.autograd.grad(y, leaf, dy)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for name in ("indices", "count", "block_map"):
        getattr(active, name).copy_(getattr(other, name))
    graph.replay()
    assert_bitwise(got, run())


@pytest.mark.slow
def test_sides_so_long_that_places_are_rounded():
    """Where the outputs of a pixel begin is a guess by a float's 24 bits."""
    side, outputs = 10_945_756, 13_598_700
    active = random_active(BlockGrid.cover((1, outputs), (1, 1 << 20)), 1, 1.0, "cpu")
    lists, dy = (active.block_map, active.grid.numbers()), torch.ones(1, 1, 1, outputs)
    got = OPS.sparse_resize2d_grad(dy, *lists, [1, side], "nearest-exact", False, 0.0, 0.0, False)
    step = torch.tensor(side, dtype=torch.float32) / outputs
    read = ((torch.arange(outputs, dtype=torch.float32) + 0.5) * step).long()
    assert_bitwise(got.view(-1), torch.bincount(read.clamp(max=side - 1), minlength=side).float())


def test_numbers_that_no_layer_has(device):
    """Coordinates far outside: every output reads the plane's edge, and what it gives is not lost."""
    active = random_active(BlockGrid.cover((18, 26), 4), 2, 0.5, device)
    dy = torch.where(active.pixel_mask((18, 26)), tensor((2, 8, 18, 26), torch.float32, device), 0.0)
    for ratios in ((1e6, 1e-6), (1e-30, 1.6e7), (1e-45, 0.5)):
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            lists = active.block_map, active.grid.numbers()
            got = OPS.sparse_resize2d_grad(dy, *lists, list(PLANE), mode, False, *ratios, False)
            assert bool(got.isfinite().all())
            if mode != "bicubic":  # whose weights there are no shares
                torch.testing.assert_close(got.sum((2, 3)), dy.sum((2, 3)), rtol=1e-4, atol=1e-4)


def test_wrong_calls_name_the_argument(device):
    active = random_active(BlockGrid.cover((18, 26), 4), 2, 0.5, device)
    own = random_active(BlockGrid.cover(PLANE, 4), 2, 0.5, device)
    dy, out = tensor((2, 8, 18, 26), torch.float32, device), torch.zeros(2, 8, *PLANE, device=device)
    lists, numbers = (active.block_map, active.grid.numbers()), ("nearest", False, 0.0, 0.0)
    x_lists = own.indices, own.count, own.grid.numbers()
    run, run_ = OPS.sparse_resize2d_grad, OPS.sparse_resize2d_grad_
    for call, what in (
        (lambda: run(dy, *lists, [0, 5], *numbers, False), "grad: size: expected"),
        (lambda: run(dy, *lists, [9], *numbers, False), "grad: size: expected"),
        (lambda: run(dy, *lists, list(PLANE), "cubic", False, 0.0, 0.0, False), "grad: method: expected"),
        (lambda: run(dy, *lists, list(PLANE), "nearest", True, 0.0, 0.0, False), "grad: align_corners: expected false"),
        (lambda: run(dy, *lists, list(PLANE), "nearest", False, -1.0, 0.0, False), "grad: scale_factor: expected"),
        (lambda: run(dy, *lists, [1 << 25, 5], *numbers, False), "grad: size: expected sides"),
        (lambda: run(dy.double(), *lists, list(PLANE), *numbers, False), "grad: grad: .*float32"),
        (lambda: run(dy[:, :, :9], *lists, list(PLANE), *numbers, False), "grad: active"),
        (lambda: run(dy[0], *lists, list(PLANE), *numbers, False), "grad: grad: expected 4"),
        (lambda: run_(dy, *lists, *numbers, *x_lists, out[:, :7], None, None), "grad_: out: shape: expected"),
        (lambda: run_(dy, *lists, *numbers, *x_lists, out.half(), None, None), "grad_: out: "),
        (lambda: run_(dy, *lists, *numbers, own.indices, own.count, active.grid.numbers(), out, None, None), "grad_: "),
        (lambda: run_(dy, *lists, *numbers, *x_lists, dy[:, :, :9, :13], None, None), "grad_: out: "),
    ):
        with pytest.raises(RuntimeError, match=f"sbnet::sparse_resize2d_{what}"):
            call()
