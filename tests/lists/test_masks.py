"""Masks from video."""

import pytest
import torch

from sbnet.masks import MotionMask


def frame(device: str, square: int | None = None) -> torch.Tensor:
    """A grey picture, with a white 8x8 square at column `square`."""
    picture = torch.full((1, 3, 32, 48), 0.5, device=device)
    if square is not None:
        picture[..., 8:16, square : square + 8] = 1.0
    return picture


def test_first_frame_is_all_motion_and_a_still_scene_none(device):
    motion = MotionMask((32, 48), device=device)
    first = motion(frame(device))
    assert first.shape == (1, 32, 48)
    assert first.dtype == torch.bool
    assert first.all()
    assert not motion(frame(device)).any()


def test_what_moves_is_marked_where_it_was_and_where_it_is(device):
    motion = MotionMask((32, 48), device=device)
    motion(frame(device, 4))
    mask = motion(frame(device, 30))
    assert mask[0, 12, 6]
    assert mask[0, 12, 34]
    assert not mask[0, 12, 20]
    assert not mask[0, 28].any()


def test_a_cut_is_all_motion_once(device):
    motion = MotionMask((32, 48), device=device)
    motion(frame(device))
    assert motion(frame(device) * 0).all()
    assert not motion(frame(device) * 0).any()


def test_reset_and_the_background_stays_in_place(device):
    motion = MotionMask((32, 48), device=device)
    address = motion.background.data_ptr()
    motion(frame(device))
    motion(frame(device, 4))
    motion.reset()
    assert motion(frame(device)).all()
    assert motion.background.data_ptr() == address


def test_half_precision_frames(device):
    motion = MotionMask((32, 48), device=device)
    motion(frame(device).half())
    assert not motion(frame(device).half()).any()


@pytest.mark.parametrize(("arguments", "named"), [({"rate": 0.0}, "rate"), ({"smooth": 4}, "smooth")])
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        MotionMask((32, 48), **arguments)


def test_a_frame_with_nan_is_a_cut_and_forgotten(device):
    motion = MotionMask((32, 48), device=device)
    motion(frame(device))
    broken = frame(device)
    broken[0, 0, 20, 20] = torch.nan
    assert motion(broken).all()
    assert motion(frame(device)).all()  # the background starts again
    assert not motion(frame(device)).any()
    assert motion(frame(device, 16)).any()


def test_bad_frames_are_named():
    motion = MotionMask((32, 48))
    for bad in (frame("cpu")[0], frame("cpu")[..., :47], frame("cpu").int(), frame("cpu").expand(2, 3, 32, 48)):
        with pytest.raises(ValueError, match="MotionMask: frame: "):
            motion(bad)
    with pytest.raises(TypeError, match="MotionMask: size"):
        MotionMask((32.0, 48.0))


def steady(**options) -> MotionMask:
    """A mask that has seen a grey picture, and for which nothing is a cut."""
    motion = MotionMask((32, 48), **{"cut": 1.0, **options})
    motion(frame("cpu"))
    return motion


@pytest.mark.parametrize(
    ("threshold", "change", "moved"), [(0.08, 0.085, True), (0.08, 0.075, False), (0.2, 0.15, False)]
)
def test_the_threshold_is_of_brightness(threshold, change, moved):
    for sign in (1, -1):
        mask = steady(threshold=threshold)(frame("cpu") + sign * change)
        assert bool(mask.all() if moved else ~mask.any())  # at the border, too


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_the_background_follows_by_its_rate(rate):
    motion = steady(rate=rate)
    motion(frame("cpu") + 0.2)
    torch.testing.assert_close(motion.background, torch.full((1, 32, 48), 0.5 + 0.2 * rate))


@pytest.mark.parametrize(("smooth", "pixels"), [(1, 1), (3, 9), (5, 0)])
def test_brightness_is_averaged_over_a_box(smooth, pixels):
    """One pixel that is 0.5 brighter: 0.5, 0.056, 0.02 over the box."""
    picture = frame("cpu")
    picture[0, :, 20, 30] += 0.5
    mask = steady(smooth=smooth, threshold=0.05)(picture)
    assert int(mask.sum()) == pixels


@pytest.mark.gpu
def test_motion_in_a_cuda_graph():
    motion, eager = MotionMask((32, 48), device="cuda"), MotionMask((32, 48), device="cuda")
    x = frame("cuda")
    motion(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = motion(x)
    motion.reset()
    for square in (None, 4, 6, 30, None, None):
        x.copy_(frame("cuda", square))
        graph.replay()
        assert torch.equal(mask, eager(frame("cuda", square)))


def test_motion_on_another_device_begins_anew():
    mask, frames = MotionMask(), torch.rand(2, 1, 3, 16, 24)
    mask(frames[0])
    mask.background = mask.background.to("meta")  # as of a pipeline on a GPU before
    assert mask(frames[1]).all()
    assert mask.background.device == frames.device
