"""The kernels of a training step on a GPU, by what they take together: under masks, and of the dense step.

    python -m sbnet.benchmarks.floors.training_kernels resnet50 --shares 0.1 1

--by-layers: each layer computes its weight's gradient by itself. Kernels that were launched early wait for those before
them: their times add up to more than the step's.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import sbnet
from sbnet.benchmarks.cases.training import pretraining, steps
from sbnet.benchmarks.harness.registry import Setting
from sbnet.benchmarks.harness.training import backward, one_graph, under
from sbnet.engine import eager_grads

REPLAYS = 5


def kernels(replay: Callable[[], Any]) -> tuple[Counter, Counter, float]:
    """Microseconds and launches by kernel, and the step's time in milliseconds."""
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    us: Counter = Counter()
    counts: Counter = Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us[event.name] += event.device_time
            counts[event.name] += 1
    return us, counts, begin.elapsed_time(end) / REPLAYS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("network", help="of `sbnet bench training`; or pretraining:NETWORK")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 1.0], help="of rectangles")
    parser.add_argument("--by-layers", action="store_true")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--width", type=int, default=110, help="of names")
    given = parser.parse_args()
    if given.by_layers:
        eager_grads.DEVICES.clear()
    setting = Setting("cuda", "full", compiled=False)
    losses: dict[str, Callable[[], torch.Tensor]] = {}
    if given.network.startswith("pretraining:"):
        net, modes, x, seen = pretraining.made(setting, given.network.split(":")[1], 8, 224)
        losses = {form: partial(pretraining.loss_of, net, mode, x, seen) for form, mode in modes.items()}
    else:
        batch, side = steps.ON_CUDA[given.network]
        net, x, _, _ = steps.dense_step(setting, given.network, batch, side)
        for share in given.shares:
            mask = steps.pixels("a rectangle each", batch, side, share, "cuda")
            mode = partial(sbnet.masked, mask, block=steps.BLOCK)
            losses[f"{share:.0%} of the pixels"] = partial(under, mode, steps.loss_of_net, net, x)
        losses["dense"] = partial(under, contextlib.nullcontext, steps.loss_of_net, net, x)
    for form, loss in losses.items():
        us, counts, took = kernels(one_graph(setting, partial(backward, net, loss, True)))
        print(f"{given.network}, {form}: {took:.2f} ms, {sum(counts.values())} kernels, {sum(us.values()):.0f} us")
        for name, total in us.most_common(given.top):
            print(f"{total:9.0f} {counts[name]:5d}  {name[: given.width]}")


if __name__ == "__main__":
    main()
