"""Block sizes of planes: predicted from masks, or read from what `sbnet.tune` measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import BlockGrid
from sbnet.geometry import Pair
from sbnet.ops import reduce_mask
from sbnet.ops.common import mask_planes
from sbnet.version import __version__

CANDIDATES = {"cpu": (4, 8, 16, 32), "cuda": (8, 16, 32)}  # Hopper's kernels want multiples of 8
# Pixels around a block that cost as much as its own: what a kernel loads or computes beside them.
RIM = {"cpu": 0.25, "cuda": 1.0}
FORMAT = 1


def predict(sizes: Iterable[Pair], masks: Sequence[Tensor], device: str) -> dict[Pair, int]:
    """The block size of each plane that costs least on these masks: active pixels, and a rim around each block.

    Small blocks follow a mask closely, large ones share their rims: {(height, width): block size}.

    Args:
        sizes: (height, width) of the planes.
        masks: examples [N,H,W] of what a run will be called with.
    """
    planes = [mask_planes("sparsify", mask).cpu() for mask in masks]
    found = {}
    for size in sizes:
        costs = {b: sum(_cost(mask, size, b, device) for mask in planes) for b in CANDIDATES[device]}
        found[size] = min(costs, key=lambda b: (costs[b], -b))
    return found


def _cost(mask: Tensor, size: Pair, block: int, device: str) -> float:
    brought = torch.nn.functional.adaptive_max_pool2d((mask > 0.5).float()[:, None], size)[:, 0]
    active = reduce_mask(brought, BlockGrid.cover(size, block)).block_map >= 0
    heights, widths = (_sides(side, block) + 2 * RIM[device] for side in size)
    return float((active * heights[:, None] * widths).sum())


def _sides(side: int, block: int) -> Tensor:
    """How much of a plane each block along an axis holds: the last one may reach over its edge."""
    return (side - torch.arange(0, side, block)).clamp(max=block)


# ---- tunings: {"format": 1, "entries": {key: {"planes": {"384x640": [16, 16]}, ...}}}


def tuning_key(device: torch.device) -> str:
    """What a measurement holds for: device and versions."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    return f"{name}, sbnet {__version__}, torch {torch.__version__}"


def is_tuning(block: Any) -> bool:
    """What `sbnet.tune` returned, or the name of a file that it was written to."""
    if isinstance(block, Mapping):
        return "entries" in block
    return isinstance(block, os.PathLike) or (isinstance(block, str) and block.endswith(".json"))


def tuned(block: Any, device: torch.device) -> dict[Pair | None, Any]:
    """{(height, width): block size} of this device and these versions; of others, nothing, so that "auto" holds.

    Raises:
        ValueError: no tuning.
    """
    if not isinstance(block, Mapping):
        try:
            with open(block) as file:
                block = json.load(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"sbnet: sparsify: block: {block}: expected a file of sbnet.tune, got: {error}") from None
    if not isinstance(block, Mapping) or block.get("format") != FORMAT or not isinstance(block.get("entries"), Mapping):
        raise ValueError(f"sbnet: sparsify: block: expected a tuning of format {FORMAT}, got another")
    entry = block["entries"].get(tuning_key(device), {"planes": {}})
    found: dict[Pair | None, Any] = {None: "auto"}
    for plane, size in entry["planes"].items():
        height, width = plane.split("x")
        found[int(height), int(width)] = tuple(size)
    return found
