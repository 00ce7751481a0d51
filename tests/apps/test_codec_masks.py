"""Masks out of the motion vectors of a film's codec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sbnet.apps.pipeline import Pipeline, PipelineError, open_source
from sbnet.apps.pipeline.hardware import Decoding
from sbnet.masks import open_mask
from sbnet.masks.codec import Codec, Motion, motion_of

av = pytest.importorskip("av")

CPU = torch.device("cpu")
KINDS = [("source", "i4"), ("w", "u1"), ("h", "u1"), ("dst_x", "i2"), ("dst_y", "i2"), ("motion_x", "i4"),
         ("motion_y", "i4"), ("motion_scale", "u2")]  # fmt: skip


def film(path: Path, codec: str = "libx264", count: int = 8) -> Path:
    """A textured square walks over a textured floor that stands still."""
    floor = np.random.default_rng(0).integers(60, 120, (96, 160, 3)).astype(np.uint8)
    square = np.random.default_rng(1).integers(140, 250, (32, 32, 3)).astype(np.uint8)
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=10)
        stream.height, stream.width, stream.pix_fmt = 96, 160, "yuv420p"
        stream.codec_context.max_b_frames = 0
        stream.options = {"x265-params": "log-level=error"} if codec == "libx265" else {"crf": "20"}
        for k in range(count):
            picture = floor.copy()
            picture[32:64, 8 * k : 8 * k + 32] = square
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    return path


def frames(path: Path) -> list:
    return list(open_source(path, decoding=Decoding("host", CPU, True)))


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_what_moves_is_in_the_mask_and_most_of_the_rest_is_not(codec, tmp_path):
    mask, shares = Codec(), []
    for k, frame in enumerate(frames(film(tmp_path / "film.mp4", codec))):
        mask.see(frame)
        found = mask(torch.zeros(1, 3, 96, 160))[0]
        if k == 0:
            assert found.all()  # a key frame
            continue
        assert found[32:64, 8 * k : 8 * k + 32].float().mean() > 0.9
        shares.append(float(found.float().mean()))
    assert np.mean(shares) < 0.35  # the square has 7 %


def test_vectors_of_blocks_of_every_shape_lie_where_the_blocks_do():
    rows = [(-1, 16, 16, 8, 8, 8, 0, 4), (-1, 8, 16, 20, 8, 0, 0, 4), (1, 8, 16, 28, 8, -6, 8, 4),
            (-1, 16, 8, 8, 20, 0, 0, 1), (-1, 8, 8, 20, 20, 0, 3, 1)]  # fmt: skip
    found = motion_of(np.array(rows, KINDS), (24, 40)).cells
    wanted = np.full((3, 5), np.inf)
    wanted[:2, :2], wanted[:2, 2], wanted[:2, 3], wanted[2, :2], wanted[2, 2] = 2, 0, 2.5, 0, 3
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_masks_are_upright(turned, over, across):
    cells = np.zeros((3, 2), np.float32)
    cells[0, 1] = 5
    stored = np.zeros((20, 12), bool)
    stored[:8, 8:] = True
    wanted = (stored.T if turned else stored)[:: -1 if over else 1, :: -1 if across else 1]
    assert np.array_equal(Motion(cells, (20, 12), turned, over, across).moved(1, CPU).numpy(), wanted)


def test_in_a_pipeline_by_name_and_composed_and_scaled(tmp_path):
    path, active = film(tmp_path / "film.mp4"), []
    options = {"device": "cpu", "compare": 0, "check": 0, "block": 8}
    Pipeline(path, "codec:0.5", "contours", lambda r: active.append(r.density), **options).run()
    assert active[0] == 1
    assert max(active[1:]) < 0.7
    half: list = []
    Pipeline(path, "codec & motion", "contours", lambda r: half.append(r.density), size=(48, 80), **options).run()
    assert len(half) == 8


def test_films_without_vectors_are_refused(tmp_path):
    with pytest.raises(PipelineError, match="mask: Codec: expected a frame of a film with motion vectors"):
        Pipeline(film(tmp_path / "film.mkv", "libx265"), "codec", "contours", device="cpu", compare=0).run()
    with pytest.raises(PipelineError, match="expected a frame of a film with motion vectors"):
        Pipeline(np.zeros((2, 32, 32, 3), np.uint8), "codec", "contours", device="cpu", compare=0).run()
    with pytest.raises(ValueError, match="Codec: least: expected pixels, at least 0, got -1"):
        open_mask("codec:-1")


def test_the_hardware_s_decoder_tells_no_vectors():
    assert Decoding("auto", torch.device("cuda"), True).vectors
    with pytest.raises(PipelineError, match="expected host for a mask that reads motion vectors"):
        Decoding("nvdec", torch.device("cuda"), True)
