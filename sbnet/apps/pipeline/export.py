"""A pipeline's network as an ONNX file that takes frames and masks."""

from __future__ import annotations

import os
from typing import Any

import torch

from sbnet.apps.pipeline.frames import PipelineError
from sbnet.apps.pipeline.networks import Network, halo_of, open_network
from sbnet.engine.sparsify import SparseRun


def export_network(
    network: Any,
    path: str | os.PathLike[str],
    size: tuple[int, int],
    *,
    channels: int | None = None,
    mode: str | None = None,
    block: Any = "auto",
    margin: int | str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> SparseRun:
    """Writes what a pipeline runs for frames of this size: inputs x, mask and, in cached mode, the states (`SparseRun.
    export`). x is what `Network.input` makes of a frame [1,C,H,W] of 0 to 1, and the mask what `Network.widened_mask`
    makes of the frame's; the margin is in the file.

    Args:
        network: as `Pipeline` takes it.
        channels: of frames. mode, block, margin: as of `Pipeline`. The network's own if not given.
        options: of `sbnet.export.to_onnx`.

    >>> export_network("upscale:waifu2x", "waifu2x.onnx", (400, 704))
    """
    found: Network = open_network(network)
    x = found.input(
        torch.zeros(1, channels or found.channels, *size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    )
    model = found.model
    if isinstance(model, torch.nn.Module):
        model = model.to(dtype).eval()
    margin = found.margin if margin is None else margin
    try:
        run = SparseRun(
            model, x, mode=mode or found.mode, block=block, margin=0, masks=(), out=(), mask_source=None,
            allow_tf32=False,
        )  # fmt: skip
    except ValueError as error:
        raise PipelineError(f"network {found.name}: {str(error).removeprefix('sbnet: ')}") from None
    run.margin = halo_of(run) if margin == "halo" else int(margin)
    run.export(path, **options)
    return run
