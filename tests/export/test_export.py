"""sbnet.export: modules to ONNX files that onnx.checker accepts and ONNX Runtime runs as torch does."""

import contextlib
import gc
import subprocess

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import ActiveBlocks, BlockGrid, export
from sbnet.export import schemas, translate
from sbnet.ops.attention.window_attention import window_attention
from sbnet.ops.masked.token_rows import merge_pixels, move_rows, pack_patches, pack_tokens
from support.export_cases import ops_of, plane_inputs, planes, same_as_torch
from support.helpers import interpreter, random_active, tensor
from support.ort_models import PROVIDER, samples, torch_ops
from support.plain_layers import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


# ---- schemas
@pytest.mark.parametrize("name", ["net.onnx", "no_such_folder/net.onnx"])
def test_garbage_is_collected_again_after_an_export(tmp_path, name):
    with contextlib.suppress(export.ExportError):
        export.to_onnx(nn.Conv2d(3, 4, 3), (torch.rand(1, 3, 8, 8),), tmp_path / name)
    assert (tmp_path / name).exists() == (name == "net.onnx")
    assert gc.isenabled()


def test_every_op_has_a_schema_and_a_translation():
    assert set(schemas.OPS) == torch_ops()
    several = {"blocksparse_conv1x1", "blocksparse_conv_active"}  # gather, product and scatter
    assert {op._schema.name.split("::")[1] for op in translate.table()} == torch_ops() | several


# ONNX's name of an argument of a torch op, where it has another; () where it has none
ARGUMENTS = {
    "grid": ("bsize", "bstride", "boffset", "bcount"),
    "producer_grid": tuple(f"producer_b{k}" for k in ("size", "stride", "offset", "count")),
    "consumer_grid": tuple(f"consumer_b{k}" for k in ("size", "stride", "offset", "count")),
    "activation_param": ("negative_slope",),
    "planes": ("bsizes", "sizes", "dynamic_sizes"),
    "size": ("size", "dynamic_size"),
    "output_size": ("size",),
    "method": ("mode",),
    ("pack_tokens", "size"): ("size",),
    "consumer_size": (),  # of the plane that consumer_map tells
    "layout": ("in_features", "out_features"),
    ("blocksparse_weight_grad", "layout"): ("block_size",),  # features are those of x and dy
    "float32": (),  # by casts of x and dy
    "tables": ("coords",),
    "conv_tables": ("lists",),
    "conv_layout": ("in_channels", "out_channels"),
    "geometry": ("kernel_size", "stride", "padding", "dilation"),
    "rule": ("diagonal", "band", "prefix", "stride", "phases", "block_size"),
    "packed": (),  # by each run
    "dtype": (),  # of results beside float8, of which ONNX's op knows float32 alone
    **dict.fromkeys(("seed", "dropout", "deterministic", "x_indices", "x_count", "x_grid", "x_map"), ()),  # of training
}
# of ONNX alone: what the exporter's passes fill in
PASSES = {"fringe_pixels", "fringe_count", "base", "zero_outside"}


