"""Masks from polygons, boxes, files and pixels, and masks made of masks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sbnet import masks
from sbnet.apps.pipeline import Frame
from sbnet.masks import grow


def picture(size=(24, 32)) -> torch.Tensor:
    return torch.zeros(1, 3, *size)


def half(left: bool) -> masks.Mask:
    pixels = torch.zeros(24, 32, dtype=torch.bool)
    pixels[:, :16] = left
    pixels[:, 16:] = not left
    return masks.Still(pixels)


def test_masks_compose():
    x = picture()
    a, b = half(True), masks.Boxes([[0, 0, 32, 8]])
    assert (a | b)(x).sum() == 24 * 16 + 8 * 16
    assert (a & b)(x).sum() == 8 * 16
    assert torch.equal((~a)(x), half(False)(x))
    assert torch.equal(a.dilate(3)(x), masks.grow(a(x), 3))
    assert (a & (lambda x: x.amax(1) > 1))(x).sum() == 0
    with pytest.raises(TypeError, match="mask: expected a Mask"):
        masks.as_mask(3)
    with pytest.raises(ValueError, match="mask: expected"):
        masks.as_mask(lambda x: x[0, 0, 0])(x)


@pytest.mark.parametrize("margin", [1, 2, 3, 7, 18, 40])
def test_grown_masks_hold_what_is_near(margin):
    mask = torch.rand(2, 33, 50, generator=torch.Generator().manual_seed(0)) > 0.999
    mask[0, 0, 49] = mask[1, 32, 0] = True
    y, x = torch.arange(33), torch.arange(50)
    wanted = torch.zeros_like(mask)
    for n, row, column in mask.nonzero().tolist():
        wanted[n] |= ((y - row).abs() <= margin)[:, None] & ((x - column).abs() <= margin)
    found = masks.grow(mask, margin)
    assert found.dtype == torch.bool
    assert torch.equal(found, wanted)
    assert torch.equal(masks.grow(mask.to(torch.uint8) * 255, margin), wanted)


def test_hold_keeps_for_so_many_frames():
    boxes = masks.Boxes([[0, 0, 4, 4]])
    held = boxes.hold(3)
    assert held(picture()).sum() == 16
    boxes.boxes = []
    assert [int(held(picture()).sum()) for _ in range(4)] == [16, 16, 0, 0]
    boxes.boxes = [[0, 0, 1, 1]]
    held(picture())
    boxes.boxes = ()
    held.reset()
    assert not held(picture()).any()


def test_polygons_fill_what_lies_inside():
    corners = [(4.0, 2.0), (20.0, 2.0), (20.0, 10.0), (4.0, 10.0)]
    wanted = torch.zeros(24, 32, dtype=torch.bool)
    wanted[2:10, 4:20] = True
    assert torch.equal(masks.Polygons([corners])(picture())[0], wanted)
    triangle = masks.fill_polygons([[(0, 0), (32, 0), (0, 24)]], (24, 32))
    rows, columns = np.mgrid[:24, :32] + 0.5
    assert np.array_equal(triangle.numpy(), columns / 32 + rows / 24 < 1)
    assert torch.equal(
        masks.fill_polygons([[(-9, -9), (99, -9), (99, 99), (-9, 99)]], (24, 32)), torch.ones(24, 32) > 0
    )
    with pytest.raises(ValueError, match="at least 3 corners"):
        masks.Polygons([[(0, 0), (1, 1)]])


def test_polygons_from_files(tmp_path):
    square = [[4, 2], [20, 2], [20, 10], [4, 10]]
    plain, coco, bad = tmp_path / "plain.json", tmp_path / "coco.json", tmp_path / "bad.json"
    plain.write_text(json.dumps({"polygons": [square]}))
    coco.write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a.png", "height": 48, "width": 64},
                   {"id": 2, "file_name": "b.png", "height": 48, "width": 64}],
        "annotations": [{"image_id": 1, "segmentation": [[8, 4, 40, 4, 40, 20, 8, 20]]},
                        {"image_id": 2, "bbox": [0, 0, 8, 8], "segmentation": {"counts": [], "size": []}}],
    }))  # fmt: skip
    bad.write_text("{")
    first = masks.open_mask(str(plain))(picture())
    assert first.sum() == 16 * 8
    both = masks.Polygons(coco)
    assert both(picture()).sum() == 16 * 8 + 4 * 4  # drawn on frames of twice the size
    both.see(Frame(0, None, "a.png"))
    assert torch.equal(both(picture()), first)
    with pytest.raises(ValueError, match="expected JSON"):
        masks.Polygons(bad)
    bad.write_text('[[["x"]]]')
    with pytest.raises(ValueError, match=r"expected|could not"):
        masks.Polygons(bad)


def test_boxes_from_files(tmp_path):
    """As (x0, y0, x1, y1), alone or beside polygons."""
    triangle, box = [[24, 0], [32, 0], [32, 8]], [4, 2, 20, 10]
    listed, named, other = (tmp_path / name for name in ("listed.json", "named.json", "other.json"))
    listed.write_text(json.dumps([box]))
    named.write_text(json.dumps({"boxes": [box], "polygons": [triangle]}))
    other.write_text('{"zones": []}')
    wanted = masks.Boxes([box])(picture())
    assert torch.equal(masks.open_mask(str(listed))(picture()), wanted)
    both = wanted | masks.Polygons([triangle])(picture())
    assert torch.equal(masks.open_mask(str(named))(picture()), both)
    with pytest.raises(ValueError, match="expected polygons, boxes or COCO annotations"):
        masks.open_mask(str(other))


def test_coco_pictures_of_other_sizes_and_without_annotations(tmp_path):
    """Each annotation is of its own picture's size; a picture that is listed and has none is left out whole."""
    path = tmp_path / "coco.json"
    path.write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a/a.png", "height": 24, "width": 32},
                   {"id": 2, "file_name": "b.png", "height": 240, "width": 320}, {"id": 3, "file_name": "c.png"}],
        "annotations": [{"image_id": 1, "bbox": [4, 2, 16, 8]}, {"image_id": 2, "bbox": [40, 20, 160, 80]}],
    }))  # fmt: skip
    mask, wanted = masks.Polygons(path), masks.Boxes([[4, 2, 20, 10]])(picture())
    for name in ("a.png", "b.png"):
        mask.see(Frame(0, None, name))
        assert torch.equal(mask(picture()), wanted), name
    mask.see(Frame(0, None, "c.png"))
    assert not mask(picture()).any()


