"""Every kernel of CPUs by every instruction set that this processor has.

SBNET_ISA is read when the library loads, and a process takes seconds to begin: one a set makes all CHECKS."""

from __future__ import annotations

import hashlib
import itertools
import os
import traceback

import pytest
import torch
import torch.nn.functional as F
from engine import test_chains as chains
from masked import test_conv_quantized as quantized
from masked import test_gather_scatter as copies
from masked import test_pack as packs
from masked import test_pointwise as programs

import sbnet
from sbnet import BlockGrid, _library, reference
from support import attention_cases, conv_cases, weight_cases
from support.helpers import random_active, run_python
from support.instruction_sets import HERE, ISAS, instruction_sets

HALVES = torch.float16, torch.bfloat16
DTYPES = torch.float32, *HALVES


def everywhere(size, block):
    return sbnet.reduce_mask(torch.ones(1, *size), BlockGrid.cover(size, block))


def last_format(t):
    return t.contiguous(memory_format=torch.channels_last)


def the_set_that_is_used():
    """The one that is asked for; AMX with products of float16 is asked for with AMX."""
    used, asked = (ISAS.index(v) for v in (_library.cpu_isa(), os.environ["SBNET_ISA"]))
    assert used in (asked, asked + (ISAS[asked] == "amx"))


