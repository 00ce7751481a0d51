"""The middle of a pipeline: mask and network on one frame after another, and now and then the dense network beside."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.apps.pipeline.checks import Checks
from sbnet.apps.pipeline.clock import Clock
from sbnet.apps.pipeline.dense_side import Dense, compared, dense_side, differences, form_on_cuda
from sbnet.apps.pipeline.drift import Drift, Likeness, place_of
from sbnet.apps.pipeline.frame_graph import FrameGraph, kind_of
from sbnet.apps.pipeline.frames import Frame, PipelineError, Result, input_of, mask_of
from sbnet.apps.pipeline.networks import Network, halo_of
from sbnet.apps.pipeline.shown import SHOWN, ShownBlocks
from sbnet.apps.pipeline.summary import LEAST, Shot, Summary, larger
from sbnet.engine.sparsify import SparseRun
from sbnet.geometry import to_pair
from sbnet.graph.reach import reach
from sbnet.masks.base import Mask
from sbnet.masks.grow import grow


@dataclass(frozen=True)
class Settings:
    """How frames are computed: see Pipeline."""

    mode: str
    block: Any
    margin: int | str
    device: torch.device
    dtype: torch.dtype
    compare: int
    check: float = 0.05


class Compute:
    """`compute(frame, pinned)` gives a Result whose tensors are still on the device. pinned: on CUDA, what
    `Frame.given` gives, in pinned memory or on the device.

    Attributes:
        busy: seconds in calls. aside: seconds in the dense network and in setting up, which no mask needs.
    """

    def __init__(self, network: Network, mask: Mask, settings: Settings, summary: Summary) -> None:
        self.network, self.mask, self.settings, self.summary = network, mask, settings, summary
        model = network.model
        if isinstance(model, nn.Module):
            model = placed(model, settings.device, settings.dtype)
        self.model = model
        self.busy = self.aside = 0.0
        self.margin = 0
        self.run: Any = None  # a SparseRun
        # One graph a frame, that of the dense network beside it, and what a frame of theirs looks like.
        plain = network.prepare is None and network.finish is None
        captured = network.captured or network.landing is not None or plain
        on_cuda = settings.device.type == "cuda" and captured
        self._located = on_cuda and network.located is not None
        mask.expect_boxes(self._located)
        # The mask is of the frame, which has to be in what the network is given.
        inside = mask.captured and network.prepare is None and network.multiple == 1
        self._graphed = on_cuda and (mask.captured or settings.mode == "dense")
        self._graph: FrameGraph | None = None
        self._dense_graph: FrameGraph | None = None
        self._dense_name = ""
        self._block = (1, 1)  # of the active blocks that a graph gives
        self._shown = ShownBlocks()
        follows = network.enlarges > 0 and settings.mode == "cached"
        self._drift = Drift(network.enlarges, network.pad) if follows else None
        mask.expect(follows)
        self._inside: Inside | None = Inside(mask, network) if inside and not self._graphed else None
        self._shape: Any = None  # of the last input
        self._planned: set[torch.Size] = set()  # sizes of frames that there are plans for
        self._dense: dict[Any, Dense] = {}
        self._count = self._samples = 0
        self._checks = Checks(model, settings.check, summary) if network.checked and settings.mode == "masked" else None

    @torch.no_grad()
    def __call__(self, frame: Frame, pinned: Tensor | None = None) -> Result:
        begin = time.perf_counter()
        aside = self.aside
        try:
            if frame.surface is not None:
                frame.surface.wait()
            if pinned is not None and (graph := self._graph_for(frame, pinned)) is not None:
                result = self._replayed(graph, frame, pinned)
            else:
                settings = self.settings
                if pinned is None or frame.surface is not None:
                    x = frame.tensor(settings.device, settings.dtype)
                else:
                    x = input_of(pinned.to(settings.device, non_blocking=True), settings.dtype)
                result = self._sparse(frame, x) if settings.mode != "dense" else self._whole(frame, x)
            self._count += 1
            return result
        finally:
            self.busy += time.perf_counter() - begin - (self.aside - aside)

    # ---- one graph a frame

    def _graph_for(self, frame: Frame, pinned: Tensor) -> FrameGraph | None:
        """The graph for frames like this one, or None: step by step."""
        if not self._graphed or (self._graph is not None and self._graph.kind == kind_of(frame, pinned)):
            return self._graph
        self._dense_graph = None
        try:
            self._graph = self._whole_graph(frame) if self.settings.mode == "dense" else self._sparse_graph(frame)
        except PipelineError:
            if self.network.captured:
                raise
            self._graphed, self._graph = False, None  # of an unknown output no picture came
        finally:
            self.mask.reset()  # which has seen frames of no source
        return self._graph

    def _replayed(self, graph: FrameGraph, frame: Frame, pinned: Tensor) -> Result:
        graph.upload(pinned)
        clock = Clock(self.settings.device)
        x, output, mask, drift = graph.replay()
        clock.end()
        shown, active, here = graph.download()
        result = Result(frame, None, None if graph.lands else shown, active=active, block=self._block)
        if graph.lands:
            result.finish = partial(self.network.concluded, shown, frame)
        if active is None:
            result.density = 1.0
        clock.stop(result, here=here)
        self._beside(frame, lambda: self.network.input(x), output, mask, drift)
        return result

    def _sparse_graph(self, frame: Frame) -> FrameGraph:
        network = self.network
        given = network.input(frame.tensor(self.settings.device, self.settings.dtype))
        self.run = self.run or self._set_up(given)
        begin = time.perf_counter()
        run = self.run

        def body(x: Tensor, wide: Tensor) -> tuple[Any, Tensor, Tensor, Tensor | None]:
            mask = network.widened_mask(self.mask(x))
            output = run.body(network.prepared(wide), mask=mask, margin=self.margin)
            active, self._block = self._blocks(run, x)
            return output, active, mask, self._drifted(x, output)

        def eager() -> bool:
            return bool(run.whole_frame)

        try:
            return FrameGraph(network, body, frame, self.settings.device, self.settings.dtype, eager, self.mask)
        finally:
            run.reset()  # frames of no source
            self.aside += time.perf_counter() - begin

    def _whole_graph(self, frame: Frame) -> FrameGraph:
        begin, network, settings = time.perf_counter(), self.network, self.settings
        given = network.input(frame.tensor(settings.device, settings.dtype))
        self._dense_name, model = form_on_cuda(self.model, given)

        def body(x: Tensor, wide: Tensor) -> tuple[Any, None, None, None]:
            return model(network.prepared(wide)), None, None, None

        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            graph = FrameGraph(network, body, frame, settings.device, settings.dtype)
        self.aside += time.perf_counter() - begin
        return graph

    def _set_up(self, given: Tensor) -> Any:
        begin = time.perf_counter()
        settings = self.settings
        try:
            run = self.run or SparseRun(
                self.model, given, mode=settings.mode, block=settings.block, margin=0, masks=(), out=(),
                mask_source=self._inside, allow_tf32=False,
            )  # fmt: skip
        except ValueError as error:
            raise PipelineError(f"network {self.network.name}: {str(error).removeprefix('sbnet: ')}") from None
        self.margin = halo_of(run) if settings.margin == "halo" else int(settings.margin)
        if self._inside is None:
            run(given, given.new_zeros(given.shape[0], *given.shape[2:], dtype=torch.bool), margin=self.margin)
        else:
            run(given, margin=self.margin)
        run.reset()
        self.aside += time.perf_counter() - begin
        self.summary.plans.add(time.perf_counter() - begin)
        return run

    def _call(self, given: Tensor, mask: Tensor | None) -> Any:
        run = self.run
        if self._inside is None:
            return run(given, mask, margin=self.margin)
        if self._shape != given.shape:
            self._shape = given.shape
            run.prepare(given, margin=self.margin)
            self.mask.reset()  # setting up and a graph's warming-up called it on no frame of the source
        return run(given, margin=self.margin)

    def _sparse(self, frame: Frame, x: Tensor) -> Result:
        if self.run is None or x.shape not in self._planned:
            self._planned.add(x.shape)
            self.run = self._set_up(self.network.input(x))
        run, clock = self.run, Clock(self.settings.device)
        self.mask.see(frame)
        mask = mask_of(self.mask, x) if self._inside is None else None
        given = self.network.input(x)
        output = self._call(given, None if mask is None else self.network.widened_mask(mask))
        drift = self._drifted(x, output)
        result = self._finished(frame, output, drift)
        active, result.block = self._blocks(run, x)
        result.active = active.to("cpu", non_blocking=x.is_cuda)
        clock.stop(result)
        self.mask.learn(result.records)
        if mask is None and self.settings.compare:
            assert self._inside is not None
            mask = self._inside.found[given.shape]
        wide = None if mask is None else self.network.widened_mask(mask)
        self._beside(frame, lambda: given, output, wide, drift)
        return result

    def _drifted(self, x: Tensor, output: Any) -> Tensor | None:
        """What is to be added to the picture of an output of frames x."""
        if self._drift is None:
            return None
        found = self._drift(x, self.run, tuple(output.shape[2:]))
        self._tell(x, self._drift.fresh)
        return found

    def _tell(self, x: Tensor, fresh: Tensor) -> None:
        """Masks hear which pixels of frames x were computed."""
        self.mask.computed(x, fresh)

    def _beside(
        self, frame: Frame, input_: Callable[[], Tensor], output: Any, mask: Tensor | None, drift: Tensor | None
    ) -> None:
        """Now and then, the dense network on the same frame, and a sample for the contract."""
        self.summary.stage = "running"
        if mask is None or not self._is_sample(lambda: bool(mask.all())):
            return
        given = input_()
        self.summary.stage = "comparing" if self._dense else "timing dense forms"
        self._compare(given, output, mask, frame, drift)
        self._keep(given, output, mask)
        self.summary.stage = "running"

    def _is_sample(self, whole: Callable[[], bool]) -> bool:
        """Is it the dense network's turn? On the first LEAST frames, so that short films have a figure, and on each so
        many after them; never on a first frame that is computed whole, which is like no other."""
        every = self.settings.compare
        if not every or (self._samples >= LEAST and self._count % every):
            return False
        if self._count == 0 and (self.settings.mode == "cached" or whole()):
            return False
        self._samples += 1
        return True

    def _keep(self, given: Tensor, output: Any, mask: Tensor) -> None:
        """A sample of what is to be held against the contract, by plain PyTorch in float64."""
        if self._checks is not None:
            begin = time.perf_counter()
            self._checks.keep(given, output, grow(mask, self.margin), self.run.planes, reach(self.run.plan))
            self.aside += time.perf_counter() - begin

    def conclude(self, seconds: float) -> None:
        """After the last frame of a run of so many seconds: checks what was sampled."""
        if self._checks is None:
            return
        self.summary.stage = "checking in float64"
        try:
            self._checks.conclude(seconds)
        except (RuntimeError, MemoryError) as error:
            if not is_memory(error):
                raise
            self.summary.unchecked = "too little memory"
        self.summary.stage = "running"

    def release(self) -> None:
        """After the last call: graphs hold what is computed here, and this holds them, so that gigabytes of the device
        would wait for Python's collector."""
        self._graph = self._dense_graph = None

    def _whole(self, frame: Frame, x: Tensor) -> Result:
        given = self.network.input(x)
        run = self._dense_for(given)
        clock = Clock(self.settings.device)
        result = self._finished(frame, run(self.network.input(x)))
        result.density = 1.0
        clock.stop(result)
        return result

    def _finished(self, frame: Frame, output: Any, drift: Tensor | None = None) -> Result:
        picture, records = self.network.finished(output, frame, drift)
        if isinstance(picture, Tensor) and picture.is_cuda:
            picture = picture.to("cpu", non_blocking=True)
        return Result(frame, output, picture, records)

    def _blocks(self, run: Any, x: Tensor, image: int | slice = 0) -> tuple[Tensor, tuple[int, int]]:
        """Active blocks of the plane that is the frame's, or of the finest, [rows,columns], on a frame of x, or on
        several of them."""
        height, width = x.shape[2:]
        given = tuple(run.shape[2:])
        sizes = [plane[:2] for plane in run.planes]
        size = given if given in sizes else sizes[0]
        active = run.active_of(size)
        hits, block = active.block_map[image] >= 0, to_pair(active.grid.bsize, "block")
        if size == (height, width):
            return hits, block
        return self._shown(hits, block, size, given, (height, width), self.network.pad), (SHOWN, SHOWN)

    # ---- the dense side

    def _dense_for(self, given: Tensor) -> Dense:
        key = tuple(given.shape)
        if key not in self._dense:
            begin = time.perf_counter()
            self._dense = {key: dense_side(self.model, given)}
            self._dense[key](given)
            self.aside += time.perf_counter() - begin
        return self._dense[key]

    def _compare(self, given: Tensor, output: Any, mask: Tensor, frame: Frame, drift: Tensor | None) -> None:
        """Runs the dense network on a frame as well, and takes its time: of what the masked one's time holds, without
        what only masks need."""
        summary, result = self.summary, Result(frame)
        if self._graph is not None:
            self._dense_graph = self._dense_graph or self._whole_graph(frame)
            name, graph = self._dense_name, self._dense_graph
            begin = time.perf_counter()
            graph.upload(self._graph.pixels)
            clock = Clock(self.settings.device)
            wanted = graph.replay()[1]
        else:
            side = self._dense_for(given)
            name = side.name
            begin = time.perf_counter()
            prepared = side.prepare(given)
            clock = Clock(self.settings.device)
            wanted = side.run(prepared)
        clock.stop(result)
        result.land()
        summary.dense_form = name
        summary.dense_ms.add(result.ms / given.shape[0])
        where = None if self.settings.mode == "cached" else mask
        if self._drift is not None and drift is not None:
            summary.likeness = summary.likeness or Likeness()
            output, wanted = self._drift.pictures(self.network, output, wanted, frame, drift, summary.likeness)
        error, largest, at = compared(output, wanted, where)
        summary.errors.add(error)
        if not largest <= summary.largest:
            summary.place = place_of(frame, at, self._drift)
        summary.largest = larger(summary.largest, largest)
        if frame.index >= 0:
            seam = math.nan if summary.likeness is None else summary.likeness.newest
            summary.show(frame.index, Shot(None, largest, differences(output, wanted, where), seam))
        self.aside += time.perf_counter() - begin


class Inside:
    """The mask of a widened frame as a run's own source: on CUDA in its graph, with all that follows from it. It knows
    nothing of the run, so that both go when that does.

    Attributes:
        found: of inputs of each shape, the mask of the last frame (cached mode: of some frame).
    """

    def __init__(self, mask: Mask, network: Network) -> None:
        self.mask, self.network = mask, network
        self.found: dict[Any, Tensor] = {}

    def __call__(self, given: Tensor) -> Tensor:
        pad, (height, width) = self.network.pad, given.shape[2:]
        found = self.mask(given[:, :, pad : height - pad, pad : width - pad])
        self.found[given.shape] = found
        return self.network.widened_mask(found)


def is_memory(error: BaseException) -> bool:
    """Did an allocation fail?"""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model there and so, in eval mode; the caller's own stays as it is."""
    tensors = [*model.parameters(), *model.buffers()]
    fits = all(t.device == device and (t.dtype == dtype or not t.is_floating_point()) for t in tensors)
    if fits and not model.training:
        return model
    return copy.deepcopy(model).eval().to(device=device, dtype=dtype)
