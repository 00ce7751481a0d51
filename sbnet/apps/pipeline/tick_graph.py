"""On CUDA, all that the device does to a frame of each camera as one graph: one replay, one download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.apps.pipeline.frame_graph import Packing, kind_of, landing_of, seen
from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.networks import Network
from sbnet.engine.capture import cuda_graph

# x [N,C,H,W] -> what the network returned, active blocks of each camera, mask, what is added to the pictures
Body = Callable[[Tensor], tuple[Any, list[Tensor], Tensor, Tensor | None]]


class TickGraph:
    """`FrameGraph` for a batch of frames of one kind, one of each camera.

    Args:
        network: as of `FrameGraph`.
        body: of x, [N,C,H,W] on the device, 0 to 1. Setting up calls it on zeros: the caller undoes what that did to
            memory of its own.
        frames: one of each camera.

    Attributes:
        kind: of frames that it takes.
        lands: the host has yet to make pictures or records of what comes there.

    Raises:
        PipelineError: frames are of several kinds, or `finish` made no picture.
    """

    def __init__(
        self, network: Network, body: Body, frames: Sequence[Frame], device: torch.device, dtype: torch.dtype
    ) -> None:
        first = frames[0]
        self.kind = kind_of(first)
        if any(kind_of(frame) != self.kind for frame in frames):
            raise PipelineError("sources: expected frames of one kind")
        self.network, self.body, self.dtype, self._frame = network, body, dtype, first
        given = first.given()
        self.pixels = torch.zeros(len(frames), *given.shape, dtype=given.dtype, device=device)
        self.look = None if first.surface is None else first.surface.look
        self.lands = False
        self._packing = Packing([])
        self._tree: Any = None  # of what comes to the host
        self._graph, self._made = cuda_graph(self._run, device)

    def _run(self) -> tuple[Tensor, Tensor, Any, Tensor, Tensor | None]:
        x = seen(self.pixels, self.look, self.dtype)
        output, active, mask, drift = self.body(x)
        shown = []
        for k in range(len(x)):
            made, self.lands = landing_of(
                self.network, row_of(output, k, len(x)), self._frame, None if drift is None else drift[k : k + 1]
            )
            shown.append(made)
        parts, self._tree = pytree.tree_flatten((shown, active))
        self._packing = Packing(parts)
        return self._packing.packed(parts), x, output, mask, drift

    def upload(self, camera: int, frame: Frame) -> None:
        """frame: of this kind."""
        given = frame.given() if frame.surface is None else frame.surface.wait()
        given = given.pin_memory() if self.pixels.is_cuda and not given.is_cuda else given
        self.pixels[camera].copy_(given, non_blocking=True)

    def replay(self) -> tuple[Tensor, Any, Tensor, Tensor | None]:
        """(x, what the network returned, mask, what was added to its pictures), on the device until the next replay."""
        self._graph.replay()
        return self._made[1:]

    def download(self) -> tuple[list[Any], list[Tensor]]:
        """Of each camera the picture, or what the network is to `finish`, and active blocks, in pinned memory, once the
        stream has come there."""
        packed = self._made[0]
        host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=packed.is_cuda).copy_(packed, non_blocking=True)
        return pytree.tree_unflatten(self._packing.unpacked(host), self._tree)


def row_of(output: Any, k: int, count: int) -> Any:
    """A camera's part of an output of so many."""
    return pytree.tree_map_only(Tensor, lambda v: v[k : k + 1] if v.dim() and len(v) == count else v, output)
