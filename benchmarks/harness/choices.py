"""What choosing kernels by measurement would gain: of each convolution of the tables' networks, every kernel that takes
it against the one that the select table gives it to; and whole calls without what fuses layers.

python -P -m sbnet.benchmarks.harness.choices [--device cuda] [--mask 0.1] [-o choices.jsonl] [network ...]

A mask is a number, a rectangle of that share of the frame, or one of `masks.pixels`, as walkers. Layers run on what the
network's layers before them gave, on its lists of blocks, and are checked against PyTorch. A line of JSON a network and
mask: its layers of which another kernel is faster by more than 5 %, and what the network would gain by these. Times are
the least of all rounds, in which the kernels take turns; what seems faster is timed twice more.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sbnet
from sbnet import reference
from sbnet.benchmarks.harness import masks, nets
from sbnet.benchmarks.harness.measure import made_by
from sbnet.benchmarks.harness.registry import Side, WrongResult, close
from sbnet.benchmarks.harness.timing import Timer
from sbnet.engine.executor import Executor
from sbnet.graph.ir import Node, Value
from sbnet.select import beginning_at, conv2d_kernel

GAIN = 1.05  # less is noise, or not worth a choice
HOPELESS = 2.0  # times the fastest at first sight: not timed again
MASKS = "0.1", "1"

Form = Callable[[], contextlib.AbstractContextManager[Any]]


def facts_of(node: Node, x: Tensor, block: tuple[int, int]) -> dict[str, Any]:
    """A layer as `conv2d_kernel` takes it."""
    o, (filters, _, *kernel) = node.options, node.params["weight"].shape
    return {
        "shape": tuple(x.shape), "out_channels": filters, "kernel_size": tuple(kernel), "block": block,
        "stride": o["stride"], "padding": o["padding"], "dilation": o["dilation"], "groups": o["groups"],
        "dtype": x.dtype, "residual": "residual" in node.params, "slope": "slope" in node.params,
    }  # fmt: skip


def words(facts: dict[str, Any], activation: str | None) -> str:
    _, c, h, w = facts["shape"]
    (r, s), (stride, _), (dilation, _), (block, _) = (facts[k] for k in ("kernel_size", "stride", "dilation", "block"))
    said = f"conv {r}x{s} {c}->{facts['out_channels']} {h}x{w} block {block} stride {stride} dilation {dilation}"
    return f"{said} groups {facts['groups']} {activation or ''}{' residual' if facts['residual'] else ''}".strip()


def kernels_of(facts: dict[str, Any], device: str) -> dict[str, int]:
    """{name: the row at which the table's search finds it} of the kernels that take a layer, the chosen one first."""
    found: dict[str, int] = {}
    with contextlib.suppress(IndexError):
        for row in range(100):
            with beginning_at(row, device):
                found.setdefault(conv2d_kernel(**facts, device=device).kernel, row)
    return found


class Layers:
    """Measures the convolutions of an executor while it runs, each distinct one once.

    Attributes:
        rows: what is known of each distinct layer.
    """

    def __init__(self, executor: Executor, device: str, rounds: int) -> None:
        self.executor, self.device, self.plain = executor, device, executor.step
        self.timer = Timer(device, rounds=rounds)
        self.rows: dict[Any, dict[str, Any]] = {}

    def __call__(self, inputs: list[Tensor], mask: Tensor) -> list[dict[str, Any]]:
        executor = self.executor
        lists = executor.lists_of(mask)
        with mock.patch.multiple(executor, create=True, step=self.step, _streams=None):
            executor.layers(inputs, lists)
        return list(self.rows.values())

    def step(self, node: Node, env: dict[Value, Any], get: Callable[[Value], Tensor], lists: Any) -> None:
        if node.kind == "conv" and node in self.executor._spots:
            self.measure(node, get, lists, functools.partial(self.plain, node, env, get, lists))
        self.plain(node, env, get, lists)

    def measure(self, node: Node, get: Callable[[Value], Tensor], lists: Any, run: Callable[[], None]) -> None:
        spot, x = self.executor._spots[node], get(node.args[0])
        active, out = lists.active[spot.blocks], spot.out
        facts, activation = facts_of(node, x, active.grid.bsize), node.options.get("activation")
        key = words(facts, activation), x.stride(), out.stride()
        if key in self.rows:
            self.rows[key]["times"] += 1
            return
        before = out.clone()  # perhaps the residual's memory
        exact, torchs = self.expected(node, x, get, active, torch.float64), self.expected(node, x, get, active, x.dtype)
        inside = active.pixel_mask(out.shape[2:])
        sides: dict[str, Callable[[], None]] = {}
        for name, row in kernels_of(facts, self.device).items():
            sides[name] = functools.partial(self.by, row, run)
            out.copy_(before)
            sides[name]()
            try:
                close(out, torchs, exact, inside)
            except WrongResult as error:
                raise WrongResult(f"{key[0]}, {name}: {error}") from None
        first = {name: self.glance(side) for name, side in sides.items()}
        hopeful = {name for name, us in first.items() if us < HOPELESS * min(first.values())} | {next(iter(sides))}
        timed = {name: Side(side) for name, side in sides.items() if name in hopeful}
        us = self.timer.least(timed)
        for _ in range(2):
            if us[next(iter(us))] > GAIN * min(us.values()):  # perhaps because of others on the machine
                us = {name: min(us[name], again) for name, again in self.timer.least(timed).items()}
        self.rows[key] = {"layer": key[0], "path": node.path, "times": 1, "chosen": next(iter(sides)), "us": us}
        out.copy_(before)

    def expected(
        self, node: Node, x: Tensor, get: Callable[[Value], Tensor], active: Any, dtype: torch.dtype
    ) -> Tensor:
        if x.is_cuda and dtype == torch.float64:
            dtype = torch.float32  # wide enough for what is 16 bits, and many times as fast
        o, bound = node.options, self.executor.context.conv(node)

        def to(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(dtype)

        residual = get(node.params["residual"]) if "residual" in node.params else None
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            return reference.sparse_conv2d(
                x.to(dtype), bound.weight.to(dtype), to(bound.bias), active, stride=o["stride"], padding=o["padding"],
                dilation=o["dilation"], groups=o["groups"], activation=o.get("activation"),
                negative_slope=o.get("negative_slope", 0.01), residual=to(residual), slope=to(bound.slope),
            )  # fmt: skip

    def by(self, row: int, run: Callable[[], None]) -> None:
        with beginning_at(row, self.device):
            run()

    def glance(self, run: Callable[[], None]) -> float:
        run()
        self.wait()
        begin = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - begin) * 1e6

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def layers_as_they_are(made: Any, device: Any) -> Any:
    return made


FORMS: dict[str, dict[str, Form]] = {
    "cuda": {
        "as planned": contextlib.nullcontext,
        "no bottleneck in one kernel": lambda: mock.patch("sbnet.graph.plan.fuse_bottlenecks", layers_as_they_are),
    },
    "cpu": {
        "as planned": contextlib.nullcontext,
        "no chains": lambda: mock.patch("sbnet.engine.executor.chains", return_value={}),
    },
}  # fmt: skip


def row(name: str, kind: str, device: str, rounds: int) -> dict[str, Any]:
    fit = 32 if name == "YOLOv8n-like" else 1
    height, width = (-(-side // fit) * fit for side in ((720, 1280) if device == "cuda" else (384, 640)))
    dtype = torch.float16 if device == "cuda" else torch.float32
    net = nets.build(name).to(device, dtype)
    x = torch.rand(1, 3, height, width, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    share = float(kind) if kind[0].isdigit() else None
    mask = masks.pixels(kind if share is None else "top-left", (1, height, width), share or 0.0, device)
    runs: dict[str, Any] = {}
    for form, changed in FORMS[device].items():
        if device == "cpu" or "resnet" in name.lower() or not runs:  # others have no bottlenecks
            with changed():
                runs[form] = sbnet.sparsify(net, x, masks=[mask])
    made = {form: (len(run.plan.graph.nodes), len(run.executor.chains)) for form, run in runs.items()}
    distinct = [form for k, form in enumerate(made) if made[form] not in list(made.values())[:k]]
    calls = {form: Side(functools.partial(runs[form], x, mask), clock="own") for form in distinct}
    gc.freeze()  # each capture collects garbage
    us = Timer(device, rounds=rounds).least(calls)
    found = Layers(runs["as planned"].executor, device, rounds)([x], mask)
    better = []
    for layer in found:
        fastest = min(layer["us"], key=layer["us"].__getitem__)
        if layer["us"][layer["chosen"]] > GAIN * layer["us"][fastest]:
            better.append(layer)
    gained = sum(of["times"] * (of["us"][of["chosen"]] - min(of["us"].values())) for of in better)
    convs = sum(of["times"] * of["us"][of["chosen"]] for of in found)
    return {
        "network": name, "mask": kind, "call us": us, "convolutions us": convs, "gained us": gained,
        "gained of the call": gained / us["as planned"], "distinct layers": len(found),
        "with several kernels": sum(len(of["us"]) > 1 for of in found), "better": better, **made_by(device == "cuda"),
    }  # fmt: skip


def told(row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{row['network']}, {row['mask']}: call {row['call us']['as planned']:.0f} us, "
        f"{row['distinct layers']} distinct convolutions, {row['with several kernels']} with several kernels; "
        f"choosing would gain {row['gained us']:.0f} us, {row['gained of the call']:.1%}"
    )
    for form, us in row["call us"].items():
        if form != "as planned":
            yield f"  {form}: {us:.0f} us"
    for layer in row["better"]:
        times = ", ".join(f"{name} {us:.1f}" for name, us in layer["us"].items())
        yield f"  {layer['times']} x {layer['layer']}: {times}"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--mask", action="append")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    for name in given.networks or (nets.ON_CUDA if given.device == "cuda" else nets.ON_CPU):
        for kind in given.mask or MASKS:
            found = row(name, kind, given.device, given.rounds)
            print("\n".join(told(found)), flush=True)
            if given.output:
                with given.output.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            gc.unfreeze()


if __name__ == "__main__":
    main()
