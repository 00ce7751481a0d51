"""Model files: their format, what they say and do not say, and sessions that are ready when they are made."""

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import ctypes
import os

import onnx
import torch
from torch import nn
from typer.testing import CliRunner

import sbnet
from sbnet import export
from sbnet.engine import compare
from sbnet.export import schemas
from sbnet.models import contour_net
from sbnet_command import cli
from support.helpers import random_active, tensor
from support.ort_models import Node, nhwc, samples

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
CPU = ["CPUExecutionProvider"]


def changed(path, change):
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def contours(tmp_path_factory):
    run = sbnet.sparsify(contour_net(2), torch.rand(1, 3, 32, 48), block=16)
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    return run.export(path, block_maps=True, facts={"input range": "0 to 1"})


# ---- format
@pytest.mark.parametrize("op", sorted(schemas.OPS))
def test_a_node_of_a_newer_format_is_refused(op, tmp_path):
    node = samples()[op]
    node.attributes["format"] = schemas.FORMAT
    assert node.run()
    for format in (schemas.FORMAT + 1, 0):
        node.attributes["format"] = format
        with pytest.raises(Exception, match=f"sbnet::{op}: format: expected 1 to {schemas.FORMAT}, got {format}"):
            node.run()
        (tmp_path / "m.onnx").write_bytes(node.model())
        with pytest.raises(export.ExportError, match=f"format: expected 1 to {schemas.FORMAT}, got {format}"):
            export.check(tmp_path / "m.onnx")


def test_every_node_says_its_format(contours):
    nodes = [n for n in onnx.load(contours).graph.node if n.domain == "sbnet"]
    assert nodes
    assert all([a.i for a in n.attribute if a.name == "format"] == [schemas.FORMAT] for n in nodes)


def test_check_refuses_what_it_does_not_know(contours, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(contours.read_bytes())
    export.check(path)

    def newer(model):
        for opset in model.opset_import:
            opset.version = 99 if opset.domain == "sbnet" else opset.version

    with pytest.raises(export.ExportError, match="opset sbnet: expected at most 1, got 99"):
        export.check(changed(path, newer))
    path.write_bytes(contours.read_bytes())

    def misspelt(model):
        node = next(n for n in model.graph.node if n.op_type == "sparse_conv2d")
        node.attribute.append(onnx.helper.make_attribute("paddings", [5, 5]))

    with pytest.raises(export.ExportError, match="expected those of sbnet::sparse_conv2d, got paddings"):
        export.check(changed(path, misspelt))


# ---- contents
def test_a_file_says_what_it_is_and_nothing_of_its_writer(contours):
    model = onnx.load(contours)
    graph = model.graph
    facts = {p.key: p.value for p in model.metadata_props}
    assert facts == {
        "sbnet.version": sbnet.__version__, "sbnet.blocks": "16x16", "sbnet.threshold": "0.5",
        "sbnet.input range": "0 to 1",
    }  # fmt: skip
    weights = {i.name for i in graph.initializer}
    assert weights == {f"{k}_{kind}" for k in (0, 2, 4) for kind in ("weight", "bias")}
    assert not weights & {v.name for v in graph.value_info}
    names = [n.name for n in graph.node]
    assert len(set(names)) == len(names)
    assert {"mask_pyramid", "sparse_conv2d", "sparse_conv2d_3"} <= set(names)
    text = contours.read_bytes()
    for word in (b".py", b"stack_trace", b"pkg.torch", os.getcwd().encode(), b"site-packages"):
        assert word not in text, word


def test_a_weight_that_is_read_in_two_orders_keeps_both(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x, mask):
            active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover(x.shape[2:], 8))
            y = sbnet.sparse_conv2d(self.conv(x), self.conv.weight, None, active, padding=1)
            return y, self.conv.weight * 2

    module, inputs = Both().eval(), (torch.rand(1, 4, 16, 24), torch.rand(1, 16, 24) > 0.9)
    path = export.to_onnx(module, inputs, tmp_path / "m.onnx")
    assert {i.name for i in onnx.load(path).graph.initializer} >= {"conv.weight", "conv.weight_0231"}
    y, twice = export.verify(path, module, inputs, CPU, quiet=True)
    assert y.rms <= 1e-5 * y.rms_of_torch
    assert twice.equal


