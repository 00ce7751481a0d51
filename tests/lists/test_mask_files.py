"""Masks from files as people have them: labels, palettes, opacity, runs of pixels, shares, and what is no mask."""

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sbnet import masks

SQUARE = np.zeros((40, 60), np.uint8)
SQUARE[10:20, 10:30] = 1


def voc_palette() -> list[int]:
    """The colours of Pascal VOC's classes: the first are dark."""
    bits = [[(k >> (3 * j + c)) & 1 for j in range(3)] for k in range(256) for c in range(3)]
    return [sum(b << (7 - j) for j, b in enumerate(each)) for each in bits]


def saved(path: Path, kind: str) -> None:
    image = pytest.importorskip("PIL.Image")
    made = {
        "0 and 255": lambda: image.fromarray(SQUARE * 255),
        "0 and 1": lambda: image.fromarray(SQUARE),
        "one bit": lambda: image.fromarray(SQUARE * 255).convert("1"),
        "16 bits": lambda: image.fromarray(SQUARE.astype(np.uint16) * 65535),
        "16 bits, 0 and 1": lambda: image.fromarray(SQUARE.astype(np.uint16)),
        "labels": lambda: image.fromarray(SQUARE * 20),
        "colour": lambda: image.fromarray(np.repeat(SQUARE[..., None] * 255, 3, 2)),
        "opaque where set": lambda: image.fromarray(np.dstack([np.full((40, 60, 3), 255, np.uint8), SQUARE * 255])),
        "black, opaque where set": lambda: image.fromarray(np.dstack([np.zeros((40, 60, 3), np.uint8), SQUARE * 255])),
        "int32": lambda: image.fromarray(SQUARE.astype(np.int32)),
        "floats": lambda: image.fromarray(SQUARE.astype(np.float32)),
        "floats to 255": lambda: image.fromarray(SQUARE.astype(np.float32) * 255),
    }
    if kind.startswith("class"):
        picture = image.frombytes("P", (60, 40), (SQUARE * np.uint8(int(kind.split()[1]))).tobytes())
        picture.putpalette(voc_palette())
    else:
        picture = made[kind]()
    picture.save(path)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("0 and 255", "png"), ("0 and 255", "bmp"), ("0 and 1", "png"), ("one bit", "png"), ("16 bits", "png"),
     ("16 bits, 0 and 1", "tif"), ("labels", "png"), ("colour", "png"), ("opaque where set", "png"),
     ("black, opaque where set", "png"), ("int32", "tif"), ("floats", "tif"), ("floats to 255", "tif"),
     ("class 1", "png"), ("class 8", "png"), ("class 15", "png"), ("class 255", "png")],
)  # fmt: skip
def test_pictures_of_masks_of_every_kind(kind, suffix, tmp_path):
    saved(tmp_path / f"mask.{suffix}", kind)
    found = masks.Recorded(tmp_path / f"mask.{suffix}")(torch.zeros(1, 3, 40, 60))[0]
    assert torch.equal(found, torch.from_numpy(SQUARE > 0))


def test_shades_count_from_half_on(tmp_path):
    image = pytest.importorskip("PIL.Image")
    ramp = np.arange(256, dtype=np.uint8)[None].repeat(8, 0)
    image.fromarray(ramp).save(tmp_path / "ramp.png")
    found = masks.Recorded(tmp_path / "ramp.png")(torch.zeros(1, 3, 8, 256))[0]
    assert torch.equal(found, torch.from_numpy(ramp >= 128))
    image.fromarray(ramp[:, :100]).save(tmp_path / "dark.png")
    assert not masks.Recorded(tmp_path / "dark.png")(torch.zeros(1, 3, 8, 100)).any()


def coco(path: Path, notes: list, images=None) -> Path:
    listed = [{"id": 1, "file_name": "a.png", "height": 40, "width": 60}] if images is None else images
    path.write_text(json.dumps({"images": listed, "annotations": notes}))
    return path


def test_runs_of_pixels_are_decoded(tmp_path):
    """They go down the columns: as a list (crowds), and as COCO's text."""
    column = torch.zeros(40, 60, dtype=torch.bool)
    column[:, 0] = True
    blob = torch.zeros(40, 60, dtype=torch.bool)
    blob[5:20, 7:33] = True
    flat, runs, value = blob.t().flatten().tolist(), [], False
    while flat:
        count = next((k for k, v in enumerate(flat) if v != value), len(flat))
        runs, flat, value = [*runs, count], flat[count:], not value
    for counts, wanted in (
        ([0, 40, 2360], column),
        (text_of([0, 40, 2360]), column),
        (runs, blob),
        (text_of(runs), blob),
    ):
        note = {
            "image_id": 1,
            "iscrowd": 1,
            "bbox": [0, 0, 60, 40],
            "segmentation": {"size": [40, 60], "counts": counts},
        }
        found = masks.Polygons(coco(tmp_path / "coco.json", [note]))(torch.zeros(1, 3, 40, 60))[0]
        assert torch.equal(found, wanted)
    larger = masks.Polygons(tmp_path / "coco.json")(torch.zeros(1, 3, 80, 120))[0]
    assert torch.equal(larger, blob.repeat_interleave(2, 0).repeat_interleave(2, 1))


