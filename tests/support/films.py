"""Films of tests."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np

from sbnet.apps import writers
from sbnet.apps.pipeline import open_source


def walking_square(path: Path, frames: int, floor: int = 40, step: int = 4) -> Path:
    """A film of 32x48 in which a bright square walks over a floor of one brightness."""
    with writers.VideoWriter(path, Fraction(10)) as writer:
        for k in range(frames):
            picture = np.full((32, 48, 3), floor, np.uint8)
            picture[8:16, step * k % 40 : step * k % 40 + 8] = 230
            writer.write(picture)
    return path


def pictures(path: Path, size: tuple[int, int] | None = None) -> list[np.ndarray]:
    """The frames of a film that can be read."""
    return [frame.pixels for frame in open_source(path, size) if not frame.fault]
