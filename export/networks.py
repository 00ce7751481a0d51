"""The networks of sbnet.models as ONNX models: what `sbnet export` writes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch
from torch import nn

from sbnet.engine.chain import MaskedChain
from sbnet.export.convert import to_onnx
from sbnet.export.runtime import verify
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
    *,
    fuse_bottlenecks: bool = False,
) -> None:
    """Writes what `build` returned for frames of `size`, and prints how far ONNX Runtime is from PyTorch on the CPU.

    fuse_bottlenecks: see `to_onnx`.
    """
    dtype = next(module.parameters()).dtype
    mask = torch.zeros(batch, *size, dtype=torch.bool)
    mask[:, size[0] // 4 : size[0] // 2, size[1] // 4 : size[1] // 2] = True
    inputs = torch.rand(batch, 3, *size).to(dtype), mask
    to_onnx(module, inputs, path, input_names=["x", "mask"], output_names=names, fuse_bottlenecks=fuse_bottlenecks)
    verify(path, module, inputs, ["CPUExecutionProvider"])
