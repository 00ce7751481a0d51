"""The networks of sbnet.models as ONNX models: what `sbnet export` writes."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from sbnet.active import BlockGrid
from sbnet.engine.chain import MaskedChain
from sbnet.engine.oracle import compare, plane_masks
from sbnet.export.convert import ExportError, to_onnx
from sbnet.export.runtime import run, session, verify
from sbnet.models import RESNETS, contour_net
from sbnet.nn import fold_batch_norm
from sbnet.ops import reduce_mask

NAMES = ("contours", *RESNETS)


def build(
    name: str,
    weights: int | str | os.PathLike[str] = 0,
    block: int | None = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, list[str]]:
    """(a module that takes x [N,3,H,W] and mask [N,H,W], names of its outputs); normalisations folded.

    Args:
        name: one of NAMES.
        weights: of a residual network: a seed, or a file of its state dict.
        block: block size of every plane; None: 16, or what the network has by itself.
        classes: of a residual network's classifier; 0: none, None: as the network has it.
        dtype: of parameters and inputs.
    """
    if name == "contours":
        return MaskedChain(contour_net(), block or 16, dtype).eval(), ["y", "block_map"]
    if name not in RESNETS:
        raise ValueError(f"{name}: no such network; one of {', '.join(NAMES)} is wanted")
    given = {"classes": classes, "blocks": block}
    try:
        net = RESNETS[name](weights, **{k: v for k, v in given.items() if v is not None})
    except pickle.UnpicklingError as error:
        raise ValueError(f"{weights}: not a state dict that torch.load reads") from error
    except RuntimeError as error:  # a file that holds something else
        raise ValueError(f"{weights}: {' '.join(str(error).split())[:200]}") from error
    return fold_batch_norm(net).requires_grad_(False).to(dtype), ["y"]


def write(
    module: nn.Module,
    names: list[str],
    path: Path,
    size: tuple[int, int],
    batch: int = 1,
    dynamic: bool = False,
    **options: Any,
) -> None:
    """Writes what `build` returned for frames of `size`, and prints how far ONNX Runtime is from PyTorch on the CPU.

    Args:
        dynamic: batch, height and width of the frames are those of each call.
        options: of `to_onnx`.

    Raises:
        ExportError: it is further from the masked oracle than the contract allows; `path` is as it was.
    """
    dtype = next(module.parameters()).dtype
    mask = torch.zeros(batch, *size, dtype=torch.bool)
    mask[:, size[0] // 4 : size[0] // 2, size[1] // 4 : size[1] // 2] = True
    inputs = torch.rand(batch, 3, *size).to(dtype), mask
    if dynamic:
        n, h, w = Dim("batch"), Dim("height"), Dim("width")
        options["dynamic"] = {"x": {0: n, 2: h, 3: w}, "mask": {0: n, 1: h, 2: w}}
    facts = {"input range": "0 to 1"} if isinstance(module, MaskedChain) else {}
    accept = partial(_hold, module, inputs)
    to_onnx(module, inputs, path, input_names=["x", "mask"], output_names=names, facts=facts, accept=accept, **options)


def _hold(module: Any, inputs: tuple[torch.Tensor, torch.Tensor], path: Path) -> None:
    """Is the model's result within the contract's error of the masked oracle, and its block map PyTorch's?"""
    verify(path, module, inputs, ["CPUExecutionProvider"])
    x, mask = inputs
    with torch.no_grad():
        got, *block_map = run(session(path, ["CPUExecutionProvider"]), [x, mask])
        if block_map:  # of the contour network
            grid = BlockGrid.cover((x.shape[2], x.shape[3]), module.block)
            dense, pixels = module.dense(), reduce_mask(mask, grid)
            same = torch.equal(block_map[0], pixels.block_map)
            found = compare(got, dense, x, pixels)
        else:
            same = True
            found = compare(got, module, x, plane_masks(mask, module.planes((x.shape[2], x.shape[3]))))
    if not (found.holds and same):
        raise ExportError(
            f"sbnet.export: {path.name}: ONNX Runtime's result differs: expected an rms error of at most "
            f"{2 * found.torch_error + found.ulp:.3g} (twice PyTorch's own), got {found.error:.3g}"
            f"{'' if same else ', and other blocks'}"
        )
