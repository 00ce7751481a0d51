"""What the active blocks of a mask hold of a network's work on a CPU, plane by plane, and how fast it could be at most.

SBNET_DATA=folder-of-vtest.avi python -P -m sbnet.benchmarks.floors.mask_shares [--mask walkers] [--tune] [network ...]

Of each plane: the share of pixels that the mask itself comes to there, that of pixels in active blocks, and the
milliseconds of its layers with every block active, in the blocks that suit that, and under the mask. Then what a call
would gain if each layer ran at the rate that it has with every block active, and if it took its share of the fastest
dense form's time, which the layers have by their multiply-adds or by the bytes of their feature maps. "From memory" is
after 64 MB of others. --tune: block sizes by `sbnet.tune`, too. Times are the least of many, for others may use the
machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import dense, masks, nets
from sbnet.benchmarks.harness.measure import made_by
from sbnet.benchmarks.harness.registry import Side
from sbnet.benchmarks.harness.timing import Timer
from sbnet.engine.recording import Recording
from sbnet.graph.cost import multiply_adds
from sbnet.graph.ir import Node

SIZE = (384, 640)


def bytes_of(node: Node) -> int:
    """Feature maps that a node reads and writes, dense, float32."""
    maps = [v for v in node.inputs() if v.plane is not None and not v.constant]
    return 4 * sum(math.prod(v.shape) for v in [*maps, *node.outputs])


def node_times(run: Any, x: Tensor, mask: Tensor, timer: Timer) -> dict[Node, float]:
    """Milliseconds of each node that calls repeat from a recording, by itself."""
    executor = run.executor
    lists, plain = executor.lists_of(mask), executor.step
    found: dict[Node, float] = {}

    def step(node: Node, *rest: Any) -> None:
        plain(node, *rest)
        if node in executor._lasting:
            recording = Recording()
            with recording.noting():
                plain(node, *rest)
            found[node] = timer.least({"": Side(recording)})[""] / 1e3

    executor.step = step
    try:
        executor.layers([x], lists)
    finally:
        del executor.step
    return found


def shares(run: Any, mask: Tensor) -> dict[int, tuple[float, float]]:
    """Of each plane: pixels of the mask brought to it, and pixels in active blocks, as shares."""
    active, found = run.executor.lists_of(mask).active, {}
    for k, (height, width, _) in enumerate(run.planes):
        brought = F.adaptive_max_pool2d(mask.float()[:, None], (height, width)) > 0
        found[k] = float(brought.float().mean()), float(active[k].pixel_mask((height, width)).float().mean())
    return found


def table(
    name: str, run: Any, whole_run: Any, x: Tensor, mask: Tensor, rounds: int, forms: dict[str, Any]
) -> dict[str, Any]:
    full, plan = torch.ones_like(mask), run.plan
    calls = {"masked": Side(functools.partial(run, x, mask)), "all": Side(functools.partial(whole_run, x, full))}
    calls |= {form: Side(functools.partial(one.run, one.prepare(x))) for form, one in forms.items()}
    timer, cold = Timer("cpu", rounds=rounds), Timer("cpu", rounds=3, repeat=4, cold=True)
    us = timer.least(calls)
    ms = {call: value / 1e3 for call, value in us.items()}
    part, of, others = node_times(run, x, mask, timer), shares(run, mask), node_times(whole_run, x, full, timer)
    same = zip(plan.graph.nodes, whole_run.plan.graph.nodes, strict=True)
    whole = {node: others[other] for node, other in same if other in others}
    planes: dict[int, Any] = defaultdict(lambda: {"products": 0, "bytes": 0, "all ms": 0.0, "masked ms": 0.0})
    products = size = 0.0
    at_all = sum(part[node] for node in part if node.output.size is None)
    for node in plan.graph.nodes:
        if node.output.size is None:
            continue
        k = plan.plane(node.output)
        row, share = planes[k], of[k][1]
        row["products"] += multiply_adds(node)
        row["bytes"] += bytes_of(node) if node in whole else 0
        row["all ms"] += whole.get(node, 0.0)
        row["masked ms"] += part.get(node, 0.0)
        at_all += share * whole.get(node, 0.0)
    for k, row in planes.items():
        row |= {"plane": plan.planes[k], "mask": of[k][0], "active": of[k][1]}
        products, size = products + row["products"] * of[k][1], size + row["bytes"] * of[k][1]
    fastest = min((ms[form] for form in forms), default=0.0)
    total = {key: sum(row[key] for row in planes.values()) for key in ("products", "bytes", "all ms", "masked ms")}
    return {
        "network": name, "blocks": [list(b) for *_, b in run.planes], "ms": ms,
        "planes": [planes[k] for k in sorted(planes)],
        "weights MB": 4e-6 * sum(p.numel() for p in run.model.parameters()), "planes in all": total,
        "nodes ms": sum(part.values()), "nodes from memory ms": sum(node_times(run, x, mask, cold).values()),
        "share of products": products / total["products"], "share of bytes": size / total["bytes"],
        "nodes at the rate of all ms": at_all, "x dense": fastest / ms["masked"],
        "x dense at the rate of all": fastest / (ms["masked"] - sum(part.values()) + at_all),
        "x dense by products": total["products"] / products, "x dense by bytes": total["bytes"] / size,
        **made_by(False),
    }  # fmt: skip


def told(row: dict[str, Any]) -> None:
    print(row["network"], *(f"{call} {ms:.2f} ms," for call, ms in row["ms"].items()))
    print("  plane, block: of the mask, active; Mproducts, MB dense; ms with every block, under the mask")
    for plane in row["planes"]:
        height, width, block = plane["plane"]
        print(
            f"  {height}x{width} {block[0]}: {plane['mask']:.1%} {plane['active']:.1%}; {plane['products'] / 1e6:.0f} "
            f"{plane['bytes'] / 1e6:.1f}; {plane['all ms']:.2f} {plane['masked ms']:.2f}"
        )
    keys = (
        "weights MB",
        "nodes ms",
        "nodes from memory ms",
        "nodes at the rate of all ms",
        "share of products",
        "share of bytes",
    )
    print("  " + ", ".join(f"{key} {row[key]:.3f}" for key in keys))
    print("  " + ", ".join(f"{key} {value:.2f}" for key, value in row.items() if key.startswith("x dense")), flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=["mobilenet_v2", "YOLOv8n-like"])
    parser.add_argument("--mask", default="walkers")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output")
    given = parser.parse_args()
    for name in given.networks:
        net, x = nets.build(name), torch.rand(1, 3, *SIZE).contiguous(memory_format=torch.channels_last)
        mask = masks.pixels(given.mask, (1, *SIZE), 0.1, "cpu")
        whole_run = sbnet.sparsify(net, x, masks=[torch.ones_like(mask)])
        runs = {name: sbnet.sparsify(net, x, masks=[mask])}
        if given.tune:
            tuning = sbnet.tune(runs[name], [x], [mask], rounds=2 * given.rounds)
            runs[f"{name}, tuned"] = sbnet.sparsify(net, x, block=tuning)
        forms = dense.forms(net, x)
        for title, run in runs.items():
            row = table(title, run, whole_run, x, mask, given.rounds, forms)
            told(row)
            if given.output:
                with open(given.output, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
