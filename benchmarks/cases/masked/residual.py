"""Bottleneck blocks (1x1, 3x3, 1x1, shortcut) at SBNet's sizes and at ResNet-50's, against dense cuDNN.

SBNet's figures are for the block alone, lists of active blocks at hand; "mask and layers" starts at the pixel mask.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch

from sbnet.benchmarks.harness import masks, planned
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, short
from sbnet.engine import sparsify
from sbnet.nn import SparseBottleneck

SIZES = [(400, 704), (200, 352), (100, 176), (50, 88)]
SBNET: list[tuple[int, float | None]] = [
    (96, 8.22),
    (192, 6.27),
    (256, 3.73),
    (384, 1.64),
]  # channels, the paper's speed-up over dense at 90 %
RESNET = (256, 512, 1024, 2048)
SPARSITIES = (0.0, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
OTHER_MASKS: list[tuple[str, float | None]] = [("random", 0.9), ("motion", None), ("LiDAR", None)]


def cases(setting: Setting) -> Iterator[Case]:
    networks: dict[str, list[tuple[int, float | None]]] = {"SBNet": SBNET, "ResNet-50": [(c, None) for c in RESNET]}
    sizes = setting.pick([(20, 36)], SIZES[1:2], SIZES)
    batches = (1, 8) if setting.cuda and setting.level == "full" else (1,)
    for network, channels in networks.items():
        at = setting.pick([0], [1], [0, 1, 2, 3])
        for (c, paper), size in zip([channels[k] for k in at], sizes, strict=True):
            if not setting.cuda and c > 512:
                continue
            for batch in batches:
                swept = SPARSITIES if network == "SBNet" and batch == 1 else (0.0, 0.9)
                rectangles = [("top-left", sparsity) for sparsity in setting.pick((0.9,), (0.9,), swept)]
                others = OTHER_MASKS if network == "SBNet" and batch == 1 else []
                for mask, sparsity in rectangles + setting.pick(OTHER_MASKS[:1], [], others):
                    facts = {"of": network, "size": [batch, *size], "channels": c, "dtype": short(setting.dtype)}
                    facts |= {"mask": mask} | ({} if sparsity is None else {"sparsity": sparsity})
                    made = partial(work, setting, (batch, c, *size), mask, round(1 - (sparsity or 0), 4))
                    known = paper if (mask, sparsity, batch) == ("top-left", 0.9, 1) else None
                    name = "residual block" + (", real masks" if sparsity is None else "")
                    yield Case(name, "block", facts, made, known)


def block_size(size: tuple[int, int]) -> int:
    """Small maps in small blocks: they would be few, reach over the plane, and a corner of the mask would fill one."""
    return 16 if min(size) >= 200 else 8


def work(setting: Setting, shape: tuple[int, int, int, int], kind: str, density: float) -> Work:
    batch, channels, *size = shape
    device, dtype, block = setting.device, setting.dtype, block_size((size[0], size[1]))
    net = SparseBottleneck(channels, channels // 4).eval()
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):  # of a normalisation
            parameter.data.uniform_(-0.5, 0.5)
    net = net.to(device, dtype)
    x = torch.rand(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    mask = masks.pixels(kind, (batch, size[0], size[1]), density, device, block)
    run = sparsify(copy.deepcopy(net).requires_grad_(False), x, block=block)
    lists = run.lists(mask)
    flops, size_bytes = planned.flops_and_bytes(run, lists)
    sides = {
        "masked": Side(lambda: run.layers(x, lists=lists), "ours"),
        "mask and layers": Side(lambda: run.body(x, mask=mask), "indexed"),
        **planned.dense_sides(run, x, setting),
    }
    notes = {"density": planned.densities(lists)[0], "blocks": int(lists.active[0].count), "block size": block}
    return Work(sides, planned.contract(net, x, mask, run.planes), flops, size_bytes, dtype, notes)
