"""Blocks that are shown of a frame: those of its pixels that the network's blocks cover."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet.apps.pipeline.shown import SHOWN, ShownBlocks

# plane, block of it, network's input, frame, pad
SIZES = {
    "half of the frame, its blocks": ((288, 384), (8, 8), (576, 768), (576, 768), 0),
    "half of a frame made a multiple of 32": ((96, 128), (16, 16), (192, 256), (190, 250), 0),
    "a frame with a border": ((94, 74), (16, 16), (94, 74), (80, 60), 7),
    "a border, blocks finer than shown": ((54, 67), (4, 4), (54, 67), (40, 53), 7),
    "a plane larger than the frame": ((100, 140), (16, 8), (50, 70), (50, 70), 0),
    "no whole ratio": ((37, 21), (4, 8), (100, 50), (97, 50), 1),
    "smaller than a block": ((5, 3), (8, 8), (9, 5), (9, 5), 0),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_block_is_shown_where_one_of_its_pixels_is_covered(sizes):
    plane, block, given, frame, pad = sizes
    grid = sbnet.BlockGrid.cover(plane, block)
    generator = torch.Generator().manual_seed(4)
    shown = ShownBlocks()
    for share in (0.0, 0.05, 0.3, 1.0):
        chosen = torch.rand(grid.bcount, generator=generator) < share
        rows, columns = chosen.nonzero(as_tuple=True)
        indices = torch.stack([torch.zeros_like(rows), rows, columns], 1)
        active = sbnet.ActiveBlocks.from_indices(indices, grid, 1)
        pixels = F.adaptive_max_pool2d(active.pixel_mask(plane).float(), given)
        pixels = pixels[:, :, pad : pad + frame[0], pad : pad + frame[1]]
        expected = F.max_pool2d(pixels, SHOWN, ceil_mode=True)[0, 0] > 0
        assert torch.equal(shown(chosen, block, plane, given, frame, pad), expected)


def test_other_sizes_are_not_taken_for_the_last_ones():
    shown, hits = ShownBlocks(), torch.eye(4, dtype=torch.bool)
    half = shown(hits, (8, 8), (32, 32), (64, 64), (64, 64), 0)
    whole = shown(hits, (8, 8), (32, 32), (32, 32), (32, 32), 0)
    assert torch.equal(half, hits)
    assert torch.equal(whole, torch.eye(2, dtype=torch.bool))