def test_constants_are_tensors(tmp_path):
    """Plane sizes that are known at run time only need numbers in the graph."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2))
    path = sbnet.sparsify(net, torch.rand(2, 3, 32, 48), block=8).export(tmp_path / "m.onnx", dynamic=True)
    for node in onnx.load(path).graph.node:
        if node.op_type == "Constant":
            assert [a.name for a in node.attribute] == ["value"]


# ---- sessions
class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def allocated() -> int:
    """Bytes that are allocated now, whether the system lent them just then or before."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return found.uordblks + found.hblkhd


@pytest.mark.parametrize("op", ["sparse_conv2d", "sparse_bottleneck2d"])
def test_weights_are_packed_when_the_session_is_made(op):
    """Memory of the packed weights is taken then, and none of it by the first run."""
    active = random_active(sbnet.BlockGrid.cover((8, 8), 8), 1, 1.0)
    lists = [active.indices, active.count, active.block_map]
    wide = 2048
    x = tensor((1, wide, 8, 8))
    shapes = [(wide, wide, 1, 1)] if op == "sparse_conv2d" else [(512, wide, 1, 1), (512, 512, 3, 3), (wide, 512, 1, 1)]
    weights = [tensor(shape) for shape in shapes]
    size = sum(w.numel() * 4 for w in weights)
    node = Node(op, [nhwc(x), *map(nhwc, weights), *lists], {"bsize": [8, 8]})
    model = node.model(constants=range(1, 1 + len(weights)))
    samples()["sparse_conv2d"].run()  # what a first session sets up is not of the weights
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False  # it grows by as much again as it holds (seen with 1.18)
    before = allocated()
    session = export.session(model, CPU, options=options)
    made = allocated() - before
    inputs = [nhwc(x), *lists]
    before = allocated()
    (got,) = export.run(session, inputs)
    first = allocated() - before
    assert made > 1.7 * size  # ONNX Runtime's copy and ours
    assert first < 0.3 * size
    (want,) = node.run()
    assert torch.equal(got, want)


# ---- the command
def test_export_takes_dynamic_opset_and_external_data(tmp_path):
    path = tmp_path / "net.onnx"
    result = CliRunner().invoke(
        cli.app,
        ["export", "-o", str(path), "--size", "40x56", "--dynamic", "--opset", "18", "--external-data", "--block", "8"],
    )
    assert result.exit_code == 0, result.output + result.stderr
    assert (tmp_path / "net.onnx.data").exists()
    model = onnx.load(path, load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": 18, "sbnet": 1}
    session = export.session(path, CPU)
    assert [v.shape for v in session.get_inputs()] == [["batch", 3, "height", "width"], ["batch", "height", "width"]]
    for n, h, w in ((2, 40, 56), (1, 33, 17)):
        x, mask = torch.rand(n, 3, h, w), torch.rand(n, h, w) > 0.98
        got, block_map = export.run(session, [x, mask])
        active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover((h, w), 8))
        assert torch.equal(block_map, active.block_map)
        found = compare(got, contour_net(), x, active)
        assert found.holds, found


def test_a_residual_network_exports_dynamic(tmp_path):
    from sbnet.export import networks

    module, names = networks.build("resnet18", classes=0)
    networks.write(module, names, tmp_path / "net.onnx", (64, 96), 2, dynamic=True)
    nodes = onnx.load(tmp_path / "net.onnx").graph.node
    filled = [n for n in nodes if any(a.name == "zero_outside" and a.i for a in n.attribute)]
    assert len(filled) == 1  # the output; tensors that two layers read have one fringe for both
    session = export.session(tmp_path / "net.onnx", CPU)
    x, mask = torch.rand(1, 3, 80, 64), torch.zeros(1, 80, 64, dtype=torch.bool)
    mask[:, 8:24, 30:50] = True
    (got,) = export.run(session, [x, mask])
    with torch.no_grad():
        want = module(x, mask)
    assert (got - want).norm() <= 1e-5 * want.norm()
