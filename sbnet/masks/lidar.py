"""LiDAR scans as bird's-eye views: KITTI's and nuScenes' files, .pcd and .npy, rasterised."""

from __future__ import annotations

import os
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

KITTI, NUSCENES = 4, 5  # float32 numbers a point: x, y, z, intensity; and the ring
PCD = {("F", 4): "<f4", ("F", 8): "<f8", ("U", 1): "u1", ("U", 2): "<u2", ("U", 4): "<u4", ("U", 8): "<u8",
       ("I", 1): "i1", ("I", 2): "<i2", ("I", 4): "<i4", ("I", 8): "<i8"}  # fmt: skip
MOST_NUMBERS = 1 << 20  # of a point, by a header


def read_points(path: str | os.PathLike[str], numbers: int | None = None) -> np.ndarray:
    """[P,4] float32: x, y, z in metres and intensity, of KITTI's .bin, nuScenes' .pcd.bin (intensities of 255 are made
    0 to 1), .pcd (ascii or binary) or .npy ([P,3] or more). Points that are not finite are left out.

    Args:
        numbers: float32 numbers a point of a .bin: 4, or 5 with a ring or a time; None: 5 for a .pcd.bin, and for
            another .bin whichever divides it, of both the one whose fifth numbers are rings or times.

    Raises:
        ValueError: the file does not hold what its name says.
    """
    path = Path(path)
    name = path.name.lower()
    if not name.endswith((".bin", ".pcd", ".npy")):
        raise ValueError(f"sbnet: read_points: {path}: expected a name that ends in .bin, .pcd or .npy")
    if not path.is_file():
        raise ValueError(f"sbnet: read_points: {path}: {'not a regular file' if path.exists() else 'no such file'}")
    if name.endswith(".bin"):
        points = _read_bin(path, numbers)
    elif name.endswith(".pcd"):
        points = _read_pcd(path)
    else:
        try:
            points = np.load(path, allow_pickle=False).astype(np.float32)
        except (ValueError, TypeError, EOFError) as error:
            raise ValueError(f"sbnet: read_points: {path}: expected an array of numbers ({error})") from None
        if points.ndim != 2 or points.shape[1] < 3:
            raise ValueError(f"sbnet: read_points: {path}: expected [P,3] or more, got {points.shape}")
    if points.shape[1] == 3:
        points = np.pad(points, [(0, 0), (0, 1)])
    points = points[:, :4]
    return np.ascontiguousarray(points[np.isfinite(points).all(1)])


def _read_bin(path: Path, wide: int | None) -> np.ndarray:
    """[P,4]: the first four numbers of each point."""
    numbers = np.fromfile(path, "<f4")
    if path.stat().st_size % 4:
        raise ValueError(f"sbnet: read_points: {path}: expected float32 numbers, got {path.stat().st_size} bytes")
    nuscenes = path.name.lower().endswith(".pcd.bin")
    if wide is None:
        fits = [n for n in ((NUSCENES,) if nuscenes else (KITTI, NUSCENES)) if numbers.size % n == 0]
        wide = fits[0] if len(fits) == 1 else _likelier(numbers) if fits else 0
    if not wide or numbers.size % wide:
        what = f"{wide} numbers" if wide else "5 numbers" if nuscenes else "4 or 5 numbers"
        raise ValueError(f"sbnet: read_points: {path}: expected {what} a point, got {numbers.size} in all")
    points = numbers.reshape(-1, wide)[:, :4].copy()
    if nuscenes:
        points[:, 3] /= 255
    return points


def _likelier(numbers: np.ndarray) -> int:
    """4 or 5 numbers a point, where both divide their count: of five, the fifth are rings, whole numbers of few kinds,
    or times of one turn of the scanner; with four numbers a point, each fifth one is now an x, now a y."""
    fifth = numbers.reshape(-1, NUSCENES)[:, 4]
    rings = bool((fifth == np.floor(fifth)).all()) and bool(((fifth >= 0) & (fifth < 256)).all())
    times = bool((np.abs(fifth) <= 1).all()) and bool((np.abs(numbers) > 1).any())
    return NUSCENES if len(fifth) and (rings or times) else KITTI


