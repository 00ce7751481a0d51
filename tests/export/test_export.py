"""sbnet.export: modules to ONNX files that onnx.checker accepts and ONNX Runtime runs as torch does."""

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import sbnet
from sbnet import ActiveBlocks, BlockGrid, export
from sbnet.export import convert, schemas, translate
from support.helpers import FLOATS, assert_as_accurate_as_torch, assert_bitwise, random_active, tensor
from support.ort_models import PROVIDER, samples, torch_ops

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and "CUDAExecutionProvider" not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu and a libsbnet.so with CUDA")
    return request.param


def ops_of(path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def attributes_of(path, op: str, name: str) -> list:
    nodes = [n for n in onnx.load(path).graph.node if n.op_type == op]
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in nodes]
    return [a.get(name) for a in found]


def same_as_torch(path, module, inputs, device="cpu"):
    for error in export.verify(path, module, inputs, [PROVIDER[device]], quiet=True):
        assert error.equal, error


# ---- schemas
def test_every_op_has_a_schema_and_a_translation():
    assert set(schemas.OPS) == torch_ops()
    several = {"blocksparse_conv1x1"}  # gather, product and scatter
    assert {op._schema.name.split("::")[1] for op in translate.table()} == torch_ops() | several


def test_schemas_are_those_of_the_library():
    """Names, order and kind of inputs and outputs, and the attributes that are read, as the library itself says."""
    function = ctypes.CDLL(export.library_path()).sbnet_ort_ops
    function.restype = ctypes.c_char_p
    wanted = {}
    for op in schemas.OPS.values():
        inputs, outputs = (", ".join(name for name, _ in arguments) for arguments in (op.inputs, op.outputs))
        wanted[f"{op.name}({inputs}) -> {outputs}"] = set(op.attributes)
    lines = [line.split(":") for line in function().decode().splitlines()]
    assert {signature: set(attributes.split()) for signature, attributes in lines} == wanted


# ONNX's name of an argument of a torch op, where it has another; () where it has none
ARGUMENTS = {
    "grid": ("bsize", "bstride", "boffset", "bcount"),
    "producer_grid": tuple(f"producer_b{k}" for k in ("size", "stride", "offset", "count")),
    "consumer_grid": tuple(f"consumer_b{k}" for k in ("size", "stride", "offset", "count")),
    "activation_param": ("negative_slope",),
    "planes": ("bsizes", "sizes", "dynamic_sizes"),
    "size": ("size", "dynamic_size"),
    "consumer_size": (),  # of the plane that consumer_map tells
    "layout": ("in_features", "out_features"),
    "tables": ("coords",),
    "rule": ("diagonal", "band", "prefix", "stride", "phases", "block_size"),
    **dict.fromkeys(("seed", "dropout", "deterministic"), ()),  # of training
}
# of ONNX alone: what the exporter's passes fill in
PASSES = {"fringe_pixels", "fringe_count", "base", "zero_outside"}


@pytest.mark.parametrize("name", sorted(schemas.OPS))
def test_every_argument_of_torchs_op_is_one_of_onnxs(name):
    op = schemas.OPS[name]
    torchs = {
        n for a in getattr(torch.ops.sbnet, name).default._schema.arguments for n in ARGUMENTS.get(a.name, (a.name,))
    }
    onnxs = {n.rstrip("?*") for n, _ in op.inputs} | set(op.attributes)
    assert torchs <= onnxs
    assert onnxs - torchs <= PASSES


@pytest.mark.parametrize("op", sorted(schemas.OPS))
def test_samples_pass_the_checker(op, tmp_path):
    schemas.register()
    node = samples()[op]
    model = onnx.load_from_string(node.model())
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True)
    got = [[d.dim_value for d in o.type.tensor_type.shape.dim] for o in inferred.graph.output]
    assert got == [list(t.shape) for t in node.run()]
    onnx.save(inferred, tmp_path / "m.onnx")
    export.check(tmp_path / "m.onnx")
    names = [a.name for a in model.graph.node[0].attribute]
    required = next((n for n in names if n.endswith(("bsize", "bsizes", "in_features", "scale"))), None)
    if required is None:
        return
    inferred.graph.node[0].attribute.pop(names.index(required))
    onnx.save(inferred, tmp_path / "m.onnx")
    with pytest.raises(onnx.checker.ValidationError, match=required):
        export.check(tmp_path / "m.onnx")


