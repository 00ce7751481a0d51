"""sbnet's ops in sessions: memory, shapes, threads, CUDA graphs, malformed models."""

import json
import re
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

import sbnet
from sbnet import ActiveBlocks, BlockGrid, export, reference
from sbnet.export import schemas
from sbnet.nn import BlockSparseLinear
from support.helpers import assert_bitwise, interpreter, random_active, tensor
from support.ort_models import is_ort_error, model, nchw, nhwc, samples, session, value_info


# ---- memory: what may be written in place, and what must not
def infos(named):
    return [value_info(n, export.runtime.ELEMENT_TYPES[t.dtype], list(t.shape)) for n, t in named.items()]


# The input whose memory the output may take: the base, at which a layer ends. The twin of sparse_conv2d_dequantized
# writes int8, which Sub and Max below do not take.
IN_PLACE = {"sparse_fill": 0} | {
    name: len(op.inputs) - 1
    for name, op in schemas.OPS.items()
    if op.inputs[-1][0].rstrip("?") == "base" and name != "sparse_conv2d_quantized"
}


@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("base", ["graph input", "initializer", "intermediate", "intermediate used again"])
def test_in_place_never_shows(device, op, base):
    """The tensor that an op may take over keeps its value for everyone else, run after run."""
    node = samples(device)[op]
    at = IN_PLACE[op]
    plain = node.run(device)[0]
    names = [f"x{k}" for k in range(len(node.inputs))]
    given = dict(zip(names, node.inputs, strict=True))
    nodes, initializers, outputs = [], [], ["y", "again"]
    if base == "initializer":
        value = given.pop(names[at]).cpu()
        initializers = [helper.make_tensor(names[at], TensorProto.FLOAT, value.shape, value.flatten().tolist())]
    elif base != "graph input":  # -(-x): a tensor of the graph's own
        nodes += [helper.make_node("Neg", [names[at]], ["n"]), helper.make_node("Neg", ["n"], ["base"])]
    name = "base" if nodes else names[at]
    nodes.append(node.proto([name if k == at else n for k, n in enumerate(names)], ["z"]))
    nodes.append(helper.make_node("Neg", ["z"], ["y"]))  # a graph output would have memory of its own
    if base == "intermediate":
        outputs = ["y"]
    else:
        # max(base, base - |z|) is base, and cannot be computed before the op has run
        nodes.append(helper.make_node("Abs", ["z"], ["abs"]))
        nodes.append(helper.make_node("Sub", [name, "abs"], ["less"]))
        nodes.append(helper.make_node("Max", [name, "less"], ["again"]))
    made = [value_info(n, TensorProto.FLOAT, None) for n in outputs]
    s = session(model(nodes, infos(given), made, initializers), device)
    for _ in range(3):
        got = export.run(s, list(given.values()))
        assert_bitwise(-got[0], plain)
        if len(got) > 1:
            assert_bitwise(got[1], node.inputs[at])


# ---- sessions
def two_convs(element_type=TensorProto.FLOAT):
    """mask -> blocks -> conv, fringe -> conv -> fill, of any batch, height and width."""
    nodes = [
        helper.make_node("reduce_mask", ["mask"], ["i", "c", "t", "b"], domain="sbnet", bsize=[8, 8]),
        helper.make_node("Shape", ["x"], ["plane"], start=1, end=3),
        helper.make_node("Concat", ["plane", "plane"], ["size"], axis=0),
        helper.make_node(
            "fringe",
            ["b", "b", "size"],
            ["fp", "fc"],
            domain="sbnet",
            producer_bsize=[8, 8],
            consumer_bsize=[8, 8],
            window=sbnet.Window.conv(3, 1, 1).numbers(),
        ),
        helper.make_node(
            "sparse_conv2d",
            ["x", "w", "i", "c", "b", "", "", "", "fp", "fc"],
            ["h"],
            domain="sbnet",
            bsize=[8, 8],
            padding=[1, 1],
            activation="relu",
        ),
        helper.make_node(
            "sparse_conv2d", ["h", "w", "i", "c", "b"], ["u"], domain="sbnet", bsize=[8, 8], padding=[1, 1]
        ),
        helper.make_node("sparse_fill", ["u", "b"], ["y"], domain="sbnet", bsize=[8, 8]),
    ]
    inputs = [
        value_info("mask", TensorProto.BOOL, ["N", "H", "W"]),
        value_info("x", element_type, ["N", "H", "W", 16]),
        value_info("w", element_type, [16, 3, 3, 16]),
    ]
    return model(nodes, inputs, [value_info("y", element_type, ["N", "H", "W", 16])])


