"""A network and its masks on a frame of each of several cameras, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbnet.apps.machine import device_name
from sbnet.apps.pipeline.clock import Clock, Landed
from sbnet.apps.pipeline.compute import Compute
from sbnet.apps.pipeline.frame_graph import kind_of
from sbnet.apps.pipeline.frames import Frame, PipelineError, Result, mask_of
from sbnet.apps.pipeline.networks import Finished
from sbnet.apps.pipeline.pipeline import Pipeline
from sbnet.apps.pipeline.summary import Summary
from sbnet.apps.pipeline.tick_graph import TickGraph, row_of
from sbnet.masks.motion import joined_motion


class Tick:
    """What one call of the network made of a frame of each of some cameras.

    Attributes:
        results: by camera; theirs once `land` was called, until when they are on their way to the host.

    Args:
        landed: of the call, where its results come in one copy. active: their blocks, [N,rows,columns]. conclude: what
            makes pictures and records of what landed.
    """

    def __init__(
        self, results: dict[int, Result], landed: Landed | None = None, active: Tensor | None = None,
        conclude: Callable[[], list[Finished]] | None = None,
    ) -> None:  # fmt: skip
        self.results, self._landed, self._active, self._conclude = results, landed, active, conclude

    def land(self) -> float:
        """Waits for the device, and brings all to the host: once for all results. Seconds that it waited."""
        waited = 0.0
        if self._landed is not None and self._active is not None:
            ms, waited = self._landed.wait()
            if self._conclude is not None:
                for result, made in zip(self.results.values(), self._conclude(), strict=True):
                    result.picture, result.records = made
            active = self._active.numpy().copy()  # what was copied here goes when its pictures do
            blocks = active[0].size
            for result, own in zip(self.results.values(), active, strict=True):
                result.active, result.density, result.ms = own, np.count_nonzero(own) / blocks, ms
            self._landed = self._active = self._conclude = None
        for result in self.results.values():
            result.land()
            waited, result.waited = waited + result.waited, 0.0
        return waited


class Batch(Compute):
    """Mask and network on a frame of each camera."""

    def __init__(self, cameras: Sequence[Pipeline], summary: Summary) -> None:
        first = cameras[0]
        super().__init__(first.network, first.mask, first.settings, summary)
        self.cameras = cameras
        self.masks = [camera.mask for camera in cameras]
        for mask in self.masks:
            mask.expect_boxes(self._located)
        # One graph for all, which serves calls that have a frame of each camera.
        self._together = self._graphed and all(mask.captured for mask in self.masks)
        self._tick_graph: TickGraph | None = None
        self._inside, self._graphed = None, False  # each camera has a mask of its own, of its own frame
        for mask in self.masks:
            mask.reset()
            mask.expect(self._drift is not None)
        self.x: Tensor | None = None  # [cameras,C,H,W]
        self._kind: Any = None  # of the last frame that was as wanted
        self._begun = [False] * len(cameras)

    def differs(self, frame: Frame) -> str:
        """What is wrong with a frame's shape, or nothing; the first frame of all says what is wanted."""
        kind = kind_of(frame)
        if kind == self._kind:  # as nearly all are: this is asked of each frame of each camera
            return ""
        settings = self.settings
        shape = _shape(frame)
        if self.x is None:
            x = torch.zeros(len(self.cameras), *shape, device=settings.device, dtype=settings.dtype)
            self.x = x.contiguous(memory_format=torch.channels_last)
            height, width = shape[1:]
            dtype = str(settings.dtype).removeprefix("torch.")
            self.summary.title = (f"{len(self.cameras)} sources, {height}x{width}: {self.network.name}, {dtype} on "
                                  f"{device_name(settings.device)}")  # fmt: skip
        wanted = tuple(self.x.shape[1:])
        if tuple(shape) == wanted:
            self._kind = kind
            return ""
        return f"{frame.name}: expected a frame of {wanted[1]}x{wanted[2]} and {wanted[0]} channels, got {shape[1]}x" \
               f"{shape[2]} and {shape[0]}; size= scales"  # fmt: skip

    @torch.no_grad()
    def tick(self, frames: dict[int, Frame]) -> Tick:
        begin, aside = time.perf_counter(), self.aside
        try:
            graph = self._graph_of(frames)
            results = self._stepped(frames) if graph is None else self._replayed_all(graph, frames)
            self._count += 1
            return results
        finally:
            self.busy += time.perf_counter() - begin - (self.aside - aside)

    def _graph_of(self, frames: dict[int, Frame]) -> TickGraph | None:
        """The graph that serves a call with these frames, or None: step by step."""
        if not self._together or len(frames) < len(self.cameras):
            return None
        if self._tick_graph is None:
            self._set_graph(frames)
        graph = self._tick_graph
        if graph is None or any(kind_of(frame) != graph.kind for frame in frames.values()):
            return None
        if self.settings.mode == "cached" and not any(self._begun):
            self._begun = [True] * len(self.cameras)  # the run computes all of a first call, outside the graph
        return graph if self.settings.mode != "cached" or all(self._begun) else None

    def _set_graph(self, frames: dict[int, Frame]) -> None:
        x, network = self.x, self.network
        assert x is not None
        self.run = self.run or self._set_up(network.input(x))
        run, begin = self.run, time.perf_counter()
        joint = joined_motion(self.masks, x)

        def body(x: Tensor, wide: Tensor) -> tuple[Any, Tensor, Tensor, Tensor | None]:
            mask = joint(x) if joint else torch.cat([one(x[k : k + 1]) for k, one in enumerate(self.masks)])
            output = run.body(network.prepared(wide), mask=network.widened_mask(mask), margin=self.margin)
            active, self._block = self._blocks(run, x, slice(None))
            return output, active, mask, self._drifted(x, output)

        try:
            self._tick_graph = TickGraph(
                network, body, [frames[k] for k in range(len(x))], self.settings.device, self.settings.dtype,
                lambda: bool(run.whole_frame), self.masks,
            )  # fmt: skip
        except PipelineError:
            self._together = False
        finally:
            # Masks and the network have seen frames of no source: all begin anew.
            run.reset()
            for mask in self.masks:
                mask.reset()
            self._begun = [False] * len(self.cameras)
            self.aside += time.perf_counter() - begin

    def _replayed_all(self, graph: TickGraph, frames: dict[int, Frame]) -> Tick:
        given = [frames[k] for k in range(len(self.cameras))]
        graph.upload(given)
        clock = Clock(self.settings.device)
        x, output, mask, drift = graph.replay()
        clock.end()
        shown, active, here = graph.download()
        results = {k: Result(frame, block=self._block) for k, frame in enumerate(given)}
        conclude = None
        if graph.stacked:
            conclude = partial(self.network.concluded_all, shown, given)
        else:
            for result, own in zip(results.values(), shown, strict=True):
                if graph.lands:
                    result.finish = partial(self.network.concluded, own, result.frame)
                else:
                    result.picture = own
        self._sample(frames, x, output, mask, drift)
        return Tick(results, clock.landed(here), active, conclude)

    def release(self) -> None:
        super().release()
        self._tick_graph = None

    def _sample(self, frames: dict[int, Frame], x: Tensor, output: Any, mask: Tensor, drift: Tensor | None) -> None:
        """Now and then, the dense network on the same frames, and one of them for the contract."""
        if not self._is_sample(lambda: bool(mask[list(frames)].all())):
            return
        given, wide = self.network.input(x), self.network.widened_mask(mask)
        self._compare(given, output, wide, Frame(-1, None), drift)
        k = min(frames, key=lambda k: (bool(wide[k].all()), k))
        one = output[k : k + 1] if isinstance(output, Tensor) else output
        self._keep(given[k : k + 1], one, wide[k : k + 1])

    def _stepped(self, frames: dict[int, Frame]) -> Tick:
        x = self.x
        assert x is not None
        for k, frame in frames.items():
            x[k].copy_(frame.tensor(self.settings.device, self.settings.dtype)[0])
        if self.run is None:
            self.run = self._set_up(self.network.input(x))
        clock = Clock(self.settings.device)
        mask = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        for k, frame in frames.items():
            self.masks[k].see(frame)
            mask[k] = mask_of(self.masks[k], x[k : k + 1])[0]
            if self.settings.mode == "cached" and not self._begun[k]:
                mask[k], self._begun[k] = True, True  # nothing is kept of it yet
        given = self.network.input(x)
        output = self.run(given, self.network.widened_mask(mask), margin=self.margin)
        drift = self._drifted(x, output)
        results = {k: self._result(frame, output, k, x, drift) for k, frame in frames.items()}
        clock.stop(*results.values())
        for k, result in results.items():
            self.masks[k].learn(result.records)
        self._sample(frames, x, output, mask, drift)
        return Tick(results)

    def _tell(self, x: Tensor, fresh: Tensor) -> None:
        for k, mask in enumerate(self.masks):
            mask.computed(x[k : k + 1], fresh[k : k + 1])

    def _result(self, frame: Frame, output: Any, k: int, x: Tensor, drift: Tensor | None) -> Result:
        assert self.run is not None
        own = row_of(output, k, len(x))
        picture, records = self.network.finished(own, frame, None if drift is None else drift[k : k + 1])
        if isinstance(picture, Tensor):
            picture = picture.to("cpu", non_blocking=True)
        active, block = self._blocks(self.run, x, k)
        active = active.to("cpu", non_blocking=x.is_cuda)
        return Result(frame, None, picture, records, active, block)


def _shape(frame: Frame) -> tuple[int, ...]:
    """(C,H,W) of the frame as a tensor."""
    frame.place(torch.device("cpu"))
    pixels = frame.pixels
    if frame.surface is not None:
        return (3, *frame.size)
    if isinstance(pixels, Tensor):
        return tuple(pixels.shape)
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    return (min(channels, 3) if pixels.dtype.itemsize == 1 else channels, *pixels.shape[:2])
