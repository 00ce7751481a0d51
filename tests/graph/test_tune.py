"""Block sizes: predicted from masks, measured, shipped as JSON."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from torch import nn

import sbnet
from sbnet.engine.compiled import Compiled
from sbnet.graph.blocks import predict, tuning_key
from sbnet.graph.capture import capture
from sbnet.graph.cost import FORMS, Work, work
from sbnet.graph.passes import optimise
from sbnet.graph.plan import fine_planes, plan
from support.networks import UNet, lively

SIZE = (64, 96)


def scattered() -> torch.Tensor:
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, ::32, ::32] = True
    return mask


def test_prediction_follows_the_mask():
    rectangle = torch.zeros(1, *SIZE, dtype=torch.bool)
    rectangle[:, :32, :64] = True
    for device, (fine, coarse) in {"cpu": (1, 32), "cuda": (8, 32)}.items():
        for form in FORMS:
            planes = {SIZE: Work({form: 100_000})}
            # A pixel of each phase; blocks of 8 whose tiles are not worth it; kernels that take blocks of 4.
            least = {("cpu", "transposed"): 2, ("cuda", "dilated"): 16, ("cuda", "1x1"): 4, ("cuda", "depthwise"): 4}
            least = least.get((device, form), fine)
            assert predict(planes, [scattered()], device) == {SIZE: least}  # single pixels: small blocks
            assert predict(planes, [rectangle], device) == {SIZE: coarse}  # a whole number of large ones


def test_planes_of_small_windows_alone_have_small_blocks_on_cuda():
    """Planes with a 3x3 layer keep the blocks that its kernel takes."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.Conv2d(8, 16, 1),
        nn.Conv2d(16, 16, 2, 2), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1),
    ).eval().half()  # fmt: skip
    planned = plan(optimise(capture(net, (torch.rand(1, 3, 64, 96).half(),))), device="cuda")
    assert planned.planes == [(16, 24, (8, 8)), (8, 12, (8, 8))]
    assert fine_planes(planned.graph) == {(16, 24)}


def test_prediction_follows_the_layers():
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    for row in range(3):
        for column in range(3):
            mask[:, row::16, column::16] = True  # nine of a block of 4's pixels
    for form, block in {"1x1": 1, "3x3": 4, "depthwise": 4, "5x5": 4, "7x7": 4, "transposed": 4}.items():
        assert predict({SIZE: Work({form: 100_000})}, [mask], "cpu") == {SIZE: block}
    assert predict({SIZE: Work({"1x1": 100_000, "3x3": 900})}, [mask], "cpu") == {SIZE: 1}  # by what most products are
    assert predict({SIZE: Work({"1x1": 900, "3x3": 900_000})}, [mask], "cpu") == {SIZE: 4}
    assert predict({SIZE: Work({"1x1": 10})}, [mask], "cpu")[SIZE] > 1  # little work: the list costs more


def test_work_of_a_plane():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1),
        nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ConvTranspose2d(16, 4, 2, 2),
    )  # fmt: skip
    graph = sbnet.sparsify(net, torch.randn(2, 3, 32, 48)).plan.graph
    small = {"other": 8 * 27, "dilated": 16 * 16 * 9, "depthwise": 8 * 9, "1x1": 8 * 16, "3x3": 16 * 16 * 9}
    assert work(graph) == {(16, 24): small, (32, 48): {"transposed": 16 * 4}}


def test_forms_of_layers():
    for layer, form in (
        (nn.Conv2d(16, 16, 5, padding=2), "5x5"),
        (nn.Conv2d(16, 16, 7, padding=3), "7x7"),
        (nn.Conv2d(16, 16, 5, 2, padding=2), "other"),
        (nn.Conv2d(16, 16, (5, 1), padding=(2, 0)), "other"),
        (nn.Conv2d(16, 16, 3, padding=3, dilation=(1, 3)), "dilated"),
        (nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4), "other"),
        (nn.Conv2d(16, 16, 5, padding=2, groups=4), "other"),
        (nn.Conv2d(16, 16, 1, groups=4), "1x1"),
        (nn.ConvTranspose2d(16, 16, 4, 2, 1), "transposed"),
        (nn.ConvTranspose2d(16, 16, 2, 2, groups=4), "other"),
    ):
        graph = sbnet.sparsify(nn.Sequential(layer), torch.randn(1, 16, 32, 32)).plan.graph
        (counted,) = work(graph).values()
        assert set(counted) == {form}


