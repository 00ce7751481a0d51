"""Boxes out of heat maps, and onto pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbnet.ops.frames.components import SCORE_BITS, connected_components

COLOUR = np.array([255, 60, 60], np.uint8)
AREA = 16  # pixels of a line of text at least
CELL = 4  # pixels of the frame a pixel of CenterFace's maps
UNCLIP = 1.6  # PaddleOCR: the detector marks the middle of a line; its box is widened by this
MOST = 4096  # candidates of a frame that come to the host
CAPACITY = 512  # of them, those whose overlaps a GPU settles
ROUNDS = 8  # in which it does
CLOSE = 1e-4  # share of an overlap by which devices might differ
FACES = 0.3  # overlap from which on the worse of two faces goes
Record = dict[str, Any]


def best_scores(scores: Tensor, most: int = MOST) -> tuple[Tensor, Tensor]:
    """The `most` best scores of a vector and where they stand, best first and of equal ones the first, on
    every device; which of equal ones are the last that there is place for, is not said."""
    at = scores.topk(min(most, len(scores)), sorted=False).indices.sort().values
    score, order = scores[at].sort(descending=True, stable=True)
    return score, at[order]


def uncovered(boxes: Tensor, valid: Tensor, overlap: float) -> tuple[Tensor, Tensor]:
    """What `best_of` keeps of the first CAPACITY boxes, by arithmetic on tensors of fixed size alone, as CUDA graphs
    need it.

    A box stays unless a better one that stays covers it. That is asked of all boxes at once, ROUNDS times: each round
    settles at least those that hang on one box more than the round before.

    Args:
        boxes: [n,4] corners, best first. valid: [n] bool, which of them count.
        overlap: as of `best_of`.

    Returns:
        [min(n, CAPACITY)] bool, the boxes that stay; a bool, whether this is certain: the last round changed nothing,
        there are no more boxes, and no overlap is so close to the limit that another device might decide otherwise.
    """
    more = valid[CAPACITY:].any()
    boxes, valid = boxes[:CAPACITY], valid[:CAPACITY]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    low, high = torch.maximum(boxes[:, None, :2], boxes[:, :2]), torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    either = areas[:, None] + areas - shared
    pairs = (valid[:, None] & valid).triu(1)
    close = ((shared - overlap * either).abs() <= CLOSE * either.abs()) & pairs
    covers = (~(shared < overlap * either) & pairs).to(boxes.dtype)
    all_of = valid.to(boxes.dtype)
    before = kept = all_of
    for _ in range(ROUNDS):
        before, kept = kept, all_of * (kept @ covers == 0)
    return kept > 0, (kept == before).all() & ~close.any() & ~more


def stay(
    counts: np.ndarray, boxes: Callable[[slice], Tensor], scores: np.ndarray, overlap: float, kept: Tensor | None,
    certain: Tensor | None,
) -> np.ndarray:  # fmt: skip
    """[candidates that count] bool: `best_of` those of each of N images, which lie one behind the other, best first, or
    what `uncovered` found, where that is certain. All on the host.

    Args:
        counts: [N,n] bool, which candidates count. boxes: the corners of some of those. scores: of all of them.
        kept, certain: [N,c] and [N], of `uncovered`; None: nothing is.
    """
    found = np.zeros(counts.shape, bool)
    if kept is not None:
        found[:, : kept.shape[1]] = kept.numpy()
    chosen = found[counts]
    sure = np.zeros(len(counts), bool) if certain is None else certain.numpy()
    ends = np.count_nonzero(counts, 1).cumsum()
    for k in np.flatnonzero(~sure).tolist():
        own = slice(ends[k - 1] if k else 0, ends[k])
        chosen[own] = False
        chosen[own.start + np.array(best_of(boxes(own), torch.from_numpy(scores[own]), overlap), int)] = True
    return chosen


def staying(valid: Tensor, kept: Tensor | None, certain: Tensor | None) -> Tensor:
    """[n] bool on the device: which candidates stay, all that are valid where that is left to the host."""
    if kept is None or certain is None:
        return valid
    return torch.cat([valid[: len(kept)] & (kept | ~certain), valid[len(kept) :]])


def within(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Corners [n,4], cut to a frame of (height, width)."""
    return torch.stack([v.clamp(0, end) for v, end in zip(boxes.unbind(1), size[::-1] * 2, strict=True)], 1)


