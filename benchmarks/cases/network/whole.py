"""Whole networks at batch 1 and 16, frame and pixel mask in, against the fastest dense form of the same network.

640x640, transformers in sizes of their own at batch 1 and 8; on a CPU batch 1 alone, of README's five. Every image has
a mask of its own: "rect" is one rectangle of a tenth of the pixels, "blobs" are ten ellipses that hold 4 % of them
together, "half" a rectangle of half of them, "all" is every pixel. A masked call is given the frame and makes
the mask's lists. Dense forms: PyTorch channels_last in one CUDA graph, and torch.compile, of SAM with its relative
positions as buffers (`harness/held_positions.py`); on a CPU those of `harness/dense.py` but for torch.compile.
Results are checked on the first and the last image of a batch: dense forms and a run with every pixel against the
network in float64 (in halves they may err as much as its run with batch norms in the weights does), masked runs against
the oracle, those of windows it does not follow against the same plan on a CPU.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.utils._pytree import tree_leaves, tree_map

import sbnet
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.dense import forms
from sbnet.benchmarks.harness.held_positions import with_held_positions
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, close, short
from sbnet.graph.oracle import PlaneMasks, masked_oracle

MASKS = ("rect", "blobs", "half", "all")
CHECKED = 2  # images of a batch, its first and its last
ON_CPU = "Swin-T", "SAM ViT-B"  # whose windows the oracle loses the mask in


def cases(setting: Setting) -> Iterator[Case]:
    every = (*nets.WHOLE, *nets.HELD_OUT, *nets.TOKENS) if setting.cuda else (*nets.WHOLE, next(iter(nets.TOKENS)))
    names = setting.pick(nets.WHOLE[:1], nets.WHOLE[:1], every)
    for name in names:
        side = nets.TOKENS.get(name, setting.pick(64, 320, 640))
        batches = (1, 8) if name in nets.TOKENS else (1, 16)
        for batch in setting.pick((2,), (1,), batches if setting.cuda else (1,)):
            for kind in setting.pick(MASKS[1:2], MASKS, MASKS):
                facts = {"network": name, "size": [batch, side, side], "dtype": short(setting.dtype), "mask": kind}
                make = functools.partial(work, setting, name, batch, side, kind)
                yield Case("whole network", "networks", facts, make)


def rectangles(size: tuple[int, int, int], share: float, generator: torch.Generator) -> Tensor:
    """[N,H,W] bool: a rectangle of this share of the pixels in each image, of sides up to 1:2."""
    _, h, w = size
    mask = torch.zeros(size, dtype=torch.bool)
    for image in mask:
        ratio = 2 ** (2 * torch.rand(1, generator=generator).item() - 1)
        height, width = round(h * math.sqrt(share * ratio)), round(w * math.sqrt(share / ratio))
        top, left = (int(torch.randint(room + 1, (1,), generator=generator)) for room in (h - height, w - width))
        image[top : top + height, left : left + width] = True
    return mask


def blobs(size: tuple[int, int, int], share: float, generator: torch.Generator, count: int = 10) -> Tensor:
    """[N,H,W] bool: ellipses that hold this share of each image together, where none overlap."""
    _, h, w = size
    row, column = torch.arange(h)[:, None], torch.arange(w)[None]
    mask = torch.zeros(size, dtype=torch.bool)
    for image in mask:
        for _ in range(count):
            y, x, stretch = torch.rand(3, generator=generator).tolist()
            area, ratio = share * h * w / count, 2 ** (2 * stretch - 1)
            a, b = math.sqrt(area * ratio / math.pi), math.sqrt(area / ratio / math.pi)
            image |= ((row - y * h) / a) ** 2 + ((column - x * w) / b) ** 2 <= 1
    return mask


def made(kind: str, size: tuple[int, int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "all":
        return torch.ones(size, dtype=torch.bool)
    if kind == "blobs":
        return blobs(size, 0.04, generator)
    return rectangles(size, 0.5 if kind == "half" else 0.1, generator)


@functools.lru_cache(maxsize=1)  # the three masks of a network and batch share what took long to make
def _network(
    setting: Setting, name: str, batch: int, side: int
) -> tuple[nn.Module, Tensor, Any, dict[str, Side], tuple[Any, Any, Callable[[], Any]]]:
    net = nets.build(name).to(setting.device, setting.dtype)
    x = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(2)).to(setting.device, setting.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    own = with_held_positions(copy.deepcopy(net).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    sides = {"PyTorch": Side(torch.no_grad()(lambda: own(x)), clock="graph")}
    if not setting.cuda and setting.level == "full":
        for form_name, form in forms(net, x).items():
            sides[form_name] = Side(functools.partial(form.run, form.prepare(x)))
    elif setting.compiled and setting.level == "full":
        torch.compiler.reset()
        compiled = torch.compile(own)
        sides["torch.compile"] = Side(torch.no_grad()(lambda: compiled(x)), clock="graph")
    few = x[_checked(batch)]
    with torch.no_grad(), torch.backends.cudnn.flags(benchmark=False):
        dense = net(few), copy.deepcopy(net).double()(few.double()), functools.partial(_folded, net, few)
    return net, x, sbnet.sparsify(net, x), sides, dense


def _checked(batch: int) -> list[int]:
    return sorted({0, batch - 1})[:CHECKED]


def work(setting: Setting, name: str, batch: int, side: int, kind: str) -> Work:
    net, x, run, sides, dense = _network(setting, name, batch, side)
    mask = made(kind, (batch, side, side)).to(setting.device)
    run(x, mask)
    blocks = {plane[:2]: plane[2] for plane in run.planes}
    some = _checked(batch)
    few, masks = x[some], mask[some]
    notes: dict[str, Any] = {"density": run.density, "blocks": [plane[2][0] for plane in run.planes]}
    if setting.cuda:
        parts = run.profile(x, mask, calls=1, fused=True)
        total = sum(part.us for part in parts)
        notes["launches"], notes["sum us"] = sum(len(part.kernels) for part in parts), total
        notes["floors us"] = sum(part.floor_us for part in parts)
        notes["share above twice its floor"] = sum(p.us for p in parts if p.us > 2 * p.floor_us) / total

    def check(which: str, got: Any) -> float:
        got = tree_map(lambda t: t[some], got)
        if which != "masked" or kind == "all":
            own, exact, folded = dense
            try:
                return _close(got, own, exact)
            except WrongResult:
                if x.dtype.itemsize > 2:
                    raise
                return _close(got, folded(), exact)
        of = PlaneMasks(masks, blocks)
        if hasattr(net, "_pos_embed"):  # the oracle does not follow a class token
            return _close(got, *(_of_tokens(f, few, of) for f in (net, copy.deepcopy(net).double())))
        if name in ON_CPU:  # beside PyTorch's own error, that of the dense network
            there = sbnet.sparsify(copy.deepcopy(net).cpu().float(), few.cpu().float(), block=blocks)
            exact = there(few.cpu().float(), masks.cpu()).to(setting.device, torch.float64)
            own = torch.where(exact != 0, dense[0].double() - dense[1], 0)
            return _close(got, exact + own, exact)
        with torch.backends.cudnn.flags(benchmark=False):
            exact = masked_oracle(copy.deepcopy(net).double(), [few.double()], of)
            return _close(got, masked_oracle(net, [few], of), exact)

    return Work({"masked": Side(lambda: run(x, mask), "ours", "own"), **sides}, check, dtype=setting.dtype, notes=notes)


@torch.no_grad()
def _folded(net: nn.Module, x: Tensor) -> Any:
    """The dense network with its batch norms in the convolutions' weights, as `sparsify` has them. In halves that
    rounds weights once more, which means over whole planes show (hrnet_w18's outputs)."""
    return fuse(copy.deepcopy(net).double()).to(x.dtype)(x)


def _of_tokens(net: Any, x: Tensor, of: PlaneMasks) -> Tensor:
    """timm's VisionTransformer, run on the active tokens of each image alone; zeros for the others."""
    x, found = x.to(next(net.parameters()).dtype), []
    with torch.no_grad():
        tokens = net.norm_pre(net._pos_embed(net.patch_embed(x)))
        keep = of(net.patch_embed.grid_size).flatten(1)
        keep = torch.nn.functional.pad(keep, (tokens.shape[1] - keep.shape[1], 0), value=True)
        for image, some in zip(tokens, keep, strict=True):
            made = torch.zeros_like(image)
            made[some] = net.norm(net.blocks(image[some][None]))[0]
            found.append(made)
    return torch.stack(found)


def _close(*results: Any) -> float:
    """The largest error of a result's tensors."""
    return max(close(*tensors) for tensors in zip(*map(tree_leaves, results), strict=True))
