"""Masks from polygons and boxes: JSON, COCO, detections."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbnet.masks.base import Mask

Polygon = Sequence[Sequence[float]]


def fill_polygons(polygons: Iterable[Polygon], size: tuple[int, int]) -> Tensor:
    """[H,W] bool: pixels whose centre lies in a polygon [(x, y), ...], by the even-odd rule within each."""
    height, width = size
    found = torch.zeros(height, width, dtype=torch.bool)
    centres = torch.arange(height, dtype=torch.float64) + 0.5
    for polygon in polygons:
        corners = torch.as_tensor(polygon, dtype=torch.float64).reshape(-1, 2)
        crossings = torch.zeros(height, width + 1, dtype=torch.int32)
        for (x0, y0), (x1, y1) in zip(corners.tolist(), corners.roll(-1, 0).tolist(), strict=True):
            rows = torch.nonzero((centres >= min(y0, y1)) & (centres < max(y0, y1)))[:, 0]
            if len(rows):
                x = x0 + (centres[rows] - y0) * ((x1 - x0) / (y1 - y0))
                first = torch.ceil(x - 0.5).clamp(0, width).long()  # of the centres right of the edge
                crossings[rows, first] += 1
        found |= crossings.cumsum(1)[:, :width] % 2 == 1
    return found


def fill_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[H,W] bool: pixels that boxes [K,4] (x0, y0, x1, y1, in pixels) touch, on their device."""
    height, width = size
    if not len(boxes):
        return torch.zeros(size, dtype=torch.bool, device=boxes.device)
    x, y = (torch.arange(n, device=boxes.device) for n in (width, height))
    x0, y0, x1, y1 = boxes.float().unbind(1)
    across = (x[None] + 1 > x0[:, None]) & (x[None] < x1[:, None])
    down = (y[None] + 1 > y0[:, None]) & (y[None] < y1[:, None])
    return (down.float().t() @ across.float()) > 0


class Polygons(Mask):
    """The inside of polygons, the same in every frame.

    Args:
        given: polygons [[(x, y), ...], ...] in pixels, boxes (x0, y0, x1, y1) among them, or a JSON file of such a
            list, of {"polygons": ..., "boxes": ...}, or of COCO annotations (those of the frame's file name, where
            names differ; otherwise all).
        size: (height, width) that they were drawn on, where frames may have another; COCO files say it.
    """

    def __init__(self, given: Any, size: tuple[int, int] | None = None) -> None:
        self._size = size
        self._by_name: dict[str, list[Polygon]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._polygons: list[Polygon] = []
        if isinstance(given, (str, os.PathLike)):
            self._read(Path(given))
        else:
            self._polygons = [_checked(p) for p in given]
        self._made: tuple[Any, Tensor] | None = None
        self._name = ""

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"sbnet: Polygons: {path}: expected JSON, got {error}") from None
        try:
            if isinstance(found, dict) and "annotations" in found:
                self._coco(found)
            else:
                named = isinstance(found, dict) and {"polygons", "boxes"} & set(found)
                if isinstance(found, dict) and not named:
                    raise KeyError("polygons", "boxes", "annotations")
                listed = [p for name in sorted(named) for p in found[name]] if named else found
                self._polygons = [_checked(p) for p in listed]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"sbnet: Polygons: {path}: expected polygons, boxes or COCO annotations ({error!r})"
            ) from None

    def _coco(self, found: dict[str, Any]) -> None:
        images = {image["id"]: image for image in found.get("images", [])}
        for image in images.values():
            name = _name_of(image)
            self._by_name.setdefault(name, [])  # one without annotations has an empty mask
            if "height" in image:
                self._sizes[name] = image["height"], image["width"]
        for note in found["annotations"]:
            image = images.get(note.get("image_id"), {})
            shapes = note.get("segmentation")
            if isinstance(shapes, list) and shapes:
                polygons = [_checked(list(zip(s[::2], s[1::2], strict=True))) for s in shapes]
            else:
                x, y, w, h = note["bbox"]
                polygons = [_checked((x, y, x + w, y + h))]
            self._by_name.setdefault(_name_of(image), []).extend(polygons)

    def see(self, frame: Any) -> None:
        self._name = frame.name

    def __call__(self, x: Tensor) -> Tensor:
        size = int(x.shape[2]), int(x.shape[3])
        name = self._name if self._name in self._by_name else None
        key = size, name, x.device
        if self._made is None or self._made[0] != key:
            named = self._by_name if name is None else {name: self._by_name[name]}
            drawn = [(p, self._size or self._sizes.get(of, size)) for of, some in named.items() for p in some]
            drawn += [(p, self._size or size) for p in self._polygons]
            scaled = [
                [(px * size[1] / width, py * size[0] / height) for px, py in polygon]
                for polygon, (height, width) in drawn
            ]
            self._made = key, fill_polygons(scaled, size).to(x.device)
        return self._made[1].expand(x.shape[0], -1, -1)


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

    def __init__(self, margin: float = 0.25, refresh: int = 30) -> None:
        super().__init__()
        if margin < 0 or refresh < 1:
            raise ValueError(f"sbnet: Tracks: expected margin >= 0 and refresh >= 1, got {margin} and {refresh}")
        self.margin, self.refresh = margin, refresh
        self._count = 0

    def reset(self) -> None:
        self.boxes, self._count = (), 0

    def learn(self, records: Sequence[dict[str, Any]]) -> None:
        found = []
        for record in records:
            if "box" in record:
                x0, y0, x1, y1 = record["box"]
                dx, dy = self.margin * (x1 - x0), self.margin * (y1 - y0)
                found.append((x0 - dx, y0 - dy, x1 + dx, y1 + dy))
        self.boxes = found

    def __call__(self, x: Tensor) -> Tensor:
        self._count += 1
        if (self._count - 1) % self.refresh == 0:
            return torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        return super().__call__(x)


def _name_of(image: dict[str, Any]) -> str:
    return Path(image.get("file_name", "")).name


def _checked(polygon: Any) -> Polygon:
    if len(polygon) == 4 and all(isinstance(v, (int, float)) for v in polygon):
        x0, y0, x1, y1 = map(float, polygon)
        return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    points = [(float(x), float(y)) for x, y in polygon]
    if len(points) < 3:
        raise ValueError(f"sbnet: Polygons: polygon: expected at least 3 corners, got {len(points)}")
    return points
