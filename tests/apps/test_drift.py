"""Kept pictures of an upscaler follow what changes beneath the mask's threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbnet.apps.pipeline import Cameras, Frame, Pipeline
from sbnet.apps.pipeline.drift import Drift, Likeness, place_of
from sbnet.apps.pipeline.networks import Network
from sbnet.masks import Changed, Mask

SIZE, PAD = (64, 96), 2


class Doubler(nn.Module):
    """Twice as large, by a convolution that passes constants on, on frames with a border of PAD pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 3, 4, 2, 1, groups=3, bias=False)
        tent = torch.tensor([0.25, 0.75, 0.75, 0.25])
        self.conv.weight = nn.Parameter((tent[:, None] * tent).expand(3, 1, 4, 4).clone())

    def forward(self, x):
        return self.conv(x)


def network(enlarges: int = 2) -> Network:
    def finish(y, frame):
        return y[:, :, 2 * PAD : -2 * PAD, 2 * PAD : -2 * PAD], []

    return Network(Doubler().eval(), "doubler", finish=finish, pad=PAD, margin=PAD, mode="cached", mask="changed:12",
                   captured=True, enlarges=enlarges)  # fmt: skip


def brightening(frames: int = 5, moving: bool = True) -> np.ndarray:
    """A wall that gets 2 of 255 brighter with each frame, and a small thing that moves over it."""
    film = np.zeros((frames, *SIZE, 3), np.uint8)
    wall = np.random.default_rng(0).integers(0, 32, (*SIZE, 3), np.uint8)
    for k in range(frames):
        film[k] = 100 + wall + 2 * k
        if moving:
            film[k, 20:28, 10 + 12 * k : 18 + 12 * k] = 220
    return film


def run(film, net, **options):
    pictures = []
    pipeline = Pipeline(film, None, net, lambda result: pictures.append(result.picture), device="cpu", **options)
    return pipeline.run(), np.stack(pictures)


def dense(film) -> np.ndarray:
    x = torch.from_numpy(film).movedim(3, 1).float() / 255
    y = Doubler().eval()(F.pad(x, (PAD,) * 4, mode="replicate"))[:, :, 2 * PAD : -2 * PAD, 2 * PAD : -2 * PAD]
    return (255 * y).round().byte().movedim(1, 3).detach().numpy()


def test_a_wall_that_brightens_slowly_is_followed_exactly():
    film = brightening(moving=False)
    _, pictures = run(film, network(), compare=0)
    apart = np.abs(pictures.astype(int) - dense(film))
    assert apart.max() <= 1  # halves may round either way
    assert (apart > 0).mean() < 0.1
    _, kept = run(film, network(enlarges=0), compare=0)
    assert np.abs(kept[4].astype(int) - dense(film)[0]).max() <= 1


@pytest.mark.parametrize("mask", ["changed:12", "changed:12 | refresh:1000"])
@pytest.mark.parametrize("cameras", [False, True])
def test_frames_are_compared_with_those_that_blocks_were_computed_from(mask, cameras):
    """A pixel is computed as a part of a block in which another one changed, and then leaves what it was there by more
    than the threshold, but not what it was before."""
    film = np.full((4, *SIZE, 3), 100, np.uint8)
    film[1:, 20:28, 20:28] = 220
    film[1, 29, 29], film[2:, 29, 29] = 109, 91
    seen = []
    if cameras:
        given = [film, film]
        Cameras(given, mask, network(), lambda k, result: seen.append(result), device="cpu", compare=0, block=16).run()
        assert len(seen) == 8
        seen = seen[::2]
    else:
        Pipeline(film, mask, network(), seen.append, device="cpu", compare=0, block=16).run()
    active = [bool(result.active[29 // result.block[0], 29 // result.block[1]]) for result in seen]
    assert active == [True, True, True, False]


class Gate(Mask):
    """Nothing of frame 1."""

    frame = 0

    def see(self, frame):
        self.frame = frame.index

    def __call__(self, x):
        return torch.full((1, *x.shape[2:]), self.frame != 1)


def test_what_another_mask_held_back_is_computed_once_it_lets_it():
    film = np.full((4, *SIZE, 3), 100, np.uint8)
    film[1:, 40, 40] = 220
    seen = []
    Pipeline(film, Changed(12 / 255) & Gate(), network(), seen.append, device="cpu", compare=0, block=16).run()
    assert [result.density > 0 for result in seen] == [True, False, True, False]


def test_blocks_of_different_age_meet_without_steps():
    film = brightening()
    summary, pictures = run(film, network(), compare=1)
    assert 0 < summary.densities.mean < 0.7
    apart = np.abs(pictures.astype(int) - dense(film))
    assert apart.max() <= 4  # where a step between ages is enlarged otherwise than the network does
    assert summary.likeness.seams == pytest.approx(1, abs=0.1)
    assert summary.likeness.psnr > 48
    plain, kept = run(film, network(enlarges=0), compare=1)
    assert plain.likeness is None
    assert np.abs(kept.astype(int) - dense(film)).max() >= 6


def test_the_table_says_how_alike_pictures_are():
    summary, _ = run(brightening(), network(), compare=1)
    rows = {name: (value, what) for name, value, what in summary.rows()}
    assert rows["PSNR"][0].endswith(" dB")
    assert rows["seams"][0].endswith("x")
    assert "of the picture, which was " in rows["largest error"][1]


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (61 / 255, "which was kept: the frame had changed there by 61 of 255, which changed:60 would have marked"),
        (0.4 / 255, "which was kept: the frame had changed there by 0 of 255, which changed:0 would have marked"),
        (0.0, "which was computed"),
    ],
)
def test_where_the_largest_error_is_and_what_would_have_seen_it(moved, words):
    drift = Drift(2, PAD)
    drift.apart = torch.zeros(1, 3, *SIZE)
    drift.apart[0, 1, 20, 30] = -moved
    found = place_of(Frame(7, None), (0, 2, 41, 60), drift)
    assert found == f"in frame 7 at row 41, column 60 of the picture, {words}"
    frame = torch.zeros(1, 3, *SIZE)
    for threshold in (60, 61):
        mask = Changed(threshold / 255)
        mask(frame)
        assert bool(mask(frame + drift.apart).any()) == (moved > threshold / 255)


def test_cameras_follow_each_its_own_wall():
    films = [brightening(), brightening()[:, ::-1].copy()]
    pictures = [[], []]
    Cameras(films, None, network(), lambda k, result: pictures[k].append(result.picture), device="cpu", compare=0).run()
    for film, got in zip(films, pictures, strict=True):
        assert np.abs(np.stack(got).astype(int) - dense(film)).max() <= 4


def test_a_seam_is_the_step_where_ages_differ():
    """By hand: a row of four pixels enlarged twice; the frame's third was computed at another time."""
    age = torch.tensor([[0, 0, 3, 3]])
    wanted = torch.zeros(2, 8, 3)
    wanted[:, 4:] = 0.1
    got = torch.zeros(2, 8, 3)
    got[:, 4:] = 0.3
    like = Likeness()
    like.add(got, wanted, age)
    assert like.seams == pytest.approx(3)
    assert like.psnr == pytest.approx(-10 * math.log10(0.04 / 2))
    assert math.isnan(Likeness().seams)


@pytest.mark.gpu
def test_one_graph_a_frame_follows_as_well():
    film = brightening()
    pictures = []
    Pipeline(film, None, network(), lambda result: pictures.append(result.picture), device="cuda", compare=0,
             dtype=torch.float32).run()  # fmt: skip
    assert np.abs(np.stack(pictures).astype(int) - dense(film)).max() <= 4
