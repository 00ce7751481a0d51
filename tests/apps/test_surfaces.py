"""Pictures of hardware decoders: their colours are those of the host's decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sbnet.apps import video
from sbnet.apps.pipeline.frame_graph import seen
from sbnet.apps.pipeline.frames import input_of
from sbnet.apps.pipeline.networks import Network
from sbnet.apps.surface import Look, Surface, rgb_of

av = pytest.importorskip("av")


def nv12(height: int, width: int) -> np.ndarray:
    """[3H/2,W] uint8 that meets every level of luma beside every level of chroma."""
    return np.random.default_rng(0).integers(0, 256, (3 * height // 2, width), np.uint8)


def on_host(planes: np.ndarray, matrix: int, full: bool, size=None) -> np.ndarray:
    """What the host's decoder shows of these planes."""
    height, width = planes.shape[0] * 2 // 3, planes.shape[1]
    frame = av.VideoFrame(width, height, "yuv420p")
    chroma = planes[height:].reshape(height // 2, width // 2, 2)
    for plane, values in zip(frame.planes, (planes[:height], chroma[..., 0], chroma[..., 1]), strict=True):
        padded = np.zeros((plane.height, plane.line_size), np.uint8)
        padded[:, : values.shape[1]] = values
        plane.update(padded)
    frame.colorspace, frame.color_range = matrix, 2 if full else 1
    return video.Upright()(frame, size)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", [1, 4, 5, 6, 7, 9, 10])
def test_every_matrix_and_range_is_the_host_s(matrix, full):
    planes = nv12(96, 256)
    wanted = on_host(planes, matrix, full).astype(int)
    got = rgb_of(torch.from_numpy(planes), Look(video.SCALERS[matrix], full)).numpy()
    assert np.abs(got - wanted).max() <= 1


def test_narrow_pictures_too():
    planes = nv12(2, 6)
    got = rgb_of(torch.from_numpy(planes), Look(1)).numpy().astype(int)
    assert np.abs(got - on_host(planes, 1, False)).max() <= 3  # of few columns FFmpeg rounds in another way


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_pictures_are_turned_and_mirrored(turned, over, across):
    planes = torch.from_numpy(nv12(16, 32))
    plain = rgb_of(planes, Look()).numpy()
    wanted = (plain.swapaxes(0, 1) if turned else plain)[:: -1 if over else 1, :: -1 if across else 1]
    surface = Surface(planes, Look(turned=turned, over=over, across=across))
    assert np.array_equal(surface.rgb().numpy(), wanted)
    assert surface.shape == wanted.shape


def test_scaled_pictures_are_close_to_the_host_s():
    """Smooth ones: the host scales luma and chroma, this the colours."""
    y, x = np.mgrid[:96, :128]
    planes = np.concatenate([60 + y + x // 2, np.full((48, 128), 128)]).astype(np.uint8)
    planes[96:, ::2] = 90 + np.arange(64)
    got = rgb_of(torch.from_numpy(planes), Look(1, size=(48, 64))).numpy().astype(int)
    assert np.abs(got - on_host(planes, 1, False, (48, 64))).max() <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("network", [Network(None), Network(None, multiple=32), Network(None, pad=3)])
@pytest.mark.parametrize(
    "look", [Look(1), Look(9, True, True), Look(5, turned=True, over=True), Look(1, size=(20, 30))]
)
def test_networks_are_given_the_same_bytes(look, dtype, network):
    """To the bit, in one pass, with a border, or by way of bytes."""
    planes = torch.from_numpy(np.stack([nv12(98, 250), nv12(98, 250)[::-1]]))
    got, wide = seen(planes, look, dtype, network)
    wanted = input_of(rgb_of(planes, look), dtype)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)
    assert torch.equal(wide, network.widened(wanted))
    assert wide.is_contiguous(memory_format=torch.channels_last)
