"""The networks of sbnet.models as ONNX models: what `sbnet export` writes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from sbnet.engine.oracle import compare, plane_masks
from sbnet.engine.sparsify import sparsify
from sbnet.export.convert import ExportError, to_onnx
from sbnet.export.runtime import run, session, verify
from sbnet.graph.plan import Plane
from sbnet.models import RESNETS, contour_net
from sbnet.nn import fold_batch_norm

NAMES = ("contours", *RESNETS)


def build(
    name: str,
    weights: int | str | os.PathLike[str] = 0,
    block: int | None = None,
    classes: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, list[str]]:
    """(a network, names of its model's outputs): contours of x [N,3,H,W], a residual network of x and mask [N,H,W] with
    its normalisations folded.

    Args:
        name: one of NAMES.
        weights: of a residual network: a seed, or a file of its state dict.
        block: block size of a residual network's planes; None: what it has by itself.
        classes: of a residual network's classifier; 0: none, None: as the network has it.
        dtype: of parameters and inputs.
    """
    if name == "contours":
        return contour_net().requires_grad_(False).to(dtype), ["y", "block_map"]
    if name not in RESNETS:
        raise ValueError(f"network: expected one of {', '.join(NAMES)}, got {name}")
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
    block: int | None = None,
    **options: Any,
) -> None:
    """Writes what `build` returned for frames of `size`, and prints how far ONNX Runtime is from PyTorch on the CPU.

    Args:
        dynamic: batch, height and width of the frames are those of each call.
        block: block size of contours; None: 16.
        options: of `to_onnx`.

    Raises:
        ExportError: it is further from the masked oracle than the contract allows; `path` is as it was.
    """
    dtype = next(module.parameters()).dtype
    mask = torch.zeros(batch, *size, dtype=torch.bool)
    mask[:, size[0] // 4 : size[0] // 2, size[1] // 4 : size[1] // 2] = True
    inputs = torch.rand(batch, 3, *size).to(dtype), mask
    options = {"input_names": ["x", "mask"], "output_names": names, **options}
    if isinstance(module, nn.Sequential):
        sparse = sparsify(module, inputs[0], block=block or 16)
        accept = partial(_hold, sparse.as_module(block_maps=True), module, sparse.planes, inputs)
        facts = {"input range": "0 to 1"}
        sparse.export(path, dynamic=dynamic, block_maps=True, facts=facts, accept=accept, **options)
        return
    if dynamic:
        n, h, w = Dim("batch"), Dim("height"), Dim("width")
        options["dynamic"] = {"x": {0: n, 2: h, 3: w}, "mask": {0: n, 1: h, 2: w}}
    masked: Any = module
    to_onnx(module, inputs, path, accept=partial(_hold, module, module, masked.planes(size), inputs), **options)


def _hold(
    module: nn.Module, net: nn.Module, planes: Sequence[Plane], inputs: tuple[torch.Tensor, torch.Tensor], path: Path
) -> None:
    """Does the model compute what `module` does, within the contract's error of the masked oracle of `net`?"""
    found = verify(path, module, inputs, ["CPUExecutionProvider"])
    x, mask = inputs
    with torch.no_grad():
        got, *_ = run(session(path, ["CPUExecutionProvider"]), [x, mask])
        agreement = compare(got, net, x, plane_masks(mask, planes))
    same = all(block_map.equal for block_map in found[1:])
    if not (agreement.holds and same):
        raise ExportError(
            f"sbnet.export: {path.name}: ONNX Runtime's result differs: expected an rms error of at most "
            f"{2 * agreement.torch_error + agreement.ulp:.3g} (twice PyTorch's own), got {agreement.error:.3g}"
            f"{'' if same else ', and other blocks'}"
        )
