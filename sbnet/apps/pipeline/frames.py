"""What goes through a pipeline: frames in, results out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


class PipelineError(Exception):
    """Something that the person who ordered a pipeline can put right; the message is one line."""


@dataclass
class Frame:
    """One picture of a source.

    Attributes:
        index: its place in the source, broken frames counted.
        pixels: [H,W,C], uint8 (0 to 255) or float (0 to 1, or what the network takes), or a tensor [C,H,W].
        name: a file's, or the number.
        time: seconds from the start, where the source knows.
        fault: why it could not be read; pixels are then missing.
    """

    index: int
    pixels: Any
    name: str = ""
    time: float | None = None
    fault: str = ""

    def tensor(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[1,C,H,W] channels_last; bytes become 0 to 1, and of four channels of bytes three are colours."""
        if isinstance(self.pixels, Tensor):
            return self.pixels[None].to(device, dtype, non_blocking=True).contiguous(memory_format=torch.channels_last)
        pixels = self.pixels if self.pixels.ndim == 3 else self.pixels[..., None]
        if pixels.dtype != np.uint8:
            given = torch.from_numpy(np.ascontiguousarray(pixels))
            return given.to(device, dtype)[None].permute(0, 3, 1, 2)
        given = torch.from_numpy(np.ascontiguousarray(pixels[..., :3]))
        if device.type == "cuda":
            given = given.pin_memory().to(device, non_blocking=True)
        return given[None].permute(0, 3, 1, 2).to(dtype).div_(255)

    def picture(self) -> np.ndarray:
        """[H,W,3] uint8, to look at."""
        if isinstance(self.pixels, Tensor):
            pixels = self.pixels.movedim(0, 2).float().cpu().numpy()
        else:
            pixels = self.pixels if self.pixels.ndim == 3 else self.pixels[..., None]
        if pixels.dtype != np.uint8:
            pixels = (255 * np.clip(pixels.astype(np.float32), 0, 1)).astype(np.uint8)
        if pixels.shape[2] not in (3, 4):
            pixels = pixels.max(2, keepdims=True).repeat(3, 2)
        return np.ascontiguousarray(pixels[..., :3])


@dataclass
class Result:
    """What a network made of one frame.

    Attributes:
        output: what the network returned; the pipeline's next frame overwrites it, so only `finish` reads it.
        picture: [H,W,3] uint8, on the host when sinks see it; None of a network that makes none.
        records: JSON-like dicts, such as boxes.
        active: [rows,columns] bool, the active blocks of the finest plane. block: their (height, width) in pixels.
        density: the share of them.
        ms: from the frame on the device to the result on it, mask included.
        landed: events of the device around it, until somebody has waited for them.
    """

    frame: Frame
    output: Any = None
    picture: Any = None
    records: list[dict[str, Any]] = field(default_factory=list)
    active: Any = None
    block: tuple[int, int] = (1, 1)
    density: float = 0.0
    ms: float = 0.0
    landed: Any = None

    def land(self) -> None:
        """Waits for the device, and brings everything to the host."""
        if self.landed is not None:
            begin, end = self.landed
            end.synchronize()
            self.ms, self.landed = begin.elapsed_time(end), None
        if isinstance(self.picture, Tensor):
            self.picture = self.picture.cpu().numpy()
        if isinstance(self.active, Tensor):
            self.active = self.active.cpu().numpy()
            self.density = float(np.mean(self.active))
        self.output = None
