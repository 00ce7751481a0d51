"""Networks of other people's, through `sbnet.sparsify`, against their fastest dense form.

A masked call starts at frame and pixel mask. On a CPU the dense forms are PyTorch channels_last, torch.compile, ONNX
Runtime and OpenVINO; on CUDA, PyTorch in one CUDA graph and torch.compile.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sbnet
from sbnet.benchmarks.harness import dense, masks, nets
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, close, short
from sbnet.benchmarks.harness.timing import host_time
from sbnet.graph.oracle import PlaneMasks, masked_oracle

# Recorded masks have a density of their own.
MASKS: list[tuple[str, float | None]] = [("top-left", 0.1), ("walkers", None), ("all", 1.0)]
CORNER = ("top-left", 0.0001)  # a block or two of each plane: how long launches wait for one another


def cases(setting: Setting) -> Iterator[Case]:
    size = setting.pick((64, 64), (192, 320), (720, 1280) if setting.cuda else (384, 640))
    for name in setting.pick(
        ("YOLOv8n-like",), ("mobilenet_v2", "U-Net"), nets.ON_CUDA if setting.cuda else nets.ON_CPU
    ):
        fit = 32 if name == "YOLOv8n-like" else 1  # what its frames' sides are multiples of
        height, width = (-(-side // fit) * fit for side in size)
        for kind, density in setting.pick(MASKS[:1], MASKS[:1], [*MASKS, CORNER] if setting.cuda else MASKS):
            facts: dict[str, Any] = {"network": name, "size": [height, width], "dtype": short(setting.dtype)}
            facts |= {"mask": kind} | ({} if density is None else {"wanted density": density})
            make = partial(work, setting, name, (height, width), kind, density or 0.0)
            yield Case("sparsified network", "network", facts, make)


def work(setting: Setting, name: str, size: tuple[int, int], kind: str, density: float) -> Work:
    device, dtype = setting.device, setting.dtype
    net = nets.build(name).to(device, dtype)
    x = torch.rand(1, 3, *size, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    mask = masks.pixels("top-left" if kind == "all" else kind, (1, *size), density, device)
    begin = time.perf_counter()
    run = sbnet.sparsify(net, x, masks=[mask])
    converted = time.perf_counter() - begin
    run(x, mask)
    blocks = {plane[:2]: plane[2] for plane in run.planes}
    notes = {"density": run.density, "blocks": [plane[2][0] for plane in run.planes], "conversion s": converted}
    if setting.cuda:
        notes["host us"] = host_time(lambda: run(x, mask), in_a_row=20)
    sides = {"masked": Side(lambda: run(x, mask), "ours", "own"), **_dense(setting, net, x)}

    def check(side: str, got: Any) -> float:
        if side != "masked":
            with torch.no_grad():
                return _close(got, net(x), copy.deepcopy(net).double()(x.double()))
        of = PlaneMasks(mask, blocks)
        exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], of)
        return _close(got, masked_oracle(net, [x], of), exact)

    return Work(sides, check, dtype=dtype, notes=notes)


def _close(*results: Any) -> float:
    """The largest error of a result's tensors."""
    return max(close(*tensors) for tensors in zip(*map(tree_leaves, results), strict=True))


def _dense(setting: Setting, net: nn.Module, x: Tensor) -> dict[str, Side]:
    compiles = setting.compiled and setting.level == "full"
    if not setting.cuda and setting.level != "tiny":
        found = dense.forms(net, x, compiles)
        return {name: Side(partial(form.run, form.prepare(x)), "dense", "own") for name, form in found.items()}
    own = copy.deepcopy(net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sides = {"PyTorch": Side(torch.no_grad()(lambda: own(x)))}
    if compiles:
        compiled = torch.compile(own)  # convolutions by cuDNN's benchmark; max-autotune takes minutes a network
        sides["torch.compile"] = Side(torch.no_grad()(lambda: compiled(x)))
    return sides
