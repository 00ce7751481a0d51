"""torchvision's detectors, whole, in a pipeline: what they find is what they find by themselves."""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbnet
from sbnet.apps.pipeline import PipelineError, open_network
from sbnet.apps.pipeline.boxes import best_of
from sbnet.apps.pipeline.detectors import LEAST, split_detector
from sbnet.benchmarks.harness import nets

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

vision = nets.torchvision()
detection = importlib.import_module("torchvision.models.detection")
SIZE = (96, 128)


class Backbone(nn.Module):
    """Feature maps of a quarter and an eighth of the frame, and their pyramid."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 5, 4, 2), nn.Conv2d(8, 8, 3, 2, 1)
        self.fpn = vision.ops.FeaturePyramidNetwork([8, 8], 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x).relu()
        return self.fpn(OrderedDict([("0", x), ("1", self.second(x).relu())]))


def rcnn(anchors, **sizes) -> nn.Module:
    return detection.FasterRCNN(
        Backbone(), 3, rpn_anchor_generator=anchors, box_score_thresh=0.0, box_detections_per_img=20, **sizes,
        box_roi_pool=vision.ops.MultiScaleRoIAlign(["0", "1"], 5, 2),
    )  # fmt: skip


def retinanet(anchors, **sizes) -> nn.Module:
    return detection.RetinaNet(Backbone(), 3, anchor_generator=anchors, score_thresh=0.0, **sizes)


def fcos(anchors, **sizes) -> nn.Module:
    square = detection.anchor_utils.AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return detection.FCOS(Backbone(), 3, anchor_generator=square, score_thresh=0.0, **sizes)


@pytest.fixture(params=[rcnn, retinanet, fcos])
def model(request, monkeypatch):
    """Its transform leaves frames of SIZE as they are. Where ops of torchvision do not load, nms is a plain one."""
    if not importlib.import_module("torchvision.extension")._has_ops():
        boxes = importlib.import_module("torchvision.ops.boxes")
        monkeypatch.setattr(boxes, "nms", lambda b, s, overlap: torch.tensor(best_of(b, s, overlap), dtype=torch.long))
    torch.manual_seed(0)
    anchors = detection.anchor_utils.AnchorGenerator(((16,), (32,)), ((0.5, 1.0),) * 2)
    made = request.param(anchors, min_size=SIZE[0], max_size=SIZE[1]).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "backbone" not in name and value.dim() > 1:
                # Heads that tell one place from another; more layers of them answer to noise.
                value.mul_(2 if request.param is rcnn else 8)
    return made


def frames(count: int) -> list[np.ndarray]:
    still = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8)
    found = []
    for k in range(count):
        picture = still.copy()
        picture[40:60, 12 * k : 12 * k + 20] = (250, 30, 200)
        found.append(picture)
    return found


@torch.no_grad()
def alone(model: nn.Module, picture: np.ndarray, least: float) -> list[tuple]:
    (found,) = model([torch.from_numpy(picture).movedim(2, 0) / 255])
    kept = found["scores"] >= least
    return [
        (box, label, score)
        for box, label, score in zip(*(found[k][kept].tolist() for k in ("boxes", "labels", "scores")), strict=True)
    ]


def test_a_detector_finds_in_a_pipeline_what_it_finds_by_itself(model):
    """With changed:0 and the halo that cached mode grows masks by, all features are the dense ones."""
    seen, given = [], frames(4)
    middle = [score for picture in given for *_, score in alone(model, picture, 0.0)]
    least = float(np.median(middle))
    sbnet.Pipeline(
        given, "changed:0", split_detector(model, least), seen.append, margin="halo", device="cpu", compare=0
    ).run()
    assert [result.density < 1 for result in seen] == [False, True, True, True]
    for picture, result in zip(given, seen, strict=True):
        wanted = alone(model, picture, least)
        assert wanted
        assert [record["class"] for record in result.records] == [label for _, label, _ in wanted]
        for record, (box, _, score) in zip(result.records, wanted, strict=True):
            assert np.abs(np.subtract(record["box"], box)).max() <= 0.11
            assert abs(record["score"] - score) < 1e-3
    assert model.backbone.first.weight.requires_grad  # the caller's own is left as it is
    assert callable(seen[0].picture) or seen[0].picture.shape == (*SIZE, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_too(model, dtype):
    """Backbones in either dtype, heads in float32. Scores of random heads lie close together: most records are the
    same."""
    seen, given = [], frames(4)
    least = float(np.median([score for picture in given for *_, score in alone(model, picture, 0.0)]))
    sbnet.Pipeline(
        given, "changed:0", split_detector(model, least), seen.append, margin="halo", device="cuda", dtype=dtype,
        compare=0,
    ).run()  # fmt: skip
    for picture, result in zip(given, seen, strict=True):
        wanted = alone(model, picture, least)
        same = [
            any(r["class"] == label and np.abs(np.subtract(r["box"], box)).max() <= 1 for r in result.records)
            for box, label, _ in wanted
        ]
        assert np.mean(same) >= (0.9 if dtype == torch.float32 else 0.6)


def test_one_call_takes_a_detector(model):
    network = open_network(model)
    assert network.model is model.backbone
    assert network.mode == "cached"
    features = model.backbone(network.input(torch.rand(1, 3, *SIZE)))
    records = network.finished(features, sbnet.apps.pipeline.Frame(0, frames(1)[0]))[1]
    assert all(record["score"] >= LEAST for record in records)


def test_what_is_no_detector_is_refused():
    with pytest.raises(PipelineError, match="expected a detector of torchvision, got Conv2d"):
        split_detector(nn.Conv2d(3, 3, 3))
