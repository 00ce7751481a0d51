"""Masks by name, for command lines: "motion:12 & zones.json | ~static.png + 16"."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbnet.masks.base import Mask, as_mask
from sbnet.masks.codec import Codec
from sbnet.masks.files import Recorded
from sbnet.masks.motion import Changed, MotionMask, Refresh
from sbnet.masks.pixels import Alpha, Ink, Nodata, Occupied, Tissue, everything
from sbnet.masks.shapes import Polygons, Tracks


def _motion(level: str = "20") -> Mask:
    return MotionMask(threshold=float(level) / 255)


def _changed(level: str = "0") -> Mask:
    threshold, _, smooth = level.partition(":")
    return Changed(float(threshold) / 255, int(smooth or 1))


NAMES: dict[str, Callable[..., Mask]] = {
    "all": everything,
    "motion": _motion,
    "changed": _changed,
    "refresh": lambda frames="50": Refresh(int(frames)),
    "codec": lambda least="0.25": Codec(float(least)),
    "tracks": lambda refresh="30": Tracks(refresh=int(refresh)),
    "alpha": Alpha,
    "nodata": lambda value="0": Nodata(float(value)),
    "tissue": lambda scale="8": Tissue(int(scale)),
    "ink": lambda threshold="0.15": Ink(float(threshold)),
    "occupied": Occupied,
}


def open_mask(given: Any) -> Mask:
    """A Mask, a function of frames, a tensor [H,W], or what names one.

    A name is one of NAMES, with a number after a colon ("motion:12": levels of 255; "changed:12:5": means over boxes of
    5x5), a .json of polygons, boxes or COCO annotations, a picture or a film of masks. `~` before it takes the rest of
    the frame, `+ 16` after it grows it by pixels, `* 5` holds it for frames; `&` binds closer than `|`, parentheses
    closer than both.

    >>> mask = open_mask("(motion | tracks) & zones.json | ~static.png + 16")
    """
    if not isinstance(given, (str, Path)):
        return as_mask(given)
    mask: Mask | None = None
    for term in _split(str(given), "|"):
        joined: Mask | None = None
        for factor in _split(term, "&"):
            one = _one(factor.strip())
            joined = one if joined is None else joined & one
        assert joined is not None
        mask = joined if mask is None else mask | joined
    assert mask is not None
    return mask


def _split(text: str, at: str) -> list[str]:
    """The parts of a text between these characters, outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _one(text: str) -> Mask:
    after = re.fullmatch(r"(.*?)\s*([+*])\s*(\d+)", text)
    if after and not Path(text).exists():
        inner = _one(after[1])
        return inner.dilate(int(after[3])) if after[2] == "+" else inner.hold(int(after[3]))
    if text.startswith("(") and text.endswith(")"):
        return open_mask(text[1:-1])
    if text.startswith("~"):
        return ~_one(text[1:].strip())
    name, _, rest = text.partition(":")
    if name in NAMES:
        try:
            return NAMES[name](*([rest] if rest else []))
        except (ValueError, TypeError) as error:
            raise ValueError(f"sbnet: mask: {text}: {str(error).removeprefix('sbnet: ')}") from None
    path = Path(text)
    if path.suffix.lower() == ".json":
        if not path.is_file():
            raise ValueError(f"sbnet: mask: {text}: no such file")
        return Polygons(path)
    if text and (path.exists() or any(c in text for c in "*?[")):
        try:
            return Recorded(text)
        except Exception as error:
            raise ValueError(f"sbnet: mask: {text}: {error}") from None
    raise ValueError(f"sbnet: mask: expected one of {', '.join(NAMES)}, a .json, a picture or a film, got {text!r}")
