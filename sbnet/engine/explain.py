"""`sbnet.explain`: what of a network runs on active blocks, what dense, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.engine.profile import kind
from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.graph.cost import multiply_adds
from sbnet.graph.ir import Node
from sbnet.graph.kinds import kind_of

ADVICE = {
    "arrangement": "a view of the feature map",
    "global": "reads the whole plane; its input is kept clean for it",
    "exact": "exact: a token's result needs the keys and values of all others, and so all layers before it",
}
ATTENTION = {"scaled_dot_product_attention", "softmax", "_softmax"}
GLOBAL = {"adaptive_avg_pool2d", "mean", "adaptive_max_pool2d", "amax", "group_norm", "instance_norm", "flatten"}


@dataclass(frozen=True)
class Layer:
    """One node of a plan.

    Attributes:
        path: of the module that called it.
        kind: what it is: conv, max_pool, pixel, or the name of PyTorch's op.
        planned: does it run on active blocks?
        shape: of what it gives.
        multiply_adds: of a dense run.
        share: of all nodes' time at a full mask, measured.
        why: of a dense node.
        line: in the source.
    """

    path: str
    kind: str
    planned: bool
    shape: tuple[int, ...]
    multiply_adds: int
    share: float
    why: str
    line: str


ACTIVE = 0.1  # the share of the frame at which the gain is measured


class Explanation(list[Layer]):
    """Layers in order; printed as a table below a summary.

    Attributes:
        gain: by how much a call with 10 % of the frame active, a rectangle, is faster than one with all of it; both
            are sums over nodes timed one by one.
    """

    gain: float = 1.0

    @property
    def time_share(self) -> float:
        """Of the time at a full mask: what nodes on active blocks take."""
        return sum(layer.share for layer in self if layer.planned)

    @property
    def summary(self) -> str:
        """One line: the share of the time, the gain to expect, and of which nodes and multiply-adds."""
        count = sum(layer.planned for layer in self)
        return (
            f"{self.time_share:.1%} of the time at a full mask goes to nodes that run on active blocks; expect "
            f"{self.gain:.1f}x with {ACTIVE:.0%} of the frame active. They are {count} of {len(self)} nodes, with "
            f"{self.planned_share:.1%} of the convolutions' multiply-adds"
        )

    @property
    def planned_share(self) -> float:
        """Of the multiply-adds on planes: those that run on active blocks."""
        total = sum(layer.multiply_adds for layer in self)
        return sum(layer.multiply_adds for layer in self if layer.planned) / total if total else 1.0

    def __str__(self) -> str:
        width = max((len(layer.path) for layer in self), default=4)
        lines = [self.summary, ""]
        lines.append(f"{'module':<{width}}  {'op':<18} {'runs':<7} {'shape':<20} {'time':>6}  why, where")
        for layer in self:
            runs = "sparse" if layer.planned else "dense"
            shape = "x".join(map(str, layer.shape))
            why = "; ".join(filter(None, (layer.why, "" if layer.planned else layer.line)))
            lines.append(f"{layer.path:<{width}}  {layer.kind:<18} {runs:<7} {shape:<20} {layer.share:>6.1%}  {why}")
        return "\n".join(lines)


def explain(model: Any, example: Any = None, **options: Any) -> Explanation:
    """A table of a network's nodes: planned or dense, why, and each one's share of the time at a full mask, measured;
    above it how much of the time that is, and what a mask of 10 % makes of it.

    Args:
        model: as for `sparsify`, or a run that it returned.
        example, options: as for `sparsify`.

    >>> print(sbnet.explain(model, torch.rand(1, 3, 384, 640)))
    """
    run = model if isinstance(model, SparseRun) else sparsify(model, example, **options)
    x = run.example[0]
    full = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
    times = [ms for _, _, ms in run.profile(*run.example, full, calls=3)]
    total = sum(times) or 1.0
    found = Explanation()
    found.gain = total / (sum(ms for _, _, ms in run.profile(*run.example, _rectangle(full), calls=3)) or 1.0)
    for node, ms in zip(run.plan.graph.nodes, times, strict=True):
        if node.moves or node.kind == "slice":
            continue
        whole = kind_of(node).whole(node, x.device.type)
        planned = kind_of(node).planned and not whole
        found.append(
            Layer(
                node.path,
                kind(node),
                planned,
                node.output.shape,
                multiply_adds(node),
                ms / total,
                "" if planned else whole or _why(node, x.shape[0], run.plan.mode),
                node.line,
            )
        )
    return found


def _rectangle(full: Tensor) -> Tensor:
    """A mask of a rectangle in the middle, of the share ACTIVE."""
    mask = torch.zeros_like(full)
    height, width = (round(side * ACTIVE**0.5) for side in full.shape[1:])
    top, left = (full.shape[1] - height) // 2, (full.shape[2] - width) // 2
    mask[:, top : top + height, left : left + width] = True
    return mask


def _why(node: Node, batch: int, mode: str) -> str:
    if mode == "exact" and kind(node) in ATTENTION:
        return ADVICE["exact"]
    if node.output.size is None:
        shape = node.output.shape
        if len(shape) == 4 and shape[0] != batch and math.prod(shape[2:]) > 1:
            return "its batch holds more than the images: heads, views; it runs whole"
        return "no plane: a few numbers a sample" if not any(v.size for v in node.inputs()) else ADVICE["global"]
    if kind(node) in GLOBAL:
        return ADVICE["global"]
    return node.reason or "no op on active blocks yet"
