"""Masks that a pipeline's run finds itself, inside its CUDA graph where there is one."""

import numpy as np
import pytest
import torch
from torch import nn

import sbnet
from sbnet.apps.pipeline import Network
from sbnet.benchmarks.harness import dense
from sbnet.masks import Boxes, Changed, MotionMask

BOX = [[8, 8, 40, 40]]


@pytest.fixture(autouse=True)
def _quick_dense(monkeypatch):
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})


def film(count: int = 6, size=(48, 64)) -> list[np.ndarray]:
    """A bright square on noise that does not move."""
    still = np.random.default_rng(3).integers(0, 90, (*size, 3), dtype=np.uint8)
    found = []
    for k in range(count):
        frame = still.copy()
        frame[8 + 3 * k : 20 + 3 * k, 10:24] = 220
        found.append(frame)
    return found


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid()).eval()


def results(frames, mask, mode, device="cpu", **options):
    seen = []
    network = Network(net(), "net", **options)
    pipeline = sbnet.Pipeline(
        frames, mask, network, seen.append, mode=mode, margin=2, device=device, compare=2, block=8
    )
    return seen, pipeline.run()


class Outside(MotionMask):
    captured = False


class ChangedOutside(Changed):
    captured = False


def pairs():
    """(a mask that the run finds, the same found before the call)"""
    return {
        "motion": (MotionMask(), Outside()),
        "changed": (Changed(8 / 255), ChangedOutside(8 / 255)),
        "composed": ((MotionMask() | Changed(0.2)).dilate(3).hold(2), (Outside() | Changed(0.2)).dilate(3).hold(2)),
    }


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
@pytest.mark.parametrize("name", pairs())
def test_the_run_finds_what_is_found_outside(name, mode):
    own, outside = pairs()[name]
    assert own.captured
    assert not outside.captured
    options = {"pad": 4, "finish": lambda y, frame: (y[:, :, 4:-4, 4:-4], [])} if mode == "exact" else {}
    (got, one), (want, two) = (results(film(), mask, mode, **options) for mask in (own, outside))
    assert len(got) == len(want) == 6
    for mine, theirs in zip(got, want, strict=True):
        assert np.array_equal(mine.active, theirs.active)
        assert np.array_equal(mine.picture, theirs.picture)
    assert (one.errors.count, one.errors.mean, one.largest) == (two.errors.count, two.errors.mean, two.largest)
    if mode != "cached":
        assert 0 < got[-1].density < 1


def test_frames_of_another_size_begin_anew():
    """Sizes that alternate: each first frame is all motion, whatever its plan has seen."""
    frames = [*film(2), *film(2, (40, 56)), *film(2)]
    got, _ = results(frames, MotionMask(), "masked")
    assert [r.density == 1 for r in got] == [True, False] * 3


def test_masks_that_look_beyond_the_frame_stay_outside():
    assert not Boxes(BOX).captured
    assert not (MotionMask() & Boxes(BOX)).captured
    assert not sbnet.masks.as_mask(lambda x: x[:, 0] > 0.5).captured


def test_changed_begins_anew_after_a_reset():
    mask, x = Changed(0.1), torch.rand(1, 3, 8, 8)
    assert mask(x).all()
    assert not mask(x).any()
    mask.reset()
    assert mask(x).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["motion", "changed"])
def test_a_frame_is_one_replay(name):
    """Frames after the first are one graph each; outside of it, no kernel of the mask, the lists or the layers."""
    frames = film(12)
    counts: dict[str, int] = {}
    with torch.profiler.profile() as seen:
        got, _ = results(frames, pairs()[name][0], "masked", device="cuda")
    assert len(got) == 12
    for event in seen.key_averages():
        counts[event.key] = counts.get(event.key, 0) + event.count
    assert counts.get("cudaGraphLaunch", 0) >= 12
    motion = sum(e.name == "sbnet::motion_mask_" for e in seen.events())
    assert motion <= 10, "called on the host for each frame"


@pytest.mark.parametrize(("pad", "multiple"), [(7, 1), (0, 32), (3, 8)])
def test_masks_are_widened_as_frames_are(device, pad, multiple):
    network = Network(nn.Identity(), pad=pad, multiple=multiple)
    for size in ((20, 33), (32, 64)):
        mask = torch.rand(2, *size) > 0.5
        frame = mask[:, None].float().expand(-1, 3, -1, -1)
        wanted = network.widened(frame)[:, 0] > 0
        assert torch.equal(network.widened_mask(mask.to(device)).cpu(), wanted)
