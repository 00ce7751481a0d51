"""`run.export` of quantised runs: ONNX Runtime gives what the run gives, on feature maps of int8 or float8."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import sbnet
import sbnet.export
from sbnet.graph.oracle import exact_pixels
from support.networks import NETWORKS, lively
from support.ort_models import skip_without
from support.quantized import BLOCK, SIZE, Chain, Grouped, frames

OURS = ("sparse_conv2d_quantized", "sparse_conv2d_dequantized")
HALVES = [torch.float16, torch.bfloat16]
STORED = {"int8": onnx.TensorProto.INT8, "fp8": onnx.TensorProto.FLOAT8E4M3FN}


def exported(net, path, mode="masked", dtype="int8", device="cpu"):
    torch.manual_seed(3)
    given, masks = frames(2, 1, 0.01)
    given, masks = ([v.to(device) for v in values] for values in (given, masks))
    run = sbnet.quantize(lively(net).to(device), given, masks, dtype=dtype, block=BLOCK, mode=mode)
    run.export(path)
    return run, sbnet.export.session(path, None if device == "cuda" else ["CPUExecutionProvider"])


def assert_near(got, want, error=2e-3):
    """Sums of products are the same; a value next to a half may be rounded the other way, and what follows from it
    differs."""
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert float((g - w).square().mean().sqrt()) <= error * float(w.square().mean().sqrt())


@pytest.mark.parametrize("dtype", STORED)
def test_the_model_is_of_bytes_from_layer_to_layer(tmp_path, dtype):
    run, session = exported(Chain(), tmp_path / "chain.onnx", dtype=dtype)
    graph = onnx.load(tmp_path / "chain.onnx").graph
    nodes = [node for node in graph.node if node.domain == "sbnet"]
    assert [node.op_type for node in nodes if node.op_type in OURS] == [OURS[0]] * 3 + [OURS[1]]
    assert not any(node.op_type in ("Transpose", "Cast") for node in graph.node if "conv" in node.name)
    (_, *after) = [node for node in nodes if node.op_type in OURS]
    for node in after:  # what int8 layers alone read is not filled, but cleared where the next one reads
        before = next(n for n in nodes if node.input[0] in n.output)
        assert {a.name: a.i for a in before.attribute}.get("zero_outside", 0) == 0
    stored = {init.name: init.data_type for init in graph.initializer}
    assert all(stored[node.input[1]] == STORED[dtype] for node in nodes if node.op_type in OURS)
    for density in (0.02, 1.0, 0.0):
        x, mask = torch.randn(1, 3, *SIZE), torch.rand(1, *SIZE) < density
        assert_near(sbnet.export.run(session, [x, mask]), tree_leaves(run(x, mask)), 2e-3 if dtype == "int8" else 8e-3)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("mode", ["masked", "exact"])
def test_a_device_runs_what_it_exported(tmp_path, device, mode, dtype):
    run, session = exported(Chain(), tmp_path / "chain.onnx", mode, dtype, device)
    nodes = [node for node in onnx.load(tmp_path / "chain.onnx").graph.node if node.op_type in OURS]
    assert len(nodes) == 4
    for density in (0.02, 1.0):
        x, mask = torch.randn(1, 3, *SIZE, device=device), torch.rand(1, *SIZE, device=device) < density
        want, got = run(x, mask), sbnet.export.run(session, [x, mask])[0]
        assert got.device.type == device
        inside = exact_pixels(want, mask).expand_as(want) if mode == "exact" else slice(None)
        assert_near([got[inside]], [want[inside]], 2e-3 if dtype == "int8" else 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("floats", HALVES)
@pytest.mark.parametrize("dtype", STORED)
def test_networks_of_halves(tmp_path, dtype, floats):
    skip_without("cuda")
    torch.manual_seed(3)
    given, masks = ([v.cuda() for v in values] for values in frames(2, 1, 0.01))
    run = sbnet.quantize(lively(Chain()).to("cuda", floats), [x.to(floats) for x in given], masks, dtype=dtype,
                         block=BLOCK)  # fmt: skip
    run.export(tmp_path / "chain.onnx")
    session = sbnet.export.session(tmp_path / "chain.onnx")
    for density in (0.02, 1.0):
        x, mask = torch.randn(1, 3, *SIZE).to("cuda", floats), torch.rand(1, *SIZE, device="cuda") < density
        got = sbnet.export.run(session, [x, mask])
        assert got[0].dtype == floats
        assert_near([y.float() for y in got], [y.float() for y in tree_leaves(run(x, mask))], 1e-2)


class OfHalves(nn.Module):
    """Layers of bytes that read halves, as x and as residual, and write them."""

    def __init__(self, bytes_, floats):
        super().__init__()
        self.floats = floats
        values = torch.randint(-100, 100, (24, 16, 3, 3))
        self.register_buffer("weight", values.to(torch.int8) if bytes_ == "int8" else values.to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.rand(24) * 1e-3)

    def forward(self, x, residual, mask):
        active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover(x.shape[2:], BLOCK))
        told = {"padding": 1, "x_scale": 0.03, "activation": "silu"}
        given = x, self.weight, self.scale, None, active
        rounded = sbnet.sparse_conv2d_quantized(*given, out_scale=0.05, residual=residual, **told)
        written = None if self.floats == torch.float32 else self.floats
        return rounded.float(), sbnet.sparse_conv2d_quantized(*given, residual=residual, dtype=written, **told)


@pytest.mark.parametrize("floats", HALVES)
@pytest.mark.parametrize("bytes_", STORED)
def test_layers_beside_halves_on_cpus(tmp_path, bytes_, floats):
    """To the bit what the op computes of the same numbers in float32, where they are exact, rounded once at the end."""
    torch.manual_seed(5)
    net, opset = OfHalves(bytes_, floats).eval(), 21 if bytes_ == "fp8" else 18
    x, residual = torch.randn(1, 16, *SIZE).to(floats), torch.randn(1, 24, *SIZE).to(floats)
    mask = torch.rand(1, *SIZE) < 0.02
    sbnet.export.to_onnx(net, (x, residual, mask), tmp_path / "net.onnx", opset_version=opset)
    got = sbnet.export.run(sbnet.export.session(tmp_path / "net.onnx", ["CPUExecutionProvider"]), [x, residual, mask])
    net.floats = torch.float32
    rounded, want = net(x.float(), residual.float(), mask)
    assert want.count_nonzero() > 1000
    assert got[1].dtype == floats
    assert torch.equal(got[0], rounded)
    assert torch.equal(got[1], want.to(floats))
    if bytes_ == "fp8":  # of which PyTorch's op takes halves on a CPU
        net.floats = floats
        assert torch.equal(got[1], net(x, residual, mask)[1])


def test_groups_are_those_of_the_run(tmp_path):
    run, session = exported(Grouped(), tmp_path / "grouped.onnx")
    nodes = [node for node in onnx.load(tmp_path / "grouped.onnx").graph.node if node.op_type in OURS]
    groups = [{a.name: a.i for a in node.attribute}.get("groups", 1) for node in nodes]
    assert groups == [1, 20, 2]
    for density in (0.02, 1.0):
        x, mask = torch.randn(1, 3, *SIZE), torch.rand(1, *SIZE) < density
        assert_near(sbnet.export.run(session, [x, mask]), tree_leaves(run(x, mask)))


@pytest.mark.parametrize("mode", ["masked", "exact"])
@pytest.mark.parametrize("name", ["ResNet", pytest.param("FPN", marks=pytest.mark.slow), "SRVGG"])
def test_networks(name, mode, tmp_path):
    run, session = exported(NETWORKS[name](), tmp_path / "net.onnx", mode)
    x, mask = torch.randn(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, 20:26, 30:38] = True
    got, want = sbnet.export.run(session, [x, mask]), tree_leaves(run(x, mask))
    if mode == "exact":  # elsewhere a result may be anything
        inside = [exact_pixels(w, mask).expand_as(w) if w.dim() == 4 else slice(None) for w in want]
        got, want = [g[i] for g, i in zip(got, inside, strict=True)], [w[i] for w, i in zip(want, inside, strict=True)]
    assert_near(got, want)


@pytest.mark.parametrize("dtype", STORED)
def test_cached_states_are_bytes(dtype, tmp_path):
    run, session = exported(Chain(), tmp_path / "cached.onnx", "cached", dtype)
    kinds = {"tensor(int8)": torch.int8, "tensor(float8e4m3fn)": torch.float8_e4m3fn, "tensor(float)": torch.float32}
    states = [torch.full(v.shape, 7, dtype=kinds[v.type]) for v in session.get_inputs()[2:]]
    assert sum(state.dtype in (torch.int8, torch.float8_e4m3fn) for state in states) == 3
    for density in (1.0, 0.01, 0.0, 0.02):
        x, mask = torch.randn(1, 3, *SIZE), torch.rand(1, *SIZE) < density
        want = tree_leaves(run(x, mask))
        got = sbnet.export.run(session, [x, mask, *states])
        states = got[len(want) :]
        assert_near(got[: len(want)], want)