def test_prediction_counts_pixels_of_the_plane_alone():
    full = torch.ones(1, 384, 640, dtype=torch.bool)
    found = predict({(12, 20): Work()}, [full], "cpu")
    assert found == {(12, 20): 32}  # one block, most of it outside: rims alone decide
    corner = torch.zeros(1, 36, 36, dtype=torch.bool)
    corner[:, 32:, 32:] = True
    assert predict({(36, 36): Work()}, [corner], "cpu") == {(36, 36): 32}  # 4 x 4 pixels, as a block of 4 would be


def test_auto_takes_masks():
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, masks=[scattered()])
    assert [block for _, _, block in run.planes] == [(2, 2), (2, 2), (1, 1)]
    assert sbnet.sparsify(net, x).planes != run.planes
    grown = sbnet.sparsify(net, x, masks=[scattered()], margin=16)
    assert grown.planes != run.planes


def test_tuning_measures_and_ships(tmp_path, device):
    net = lively(UNet("nearest")).to(device)
    x, mask = torch.randn(1, 3, *SIZE, device=device), scattered().to(device)
    run = sbnet.sparsify(net, x)
    want = run(x, mask, copy=True)
    found = sbnet.tune(run, [x], [mask], blocks=(8, 16), rounds=1)
    ((key, entry),) = found["entries"].items()
    assert key == tuning_key(x.device)
    assert set(entry["planes"]) == {f"{h}x{w}" for h, w, _ in run.planes}
    assert entry["ms"] <= entry["ms before"]
    assert torch.equal(run(x, mask), want)  # the run that was measured is as it was
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(found))
    for block in (found, path, str(path)):
        tuned = sbnet.sparsify(net, x, block=block)
        assert {f"{h}x{w}": list(b) for h, w, b in tuned.planes} == entry["planes"]
    for other in ("another device", key.replace(f"torch {torch.__version__}", "torch 2.9.0"), f"{key} "):
        found["entries"] = {other: entry}
        assert sbnet.sparsify(net, x, block=found).planes == run.planes
    found["entries"][key] = entry  # tunings of several devices in one file
    assert {f"{h}x{w}": list(b) for h, w, b in sbnet.sparsify(net, x, block=found).planes} == entry["planes"]


def test_a_tuning_for_planes_of_another_size_leaves_the_rest_to_auto():
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x)
    planes = {"64x96": [32, 16], "7x9": [4, 4]}
    found = {"format": 1, "entries": {tuning_key(x.device): {"planes": planes}}}
    assert sbnet.sparsify(net, x, block=found).planes == [(*SIZE, (32, 16)), *run.planes[1:]]


def test_what_is_measured_decides(monkeypatch):
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    clock = [0.0]

    class Timed(Compiled):
        def __call__(self, inputs, mask, margin):
            found = super().__call__(inputs, mask, margin)
            # planes of blocks of 8 are fast; 16 instead of 32 is gained by less than noise
            clock[0] += sum({8: 1.0, 16: 9.95}.get(block[0], 10.0) for _, _, block in self.plan.planes)
            return found

    module = importlib.import_module("sbnet.engine.tune")
    monkeypatch.setattr(module, "Compiled", Timed)
    monkeypatch.setattr(module, "_now", lambda device: clock[0])
    run, mask = sbnet.sparsify(net, x, block=32), scattered()
    (entry,) = sbnet.tune(run, [x], [mask], blocks=(16, 8, 4), rounds=1)["entries"].values()
    assert set(map(tuple, entry["planes"].values())) == {(8, 8)}
    (entry,) = sbnet.tune(run, [x], [mask], blocks=(16,), rounds=1)["entries"].values()
    assert set(map(tuple, entry["planes"].values())) == {(32, 32)}


def test_masks_are_grown_as_the_run_grows_them(monkeypatch):
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    run, counts = sbnet.sparsify(net, x, block=8, margin=9), set()
    mask = torch.zeros(1, *SIZE)
    mask[:, 32, 32] = 1

    class Watched(Compiled):
        def __call__(self, inputs, mask, margin):
            found = super().__call__(inputs, mask, margin)
            counts.add(int(self.executor.active[0].count))
            return found

    monkeypatch.setattr(importlib.import_module("sbnet.engine.tune"), "Compiled", Watched)
    sbnet.tune(run, [x], [mask], blocks=(8,), rounds=1)
    run(x, mask)
    assert counts == {int(run.active[0].count)} != {1}


def test_what_is_no_tuning(tmp_path):
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    (tmp_path / "t.json").write_text("[1")
    for block in (tmp_path / "t.json", tmp_path / "none.json", {"entries": {}, "format": 9}):
        with pytest.raises(ValueError, match="block: "):
            sbnet.sparsify(net, x, block=block)
    with pytest.raises(ValueError, match="tune: masks: expected 1"):
        sbnet.tune(sbnet.sparsify(net, x), [x], [])
