"""Block-sparse products against dense ones: cuBLAS on a GPU, MKL and oneDNN on a CPU, beside PyTorch's own block-sparse
rows and stk's; and the same product in ONNX Runtime against its own dense one.

The layouts are random with an exact density; the dense side multiplies by the same matrix, zeros and all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.cases.network.onnx import require
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close, short

FORWARD, INPUT, WEIGHT = "blocksparse_matmul", "blocksparse_matmul, input gradient", "blocksparse_weight_grad"
FEW, CONSTANT, ONNX = "blocksparse_matmul, few rows", "blocksparse_matmul, 6.55 M weights", "blocksparse_matmul in ORT"


def cases(setting: Setting) -> Iterator[Case]:
    cuda = setting.cuda
    rows, side = setting.pick((64, 256), (4096, 4096) if cuda else (256, 1024), (4096, 4096) if cuda else (512, 2048))
    sizes = setting.pick((64,), (128, 32) if cuda else (32,), (128, 64, 32, 16, 8) if cuda else (64, 32, 16, 8))
    densities = setting.pick((0.5,), (1.0, 0.25), (1.0, 0.5, 0.25, 0.1))

    def case(name: str, rows: int, inputs: int, outputs: int, size: int, density: float, dtype: torch.dtype) -> Case:
        facts = {"rows": rows, "in": inputs, "out": outputs, "block": size, "density": density, "dtype": short(dtype)}
        return Case(name, "weights", facts, partial(work, setting, name, facts, dtype))

    for name in (FORWARD, INPUT, WEIGHT):
        for size in sizes:
            for density in densities:
                yield case(name, rows, side, side, size, density, setting.dtype)
    for density in densities:  # the other types, at one size
        for dtype in (torch.bfloat16, torch.float32) if cuda else (torch.bfloat16,):
            yield case(FORWARD, rows, side, side, 64 if cuda else 32, density, dtype)
    for few in setting.pick((1,), (1, 64), (1, 4, 16, 32, 64) if cuda else (1, 8)):
        for size in sizes:
            yield case(FEW, few, side, 4 * side, size, 0.25, setting.dtype)
    for i in setting.pick((1,), (1, 4), (1, 2, 4, 8)):  # as many weights in ever wider layers
        for size in setting.pick((32,), (32,), (32, 16, 8)):
            yield case(CONSTANT, 64, 2560 * i, 2560 * i, size, 1 / i**2, setting.dtype)
    for density in densities:
        yield case(ONNX, rows, side, side, 32, density, setting.dtype)


def random_layout(rows: int, columns: int, size: int, density: float) -> sbnet.BlockLayout:
    mask = torch.zeros(rows * columns)
    mask[torch.randperm(rows * columns)[: max(1, round(rows * columns * density))]] = 1
    return sbnet.BlockLayout(mask.view(rows, columns), size)


def work(setting: Setting, name: str, facts: dict[str, Any], dtype: torch.dtype) -> Work:
    rows, inputs, outputs, size, density = (facts[k] for k in ("rows", "in", "out", "block", "density"))
    layout = random_layout(inputs // size, outputs // size, size, density)
    options: dict[str, Any] = {"device": setting.device, "dtype": dtype}
    weight = torch.randn(layout.weight_shape, **options) / (inputs * density) ** 0.5
    x = torch.randn(rows, outputs if name == INPUT else inputs, **options)
    products = 2.0 * rows * layout.blocks * size * size
    moved = float(dtype.itemsize * (layout.blocks * size * size + rows * (inputs + outputs)))
    notes = {"blocks": layout.blocks}
    if name == WEIGHT:
        dy = torch.randn(rows, outputs, **options)
        blocks_of = layout.from_dense
        torchs, exact = blocks_of(x.t() @ dy), blocks_of(wide(x).t() @ wide(dy))
        sides = {
            name: Side(lambda: sbnet.blocksparse_weight_grad([(x, dy)], layout), "ours"),
            "x.T @ dy": Side(lambda: x.t() @ dy),
        }
        if peer := stk_of(setting, layout, weight):
            sides["stk.ops.sdd"] = Side(lambda: peer[0].ops.sdd(x.t(), dy, peer[1]).data, "peer")
        return Work(
            sides,
            lambda side, got: close(blocks_of(got) if side == "x.T @ dy" else got, torchs, exact),
            products,
            moved,
            dtype,
            notes,
        )
    full = layout.to_dense(weight)
    dense = full if name == INPUT else full.t().contiguous()
    torchs, exact = F.linear(x, dense), F.linear(wide(x), wide(dense))
    if name == ONNX:
        sides = onnx_sides(setting, layout, weight, dense, x)
    else:
        sides = {
            name: Side(lambda: sbnet.blocksparse_matmul(x, weight, layout, transposed=name == INPUT), "ours"),
            "F.linear": Side(lambda: F.linear(x, dense)),
        }
        if not setting.cuda and packable(x.dtype):
            sides["oneDNN, packed"] = Side(packed_linear(x, dense))
        if setting.cuda and name != INPUT and rows % 64 == 0 and size > 16 and density < 1:
            bsr = dense.to_sparse_bsr((size, size))
            sides["F.linear, BSR"] = Side(lambda: F.linear(x, bsr), "peer")
        if name == FORWARD and (peer := stk_of(setting, layout, weight)):
            sides["stk.ops.dds"] = Side(lambda: peer[0].ops.dds(x, peer[1]), "peer")
    return Work(sides, lambda _, got: close(got, torchs, exact), products, moved, dtype, notes)


def stk_of(setting: Setting, layout: sbnet.BlockLayout, weight: Tensor) -> tuple[Any, Any] | None:
    """stk (pip install stanford-stk) and the weights as its matrix: it multiplies blocks of 128 of float16 alone."""
    if not setting.cuda or layout.block_size != 128 or weight.dtype != torch.float16 or not find_spec("stk"):
        return None
    stk = import_module("stk")
    rows, columns = (part.short() for part in layout.index(weight.device))
    starts = F.pad(torch.bincount(rows.int(), minlength=layout.block_rows).cumsum(0), (1, 0)).int()
    return stk, stk.Matrix(layout.shape, weight, rows, columns, starts)


def wide(t: Tensor) -> Tensor:
    """For the exact result: float64, or float32 of halves on a CPU, where float64 would take the longest of all."""
    return t.float() if t.device.type == "cpu" and t.dtype != torch.float32 else t.double()


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type on this processor: it needs AVX-512 for halves."""
    of_halves = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in of_halves or getattr(torch.ops.mkldnn, of_halves[dtype])()


