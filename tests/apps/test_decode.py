"""Boxes and labels of detectors as files hold them, against decoding by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from sbnet.apps.pipeline import Pipeline, PipelineError, Result
from sbnet.apps.pipeline import boxes as boxes_module
from sbnet.apps.pipeline.boxes import CAPACITY, MOST, ROUNDS, best_of, best_scores, boxes_of_faces, uncovered
from sbnet.apps.pipeline.decode import decoded, names_of
from sbnet.apps.pipeline.frames import Frame
from sbnet.apps.pipeline.networks import Network, imagenet

FRAME = Frame(0, np.zeros((90, 120, 3), np.uint8))  # 96x128 with the border that makes it a multiple of 32
BOXES = [  # centre, size, score, class
    (30.0, 40.0, 20.0, 20.0, 0.9, 1),
    (31.0, 40.0, 20.0, 20.0, 0.8, 1),  # covered by the one before
    (31.0, 41.0, 20.0, 20.0, 0.7, 2),  # of another class
    (115.0, 80.0, 30.0, 30.0, 0.6, 0),  # reaches beyond the frame
    (60.0, 20.0, 8.0, 8.0, 0.1, 0),  # too low a score
]
WANTED = [
    ([20.0, 30.0, 40.0, 50.0], 0.9, 1), ([21.0, 31.0, 41.0, 51.0], 0.7, 2), ([100.0, 65.0, 120.0, 90.0], 0.6, 0),
]  # fmt: skip


def records(decode: str, output) -> list:
    network = decoded(Network(nn.Identity()), decode)
    _, found = network.finished(output, FRAME)
    return [(r["box"], r["score"], r["class"]) for r in found]


def version_8() -> torch.Tensor:
    y = torch.zeros(1, 4 + 3, 50)
    for k, (*box, score, kind) in enumerate(BOXES):
        y[0, :4, 7 * k] = torch.tensor(box)
        y[0, 4 + kind, 7 * k] = score
    return y


def test_yolo_with_scores_of_each_class():
    assert records("yolo", version_8()) == WANTED


def test_yolo_with_objectness():
    y = torch.zeros(1, 50, 5 + 3)
    for k, (*box, score, kind) in enumerate(BOXES):
        y[0, 7 * k, :4] = torch.tensor(box)
        y[0, 7 * k, 4] = 0.95
        y[0, 7 * k, 5 + kind] = score / 0.95
    assert records("yolo:0.25", [y]) == WANTED


def test_yolo_whose_overlaps_are_settled():
    y = torch.zeros(1, 300, 6)
    for k, (cx, cy, w, h, score, kind) in enumerate(BOXES):
        y[0, k] = torch.tensor([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2, score, kind])
    second = ([21.0, 30.0, 41.0, 50.0], 0.8, 1)
    assert records("yolo", (y,)) == [WANTED[0], second, *WANTED[1:]]


@pytest.mark.parametrize("name", ["detr", "rtdetr"])
def test_queries_are_shares_of_what_the_network_was_given(name):
    logits, boxes = torch.full((1, 20, 4 if name == "detr" else 3), -12.0), torch.full((1, 20, 4), 0.5)
    if name == "detr":
        logits[..., 3] = 0.0  # nothing
    for k, (cx, cy, w, h, score, kind) in enumerate(BOXES):
        boxes[0, k] = torch.tensor([cx / 128, cy / 96, w / 128, h / 96])
        logits[0, k, kind] = math.log(score / (1 - score))  # of two classes, or of one
    found = records(name, {"logits": logits, "pred_boxes": boxes})
    assert [kind for *_, kind in found] == [1, 1, 2, 0]
    assert [score for _, score, _ in found] == pytest.approx([0.9, 0.8, 0.7, 0.6], abs=1e-3)
    assert found[0][0] == pytest.approx(WANTED[0][0], abs=0.11)
    assert found[3][0] == pytest.approx(WANTED[2][0], abs=0.11)


def test_detr_gets_normalised_colours():
    assert decoded(Network(nn.Identity()), "detr").prepare is imagenet
    assert decoded(Network(nn.Identity()), "yolo").prepare is None


@pytest.mark.parametrize("probabilities", [False, True])
def test_classes(probabilities):
    scores = torch.tensor([[0.0, 3.0, 1.0]])
    network = decoded(Network(nn.Identity()), "classes:0.5")
    _, (found,) = network.finished(scores.softmax(1) if probabilities else scores, FRAME)
    assert found["class"] == 1
    assert found["score"] == pytest.approx(math.exp(3) / (1 + math.exp(3) + math.e), abs=1e-5)
    assert network.finished(torch.zeros(1, 3), FRAME)[1] == []


def test_more_candidates_than_come_to_the_host_are_told_of():
    y = torch.rand(1, 7, MOST + 10)
    network = decoded(Network(nn.Identity()), "yolo:0")
    network.finished(y, FRAME)
    assert "candidates" in network.notes[0]


@pytest.mark.parametrize(
    ("decode", "output", "message"),
    [
        ("yolo9", None, "expected one of yolo, detr, rtdetr, classes"),
        ("yolo:high", None, "expected a score"),
        ("yolo:2", None, "0 to 1"),
        ("yolo", torch.zeros(1, 3, 20, 20), r"\[1, 3, 20, 20\]"),
        ("detr", torch.zeros(1, 100, 4), "expected logits"),
        ("classes", torch.zeros(1, 3, 2, 2), r"expected \[1,classes\]"),
    ],
)
def test_what_does_not_fit_is_refused(decode, output, message):
    with pytest.raises(PipelineError, match=message):
        decoded(Network(nn.Identity()), decode).finished(output, FRAME)


def test_what_looks_like_boxes_and_is_more_is_refused():
    """Key points behind the scores; one class with objectness in a small frame, as wide as settled boxes."""
    pose = torch.cat([version_8()[:, :5], 40 * torch.ones(1, 51, 50)], 1)
    small = torch.rand(1, 700, 6)
    for output in (pose.mT, pose, small):
        with pytest.raises(PipelineError, match="expected scores"):
            records("yolo", output)


def test_scores_of_other_classes_than_the_file_names_are_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    model = onnx.helper.make_model(onnx.helper.make_graph([], "none", [], []))
    entry = model.metadata_props.add()
    entry.key, entry.value = "names", "['person']"
    onnx.save(model, tmp_path / "pose.onnx")
    network = decoded(Network(str(tmp_path / "pose.onnx"), "pose"), "yolo")
    with pytest.raises(PipelineError, match="scores of 1 classes"):
        network.finished(version_8(), FRAME)


def test_a_network_with_a_decoder_of_its_own_keeps_it():
    with pytest.raises(PipelineError, match="has its own"):
        decoded(Network(nn.Identity(), "mine", finish=lambda y, frame: (None, [])), "yolo")


class Detector(nn.Module):
    """YOLO-like: finds what is bright. An anchor for every 8x8 pixels, a square around it."""

    def __init__(self, side: float = 16.0) -> None:
        super().__init__()
        self.side = side
        self.conv = nn.Conv2d(3, 2, 8, 8)
        nn.init.zeros_(self.conv.bias)
        with torch.no_grad():
            self.conv.weight.zero_()
            self.conv.weight[1] = 1 / 192  # of class 1 the mean brightness

    def forward(self, x):
        scores = self.conv(x)
        rows, columns = (torch.arange(n, dtype=x.dtype, device=x.device) * 8 + 4 for n in scores.shape[2:])
        centre = torch.stack([columns.expand(len(rows), -1), rows[:, None].expand(-1, len(columns))])[None]
        return torch.cat([centre, torch.full_like(centre, self.side), scores], 1).flatten(2)


def test_a_film_to_labelled_boxes(tmp_path):
    """As a file with labels: what moved is found, and what stands still is still reported."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    path, target = tmp_path / "yolo.onnx", tmp_path / "boxes.jsonl"
    torch.onnx.export(Detector().eval(), (torch.zeros(1, 3, 96, 128),), path, dynamo=True, verbose=False)
    model = onnx.load(path)
    entry = model.metadata_props.add()
    entry.key, entry.value = "names", "{0: 'nothing', 1: 'lamp'}"
    onnx.save(model, path)
    assert names_of(path) == {0: "nothing", 1: "lamp"}
    film = np.zeros((4, 96, 128, 3), np.uint8)
    film[:, 16:24, 24:32] = 250  # stands still
    for k in range(4):
        film[k, 64:72, 8 + 16 * k : 16 + 16 * k] = 200
    summary = Pipeline(film, None, path, target, decode="yolo:0.5", device="cpu", compare=0).run()
    assert summary.records == 8
    assert not summary.notes
    for k, line in enumerate(map(json.loads, target.read_text().splitlines())):
        still, moving = line["records"]
        assert (still["box"], still["label"]) == ([20, 12, 36, 28], "lamp")
        assert still["score"] == pytest.approx(250 / 255, abs=1e-3)
        assert moving["box"] == [4 + 16 * k, 60, 20 + 16 * k, 76]