def test_boxes_and_detections():
    wanted = masks.Boxes([[1, 2, 5, 6]])(picture())
    assert wanted[0, 2:6, 1:5].all()
    assert wanted.sum() == 16
    found = SimpleNamespace(xyxy=np.array([[1.2, 2.0, 4.8, 5.5]]))
    assert torch.equal(masks.Boxes(found)(picture()), wanted)


def test_tracks_on_a_device_are_those_of_records(device):
    """Boxes that stay there, and records in between; beyond the frame, of no size, none, and more than are kept."""
    torch.manual_seed(0)
    one, other = masks.Tracks(0.3, 4), masks.Tracks(0.3, 4) | masks.Tracks(0.3, 4)
    assert not one.captured
    other.expect_boxes(True)
    assert other.captured
    assert other.reads_boxes
    x, kept = torch.zeros(1, 3, 40, 70, device=device), masks.Tracks.MOST
    for _ in range(2):
        for step in range(14):
            got = other(x)
            wanted = one(x)
            assert torch.equal(got, wanted if step != 10 else torch.ones_like(wanted)), step
            assert wanted.all() == (step % 4 == 0)
            corners = torch.rand(kept + 40, 2) * torch.tensor([80.0, 50.0]) - 5
            boxes = torch.cat([corners, corners + 12 * torch.rand(kept + 40, 2)], 1)
            boxes[3, 2:] = boxes[3, :2]
            counts = torch.rand(len(boxes)) < (0.01, 0.0)[step == 6]
            counts[kept:] = step == 9
            rounded = (boxes.double() * 10).round() / 10
            records = [{"box": box} for box in rounded[counts].tolist()]
            one.learn([{"class": 1}, *records])
            if step == 4:
                other.learn(records)
            else:
                other.follow(boxes.to(device), counts.to(device))
        one.reset()
        other.reset()


def test_tracks_follow_what_was_found():
    tracks = masks.Tracks(margin=0.5, refresh=3)
    assert tracks(picture()).all()
    tracks.learn([{"box": [8, 8, 12, 12]}, {"class": 1}])
    assert tracks(picture()).sum() == 64
    tracks.learn([])
    assert not tracks(picture()).any()
    assert tracks(picture()).all()  # the fourth frame is whole again