def convolutions():
    kinds = [
        (16, 16, 3, 1, 1), (64, 40, 3, 1, 1), (17, 33, 3, 2, 1), (3, 5, 5, 1, 1), (64, 64, 1, 1, 1), (1, 1, 3, 1, 1),
        (24, 24, 3, 1, 24), (96, 96, 3, 2, 96), (9, 18, 5, 2, 9), (12, 20, 3, 1, 4), (40, 40, 3, 1, 20),
        (36, 36, 5, 2, 9), (64, 64, 3, 1, 8), (18, 20, 5, 1, 1), (40, 17, 7, 1, 1), (64, 3, 3, 1, 1), (37, 2, 5, 2, 1),
    ]  # fmt: skip
    for dtype, (c, k, r, s, g) in itertools.product(DTYPES, kinds):
        case = {"dtype": dtype, "channels": c, "filters": k, "kernel": r, "stride": s, "groups": g, "padding": r // 2}
        for activation in (None, "relu", "relu6", "silu", "gelu"):
            case["activation"] = activation
            conv_cases.check("cpu", **case, residual="channel_slice", layout="channel_slice")
            conv_cases.check("cpu", **case, block=(5, 7), layout="contiguous", out_layout="plane_slice")
    for c, k, s, g in (1030, 72, 1, 1), (520, 64, 2, 1), (96, 80, 3, 2):  # 1x1: inputs are read where they are
        case = {"channels": c, "filters": k, "kernel": 1, "stride": s, "groups": g, "padding": 0, "size": (17, 23)}
        conv_cases.check("cpu", **case, block=(5, 7), activation="relu", residual="channels_last")


def channels_that_fill_no_vector_leave_their_neighbours_alone():
    """Of a pixel's channels in a wider feature map, those behind y's are others', and what is added has no more."""
    active = sbnet.reduce_mask(torch.rand(1, 17, 23) < 0.3, BlockGrid.cover((17, 23), (5, 7)))
    mask = active.pixel_mask((17, 23))
    for k, activation, kernel in itertools.product((5, 24, 70), (None, "relu6", "silu"), (1, 3)):
        x, weight = last_format(torch.randn(1, 20, 17, 23)), torch.randn(k, 20, kernel, kernel)
        wide = last_format(torch.full((1, k + 9, 17, 23), 7.0))
        added = last_format(torch.full((1, k + 3, 17, 23), float("nan")))
        added[:, :k] = torch.randn(1, k, 17, 23)
        options = {"padding": kernel // 2, "activation": activation, "residual": added[:, :k]}
        sbnet.sparse_conv2d_(x, weight, None, active, wide[:, 2 : 2 + k], **options)
        want, wanted = reference.sparse_conv2d(x, weight, None, active, **options), torch.full_like(wide, 7.0)
        wanted[:, 2 : 2 + k] = torch.where(mask, want, 7.0)
        torch.testing.assert_close(wide, wanted, rtol=1e-4, atol=1e-4)
        inside = torch.zeros_like(wide, dtype=torch.bool)
        inside[:, 2 : 2 + k] = mask
        assert bool((wide[~inside] == 7).all())


def infinities_reach_the_outputs_that_read_them_and_no_others():
    """3x3 layers are computed from differences of inputs, in which an infinity must not become NaN; lanes of one vector
    read inputs of their own group alone."""
    x = torch.randn(1, 24, 21, 30)
    for value, (c, row, column) in zip(
        [torch.inf, -torch.inf, torch.nan, 3e38, torch.inf, -torch.inf],
        [(0, 0, 0), (7, 5, 6), (3, 10, 20), (4, 15, 3), (9, 18, 27), (10, 19, 28)],
        strict=True,
    ):
        x[0, c, row, column] = value
    wide = torch.randn(1, 48, 21, 30)
    wide[0, 5, 5, 6], wide[0, 17, 20, 9], wide[0, 40, 0, 0] = torch.inf, -torch.inf, torch.nan
    kinds = [(33, 3, 1), (33, 3, 2), (33, 3, (1, 3)), (33, 5, 1), (33, 7, 1), (3, 3, 1), (2, 5, 2)]
    layers = [(x, k, taps, dilation, 1) for k, taps, dilation in kinds] + [(wide, 48, 3, 1, 48 // w) for w in (2, 4, 8)]
    active = everywhere((21, 30), (7, 8))
    for plane, filters, taps, dilation, groups in layers:
        weight, bias = torch.randn(filters, plane.shape[1] // groups, taps, taps), torch.randn(filters)
        pairs = dilation if isinstance(dilation, tuple) else (dilation, dilation)
        options = {"padding": [d * (taps // 2) for d in pairs], "dilation": dilation, "groups": groups}
        want = F.conv2d(plane, weight, bias, **options)
        kinds_there = want.isnan(), want.isposinf(), want.isneginf(), want.isfinite()
        assert all(found.any() for found in kinds_there)
        for given in (plane, last_format(plane)):
            got = sbnet.sparse_conv2d(given, weight, bias, active, **options)
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(got), kind(want)), (filters, taps, dilation, groups, kind)


def bounds_keep_nan():
    """Where sums leave from registers: one slice of whole vectors, and depthwise."""
    active = everywhere((9, 10), (4, 5))
    for groups in (1, 32):
        x = last_format(torch.randn(1, 32, 9, 10)) * 9
        x[0, :, 3, 4], x[0, :, 5, 5], x[0, :, 6, 6] = torch.nan, torch.inf, -torch.inf
        filters = 64 // min(groups, 2)
        weight, bias = torch.rand(filters, 32 // groups, 1, 1) + 0.1, torch.randn(filters)
        residual = last_format(torch.randn(1, filters, 9, 10))
        for name, activation in ((None, lambda v: v), ("relu", F.relu), ("relu6", F.relu6)):
            got = sbnet.sparse_conv2d(x, weight, bias, active, groups=groups, activation=name, residual=residual)
            want = activation(F.conv2d(x, weight, bias, groups=groups) + residual)
            assert want.isnan().sum() == filters
            torch.testing.assert_close(got, want, equal_nan=True)


def exp_and_erf_keep_their_last_places():
    """Through a convolution that multiplies by 1: silu shows exp, gelu shows erf, over all magnitudes."""
    parts = torch.linspace(-87, 100, 400_001), torch.logspace(-30, 2, 50_001), -torch.logspace(-30, 1.9, 50_001)
    x = torch.cat([*parts, torch.tensor([0.0, -0.0, 1.0, -1.0, 4.0, 1e30, -1e30])])
    plane = F.pad(x, (0, -len(x) % 1024)).view(1, 1, -1, 1024)
    active, wide = everywhere(plane.shape[2:], 64), x.double()
    for name, function, scale, inside in (
        ("silu", F.silu, lambda v, y: y.abs(), (x > -80) & (x < 1e29)),
        ("gelu", F.gelu, lambda v, y: torch.maximum(y.abs(), v.abs() / 2), x.abs() < 1e29),
    ):
        y = sbnet.sparse_conv2d(plane, torch.ones(1, 1, 1, 1), None, active, activation=name).flatten()[: len(x)]
        want = function(wide)
        worst = ((y.double() - want).abs() / (scale(wide, want) + 1e-38))[inside].max() / torch.finfo(torch.float32).eps
        assert worst < 3, (name, float(worst))
        assert y[-2] == float(x[-2]), name
        assert y[-1] == 0, name


def packed_weights():
    """Each set packs in its own order."""
    for name, dtype, layout in itertools.product(packs.CONVS, DTYPES, ("contiguous", "channels_last", "plane_slice")):
        packs.test_packed_or_not("cpu", name, dtype, layout)
    weight = torch.arange(40 * 40 * 9, dtype=torch.bfloat16).view(40, 40, 3, 3)
    print("tag", *sbnet.pack_conv_weight(weight)[:72].tolist(), flush=True)


def chains_of_layers():
    threads = torch.get_num_threads()
    for count, name in ((1, "residual"), (3, "stride"), (2, "squeeze")):
        torch.set_num_threads(count)
        net, x = chains.lively(chains.NETS[name]()), torch.randn(2, 3, *chains.SIZE)
        run = sbnet.sparsify(net, x, block=16)
        for mask in chains.masks(2):
            mask[1] &= torch.rand(chains.SIZE) < 0.5
            run(x, mask)
            assert torch.equal(run(x, mask), chains.layered(net, x, mask, block=16)), name
        assert run.executor._noted_nodes.joined == len(run.executor.chains)
    torch.set_num_threads(threads)


def gradients():
    x, w = torch.randn(2, 10, 19, 22, requires_grad=True), torch.randn(21, 10, 3, 3, requires_grad=True)
    active = sbnet.reduce_mask(torch.ones(2, 19, 22), BlockGrid.cover((19, 22), 8))
    got = torch.autograd.grad(sbnet.sparse_conv2d(x, w, None, active, padding=1).square().sum(), (x, w))
    want = torch.autograd.grad(F.conv2d(x, w, padding=1).square().sum(), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def attention():
    for dtype, dim in itertools.product(DTYPES, (16, 40, 128)):
        tensors = attention_cases.make("cpu", dtype, length=100, dim=dim)
        attention_cases.check(*tensors, sbnet.AttentionLayout.causal(), f"{dim}")
        layout = attention_cases.random_layout(2, 100, 16)
        tensors = attention_cases.make("cpu", dtype, length=100, dim=dim)
        attention_cases.check(*tensors, layout, f"{dim}", dropout_p=0.1, seed=torch.tensor([1, 2]))


def blocksparse_convolutions():
    layout = sbnet.ConvLayout.from_mask(torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]]), 90, 70, 32, (3, 3))
    x, w = torch.randn(2, 90, 9, 14), torch.randn(layout.weights) / 16
    y = sbnet.blocksparse_conv(x, w, layout, activation="relu")
    want = reference.blocksparse_conv(x.double(), w.double(), layout, activation="relu")
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    dx = sbnet.blocksparse_deconv(y, w, layout.swapped(), output_size=(9, 14))
    want = reference.blocksparse_deconv(y.double(), w.double(), layout.swapped(), output_size=(9, 14))
    torch.testing.assert_close(dx.double(), want, rtol=1e-4, atol=1e-4)


def close_products(got, layout, tensors, tolerance, *gate, **options):
    want = reference.blocksparse_matmul(*(t.double() for t in tensors), layout, *gate, **options)
    torch.testing.assert_close(got.double(), want, **tolerance)


def blocksparse_products():
    for size, dtype in itertools.product(weight_cases.BLOCK_SIZES, DTYPES):
        layout = weight_cases.random_layout(3, 4, size, ragged=3)
        w = layout.from_dense(layout.to_dense(torch.randn(layout.weight_shape))).to(dtype)
        small = {"rtol": 2e-2, "atol": 1e-3} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
        for rows in (1, 3, 29):
            x = torch.randn(rows, layout.in_features).to(dtype)
            y = sbnet.blocksparse_matmul(x, w, layout, activation="silu")
            close_products(y, layout, (x, w), small, activation="silu")
            close_gradients([(x, y)], layout, {"rtol": 2e-2, "atol": 2e-2})
        layout = weight_cases.random_layout(1400 // size, 3, size, 0.7, ragged=3)  # more products than formed in a row
        w = layout.from_dense(layout.to_dense(torch.randn(layout.weight_shape) / 40)).to(dtype)
        gate = torch.rand(layout.blocks) + 0.5
        gated, large = (w.float() * gate[:, None, None]).to(dtype), {"rtol": 1e-2, "atol": 4e-3}
        for rows in (16, 70, 200):
            x, dy = (torch.randn(rows, n).to(dtype) for n in (layout.in_features, layout.out_features))
            close_products(sbnet.blocksparse_matmul(x, w, layout, gate), layout, (x, gated), large)
            dx = sbnet.blocksparse_matmul(dy, w, layout, gate, transposed=True)
            close_products(dx, layout, (dy, gated), large, transposed=True)
            close_gradients([(x, dy), (x[:5] + 1, dy[:5])], layout, large)


def close_gradients(pairs, layout, tolerance):
    want = reference.blocksparse_weight_grad([(a.double(), b.double()) for a, b in pairs], layout)
    torch.testing.assert_close(sbnet.blocksparse_weight_grad(pairs, layout).double(), want, **tolerance)


def same_bits():
    """Of what is exact, or summed in one order: int8 with scales that are powers of 2, and pools."""
    found = hashlib.sha256()
    for name in quantized.LAYERS:
        (x, weight, scale, _, active), window, _ = quantized.make(name, "cpu")
        for more in ({}, {"x_scale": 0.5, "activation": "leaky_relu", "slope": torch.full_like(scale, 0.25)}):
            given = x.float() / 3 if more else x, weight, torch.full_like(scale, 2.0**-13), None, active
            y = sbnet.sparse_conv2d_quantized(*given, out_scale=0.5, **window, **more)
            found.update(y.contiguous().numpy().tobytes())
    for dtype in DTYPES:
        x = last_format(torch.randn(2, 43, 33, 29).to(dtype))
        active = random_active(BlockGrid.cover((17, 15), 4), 2, 0.6)
        for pool in (sbnet.sparse_max_pool2d, sbnet.sparse_avg_pool2d):
            found.update(pool(x, active, 3, 2, 1).double().contiguous().numpy().tobytes())
    return found.hexdigest()


def print_same_bits():
    print("bits", same_bits(), flush=True)


def block_copies():
    copies.check_neighbours("cpu")


CHECKS = [
    the_set_that_is_used, convolutions, channels_that_fill_no_vector_leave_their_neighbours_alone,
    infinities_reach_the_outputs_that_read_them_and_no_others, bounds_keep_nan, exp_and_erf_keep_their_last_places,
    packed_weights, chains_of_layers, gradients, attention, blocksparse_convolutions, blocksparse_products,
    print_same_bits, block_copies, programs.check_all,
]  # fmt: skip


def run_all():
    for check in CHECKS:
        print("next", check.__name__, flush=True)
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            print("failed", check.__name__, traceback.format_exc(), flush=True)


def test_what_the_processor_lacks_is_not_chosen():
    """SBNET_ISA lowers the choice that the processor allows."""
    done = run_python("from sbnet import _library; print(_library.cpu_isa())", SBNET_ISA="amx")
    assert done.stdout.strip() == HERE[-1], done.stderr[-2000:]


@pytest.mark.parametrize("isa", instruction_sets(*ISAS[:-1]))
def test_every_check(isa):
    done = run_python("from contracts.test_instruction_sets import run_all; run_all()", SBNET_ISA=isa)
    assert done.returncode == 0, (done.stdout[-300:], done.stderr[-2000:])
    assert "failed" not in done.stdout, done.stdout[-4000:]
    said = {line.partition(" ")[0]: line.split()[1:] for line in done.stdout.splitlines()}
    torch.manual_seed(0)
    assert said["bits"] == [same_bits()]
    packs.check_a_pack_of_another_set(torch.tensor([int(v) for v in said["tag"]], dtype=torch.uint8))
