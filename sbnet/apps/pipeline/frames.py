"""What goes through a pipeline: frames in, results out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbnet.apps.surface import Surface
from sbnet.masks.codec import Motion


class PipelineError(Exception):
    """Something that the person who ordered a pipeline can put right; the message is one line."""


@dataclass
class Frame:
    """One picture of a source.

    Attributes:
        index: its place in the source, broken frames counted.
        pixels: [H,W,C] of whole numbers, which become 0 to 1 (`unit`), or floats (0 to 1, or what the network takes), a
            tensor [C,H,W], a Surface of a decoder, or a function that makes one of these on a device.
        name: a file's, or the number.
        time: seconds from the start, where the source knows.
        fault: why it could not be read; pixels are then missing.
        occupied: [H,W] bool, the pixels that hold anything, where who made the frame knows.
        motion: motion vectors of its codec, where a mask reads them.
        path: the file that it was read from, where it is one of several.
    """

    index: int
    pixels: Any
    name: str = ""
    time: float | None = None
    fault: str = ""
    occupied: Tensor | None = None
    motion: Motion | None = None
    path: Path | None = None

    def place(self, device: torch.device) -> None:
        """Makes pixels that are still to be made."""
        if callable(self.pixels):
            self.pixels = self.pixels(device)

    @property
    def surface(self) -> Surface | None:
        """What a decoder made for a GPU, if one did."""
        return self.pixels if isinstance(self.pixels, Surface) else None

    def given(self) -> Tensor:
        """What goes to the device: the planes of a surface, which may not be there yet (`Surface.wait`), else `raw`."""
        return self.raw() if self.surface is None else self.surface.planes

    def raw(self) -> Tensor:
        """The pixels as they came, [H,W,C] of bytes or floats (`unit`), of four channels of bytes the three colours."""
        self.place(torch.device("cpu"))
        if self.surface is not None:
            shown = self.surface.shown
            return self.surface.rgb() if shown is None else torch.from_numpy(shown())
        if isinstance(self.pixels, Tensor):
            return self.pixels.movedim(0, 2)
        pixels = unit(self.pixels if self.pixels.ndim == 3 else self.pixels[..., None])
        return torch.from_numpy(np.ascontiguousarray(pixels[..., :3] if pixels.dtype == np.uint8 else pixels))

    def tensor(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[1,C,H,W] channels_last; bytes become 0 to 1, and of four channels of bytes three are colours."""
        given = self.raw() if self.surface is None else self.surface.rgb(device)
        if device.type == "cuda" and not given.is_cuda:
            given = given.pin_memory().to(device, non_blocking=True)
        return input_of(given.to(device), dtype)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)"""
        shape = self.raw().shape if self.surface is None else self.surface.shape
        return int(shape[0]), int(shape[1])

    def picture(self) -> np.ndarray:
        """[H,W,3] uint8, to look at."""
        own = self.raw().cpu()
        if own.shape[2] == 4:  # colours and opacity
            own = own[..., :3]
        elif own.shape[2] != 3:  # of many channels the brightest
            own = own.amax(2, keepdim=True).expand(-1, -1, 3)
        if own.dtype != torch.uint8:
            own = own.float().clamp(0, 1).mul(255).byte()
        return np.ascontiguousarray(own.numpy())


def mask_of(mask: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a mask finds in a frame.

    Raises:
        PipelineError: what it reads, or the frame, is not what it expects.
    """
    try:
        return mask(x)
    except (ValueError, TypeError) as error:
        raise PipelineError(f"mask: {str(error).removeprefix('sbnet: ')}") from error


def unit(pixels: np.ndarray, most: float | None = None) -> np.ndarray:
    """Numbers of a picture as networks take them. Bytes stay, and become 0 to 1 on the device; floats stay what they
    are. Other whole numbers become float32, 0 to 1, by what they hold: 16 bits without a sign are divided by 65535,
    the rest by the least of 255, 65535 and 2**32 - 1 that none of them exceeds; where some are below 0, they stay.

    Args:
        most: the largest of them, where `pixels` are a part of a picture; of one with numbers below 0, -1.

    Raises:
        PipelineError: they are no numbers of these kinds.
    """
    kind = pixels.dtype
    if kind == np.uint8 or kind == np.float32 or kind == np.float16:
        return pixels if kind.isnative else pixels.astype(kind.newbyteorder("="))
    if kind == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    if kind.kind == "f":
        return pixels.astype(np.float32)
    if kind.kind not in "iu":
        raise PipelineError(f"pixels: expected whole numbers, floats or bool, got {kind}")
    if kind == np.uint16:
        return np.divide(pixels, np.float32(65535), dtype=np.float32)
    if most is None:
        most = largest(pixels)
    if most < 0:
        return pixels.astype(np.float32)
    scale = next((n for n in (255, 65535) if most <= n), 2**32 - 1)
    return (pixels / scale).astype(np.float32)


def largest(pixels: np.ndarray) -> float:
    """What `unit` asks of a whole picture: its largest number, or -1 where one is below 0."""
    return -1 if pixels.size and pixels.min() < 0 else float(pixels.max(initial=0))


def input_of(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """[N,C,H,W] channels_last of [N,H,W,C], or of one [H,W,C], on any device; bytes become 0 to 1."""
    x = (pixels if pixels.dim() == 4 else pixels[None]).movedim(3, 1)
    # A scale of no dimensions has the quotient's dtype: one pass over the frame.
    x = x / torch.tensor(255, dtype=dtype) if pixels.dtype == torch.uint8 else x.to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


class Drawn:
    """A field that holds a picture, or a function that makes it when it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return None  # of the field, what it holds if nothing is said
        held = getattr(instance, self._name)
        if callable(held):
            held = held()
            setattr(instance, self._name, held)
        return held

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self._name, value)


@dataclass
class Result:
    """What a network made of one frame.

    Attributes:
        output: what the network returned; the pipeline's next frame overwrites it, so only `finish` reads it.
        picture: [H,W,3] uint8, on the host when sinks see it; None of a network that makes none. What `finish` draws is
            drawn when it is read.
        records: JSON-like dicts, such as boxes.
        active: [rows,columns] bool, the active blocks of the finest plane. block: their (height, width) in pixels.
        density: the share of them.
        ms: from the frame on the device to the result on it, mask included.
        finish: makes picture and records of what is on the host, once it is there.
        landed: what tells when it is on the host (`sbnet.apps.pipeline.clock.Landed`), until it was waited for.
        waited: seconds that this took.
    """

    frame: Frame
    output: Any = None
    picture: Any = Drawn()
    records: list[dict[str, Any]] = field(default_factory=list)
    active: Any = None
    block: tuple[int, int] = (1, 1)
    density: float = 0.0
    ms: float = 0.0
    finish: Callable[[], tuple[Any, list[dict[str, Any]]]] | None = None
    landed: Any = None
    waited: float = 0.0

    def land(self) -> None:
        """Waits for the device, and brings everything to the host."""
        if self.landed is not None:
            self.ms, self.waited = self.landed.wait()
            self.landed = None
        if self.finish is not None:
            (self.picture, self.records), self.finish = self.finish(), None
        held = vars(self)["_picture"]  # drawn later, where it is a function
        if isinstance(held, Tensor):
            self.picture = _numpy(held)
        if isinstance(self.active, Tensor):
            self.active = _numpy(self.active).astype(bool)
            self.density = float(np.mean(self.active))
        self.output = None


def _numpy(x: Tensor) -> np.ndarray:
    return (x.cpu() if x.is_cuda else x).numpy()