def test_what_pixels_are():
    x = picture()
    x[:, 1, 3:6, 2:9] = 0.5
    assert masks.Nodata()(x).sum() == 21
    assert masks.Occupied()(x).sum() == 21
    x[:, :, 0] = float("nan")
    assert masks.Nodata()(x).sum() == 21
    page = torch.ones(1, 3, 64, 64)
    page[:, :, 20:22, 10:50] = 0.1
    ink = masks.Ink()(page)[0]
    assert ink[20:22, 10:50].all()
    assert not ink[40:].any()
    x = torch.rand(2, 3, 40, 50).contiguous(memory_format=torch.channels_last)
    grey = x.double().mean(1, keepdim=True)
    apart = (grey - F.avg_pool2d(grey, 7, 1, 3, count_include_pad=False)).abs()[:, 0]
    clear = (apart - 0.2).abs() > 1e-6
    assert torch.equal(masks.Ink(0.2, 7)(x)[clear], (apart > 0.2)[clear])
    with pytest.raises(ValueError, match="window: expected an odd number of pixels, 1 to 31, got 33"):
        masks.Ink(window=33)


def test_tissue_is_what_is_stained():
    slide = torch.full((1, 3, 64, 64), 0.93)
    assert not masks.Tissue()(slide).any()
    slide[:, :, 16:40, 8:32] = torch.tensor([0.7, 0.3, 0.6])[:, None, None]
    assert torch.equal(masks.Tissue()(slide)[0], slide[0, 1] < 0.5)
    values = torch.cat([torch.full((90,), 0.2), torch.full((10,), 0.8)])
    assert 0.21 < float(masks.otsu(values)) < 0.8


def test_alpha_comes_with_the_frame():
    pixels = np.zeros((24, 32, 4), np.uint8)
    pixels[4:8, 4:8, 3] = 200
    mask = masks.Alpha()
    mask.see(Frame(0, pixels))
    assert mask(picture()).sum() == 16
    mask.see(Frame(1, pixels[..., :3]))
    assert mask(picture()).all()


def test_a_small_network_says_where():
    x = picture()
    x[:, :, 8:12, 8:12] = 1
    found = masks.Thumbnail(lambda small: small[:, :1], scale=4)(x)
    assert torch.equal(found[0], x[0, 0] > 0)
    with pytest.raises(ValueError, match="expected scores"):
        masks.Thumbnail(lambda small: small[0])(x)


def test_changed_compares_with_what_was_computed():
    """A slow drift adds up until it counts; a threshold of 0 sees everything."""
    mask, x = masks.Changed(0.1), picture()
    assert mask(x).all()
    assert not mask(x + 0.06).any()
    assert mask(x + 0.12).all()  # 0.06 more than the frame before
    assert not mask(x + 0.2).any()
    strict = masks.Changed()
    strict(x)
    x[0, 2, 3, 4] = 1e-6
    assert strict(x).sum() == 1


def test_changed_over_boxes_overlooks_noise():
    """A pixel alone is noise; a change of the mean over the box is none."""
    mask, x = masks.open_mask("changed:25.5:3"), picture()
    assert mask(x).all()
    noisy = x.clone()
    noisy[0, :, 4, 5] += 0.5  # a mean of 0.06
    assert not mask(noisy).any()
    noisy[0, 1, 4, 6] += 0.5  # two: 0.11
    found = mask(noisy)[0]
    assert found[2:7, 4:8].all()  # the boxes that hold both
    assert found.sum() == 20
    assert not mask(noisy).any()  # all of them is computed: nothing is left that would count
    still = noisy.clone()
    still[0, :, 2:7, 4:8] += 0.09
    assert not mask(still).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("smooth", [3, 5, 9])
