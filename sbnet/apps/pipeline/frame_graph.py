"""On CUDA, all that is done to a frame as one graph: one upload, one replay, one download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbnet.apps.pipeline.frames import Frame, PipelineError, input_of
from sbnet.apps.pipeline.networks import Network, picture_of, to_picture
from sbnet.engine.capture import cuda_graph

# x [1,C,H,W] -> what the network returned, active blocks, mask
Body = Callable[[Tensor], tuple[Any, Tensor | None, Tensor | None]]


class FrameGraph:
    """Bytes of a frame in, bytes of its picture and its active blocks out: conversion, mask, lists, network and what
    makes a picture of its output.

    `upload(pixels)`, `replay()`, `download()`, in this order; none of them waits. The next replay overwrites what one
    wrote; the stream keeps it behind the download.

    Args:
        network: whose `captured` is set.
        body: of x, [1,C,H,W] on the device, 0 to 1. Setting up calls it on zeros: the caller undoes what that did to
            memory of its own (backgrounds, kept feature maps).
        frame: one of the source's; the others are of its shape and type.
        eager: is the next call to run outside the graph? (The first frame of a cached network computes all pixels.)

    Raises:
        PipelineError: `finish` made no picture.
    """

    def __init__(
        self, network: Network, body: Body, frame: Frame, device: torch.device, dtype: torch.dtype,
        eager: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.network, self.body, self.frame, self.dtype, self._eager = network, body, frame, dtype, eager
        self.pixels = torch.zeros_like(frame.raw(), device=device)
        self.shape = self.pixels.shape, self.pixels.dtype
        self._sizes: list[torch.Size] = []
        self._graph, self._made = cuda_graph(self._run, device)
        self._last = self._made

    def _run(self) -> tuple[Tensor, Tensor, Any, Tensor | None]:
        x = input_of(self.pixels, self.dtype)
        output, active, mask = self.body(x)
        picture, records = (self.network.finish or picture_of)(output, self.frame)
        picture = to_picture(picture)
        if not isinstance(picture, Tensor) or records:
            raise PipelineError(f"network {self.network.name}: captured: expected a picture and no records of finish")
        parts = [picture] if active is None else [picture, active.view(torch.uint8)]
        self._sizes = [part.shape for part in parts]
        return torch.cat([part.flatten() for part in parts]), x, output, mask

    def upload(self, pixels: Tensor) -> None:
        """pixels: of Frame.raw, in pinned memory."""
        self.pixels.copy_(pixels, non_blocking=True)

    def replay(self) -> tuple[Tensor, Any, Tensor | None]:
        """(x, what the network returned, mask), on the device until the next replay."""
        if self._eager():
            self._last = self._run()
        else:
            self._graph.replay()
            self._last = self._made
        return self._last[1:]

    def download(self) -> list[Tensor]:
        """Picture [H,W,3] uint8 and, where the body gives them, active blocks, in pinned memory, once the stream has
        come there."""
        packed = self._last[0]
        host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=packed.is_cuda).copy_(packed, non_blocking=True)
        parts = host.split([size.numel() for size in self._sizes])
        return [part.view(size) for part, size in zip(parts, self._sizes, strict=True)]