@pytest.mark.parametrize("name", sorted(schemas.OPS))
def test_every_argument_of_torchs_op_is_one_of_onnxs(name):
    op = schemas.OPS[name]
    torchs = {
        n
        for a in getattr(torch.ops.sbnet, name).default._schema.arguments
        for n in ARGUMENTS.get((name, a.name), ARGUMENTS.get(a.name, (a.name,)))
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
def doubled(mask, x):
    """Active blocks of a plane twice as large."""
    grid = BlockGrid.cover((2 * x.shape[2], 2 * x.shape[3]), 8)
    return sbnet.reduce_mask(mask.repeat_interleave(2, 1).repeat_interleave(2, 2), grid)


LAYOUT = sbnet.BlockLayout([[1, 1], [1, 1]], 8, in_features=16, out_features=10)


BLOCKS = sbnet.ConvLayout([([0, 2, 1, 3], [0, 1, 2]), ([2, 4, 5, 6, 7], [2, 3, 4, 5])], (3, 3))


def of_tokens(op: str, x, mask, active):
    (height, width), rows = x.shape[2:], x.flatten(2).mT
    match op:
        case "pack_tokens":
            return pack_tokens(active, (height, width), 1, 2), pack_tokens(active, (height, width), capacity=2000)
        case "move_rows":
            packed = pack_tokens(active, (height, width))
            y = move_rows(rows, height * width, index=packed.order, lengths=packed.lengths)
            apart = move_rows(y, height * width, index=packed.rows, mask=packed.mask)
            return y, apart, move_rows(y, 50, table=rows[:1, 20:23], lengths=packed.lengths // 40 + 3, start=2)
        case "pack_patches":
            size = (height // 8, width // 8)
            packed = pack_tokens(sbnet.reduce_mask(mask[:, ::8, ::8].contiguous(), BlockGrid.cover(size, 1)), size)
            return pack_patches(x, packed.order, packed.lengths, (8, 8))
        case "merge_pixels":
            half = (height // 2, width // 2)
            few = sbnet.reduce_mask(F.max_pool2d(mask[:, None].float(), 2)[:, 0], BlockGrid.cover(half, 8))
            return merge_pixels(x, few, 2, [(0, 0), (1, 0), (0, 1), (1, 1)])
    windows, options = torch.arange(1, 1281, device=x.device).view(-1, 64), {"heads": 1, "dim": 8, "value_dim": 8}
    y = window_attention(x, x, x, windows, windows, active, scale=0.3, **options)
    return y, window_attention(x, y, x, windows, windows, active, scale=0.3, normalize=1e-3, **options)


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
            case "motion_mask":
                return sbnet.motion_mask(x, mask.float(), 0.3, 0.25, 5.0, 3)
            case "sparse_adaptive_pool2d":
                y = sbnet.sparse_adaptive_avg_pool2d(x, active, (2, 3))
                return y, sbnet.sparse_adaptive_max_pool2d(x, active, count_inactive=False)
            case "sparse_squeeze_excite2d":
                narrow = self.weight[:4, :8, 0, 0].contiguous()
                return sbnet.sparse_squeeze_excite2d(x, active, narrow, None, narrow.T.contiguous(), self.bias[:8])
            case "sparse_norm2d":
                y = sbnet.sparse_group_norm(x, active, 2, self.bias[:8], self.bias[4:])
                y = sbnet.sparse_layer_norm2d(y, active, self.bias[:8], None, 1e-3)
                return y, sbnet.sparse_softmax2d(y, active), sbnet.sparse_instance_norm(x, active)
            case "sparse_pointwise":
                y = sbnet.sparse_pointwise(x, active, "mul a; add b; mish", self.bias[None, :8, None, None], x)
                return y, sbnet.sparse_pointwise(y, active, "leaky_relu 0.3; rsub a", x)
            case "sparse_rearrange":
                y = sbnet.sparse_rearrange(x, active, groups=2, pad=(1, -1, 0, 0), value=0.5)
                return y, sbnet.sparse_pixel_shuffle(y, doubled(mask, x), 2)
            case "sparse_resize2d":
                y = sbnet.sparse_resize2d(x, active, scale_factor=1, mode="bicubic")
                return y, sbnet.sparse_resize2d(y, doubled(mask, x), scale_factor=2, mode="bilinear")
            case "sparse_bottleneck2d":
                narrow = self.weight[:8, :, :1, :1], self.weight[:8], self.weight[:8, :, 1:2, 1:2]
                y = sbnet.sparse_bottleneck2d(x, narrow, [self.bias[:8], None, self.bias[4:]], active)
                return y, sbnet.sparse_bottleneck2d(y, narrow, None, active, activation="silu")
            case "sparse_conv2d":
                y = sbnet.sparse_conv2d(x, self.weight, self.bias, active, padding=1, activation="silu")
                return y, sbnet.sparse_conv2d(x, self.weight, None, active, padding=1, residual=y)
            case "sparse_conv2d_quantized" | "sparse_conv2d_dequantized":
                weight, scale = (100 * self.weight[:8].float()).to(torch.int8), self.bias[:8].detach().abs().float()
                call = (10 * x.float()).to(torch.int8), weight, scale, None
                out_scale = 50.0 if self.op == "sparse_conv2d_quantized" else None
                y = sbnet.sparse_conv2d_quantized(*call, active, padding=1, out_scale=out_scale)
                more = {"residual": y, "residual_scale": 0.5, "out_scale": out_scale, "activation": "relu"}
                halves = call[0], weight[:, : weight.shape[1] // 2], scale, None
                return y, sbnet.sparse_conv2d_quantized(*halves, active, padding=1, groups=2, **more)
            case "sparse_conv_transpose2d":
                y = sbnet.sparse_conv_transpose2d(x, self.weight[:8], self.bias[:8], active, padding=1)
                options = {"stride": 2, "padding": 1, "output_padding": 1, "activation": "silu"}
                return y, sbnet.sparse_conv_transpose2d(y, self.weight[:8], None, doubled(mask, x), **options)
            case "blocksparse_matmul":
                rows, blocks = torch.cat([x, x], 1).permute(0, 2, 3, 1), self.weight.flatten()[:256].view(4, 8, 8)
                gate = self.bias[:4].float().abs()
                y = sbnet.blocksparse_matmul(rows, blocks, LAYOUT, gate, self.bias[:10], "silu")
                return y, sbnet.blocksparse_matmul(y, blocks, LAYOUT, transposed=True)
            case "blocksparse_weight_grad":
                rows = torch.cat([x, x], 1).permute(0, 2, 3, 1)
                dy = rows[..., : LAYOUT.shape[1]].contiguous()  # as ONNX has it: kernels are chosen by strides
                return sbnet.blocksparse_weight_grad([(rows.contiguous(), dy)], LAYOUT)
            case "blocksparse_conv":
                filters = self.weight.flatten()[: BLOCKS.weights]
                y = sbnet.blocksparse_conv(x, filters, BLOCKS, self.bias[:6], "silu", stride=2)
                return y, sbnet.sparse_conv2d(x, filters, None, active, layout=BLOCKS, padding=1)
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
            case "pack_tokens" | "move_rows" | "pack_patches" | "merge_pixels" | "window_attention":
                return of_tokens(self.op, x, mask, active)
        y = getattr(sbnet, self.op)(x, active, **PLAIN[self.op].numbers[-1])  # whose y has x's size
        return y, getattr(sbnet, self.op)(y, active, **PLAIN[self.op].numbers[-2])


class SeveralOps(nn.Module):
    """Side by side: an export takes a second, whatever is in it."""

    def __init__(self, ops: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.each = nn.ModuleDict({op: OneOp(op, dtype) for op in ops})

    def forward(self, x, mask):
        return {op: module(x, mask) for op, module in self.each.items()}


@pytest.mark.parametrize("op", sorted(schemas.OPS))
def test_op(device, op, tmp_path):
    check_op(OneOp(op, torch.float32), torch.float32, device, tmp_path)


# An exporter knows halves, not which; the runtime's kernels of each are test_ort.py's.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("part", range(4))
def test_ops_of_halves(device, part, dtype, tmp_path):
    check_op(SeveralOps(sorted(schemas.OPS)[part::4], dtype), dtype, device, tmp_path)


def check_op(module, dtype, device, tmp_path):
    module = module.to(device)
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
            most, average, active, stack, halo, sbnet.sparse_scatter(stack, most, x, add=True),
            sbnet.sparse_fill(x, active, float("inf")), lists, y, sbnet.sparse_max_pool2d(x, pools[0], *largest),
            sbnet.sparse_avg_pool2d(x, pools[1], *mean, False), sbnet.sparse_avg_pool2d(x, pools[1], *mean, True, 5),
            seen,
        )  # fmt: skip


def test_every_argument_arrives(device, tmp_path):
    module = EveryArgument().to(device)
    x, _ = plane_inputs(device)
    mask = torch.rand(2, *x.shape[2:], device=device).pow(60)  # pixels between 0.25 and 0.5 too
    path = export.to_onnx(module, (x, mask), tmp_path / "m.onnx")
    same_as_torch(path, module, (x, mask), device)


class Gradients(nn.Module):
    """Of two pairs, which ONNX's op is given as one; of halves rounded once, and not rounded."""

    def forward(self, x):
        rows = torch.cat([x, x], 1).permute(0, 2, 3, 1)
        pairs = [(t, t[..., : LAYOUT.shape[1]]) for t in (rows, rows.flip(1) * 0.5)]
        halves = [(a.half(), b.half()) for a, b in pairs]
        found = [sbnet.blocksparse_weight_grad(p, LAYOUT) for p in (pairs, halves)]
        return *found, sbnet.blocksparse_weight_grad(halves, LAYOUT, dtype=torch.float32)


def test_weight_gradients_of_several_pairs(device, tmp_path):
    """The same sum in another order: within the rounding of float32, or of the one to halves."""
    module, (x, _) = Gradients().to(device), plane_inputs(device)
    path = export.to_onnx(module, (x,), tmp_path / "m.onnx")
    errors = export.verify(path, module, (x,), [PROVIDER[device]], quiet=True)
    assert [e.dtype for e in errors] == [torch.float32, torch.float16, torch.float32]
    for error in errors:
        # On a GPU sums of halves are made by tensor cores, which cut off where float32 rounds.
        unit = torch.finfo(error.dtype).eps * (1 if error.dtype == torch.float16 else 32)
        assert error.rms <= unit * error.rms_of_torch, error


# Of planes of one size: which pixels are tokens, patches or windows is a matter of constants.
OF_ONE_SIZE = {"pack_tokens", "move_rows", "pack_patches", "window_attention"}


@pytest.mark.parametrize("part", range(4))
def test_ops_of_dynamic_batch_height_and_width(device, part, tmp_path):
    module = SeveralOps(sorted(set(schemas.OPS) - OF_ONE_SIZE)[part::4], torch.float32).to(device)
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


def test_motion_goes_round_through_the_model(device, tmp_path):
    """A frame of bytes and the background in, active blocks and the next background out."""

    class Module(nn.Module):
        def forward(self, frame, background):
            mask, following = sbnet.motion_mask(frame, background, 0.06, 0.3, 0.5)
            return sbnet.reduce_mask(mask, BlockGrid.cover(tuple(mask.shape[1:]), 8)).block_map, following

    frame = torch.randint(0, 256, (1, 3, 24, 40), dtype=torch.uint8, device=device)
    background = torch.rand(1, 24, 40, device=device)
    path = tmp_path / "m.onnx"
    export.to_onnx(Module(), (frame, background), path)
    assert "motion_mask" in ops_of(path)
    same_as_torch(path, Module(), (frame, background), device)


def test_nothing_of_the_exporter_reaches_the_screen(tmp_path):
    """Where torchvision is not installed PyTorch's exporter says so on every call."""
    code = """
import sys
sys.modules["torchvision"] = None
import torch
from torch import nn
from sbnet import export
export.to_onnx(nn.Conv2d(3, 4, 3), (torch.rand(1, 3, 8, 8),), sys.argv[1])
"""
    call = [*interpreter(code, "-W", "default::FutureWarning"), str(tmp_path / "net.onnx")]
    done = subprocess.run(call, check=True, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "torchvision" in line or "LeafSpec" in line]
    assert not said
    assert "torchvision" not in done.stdout
