"""Layers of networks that users run, with the kernels of every GPU (SBNET_GPU=portable): run it with one build and the
other, in turn. Bias, SiLU and fringe, in float16 or, with --int8, from int8 to int8; every result is checked.

    SBNET_GPU=portable python benchmarks/floors/portable_layers.py [--int8] [--only 0 5]
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.registry import Side, WrongResult, close
from sbnet.benchmarks.harness.timing import Timer

SCALE = 0.05  # of the bytes of x and y


class Case(NamedTuple):
    shape: tuple[int, int, int, int]  # N, H, W, C of the input
    filters: int
    kernel: int = 3
    stride: int = 1
    block: int = 8
    residual: bool = False
    activation: str = "silu"


CASES = [  # a YOLO's at 640x640, then those of the tables
    Case((16, 160, 160, 32), 32, block=16),
    Case((16, 160, 160, 32), 32, block=16, residual=True),
    Case((16, 320, 320, 32), 64, stride=2, block=16),
    Case((16, 160, 160, 64), 128, stride=2),
    Case((16, 80, 80, 128), 256, stride=2),
    Case((16, 40, 40, 256), 512, stride=2),
    Case((16, 80, 80, 64), 64),
    Case((16, 40, 40, 128), 128),
    Case((16, 20, 20, 256), 256),
    Case((16, 160, 160, 64), 64, kernel=1, block=16),
    Case((16, 80, 80, 256), 128, kernel=1),
    Case((8, 128, 128, 256), 256, block=16, activation="relu"),
    Case((1, 400, 704, 64), 64, block=16, activation="relu"),
    Case((1, 200, 352, 128), 128, block=16, activation="relu"),
    Case((1, 400, 704, 256), 256, kernel=1, block=16, activation="relu"),
]


def sides_of(case: Case, int8: bool) -> dict[str, Side]:
    """The layer with all blocks, a quarter and a tenth of them, whose results are checked."""
    n, h, w, c = case.shape
    size = tuple((s - 1) // case.stride + 1 for s in (h, w))
    torch.manual_seed(0)
    last = torch.channels_last
    x = torch.randn(n, c, h, w, device="cuda").half().contiguous(memory_format=last)
    weight = torch.randn(case.filters, c, case.kernel, case.kernel, device="cuda") / (c * case.kernel**2) ** 0.5
    bias = torch.randn(case.filters, device="cuda")
    added = torch.randn(n, case.filters, *size, device="cuda").half().contiguous(memory_format=last)
    step = weight.abs().amax((1, 2, 3)) / 127
    window: dict[str, Any] = {"stride": case.stride, "padding": case.kernel // 2}
    if int8:
        x, added = ((t.float() / SCALE).round().clamp(-128, 127).to(torch.int8) for t in (x, added))
        weight = (weight / step[:, None, None, None]).round().to(torch.int8)
    else:
        weight = weight.half()
    weight, out = weight.contiguous(memory_format=last), torch.empty_like(added)
    packed = sbnet.pack_conv_weight(weight)
    act = getattr(F, case.activation)

    def dense(dtype: torch.dtype) -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            y = F.conv2d(x.to(dtype), weight.to(dtype), None if int8 else bias.to(dtype), **window)
        if int8:
            y = y * (step * SCALE)[:, None, None] + bias[:, None, None]
        y = act(y)
        if case.residual:
            y = y + added.to(dtype) * (SCALE if int8 else 1)
        return (y / SCALE).round().clamp(-128, 127) if int8 else y

    exact = dense(torch.float32)
    own = None if int8 else dense(torch.float16)
    sides = {}
    for density in (1.0, 0.25, 0.1):
        mask = masks.pixels("random", (n, *size), density, "cuda", case.block)
        active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover(size, case.block))
        more: dict[str, Any] = {"fringe": sbnet.fringe(active, active, size, 3, 1, 1), "residual_after": True, **window}
        more |= {"activation": case.activation, "residual": added if case.residual else None, "packed": packed}
        if int8:
            more |= {"out_scale": SCALE, "residual_scale": SCALE}
            call = functools.partial(sbnet.sparse_conv2d_quantized_, x, weight, step * SCALE, bias, active, out, **more)
        else:
            call = functools.partial(sbnet.sparse_conv2d_, x, weight, bias.half(), active, out, **more)
        out.fill_(77 if int8 else float("nan"))
        call()
        inside = active.pixel_mask(size)
        if int8:
            apart = torch.where(inside, out.float() - exact, 0).abs()
            if float(apart.max()) > 1 or float((apart > 0).float().mean()) > 1e-3:
                raise WrongResult(f"int8 results are up to {float(apart.max())} steps off")
        else:
            close(out, own, exact, inside)
        sides[str(density)] = Side(call, "ours")
    return sides


def main() -> None:
    """Prints one line of JSON a layer, its times in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CASES)), help="numbers of cases")
    parser.add_argument("--int8", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **sbnet.build_info()}))
    timer = Timer("cuda", rounds=5, repeat=4)
    with torch.no_grad():
        for number in chosen.only:
            case = CASES[number]
            try:
                sides = sides_of(case, chosen.int8)
                us = {name: round(median, 2) for name, (median, _) in timer.medians(sides).items()}
                print(json.dumps({"case": number, **case._asdict(), "int8": chosen.int8, "us": us}), flush=True)
            except WrongResult as error:
                print(json.dumps({"case": number, **case._asdict(), "int8": chosen.int8, "wrong": str(error)}))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
