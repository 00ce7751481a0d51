"""The main job: a network on the moving blocks of a video, timed against the dense one and checked while it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sbnet.benchmarks.harness import dense
from sbnet.engine.chain import MaskedChain
from sbnet.engine.onnx_net import OnnxConvNet
from sbnet.engine.oracle import Agreement, compare
from sbnet.engine.runner import DenseConvNet, MaskedConvNet
from sbnet.masks import MotionMask

DENSE_EVERY = 10  # frames: the dense network runs beside the masked one, so that both meet the same machine
CHECK_EVERY = 50  # frames: a check runs the network in float64


@dataclass
class Report:
    """What a run measured: masked and dense times in ms, the share of active blocks, the checks.

    dense_form: what ran the dense network, the fastest way of those that the machine has.
    """

    densities: list[float] = field(default_factory=list)
    masked_ms: list[float] = field(default_factory=list)
    dense_ms: list[float] = field(default_factory=list)
    checks: list[Agreement] = field(default_factory=list)
    dense_form: str = ""

    @property
    def frames(self) -> int:
        return len(self.masked_ms)

    @property
    def mean_density(self) -> float:
        return statistics.fmean(self.densities)

    @property
    def mean_masked_ms(self) -> float:
        return statistics.fmean(self.masked_ms)

    @property
    def mean_dense_ms(self) -> float:
        return statistics.fmean(self.dense_ms)

    @property
    def speed_up(self) -> float:
        """Means, as a masked frame costs what moves in it; what else the machine does meets both."""
        return self.mean_dense_ms / self.mean_masked_ms


class VideoJob:
    """Runs a chain of convolutions on the blocks of each frame that move.

    Args:
        net: as for `MaskedConvNet`, with three input channels.
        size: (H, W) of the frames.
        block: side of a block.
        threshold: of `MotionMask`.
        device, dtype: where and in what to run.
        onnx: an ONNX model of `sbnet export`: ONNX Runtime runs it instead of the masked runner, and its own
            convolutions are the dense network and the oracle.

    Attributes:
        told: called with what the job is about to do, where that may take long.
    """

    def __init__(
        self,
        net: nn.Sequential,
        size: tuple[int, int],
        block: int = 16,
        threshold: float = 0.08,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        onnx: Path | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.report = Report()
        self.told: Callable[[str], None] = lambda stage: None
        self.motion = MotionMask(size, threshold, device=self.device)
        self.masked: MaskedConvNet | OnnxConvNet
        if onnx is None:
            self.net = net
            self.masked = MaskedConvNet(net, size, block, device=device, dtype=dtype, mask_source=self.motion)
        else:
            from sbnet.export.chain import network

            self.net = network(onnx)
            self.masked = OnnxConvNet(onnx, size, block, self.motion, device)
        x = self._input(np.zeros((*size, 3), np.uint8))
        self.motion.reset()
        self.masked(x)
        self.motion.reset()
        self._dense = self._dense_form(size, x)

    def _dense_form(self, size: tuple[int, int], x: Tensor) -> dense.Form:
        """The fastest dense form of the network, tried on x."""
        if self.device.type == "cuda":
            self.report.dense_form = "PyTorch"
            run = DenseConvNet(self.net, size, device=self.device, dtype=self.dtype)
            run(x)
            return dense.Form(lambda x: x, run)
        found = dense.forms(MaskedChain(self.net).dense(), x)
        self.report.dense_form = dense.fastest(found, x, rounds=2)
        return found[self.report.dense_form]

    def _input(self, frame: np.ndarray) -> Tensor:
        """[1,3,H,W] channels_last, 0 to 1."""
        pixels = torch.from_numpy(frame).to(self.device)[None].permute(0, 3, 1, 2)
        return pixels.to(self.dtype) / 255

    def _timed(self, run: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """Result and milliseconds, on the device's own clock."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = run()
            end.record()
            end.synchronize()
            return result, start.elapsed_time(end)
        begin = time.perf_counter()
        result = run()
        return result, (time.perf_counter() - begin) * 1e3

    def step(self, frame: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """One frame, [H,W,3] uint8: the output [1,K,H,W], valid until the next step, and the active blocks [ch,cw].

        The time of a masked frame holds everything from the input tensor on: motion mask, reduce_mask, fringe, layers.
        """
        report, at = self.report, self.report.frames
        if at < 2:
            self.told("running")
        x = self._input(frame)
        output, ms = self._timed(lambda: self.masked(x))
        active = (self.masked.active.block_map[0] >= 0).cpu().numpy()
        dense_ms, checks = [], []
        if at % DENSE_EVERY == 0:
            given = self._dense.prepare(x)
            dense_ms.append(self._timed(lambda: self._dense.run(given))[1])
        if at == 1 or at % CHECK_EVERY == 0:
            self.told("checking a frame in float64")
            checks.append(compare(output, self.net, x, self.masked.active))
            self.told("running")
        # all of a frame or nothing of it: what ran out of memory is not in the report
        report.masked_ms.append(ms)
        report.densities.append(float(active.mean()))
        report.dense_ms += dense_ms
        report.checks += checks
        return output, active