def packed_linear(x: Tensor, dense: Tensor) -> Callable[[], Tensor]:
    """oneDNN's product with its weights in the order that it likes best, as torch.compile packs them."""
    packed = torch.ops.mkldnn._reorder_linear_weight(dense, x.shape[0])
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def onnx_sides(
    setting: Setting, layout: sbnet.BlockLayout, weight: Tensor, dense: Tensor, x: Tensor
) -> dict[str, Side]:
    """One session a side; they give and take tensors where they lie, and replay CUDA graphs on CUDA."""
    require(setting)
    from sbnet import export

    sparse = sbnet.nn.BlockSparseLinear(*layout.shape, bias=False, layout=layout, dtype=weight.dtype)
    linear = nn.Linear(*layout.shape, bias=False, dtype=weight.dtype)
    sparse.weight.data.copy_(weight)
    linear.weight.data.copy_(dense)
    sides = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, module in ((ONNX, sparse), ("ORT dense", linear)):
            path = export.to_onnx(module, (x.cpu(),), Path(folder) / "model.onnx")
            providers = export.default_providers() if setting.cuda else ["CPUExecutionProvider"]
            session = export.session(path, providers, cuda_graph=setting.cuda)
            y = torch.empty(x.shape[0], layout.out_features, device=x.device, dtype=x.dtype)
            call = export.Bound(session, [x], [y])
            sides[name] = Side(lambda call=call: call()[0], "ours" if name == ONNX else "dense", "wall")  # type: ignore[misc]
    return sides