def scattered(count: int, seed: int = 0, range_: float = 200.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Corners of boxes [count,4], many of which overlap, and scores, best first."""
    made = torch.Generator().manual_seed(seed)
    low, size = range_ * torch.rand(count, 2, generator=made), 5 + 60 * torch.rand(count, 2, generator=made)
    return torch.cat([low, low + size], 1), torch.rand(count, generator=made).sort(descending=True).values


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_overlaps_by_tensors_of_fixed_size_leave_what_the_host_leaves(device):
    certain = 0
    for seed in range(40):
        boxes, scores = scattered(1 + CAPACITY // 40 * seed, seed)
        valid = scores >= 0.25
        kept, sure = uncovered(boxes.to(device), valid.to(device), 0.5)
        if sure:
            assert torch.nonzero(kept)[:, 0].tolist() == best_of(boxes[valid], scores[valid], 0.5)
        certain += bool(sure)
    assert certain >= 30


def test_what_a_gpu_is_not_certain_of_is_said():
    """Too many boxes; a row of boxes of which each covers the next, longer than there are rounds; an overlap that is
    the limit."""
    boxes, scores = scattered(CAPACITY + 1)
    assert not uncovered(boxes, scores >= 0, 0.5)[1]
    assert uncovered(boxes, scores > scores[-1], 0.999)[1]
    row = torch.tensor([[8.0 * k, 0, 8 * k + 16, 16] for k in range(2 * ROUNDS)])
    assert not uncovered(row, torch.ones(len(row), dtype=torch.bool), 0.3)[1]
    kept, sure = uncovered(row[:4], torch.ones(4, dtype=torch.bool), 0.3)
    assert sure
    assert kept.tolist() == [True, False, True, False]
    assert not uncovered(row[:4], torch.ones(4, dtype=torch.bool), 1 / 3)[1]


def test_equal_scores_stay_in_the_order_of_the_output():
    assert best_scores(torch.tensor([0.5, 0.9, 0.5, 0.9, 0.1]), 4)[1].tolist() == [1, 3, 0, 2]


def test_pictures_are_drawn_for_those_who_look():
    network = decoded(Network(nn.Identity()), "yolo")
    made, _ = network.finished(version_8(), FRAME)
    result = Result(FRAME, None, made)
    result.land()
    assert callable(vars(result)["_picture"])
    assert result.picture.shape == (90, 120, 3)
    assert result.picture is result.picture
    assert result.picture.any()


def levels(count: int = 5) -> np.ndarray:
    """A film [count,96,128,3] whose cells of 8x8 pixels have a level each, no two of a frame the same: no score is
    close to another."""
    cells = [60 + np.random.default_rng(k).permutation(192).reshape(12, 16) for k in range(count)]
    grey = np.stack(cells).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    return np.repeat(grey[..., None], 3, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [16.0, 48.0])  # larger boxes cover their neighbours
def test_on_a_gpu_records_are_the_host_s(side, monkeypatch):
    found, asked = [], []
    for device in ("cpu", "cuda"):
        rows: list = []
        Pipeline(levels(), None, Detector(side), lambda result, rows=rows: rows.append(result.records),
                 decode="yolo:0.5", device=device, dtype=torch.float32, compare=0).run()  # fmt: skip
        found.append([[(r["box"], r["class"]) for r in records] for records in rows])
        monkeypatch.setattr(boxes_module, "best_of", lambda *given: asked.append(given) or best_of(*given))
    assert found[0] == found[1]
    assert all(found[0])
    assert not asked  # the GPU settled it


@pytest.mark.gpu
def test_on_a_gpu_faces_are_the_host_s():
    made = torch.Generator().manual_seed(0)
    for _ in range(20):
        heat, scale, offset = (torch.rand(1, c, 34, 60, generator=made) for c in (1, 2, 2))
        heat = heat**4
        maps = heat, 2 + 2 * scale, offset
        here = boxes_of_faces(*maps, (270, 475), 0.3)
        assert boxes_of_faces(*(v.cuda() for v in maps), (270, 475), 0.3) == here
        assert here
