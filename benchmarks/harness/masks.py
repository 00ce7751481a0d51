"""Lists of active blocks to measure on: random, SBNet's rectangle in the corner, real recordings."""

from __future__ import annotations

import functools
import os
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness.registry import Skip
from sbnet.masks import MotionMask

Size = tuple[int, int, int]


def random_active(size: Size, grid: sbnet.BlockGrid, count: int, device: str, seed: int = 0) -> sbnet.ActiveBlocks:
    """Exactly `count` random blocks of an [N,H,W] batch (all, where there are fewer)."""
    generator = torch.Generator().manual_seed(seed)
    batch, (ch, cw) = size[0], grid.bcount
    flags = torch.zeros(batch * ch * cw, dtype=torch.bool)
    flags[torch.randperm(batch * ch * cw, generator=generator)[:count]] = True
    one = sbnet.BlockGrid((1, 1), (1, 1), (0, 0), (ch, cw))
    return sbnet.reduce_mask(flags.view(batch, ch, cw).to(device), one).with_grid(grid)


def pixels(kind: str, size: Size, density: float, device: str, block: int | tuple[int, int] = 16) -> Tensor:
    """A pixel mask [N,H,W] bool of about this density of block x block blocks.

    kind: "random" blocks, "top-left" (one rectangle of that area in the corner: SBNet's synthetic mask), or recorded,
    scaled to size and of a density of their own: "motion" (a street clip), "walkers" (what moves before a static
    camera, 16 pixels around it) and "LiDAR" (occupancy of a scan, bird's eye).
    """
    n, h, w = size
    if kind == "top-left":
        mask = torch.zeros(n, h, w, dtype=torch.bool, device=device)
        mask[:, : round(h * density**0.5), : round(w * density**0.5)] = True
        return mask
    if kind == "random":
        grid = sbnet.BlockGrid.cover((h, w), block)
        count = max(1, round(n * grid.bcount[0] * grid.bcount[1] * density))
        return random_active(size, grid, count, device).pixel_mask((h, w))[:, 0]
    real = {"motion": _street, "walkers": _walkers, "LiDAR": _lidar}[kind]()
    scaled = torch.nn.functional.adaptive_max_pool2d(real.float(), (h, w)) > 0
    return scaled.expand(n, h, w).contiguous().to(device)


def _data(name: str) -> Path:
    """A recording of SBNET_DATA, or of shared/data beside the checkout."""
    folder = Path(os.environ.get("SBNET_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    if not (folder / name).exists():
        raise Skip(f"{name} is not in {folder} (SBNET_DATA names the folder)")
    return folder / name


@functools.cache
def _lidar() -> Tensor:
    """70.4 x 80 m at 0.1 m a pixel, [1,704,800]."""
    points = np.fromfile(_data("kitti_000008.bin"), np.float32).reshape(-1, 4)
    x, y = (points[:, 0] / 0.1).astype(int), ((points[:, 1] + 40) / 0.1).astype(int)
    keep = (x >= 0) & (x < 704) & (y >= 0) & (y < 800)
    occupancy = torch.zeros(1, 704, 800, dtype=torch.bool)
    occupancy[0, x[keep], y[keep]] = True
    return occupancy


@functools.cache
def _street() -> Tensor:
    """The fortieth frame of a street clip."""
    from sbnet.apps import video

    try:
        clip = video.demo_clip()
    except video.VideoError:
        clip = _data("bikes.mp4")
    return _motion(clip, 40)


@functools.cache
def _walkers() -> Tensor:
    """The hundredth frame of vtest.avi (OpenCV's samples) and the pixels 16 around what moves."""
    moving = _motion(_data("vtest.avi"), 100)
    return torch.nn.functional.max_pool2d(moving.float(), 33, stride=1, padding=16) > 0


def _motion(clip: Path, frames: int) -> Tensor:
    """What moves in a clip's frame of that number, [1,H,W]."""
    from sbnet.apps import video
    from sbnet.apps.pipeline import open_source

    try:
        motion = None
        for frame in islice(open_source(clip), frames):
            image = frame.tensor(torch.device("cpu"), torch.float32)
            motion = motion or MotionMask((image.shape[2], image.shape[3]))
            mask = motion(image)
    except video.VideoError as error:
        raise Skip(str(error)) from None
    return mask.clone()
