"""Adapters against the packages themselves; a package that is not installed skips its tests."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sbnet
from sbnet import adapters, masks
from sbnet.adapters.slices import Slices
from sbnet.benchmarks.harness.nets import torchvision
from sbnet.ops.frames.components import connected_components


def test_adapters_are_short():
    """What ties sbnet to another library is at most 100 lines."""
    found = {path.name: len(path.read_text().splitlines()) for path in Path(adapters.__file__).parent.glob("*.py")}
    assert {"ray.py", "sahi.py", "supervision.py", "transforms.py"} <= set(found)
    assert max(found.values()) <= 100, found


def picture(height: int = 200, width: int = 300) -> np.ndarray:
    return np.full((height, width, 3), 30, np.uint8)


def squares(crop: np.ndarray) -> list[tuple[int, int, int, int]]:
    """A detector: boxes of what is brighter than the floor."""
    bright = torch.from_numpy(crop.max(2) > 128)[None].float()
    boxes, _, _, count = connected_components(bright, 0.5)
    return [tuple(box) for box in boxes[0, : int(count)].tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_each_set_pixel_lies_in_a_slice(seed):
    """Of the sizes that were asked for; and slices of blocks apart do not overlap."""
    torch.manual_seed(seed)
    mask = torch.zeros(190, 310, dtype=torch.bool)
    for _ in range(seed):
        y, x = int(torch.randint(180, ())), int(torch.randint(300, ()))
        mask[y : y + 40, x : x + 60] = True
    slices = Slices(block=16, margin=8, least=48, most=96)
    covered = torch.zeros_like(mask)
    found = slices(mask)
    for x0, y0, x1, y1 in found:
        assert 0 <= x0 < x1 <= 310
        assert 0 <= y0 < y1 <= 190
        assert max(x1 - x0, y1 - y0) <= 96
        assert mask[y0:y1, x0:x1].any()
        covered[y0:y1, x0:x1] = True
    assert not (mask & ~covered).any()
    assert bool(found) == bool(mask.any())
    with pytest.raises(ValueError, match="most > 2 margin"):
        Slices(margin=50, most=100)


def test_supervision_moves_all_that_detections_hold():
    """Boxes, masks, turned boxes and key points; what the callback returned stays as it was."""
    sv = pytest.importorskip("supervision")
    from sbnet.adapters.supervision import ActiveSlicer

    image, returned = picture(), []
    image[150:160, 250:270] = 240

    def callback(crop):
        ((x0, y0, x1, y1),) = squares(crop)
        corners = np.array([[(x0, y0), (x1, y0), (x1, y1), (x0, y1)]], np.float32)
        points = np.array([[(x0, y0, 0.5), (x1, y1, 0.25)]])
        data = {"xyxyxyxy": corners, "keypoints": points, "class_name": np.array(["a"]),
                "embedding": np.array([[x0, y0]], np.float32)}  # fmt: skip
        pixels = (crop.max(2) > 128)[None]
        made = sv.Detections(np.array([[x0, y0, x1, y1]], np.float32), pixels, np.ones(1), np.zeros(1, int), data=data,
                             metadata={"slice": crop.shape})  # fmt: skip
        returned.append((made, made.xyxy.copy(), made.mask.copy(), corners.copy(), data["keypoints"].copy()))
        return made

    found = ActiveSlicer(callback, masks.Boxes([[240, 140, 280, 170]]), Slices(16, 8, 32, 128))(image)
    assert found.xyxy.tolist() == [[250, 150, 270, 160]]
    assert found.data["xyxyxyxy"].tolist() == [[[250, 150], [270, 150], [270, 160], [250, 160]]]
    assert found.data["keypoints"].tolist() == [[[250, 150, 0.5], [270, 160, 0.25]]]
    assert found.data["class_name"].tolist() == ["a"]
    assert np.array_equal(found.mask[0], image.max(2) > 128)
    ((made, boxes, pixels, corners, points),) = returned
    assert np.array_equal(found.data["embedding"], [boxes[0, :2]])
    assert np.array_equal(made.xyxy, boxes)
    assert np.array_equal(made.mask, pixels)
    assert np.array_equal(made.data["xyxyxyxy"], corners)
    assert np.array_equal(made.data["keypoints"], points)


def test_supervision_calls_active_slices_only():
    sv = pytest.importorskip("supervision")
    from sbnet.adapters.supervision import ActiveSlicer, Detected, detections_of

    image, areas = picture(), []
    image[20:30, 20:40], image[150:160, 250:270], image[100:110, 100:110] = 200, 220, 240

    def callback(crop):
        areas.append(crop.shape[0] * crop.shape[1])
        boxes = np.array(squares(crop), np.float32).reshape(-1, 4)
        pixels = np.stack([crop.max(2) > 128 for _ in boxes]) if len(boxes) else None
        return sv.Detections(boxes, mask=pixels, confidence=np.ones(len(boxes)), class_id=np.zeros(len(boxes), int))

    slicer = ActiveSlicer(callback, masks.Boxes([[15, 15, 45, 35], [240, 140, 280, 170]]), Slices(16, 8, 32, 128))
    found = slicer(image)
    assert sorted(found.xyxy.tolist()) == [[20, 20, 40, 30], [250, 150, 270, 160]]  # not the third: not looked at
    assert len(areas) == len(slicer.last) == 2
    assert sum(areas) < 0.2 * 200 * 300
    x = torch.zeros(1, 3, 200, 300)
    assert torch.equal(Detected(found)(x)[0], torch.from_numpy(found.mask.any(0)))
    assert Detected(found)(x).sum() == 2 * 10 * 20
    found.mask = None
    assert torch.equal(Detected(found)(x), masks.Boxes(found)(x))
    assert not Detected()(x).any()
    assert len(ActiveSlicer(callback, masks.Boxes([]))(image)) == 0
    given = detections_of([{"box": [1, 2, 3, 4], "score": 0.5, "class": 7}, {"class": 1}])
    assert given.xyxy.tolist() == [[1, 2, 3, 4]]
    assert given.class_id.tolist() == [7]
    assert len(detections_of([{"class": 1}])) == 0


def test_supervision_agrees_with_its_own_slicer():
    """All of the picture active: what sv.InferenceSlicer finds."""
    sv = pytest.importorskip("supervision")
    from sbnet.adapters.supervision import ActiveSlicer

    image, rng = picture(), np.random.default_rng(0)
    for y, x in rng.permutation([(y, x) for y in range(5, 180, 40) for x in range(5, 280, 40)])[:12]:
        image[y : y + 9, x : x + 13] = 200

    def callback(crop):
        whole = [(x0, y0, x1, y1) for x0, y0, x1, y1 in squares(crop) if (y1 - y0, x1 - x0) == (9, 13)]
        boxes = np.array(whole, np.float32).reshape(-1, 4)
        return sv.Detections(boxes, confidence=np.ones(len(boxes)), class_id=np.zeros(len(boxes), int))

    ours = ActiveSlicer(callback, "all", Slices(16, 16, 32, 128))(image)
    theirs = sv.InferenceSlicer(callback, slice_wh=128, overlap_wh=32, thread_workers=1)(image)
    assert len(ours) == 12
    assert sorted(ours.xyxy.tolist()) == sorted(theirs.xyxy.tolist())


def test_sahi_looks_at_active_slices_only():
    pytest.importorskip("sahi")
    from sahi.models.base import DetectionModel
    from sahi.predict import get_prediction, get_sliced_prediction
    from sahi.prediction import ObjectPrediction

    from sbnet.adapters.sahi import ActiveBlocks

    class Squares(DetectionModel):
        areas: list[int] = []  # noqa: RUF012

        def load_model(self):
            self.model = squares

        def perform_inference(self, image):
            self.areas.append(image.shape[0] * image.shape[1])
            self._original_predictions = self.model(image)

        def _create_object_prediction_list_from_original_predictions(
            self, shift_amount_list=None, full_shape_list=None
        ):
            shift = shift_amount_list[0] if isinstance(shift_amount_list[0], (list, tuple)) else shift_amount_list
            full = full_shape_list[0] if isinstance(full_shape_list[0], (list, tuple)) else full_shape_list
            self._object_prediction_list_per_image = [
                [
                    ObjectPrediction(bbox=list(box), category_id=3, category_name="square", score=0.9,
                                     shift_amount=shift, full_shape=full)
                    for box in self._original_predictions
                ]
            ]  # fmt: skip

    image = picture()
    image[20:30, 20:40], image[150:160, 250:270], image[100:110, 100:110] = 200, 220, 240
    inner = Squares(device="cpu")
    mask = masks.Boxes([[15, 15, 45, 35], [240, 140, 280, 170]])
    model = ActiveBlocks(inner, mask, Slices(16, 8, 32, 128))
    wanted = [[20, 20, 40, 30], [250, 150, 270, 160]]
    found = get_prediction(image, model).object_prediction_list
    assert sorted(one.bbox.to_xyxy() for one in found) == wanted
    assert {(one.category.id, one.category.name, one.score.value) for one in found} == {(3, "square", 0.9)}
    assert len(model.last) == 2
    assert sum(inner.areas) < 0.2 * 200 * 300
    whole = ActiveBlocks(inner, lambda x: x.amax(1) > 0.5, Slices(16, 8, 32, 128))
    sliced = get_sliced_prediction(image, whole, 100, 150, verbose=0).object_prediction_list  # slices of slices
    assert sorted(map(list, (one.bbox.to_xyxy() for one in sliced))) == sorted([*wanted, [100, 100, 110, 110]])
    assert get_prediction(image, ActiveBlocks(inner, masks.Boxes([]))).object_prediction_list == []


def test_torchvision_carries_the_mask_along():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    torchvision()  # also where its compiled ops are not for this torch
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    from sbnet.adapters.transforms import Sparse, WithMask

    torch.manual_seed(0)
    image = tv_tensors.Image(torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8))
    boxes = masks.Boxes([[8, 8, 24, 24]])
    turned, mask, left = v2.Compose([WithMask(boxes), v2.RandomHorizontalFlip(1.0), v2.Pad(4)])((image, "label"))
    assert left == "label"
    assert isinstance(mask, tv_tensors.Mask)
    assert mask.shape == (1, 56, 72)
    wanted = torch.zeros(56, 72, dtype=torch.uint8)
    wanted[12:28, 44:60] = 1
    assert torch.equal(mask[0].as_subclass(torch.Tensor), wanted)
    assert torch.equal(turned[:, 12:28, 44:60], image[:, 8:24, 8:24].flip(2))

    net = nn.Conv2d(3, 4, 3, padding=1).eval()
    run = sbnet.sparsify(net, torch.zeros(1, 3, 48, 64), mode="exact", block=8)
    chain = v2.Compose([WithMask(boxes), v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)])
    x, mask = chain(image)
    first = v2.Compose([chain, Sparse(run)])(image)
    with torch.no_grad():
        dense = net(x[None])
    inside = mask[None].as_subclass(torch.Tensor).expand_as(dense) > 0
    torch.testing.assert_close(first[inside], dense.as_subclass(torch.Tensor)[inside], atol=1e-5, rtol=1e-5)
    second = Sparse(run)(x, tv_tensors.Mask(torch.ones_like(mask)))
    torch.testing.assert_close(second, dense.as_subclass(torch.Tensor), atol=1e-5, rtol=1e-5)
    assert not torch.equal(first, second)  # a copy of its own
    with pytest.raises(ValueError, match="tv_tensors.Mask behind it"):
        Sparse(run)(x)
    with pytest.raises(ValueError, match="picture: expected"):
        WithMask("all")(torch.zeros(3, 4))
