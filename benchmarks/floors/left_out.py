"""What a call of a network takes less where it leaves out all launches of one kind, whose results are then wrong: µs of
CUDA graphs at batch 1, float16, a rectangle of a tenth of the pixels.

python benchmarks/floors/left_out.py ["Swin-T" ...]
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

import torch

import sbnet
from sbnet.benchmarks.cases.network.whole import made
from sbnet.benchmarks.harness import nets
from sbnet.engine.compiled import Compiled
from sbnet.graph.ir import Node
from sbnet.graph.kinds import kind_of


def timed(graph: torch.cuda.CUDAGraph, rounds: int = 30) -> float:
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def kind(node: Node) -> str:
    if node.kind != "conv":
        return node.kind
    sides = "x".join(str(side) for side in node.params["weight"].shape[2:])
    return f"conv {sides}" + ", residual" * ("residual" in node.params)


def without(whole: Compiled, nodes: set[Node], given: list[Any]) -> float:
    """A call's time if these nodes launch nothing."""
    one = Compiled(whole.plan, whole.constants, whole.make_mask, whole.masked_calls, whole.allow_tf32)
    plain = one.executor.step

    def step(node: Node, *args: Any) -> None:
        if node not in nodes:
            plain(node, *args)

    one.executor.step = step  # type: ignore[method-assign, assignment]
    one.fill(given)
    captured = one.prepare(0)
    assert captured is not None
    return timed(captured.graph)


def main() -> None:
    for name in sys.argv[1:] or nets.TOKENS:
        side = nets.TOKENS.get(name, 640)
        net, mask = nets.build(name).to("cuda", torch.float16), made("rect", (1, side, side)).cuda()
        x = torch.rand(1, 3, side, side, device="cuda").half().contiguous(memory_format=torch.channels_last)
        run = sbnet.sparsify(net, x)
        run(x, mask)
        whole = run._for((x,))
        kinds = defaultdict(set)
        for node in whole.plan.graph.nodes:
            if kind_of(node).written and node.kind not in ("slice", "cat"):
                kinds[kind(node)].add(node)
        call = without(whole, set(), [x, mask])
        print(f"{name}: {call:.1f}")
        for left_out, nodes in kinds.items():
            print(
                f"  less without {left_out} ({len(nodes)}): {call - without(whole, nodes, [x, mask]):.1f}", flush=True
            )


if __name__ == "__main__":
    with torch.no_grad():
        main()
