"""Boxes out of heat maps, and onto pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

COLOUR = np.array([255, 60, 60], np.uint8)
CELL = 4  # pixels of the frame a pixel of CenterFace's maps
UNCLIP = 1.6  # PaddleOCR: the detector marks the middle of a line; its box is widened by this
Record = dict[str, Any]


def boxes_of_faces(
    heat: Tensor, scale: Tensor, offset: Tensor, size: tuple[int, ...], least: float, overlap: float = 0.3
) -> list[Record]:
    """{"box": [x0, y0, x1, y1], "score"} of each face, best first, by CenterFace's decoding.

    Args:
        heat, scale, offset: [1,1,h,w], [1,2,h,w] (logarithms of height and width), [1,2,h,w] (y and x).
        size: (height, width) of the frame, to which boxes are cut.
        overlap: intersection over union from which on the worse of two boxes goes.
    """
    heat, scale, offset = (v[0].float().cpu() for v in (heat, scale, offset))
    rows, columns = torch.nonzero(heat[0] > least, as_tuple=True)
    if not len(rows):
        return []
    high, wide = (scale[k, rows, columns].clamp(max=8).exp() * CELL for k in (0, 1))
    y = (rows + offset[0, rows, columns] + 0.5) * CELL - high / 2
    x = (columns + offset[1, rows, columns] + 0.5) * CELL - wide / 2
    boxes = torch.stack([x, y, x + wide, y + high], 1).clamp(min=0)
    boxes[:, 0::2].clamp_(max=size[1])
    boxes[:, 1::2].clamp_(max=size[0])
    scores = heat[0, rows, columns]
    return [
        {"box": [round(v, 1) for v in boxes[k].tolist()], "score": round(float(scores[k]), 4)}
        for k in best_of(boxes, scores, overlap)
    ]


def best_of(boxes: Tensor, scores: Tensor, overlap: float) -> list[int]:
    """Indices of boxes that no better one covers, best first."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left, kept = scores.argsort(descending=True), []
    while len(left):
        first, rest = int(left[0]), left[1:]
        kept.append(first)
        low = torch.maximum(boxes[first, :2], boxes[rest, :2])
        high = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        left = rest[shared < overlap * (areas[first] + areas[rest] - shared)]
    return kept


def boxes_of_text(scores: Tensor, size: tuple[int, ...], least: float, area: int = 16) -> list[Record]:
    """{"box", "score"} of each connected area of scores [1,1,H,W] above `least`, widened as PaddleOCR does; from the
    top of the page down. Areas of fewer than `area` pixels are dropped."""
    found = scores[0, 0].float().cpu()[: size[0], : size[1]].numpy()
    above = found > least
    row, start, end, name = _runs(above)
    if not len(row):
        return []
    count = int(name.max()) + 1
    pixels = np.bincount(name, end - start)
    sums = np.bincount(name, np.add.reduceat(found[above], np.cumsum(end - start) - (end - start), dtype=np.float64))
    low, high = np.full((2, count), max(found.shape)), np.zeros((2, count), np.int64)
    for axis, (first, last) in enumerate(((row, row + 1), (start, end))):
        np.minimum.at(low[axis], name, first)
        np.maximum.at(high[axis], name, last)
    records = []
    for k in np.flatnonzero(pixels >= area):
        (y0, x0), (y1, x1) = low[:, k].tolist(), high[:, k].tolist()
        wider = (y1 - y0) * (x1 - x0) * UNCLIP / (2 * (y1 - y0 + x1 - x0))
        box = [max(0.0, x0 - wider), max(0.0, y0 - wider), min(size[1], x1 + wider), min(size[0], y1 + wider)]
        records.append({"box": [round(float(v), 1) for v in box], "score": round(float(sums[k] / pixels[k]), 4)})
    return sorted(records, key=lambda r: (r["box"][1], r["box"][0]))


def label(mask: Tensor) -> Tensor:
    """[H,W] int64: 1, 2, ... on each area of set pixels that touch, corners too; 0 elsewhere."""
    labels = np.zeros(mask.shape, np.int64)
    for row, start, end, name in zip(*_runs(mask.numpy()), strict=True):
        labels[row, start:end] = name + 1
    return torch.from_numpy(labels)


def _runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(row, first column, column after the last, area) of the runs of set pixels of [H,W] bool, row by row; areas are
    those of pixels that touch, corners too, numbered from 0 on as they are met."""
    height, wide = mask.shape[0], mask.shape[1] + 2  # a column of nothing on each side parts the rows
    flat = np.pad(mask, [(0, 0), (1, 1)]).ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    row, start, end = edges[::2] // wide, edges[::2] % wide - 1, edges[1::2] % wide - 1
    root = list(range(len(row)))

    def find(k: int) -> int:
        while root[k] != k:
            root[k] = root[root[k]]
            k = root[k]
        return k

    first, left, right = np.searchsorted(row, np.arange(height + 1)).tolist(), start.tolist(), end.tolist()
    for y in range(1, height):
        above, here = first[y - 1], first[y]
        while above < first[y] and here < first[y + 1]:
            if left[above] <= right[here] and left[here] <= right[above]:
                root[find(here)] = find(above)
            if right[above] < right[here]:
                above += 1
            else:
                here += 1
    roots = [find(k) for k in range(len(row))]
    names = {r: k for k, r in enumerate(dict.fromkeys(roots))}
    return row, start, end, np.array([names[r] for r in roots], np.int64)


def draw(picture: np.ndarray, records: list[Record]) -> np.ndarray:
    """The picture with the outline of each box, 2 pixels wide, and its label, where it has one and Pillow is there."""
    picture = picture.copy()
    height, width = picture.shape[:2]
    for record in records:
        x0, y0, x1, y1 = (round(v) for v in record["box"])
        x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
        picture[y0 : y0 + 2, x0:x1] = picture[max(y1 - 2, 0) : y1, x0:x1] = COLOUR
        picture[y0:y1, x0 : x0 + 2] = picture[y0:y1, max(x1 - 2, 0) : x1] = COLOUR
    labelled = [record for record in records if "label" in record]
    return _labelled(picture, labelled) if labelled else picture


def _labelled(picture: np.ndarray, records: list[Record]) -> np.ndarray:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return picture
    image = Image.fromarray(picture)
    pen = ImageDraw.Draw(image)
    for record in records:
        x, y = record["box"][:2]
        text = f"{record['label']} {record['score']:.2f}"
        left, top, right, bottom = pen.textbbox((x + 2, max(y - 12, 0)), text)
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), fill=tuple(COLOUR.tolist()))
        pen.text((x + 2, max(y - 12, 0)), text, fill=(255, 255, 255))
    return np.array(image)
