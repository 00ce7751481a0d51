"""yuv_to_rgb_: the colours of a decoder's planes, against the definition in plain PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch

from sbnet.apps.surface import CHROMA, _factors
from sbnet.ops.frames.yuv_to_rgb import yuv_to_rgb_
from sbnet.reference.frames import yuv_to_rgb_ as defined

DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]
BT601 = (*_factors(5, False)[:1], *_factors(5, False)[1], 16)


def planes_of(device, *size: int) -> torch.Tensor:
    batch, height, width = size
    return torch.randint(0, 256, (batch, 3 * height // 2, width), dtype=torch.uint8, device=device)


def both(planes, look, size, dtype):
    """What the op and the definition write, into tensors that hold anything."""
    made = []
    for call in (yuv_to_rgb_, defined):
        rgb = torch.full((len(planes), 3, *size), 77, dtype=dtype, device=planes.device)
        rgb = rgb.contiguous(memory_format=torch.channels_last)
        call(planes, look, rgb)
        made.append(rgb)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planar", [False, True])
def test_equals_reference(device, dtype, planar):
    """Sizes whose rows are whole numbers of quads of pixels and such that are not; with a border and without."""
    torch.manual_seed(0)
    for (high, wide), (below, right) in itertools.product(
        ((34, 40), (2, 2), (6, 44), (20, 70)), ((0, 0), (3, 4), (1, 7))
    ):
        planes = planes_of(device, 2, high, wide)
        for turned, over, across in itertools.product((False, True), repeat=3):
            size = (wide, high) if turned else (high, wide)
            look = [*BT601, planar, turned, over, across]
            got, wanted = both(planes, look, (size[0] + below, size[1] + right), dtype)
            assert torch.equal(got, wanted), (size, below, right, turned, over, across)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", CHROMA)
def test_every_matrix_and_range(device, matrix, full):
    """Every level of luma beside every pair of levels of chroma that is a multiple of three."""
    levels = torch.arange(256, dtype=torch.uint8, device=device)
    luma = levels.repeat(512, 1)
    chroma = torch.stack([(3 * torch.arange(256, device=device) % 256)[:, None].expand(256, 128),
                          levels[None, ::2].expand(256, 128)], 2).byte()  # fmt: skip
    planes = torch.cat([luma, chroma.reshape(256, 256)])[None]
    luma_factor, chroma_factors = _factors(matrix, full)
    look = [luma_factor, *chroma_factors, 0 if full else 16, False, False, False, False]
    got, wanted = both(planes, look, (512, 256), torch.uint8)
    assert torch.equal(got, wanted)
    assert got.amin() == 0
    assert got.amax() == 255


def test_no_images(device):
    got, wanted = both(planes_of(device, 0, 4, 6), [*BT601, 0, 0, 0, 0], (4, 6), torch.float16)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("planes", "look", "rgb", "why"),
    [
        ((1, 6, 4), 10, (1, 3, 4, 4), None),
        ((1, 5, 4), 10, (1, 3, 4, 4), "planes: expected contiguous uint8"),
        ((1, 6, 5), 10, (1, 3, 4, 5), "planes: expected luma of even sides"),
        ((1, 6, 4), 9, (1, 3, 4, 4), "look: expected 10 numbers, got 9"),
        ((1, 6, 4), 10, (2, 3, 4, 4), "rgb: expected .1,3,H,W."),
        ((1, 6, 4), 10, (1, 3, 3, 4), "rgb: expected at least 4x4 pixels, got 3x4"),
    ],
)
def test_refusals(planes, look, rgb, why):
    arguments = torch.zeros(planes, dtype=torch.uint8), [*BT601, 0, 0, 0, 0][:look]
    out = torch.zeros(rgb).contiguous(memory_format=torch.channels_last)
    if why is None:
        return yuv_to_rgb_(*arguments, out)
    with pytest.raises(RuntimeError, match=why):
        yuv_to_rgb_(*arguments, out)


def test_a_tensor_that_is_not_channels_last_is_refused():
    with pytest.raises(RuntimeError, match="channels_last without gaps"):
        yuv_to_rgb_(torch.zeros(1, 6, 4, dtype=torch.uint8), [*BT601, 0, 0, 0, 0], torch.zeros(1, 3, 4, 4))