def two_convs_in_torch(mask, x, w):
    active = sbnet.reduce_mask(mask, BlockGrid.cover(mask.shape[1:], 8))
    h = sbnet.sparse_conv2d(nchw(x), nchw(w), None, active, padding=1, activation="relu")
    return nhwc(sbnet.sparse_conv2d(h, nchw(w), None, active, padding=1))


def two_convs_inputs(device, n, height, width, density=0.02, dtype=torch.float32):
    mask = torch.rand(n, height, width, device=device) < density
    weight = tensor((16, 3, 3, 16), dtype, device) / 12
    return [mask, tensor((n, height, width, 16), dtype, device), weight]


def test_dynamic_shapes(device):
    s = session(two_convs(), device)
    for n, height, width in ((1, 32, 48), (3, 17, 9), (2, 64, 64), (1, 32, 48), (0, 16, 16)):
        inputs = two_convs_inputs(device, n, height, width)
        assert_bitwise(export.run(s, inputs)[0], two_convs_in_torch(*inputs))


def test_one_session_from_four_threads(device):
    s = session(two_convs(), device)
    cases = [two_convs_inputs(device, 1 + k % 2, 40 + 8 * k, 33 + k) for k in range(4)]
    wanted = [two_convs_in_torch(*c) for c in cases]
    failures = []

    def work(k):
        try:
            for _ in range(25):
                assert_bitwise(export.run(s, cases[k])[0], wanted[k])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_shapes_are_inferred():
    s = session(two_convs())
    assert s.get_outputs()[0].shape == ["N", "H", "W", 16]
    node = samples()["reduce_mask"]
    made = [(o.shape, o.type) for o in session(node.model()).get_outputs()]
    assert made == [
        ([9, 3], "tensor(int32)"),
        ([1], "tensor(int32)"),
        ([1], "tensor(int32)"),
        ([2, 3, 4], "tensor(int32)"),
    ]
    assert session(samples()["sparse_gather"].model()).get_outputs()[0].shape == [24, 8, 4, 4]


@pytest.mark.gpu
def test_cuda_graph_with_a_mask_per_run():
    if "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    nodes = onnx.load_from_string(two_convs())
    # Under a CUDA graph no node may run on the CPU: the plane is fixed, so its size is an attribute.
    graph = nodes.graph
    del graph.node[1:3]
    graph.node[1].input.pop()
    graph.node[1].attribute.append(helper.make_attribute("size", [48, 64, 48, 64]))
    s = export.session(nodes.SerializeToString(), ["CUDAExecutionProvider"], cuda_graph=True)
    buffers = two_convs_inputs("cuda", 2, 48, 64)
    out = torch.empty(2, 48, 64, 16, device="cuda")
    for density in (0.01, 0.5, 0.0, 1.0, 0.03, 0.002):
        for b, new in zip(buffers, two_convs_inputs("cuda", 2, 48, 64, density), strict=True):
            b.copy_(new)
        export.run(s, buffers, [out])
        torch.cuda.synchronize()
        assert_bitwise(out, two_convs_in_torch(*buffers))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cuda_graph_of_block_sparse_products(dtype, tmp_path):
    pytest.importorskip("onnxscript")
    if "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    layers = [BlockSparseLinear(256, 384, density=0.3), torch.nn.ReLU(), BlockSparseLinear(384, 40, block_size=16)]
    net, x = torch.nn.Sequential(*layers).to(dtype), torch.randn(70, 256, device="cuda").to(dtype)
    path = export.to_onnx(net, (x.cpu(),), tmp_path / "net.onnx")
    y = torch.empty(70, 40, device="cuda", dtype=dtype)
    call = export.Bound(export.session(path, ["CUDAExecutionProvider"], cuda_graph=True), [x], [y])
    net.cuda()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        call()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, net(x))


@pytest.mark.gpu
def test_no_copies_between_host_and_device(tmp_path):
    if "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    export.session(two_convs(), ["CUDAExecutionProvider", "CPUExecutionProvider"], options=options)
    assert [n.op_type for n in onnx.load(tmp_path / "optimised.onnx").graph.node if "Memcpy" in n.op_type] == []


# ---- malformed models
def broken(op, drop=(), **changes):
    """The sample of an op with attributes changed or dropped."""
    node = samples()[op]
    node.attributes = {k: v for k, v in {**node.attributes, **changes}.items() if k not in drop}
    return node


def with_input(op, at, value):
    node = samples()[op]
    node.inputs[at] = value
    return node


def without_output(op, at):
    node = samples()[op]
    node.dropped = at
    return node