def _read_pcd(path: Path) -> np.ndarray:
    """[P,3] or, with intensities, [P,4]."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"sbnet: read_points: {path}: {what}")

    data = path.read_bytes()
    head: dict[str, list[str]] = {}
    at = 0
    while "DATA" not in head:
        end = data.find(b"\n", at)
        if end < 0 or end - at > 1 << 16:
            raise wrong("expected a PCD header with DATA, got none")
        words = data[at:end].decode("ascii", "replace").split()
        at = end + 1
        if words and not words[0].startswith("#"):
            head[words[0]] = words[1:]
    try:
        fields, count = head["FIELDS"], int(head["POINTS"][0])
        counts = [int(n) for n in head.get("COUNT", ["1"] * len(fields))]
        kinds = [PCD[kind, int(size)] for kind, size in zip(head["TYPE"], head["SIZE"], strict=True)]
        columns = [fields.index(name) for name in ("x", "y", "z")]
        if len(counts) != len(fields) or len(kinds) != len(fields):
            raise ValueError("TYPE, SIZE and COUNT: expected one a field")
    except (KeyError, ValueError, IndexError) as error:
        raise wrong(f"expected a PCD header with x, y, z ({error})") from None
    if "intensity" in fields:
        columns.append(fields.index("intensity"))
    if min(counts) < 0 or sum(counts) > MOST_NUMBERS or any(counts[c] < 1 for c in columns) or count < 0:
        raise wrong(f"COUNT: expected at least 1 number of x, y and z a point, got {head.get('COUNT')}, {count} points")
    kind = head["DATA"][0] if head["DATA"] else ""
    if kind == "binary":
        row = np.dtype([(str(k), d, (n,)) for k, (d, n) in enumerate(zip(kinds, counts, strict=True))])
        if len(data) - at < count * row.itemsize:
            raise wrong(f"expected {count} points, got {(len(data) - at) // row.itemsize}")
        table = np.frombuffer(data, row, count, at)
        return np.stack([table[str(c)][:, 0].astype(np.float32) for c in columns], 1)
    if kind == "ascii":
        starts = np.cumsum([0, *counts])
        lines = [numbers for line in data[at:].splitlines() if (numbers := line.split())]
        if len(lines) != count:
            raise wrong(f"expected {count} points, got {len(lines)}")
        if any(len(numbers) != starts[-1] for numbers in lines):
            raise wrong(f"expected {starts[-1]} numbers a point, got a line with another count")
        try:
            rows = np.array([[numbers[starts[c]] for c in columns] for numbers in lines]).astype(np.float32)
        except ValueError as error:
            raise wrong(f"expected a table of numbers ({error})") from None
        return rows.reshape(-1, len(columns))
    raise wrong(f"DATA: expected ascii or binary, got {kind!r}")


class BirdsEye:
    """Scans as PIXOR sees them: `view(points)` gives [C,H,W] float32, channels last, of a grid on the ground. Channels:
    occupancy of each slice of height, lowest first, and the mean intensity.

    Args:
        x, y, z: ranges in metres, ahead, to the left and up; rows run along x, columns along y.
        cell, slice_height: of the grid, in metres.

    >>> frame = sbnet.masks.BirdsEye()(sbnet.masks.read_points("000008.bin"))  # [36, 704, 800]
    """

    def __init__(
        self,
        x: tuple[float, float] = (0.0, 70.4),
        y: tuple[float, float] = (-40.0, 40.0),
        z: tuple[float, float] = (-2.5, 1.0),
        cell: float = 0.1,
        slice_height: float = 0.1,
    ) -> None:
        self.low = np.array([x[0], y[0], z[0]])
        self.step = np.array([cell, cell, slice_height])
        spans = np.array([x[1] - x[0], y[1] - y[0], z[1] - z[0]])
        if (spans <= 0).any() or (self.step <= 0).any():
            raise ValueError(f"sbnet: BirdsEye: expected ranges and cells above 0, got {x}, {y}, {z}, {cell}")
        self.shape = tuple(round(n) for n in spans / self.step)  # rows, columns, slices

    def __call__(self, points: np.ndarray) -> Tensor:
        return self.seen(points)[0]

    def seen(self, points: np.ndarray) -> tuple[Tensor, Tensor]:
        """The view, and the cells of it that hold a point, [H,W] bool: what `Occupied` finds by reading all of it."""
        at, values, occupied = self.entries(points)
        view = np.zeros(self.size, np.float32)  # of huge pages: a tenth of the time of torch.zeros
        view[at] = values
        return self.arranged(torch.from_numpy(view)), occupied

    @property
    def size(self) -> int:
        """Numbers of a view."""
        rows, columns, slices = self.shape
        return rows * columns * (slices + 1)

    def arranged(self, numbers: Tensor) -> Tensor:
        """[C,H,W] of a view's numbers as they lie in memory: channels last, as networks take it."""
        rows, columns, slices = self.shape
        return numbers.view(rows, columns, slices + 1).movedim(2, 0)

    def entries(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """What is not 0 in the view of a scan: places in its memory, values there; and the cells, [H,W] bool."""
        if points.ndim != 2 or points.shape[1] < 4:
            raise ValueError(f"sbnet: BirdsEye: points: expected [P,4], got {points.shape}")
        rows, columns, slices = self.shape
        at = np.floor((points[:, :3] - self.low) / self.step)
        inside = ((at >= 0) & (at < self.shape)).all(1)
        row, column, level = at[inside].astype(np.int64).T
        flat = row * columns + column
        cells, which, counts = np.unique(flat, return_inverse=True, return_counts=True)
        means = np.bincount(which, points[inside, 3], len(cells)) / counts
        places = np.concatenate([flat * (slices + 1) + level, cells * (slices + 1) + slices])
        occupied = torch.zeros(rows * columns, dtype=torch.bool)
        occupied[torch.from_numpy(cells)] = True
        return (
            places,
            np.concatenate([np.ones(len(flat), np.float32), means.astype(np.float32)]),
            occupied.view(rows, -1),
        )

    def read(self, path: str | os.PathLike[str]) -> Tensor:
        """The view of a scan's file."""
        return self(read_points(path))


class ViewMemory:
    """Views of scans for readers of frames. On a CPU in memory that is used again once no tensor holds it: only what
    the scan before set in it is cleared, where fresh memory is zeroed page by page. Nobody else may write into them.

    >>> memory = ViewMemory(BirdsEye())
    >>> view = memory(*memory.view.entries(points)[:2], torch.device("cpu"))  # [36, 704, 800]
    """

    def __init__(self, view: BirdsEye, most: int = 4) -> None:
        self.view = view
        self._free: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=most)

    def __call__(self, at: np.ndarray, values: np.ndarray, device: torch.device) -> Tensor:
        """The view that has these values at these places."""
        if device.type != "cpu":
            numbers = torch.zeros(self.view.size, device=device)
            numbers[torch.from_numpy(at).to(device)] = torch.from_numpy(values).to(device)
            return self.view.arranged(numbers)
        try:
            memory, written = self._free.pop()
            memory[written] = 0
        except IndexError:
            memory = np.zeros(self.view.size, np.float32)
        memory[at] = values
        lent = memory[:]  # which tensors of it keep alive, and nothing else does
        weakref.finalize(lent, self._free.append, (memory, at)).atexit = False
        return self.view.arranged(torch.from_numpy(lent))
