"""The middle of a pipeline: mask and network on one frame after another, and now and then the dense network beside."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.apps.pipeline.dense_side import Dense, compared, dense_side
from sbnet.apps.pipeline.frames import Frame, PipelineError, Result
from sbnet.apps.pipeline.networks import Network, halo_of, picture_of, to_picture
from sbnet.apps.pipeline.summary import Summary
from sbnet.engine.sparsify import SparseRun
from sbnet.geometry import to_pair
from sbnet.masks.base import Mask

SHOWN = 16  # side of the blocks that are shown where the network's own are not the frame's


@dataclass(frozen=True)
class Settings:
    """How frames are computed: see Pipeline."""

    mode: str
    block: Any
    margin: int | str
    device: torch.device
    dtype: torch.dtype
    compare: int


class Compute:
    """`compute(frame, x, ready)` gives a Result whose tensors are still on the device.

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
        self.run: SparseRun | None = None
        # The mask is of the frame, which has to be in what the network is given.
        inside = mask.captured and network.prepare is None and network.multiple == 1
        self._inside: Inside | None = Inside(mask, network) if inside else None
        self._shape: Any = None  # of the last input
        self._dense: dict[Any, tuple[str, Dense]] = {}
        self._count = 0

    @torch.no_grad()
    def __call__(self, frame: Frame, x: Tensor | None, ready: Any) -> Result:
        begin = time.perf_counter()
        aside = self.aside
        try:
            if x is None:
                x = frame.tensor(self.settings.device, self.settings.dtype)
            else:
                stream = torch.cuda.current_stream()
                stream.wait_event(ready)
                x.record_stream(stream)
            result = self._sparse(frame, x) if self.settings.mode != "dense" else self._whole(frame, x)
            self._count += 1
            return result
        finally:
            self.busy += time.perf_counter() - begin - (self.aside - aside)

    def _set_up(self, given: Tensor) -> SparseRun:
        begin = time.perf_counter()
        settings = self.settings
        try:
            run = SparseRun(
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
        return run

    def _call(self, given: Tensor, mask: Tensor | None) -> Any:
        run = self.run
        assert run is not None
        if self._inside is None:
            return run(given, mask, margin=self.margin)
        if self._shape != given.shape:
            self._shape = given.shape
            run._for((given,), self.margin)
            self.mask.reset()  # setting up and a graph's warming-up called it on no frame of the source
        return run(given, margin=self.margin)

    def _sparse(self, frame: Frame, x: Tensor) -> Result:
        if self.run is None:
            self.run = self._set_up(self.network.input(x))
        run, clock = self.run, _Clock(self.settings.device)
        self.mask.see(frame)
        mask = self.mask(x) if self._inside is None else None
        given = self.network.input(x)
        output = self._call(given, None if mask is None else self.network.widened_mask(mask))
        result = self._finished(frame, output)
        result.active, result.block = self._blocks(run, x)
        clock.stop(result)
        self.mask.learn(result.records)
        every, first = self.settings.compare, int(self.settings.mode == "cached")  # whose first frame is dense
        if every and self._count >= first and (self._count - first) % every == 0:
            if mask is None:
                assert self._inside is not None
                mask = self._inside.found[given.shape]
            self._compare(given, output, mask, frame)
        return result

    def _whole(self, frame: Frame, x: Tensor) -> Result:
        given = self.network.input(x)
        _, run = self._dense_for(given)
        clock = _Clock(self.settings.device)
        result = self._finished(frame, run(self.network.input(x)))
        result.density = 1.0
        clock.stop(result)
        return result

    def _finished(self, frame: Frame, output: Any) -> Result:
        picture, records = (self.network.finish or picture_of)(output, frame)
        picture = to_picture(picture)
        if isinstance(picture, Tensor) and picture.is_cuda:
            picture = picture.to("cpu", non_blocking=True)
        return Result(frame, output, picture, records)

    def _blocks(self, run: SparseRun, x: Tensor, image: int = 0) -> tuple[Tensor, tuple[int, int]]:
        """Active blocks of the plane that is the frame's, or of the finest, [rows,columns], on a frame of x."""
        height, width = x.shape[2:]
        executor = run._last.executor
        given = tuple(executor.shape[2:])
        sizes = [plane[:2] for plane in run.planes]
        size = given if given in sizes else sizes[0]
        value = next(v for node in run.plan.graph.nodes for v in node.outputs if v.size == size)
        active = run.active[executor.lists.of(value)]
        if size == (height, width):
            map_ = active.block_map[image] >= 0
            return map_.to("cpu", non_blocking=x.is_cuda), to_pair(active.grid.bsize, "block")
        pixels = F.adaptive_max_pool2d(active.pixel_mask(size)[image : image + 1].float(), given)
        pad = self.network.pad
        pixels = pixels[:, :, pad : pad + height, pad : pad + width]
        map_ = F.max_pool2d(pixels, SHOWN, ceil_mode=True)[0, 0] > 0
        return map_.to("cpu", non_blocking=x.is_cuda), (SHOWN, SHOWN)

    # ---- the dense side

    def _dense_for(self, given: Tensor) -> tuple[str, Dense]:
        key = tuple(given.shape)
        if key not in self._dense:
            begin = time.perf_counter()
            self._dense = {key: dense_side(self.model, given)}
            self._dense[key][1](given)
            self.aside += time.perf_counter() - begin
        return self._dense[key]

    def _compare(self, given: Tensor, output: Any, mask: Tensor, frame: Frame) -> None:
        summary = self.summary
        summary.dense_form, run = self._dense_for(given)
        begin = time.perf_counter()
        result, clock = Result(frame), _Clock(self.settings.device)
        wanted = run(given)
        clock.stop(result)
        result.land()
        summary.dense_ms.add(result.ms)
        where = None if self.settings.mode == "cached" else self.network.widened_mask(mask)
        error, largest = compared(output, wanted, where)
        summary.errors.add(error)
        summary.largest = max(summary.largest, largest)
        summary.shown = {frame.index}
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


class _Clock:
    """Milliseconds from now to `stop`: the device's, which the thread that waits for it reads."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        self._at = time.perf_counter()

    def stop(self, result: Result) -> None:
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            result.landed = self._begin, end
        else:
            result.ms = (time.perf_counter() - self._at) * 1e3


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model there and so, in eval mode; the caller's own stays as it is."""
    tensors = [*model.parameters(), *model.buffers()]
    fits = all(t.device == device and (t.dtype == dtype or not t.is_floating_point()) for t in tensors)
    if fits and not model.training:
        return model
    return copy.deepcopy(model).eval().to(device=device, dtype=dtype)
