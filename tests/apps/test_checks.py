"""Checks against the contract in float64: windows of frames, within a share of the run and 500 MB."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import sbnet
from sbnet.apps.pipeline import Network, Pipeline, checks
from sbnet.apps.pipeline.checks import Checks
from sbnet.apps.pipeline.summary import Summary
from sbnet.benchmarks.harness import dense
from sbnet.engine.oracle import compare, masked_oracle, plane_masks
from sbnet.graph.reach import reach
from sbnet.models import contour_net

SIZE = (96, 160)


@pytest.fixture(autouse=True)
def _quick_dense(monkeypatch):
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})


def walking(count: int) -> list[np.ndarray]:
    frames = [np.full((*SIZE, 3), 40, np.uint8) for _ in range(count)]
    for k, frame in enumerate(frames):
        frame[40:56, 8 * k : 8 * k + 16] = 230
    return frames


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 3, 1),
    ).eval()


@pytest.mark.parametrize("net", [contour_net, strided])
def test_a_window_of_a_frame_is_held_to_what_the_frame_is_held_to(net, monkeypatch):
    """Inside the window a result differs from the contract as on the whole frame: the cut itself is no error."""
    torch.manual_seed(0)
    model = net()
    x, mask = torch.rand(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 30:60, 50:120] = True
    run = sbnet.sparsify(model, x, block=8)
    y = run(x, mask)
    halo = reach(run.plan)
    found = []
    monkeypatch.setattr(checks, "compare", lambda *given: found.append(given) or compare(*given))
    kept = Checks(model, 1e9, Summary("", "masked"))
    monkeypatch.setattr(checks, "MEMORY", kept._bytes * 56 * 56)
    for _ in range(4):
        kept.keep(x, y, mask, run.planes, halo)
    kept.conclude(1.0)
    assert kept.summary.checks == 4
    assert kept.summary.holds
    exact = masked_oracle(model.double(), x.double(), plane_masks(mask, run.planes))
    model.float()
    for part, _, window, masks, inside in found:
        assert max(window.shape[2:]) <= 56
        own = masked_oracle(model, window, masks)[:, :, inside[0], inside[1]]
        assert own.numel()
        # The same pixels of the frame: found by the window's own input.
        at = next((i, j) for i in range(SIZE[0] - window.shape[2] + 1) for j in range(SIZE[1] - window.shape[3] + 1)
                  if torch.equal(x[:, :, i : i + window.shape[2], j : j + window.shape[3]], window))  # fmt: skip
        whole = exact[:, :, at[0] : at[0] + window.shape[2], at[1] : at[1] + window.shape[3]]
        torch.testing.assert_close(own.double(), whole[:, :, inside[0], inside[1]], rtol=1e-4, atol=1e-5)
        assert part.shape == whole.shape


def test_a_wrong_pixel_in_a_window_is_found():
    model = contour_net()
    x, mask = torch.rand(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 30:60, 50:120] = True
    run = sbnet.sparsify(model, x, block=8)
    y = run(x, mask).clone()
    y[:, 0] += 1e-3
    kept = Checks(model, 1e9, Summary("", "masked"))
    for _ in range(3):
        kept.keep(x, y, mask, run.planes, 4)
    kept.conclude(1.0)
    assert kept.summary.checks == 3
    assert not kept.summary.holds


def test_whole_and_empty_masks_are_no_samples():
    model, x = contour_net(), torch.rand(1, 3, *SIZE)
    kept = Checks(model, 1e9, Summary("", "masked"))
    for mask in (torch.ones(1, *SIZE, dtype=torch.bool), torch.zeros(1, *SIZE, dtype=torch.bool)):
        kept.keep(x, model(x).detach(), mask, [(*SIZE, 8)], 4)
    kept.conclude(1.0)
    assert not kept.summary.checks
    assert "neither empty nor whole" in kept.summary.unchecked


@pytest.mark.parametrize("frames", [2, 3, 4, 9])
def test_figures_need_three_samples(frames):
    """The first frame is whole and counts for none; what is too little is n/a in the table, with the reason."""
    done = Pipeline(walking(frames), "motion", "contours", device="cpu", block=8, check=1e6).run()
    rows = {name: (much, what) for name, much, what in done.rows()}
    enough = frames > 3
    assert done.dense_ms.count == min(frames - 1, 3)
    assert ("dense" in rows) == enough
    assert (rows["speed-up"][0] == "n/a") != enough
    assert (rows["its rms"][0] == "n/a") != enough
    if not enough:
        assert "at least 3 are needed" in rows["speed-up"][1] + rows["its rms"][1]
    assert rows["mode"][0] == "masked"


@pytest.mark.parametrize(("check", "why"), [(0.0, "not asked for"), (1e-9, "more than 0% of the run")])
def test_a_check_that_would_take_too_long_is_none(check, why, monkeypatch):
    monkeypatch.setattr(checks, "compare", None)
    done = Pipeline(walking(6), "motion", "contours", device="cpu", block=8, check=check).run()
    rows = {name: what for name, _, what in done.rows()}
    assert why in rows["its rms"]
    assert done.holds


def test_checks_take_their_share_and_no_more(monkeypatch):
    """On a clock of its own: a second of a check for each 1,000 pixels."""
    now, seen = [0.0], []

    def slow(result, net, x, masks, inside):
        seen.append(x.shape[2] * x.shape[3])
        now[0] += seen[-1] / 1000
        return compare(result, net, x, masks, inside)

    monkeypatch.setattr(checks, "compare", slow)
    monkeypatch.setattr(checks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(checks, "SLOW", Checks(contour_net(), 1, Summary("", ""))._products * 1000)
    model, x, mask = contour_net(), torch.rand(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 30:60, 50:120] = True
    run = sbnet.sparsify(model, x, block=8)
    y = run(x, mask)
    kept = Checks(model, 0.05, Summary("", "masked"))
    for _ in range(8):
        kept.keep(x, y, mask, run.planes, 4)
    kept.conclude(200.0)
    assert kept.summary.checks >= 3
    assert 5 < now[0] <= 10


MEMORY = """
import resource, torch
from sbnet.apps.pipeline.checks import Checks
from sbnet.apps.pipeline.summary import Summary
from sbnet.models import contour_net
model, x = contour_net(), torch.rand(1, 3, 1080, 1920)
mask = torch.zeros(1, 1080, 1920, dtype=torch.bool)
mask[0, 300:700, 400:1000] = True
kept = Checks(model, 1e9, Summary("", "masked"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    kept.keep(x, torch.zeros(1, 3, 1080, 1920), mask, [(1080, 1920, 16)], 4)
kept.conclude(1.0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, kept.summary.checks)
"""


@pytest.mark.slow
def test_a_check_of_a_large_frame_takes_less_than_500_mb():
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout.split()
    assert float(found[0]) < 500
    assert found[1] == "3"


def test_cameras_check_a_camera_whose_mask_is_not_whole():
    sources = [np.stack(walking(6)), np.stack(walking(6))[:, :, ::-1].copy()]
    cameras = sbnet.Cameras(sources, "motion", "contours", device="cpu", block=8, check=1e6)
    done = cameras.run()
    assert done.checks >= 3
    assert done.holds
    assert done.dense_ms.count >= 3
    few = sbnet.Cameras([s[:2] for s in sources], "motion", "contours", device="cpu", block=8, check=1e6).run()
    assert {name: much for name, much, _ in few.rows()}["its rms"] == "n/a"


def test_networks_that_see_the_whole_frame_are_checked_whole_or_not_at_all(monkeypatch):
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            return y * y.mean((2, 3), keepdim=True)

    network = Network(Gated().eval(), "gated", checked=True)
    done = Pipeline(walking(6), "motion", network, device="cpu", block=8, check=1e6).run()
    assert done.checks >= 3
    assert done.windows[0] == SIZE
    monkeypatch.setattr(checks, "MEMORY", 1e5)
    done = Pipeline(walking(6), "motion", network, device="cpu", block=8, check=1e6).run()
    assert not done.checks
    assert "MB for a window" in done.unchecked
