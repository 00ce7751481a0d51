"""What a mask is: a callable on frames, and masks made of masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.masks.grow import grow


class Mask:
    """`mask(x)` tells for a frame x [N,C,H,W] which pixels matter, [N,H,W] bool, on x's device.

    Masks compose: `a | b`, `a & b`, `~a`, `a.dilate(pixels)`, `a.hold(frames)`. Some remember earlier frames; `reset()`
    makes them forget. A pipeline tells masks what x does not hold: `see(frame)` before the call, `learn(records)` with
    what the network found in the frame before.

    >>> mask = (sbnet.masks.MotionMask() & sbnet.masks.Polygons("zones.json")).dilate(16).hold(5)
    """

    parts: Sequence[Mask] = ()

    @property
    def captured(self) -> bool:
        """May a CUDA graph hold the call? Only if it reads nothing but x and device memory that stays where it is."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def reads_vectors(self) -> bool:
        """Does it read the motion vectors of a film's codec (`Frame.motion`)?"""
        return any(part.reads_vectors for part in self.parts)

    @property
    def reads_boxes(self) -> bool:
        """Does it read what was found in the frame before (`learn`, `follow`)?"""
        return any(part.reads_boxes for part in self.parts)

    @property
    def surveys(self) -> bool:
        """Does it take anything from a whole picture (`survey`)?"""
        return any(part.surveys for part in self.parts)

    def survey(self, tiles: Iterable[Tensor]) -> None:
        """A picture that is larger than memory, before the calls on its tiles: all of it, as tiles [1,C,h,w] that do
        not overlap. What belongs to a whole picture, such as a threshold, is then that of all, until `reset`."""
        those = [part for part in self.parts if part.surveys]
        for part, copy in zip(those, itertools.tee(tiles, max(1, len(those))), strict=False):
            part.survey(copy)

    @property
    def files(self) -> Sequence[Any]:
        """The files that it reads."""
        return [file for part in self.parts for file in part.files]

    def reset(self) -> None:
        """Forget earlier frames."""
        for part in self.parts:
            part.reset()

    def see(self, frame: Any) -> None:
        """The frame of a pipeline that the next call is of (its index, name, pixels)."""
        for part in self.parts:
            part.see(frame)

    def learn(self, records: Sequence[dict[str, Any]]) -> None:
        """What was found in the frame of the last call: dicts, a box under "box": x0, y0, x1, y1 in pixels."""
        for part in self.parts:
            part.learn(records)

    def expect_boxes(self, told: bool) -> None:
        """Will `follow` take the place of `learn`? A CUDA graph may hold the calls then."""
        for part in self.parts:
            part.expect_boxes(told)

    def follow(self, boxes: Tensor, counts: Tensor) -> None:
        """What was found in the frame of the last call, on its device: boxes [K,4], as of `learn`, and which of them
        count, [K] bool, the best first."""
        for part in self.parts:
            part.follow(boxes, counts)

    def expect(self, told: bool) -> None:
        """Will `computed` follow each call? Then what it says was computed counts, not what the mask itself found."""
        for part in self.parts:
            part.expect(told)

    def computed(self, x: Tensor, where: Tensor) -> None:
        """What kept results are made of: of the frames x of the last call these pixels, [N,1,H,W] bool, which margins,
        whole blocks and other masks add to."""
        for part in self.parts:
            part.computed(x, where)

    def __or__(self, other: Any) -> Mask:
        return Composed((self, as_mask(other)), torch.logical_or)

    def __and__(self, other: Any) -> Mask:
        return Composed((self, as_mask(other)), torch.logical_and)

    def __ror__(self, other: Any) -> Mask:
        return as_mask(other) | self

    def __rand__(self, other: Any) -> Mask:
        return as_mask(other) & self

    def __invert__(self) -> Mask:
        return Composed((self,), torch.logical_not)

    def dilate(self, pixels: int) -> Mask:
        """Grown by so many rows and columns on each side."""
        if pixels < 0:
            raise ValueError(f"sbnet: Mask.dilate: pixels: expected at least 0, got {pixels}")
        return Composed((self,), lambda found: grow(found, pixels))

    def hold(self, frames: int) -> Mask:
        """What was set in one of the last `frames` frames stays set."""
        return Hold(self, frames)


class Composed(Mask):
    """An op on the pixels of other masks."""

    @property
    def captured(self) -> bool:
        return all(part.captured for part in self.parts)

    def __init__(self, parts: Sequence[Mask], op: Callable[..., Tensor]) -> None:
        self.parts, self._op = tuple(parts), op

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(*(part(x) for part in self.parts))


class Hold(Mask):
    """What `part` set in one of the last `frames` frames."""

    @property
    def captured(self) -> bool:
        return self.parts[0].captured

    def __init__(self, part: Mask, frames: int) -> None:
        if frames < 1:
            raise ValueError(f"sbnet: Mask.hold: frames: expected at least 1, got {frames}")
        self.parts, self.frames = (part,), frames
        self._left: Tensor | None = None  # [N,H,W] int32: for how many frames more

    def __call__(self, x: Tensor) -> Tensor:
        now = self.parts[0](x)
        if self._left is None or self._left.shape != now.shape or self._left.device != now.device:
            self._left = torch.zeros(now.shape, dtype=torch.int32, device=now.device)
        self._left.sub_(1).clamp_(min=0).masked_fill_(now, self.frames)
        return self._left > 0

    def reset(self) -> None:
        super().reset()
        if self._left is not None:
            self._left.zero_()


class Function(Mask):
    """Any function of x that returns [N,H,W] or [N,1,H,W], of any dtype: floats count from 0.5 on."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, x: Tensor) -> Tensor:
        found = self._function(x)
        if not isinstance(found, Tensor) or found.dim() not in (3, 4) or found.shape[-2:] != x.shape[-2:]:
            came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"sbnet: mask: expected [{x.shape[0]},{x.shape[2]},{x.shape[3]}], got {came}")
        found = found.amax(1) if found.dim() == 4 else found
        return found > 0.5 if found.is_floating_point() else found != 0

    def reset(self) -> None:
        forget = getattr(self._function, "reset", None)
        if forget is not None:
            forget()


class Still(Mask):
    """The same pixels in every frame. Of another size than the frames, it is scaled to theirs.

    Args:
        pixels: [H,W] or [1,H,W] of any dtype: set where not 0, or greater than 0.5 in floats.
    """

    def __init__(self, pixels: Tensor) -> None:
        pixels = pixels if pixels.dim() == 3 else pixels[None]
        if pixels.dim() != 3 or pixels.shape[0] != 1:
            raise ValueError(f"sbnet: Still: pixels: expected [H,W], got {tuple(pixels.shape)}")
        self._pixels = pixels > 0.5 if pixels.is_floating_point() else pixels != 0

    def __call__(self, x: Tensor) -> Tensor:
        self._pixels = self._pixels.to(x.device)
        return resized(self._pixels, (x.shape[2], x.shape[3])).expand(x.shape[0], -1, -1)


def resized(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """[N,h,w] bool at another size: a pixel is set where one that it covers, or lies in, is."""
    if tuple(mask.shape[1:]) == size:
        return mask
    return torch.nn.functional.adaptive_max_pool2d(mask[:, None].float(), size)[:, 0] > 0


def as_mask(given: Any) -> Mask:
    """A mask of a Mask, a tensor [H,W], or a function of frames."""
    if isinstance(given, Mask):
        return given
    if isinstance(given, Tensor):
        return Still(given)
    if callable(given):
        return Function(given)
    raise TypeError(f"sbnet: mask: expected a Mask, a tensor [H,W] or a function, got {type(given).__name__}")
