"""Films of tests."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sbnet.apps import writers
from sbnet.apps.pipeline import Network, Pipeline, Summary, open_source


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


def run(source: Any, sink: Any, mask: Any = "all", **options: Any) -> Summary:
    """A pipeline of a network that gives what it is given."""
    net = nn.Conv2d(3, 3, 1, bias=False).eval()
    net.weight.data = torch.eye(3)[:, :, None, None].clone()
    options = {"mode": "masked", "device": "cpu", "compare": 0} | options
    return Pipeline(source, mask, Network(net, "identity"), sink, **options).run()


def times_of(path: Path) -> list[float]:
    """Seconds of the frames of a film."""
    import av

    with av.open(str(path)) as found:
        return [round(float(frame.pts * frame.time_base), 6) for frame in found.decode(video=0)]
