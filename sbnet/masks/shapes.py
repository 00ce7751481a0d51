"""Masks from polygons and boxes: JSON, COCO, detections."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbnet.masks import coco
from sbnet.masks.base import Mask, resized
from sbnet.masks.coco import corners_of

Polygon = Sequence[Sequence[float]]


def fill_polygons(polygons: Iterable[Polygon | Tensor], size: tuple[int, int]) -> Tensor:
    """[H,W] bool: pixels whose centre lies in a polygon [(x, y), ...], by the even-odd rule within each."""
    found = torch.zeros(size, dtype=torch.bool)
    for polygon in polygons:
        corners = torch.as_tensor(polygon, dtype=torch.float64).reshape(-1, 2)
        if len(corners) < 3:
            continue
        low, high = corners.amin(0).floor().tolist(), corners.amax(0).ceil().tolist()
        left, right, top, bottom = (int(min(max(v, 0), size[k])) for v, k in
                                    ((low[0], 1), (high[0], 1), (low[1], 0), (high[1], 0)))  # fmt: skip
        inner = bottom - top, right - left
        if not all(inner):
            continue
        x, y = (corners - torch.tensor([left, top])).t().contiguous()
        crossings = torch.zeros(inner[0] * (inner[1] + 1), dtype=torch.int32)
        for first in range(0, len(corners), EDGES):
            _cross(crossings, x, y, torch.arange(first, min(first + EDGES, len(corners))), inner)
        found[top:bottom, left:right] |= crossings.view(inner[0], inner[1] + 1).cumsum(1)[:, : inner[1]] % 2 == 1
    return found


EDGES = 1 << 16  # of a polygon that are drawn at a time


def _cross(crossings: Tensor, x: Tensor, y: Tensor, edges: Tensor, size: tuple[int, int]) -> None:
    """Counts in [H * (W + 1)], for each row that some edges cross, the first pixel whose centre is right of it."""
    height, width = size
    after = (edges + 1) % len(x)
    x0, y0, x1, y1 = x[edges], y[edges], x[after], y[after]
    # Rows whose centres, at + 0.5, lie between the ends: the lower one counts.
    first, end = (torch.ceil(v - 0.5).clamp(0, height).long() for v in (torch.minimum(y0, y1), torch.maximum(y0, y1)))
    step = max(1, 16 * EDGES // height)  # an edge may cross all rows: memory is bounded
    for begin in range(0, len(edges), step):
        part = slice(begin, begin + step)
        counts = (end - first)[part]
        which = torch.repeat_interleave(torch.arange(len(counts)), counts)
        if not len(which):
            continue
        row = first[part][which] + torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        a, b, c, d = (v[part][which] for v in (x0, y0, x1, y1))
        at = torch.ceil(a + (row + 0.5 - b) * ((c - a) / (d - b)) - 0.5).clamp(0, width).long()
        crossings.index_add_(0, row * (width + 1) + at, torch.ones(len(row), dtype=torch.int32))


def fill_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[H,W] bool: pixels that boxes [K,4] (x0, y0, x1, y1, in pixels) touch, on their device."""
    height, width = size
    if not len(boxes):
        return torch.zeros(size, dtype=torch.bool, device=boxes.device)
    x, y = (torch.arange(n, device=boxes.device) for n in (width, height))
    x0, y0, x1, y1 = boxes.float().unbind(1)
    across = (x[None] + 1 > x0[:, None]) & (x[None] < x1[:, None])
    down = (y[None] + 1 > y0[:, None]) & (y[None] < y1[:, None])
    dtype = torch.float16 if boxes.is_cuda else torch.float32  # of how many boxes touch a pixel: 0, or not
    return (down.to(dtype).t() @ across.to(dtype)) > 0