def test_changed_over_boxes_is_what_plain_pytorch_finds(device, smooth, dtype):
    """Channel by channel; brightnesses of few steps, so that no mean lies at the threshold to within rounding."""
    mask, used = masks.Changed(1.5 / 64 / smooth**2, smooth), None
    x = torch.randint(0, 64, (2, 3, 40, 56)).to(dtype) / 64
    shares = []
    for k in range(4):
        got = mask(x.to(device).contiguous(memory_format=torch.channels_last)).cpu()
        apart = torch.full(x.shape, torch.inf) if used is None else x.float() - used.float()
        inside = F.avg_pool2d(torch.ones(1, 1, 40, 56), smooth, 1, smooth // 2)
        means = (F.avg_pool2d(apart, smooth, 1, smooth // 2) / inside).abs()
        over = (means > mask.threshold).any(1)
        assert torch.equal(got, grow(over, smooth // 2))
        shares.append(float(got.float().mean()))
        used = x if used is None else torch.where(got[:, None], x, used)
        x = x.clone()
        x[:, k % 3, 5 * k : 5 * k + 6, 20 : 24 + k] += 0.25
        x[:, :, 33, 7] += 1 / 64  # noise
    assert shares[0] == 1
    assert all(0 < share < 0.5 for share in shares[1:])


def test_odd_boxes_alone():
    with pytest.raises(ValueError, match="expected an odd number"):
        masks.Changed(0.1, smooth=4)


def test_masks_from_pictures_and_films(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for k in range(3):
        one = np.zeros((12, 16), np.uint8)
        one[k] = 255
        image.fromarray(one).save(tmp_path / f"{k}.png")
    still = masks.open_mask(str(tmp_path / "1.png"))
    assert [int(still(picture())[0, 2:4].sum()) for _ in range(2)] == [64, 64]  # twice the size
    recorded = masks.Recorded(tmp_path)
    assert [recorded(picture())[0].any(1).nonzero()[0].item() for _ in range(4)] == [0, 2, 4, 4]
    recorded.reset()
    for index in (1, 2):  # a frame before them was broken
        recorded.see(Frame(index, None))
        assert recorded(picture())[0].any(1).nonzero()[0] == 2 * index


def test_masks_by_name(tmp_path):
    (tmp_path / "zone.json").write_text("[[[0, 0], [8, 0], [8, 8], [0, 8]]]")
    zone = str(tmp_path / "zone.json")
    x = picture()
    assert masks.open_mask(zone)(x).sum() == 64
    assert masks.open_mask(f"~{zone}")(x).sum() == 24 * 32 - 64
    assert masks.open_mask(f"{zone} + 2")(x).sum() == 100
    assert masks.open_mask(f"all & {zone} | {zone} + 2")(x).sum() == 100
    assert masks.open_mask(f"~all & {zone} | all")(x).all()
    assert not masks.open_mask(f"~all & ({zone} | all)")(x).any()
    assert masks.open_mask(f"(all & ({zone}) + 1) + 1")(x).sum() == 100
    assert masks.open_mask(f"~({zone} | ~all)")(x).sum() == 24 * 32 - 64
    held = masks.open_mask(f"motion:12 & {zone} * 2")
    assert held(x).sum() == 64
    for wrong in ("", "motion:x", "none.json", "motion &", "none.png"):
        with pytest.raises(ValueError, match="mask"):
            masks.open_mask(wrong)


def test_motion_takes_frames_of_any_size():
    motion = masks.MotionMask()
    assert motion(picture()).all()
    assert not motion(picture()).any()
    assert motion(picture((16, 16))).all()


@pytest.mark.parametrize(("frames", "tile"), [(5, 8), (50, 8), (3, 100)])
def test_each_pixel_has_its_turn_once_in_so_many_frames(frames, tile):
    mask = masks.Refresh(frames, tile)
    x = picture((24, 36)).expand(2, -1, -1, -1)
    found = [mask(x) for _ in range(2 * frames)]
    assert found[0].shape == (2, 24, 36)
    for turn in (found[:frames], found[frames:]):
        assert torch.equal(torch.stack(turn).sum(0), torch.ones(2, 24, 36, dtype=torch.int64))
    mask(x)
    mask.reset()
    assert torch.equal(mask(x), found[0])
    if tile == 8 and frames == 5:  # as much in every frame, in tiles
        assert {int(one[0].sum()) // 64 for one in found} <= {2, 3}
    with pytest.raises(ValueError, match="Refresh: expected at least one frame and pixel, got 0 and 8"):
        masks.Refresh(0, 8)


def test_refresh_has_a_name_and_goes_into_a_graph():
    mask = masks.open_mask("changed:12:5 | refresh:4")
    assert mask.captured
    assert mask.parts[1].frames == 4
