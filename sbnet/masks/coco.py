"""COCO annotations: polygons, and runs of pixels, of each image."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

FARTHEST = 1e7  # pixels, of a corner
LARGEST = 1 << 28  # pixels, of an image that runs describe


@dataclass
class Image:
    """What is drawn on an image.

    Attributes:
        size: (height, width), where the file says it.
        polygons: [corners,2] float64 each, x and y in pixels. pixels: [H,W] bool each.
    """

    size: tuple[int, int] | None = None
    polygons: list[Tensor] = field(default_factory=list)
    pixels: list[Tensor] = field(default_factory=list)


def images_of(found: dict[str, Any]) -> dict[str, Image]:
    """The images of a file by their names; all under "" where it lists none. Those without annotations are there, too.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is no such file.
    """
    listed = found.get("images", [])
    names: dict[Any, str] = {}
    images: dict[str, Image] = {}
    for image in listed:
        name = str(image.get("file_name", ""))
        names[image["id"]] = name
        own = images.setdefault(name, Image())
        if "height" in image:
            own.size = _size_of((image["height"], image["width"]), name)
    for note in found["annotations"]:
        at = note.get("image_id")
        if listed and at not in names:
            raise ValueError(f"image_id: expected one of the images, got {at!r}")
        _draw(images.setdefault(names.get(at, ""), Image()), note)
    return images


def _draw(image: Image, note: dict[str, Any]) -> None:
    shapes = note.get("segmentation")
    if isinstance(shapes, dict) and shapes.get("counts"):
        image.pixels.append(pixels_of(shapes))
        return
    listed = shapes if isinstance(shapes, list) else []
    parts = [corners_of(list(zip(s[::2], s[1::2], strict=True)), least=1) for s in listed]
    parts = [part for part in parts if len(part) > 2]  # fewer corners have no inside
    if parts:
        image.polygons += parts
    elif "bbox" in note:
        x, y, wide, high = note["bbox"]
        image.polygons.append(corners_of((x, y, x + wide, y + high)))
    else:
        raise ValueError(f"annotation {note.get('id', '')}: expected a segmentation or a bbox, got none")


def corners_of(polygon: Any, least: int = 3) -> Tensor:
    """[corners,2] float64 of [(x, y), ...] or of a box (x0, y0, x1, y1).

    Raises:
        ValueError: these are no numbers of pixels, or fewer than `least` corners. TypeError: it is no list.
    """
    if len(polygon) == 4 and all(isinstance(v, (int, float)) for v in polygon):
        x0, y0, x1, y1 = polygon
        polygon = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    if len(polygon) < least:
        raise ValueError(f"sbnet: Polygons: polygon: expected at least {least} corners, got {len(polygon)}")
    try:
        found = np.array([(x, y) for x, y in polygon], np.float64)
    except OverflowError:  # a whole number of hundreds of digits
        found = np.array([math.inf])
    if not (np.abs(found) <= FARTHEST).all():
        raise ValueError(f"sbnet: Polygons: polygon: expected finite numbers of at most {FARTHEST:.0e} pixels")
    return torch.from_numpy(found)


def _size_of(given: Any, name: str) -> tuple[int, int]:
    height, width = given
    if not (isinstance(height, int) and isinstance(width, int) and 0 < height <= FARTHEST and 0 < width <= FARTHEST):
        raise ValueError(f"{name}: expected a height and a width in pixels, got {height!r} and {width!r}")
    return height, width


def pixels_of(runs: dict[str, Any]) -> Tensor:
    """[H,W] bool of {"size": [H, W], "counts": ...}: lengths of runs of 0 and 1 in turn down the columns, as a list or
    in COCO's text.

    Raises:
        ValueError: they do not add up to the size.
    """
    height, width = _size_of(runs["size"], "segmentation: size")
    counts = runs["counts"]
    if isinstance(counts, (str, bytes)):
        counts = _read_counts(counts.encode() if isinstance(counts, str) else counts)
    if not all(isinstance(n, int) and n >= 0 for n in counts) or sum(counts) != height * width:
        raise ValueError(f"segmentation: expected runs of {height * width} pixels in all")
    if height * width > LARGEST:
        raise ValueError(f"segmentation: expected at most {LARGEST} pixels, got {height}x{width}")
    values = np.arange(len(counts)) % 2 == 1
    return torch.from_numpy(np.repeat(values, counts).reshape(width, height).T.copy())


def _read_counts(text: bytes) -> list[int]:
    """COCO's text of runs: numbers of five bits a character, lowest first, from the third on as differences from the
    one before the last."""
    counts: list[int] = []
    at = 0
    while at < len(text):
        number = shift = 0
        while True:
            if at == len(text) or not 48 <= text[at] < 112 or shift > 60:
                raise ValueError("segmentation: counts: expected COCO's text of runs")
            bits = text[at] - 48
            at += 1
            number |= (bits & 31) << shift
            shift += 5
            if not bits & 32:
                break
        if bits & 16:
            number -= 1 << shift
        counts.append(number + (counts[-2] if len(counts) > 2 else 0))
    return counts
