"""LiDAR scans from files, and as bird's-eye views."""

import numpy as np
import pytest
import torch

from sbnet.apps.pipeline import Frame
from sbnet.masks import BirdsEye, Occupied, read_points
from sbnet.masks.lidar import ViewMemory

POINTS = np.array([[1, 2, 0.5, 0.25], [3, -4, 1, 0.75], [5, 0, -1, 1]], np.float32)
HEADER = """# .PCD v0.7
VERSION 0.7
FIELDS x y z intensity
SIZE 4 4 4 4
TYPE F F F F
COUNT 1 1 1 1
WIDTH 3
HEIGHT 1
POINTS 3
DATA {}
"""


def test_scans_of_every_format(tmp_path):
    POINTS.tofile(tmp_path / "kitti.bin")
    nuscenes = np.pad(POINTS, [(0, 0), (0, 1)])
    nuscenes[:, 3] *= 255
    nuscenes.tofile(tmp_path / "nuscenes.pcd.bin")
    np.save(tmp_path / "a.npy", POINTS)
    (tmp_path / "text.pcd").write_text(HEADER.format("ascii") + "\n".join(" ".join(map(str, p)) for p in POINTS))
    (tmp_path / "binary.pcd").write_bytes(HEADER.format("binary").encode() + POINTS.tobytes())
    for name in ("kitti.bin", "nuscenes.pcd.bin", "a.npy", "text.pcd", "binary.pcd"):
        np.testing.assert_allclose(read_points(tmp_path / name), POINTS, rtol=1e-6, err_msg=name)
    np.save(tmp_path / "b.npy", np.array([[1, 2, np.nan], [1, 2, 3]]))
    assert read_points(tmp_path / "b.npy").tolist() == [[1, 2, 3, 0]]


def test_what_is_no_scan_is_said(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(20))
    (tmp_path / "none.pcd").write_text("hello")
    (tmp_path / "short.pcd").write_bytes(HEADER.format("binary").encode() + b"1234")
    (tmp_path / "packed.pcd").write_bytes(HEADER.format("binary_compressed").encode())
    np.save(tmp_path / "a.npy", np.zeros(3))
    for name, message in (
        ("a.bin", "4 numbers a point"), ("none.pcd", "PCD header"), ("short.pcd", "expected 3 points, got 0"),
        ("packed.pcd", "expected ascii or binary"), ("a.npy", r"\[P,3\]"), ("a.txt", "ends in"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_points(tmp_path / name)


def test_a_view_from_above():
    view = BirdsEye(x=(0, 8), y=(-4, 4), z=(-2, 2), cell=1, slice_height=1)
    outside = np.array([[9, 0, 0, 1], [1, 0, 3, 1], [-0.1, 0, 0, 1]], np.float32)
    twice = np.array([[1.5, 2.5, 0.9, 0.75]], np.float32)
    seen = view(np.concatenate([POINTS, outside, twice]))
    assert seen.shape == (5, 8, 8)
    assert seen[:4].sum() == 3
    assert seen[2, 1, 6] == 1  # z from 0 to 1, x from 1 to 2, y from 2 to 3
    assert seen[4, 1, 6] == 0.5  # the mean of both
    assert seen[4, 3, 0] == 0.75
    assert torch.equal(Occupied()(seen[None])[0], (seen != 0).any(0))
    again, occupied = view.seen(np.concatenate([POINTS, outside, twice]))
    assert torch.equal(again, seen)
    assert torch.equal(occupied, (seen != 0).any(0))
    with pytest.raises(ValueError, match="BirdsEye: points"):
        view(POINTS[:, :3])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_views_share_memory_once_nobody_holds_it(device):
    view = BirdsEye(x=(0, 8), y=(-4, 4), z=(-2, 2), cell=1, slice_height=1)
    memory = ViewMemory(view)

    def made(points):
        return memory(*view.entries(points)[:2], torch.device(device))

    first = made(POINTS)
    place, kept = first.data_ptr(), first.movedim(0, 2)  # another tensor of the same memory
    del first
    other = made(POINTS[:1] + 1)
    assert torch.equal(other.cpu(), view(POINTS[:1] + 1))
    assert torch.equal(kept.cpu(), view(POINTS).movedim(0, 2))
    assert other.data_ptr() != place
    del kept
    again = made(POINTS[1:])
    assert torch.equal(again.cpu(), view(POINTS[1:]))
    assert device != "cpu" or again.data_ptr() == place


def test_a_frame_makes_its_pixels_once():
    frame = Frame(0, lambda device: torch.ones(2, 4, 6, device=device))
    frame.place(torch.device("cpu"))
    assert frame.pixels.shape == (2, 4, 6)
    assert frame.raw().data_ptr() == frame.raw().data_ptr()


def test_a_frame_that_comes_with_its_cells_is_not_read():
    occupied = torch.zeros(4, 6, dtype=torch.bool)
    occupied[1, 2] = True
    mask, x = Occupied(), torch.full((1, 2, 4, 6), torch.nan)
    mask.see(Frame(0, x[0], occupied=occupied))
    assert torch.equal(mask(x), occupied[None])
    assert mask(torch.ones(1, 2, 4, 7)).all()  # of another size: its own
    mask.see(Frame(1, x[0]))
    assert mask(torch.ones(1, 2, 4, 6)).all()
    mask.see(Frame(2, x[0], occupied=occupied))
    mask.reset()
    assert mask(torch.ones(1, 2, 4, 6)).all()
