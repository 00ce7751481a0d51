"""Films of tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sbnet.apps.pipeline import open_source


def pictures(path: Path, size: tuple[int, int] | None = None) -> list[np.ndarray]:
    """The frames of a film that can be read."""
    return [frame.pixels for frame in open_source(path, size) if not frame.fault]
