"""What a call of a network takes less where it leaves out all launches of one kind, whose results are then wrong: µs at
batch 1, a rectangle of a tenth of the pixels; float16 on a GPU.

python benchmarks/floors/left_out.py ["Swin-T" ...]
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.cases.network.whole import made
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.registry import Side
from sbnet.benchmarks.harness.timing import Timer
from sbnet.engine.compiled import Compiled
from sbnet.graph.ir import Node
from sbnet.graph.kinds import kind_of

CALL = "the call"


def kind(node: Node) -> str:
    if node.kind != "conv":
        return node.kind
    sides = "x".join(str(side) for side in node.params["weight"].shape[2:])
    return f"conv {sides}" + ", residual" * ("residual" in node.params)


def without(whole: Compiled, nodes: set[Node], x: Tensor, mask: Tensor) -> Callable[[], Any]:
    """A call of which these nodes launch nothing."""
    one = Compiled(whole.plan, whole.constants, whole.make_mask, whole.masked_calls, whole.allow_tf32)
    plain = one.executor.step

    def step(node: Node, *args: Any) -> None:
        if node not in nodes:
            plain(node, *args)

    one.executor.step = step  # type: ignore[method-assign, assignment]
    return functools.partial(one, [x], mask, 0)


def times(net: nn.Module, x: Tensor, mask: Tensor, timer: Timer) -> dict[str, float]:
    """Microseconds of the call, and of those without a kind and how many nodes are of it."""
    run = sbnet.sparsify(net, x)
    run(x, mask)
    whole, kinds = run._for((x,)), defaultdict(set)
    for node in whole.plan.graph.nodes:
        if kind_of(node).written and node.kind not in ("slice", "cat"):
            kinds[kind(node)].add(node)
    of = {CALL: set[Node](), **{f"{name} ({len(nodes)})": nodes for name, nodes in kinds.items()}}
    sides = {name: Side(without(whole, nodes, x, mask), clock="own") for name, nodes in of.items()}
    return {name: median for name, (median, _) in timer.medians(sides).items()}


def main() -> None:
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    for name in sys.argv[1:] or nets.TOKENS:
        side = nets.TOKENS.get(name, 640)
        net, mask = nets.build(name).to(device, dtype), made("rect", (1, side, side)).to(device)
        x = torch.rand(1, 3, side, side).to(device, dtype).contiguous(memory_format=torch.channels_last)
        took = times(net, x, mask, Timer(device))
        print(f"{name}: {took[CALL]:.1f}")
        for left_out, us in took.items():
            if left_out != CALL:
                print(f"  less without {left_out}: {took[CALL] - us:.1f}", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