def text_of(runs: list[int]) -> str:
    """As pycocotools' rleToString writes them."""
    text = ""
    for k, count in enumerate(runs):
        left = count - (runs[k - 2] if k > 2 else 0)
        more = True
        while more:
            bits = left & 31
            left >>= 5
            more = left != (-1 if bits & 16 else 0)
            text += chr(48 + bits + (32 if more else 0))
    return text


def test_parts_without_an_inside_are_left_out(tmp_path):
    square = [0, 0, 10, 0, 10, 10, 0, 10]
    note = {"image_id": 1, "segmentation": [square, [3, 3, 5, 5]], "bbox": [0, 0, 30, 30]}
    assert masks.Polygons(coco(tmp_path / "c.json", [note]))(torch.zeros(1, 3, 40, 60)).sum() == 100


def test_relative_polygons_are_of_the_frame(tmp_path):
    """No number above 1: one pixel, or shares of the frame."""
    path = tmp_path / "relative.json"
    path.write_text(
        json.dumps({"polygons": [[[0.1, 0.1], [0.6, 0.1], [0.6, 0.8], [0.1, 0.8]]], "boxes": [[0, 0, 0.5, 0.05]]})
    )
    wanted = torch.zeros(720, 1280, dtype=torch.bool)
    wanted[72:576, 128:768] = True
    wanted[:36, :640] = True
    assert torch.equal(masks.Polygons(path)(torch.zeros(1, 3, 720, 1280))[0], wanted)
    assert masks.Polygons([[(0.0, 0.0), (2.0, 0.0), (2.0, 1.0), (0.0, 1.0)]])(torch.zeros(1, 3, 8, 8)).sum() == 2


def test_two_images_of_one_name_are_two(tmp_path):
    images = [{"id": 1, "file_name": "left/x.png", "height": 40, "width": 60},
              {"id": 2, "file_name": "right/x.png", "height": 40, "width": 60}]  # fmt: skip
    notes = [{"image_id": 1, "bbox": [0, 0, 10, 10]}, {"image_id": 2, "bbox": [20, 20, 5, 5]}]
    mask = masks.Polygons(coco(tmp_path / "c.json", notes, images))
    for name, pixels in (("left/x.png", 100), ("/data/right/x.png", 25)):
        mask.see(SimpleNamespace(name="x.png", path=Path(name)))
        assert mask(torch.zeros(1, 3, 40, 60)).sum() == pixels
    mask.see(SimpleNamespace(name="x.png"))
    with pytest.raises(ValueError, match=r"x\.png: expected the name of one image, got that of left/x\.png and right"):
        mask(torch.zeros(1, 3, 40, 60))


