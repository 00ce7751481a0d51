"""On CUDA, all that the device does to a frame of each camera as one graph: one replay, one download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.apps.pipeline.frame_graph import Homeward, Packing, kind_of, landing_of, seen
from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.networks import Network
from sbnet.engine.capture import cuda_graph
from sbnet.masks.base import Mask

# x [N,C,H,W], x widened -> what the network returned, active blocks of the cameras [N,...], mask, what is added to the
# pictures
Body = Callable[[Tensor, Tensor], tuple[Any, Tensor, Tensor, Tensor | None]]


class TickGraph:
    """`FrameGraph` for a batch of frames of one kind, one of each camera.

    Args:
        network: as of `FrameGraph`.
        body: of x, [N,C,H,W] on the device, 0 to 1, and of x widened. Setting up calls it on zeros: the caller undoes
            what that did to memory of its own.
        frames: one of each camera.
        eager: as of `FrameGraph`. masks: one of each camera, as of its `mask`.

    Attributes:
        kind: of frames that it takes.
        lands: the host has yet to make pictures or records of what comes there. stacked: of all cameras that is one.

    Raises:
        PipelineError: frames are of several kinds, or `finish` made no picture.
    """

    def __init__(
        self, network: Network, body: Body, frames: Sequence[Frame], device: torch.device, dtype: torch.dtype,
        eager: Callable[[], bool] = lambda: False, masks: Sequence[Mask] = (),
    ) -> None:  # fmt: skip
        first = frames[0]
        self.kind = kind_of(first)
        if any(kind_of(frame) != self.kind for frame in frames):
            raise PipelineError("sources: expected frames of one kind")
        self.network, self.body, self.dtype, self._frame, self._eager = network, body, dtype, first, eager
        given = first.given()
        self.pixels = torch.zeros(len(frames), *given.shape, dtype=given.dtype, device=device)
        self.look = None if first.surface is None else first.surface.look
        self.lands = False
        self._rows = list(self.pixels.unbind())
        self._masks = masks if any(mask.reads_boxes for mask in masks) else ()
        self.stacked = network.landing is not None
        self._packing, self._homeward = Packing([]), Homeward()
        self._tree: Any = None  # of what comes to the host
        self._graph, self._made = cuda_graph(self._run, device)
        self._last = self._made
        self._homeward.set_up(self._made[0])

    def _run(self) -> tuple[Tensor, Tensor, Any, Tensor, Tensor | None]:
        x, wide = seen(self.pixels, self.look, self.dtype, self.network)
        output, active, mask, drift = self.body(x, wide)
        shown = self._landed(output, len(x)) if self.stacked else None
        if shown is None:
            shown = []
            for k in range(len(x)):
                made, self.lands = landing_of(
                    self.network, row_of(output, k, len(x)), self._frame, None if drift is None else drift[k : k + 1]
                )
                shown.append(made)
        if self._masks and self.network.located is not None:
            self._follow(self.network.located, shown)
        parts, self._tree = pytree.tree_flatten((shown, active))
        self._packing = Packing(parts)
        return self._packing.packed(parts), x, output, mask, drift

    def _landed(self, output: Any, count: int) -> Any:
        """What the network's `landing` gives of all cameras, in launches that do not grow with their number; None where
        it does what `torch.vmap` cannot."""
        landing = self.network.landing
        assert landing is not None
        try:
            size = self._frame.size
            found = of_each(lambda own: landing(own, size), output, count)
        except RuntimeError:
            self.stacked = False  # found out before a graph is captured
            return None
        self.lands = True
        return found

    def _follow(self, located: Callable[..., tuple[Tensor, Tensor]], shown: Any) -> None:
        size = self._frame.size
        if self.stacked:
            leaves, tree = pytree.tree_flatten(shown)
            there = [leaf is not None for leaf in leaves]

            def one(*own: Tensor) -> tuple[Tensor, Tensor]:
                left = iter(own)
                return located(pytree.tree_unflatten([next(left) if found else None for found in there], tree), size)

            found: Any = zip(*torch.vmap(one)(*(leaf for leaf in leaves if leaf is not None)), strict=True)
        else:
            found = (located(own, size) for own in shown)
        for mask, (boxes, counts) in zip(self._masks, found, strict=True):
            mask.follow(boxes, counts)

    def upload(self, frames: Sequence[Frame]) -> None:
        """frames: of this kind, one of each camera. Those whose planes a decoder wrote on the device are to be kept
        until what `download` gives is on the host."""
        given = [frame.given() for frame in frames]
        if not all(one.is_cuda for one in given):
            if self.pixels.is_cuda:
                given = [one if one.is_cuda else one.pin_memory() for one in given]
            torch._foreach_copy_(self._rows, given, non_blocking=True)
            return
        # Few calls: each waits for Python's lock and the driver's, which as many threads as cameras want.
        for source in {frame.surface.source for frame in frames if frame.surface is not None} - {None}:
            torch.cuda.current_stream(self.pixels.device).wait_stream(source)
        torch.cat(given, out=self.pixels.flatten(0, 1))

    def replay(self) -> tuple[Tensor, Any, Tensor, Tensor | None]:
        """(x, what the network returned, mask, what was added to its pictures), on the device until the next replay."""
        if self._eager():
            self._last = self._run()
        else:
            self._graph.replay()
            self._last = self._made
        return self._last[1:]

    def download(self) -> tuple[Any, Tensor, Any]:
        """Of each camera the picture, or what the network is to `finish` (`stacked`: of all of them), and all active
        blocks, [N,...], in pinned memory, after the event, if there is one."""
        host, here = self._homeward(self._last[0])
        shown, active = pytree.tree_unflatten(self._packing.unpacked(host), self._tree)
        return shown, active, here


def of_each(call: Callable[[Any], Any], output: Any, count: int) -> Any:
    """What `call` gives of each of `count` images of an output, tensors stacked.

    Raises:
        RuntimeError: it does what `torch.vmap` cannot.
    """
    leaves, tree = pytree.tree_flatten(output)
    places = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.dim() and len(v) == count]
    kept: list[Any] = []

    def one(*images: Tensor) -> tuple[Tensor, ...]:
        own = list(leaves)
        for k, image in zip(places, images, strict=True):
            own[k] = image[None]
        made, spec = pytree.tree_flatten(call(pytree.tree_unflatten(own, tree)))
        kept[:] = [None if isinstance(v, Tensor) else v for v in made], [isinstance(v, Tensor) for v in made], spec
        return tuple(v for v in made if isinstance(v, Tensor))

    stacked = iter(torch.vmap(one)(*(leaves[k] for k in places)))
    others, of_tensors, spec = kept
    return pytree.tree_unflatten(
        [next(stacked) if tensor else other for other, tensor in zip(others, of_tensors, strict=True)], spec
    )


def row_of(output: Any, k: int, count: int) -> Any:
    """A camera's part of an output of so many."""
    return pytree.tree_map_only(Tensor, lambda v: v[k : k + 1] if v.dim() and len(v) == count else v, output)