def of_images(entries: list[Any], image: np.ndarray, count: int) -> list[list[Any]]:
    """Entries by their image; `image` tells it of each, in order."""
    ends = np.searchsorted(image, np.arange(count + 1)).tolist()
    return [entries[a:b] for a, b in itertools.pairwise(ends)]


def boxes_of_faces(
    heat: Tensor, scale: Tensor, offset: Tensor, size: tuple[int, ...], least: float, overlap: float = FACES
) -> list[Record]:
    """{"box": [x0, y0, x1, y1], "score"} of each face, best first, by CenterFace's decoding.

    Args:
        heat, scale, offset: [1,1,h,w], [1,2,h,w] (logarithms of height and width), [1,2,h,w] (y and x).
        size: (height, width) of the frame, to which boxes are cut.
        overlap: intersection over union from which on the worse of two boxes goes.
    """
    found = face_candidates(heat, scale, offset, least, overlap)
    return faces_among([None if v is None else v.cpu()[None] for v in found], [size], least, overlap)[0]


def face_candidates(
    heat: Tensor, scale: Tensor, offset: Tensor, least: float, overlap: float = FACES
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `faces_among` reads of CenterFace's maps, on their device: of the best cells [9,n] score, row, column, scale
    and offset there, height and width of the maps, and on a GPU what `uncovered` gives."""
    high, wide = heat.shape[2:]
    score, at = best_scores(heat[0, 0].float().flatten())
    numbers = [v[0].float().flatten(1)[:, at] for v in (scale, offset)]
    sides = [torch.full_like(score, n) for n in (high, wide)]
    rows = torch.stack([score, at // wide, at % wide, *numbers[0], *numbers[1], *sides])
    if not heat.is_cuda:
        return rows, None, None
    return rows, *uncovered(_face_boxes(rows), score > least, overlap)


def _face_boxes(rows: Tensor) -> Tensor:
    """[n,4] corners of candidates, cut to what the network was given."""
    _, row, column, high, wide, down, right, rows_in_all, columns = rows
    high, wide = high.clamp(max=8).exp() * CELL, wide.clamp(max=8).exp() * CELL
    y, x = (row + down + 0.5) * CELL - high / 2, (column + right + 0.5) * CELL - wide / 2
    below, after = rows_in_all * CELL, columns * CELL
    corners = [v.clamp(min=0) for v in (x, y, x + wide, y + high)]
    return torch.stack([torch.minimum(v, end) for v, end in zip(corners, (after, below) * 2, strict=True)], 1)


def faces_among(
    found: Any, sizes: Sequence[tuple[int, ...]], least: float, overlap: float = FACES
) -> list[list[Record]]:
    """The records of `boxes_of_faces` of frames of these sizes, of what `face_candidates` found in each, stacked and on
    the host."""
    every, kept, certain = found
    every = every.numpy()  # of small tensors NumPy is several times as fast
    counts = every[:, 0] > least
    image, at = np.nonzero(counts)
    rows = every[image, :, at].T
    boxes, scores = _corners_of_faces(rows), rows[0]
    chosen = stay(counts, lambda own: torch.from_numpy(boxes[own]), scores, overlap, kept, certain)
    image = image[chosen]
    ends = np.array([(width, height, width, height) for height, width, *_ in sizes], np.float32)
    shown = np.minimum(boxes[chosen], ends[image])
    records = [
        {"box": box, "score": score}
        for box, score in zip(
            shown.astype(float).round(1).tolist(), scores[chosen].astype(float).round(4).tolist(), strict=True
        )
    ]
    return of_images(records, image, len(sizes))


def located_faces(found: Any, size: tuple[int, int], least: float) -> tuple[Tensor, Tensor]:
    """`Network.located` of what `face_candidates` found."""
    rows, kept, certain = found
    return within(_face_boxes(rows), size), staying(rows[0] > least, kept, certain)


def _corners_of_faces(rows: np.ndarray) -> np.ndarray:
    """`_face_boxes` on the host."""
    _, row, column, high, wide, down, right, rows_in_all, columns = rows
    high, wide = np.exp(np.minimum(high, 8)) * CELL, np.exp(np.minimum(wide, 8)) * CELL
    y, x = (row + down + np.float32(0.5)) * CELL - high / 2, (column + right + np.float32(0.5)) * CELL - wide / 2
    corners = np.stack([x, y, x + wide, y + high], 1)
    return np.minimum(np.maximum(corners, 0), CELL * np.stack([columns, rows_in_all] * 2, 1))


def best_of(boxes: Tensor, scores: Tensor, overlap: float) -> list[int]:
    """Indices of boxes that no better one covers, best first."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left, kept = scores.argsort(descending=True, stable=True), []
    while len(left):
        first, rest = int(left[0]), left[1:]
        kept.append(first)
        low = torch.maximum(boxes[first, :2], boxes[rest, :2])
        high = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        left = rest[shared < overlap * (areas[first] + areas[rest] - shared)]
    return kept


def boxes_of_text(scores: Tensor, size: tuple[int, ...], least: float, area: int = AREA) -> list[Record]:
    """{"box", "score"} of each connected area of scores [1,1,H,W], 0 to 1, above `least`, widened as PaddleOCR does;
    from the top of the page down. Areas of fewer than `area` pixels are dropped."""
    found = text_areas(scores, size, least, area)
    return lines_among([v.cpu()[None] for v in found], [size])[0]


def text_areas(scores: Tensor, size: tuple[int, ...], least: float, area: int = AREA) -> tuple[Tensor, ...]:
    """What `lines_among` reads of scores [1,1,H,W], on their device: of MOST areas the corners, pixels and sums of
    scores, and how many areas there are."""
    found = connected_components(scores[:, 0, : size[0], : size[1]], least, area, MOST)
    return tuple(v[0] for v in found)


def lines_among(found: Any, sizes: Sequence[tuple[int, ...]]) -> list[list[Record]]:
    """The records of `boxes_of_text` of frames of these sizes, of what `text_areas` found in each, stacked and on the
    host."""
    boxes, pixels, sums, count = (v.numpy() for v in found)
    records = []
    for k, (high, wide, *_) in enumerate(sizes):
        own = slice(0, min(int(count[k]), MOST))
        corners = _widened(boxes[k, own].astype(float)).clip(0, [wide, high] * 2)
        shares = sums[k, own] / 2.0**SCORE_BITS / pixels[k, own]
        lines: list[Record] = [
            {"box": [round(v, 1) for v in box], "score": round(score, 4)}
            for box, score in zip(corners.tolist(), shares.tolist(), strict=True)
        ]
        records.append(sorted(lines, key=lambda r: (r["box"][1], r["box"][0])))
    return records


def located_lines(found: Any, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`Network.located` of what `text_areas` found."""
    boxes, pixels, *_ = found
    return within(_widened(boxes.double()), size), pixels > 0


def _widened(boxes: Any) -> Any:
    """Corners [n,4], float64, by UNCLIP further apart."""
    low, high = boxes[:, :2], boxes[:, 2:]
    sides = high - low
    wider = (sides[:, 0] * sides[:, 1] * UNCLIP / (2 * (sides[:, 0] + sides[:, 1])))[:, None]
    return (np.concatenate if isinstance(boxes, np.ndarray) else torch.cat)([low - wider, high + wider], 1)


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


def drawing(frame: Any, records: list[Record]) -> Callable[[], np.ndarray]:
    """What draws records on a frame's picture."""
    return lambda: draw(frame.picture(), records)


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