HOSTILE = {
    "NaN": "[[[NaN, 0], [1, 1], [2, 2]]]",
    "infinite": "[[[Infinity, 0], [1, 1], [2, 2]]]",
    "400 digits": "[[[" + "9" * 400 + ", 0], [1, 1], [2, 2]]]",
    "5000 digits": "[[[" + "9" * 5000 + ", 0], [1, 1], [2, 2]]]",
    "1e308": "[[[1e308, 0], [1, -1e308], [2, 2]]]",
    "nested": "[" * 100_000 + "]" * 100_000,
    "a number": "7",
    "a text": '"zones"',
    "null": "null",
    "texts": '[["a", "b", "c"]]',
    "flat": "[1, 2, 3]",
    "not closed": "[[0, 0",
    "no text": b"\xff\xfe\x00",
    "height 0": {"images": [{"id": 1, "file_name": "a", "height": 0, "width": 5}], "annotations": []},
    "height text": {"images": [{"id": 1, "file_name": "a", "height": "5", "width": 5}], "annotations": []},
    "no width": {"images": [{"id": 1, "file_name": "a", "height": 5}], "annotations": []},
    "images of numbers": {"images": [1], "annotations": []},
    "images no list": {"images": 5, "annotations": []},
    "notes of numbers": {"images": [], "annotations": [1]},
    "notes no list": {"images": [], "annotations": 5},
    "no shape": {"images": [], "annotations": [{"image_id": 1}]},
    "unknown image": {"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 2, "bbox": [0, 0, 1, 1]}]},
    "odd corners": {"images": [], "annotations": [{"segmentation": [[0, 0, 1]]}]},
    "bbox of texts": {"images": [], "annotations": [{"bbox": ["a", "b", "c", "d"]}]},
    "runs too short": {"images": [], "annotations": [{"segmentation": {"size": [4, 4], "counts": [3]}}]},
    "runs below 0": {"images": [], "annotations": [{"segmentation": {"size": [4, 4], "counts": [-4, 20]}}]},
    "runs of texts": {"images": [], "annotations": [{"segmentation": {"size": [4, 4], "counts": ["a"]}}]},
    "runs without end": {"images": [], "annotations": [{"segmentation": {"size": [4, 4], "counts": "ooooo"}}]},
    "runs of other letters": {"images": [], "annotations": [{"segmentation": {"size": [4, 4], "counts": "é"}}]},
    "runs of no size": {"images": [], "annotations": [{"segmentation": {"counts": [3]}}]},
    "huge runs": {"images": [], "annotations": [{"segmentation": {"size": [10**7, 10**7], "counts": [10**14]}}]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_mask_files_that_are_none_are_a_line(kind, tmp_path):
    path = tmp_path / "zones.json"
    content = HOSTILE[kind]
    data = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=r"sbnet: Polygons: .*zones\.json: expected") as found:
        masks.Polygons(path)
    assert len(str(found.value)) < 500
    assert "\n" not in str(found.value)
    from sbnet.apps.pipeline import Pipeline, PipelineError

    with pytest.raises(PipelineError, match=r"zones\.json"):
        Pipeline([np.zeros((8, 8, 3), np.uint8)], str(path), torch.nn.Conv2d(3, 3, 1), None, device="cpu")


def test_a_pipe_is_no_mask_file(tmp_path):
    os.mkfifo(tmp_path / "zones.json")
    with pytest.raises(ValueError, match="regular|no such file"):
        masks.Polygons(tmp_path / "zones.json")
    with pytest.raises(ValueError, match="regular|no such file"):
        masks.open_mask(str(tmp_path / "zones.json"))


def test_a_polygon_of_a_million_corners_is_filled_at_once():
    """It took 87 s, edge by edge. A flower: its area is known."""
    angle = torch.linspace(0, 2 * math.pi, 1_000_001, dtype=torch.float64)[:-1]
    radius = 400 * (1 + 0.1 * (97 * angle).sin())
    corners = torch.stack([960 + radius * angle.cos(), 540 + radius * angle.sin()], 1)
    begin = time.perf_counter()
    found = masks.fill_polygons([corners], (1080, 1920))
    assert time.perf_counter() - begin < 10
    assert float(found.sum()) == pytest.approx(math.pi * 400**2 * (1 + 0.1**2 / 2), rel=1e-3)


def test_polygons_beyond_the_frame_and_one_by_one_agree():
    """Each edge by itself, as it is defined, on random polygons of which parts lie outside."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        corners = (
            torch.rand(int(torch.randint(3, 12, (1,), generator=generator)), 2, generator=generator) * 90 - 20
        ).double()
        height, width = 31, 43
        y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        wanted = torch.zeros(height, width, dtype=torch.bool)
        for (x0, y0), (x1, y1) in zip(corners.tolist(), corners.roll(-1, 0).tolist(), strict=True):
            spans = (y >= min(y0, y1)) & (y < max(y0, y1))
            wanted ^= spans & (x >= x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
        assert torch.equal(masks.fill_polygons([corners], (height, width)), wanted)


def test_a_mask_that_cannot_be_read_on_is_a_line(tmp_path):
    """A folder of masks of which one is broken, met in the middle of a run."""
    from sbnet.apps.density import measure
    from sbnet.apps.pipeline import Pipeline, PipelineError, run_large

    image = pytest.importorskip("PIL.Image")
    (tmp_path / "masks").mkdir()
    image.fromarray(SQUARE).save(tmp_path / "masks" / "0.png")
    (tmp_path / "masks" / "1.png").write_text("no picture")
    frames, net = [np.zeros((40, 60, 3), np.uint8)] * 3, torch.nn.Conv2d(3, 3, 1).eval()
    for call in (
        lambda: Pipeline(frames, str(tmp_path / "masks"), net, None, device="cpu", compare=0).run(),
        lambda: measure(frames, str(tmp_path / "masks")),
    ):
        with pytest.raises(PipelineError, match=r"mask: Recorded: masks: 1\.png: "):
            call()
    with pytest.raises(PipelineError, match="mask: mask: expected"):
        run_large(frames[0], lambda x: x[..., :3], net, tile=64, device="cpu")
