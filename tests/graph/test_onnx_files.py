"""ONNX in (`sparsify("model.onnx")`), ONNX out (`run.export`), and from one to the other (`sbnet sparsify`)."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

import sbnet
import sbnet.export
from sbnet.graph.cost import planned_share
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from sbnet_command.cli import app
from support import zoo
from support.contract import assert_holds, rms
from support.networks import NETWORKS, conv, lively

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from sbnet.graph.onnx import OnnxNetwork  # noqa: E402

SIZE = (40, 56)
CPU = ["CPUExecutionProvider"]
QUICK = ("U-Net, bilinear", "YOLO-like", "ResNet")
names = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]
)


def written(net: nn.Module, path, x, **options):
    """`net` as an ONNX file of another exporter."""
    torch.onnx.export(net, (x,), path, dynamo=False, **{"opset_version": 17, **options})
    return path


# ---- in


@names
@pytest.mark.filterwarnings("ignore")
def test_a_file_is_the_network_and_is_planned_as_well(name, tmp_path):
    net, x, mask = lively(NETWORKS[name]()), torch.randn(1, 3, *SIZE), torch.rand(1, *SIZE) < 0.002
    opset = 20 if name == "sampled" else 17  # the first that has affine_grid
    path = written(net, tmp_path / "in.onnx", x, opset_version=opset)
    own = OnnxNetwork(path)
    session = ort.InferenceSession(path, providers=CPU)
    for got, want in zip(
        tree_leaves(own(x)), session.run(None, {session.get_inputs()[0].name: x.numpy()}), strict=True
    ):
        assert rms(got - torch.from_numpy(want)) < 1e-5 * rms(torch.from_numpy(want))
    run, masks = sbnet.sparsify(path, x, block=4), PlaneMasks(mask, 4)
    exact = masked_oracle(copy.deepcopy(own).double(), [x.double()], masks)
    assert_holds(run(x, mask), masked_oracle(own, [x], masks), exact, name)
    native = sbnet.sparsify(net, x, block=4)
    assert planned_share(run.plan.graph) == planned_share(native.plan.graph)
    assert len(run.plan.graph.nodes) <= len(native.plan.graph.nodes) + 2


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.filterwarnings("ignore")
def test_exporters_write_norms_of_groups_as_instances(groups, tmp_path):
    net, x = nn.Sequential(conv(3, 16), nn.GroupNorm(groups, 16), conv(16, 4)), torch.randn(2, 3, *SIZE)
    nn.init.normal_(net[1].weight), nn.init.normal_(net[1].bias)
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, 3:9, 5:20] = mask[1, 30:, 40:] = True
    path = written(net.eval(), tmp_path / "in.onnx", x)
    assert "InstanceNormalization" in {node.op_type for node in onnx.load(path).graph.node}
    run, masks = sbnet.sparsify(path, x, block=4), PlaneMasks(mask, 4)
    exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], masks)
    assert_holds(run(x, mask), masked_oracle(net, [x], masks), exact, "groups")


def model(nodes, shape, constants=(), outputs=("y",), opset=18):
    """A model with input x, from (op, inputs, outputs, attributes) and {name: array}."""
    made = [onnx.helper.make_node(op, i, o, **a) for op, i, o, a in nodes]
    values = [onnx.helper.make_tensor_value_info("x", 1, shape)]
    results = [onnx.helper.make_tensor_value_info(name, 1, None) for name in outputs]
    initializers = [onnx.numpy_helper.from_array(v, n) for n, v in dict(constants).items()]
    graph = onnx.helper.make_graph(made, "g", values, results, initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=9)


class Modes(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs or {})


def test_sizes_are_computed_without_a_trace_of_it(tmp_path):
    """torch.export makes a graph of its own between any two changes of the gradient mode: hundreds took minutes."""
    nodes = [
        ("Shape", ["x"], ["s"], {}), ("Gather", ["s", "first"], ["n"], {}), ("Mul", ["n", "two"], ["m"], {}),
        ("Concat", ["m", "rest"], ["to"], {"axis": 0}), ("Reshape", ["x", "to"], ["y"], {}),
    ]  # fmt: skip
    numbers = {"first": np.array([0]), "two": np.array([2]), "rest": np.array([2, 40, 56])}
    onnx.save(model(nodes, [1, 4, 40, 56], numbers), tmp_path / "in.onnx")
    net = OnnxNetwork(tmp_path / "in.onnx")
    with Modes() as modes:
        assert net(torch.randn(1, 4, 40, 56)).shape == (2, 2, 40, 56)
    assert modes.seen
    assert not {"_set_grad_enabled", "mul"} & set(modes.seen), modes.seen


F32 = np.float32
WEIGHT = np.random.default_rng(0).standard_normal((6, 4, 3, 3)).astype(F32)
OPS = {
    "SAME_UPPER": ("Conv", ["x", "w"], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"w": WEIGHT}),
    "SAME_LOWER": ("Conv", ["x", "w"], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, {"w": WEIGHT}),
    "pads of one side": ("Conv", ["x", "w"], {"pads": [0, 1, 1, 0]}, {"w": WEIGHT}),
    "transposed, pads of one side": (
        "ConvTranspose", ["x", "w"], {"pads": [1, 1, 0, 0], "strides": [2, 2]}, {"w": WEIGHT[:4]},
    ),
    "max pool": ("MaxPool", ["x"], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}, {}),
    "max pool, ceil": ("MaxPool", ["x"], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, {}),
    "average, pads not counted": ("AveragePool", ["x"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, {}),
    "average, pads counted": (
        "AveragePool", ["x"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}, {},
    ),
    "average, pads of one side": (
        "AveragePool", ["x"], {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1], "count_include_pad": 1}, {},
    ),
    "clip": ("Clip", ["x", "lo", "hi"], {}, {"lo": np.array(-0.5, F32), "hi": np.array(0.5, F32)}),
    "clip above": ("Clip", ["x", "", "hi"], {}, {"hi": np.array(0.5, F32)}),
    "hard sigmoid": ("HardSigmoid", ["x"], {"alpha": 0.2, "beta": 0.5}, {}),
    "prelu": ("PRelu", ["x", "s"], {}, {"s": np.array([[[0.1]], [[0.2]], [[0.3]], [[0.4]]], F32)}),
    "depth to space": ("DepthToSpace", ["x"], {"blocksize": 2}, {}),
    "depth to space, CRD": ("DepthToSpace", ["x"], {"blocksize": 2, "mode": "CRD"}, {}),
    "space to depth": ("SpaceToDepth", ["x"], {"blocksize": 2}, {}),
    "edge": ("Pad", ["x", "p"], {"mode": "edge"}, {"p": np.array([0, 0, 1, 2, 0, 0, 0, 1])}),
    "pads of an axis": ("Pad", ["x", "p", "", "a"], {}, {"p": np.array([1, 2]), "a": np.array([3])}),
    "slice": (
        "Slice", ["x", "b", "e", "a", "t"], {},
        {"b": np.array([1, 0]), "e": np.array([2**40, -1]), "a": np.array([3, 2]), "t": np.array([2, 1])},
    ),
    "gather": ("Gather", ["x", "i"], {"axis": 1}, {"i": np.array([3, 1])}),
    "gather one": ("Gather", ["x", "i"], {"axis": 1}, {"i": np.array(2)}),
    "reshape": ("Reshape", ["x", "s"], {}, {"s": np.array([0, 2, 2, -1])}),
    "mean": ("ReduceMean", ["x", "a"], {"keepdims": 0}, {"a": np.array([2, 3])}),
    "batch norm": (
        "BatchNormalization", ["x", "s", "b", "m", "v"], {"epsilon": 1e-3},
        {k: np.array([0.5, 1, 2, 3], F32) for k in "sbmv"},
    ),
    "instance norm": ("InstanceNormalization", ["x", "s", "b"], {}, {k: np.array([0.5, 1, 2, 3], F32) for k in "sb"}),
    "softmax": ("Softmax", ["x"], {"axis": 1}, {}),
}  # fmt: skip
for where, rounding in (
    ("asymmetric", "floor"), ("asymmetric", "round_prefer_floor"), ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"), ("align_corners", "round_prefer_floor"), ("pytorch_half_pixel", "floor"),
):  # fmt: skip
    options = {"coordinate_transformation_mode": where, "nearest_mode": rounding}
    for scale in (2.0, 3.0, 1.5):
        OPS[f"nearest {where} {rounding} {scale}"] = (
            "Resize", ["x", "", "s"], options, {"s": np.array([1, 1, scale, scale], F32)},
        )  # fmt: skip
for where in ("half_pixel", "align_corners", "pytorch_half_pixel"):
    for mode in ("linear", "cubic"):
        OPS[f"{mode} {where}"] = (
            "Resize", ["x", "", "", "n"], {"coordinate_transformation_mode": where, "mode": mode},
            {"n": np.array([1, 4, 25, 20])},
        )  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ops_mean_what_onnx_says(name, tmp_path):
    op, inputs, attributes, constants = OPS[name]
    path = tmp_path / "op.onnx"
    onnx.save(model([(op, inputs, ["y"], attributes)], [1, 4, 11, 14] if "depth" not in name else [1, 4, 12, 14],
                    constants), path)  # fmt: skip
    x = torch.randn(1, 4, 12 if "depth" in name else 11, 14)
    (want,) = ort.InferenceSession(path, providers=CPU).run(None, {"x": x.numpy()})
    torch.testing.assert_close(OnnxNetwork(path)(x), torch.from_numpy(want), rtol=1e-4, atol=1e-5)


FLOOR = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
OUTSIDE = {"coordinate_transformation_mode": "outside", "mode": "linear"}


def test_sizes_that_follow_from_shapes_are_numbers(tmp_path):
    """As exporters write `interpolate(x, scale_factor=2)` and `x.view(n, -1)` of open sizes."""
    nodes = [
        ("Shape", ["x"], ["shape"], {}),
        ("Slice", ["shape", "two", "four"], ["plane"], {}),
        ("Mul", ["plane", "by"], ["larger"], {}),
        ("Slice", ["shape", "zero", "two"], ["front"], {}),
        ("Concat", ["front", "larger"], ["size"], {"axis": 0}),
        ("Resize", ["x", "", "", "size"], ["up"], FLOOR),
        ("Relu", ["up"], ["y"], {}),
    ]  # fmt: skip
    numbers = {"two": [2], "four": [4], "zero": [0], "by": [2, 2]}
    path, x = tmp_path / "m.onnx", torch.randn(1, 4, 12, 14)
    onnx.save(model(nodes, ["n", 4, "h", "w"], {k: np.array(v) for k, v in numbers.items()}), path)
    run = sbnet.sparsify(path, x)
    assert [n.kind for n in run.plan.graph.nodes] == ["resize", "channelwise"]
    assert torch.equal(run(x, torch.ones(1, 12, 14)), x.relu().repeat_interleave(2, 2).repeat_interleave(2, 3))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([("Loop", ["", "", "x"], ["y"], {})], "Loop of version 16 .opset 18. is not read"),
        ([("Resize", ["x", "", "s"], ["y"], OUTSIDE)], "attribute coordinate_transformation_mode: expected one of"),
        ([("NonZero", ["x"], ["y"], {})], r"node y \(NonZero\)"),
    ],
)  # fmt: skip
def test_errors_name_the_node_in_one_line(nodes, message, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(model(nodes, [1, 4, 8, 8], {"s": np.array([1, 1, 2, 2], F32)}), path)
    with pytest.raises(ValueError, match=message) as error:
        sbnet.sparsify(path, torch.zeros(1, 4, 8, 8))
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_what_is_no_model(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model" * 9)
    torch.save(torch.nn.Conv2d(4, 4, 3), tmp_path / "x.pt")
    takes = "expected an nn.Module or an ONNX model, got a file that is not ONNX: load a PyTorch file and pass"
    for name, message in (("m.onnx", takes), ("x.pt", takes), ("none.onnx", "no such file")):
        with pytest.raises(ValueError, match=message):
            sbnet.sparsify(str(tmp_path / name), torch.zeros(1, 4, 8, 8))


# ---- out


def exported(net: nn.Module, x, path, **options):
    run = sbnet.sparsify(net, x, block=4, **options)
    run.export(path)
    return run, sbnet.export.session(path, CPU)


@names
def test_an_exported_run_gives_its_results(name, tmp_path):
    net, x, mask = lively(NETWORKS[name]()), torch.randn(1, 3, *SIZE), torch.rand(1, *SIZE) < 0.002
    run, session = exported(net, x, tmp_path / "out.onnx")
    assert [v.name for v in session.get_inputs()] == ["x", "mask"]
    masks = PlaneMasks(mask, 4)
    exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], masks)
    got = sbnet.export.run(session, [x, mask])
    assert_holds(got, tree_leaves(masked_oracle(net, [x], masks)), tree_leaves(exact), name)
    for own, want in zip(got, tree_leaves(run(x, mask)), strict=True):
        torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not zoo.available(), reason="torchvision and timm are not installed")
@pytest.mark.parametrize(
    "name",
    [
        "torchvision resnet18",
        *(pytest.param(f"torchvision {n}", marks=pytest.mark.slow) for n in ("mobilenet_v3_small", "fcn_resnet50")),
    ],
)
def test_an_exported_torchvision_network(name, tmp_path):
    net, x = zoo.build(name), zoo.example(name)
    mask = torch.zeros(1, *x.shape[2:], dtype=torch.bool)
    mask[:, 20:30, 40:60] = True
    run, session = exported(net, x, tmp_path / "out.onnx", margin=4)
    for own, want in zip(sbnet.export.run(session, [x, mask]), tree_leaves(run(x, mask)), strict=True):
        assert rms(own - want) < 1e-5 * rms(want)


def test_planned_nodes_are_custom_ops_and_dense_ones_standard(tmp_path):
    exported(lively(NETWORKS["ASPP"]()), torch.zeros(1, 3, *SIZE), tmp_path / "out.onnx")
    graph = onnx.load(tmp_path / "out.onnx").graph
    ops = Counter((node.domain, node.op_type) for node in graph.node)
    assert ops["sbnet", "sparse_conv2d"] >= 6
    assert ops["", "Conv"] == 1  # of the global branch: one pixel
    assert ops["sbnet", "mask_pyramid"] == 1
    names = {tensor.name for tensor in graph.initializer}
    assert "branches_0_bias" in names
    assert not any("constant" in name for name in names)


# ---- from one to the other


@pytest.mark.filterwarnings("ignore")
def test_the_command_makes_a_masked_model_of_a_file(tmp_path):
    net = lively(nn.Sequential(conv(3, 8), nn.MaxPool2d(2), conv(8, 8, act=nn.SiLU()), nn.Upsample(scale_factor=2)))
    open_sizes = {"image": {0: "n", 2: "h", 3: "w"}}
    file, x = tmp_path / "in.onnx", torch.randn(1, 3, *SIZE)
    source = written(net, file, x, input_names=["image"], output_names=["scores"], dynamic_axes=open_sizes)
    target, cli = tmp_path / "masked.onnx", CliRunner()
    arguments = ["sparsify", str(source), "-o", str(target), "--mask-input", "where", "--block", "4"]
    result = cli.invoke(app, arguments)
    assert result.exit_code == 1
    assert "input image: expected a size, got [None, 3, None, None]" in " ".join(result.output.split())
    fixed = written(net, tmp_path / "fixed.onnx", torch.zeros(2, 3, 16, 16))  # sizes that the file names give way
    result = cli.invoke(app, ["sparsify", str(fixed), "-o", str(target), "--size", "40x56", "--batch", "1"])
    assert result.exit_code == 0, result.output
    result = cli.invoke(app, [*arguments, "--size", "40x56"])
    assert result.exit_code == 0, result.output
    assert "100.0% of the convolutions' multiply-adds" in " ".join(result.output.split())
    session = sbnet.export.session(target, CPU)
    assert [v.name for v in (*session.get_inputs(), *session.get_outputs())] == ["image", "where", "scores"]
    mask = torch.rand(1, *SIZE) < 0.002
    (got,) = sbnet.export.run(session, [x, mask])
    masks = PlaneMasks(mask, 4)
    exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], masks)
    assert_holds(got, masked_oracle(net, [x], masks), exact)
