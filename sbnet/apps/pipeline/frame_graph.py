"""On CUDA, all that the device does to a frame as one graph: one upload, one replay, one download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.apps.pipeline.frames import Frame, PipelineError, input_of
from sbnet.apps.pipeline.networks import Network, shown_of
from sbnet.apps.surface import Look, rgb_of, unit_of
from sbnet.engine.capture import cuda_graph
from sbnet.masks.base import Mask

OF_NUMPY = {
    torch.uint8: np.uint8, torch.bool: np.bool_, torch.int32: np.int32, torch.int64: np.int64,
    torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64,
}  # fmt: skip

# x [1,C,H,W], x widened -> what the network returned, active blocks, mask, what is added to the picture
Body = Callable[[Tensor, Tensor], tuple[Any, Tensor | None, Tensor | None, Tensor | None]]


class FrameGraph:
    """Bytes of a frame in, or the planes of a surface, out what the host reads of it: bytes of its picture, or what the
    network's `landing` gives, and its active blocks. Conversion, mask, lists, network and what makes a
    picture of its output are one graph.

    `upload(pixels)`, `replay()`, `download()`, in this order; none of them waits. The next replay overwrites what one
    wrote; the stream keeps it behind the download.

    Args:
        network: whose `captured` or `landing` is set, or which has neither `prepare` nor `finish`.
        body: of x, [1,C,H,W] on the device, 0 to 1, and of x as `Network.widened` gives it. Setting up calls it on
            zeros: the caller undoes what that did to memory of its own (backgrounds, kept feature maps).
        frame: one of the source's; the others are of its shape and type.
        eager: is the next call to run outside the graph? (The first frame of a cached network computes all pixels.)
        mask: is told the boxes that the network located, if it reads them.

    Attributes:
        lands: the host has yet to make a picture or records of what comes there.

    Raises:
        PipelineError: `finish` made no picture.
    """

    def __init__(
        self, network: Network, body: Body, frame: Frame, device: torch.device, dtype: torch.dtype,
        eager: Callable[[], bool] = lambda: False, mask: Mask | None = None,
    ) -> None:  # fmt: skip
        self.network, self.body, self.frame, self.dtype, self._eager = network, body, frame, dtype, eager
        self._mask = mask if mask is not None and mask.reads_boxes else None
        self.pixels = torch.zeros_like(frame.given(), device=device)
        self.look = None if frame.surface is None else frame.surface.look
        self.kind = kind_of(frame)
        self.lands = False
        self._packing, self._homeward = Packing([]), Homeward()
        self._tree: Any = None  # of what comes to the host
        self._graph, self._made = cuda_graph(self._run, device)
        self._last = self._made
        self._homeward.set_up(self._made[0])

    def _run(self) -> tuple[Tensor, Tensor, Any, Tensor | None, Tensor | None]:
        x, wide = seen(self.pixels, self.look, self.dtype, self.network)
        output, active, mask, drift = self.body(x, wide)
        shown, self.lands = landing_of(self.network, output, self.frame, drift)
        if self._mask is not None and self.network.located is not None:
            self._mask.follow(*self.network.located(shown, self.frame.size))
        parts, self._tree = pytree.tree_flatten((shown, active))
        self._packing = Packing(parts)
        return self._packing.packed(parts), x, output, mask, drift

    def upload(self, pixels: Tensor) -> None:
        """pixels: of Frame.given, in pinned memory or on the device, where the current stream may read them."""
        self.pixels.copy_(pixels, non_blocking=True)

    def replay(self) -> tuple[Tensor, Any, Tensor | None, Tensor | None]:
        """(x, what the network returned, mask, what was added to its picture), on the device until the next replay."""
        if self._eager():
            self._last = self._run()
        else:
            self._graph.replay()
            self._last = self._made
        return self._last[1:]

    def download(self) -> tuple[Any, Tensor | None, Any]:
        """Picture [H,W,3] uint8, or what the network is to `finish`, and, where the body gives them, active blocks, in
        pinned memory, after the event, if there is one."""
        host, here = self._homeward(self._last[0])
        shown, active = pytree.tree_unflatten(self._packing.unpacked(host), self._tree)
        return shown, active, here


def seen(given: Tensor, look: Look | None, dtype: torch.dtype, network: Network) -> tuple[Tensor, Tensor]:
    """[N,C,H,W] channels_last, 0 to 1, of what `Frame.given` gives of one frame or several of one kind, and the same
    widened for the network; of planes of surfaces (`look`) in one pass."""
    planes = given if given.dim() != 2 else given[None]
    if look is not None and look.size is None and not network.pad:
        height, width = look.shape_of(planes[0])
        wide = unit_of(planes, look, dtype, network.beyond((height, width)))
        return wide[:, :, :height, :width], wide
    if look is None:
        x = input_of(given, dtype)
    else:
        x = unit_of(planes, look, dtype) if look.size is None else input_of(rgb_of(planes, look), dtype)
    return x, network.widened(x)


def landing_of(network: Network, output: Any, frame: Frame, drift: Tensor | None) -> tuple[Any, bool]:
    """What comes to the host of an output, and whether a picture or records are still to be made of it there.

    Raises:
        PipelineError: `finish` made no picture.
    """
    if network.landing is not None:
        return network.landing(output, frame.size), True
    found = shown_of(output) if network.finish is None else None
    if found is not None and found.dim() == 2:
        return found, True  # of which `picture_of` makes a record
    picture, records = network.finished(output, frame, drift)
    if not isinstance(picture, Tensor) or records:
        raise PipelineError(f"network {network.name}: captured: expected a picture and no records of finish")
    return picture, False


def kind_of(frame: Frame, given: Tensor | None = None) -> Any:
    """What is the same of frames that one graph serves. given: `Frame.given`, where it is at hand."""
    given, surface = frame.given() if given is None else given, frame.surface
    return given.shape, given.dtype, None if surface is None else surface.look


class Homeward:
    """`homeward(packed)`: a copy in pinned memory, and the event after which it is there (None: it is). The copy to the
    host has a stream of its own, so that the next replay goes on meanwhile: it reads one of two copies on the device. A
    call waits until the one before the last is on the host: what is under way there does not grow.
    """

    TURNS = 2

    def __init__(self) -> None:
        self._stream: Any = None
        self._held: list[Tensor | None] = [None] * self.TURNS
        self._here: list[Any] = [None] * self.TURNS
        self._turn = 0

    def set_up(self, packed: Tensor) -> None:
        """Takes pinned memory for what is under way, which the allocator keeps: to take it can last longer than a call
        that it would delay."""
        if packed.is_cuda:
            _ = [_pinned(packed) for _ in range(self.TURNS + 2)]  # two that sinks see

    def __call__(self, packed: Tensor) -> tuple[Tensor, Any]:
        if not packed.is_cuda:
            return packed.clone(), None
        current = torch.cuda.current_stream(packed.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(packed.device)
        self._turn = turn = (self._turn + 1) % self.TURNS
        held, before = self._held[turn], self._here[turn]
        if held is None or held.shape != packed.shape:
            held = self._held[turn] = torch.empty_like(packed)
            held.record_stream(self._stream)
        if before is not None:
            before.synchronize()
        held.copy_(packed)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host = _pinned(packed).copy_(held, non_blocking=True)
            # Who waits for it leaves the processor to others.
            here = self._here[turn] = torch.cuda.Event(enable_timing=True, blocking=True)
            here.record(self._stream)
        return host, here


def _pinned(packed: Tensor) -> Tensor:
    return torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)


class Packing:
    """Tensors of any kind as one row of bytes, feature maps in the order in which they lie in memory."""

    def __init__(self, parts: Sequence[Any]) -> None:
        rows = [self._rows(part) for part in parts]
        self._kinds = [(row.shape, row.dtype) if isinstance(row, Tensor) else row for row in rows]
        # The widest first: each begins at a multiple of its own width.
        tensors = [k for k, row in enumerate(rows) if isinstance(row, Tensor)]
        self._order = sorted(tensors, key=lambda k: -rows[k].element_size())

    @staticmethod
    def _rows(part: Any) -> Any:
        return part.movedim(1, 3) if isinstance(part, Tensor) and part.dim() == 4 else part

    def packed(self, parts: Sequence[Any]) -> Tensor:
        return torch.cat([self._rows(parts[k]).contiguous().flatten().view(torch.uint8) for k in self._order])

    def unpacked(self, packed: Tensor) -> list[Any]:
        """The tensors that `packed`, on the host, holds; other things as they were."""
        found: list[Any] = list(self._kinds)
        at, whole = 0, packed.numpy()
        for k in self._order:
            size, dtype = self._kinds[k]
            end = at + size.numel() * dtype.itemsize
            if dtype in OF_NUMPY:  # each op of PyTorch gives Python's lock away, and waits to have it again
                rows = whole[at:end].view(OF_NUMPY[dtype]).reshape(size)
                found[k] = torch.from_numpy(np.moveaxis(rows, 3, 1) if rows.ndim == 4 else rows)
            else:
                lines = packed[at:end].view(dtype).view(size)
                found[k] = lines.movedim(3, 1) if lines.dim() == 4 else lines
            at = end
        return found
