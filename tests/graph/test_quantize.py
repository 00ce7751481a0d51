"""`sbnet.quantize`: scales, what is int8 and what is not, and results against the same in float64 PyTorch."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import sbnet
from sbnet.graph.oracle import exact_pixels
from sbnet.graph.passes.quantize import Quantization, stays_float
from support.contract import poison
from support.networks import NETWORKS, conv, lively
from support.quantized import BLOCK, SIZE, Chain, Fake, FakeGrouped, Grouped, active_of, frames


def rms(x):
    return float(x.double().square().mean().sqrt())


@pytest.fixture
def chain():
    torch.manual_seed(5)
    return lively(Chain())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@torch.no_grad()
def test_a_chain_rounds_where_it_should_and_nowhere_else(chain, dtype):
    """Against float64 with the same roundings; what is left is float32, and values next to a half."""
    given, masks = frames()
    run = sbnet.quantize(chain, given, masks, dtype=dtype, block=BLOCK)
    ranges: dict[str, float] = {}
    for x, mask in zip(given, masks, strict=True):
        exact = Fake(chain)
        exact(x, mask)
        ranges = {name: max(ranges.get(name, 0), largest) for name, largest in exact.seen.items()}
    x, mask = torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < 0.01
    poison(run)
    got, want, plain = run(x, mask), Fake(chain, ranges, dtype)(x, mask), Fake(chain)(x, mask)
    cost = rms(want - plain)
    assert 1e-3 < cost / rms(plain) < 0.1
    assert rms(got - want) < (0.02 if dtype == "int8" else 0.05) * cost


@torch.no_grad()
def test_groups_and_depthwise_layers_round_where_it_pays():
    """In int8, but for groups of few channels, and a depthwise layer that reads and writes floats anyway."""
    torch.manual_seed(6)
    net, (given, masks) = lively(Grouped()), frames()
    run = sbnet.quantize(net, given, masks, block=BLOCK)
    found = {layer.path: (layer.reads, layer.writes, layer.why) for layer in run.report.layers}
    assert found == {
        "first": ("float32", "float32", "first layer"),
        "wide": ("float32", "int8", ""),
        "deep": ("int8", "int8", ""),
        "groups": ("int8", "float32", ""),
        "between": ("float32", "float32", "depthwise from floats to floats"),
        "narrow": ("float32", "float32", "groups of 4 channels"),
        "last": ("float32", "float32", "last layer"),
    }
    exact = FakeGrouped(net)
    ranges: dict[str, float] = {}
    for x, mask in zip(given, masks, strict=True):
        exact(x, mask)
        ranges = {name: max(ranges.get(name, 0), largest) for name, largest in exact.seen.items()}
    x, mask = torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < 0.01
    poison(run)
    got, want, plain = run(x, mask), FakeGrouped(net, ranges)(x, mask), exact(x, mask)
    cost = rms(want - plain)
    assert 1e-3 < cost / rms(plain) < 0.1
    assert rms(got - want) < 0.02 * cost
    whole = sbnet.quantize(net, given, masks, dtype="fp8", block=BLOCK).report
    reasons = {v.path: v.why for v in whole.layers if v.path in ("deep", "groups", "between", "narrow")}
    assert reasons == {"deep": "depthwise", "groups": "2 groups", "between": "depthwise", "narrow": "5 groups"}


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_what_is_of_bytes_in_memory(chain, dtype):
    given, masks = frames()
    run = sbnet.quantize(chain, given, masks, dtype=dtype, block=BLOCK)
    found = {layer.path: (layer.computes, layer.reads, layer.writes, layer.why) for layer in run.report.layers}
    assert found == {
        "first": ("float32", "float32", "float32", "first layer"),
        "a.0": (dtype, "float32", dtype, ""),
        "b.0": (dtype, dtype, dtype, ""),
        "c.0": (dtype, dtype, dtype, ""),
        "d": (dtype, dtype, "float32", ""),
        "last": ("float32", "float32", "float32", "last layer"),
    }
    assert f"4 of 6 convolutions {dtype}, 3 of which write {dtype}" in repr(run)
    assert not any(node.kind == "pointwise" for node in run.plan.graph.nodes)  # PReLU is in the epilogue
    stored = {buffer.dtype for buffer in run.executor.buffers}
    assert stored == {torch.int8 if dtype == "int8" else torch.float8_e4m3fn, torch.float32}


def test_kept_modules_and_ends(chain):
    given, masks = frames()
    kept = sbnet.quantize(chain, given, masks, block=BLOCK, keep=["b", "d"])
    assert {v.path: v.why for v in kept.report.layers if v.computes == "float32"} == {
        "first": "first layer", "b.0": "kept", "d": "kept", "last": "last layer"
    }  # fmt: skip
    ends = sbnet.quantize(chain, given, masks, block=BLOCK, ends=True)
    assert all(layer.computes == "int8" for layer in ends.report.layers)
    assert ends.report.layers[0].reads == ends.report.layers[-1].writes == "float32"
    assert rms(ends(given[0], masks[0]) - kept(given[0], masks[0])) > 0
    with pytest.raises(ValueError, match=r"sbnet: quantize: keep: expected paths of modules with layers, got 'f'"):
        sbnet.quantize(chain, given, masks, keep=["f"])


@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_layers_that_cost_most_stay_in_float(chain, dtype):
    """A channel that is far greater than all others takes their digits."""
    given, masks = frames()
    with torch.no_grad():
        chain.b[0].weight[3], chain.b[0].bias[3] = 0, 500.0 if dtype == "int8" else 5e5
        chain.c[0].weight[:, 3] = chain.last.weight[:, 3] = 0
    told = {"dtype": dtype, "block": BLOCK}
    whole = sbnet.quantize(chain, given, masks, **told)
    bound = whole.report.error / (5 if dtype == "int8" else 2)
    run = sbnet.quantize(chain, given, masks, error=bound, **told)
    assert {v.path for v in run.report.layers if v.why == "kept"} == {"c.0"}
    assert run.report.error <= bound
    assert run.measure(given, masks).error == run.report.error
    loose = sbnet.quantize(chain, given, masks, error=whole.report.error, **told)
    assert loose.report.layers == whole.report.layers
    strict = sbnet.quantize(chain, given, masks, error=1e-9, **told)
    assert {v.computes for v in strict.report.layers} == {"float32"}
    assert strict.report.error == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_fp8_on_a_gpu_is_that_of_the_cpu(chain, dtype):
    """Within the rounding of the network's own floats, which few layers compute, and of Hopper's sums.

    A value that either of them moves across the middle between two of float8 comes out one step away. Of bfloat16 that
    are one in some 16 values, which add up to as much as float8's own rounding, of the others few.
    """
    given, masks = frames()
    x, mask = torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < 0.01
    want = sbnet.quantize(chain, given, masks, dtype="fp8", block=BLOCK)(x, mask, copy=True)
    plain = sbnet.sparsify(chain, given[0], block=BLOCK)(x, mask, copy=True)
    net, masks = chain.to("cuda", dtype), [m.cuda() for m in masks]
    run = sbnet.quantize(net, [g.to("cuda", dtype) for g in given], masks, dtype="fp8", block=BLOCK)
    assert torch.float8_e4m3fn in {buffer.dtype for buffer in run.executor.buffers}
    got = run(x.to("cuda", dtype), mask.cuda()).cpu()
    assert got.dtype == dtype
    assert rms(got - want) < (1.0 if dtype == torch.bfloat16 else 0.5) * rms(want - plain)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
@torch.no_grad()
def test_int8_on_a_gpu_is_that_of_the_cpu(chain, mode):
    """Sums are the same integers: what is left is float32 of the first and last layer, and values next to a half."""
    given, masks = frames()
    x, mask = torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < 0.01
    plain = sbnet.sparsify(chain, given[0], block=BLOCK, mode=mode)
    run = sbnet.quantize(plain, given, masks)
    calls = [(given[0], masks[0]), (x, mask)] if mode == "cached" else [(x, mask)]
    want, floats = ([r(*call, copy=True) for call in calls][-1] for r in (run, plain))
    inside = exact_pixels(want, mask).expand_as(want) if mode == "exact" else torch.ones_like(want, dtype=torch.bool)
    there = sbnet.sparsify(chain.cuda(), given[0].cuda(), block=BLOCK, mode=mode)
    again = sbnet.quantize(there, [g.cuda() for g in given], [m.cuda() for m in masks])
    assert torch.int8 in {buffer.dtype for buffer in again.executor.buffers}
    assert [layer.why for layer in again.report.layers] == [layer.why for layer in run.report.layers]
    assert again.report.error == pytest.approx(run.report.error, rel=0.02)
    got = [again(a.cuda(), b.cuda(), copy=True) for a, b in calls][-1].cpu()
    assert rms((got - want)[inside]) < 0.05 * rms((want - floats)[inside])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_int8_of_halves_on_a_gpu_is_near_the_cpu(chain, dtype):
    """As of fp8: a value that the rounding of few layers in halves moves across a middle comes out one step away."""
    given, masks = frames()
    x, mask = torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < 0.01
    want = sbnet.quantize(chain, given, masks, block=BLOCK)(x, mask, copy=True)
    plain = sbnet.sparsify(chain, given[0], block=BLOCK)(x, mask, copy=True)
    net, masks = chain.to("cuda", dtype), [m.cuda() for m in masks]
    run = sbnet.quantize(net, [g.to("cuda", dtype) for g in given], masks, block=BLOCK)
    assert {buffer.dtype for buffer in run.executor.buffers} == {torch.int8, dtype}
    got = run(x.to("cuda", dtype), mask.cuda()).cpu()
    assert got.dtype == dtype
    assert rms(got.float() - want) < (1.5 if dtype == torch.bfloat16 else 0.75) * rms(want - plain)


@pytest.mark.gpu
def test_groups_stay_float_on_a_gpu():
    """Where no kernel for them is faster than that of floats."""
    given, masks = ([v.cuda() for v in values] for values in frames())
    run = sbnet.quantize(lively(Grouped()).cuda(), given, masks, block=BLOCK)
    assert {layer.path: layer.why for layer in run.report.layers} == {
        "first": "first layer", "wide": "", "deep": "depthwise", "groups": "2 groups", "between": "depthwise",
        "narrow": "5 groups", "last": "last layer",
    }  # fmt: skip


def test_layers_in_groups_are_those_of_a_kernel():
    """The choice for GPUs, of which there need be none: groups=False keeps float what no fast kernel takes."""
    given, _ = frames()
    graph = sbnet.sparsify(lively(Grouped()), given[0], block=BLOCK).plan.graph
    why = {node.path: reason for node, reason in stays_float(graph, Quantization(groups=False)).items()}
    assert why == {
        "first": "first layer", "deep": "depthwise", "groups": "2 groups", "between": "depthwise",
        "narrow": "5 groups", "last": "last layer",
    }  # fmt: skip


QUICK = ("U-Net, bilinear", "ResNet", "SRVGG", "MobileNet with gates")


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
def test_networks_stay_near_the_float_ones(name, mode):
    """And what the report says of these frames is what calls differ by."""
    torch.manual_seed(1)
    net = lively(NETWORKS[name]())
    given, masks = frames(3, 1, 0.01)
    plain = sbnet.sparsify(net, given[0], block=BLOCK, mode=mode)
    run = sbnet.quantize(plain, given, masks)
    plain.reset()
    poison(run)
    wrong, right = [0.0] * len(run.report.outputs), [0.0] * len(run.report.outputs)
    for x, mask in zip(given, masks, strict=True):
        for k, (got, want) in enumerate(zip(*map(tree_leaves, (run(x, mask), plain(x, mask))), strict=True)):
            inside = torch.ones_like(want, dtype=torch.bool)
            if want.dim() == 4 and want.shape[2] * want.shape[3] > 1:
                inside = (F.adaptive_max_pool2d(mask[:, None].float(), want.shape[2:]) > 0).expand_as(want)
            wrong[k] += float((got.double() - want.double())[inside].square().sum())
            right[k] += float(want.double()[inside].square().sum())
    for output, w, r in zip(run.report.outputs, wrong, right, strict=True):
        assert output.error == pytest.approx(math.sqrt(w / r), rel=0.05, abs=1e-6)
        assert output.error < 0.3


def test_calibration_reads_active_pixels_alone(chain):
    """What is not active may be as large as it likes; a percentile below 100 is nearer."""
    given, masks = frames(1)
    wild = [given[0].clone()]
    wild[0][~active_of(masks[0], SIZE).pixel_mask(SIZE).expand_as(wild[0])] *= 1e4
    one = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)).eval()
    tame, other = (sbnet.quantize(one, f, masks, block=BLOCK).quantization for f in (given, wild))
    assert tame.ranges == other.ranges
    (name,) = tame.ranges
    with torch.no_grad():
        inside = one[0](given[0])[active_of(masks[0], SIZE).pixel_mask(SIZE).expand(2, 8, *SIZE)].abs()
    assert tame.ranges[name] == pytest.approx(float(inside.max()), rel=1e-5)
    lower = sbnet.quantize(one, given, masks, block=BLOCK, percentile=75).quantization.ranges[name]
    assert lower == pytest.approx(float(inside.quantile(0.75)), rel=0.02)
    with pytest.raises(ValueError, match=r"masks: expected active pixels in what 1 reads, got none"):
        sbnet.quantize(one, given, [torch.zeros_like(masks[0])], block=BLOCK)
    with pytest.raises(ValueError, match=r"frames: expected finite values, got (inf|nan)"):
        sbnet.quantize(one, [torch.full_like(given[0], math.inf)], masks, block=BLOCK)


def test_manners_of_a_run(chain):
    """Clones, pickles, another size, weights written in place, profile, and the report of other frames."""
    given, masks = frames()
    run = sbnet.quantize(chain, given, masks, block=BLOCK)
    x, mask = given[1], masks[1]
    want = run(x, mask, copy=True)
    assert torch.equal(run.clone()(x, mask), want)
    again = pickle.loads(pickle.dumps(run))
    assert torch.equal(again(x, mask), want)
    assert str(again.report) == str(run.report)
    assert run.measure(given, masks).outputs == run.report.outputs
    assert {kind for _, kind, _ in run.profile(x, mask, calls=1)} >= {"conv_quantized", "conv"}
    wide = torch.randn(1, 3, 24, 64)
    assert run(wide, torch.ones(1, 24, 64)).shape == (1, 5, 12, 32)
    with torch.no_grad():
        chain.a[0].weight *= 0.5
        chain.first.bias += 0.1
    assert not torch.equal(run(x, mask), want)
    assert torch.equal(run(x, mask), pickle.loads(pickle.dumps(run))(x, mask))
    with pytest.raises(ValueError, match=r"sbnet: run: mask: expected"):
        run(x, mask[:, :5])


def test_the_report_is_a_table_of_layers_and_outputs():
    torch.manual_seed(2)
    net = lively(nn.Sequential(conv(3, 8), conv(8, 8), conv(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                               nn.Linear(8, 6)))  # fmt: skip
    given, masks = frames(2, 3, 0.05)
    report = sbnet.quantize(net, given, masks, block=BLOCK).report
    (output,) = report.outputs
    assert [layer.computes for layer in report.layers] == [
        "float32",
        "int8",
        "int8",
    ]  # the last layer is the linear one
    assert output.psnr is None
    assert output.agreement in [k / 6 for k in range(7)]
    assert 0 < output.error < 0.2
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert "first layer" in lines[1]
    assert lines[-1].startswith("output 0: error ")
    picture = sbnet.quantize(Chain().eval(), given, masks, block=BLOCK).report.outputs[0]
    assert picture.psnr is not None
    assert picture.agreement is None


@torch.no_grad()
def test_errors_are_of_the_masks_pixels_in_the_floats_of_the_network(chain):
    (x,), (mask,) = frames(1)
    run = sbnet.quantize(chain, [x], [mask], block=BLOCK)
    got, want = run(x, mask), sbnet.sparsify(chain, x, block=BLOCK)(x, mask)
    pixels = (F.adaptive_max_pool2d(mask[:, None].float(), want.shape[2:]) > 0).expand_as(want)
    wrong, right = rms((got - want)[pixels]), rms(want[pixels])
    (output,) = run.report.outputs
    assert output.error == pytest.approx(wrong / right, rel=0.01)
    assert output.psnr == pytest.approx(-20 * math.log10(wrong), abs=0.1)
    first, *others = run.report.layers
    assert first.error == 0  # a layer of bytes is compared by what its bytes stand for
    assert all(0 < layer.error < 0.1 for layer in others)


REFUSED = [
    ({"dtype": "int4"}, ValueError, "dtype: expected 'int8' or 'fp8', got 'int4'$"),
    ({"dtype": "float8_e5m2"}, ValueError, "dtype: expected 'int8' or 'fp8', got 'float8_e5m2'$"),
    ({"masks": []}, ValueError, "masks: expected 2, one a frame, got 0"),
    ({"frames": [], "masks": []}, ValueError, "masks: expected 1, one a frame, got 0"),
    ({"percentile": 0}, ValueError, "percentile: expected more than 0"),
    ({"percentile": 101}, ValueError, "percentile: expected .* at most 100, got 101"),
    ({"error": 0.0}, ValueError, "error: expected a positive number or None, got 0"),
    ({"error": math.nan}, ValueError, "error: expected a positive number or None, got nan"),
    ({"run": 7}, TypeError, "model: expected an nn.Module"),
]


@pytest.mark.parametrize(("changes", "error", "pattern"), REFUSED, ids=[str(k) for k in range(len(REFUSED))])
def test_what_it_refuses(chain, changes, error, pattern):
    given, masks = frames()
    arguments = {"run": chain, "frames": given, "masks": masks, **changes}
    with pytest.raises(error, match=pattern):
        sbnet.quantize(arguments.pop("run"), arguments.pop("frames"), arguments.pop("masks"), **arguments)


def test_runs_that_it_refuses(chain):
    given, masks = frames()
    plain = sbnet.sparsify(chain, given[0], block=BLOCK)
    with pytest.raises(TypeError, match="options of sparsify with a network alone, got block"):
        sbnet.quantize(plain, given, masks, block=8)
    with pytest.raises(TypeError, match="run: expected one of sparsify, got one of quantize"):
        sbnet.quantize(sbnet.quantize(plain, given, masks), given, masks)
    halves = sbnet.sparsify(chain.bfloat16(), given[0].bfloat16(), block=BLOCK)
    with pytest.raises(ValueError, match="run: expected float32, or on a GPU float16 or bfloat16, got bfloat16 on cpu"):
        sbnet.quantize(halves, [x.bfloat16() for x in given], masks)
    with pytest.raises(ValueError, match="run: expected float32, or on a GPU float16 or bfloat16, got bfloat16 on cpu"):
        sbnet.quantize(halves, [x.bfloat16() for x in given], masks, dtype="fp8")
