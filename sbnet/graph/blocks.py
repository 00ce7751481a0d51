"""Block sizes of planes: predicted from masks, or read from what `sbnet.tune` measured."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.active import BlockGrid
from sbnet.geometry import Pair
from sbnet.graph.cost import FORMS, Work
from sbnet.ops import reduce_mask
from sbnet.ops.common import mask_planes
from sbnet.version import __version__

# Hopper's kernels need multiples of 8; those of FINE layers take blocks of 4, which the plane of others never has.
CANDIDATES = {"cpu": (1, 2, 4, 8, 16, 32), "cuda": (4, 8, 16, 32)}
FINE = {"1x1", "depthwise"}
FORMAT = 1


@dataclass(frozen=True)
class Price:
    """What a multiply-add costs in blocks of some size.

    Attributes:
        rim: pixels around a block that cost as much as its own: what a kernel loads or computes beside them.
        product: of a multiply-add in large blocks, that of a 1x1 convolution on the device being 1.
        least, small: in blocks of fewer pixels a side than `least`, `small` times as much.
    """

    rim: float
    product: float = 1.0
    least: int = 1
    small: float = 1.0

    def pixels(self, mask: Tensor, block: int) -> float:
        """Of planes [N,H,W]: the pixels that an active block costs, summed."""
        size = int(mask.shape[1]), int(mask.shape[2])
        active = reduce_mask(mask, BlockGrid.cover(size, block)).block_map >= 0
        heights, widths = (_sides(side, block) + 2 * self.rim for side in size)
        return float((active * heights[:, None] * widths).sum()) * (self.small if block < self.least else 1.0)


# Measured on a CPU (docs/log/conv_cpu.md, networks.md) and a Hopper GPU. Winograd's
# squares, of 3x3, 5x5 and 7x7, want blocks of 2, and so do transposed layers of stride 2: a pixel of each phase.
PRICES = {
    "cpu": {
        "1x1": Price(0.05),
        "depthwise": Price(0.4, 2.3),
        "3x3": Price(0.12, 0.4, least=2, small=1.65),
        "5x5": Price(0.15, 0.45, least=2, small=1.8),
        "7x7": Price(0.2, 0.7, least=2, small=2.4),
        "dilated": Price(0.12, 0.6),
        "transposed": Price(0.1, 1.7, least=2, small=6.0),
        "other": Price(0.12, 0.6),
    },
    # Where taps lie too far apart to share a patch, the general kernel loads one a tap, of 8x8 pixels row by row.
    "cuda": dict.fromkeys(FORMS, Price(1.0)) | {"dilated": Price(1.0, least=16, small=3.4)},
}
CELL = {"cpu": 40.0, "cuda": 0.0}  # of a block of the plane, active or not: the list is made of all of them
UNKNOWN: Work = Counter({"other": 64 * 9})  # of a plane that no convolution writes


def predict(planes: Mapping[Pair, Work], masks: Sequence[Tensor], device: str) -> dict[Pair, int]:
    """The block size of each plane that costs least on these masks: active pixels, and a rim around each block.

    Small blocks follow a mask closely, large ones share their rims: {(height, width): block size}.

    Args:
        planes: (height, width) of the planes, and what the layers that write them do for a pixel.
        masks: examples [N,H,W] of what a run will be called with.
        device: "cpu" or "cuda".
    """
    given = [(mask_planes("sparsify", mask).cpu() > 0.5).float()[:, None] for mask in masks]
    found = {}
    for size, work in planes.items():
        brought = [torch.nn.functional.adaptive_max_pool2d(mask, size)[:, 0] for mask in given]
        work = work or UNKNOWN
        sizes = [b for b in CANDIDATES[device] if b >= 8 or device != "cuda" or FINE.issuperset(work)]
        costs = {b: sum(_cost(mask, work, b, device) for mask in brought) for b in sizes}
        found[size] = min(costs, key=lambda b: (costs[b], -b))
    return found


def _cost(mask: Tensor, work: Work, block: int, device: str) -> float:
    prices = PRICES[device]
    cells = mask.shape[0] * -(-mask.shape[1] // block) * -(-mask.shape[2] // block)
    layers = (n * prices[form].product * prices[form].pixels(mask, block) for form, n in work.items())
    return sum(layers) + cells * CELL[device]


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