# ---- every op
LAYOUT = sbnet.BlockLayout([[1, 1], [1, 1]], 8, in_features=16, out_features=10)


class OneOp(nn.Module):
    """One functional op of torch.ops.sbnet behind its Python name."""

    def __init__(self, op: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.op = op
        self.weight = nn.Parameter((tensor((12, 8, 3, 3)) / 9).to(dtype))
        self.bias = nn.Parameter(tensor((12,)).to(dtype))

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
        halo = active.grid.conv_input(3, 1, 1)
        match self.op:
            case "reduce_mask":
                return active
            case "sparse_gather":
                return sbnet.sparse_gather(x, active), sbnet.sparse_gather(x, active, True, grid=halo)
            case "sparse_scatter":
                blocks = sbnet.sparse_gather(x, active)
                base = sbnet.sparse_fill(x, active, 3.0)
                return sbnet.sparse_scatter(blocks, active, base), sbnet.sparse_scatter(blocks, active, x, add=True)
            case "sparse_fill":
                return sbnet.sparse_fill(x, active, -2.0)
            case "fringe":
                return sbnet.fringe(active, active, x.shape[2:], 3, 1, 1)
            case "mask_pyramid":
                height, width = x.shape[2:]
                half = ((height + 1) // 2, (width + 1) // 2)
                fringes = [(0, [(1, 3, 2, 1), (0, 3, 1, 1)]), (1, [(1, 3, 1, 1)])]
                return sbnet.mask_pyramid(mask, [(height, width, 8), (*half, 8)], 0.5, fringes)
            case "sparse_max_pool2d":
                return sbnet.sparse_max_pool2d(sbnet.sparse_max_pool2d(x, active, 3, 1, 1), active, (1, 5), 1, (0, 2))
            case "sparse_avg_pool2d":
                y = sbnet.sparse_avg_pool2d(x, active, (3, 1), 1, (1, 0), count_include_pad=False)
                return sbnet.sparse_avg_pool2d(y, active, 3, 1, 1, divisor_override=4)
            case "sparse_bottleneck2d":
                narrow = self.weight[:8, :, :1, :1], self.weight[:8], self.weight[:8, :, 1:2, 1:2]
                y = sbnet.sparse_bottleneck2d(x, narrow, [self.bias[:8], None, self.bias[4:]], active)
                return y, sbnet.sparse_bottleneck2d(y, narrow, None, active, activation="silu")
            case "sparse_conv2d":
                y = sbnet.sparse_conv2d(x, self.weight, self.bias, active, padding=1, activation="silu")
                return y, sbnet.sparse_conv2d(x, self.weight, None, active, padding=1, residual=y)
            case "sparse_conv_transpose2d":
                y = sbnet.sparse_conv_transpose2d(x, self.weight[:8], self.bias[:8], active, padding=1)
                fine = sbnet.reduce_mask(
                    mask.repeat_interleave(2, 1).repeat_interleave(2, 2),
                    BlockGrid.cover((2 * x.shape[2], 2 * x.shape[3]), 8),
                )
                options = {"stride": 2, "padding": 1, "output_padding": 1, "activation": "silu"}
                return y, sbnet.sparse_conv_transpose2d(y, self.weight[:8], None, fine, **options)
            case "blocksparse_matmul":
                rows, blocks = torch.cat([x, x], 1).permute(0, 2, 3, 1), self.weight.flatten()[:256].view(4, 8, 8)
                gate = self.bias[:4].float().abs()
                y = sbnet.blocksparse_matmul(rows, blocks, LAYOUT, gate, self.bias[:10], "silu")
                return y, sbnet.blocksparse_matmul(y, blocks, LAYOUT, transposed=True)
            case "pack_attention_blocks" | "block_attention":
                q, k, v = (
                    t.flatten(2).mT.unflatten(-1, (2, 16)).transpose(1, 2) for t in 3 * [torch.cat([x, x, x, x], 1)]
                )
                blocks = mask[:, None, :5, :5].contiguous()
                if self.op == "pack_attention_blocks":
                    return torch.ops.sbnet.pack_attention_blocks(blocks)
                layouts = sbnet.AttentionLayout.local(100), sbnet.AttentionLayout.causal(5, prefix=3)
                out, lse = sbnet.block_attention(q, k, v, layouts[0], return_lse=True)
                return out, lse, sbnet.block_attention(out, k, v, layouts[1])
        raise AssertionError(self.op)


def plane_inputs(device, dtype=torch.float32, n=2, height=32, width=40, density=0.03):
    x = tensor((n, 8, height, width), dtype, device).contiguous(memory_format=torch.channels_last)
    return x, torch.rand(n, height, width, device=device) < density


def planes():
    n, h, w = Dim("N"), Dim("H", min=2, max=4096), Dim("W", min=2, max=4096)
    return {0: n, 2: h, 3: w}, {0: n, 1: h, 2: w}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", sorted(schemas.OPS))
def test_op(device, op, dtype, tmp_path):
    module = OneOp(op, dtype).to(device)
    path = export.to_onnx(module, plane_inputs(device, dtype), tmp_path / "m.onnx")
    for density in (0.03, 0.0, 1.0):
        same_as_torch(path, module, plane_inputs(device, dtype, density=density), device)


class EveryArgument(nn.Module):
    """Each argument of each op away from its default, and from its neighbour on the other axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor((12, 4, 3, 2)) / 5)
        self.bias = nn.Parameter(tensor((12,)))

    def forward(self, x, mask):
        scale = x[:, 0].abs()
        grid = BlockGrid((7, 5), (4, 6), (-2, 1), (9, 6))  # overlaps down the plane, leaves gaps across it
        most = sbnet.reduce_mask(scale, grid, 2.0, capacity=30)
        average = sbnet.reduce_mask(scale, grid, 0.8, avgpool=True)
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], (8, 4)), 0.25)
        stack = sbnet.sparse_gather(x, most, tail="undefined")
        rows = torch.arange(30, device=x.device) < most.count
        stack = torch.where(rows[:, None, None, None], stack, 0.0)
        halo = sbnet.sparse_gather(x, active, True, grid=active.grid.conv_input(3, 1, 1))
        wide = {"stride": (1, 2), "padding": (3, 1), "dilation": (3, 1), "groups": 2}
        out = sbnet.conv_output_size(x.shape[2:], (3, 2), *list(wide.values())[:3])
        lists = sbnet.mask_pyramid(mask, [(*out, (5, 3)), (*out, 6)], 0.25, [(0, [(1, (3, 5), 1, (1, 2)), (0, 1)])])
        leaky = {"activation": "leaky_relu", "negative_slope": 0.3}
        y = sbnet.sparse_conv2d(x, self.weight, self.bias, lists.planes[0], **wide, **leaky)
        largest = (3, 2), (2, 1), (1, 0), (1, 2), True
        mean = (3, 2), (2, 1), (1, 0), True
        size = [sbnet.pool_output_size(x.shape[2:], *a) for a in (largest, (*mean[:3], 1, True))]
        pools = [sbnet.reduce_mask(scale[:, : s[0], : s[1]], BlockGrid.cover(s, (4, 7)), 1.5) for s in size]
        seen = sbnet.fringe(active, lists.planes[0], x.shape[2:], (3, 2), *list(wide.values())[:3], capacity=300)
        return (
            most,
            average,
            active,
            stack,
            halo,
            sbnet.sparse_scatter(stack, most, x, add=True),
            sbnet.sparse_fill(x, active, float("inf")),
            lists,
            y,
            sbnet.sparse_max_pool2d(x, pools[0], *largest),
            sbnet.sparse_avg_pool2d(x, pools[1], *mean, False),
            sbnet.sparse_avg_pool2d(x, pools[1], *mean, True, 5),
            seen,
        )


def test_every_argument_arrives(device, tmp_path):
    module = EveryArgument().to(device)
    x, _ = plane_inputs(device)
    mask = torch.rand(2, *x.shape[2:], device=device).pow(60)  # pixels between 0.25 and 0.5 too
    path = export.to_onnx(module, (x, mask), tmp_path / "m.onnx")
    same_as_torch(path, module, (x, mask), device)


@pytest.mark.parametrize("op", sorted(schemas.OPS))
def test_op_of_dynamic_batch_height_and_width(device, op, tmp_path):
    module = OneOp(op, torch.float32).to(device)
    path = export.to_onnx(module, plane_inputs(device, n=1), tmp_path / "m.onnx", planes())  # 1: only an example
    shape = [d.dim_param for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]
    assert shape == ["N", "", "H", "W"]
    for size in ((2, 32, 40), (1, 17, 9), (3, 64, 33)):
        same_as_torch(path, module, plane_inputs(device, n=size[0], height=size[1], width=size[2]), device)


def test_a_list_as_argument(device, tmp_path):
    class Module(nn.Module):
        def forward(self, x, active: ActiveBlocks):
            return sbnet.sparse_gather(x, active, True)

    x, _ = plane_inputs(device)
    active = random_active(BlockGrid((6, 5), (9, 5), (-2, 1), (3, 7)), 2, 0.4, device)
    path = export.to_onnx(Module(), (x, active), tmp_path / "m.onnx")
    same_as_torch(path, Module(), (x, active), device)


# ---- layout
class Chain(nn.Module):
    """Convolutions with what stands between them in networks; `dense`: ends in ops that know nothing of blocks."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        self.a, self.b, self.c, self.d = (
            nn.Parameter(tensor(s) / (s[1] * s[2] * s[3]) ** 0.5)
            for s in ((16, 8, 3, 3), (16, 16, 3, 3), (16, 32, 1, 1), (24, 16, 3, 3))
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
        half = sbnet.reduce_mask(
            F.max_pool2d(mask[:, None].float(), 2)[:, 0], BlockGrid.cover((x.shape[2] // 2, x.shape[3] // 2), 8)
        )
        a = sbnet.sparse_conv2d(x, self.a, None, active, padding=1, activation="relu")
        b = F.relu(sbnet.sparse_conv2d(a, self.b, None, active, padding=1) * 0.5 + a)
        c = sbnet.sparse_conv2d(torch.cat([a, b], 1), self.c, None, active, activation="silu")
        d = sbnet.sparse_conv2d(c, self.d, None, half, stride=2, padding=1, activation="relu")
        return self.head(d.mean((2, 3))) if self.dense else d


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_transposes_at_the_boundary_only(device, dense, dynamic, tmp_path):
    module = Chain(dense).to(device)
    inputs = plane_inputs(device)
    dims = None
    if dynamic:
        h, w = Dim("H2", min=4, max=512), Dim("W2", min=4, max=512)
        dims = {0: Dim("N"), 2: 2 * h, 3: 2 * w}, {0: Dim("N"), 1: 2 * h, 2: 2 * w}
    path = export.to_onnx(module, inputs, tmp_path / "m.onnx", dims)
    ops = ops_of(path)
    assert ops.count("sparse_conv2d") == 4
    assert ops.count("Transpose") == 2, ops  # x in; the last convolution's output out
    for density in (0.03, 0.2, 0.0, 1.0):
        inputs = plane_inputs(device, density=density)
        if dense:
            (got,) = export.run(export.session(path, [PROVIDER[device]]), inputs)
            exact = Chain(True).double().to(device)
            exact.load_state_dict(module.state_dict())
            with torch.no_grad():
                h = exact.head(Chain.forward(_body(module), *inputs).double().mean((2, 3)))
                assert_as_accurate_as_torch(got, module(*inputs), h, "dense head")
        else:
            same_as_torch(path, module, inputs, device)


def _body(module: Chain) -> Chain:
    body = Chain(False).to(module.a.device)
    body.load_state_dict(module.state_dict())
    return body


class Residual(nn.Module):
    """Two bottlenecks: 1x1, 3x3, 1x1 with the residual added in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            tensor((k, c, s, s)) / (c * s * s) ** 0.5
            for k, c, s in [(16, 8, 1), (4, 16, 1), (4, 4, 3), (16, 4, 1), (4, 16, 1), (4, 4, 3), (16, 4, 1)]
        )

    def forward(self, x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))

        def conv(t, k, residual=None):
            w = self.weights[k]
            return sbnet.sparse_conv2d(
                t, w, None, active, padding=w.shape[2] // 2, activation="relu", residual=residual
            )

        y = conv(x, 0)
        for k in (1, 4):
            y = conv(conv(conv(y, k), k + 1), k + 2, y)
        return y


def test_zeros_only_where_they_are_read(device, tmp_path):
    """Inside the graph nothing is filled: the 1x1s before a 3x3 clear its fringe, others nothing; the output is."""
    module = Residual().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx")
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [0, 0, 0, 0, 0, 0, 1]
    convs = [n for n in onnx.load(path).graph.node if n.op_type == "sparse_conv2d"]
    assert [k for k, n in enumerate(convs) if len(n.input) > 7 and n.input[7]] == [1, 4]
    assert ops_of(path).count("fringe") == 1
    assert ops_of(path).count("Transpose") == 2
    s = export.session(path, [PROVIDER[device]])
    for density in (0.5, 0.03, 1.0, 0.01, 0.0):  # what a run leaves behind must not show in the next one
        inputs = plane_inputs(device, density=density)
        assert_bitwise(export.run(s, inputs)[0], module(*inputs).detach())


def test_bottlenecks_among_convolutions(device, tmp_path):
    """A bottleneck reads its active blocks alone: what feeds it on the same blocks needs neither fills nor fringes."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            shapes = (8, 8, 3, 3), (4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1)
            self.weights = nn.ParameterList(tensor(s, torch.float32, "cpu") / 6 for s in shapes)

        def forward(self, x, mask, finer):
            active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
            other = sbnet.reduce_mask(finer, BlockGrid.cover(x.shape[2:], 4))
            conv, *three = self.weights
            y = sbnet.sparse_conv2d(x, conv, None, active, padding=1)
            y = sbnet.sparse_bottleneck2d(y, three, None, active)
            y = sbnet.sparse_bottleneck2d(y, three, None, active)
            y = sbnet.sparse_bottleneck2d(y, three, None, other)
            return sbnet.sparse_conv2d(y, conv, None, other, padding=1)

    def inputs(threshold):
        x = tensor((2, 8, 38, 51), torch.float32, device).to(memory_format=torch.channels_last)
        return x, *(torch.rand(2, 38, 51, device=device) > threshold for _ in range(2))

    module = Module().to(device)
    path = export.to_onnx(module, inputs(0.99), tmp_path / "m.onnx")
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [0, 1]
    assert attributes_of(path, "sparse_bottleneck2d", "zero_outside") == [0, 0, 0]
    nodes = [n for n in onnx.load(path).graph.node if n.op_type == "sparse_bottleneck2d"]
    assert [len(n.input) > 10 and bool(n.input[10]) for n in nodes] == [False, True, True]
    s = export.session(path, [PROVIDER[device]])
    for threshold in (-1.0, 0.99, 0.97, 2.0, 0.99):  # what a run leaves behind must not show in the next one
        given = inputs(threshold)
        assert_bitwise(export.run(s, given)[0], module(*given).detach())


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pools_among_convolutions(device, ceil_mode, tmp_path):
    """A pool reads a halo of its input and is read with one: fringes, no fills."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(tensor((8, 8, 3, 3), torch.float32, "cpu") / 8 for _ in range(2))

        def forward(self, x, *masks):
            fine, coarse = (
                sbnet.reduce_mask(mask, BlockGrid.cover(mask.shape[1:], block))
                for mask, block in zip(masks, (8, 4), strict=True)
            )
            y = sbnet.sparse_conv2d(x, self.weights[0], None, fine, padding=1)
            y = sbnet.sparse_max_pool2d(y, coarse, 3, 2, 1, ceil_mode=ceil_mode)
            y = sbnet.sparse_avg_pool2d(y, coarse, 3, 1, 1)
            return sbnet.sparse_conv2d(y, self.weights[1], None, coarse, padding=1)

    x = tensor((2, 8, 38, 51), torch.float32, device).to(memory_format=torch.channels_last)
    planes = [(38, 51), sbnet.pool_output_size((38, 51), 3, 2, 1, 1, ceil_mode)]

    def inputs(threshold):
        return x, *(torch.rand(2, *size, device=device) > threshold for size in planes)

    module = Module().to(device)
    path = export.to_onnx(module, inputs(0.99), tmp_path / "m.onnx")
    assert ops_of(path).count("fringe") == 2  # both tensors of the coarse plane share one
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [0, 1]
    assert attributes_of(path, "sparse_max_pool2d", "zero_outside") == [0]
    assert attributes_of(path, "sparse_avg_pool2d", "zero_outside") == [0]
    s = export.session(path, [PROVIDER[device]])
    for threshold in (-1.0, 0.99, 0.97, 2.0, 0.99):  # what a run leaves behind must not show in the next one
        given = inputs(threshold)
        assert_bitwise(export.run(s, given)[0], module(*given).detach())


class TwoPlanes(nn.Module):
    """A tensor that a 3x3 and a 1x1 convolution of stride 2 read, and one that its own plane reads with a halo."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.weights = nn.ParameterList(tensor((8, 8, k, k), torch.float32, "cpu") / 8 for k in (3, 3, 3, 1))

    def forward(self, x, mask):
        (height, width), (first, second, down, short) = self.size, self.weights
        planes = [(height, width, 8), ((height + 1) // 2, (width + 1) // 2, 4)]
        fine, coarse = sbnet.mask_pyramid(mask, planes).planes
        y = sbnet.sparse_conv2d(x, first, None, fine, padding=1, activation="relu")
        y = sbnet.sparse_conv2d(y, second, None, fine, padding=1)
        z = sbnet.sparse_conv2d(y, down, None, coarse, stride=2, padding=1)
        return sbnet.sparse_conv2d(y, short, None, coarse, stride=2, residual=z)


def test_fringes_of_a_pyramid_are_listed_by_it(device, tmp_path):
    """One node lists all blocks and fringes, the union of two readers too."""
    size = (37, 50)
    module = TwoPlanes(size).to(device)
    x = tensor((2, 8, *size), torch.float32, device).to(memory_format=torch.channels_last)
    mask = torch.rand(2, *size, device=device) > 0.995
    path = export.to_onnx(module, (x, mask), tmp_path / "m.onnx")
    assert ops_of(path).count("mask_pyramid") == 1
    assert ops_of(path).count("fringe") == 0
    filled = [bool(z) for z in attributes_of(path, "sparse_conv2d", "zero_outside")]
    assert filled == [False, False, False, True]
    s = export.session(path, [PROVIDER[device]])
    for threshold in (-1.0, 0.995, 0.9, 2.0, 0.99):  # what a run leaves behind must not show in the next one
        inputs = x, torch.rand(2, *size, device=device) > threshold
        assert_bitwise(export.run(s, inputs)[0], module(*inputs).detach())


def test_a_mask_made_from_the_features_themselves(device, tmp_path):
    """The fringe of a tensor cannot be known before it, where its consumer's mask is made from it. Here nobody but
    layers reads the tensor, which would else be cleared in its fringe alone."""

    class Module(Chain):
        def forward(self, x, mask):
            active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
            a = sbnet.sparse_conv2d(x, self.a, None, active, padding=1)
            size = sbnet.sparse_conv2d(a, torch.ones_like(self.b[:1, :, :1, :1]), None, active)
            again = sbnet.reduce_mask(size.abs().amax(1), BlockGrid.cover(x.shape[2:], 8), 3.0)
            return sbnet.sparse_conv2d(a, self.b, None, again, padding=1)

    module = Module().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx")
    assert attributes_of(path, "sparse_conv2d", "zero_outside") == [1, 1, 1]
    assert "fringe" not in ops_of(path)
    same_as_torch(path, module, plane_inputs(device), device)


class PaperBlock(nn.Module):
    """SBNet's own: gather with the halo, VALID convolutions of the stack, scatter-add."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x, mask):
        grid = BlockGrid.cover(x.shape[2:], 8)
        active = sbnet.reduce_mask(mask, grid)
        stack = sbnet.sparse_gather(x, active, True, grid=grid.conv_input(3, 1, 1))
        return sbnet.sparse_scatter(F.relu(self.conv(stack)), active, x, grid, add=True)


def test_stacks_are_transposed_while_they_are_copied(device, tmp_path):
    module = PaperBlock().to(device)
    path = export.to_onnx(module, plane_inputs(device), tmp_path / "m.onnx")
    assert ops_of(path).count("Transpose") == 2
    assert attributes_of(path, "sparse_gather", "transpose") == [1]
    assert attributes_of(path, "sparse_scatter", "transpose") == [1]
    inputs = plane_inputs(device)
    (got,) = export.run(export.session(path, [PROVIDER[device]]), inputs)
    exact = PaperBlock().to(device)
    exact.load_state_dict(module.state_dict())
    with torch.no_grad():
        x64 = inputs[0].double()
        active = sbnet.reduce_mask(inputs[1], BlockGrid.cover((32, 40), 8))
        full = x64 + F.relu(F.conv2d(x64, module.conv.weight.double(), module.conv.bias.double(), padding=1))
        want = torch.where(active.pixel_mask((32, 40)), full, x64)
        assert_as_accurate_as_torch(got, module(*inputs), want)


# ---- files
@pytest.mark.parametrize("opset", [18, 20, 23, 26])
def test_opsets(opset, tmp_path):
    module = Chain()
    path = export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx", opset_version=opset)
    assert {o.domain: o.version for o in onnx.load(path).opset_import} == {"": opset, "sbnet": 1}
    same_as_torch(path, module, plane_inputs("cpu"))


def test_large_weights_go_into_a_second_file(tmp_path, monkeypatch):
    module = Chain()
    assert not (export.to_onnx(module, plane_inputs("cpu"), tmp_path / "a.onnx").parent / "a.onnx.data").exists()
    monkeypatch.setattr(convert, "INLINE_BYTES", 1000)
    path = export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size > 1000
    assert path.stat().st_size < (tmp_path / "a.onnx").stat().st_size
    same_as_torch(path, module, plane_inputs("cpu"))


def test_names(tmp_path):
    path = export.to_onnx(
        Chain(), plane_inputs("cpu"), tmp_path / "m.onnx", input_names=["image", "mask"], output_names=["features"]
    )
    s = export.session(path)
    assert [v.name for v in s.get_inputs()] == ["image", "mask"]
    assert [v.name for v in s.get_outputs()] == ["features"]


# ---- errors
def module_of(function):
    class Module(nn.Module):
        def forward(self, x, mask):
            return function(x, mask)

    return Module()


def test_in_place_ops_are_refused(tmp_path):
    def conv(x, mask):
        active = sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8))
        out = torch.empty_like(x)
        sbnet.sparse_conv2d_(x, torch.ones(8, 8, 1, 1), None, active, out)
        return out

    def fill(x, mask):
        return sbnet.sparse_fill_(x * 2, sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8)))

    for function, name in ((conv, "sparse_conv2d"), (fill, "sparse_fill")):
        with pytest.raises(export.ExportError, match=rf"{name}_ works in place .* use {name} ") as caught:
            export.to_onnx(module_of(function), plane_inputs("cpu"), tmp_path / "m.onnx")
        assert "test_export.py" in str(caught.value), "does not say where"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda x, mask: sbnet.reduce_mask(mask, BlockGrid(8, 8, 0, (x.shape[2] // 8, x.shape[3] // 8))).count,
            "grid: a block count .*BlockGrid.cover",
        ),
        (
            lambda x, mask: sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8), capacity=x.shape[0] * 10).count,
            "capacity: .*depends on a dynamic",
        ),
    ],
)
def test_dynamic_attributes_are_refused(function, text, tmp_path):
    with pytest.raises(export.ExportError, match=text):
        export.to_onnx(module_of(function), plane_inputs("cpu"), tmp_path / "m.onnx", planes())


def test_other_errors(tmp_path):
    with pytest.raises(export.ExportError, match="opset_version: 27"):
        export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx", opset_version=27)
    with pytest.raises(ValueError, match="cuda_graph"):
        export.session(tmp_path / "m.onnx", ["CPUExecutionProvider"], cuda_graph=True)
    path = export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="inputs: 1 tensors"):
        export.run(export.session(path), [torch.zeros(1)])
    with pytest.raises(TypeError, match="inputs: ndarray, ndarray; tensors in the model's order are wanted"):
        export.run(export.session(path), [t.numpy() for t in plane_inputs("cpu")])
    with pytest.raises(ValueError, match=r"providers: \['Other'\]; this ONNX Runtime has"):
        export.session(path, ["Other"])
    with pytest.raises(TypeError, match="module: function; an nn.Module is wanted"):
        export.to_onnx(lambda x: x, plane_inputs("cpu"), tmp_path / "m.onnx")
    with pytest.raises(AttributeError, match="no attribute"):
        _ = export.nothing


@pytest.mark.parametrize(
    "lists",
    [
        lambda mask: sbnet.reduce_mask(mask.double(), BlockGrid.cover(mask.shape[1:], 8)),
        lambda mask: sbnet.mask_pyramid(mask.double(), [(*mask.shape[1:], 8)]).planes[0],
    ],
    ids=["reduce_mask", "mask_pyramid"],
)
def test_masks_of_doubles_are_refused(lists, tmp_path):
    module = module_of(lambda x, mask: sbnet.sparse_fill(x, lists(mask)))
    with pytest.raises(export.ExportError, match="mask: torch.float64; bool, uint8"):
        export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx")


def test_sizes_that_follow_from_values_are_refused(tmp_path):
    def trimmed(x, mask):
        return sbnet.sparse_gather(x, sbnet.reduce_mask(mask, BlockGrid.cover(x.shape[2:], 8)).trim())

    with pytest.raises(export.ExportError, match="a fixed capacity"):
        export.to_onnx(module_of(trimmed), plane_inputs("cpu"), tmp_path / "m.onnx")


def test_session_options_serve_many_sessions(tmp_path):
    import onnxruntime

    path, options = export.to_onnx(Chain(), plane_inputs("cpu"), tmp_path / "m.onnx"), onnxruntime.SessionOptions()
    for _ in range(2):
        assert export.run(export.session(path, ["CPUExecutionProvider"], options=options), plane_inputs("cpu"))


def test_bound_tensors(device, tmp_path):
    """A call runs on what the bound tensors hold by then; only tensors that can be read in place are taken."""
    module = Chain().to(device)
    x, mask = plane_inputs(device)
    x = x.contiguous()
    path = export.to_onnx(module, (x, mask), tmp_path / "m.onnx")
    s, y = export.session(path, [PROVIDER[device]]), torch.full((2, 24, 16, 20), float("nan"), device=device)
    call = export.Bound(s, [x, mask], [y])
    for density in (0.03, 1.0, 0.0):
        x.normal_()
        mask.copy_(torch.rand_like(x[:, 0]) < density)
        assert call()[0] is y
        assert_bitwise(y, module(x.to(memory_format=torch.channels_last), mask).detach())  # as inside the graph
    with pytest.raises(ValueError, match="contiguous"):
        export.Bound(s, [x.mT, mask], [y])
    with pytest.raises(ValueError, match="on meta"):
        export.Bound(s, [x.to("meta"), mask], [y])
    with pytest.raises(ValueError, match="to meta"):
        export.Bound(s, [x, mask], [y.to("meta")])
    with pytest.raises(ValueError, match="outputs: 2 tensors"):
        export.Bound(s, [x, mask], [y, y])


@pytest.mark.parametrize(
    ("types", "given", "want"),
    [
        (["tensor(float)", "tensor(bool)"], {}, "0"),
        (["tensor(float16)", "tensor(bool)"], {}, "1"),
        (["tensor(bfloat16)"], {}, "1"),
        (["tensor(float16)", "tensor(float)"], {}, "0"),
        (["tensor(int32)"], {}, "0"),
        (["tensor(float16)"], {"use_tf32": "0"}, "0"),
        (["tensor(float)"], {"use_tf32": "1"}, "1"),
    ],
)
def test_use_tf32(types, given, want, monkeypatch):
    """Off for float32's sake; off, it would keep convolutions of halves off the tensor cores."""

    class Session:
        def __init__(self, model, options, providers):
            self.options = dict(providers)["CUDAExecutionProvider"]

        def get_inputs(self):
            return [SimpleNamespace(type=t) for t in types]

    class Options:
        def register_custom_ops_library(self, path):
            pass

    runtime = SimpleNamespace(
        InferenceSession=Session, SessionOptions=Options, get_available_providers=lambda: ["CUDAExecutionProvider"]
    )
    monkeypatch.setattr(export.runtime, "_onnxruntime", lambda: runtime)
    made = export.session(b"", [("CUDAExecutionProvider", given)], cuda_graph=True)
    assert made.options == {"use_tf32": want, "enable_cuda_graph": "1"}


def test_training_mode_is_kept(tmp_path):
    module = Chain().train()
    export.to_onnx(module, plane_inputs("cpu"), tmp_path / "m.onnx")
    assert module.training


def test_verify_prints_and_finds_a_difference(tmp_path, capsys):
    module = Chain()
    inputs = plane_inputs("cpu")
    path = export.to_onnx(module, inputs, tmp_path / "m.onnx")
    (error,) = export.verify(path, module, inputs, ["CPUExecutionProvider"])
    assert error.equal
    assert error.shape == (2, 24, 16, 20)
    assert "same bits" in capsys.readouterr().out
    with torch.no_grad():
        module.d += 0.01
    (error,) = export.verify(path, module, inputs, ["CPUExecutionProvider"])
    assert not error.equal
    assert 0 < error.rms < error.largest


def test_library_path():
    assert Path(export.library_path()).name == "libsbnet.so"
    assert Path(export.library_path()).is_file()


def test_documentation_names_every_argument():
    page = Path(__file__).parents[2] / "docs" / "onnxruntime.md"
    if not page.is_file():
        pytest.skip("no source tree")
    sections = {s.split("\n", 1)[0].strip(): s for s in page.read_text().split("\n### ")[1:]}
    assert set(sections) == set(schemas.OPS)
    for name, op in schemas.OPS.items():
        for argument in [*(n for n, _ in (*op.inputs, *op.outputs)), *op.attributes]:
            assert re.search(rf"\b{argument.rstrip('?*')}\b", sections[name]), f"{name}: {argument}"