MALFORMED = {
    "attribute missing": (
        lambda: broken("sparse_conv2d", drop=["bsize"]),
        r"sparse_conv2d: bsize: expected two ints, got no attribute",
    ),
    "three numbers": (lambda: broken("sparse_conv2d", padding=[1, 1, 1]), r"padding: expected 2 numbers, got 3"),
    "float for ints": (lambda: broken("sparse_conv2d", padding=1.5), r"padding: expected 2 numbers, got 0"),
    "string for an int": (lambda: broken("sparse_conv2d", groups="2"), r"groups: expected an int, got another type"),
    "int for a float": (lambda: broken("reduce_mask", tol=1), r"tol: expected a float, got another type"),
    "block size 0": (lambda: broken("reduce_mask", bsize=[0, 4]), r"grid: expected a block size of at least 1, got 0"),
    "block size 2^40": (
        lambda: broken("reduce_mask", bsize=[1 << 40, 4]),
        r"bsize: expected a number of 32 bits, got 1099511627776",
    ),
    "capacity -5": (lambda: broken("reduce_mask", capacity=-5), r"capacity: expected .*, got -5"),
    "capacity 2^40": (lambda: broken("reduce_mask", capacity=1 << 40), r"capacity: expected .*, got 1099511627776"),
    "bcount missing": (
        lambda: broken("reduce_mask", bstride=[2, 2]),
        r"bcount: expected two ints .*, got no attribute",
    ),
    "flag 2": (lambda: broken("sparse_gather", transpose=2), r"transpose: expected 0 or 1, got 2"),
    "stride 0": (lambda: broken("sparse_conv2d", stride=[0, 1]), r"stride, dilation: expected at least 1, got 0"),
    "groups 3": (lambda: broken("sparse_conv2d", groups=3), r"groups: expected a divisor .*, got 3"),
    "activation": (lambda: broken("sparse_conv2d", activation="tanh"), r"activation: expected .*, got 'tanh'"),
    "other bcount": (lambda: broken("sparse_gather", bcount=[5, 5]), r"block_map: expected int32\["),
    "overlap without add": (
        lambda: broken("sparse_scatter", add=0, bstride=[2, 2]),
        r"grid: expected blocks that do not overlap",
    ),
    "size missing": (lambda: broken("fringe", drop=["size"]), r"size: expected an attribute, or dynamic_size"),
    "other size": (lambda: broken("fringe", size=[40, 40, 40, 40]), r"producer_map: expected int32\["),
    "three sizes": (lambda: broken("fringe", size=[12, 15, 12]), r"size: expected height and width.*got 3"),
    "size 0": (lambda: broken("fringe", size=[12, 15, 0, 15]), r"size: expected 1 to 2\^29, got 0"),
    "window of five": (lambda: broken("fringe", window=[1] * 5), r"window: expected 10 numbers .*got 5"),
    "window too far": (lambda: broken("fringe", window=[1, 1, 1, 1, 0, 0, 1 << 30, 0, 1, 1]), r"window: lo, hi"),
    "rank of x": (lambda: with_input("sparse_conv2d", 0, torch.zeros(2, 12, 15)), r"x: expected 4 dimensions, got 3"),
    "channels": (
        lambda: with_input("sparse_conv2d", 1, torch.zeros(8, 3, 3, 5)),
        r"weight: expected .* input channels, got 5",
    ),
    "kernel beyond x": (
        lambda: with_input("sparse_conv2d", 1, torch.zeros(8, 33, 3, 8)),
        r"x: expected .* the dilated kernel, got",
    ),
    "bias length": (lambda: with_input("sparse_conv2d", 5, torch.zeros(7)), r"bias: expected 8 elements, got 7"),
    "residual shape": (lambda: with_input("sparse_conv2d", 6, torch.zeros(2, 12, 14, 8)), r"residual: shape"),
    "slopes": (lambda: with_input("sparse_conv2d", 7, torch.zeros(7)), r"slope: expected 8 elements, got 7"),
    "slopes of relu": (
        lambda: broken("sparse_conv2d", activation="relu"),
        r"slope: expected the activation leaky_relu",
    ),
    "fringe count": (lambda: with_input("sparse_conv2d", 9, torch.zeros(2, dtype=torch.int32)), r"fringe_count"),
    "width": (
        lambda: with_input("sparse_bottleneck2d", 2, torch.zeros(4, 3, 3, 5)),
        r"weight2: shape: expected .*, got \[4,5,3,3\]",
    ),
    "a bias of three": (
        lambda: with_input("sparse_bottleneck2d", 8, torch.zeros(3)),
        r"bias2: expected 4 elements, got 3",
    ),
    "base of a bottleneck": (
        lambda: with_input("sparse_bottleneck2d", 12, torch.zeros(2, 12, 15, 7)),
        r"out: shape: expected .*, got \[2,7,12,15\]",
    ),
    "pixels alone": (lambda: with_input("sparse_conv2d", 9, None), r"fringe: expected pixels and count, got one"),
    "base shape": (
        lambda: with_input("sparse_conv2d", 10, torch.zeros(2, 12, 15, 7)),
        r"out: shape: expected .*, got \[2,7,12,15\]",
    ),
    "base and zeros": (lambda: broken("sparse_conv2d", zero_outside=1), r"base: expected none with zero_outside=1"),
    "indices [n,2]": (
        lambda: with_input("sparse_gather", 1, torch.zeros(24, 2, dtype=torch.int32)),
        r"indices: expected int32\[24,3\], got int32\[24,2\]",
    ),
    "count of two": (
        lambda: with_input("sparse_gather", 2, torch.zeros(2, dtype=torch.int32)),
        r"count: expected int32\[1\], got int32\[2\]",
    ),
    "batch": (
        lambda: with_input("sparse_gather", 0, torch.zeros(3, 12, 15, 8)),
        r"block_map: expected the images of x, 3, got 2",
    ),
    "output without a name": (
        lambda: without_output("reduce_mask", 2),
        r"output 2(: expected a name| is marked single)",
    ),
    "int64 indices": (lambda: with_input("sparse_gather", 1, torch.zeros(24, 3, dtype=torch.int64)), r"int64"),
    "half weight": (
        lambda: with_input("sparse_conv2d", 1, torch.zeros(8, 3, 3, 8).half()),
        r"no kernel def matches|sparse_conv2d",
    ),
    "double mask": (lambda: with_input("reduce_mask", 0, torch.zeros(1, 4, 4).double()), r"double"),
    "more rows than capacity": (lambda: with_input("sparse_scatter", 0, torch.zeros(25, 4, 4, 8)), r"24 rows, got 25"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_models_are_errors(name, dynamic):
    make, text = MALFORMED[name]
    node = make()
    with pytest.raises(Exception, match=r".") as caught:
        node.run(dynamic=dynamic)
    assert is_ort_error(caught.value), repr(caught.value)
    assert re.search(text, str(caught.value)), str(caught.value)


OPS = [op for op in schemas.OPS.values() if op.inputs[1:]]  # of a map alone (pack_tokens) any batch is right
MAPS = [(op.name, at) for op in OPS for at, (name, _) in enumerate(op.inputs) if "_map" in name]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("op", "at"), MAPS)
def test_a_block_map_of_another_batch(op, at, images):
    """Where the kernel does not read the map it still says of how many images the list is."""
    node = samples()[op]
    node.inputs[at] = torch.full((images, *node.inputs[at].shape[1:]), -1, dtype=torch.int32)
    with pytest.raises(Exception, match=r"_map: ") as caught:
        node.run(dynamic=True)
    assert is_ort_error(caught.value), repr(caught.value)


def test_indices_out_of_range_are_skipped(device):
    """Device data cannot be checked without waiting for the device: bad rows and counts do nothing."""
    node = samples(device)["sparse_scatter"]
    good = random_active(BlockGrid.cover((12, 15), 4), 2, 1.0, device)
    bad = good.indices.clone()
    nowhere = [[-1, 0, 0], [2, 0, 0], [0, 3, 0], [0, 0, 4], [1 << 30, 1, 1], [0, -7, 0], [0, 0, -1], [9, 9, 9]]
    bad[::3] = torch.tensor(nowhere, dtype=torch.int32, device=device)
    count = torch.tensor([1 << 30], dtype=torch.int32, device=device)
    node.inputs[1:4] = [bad, count, good.block_map]
    node.attributes |= {"add": 0}
    base = nchw(node.inputs[4])
    active = ActiveBlocks(bad, count, count, good.block_map, good.grid)
    want = reference.sparse_scatter(nchw(node.inputs[0]), active, base)
    assert_bitwise(nchw(node.run(device)[0]), want)


def test_fuzz():
    """Over a thousand random models, in a process of their own, inputs and outputs beside guard pages."""
    script = Path(__file__).parents[1] / "tools/fuzz_ort.py"
    root = Path(sbnet.__file__).parent.parent
    code = (
        f"import sys; sys.path[:0] = [{str(root)!r}, {str(script.parents[1])!r}]; "
        f"import runpy; sys.argv = ['fuzz_ort.py', '1200']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(interpreter(code), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["models"] >= 1000
    assert result["ran"] >= 100
    assert result["refused"] >= 300
    assert result["unclear"] == []