class Polygons(Mask):
    """The inside of polygons, the same in every frame.

    Args:
        given: polygons [[(x, y), ...], ...] in pixels, boxes (x0, y0, x1, y1) among them, or a JSON file of such a
            list, of {"polygons": ..., "boxes": ...}, or of COCO annotations: polygons, runs of pixels (RLE), crowds;
            those of the frame's file, where names differ; otherwise all. Where no number is above 1, they are
            shares of height and width.
        size: (height, width) that they were drawn on, where frames may have another; COCO files say it.

    Raises:
        ValueError: it holds something else; a frame's name is that of several images of a COCO file.
    """

    def __init__(self, given: Any, size: tuple[int, int] | None = None) -> None:
        self._size = size
        self._images: dict[str, coco.Image] = {}
        self._polygons: list[Tensor] = []
        self._path = Path(given) if isinstance(given, (str, os.PathLike)) else None
        if self._path is not None:
            self._read(self._path)
        else:
            self._polygons = [corners_of(p) for p in given]
        drawn = self._polygons + [p for image in self._images.values() for p in image.polygons]
        self._relative = bool(drawn) and all(float(p.min()) >= 0 and float(p.max()) <= 1 for p in drawn)
        self._made: tuple[Any, Tensor] | None = None
        self._frame = ""

    @property
    def files(self) -> Sequence[Any]:
        return [] if self._path is None else [self._path]

    def _read(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"sbnet: Polygons: {path}: expected a file, got none that is regular")
        try:
            found = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:  # JSON, text or numbers that are none; brackets in brackets
            raise ValueError(f"sbnet: Polygons: {path}: expected JSON, got {error}") from None
        try:
            if isinstance(found, dict) and "annotations" in found:
                self._images = coco.images_of(found)
                return
            named = isinstance(found, dict) and {"polygons", "boxes"} & set(found)
            if isinstance(found, dict) and not named:
                raise ValueError(f"got an object of {', '.join(map(repr, list(found)[:5])) or 'nothing'}")
            listed = [p for name in sorted(named) for p in found[name]] if named else found
            self._polygons = [corners_of(p) for p in listed]
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            what = str(error).removeprefix("sbnet: Polygons: ")
            raise ValueError(
                f"sbnet: Polygons: {path}: expected polygons, boxes or COCO annotations ({what})"
            ) from None

    def see(self, frame: Any) -> None:
        self._frame = os.fspath(getattr(frame, "path", None) or frame.name)

    def _named(self) -> list[coco.Image]:
        """The images of the last frame's name; all where it is none's."""
        parts = Path(self._frame).parts
        shared = {name: _shared(parts, Path(name).parts) for name in self._images}
        best = [name for name, count in shared.items() if count and count == max(shared.values())]
        if len(best) > 1:
            raise ValueError(
                f"sbnet: Polygons: {self._path}: {self._frame}: expected the name of one image, got that of "
                f"{' and '.join(best[:2])}"
            )
        return [self._images[name] for name in best or self._images]

    def __call__(self, x: Tensor) -> Tensor:
        size = int(x.shape[2]), int(x.shape[3])
        key = size, self._frame if self._images else "", x.device
        if self._made is None or self._made[0] != key:
            images = self._named()
            drawn = [(p, self._size or image.size or size) for image in images for p in image.polygons]
            drawn += [(p, self._size or size) for p in self._polygons]
            scaled = [p * torch.tensor([size[1] / width, size[0] / height]) for p, (height, width) in drawn]
            if self._relative:
                scaled = [p * torch.tensor([size[1], size[0]]) for p, _ in drawn]
            found = fill_polygons(scaled, size)
            for pixels in (pixels for image in images for pixels in image.pixels):
                found |= resized(pixels[None], size)[0]
            self._made = key, found.to(x.device)
        return self._made[1].expand(x.shape[0], -1, -1)


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many parts two names have in common, from the file on; 0 unless one of them is the end of the other."""
    count = min(len(a), len(b))
    return count if count and tuple(a[-count:]) == tuple(b[-count:]) else 0


class Boxes(Mask):
    """Boxes: [K,4] (x0, y0, x1, y1) in pixels, a tensor or list, or an object with `xyxy` (supervision's Detections).
    `boxes` may be set anew between frames.

    >>> mask = sbnet.masks.Boxes([[10, 20, 50, 60]]).dilate(8)
    """

    def __init__(self, boxes: Any = ()) -> None:
        self.boxes = boxes

    def __call__(self, x: Tensor) -> Tensor:
        given = getattr(self.boxes, "xyxy", self.boxes)
        boxes = torch.as_tensor(given, dtype=torch.float32, device=x.device).reshape(-1, 4)
        return fill_boxes(boxes, (int(x.shape[2]), int(x.shape[3]))).expand(x.shape[0], -1, -1)


class Tracks(Boxes):
    """Where the last frame's boxes were, and a border of `margin` of their size; every `refresh` frames, and in the
    first, the whole frame, so that what is new is found.

    Args:
        margin: share of a box's sides that is added on each.
        refresh: frames from one whole frame to the next.
    """

    MOST = 512  # boxes of a frame that are followed on a device; after a frame of more, all is set

    def __init__(self, margin: float = 0.25, refresh: int = 30) -> None:
        super().__init__()
        if margin < 0 or refresh < 1:
            raise ValueError(f"sbnet: Tracks: expected margin >= 0 and refresh >= 1, got {margin} and {refresh}")
        self.margin, self.refresh = margin, refresh
        self._count = 0
        self._told = False
        # On the device: boxes with their margin [MOST,4], frames so far, and whether there were more boxes.
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def captured(self) -> bool:
        return self._told

    @property
    def reads_boxes(self) -> bool:
        return True

    def reset(self) -> None:
        self.boxes, self._count = (), 0
        for state in self._kept or ():
            state.zero_()

    def expect_boxes(self, told: bool) -> None:
        self._told = told

    def follow(self, boxes: Tensor, counts: Tensor) -> None:
        if self._kept is None:
            return
        held, _, more = self._kept
        grown = self._grown(boxes[: self.MOST].double().mul(10).round().div(10))  # as records have them
        held[: len(grown)] = torch.where(counts[: self.MOST, None], grown, 0).float()
        more.copy_(counts[self.MOST :].any())

    def learn(self, records: Sequence[dict[str, Any]]) -> None:
        found = [record["box"] for record in records if "box" in record]
        self.boxes = self._grown(torch.tensor(found, dtype=torch.float64).reshape(len(found), 4)).float()
        if self._kept is not None:
            held, _, more = self._kept
            held.zero_()[: len(self.boxes)] = self.boxes[: self.MOST].to(held.device)
            more.fill_(len(self.boxes) > self.MOST)

    def _grown(self, boxes: Tensor) -> Tensor:
        low, high = boxes[:, :2], boxes[:, 2:]
        border = self.margin * (high - low)
        return torch.cat([low - border, high + border], 1)

    def __call__(self, x: Tensor) -> Tensor:
        if self._told:
            return self._followed(x)
        self._count += 1
        if (self._count - 1) % self.refresh == 0:
            return torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        return super().__call__(x)

    def _followed(self, x: Tensor) -> Tensor:
        """The same of what is on the device."""
        if self._kept is None or self._kept[0].device != x.device:
            self._kept = (
                torch.zeros(self.MOST, 4, device=x.device), torch.zeros((), dtype=torch.int64, device=x.device),
                torch.zeros((), dtype=torch.bool, device=x.device),
            )  # fmt: skip
        held, count, more = self._kept
        whole = (count % self.refresh == 0) | more
        count.add_(1)
        return (fill_boxes(held, (int(x.shape[2]), int(x.shape[3]))) | whole).expand(x.shape[0], -1, -1)
