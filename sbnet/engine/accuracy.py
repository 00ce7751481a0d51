"""`sbnet.accuracy`: how far a masked result is from the dense one where it matters, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.engine.arguments import tapped
from sbnet.engine.sparsify import SparseRun
from sbnet.graph.capture import evaluating


@dataclass(frozen=True)
class Row:
    """Of one margin, means over frames.

    Attributes:
        margin: pixels by which masks were grown.
        error: rms difference from the dense network over the mask's pixels (of outputs without a plane: all), relative
            to the dense result's rms there.
        density: share of active blocks in the finest plane.
        ms: of a call.
    """

    margin: int
    error: float
    density: float
    ms: float

    def __str__(self) -> str:
        return f"margin {self.margin:>4}   error {self.error:>8.2%}   density {self.density:>7.2%}   {self.ms:>9.2f} ms"


class Table(list[Row]):
    """Rows, printed one a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@torch.no_grad()
def accuracy(
    run: SparseRun, model: nn.Module, frames: Sequence[Any], masks: Sequence[Tensor], margin: int | Sequence[int] = 0
) -> Table:
    """What each margin costs, and how far from the dense result it leaves the pixels of the mask.

    Args:
        run: of `sparsify`.
        model: the network, as it was given to `sparsify`.
        frames: inputs [N,C,H,W], or tuples of a network's several inputs, in order (a cached run sees them as a video).
        masks: [N,H,W] of each frame; of a run with a mask_source, where the result is judged.
        margin: pixels; or several margins.

    >>> print(sbnet.accuracy(run, model, frames, masks, margin=[0, 16, 32, 64]))
    """
    if len(frames) != len(masks) or not len(frames):
        raise ValueError(f"sbnet: accuracy: masks: expected {max(len(frames), 1)}, one a frame, got {len(masks)}")
    calls = [run._inputs_of(frame, "accuracy: frames") for frame in frames]
    given = [(*inputs, mask) if run.mask_source is None else inputs for inputs, mask in zip(calls, masks, strict=True)]
    with evaluating(model):
        dense = [pytree.tree_leaves(tapped(model, run.options["out"])(*inputs)) for inputs in calls]
    table = Table()
    for pixels in (margin,) if isinstance(margin, int) else margin:
        run.reset()
        run(*given[0], margin=pixels)  # plans, and warms up
        run.reset()
        wrong = right = spent = density = 0.0
        for (frame, *_), arguments, mask, wanted in zip(calls, given, masks, dense, strict=True):
            begin = _now(frame)
            found = pytree.tree_leaves(run(*arguments, margin=pixels))
            spent += _now(frame) - begin
            density += run.density
            for got, want in zip(found, wanted, strict=True):
                judged = inside(want, mask, frame)
                wrong += float(((got.double() - want.double()) * judged).square().sum())
                right += float((want.double() * judged).square().sum())
        count = len(frames)
        error = (wrong / right) ** 0.5 if right else 0.0
        table.append(Row(pixels, error, density / count, spent / count * 1e3))
    return table


def inside(output: Tensor, mask: Tensor, frame: Tensor) -> Tensor:
    """1 where an output is judged."""
    if output.dim() != 4 or output.shape[2] * output.shape[3] == 1:
        return torch.ones((), device=output.device)
    mask = mask.reshape(-1, 1, *frame.shape[2:]).float()
    return (F.adaptive_max_pool2d(mask, output.shape[2:]) > 0).double().to(output.device)


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
