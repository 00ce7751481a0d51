"""LiDAR scans from files, and as bird's-eye views."""

import os

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


@pytest.mark.parametrize("fifth", ["ring", "time"])
@pytest.mark.parametrize("count", [3, 12, 400])
def test_scans_of_five_numbers_a_point(fifth, count, tmp_path):
    """nuScenes' and Lyft's rings, times of a turn; also where the count fits four numbers, too."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-40, 40, (count, 4)).astype(np.float32)
    last = rng.integers(0, 32, count) if fifth == "ring" else rng.uniform(0, 0.1, count)
    np.c_[points, last].astype("<f4").tofile(tmp_path / "five.bin")
    assert np.array_equal(read_points(tmp_path / "five.bin"), points)
    four = rng.uniform(-40, 40, (20 * count, 4)).astype(np.float32)
    four.tofile(tmp_path / "four.bin")
    assert np.array_equal(read_points(tmp_path / "four.bin"), four)
    four.tofile(tmp_path / "told.bin")
    assert read_points(tmp_path / "told.bin", numbers=5).shape == (16 * count, 4)


def pcd(path, body=b"", data="ascii", **head) -> None:
    words = {
        "FIELDS": "x y z intensity",
        "SIZE": "4 4 4 4",
        "TYPE": "F F F F",
        "COUNT": "1 1 1 1",
        "POINTS": "3",
    } | head
    lines = "".join(f"{name} {value}\n" for name, value in words.items())
    path.write_bytes(f"VERSION 0.7\n{lines}DATA {data}\n".encode() + body)


TEXT = "\n".join(" ".join(map(str, p)) for p in POINTS).encode()


def test_pcd_files_as_tools_write_them(tmp_path):
    path = tmp_path / "a.pcd"
    for body in (TEXT, TEXT + b"\n", TEXT + b"\n \n\t\n", TEXT.replace(b"\n", b"\r\n"), TEXT.replace(b" ", b"  ")):
        pcd(path, body)
        assert np.array_equal(read_points(path), POINTS)
    for data in ("ascii", "binary"):
        pcd(path, b"", data, POINTS="0")
        assert read_points(path).shape == (0, 4)
    table = np.zeros(3, [("p", "<f4", 4), ("t", "<u8"), ("s", "<i8"), ("n", "<f4", 2)])
    table["p"], table["t"] = POINTS, 1 << 40
    fields = {
        "FIELDS": "x y z intensity t s n",
        "SIZE": "4 4 4 4 8 8 4",
        "TYPE": "F F F F U I F",
        "COUNT": "1 1 1 1 1 1 2",
    }
    pcd(path, table.tobytes(), "binary", **fields)
    assert np.array_equal(read_points(path), POINTS)


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        ({"COUNT": "0 1 1 1"}, TEXT, "COUNT"), ({"COUNT": "-1 1 1 1"}, TEXT, "COUNT"),
        ({"COUNT": "1"}, TEXT, "one a field"),
        ({"COUNT": "1 1 1 99999999999"}, TEXT, "COUNT"), ({"POINTS": "-3"}, TEXT, "COUNT"),
        ({"POINTS": "x"}, TEXT, "header"),
        ({"POINTS": "9" * 30}, TEXT, "points, got 3"), ({"TYPE": "F F F"}, TEXT, "header"),
        ({"SIZE": "3 4 4 4"}, TEXT, "header"),
        ({"POINTS": "4"}, TEXT, "expected 4 points, got 3"), ({}, TEXT[: len(TEXT) // 2], "expected"),
        ({}, TEXT.replace(b" 0.5 ", b" "), "numbers a point"), ({}, TEXT.replace(b"0.5", b"abc"), "table of numbers"),
        ({}, TEXT.replace(b"0.5", b"\xff"), "table of numbers"),
    ],
)  # fmt: skip
def test_pcd_files_that_lie_are_a_line(head, body, message, tmp_path):
    path = tmp_path / "a.pcd"
    pcd(path, body, **head)
    with pytest.raises(ValueError, match=rf"read_points: .*a\.pcd: .*{message}") as found:
        read_points(path)
    assert "\n" not in str(found.value)
    if "COUNT" in message or "points" in message:
        pcd(path, POINTS.tobytes(), "binary", **head)
        with pytest.raises(ValueError, match="read_points"):
            read_points(path)


def test_a_pipe_is_no_scan(tmp_path):
    for name in ("a.bin", "a.pcd", "a.npy"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match="not a regular file"):
            read_points(tmp_path / name)


def test_what_is_no_scan_is_said(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(24))
    (tmp_path / "none.pcd").write_text("hello")
    (tmp_path / "short.pcd").write_bytes(HEADER.format("binary").encode() + b"1234")
    (tmp_path / "packed.pcd").write_bytes(HEADER.format("binary_compressed").encode())
    np.save(tmp_path / "a.npy", np.zeros(3))
    for name, message in (
        ("a.bin", "4 or 5 numbers a point, got 6"), ("none.pcd", "PCD header"),
        ("short.pcd", "expected 3 points, got 0"),
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
def test_views_share_memory_that_is_free(device):
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
