"""Pictures as people have them: order, animations, opacity, numbers of any kind, and what cannot be read."""

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

from sbnet.apps.pipeline import Network, Pipeline, PipelineError, open_source
from support.films import run, times_of

av = pytest.importorskip("av")
image = pytest.importorskip("PIL.Image")


def test_numbered_pictures_come_in_the_order_in_which_a_person_counts(tmp_path):
    for k in (1, 2, 10, 9, 100):
        image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(tmp_path / f"frame{k}.png")
    wanted = [f"frame{k}.png" for k in (1, 2, 9, 10, 100)]
    for source in (tmp_path, tmp_path / "*.png"):
        assert [frame.name for frame in open_source(source)] == wanted


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.gif", "a.tif"])
def test_animations_are_films(name, tmp_path):
    shown = [image.fromarray(np.full((40, 60, 3), 60 * k, np.uint8)) for k in range(4)]
    options = {} if name.endswith("tif") else {"duration": [40, 80, 200, 40]}
    options |= {"lossless": True} if name.endswith("webp") else {}
    shown[0].save(tmp_path / name, save_all=True, append_images=shown[1:], **options)
    frames = list(open_source(tmp_path / name))
    assert [int(frame.picture()[5, 5, 0]) for frame in frames] == pytest.approx([0, 60, 120, 180], abs=6)
    assert [frame.index for frame in frames] == [0, 1, 2, 3]
    if options:
        assert [frame.time for frame in frames] == pytest.approx([0, 0.04, 0.12, 0.32], abs=1e-6)
    run(tmp_path / name, tmp_path / "o.mp4")
    assert len(times_of(tmp_path / "o.mp4")) == 4


def test_an_opacity_is_kept_and_made_as_large_as_the_picture(tmp_path):
    icon = np.zeros((48, 64, 4), np.uint8)
    icon[..., 0], icon[10:30, 10:40, 3] = 200, 255
    image.fromarray(icon).save(tmp_path / "icon.png")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return nn.functional.interpolate(self.conv(x), scale_factor=2.0)

    Pipeline(tmp_path / "icon.png", "all", Network(Twice().eval(), "twice"), tmp_path / "o", device="cpu").run()
    made = image.open(tmp_path / "o" / "00000.png")
    assert (made.mode, made.size) == ("RGBA", (128, 96))
    alpha = np.asarray(made)[..., 3]
    assert alpha[0, 0] == 0
    assert (alpha[22:58, 22:78] == 255).all()
    run(tmp_path / "icon.png", tmp_path / "same")
    assert np.array_equal(np.asarray(image.open(tmp_path / "same" / "00000.png"))[..., 3], icon[..., 3])


@pytest.mark.parametrize(
    ("kind", "top"),
    [(np.uint16, 65535), (np.int32, 255), (np.int32, 65535), (np.float32, 1), (">u2", 65535), (">f4", 1)],
)
def test_numbers_of_any_kind_are_0_to_1(kind, top, tmp_path):
    """A ramp in a TIFF, and as an array: what the network gets, and what is seen."""
    ramp = np.linspace(0, 1, 60)[None].repeat(40, 0)
    array = (ramp * top).round().astype(kind) if top > 1 else ramp.astype(kind)
    sources = [[array, array]]
    if np.dtype(kind).isnative:
        image.fromarray(array).save(tmp_path / "ramp.tif")
        sources.append(tmp_path / "ramp.tif")
    for source in sources:
        frame = next(iter(open_source(source)))
        x = frame.tensor(torch.device("cpu"), torch.float32)
        assert x[0, 0].numpy() == pytest.approx(ramp, abs=0.51 / max(top, 255) if top > 1 else 1e-6)
        assert np.abs(frame.picture()[..., 0] - 255 * ramp).max() <= 1.01


def test_floats_and_numbers_below_0_stay_what_they_are():
    for array in (np.array([[-3.0, 400.0]], np.float64), np.array([[-3, 400]], np.int16)):
        x = next(iter(open_source([array]))).tensor(torch.device("cpu"), torch.float32)
        assert x.flatten().tolist() == [-3, 400]
    with pytest.raises(PipelineError, match="expected whole numbers, floats or bool, got complex64"):
        next(iter(open_source([np.zeros((4, 4), np.complex64)]))).tensor(torch.device("cpu"), torch.float32)


def test_pictures_of_one_name_in_two_folders_are_two(tmp_path):
    for folder, level in (("a", 50), ("b", 200)):
        (tmp_path / folder).mkdir()
        image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(tmp_path / folder / "x.png")
    run(tmp_path / "*" / "x.png", tmp_path / "o.jsonl")
    names = [json.loads(line)["name"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert names == ["a/x.png", "b/x.png"]


def test_a_picture_of_too_many_pixels_is_a_line(tmp_path, monkeypatch):
    image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(tmp_path / "large.png")
    image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "small.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(PipelineError, match=r"large\.png: cannot be read \(more than 200 pixels; run_large"):
        run(tmp_path / "large.png", tmp_path / "o")
    assert run(tmp_path, None, skip_broken=True).frames == 1


def test_a_pipe_in_a_folder_is_a_broken_frame(tmp_path):
    image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").mkdir()
    done = run(tmp_path, None, skip_broken=True)
    assert (done.frames, done.skipped) == (1, 1)
    assert "b.png: cannot be read (not a regular file)" in done.broken[0]
