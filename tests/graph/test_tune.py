"""Block sizes: predicted from masks, measured, shipped as JSON."""

from __future__ import annotations

import json

import pytest
import torch

import sbnet
from sbnet.graph.blocks import predict, tuning_key
from support.networks import UNet, lively

SIZE = (64, 96)


def scattered() -> torch.Tensor:
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, ::32, ::32] = True
    return mask


def test_prediction_follows_the_mask():
    rectangle = torch.zeros(1, *SIZE, dtype=torch.bool)
    rectangle[:, :32, :64] = True
    for device, (fine, coarse) in {"cpu": (4, 32), "cuda": (8, 32)}.items():
        assert predict([SIZE], [scattered()], device) == {SIZE: fine}  # single pixels: small blocks
        assert predict([SIZE], [rectangle], device) == {SIZE: coarse}  # a whole number of large ones


def test_auto_takes_masks():
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, masks=[scattered()])
    assert [block for _, _, block in run.planes] == [(4, 4)] * 3
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
    found["entries"] = {"another device": entry}
    assert sbnet.sparsify(net, x, block=found).planes == run.planes


def test_what_is_no_tuning(tmp_path):
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    (tmp_path / "t.json").write_text("[1")
    for block in (tmp_path / "t.json", tmp_path / "none.json", {"entries": {}, "format": 9}):
        with pytest.raises(ValueError, match="block: "):
            sbnet.sparsify(net, x, block=block)
    with pytest.raises(ValueError, match="tune: masks: expected 1"):
        sbnet.tune(sbnet.sparsify(net, x), [x], [])
