"""motion_mask_: a frame against a running background, against the same in PyTorch's ops."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness.masks import Size
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, short

NUMBERS = (0.08, 0.5, 0.15, 5)  # MotionMask's


def cases(setting: Setting) -> Iterator[Case]:
    sizes: list[Size] = setting.pick([(1, 40, 56)], [(1, 576, 768)], [(1, 576, 768), (1, 1080, 1920), (8, 576, 768)])
    for size in sizes:
        for dtype in setting.pick((torch.uint8,), (torch.uint8,), (torch.uint8, setting.dtype)):
            facts = {"size": list(size), "dtype": short(dtype)}
            yield Case("motion_mask_", "ops", facts, partial(motion, setting.device, size, dtype))


def motion(device: str, size: Size, dtype: torch.dtype) -> Work:
    n, height, width = size
    bytes_ = torch.randint(0, 256, (n, height, width, 3), device=device, dtype=torch.uint8).permute(0, 3, 1, 2)
    frame = bytes_ if dtype == torch.uint8 else (bytes_.float() / 255).to(dtype)
    start = sbnet.reference.motion_mask(frame, torch.zeros(size, device=device), *NUMBERS)[1]
    start += 0.2 * torch.rand_like(start) - 0.1
    own, theirs = start.clone(), start.clone()

    def in_torch() -> Tensor:
        mask, following = sbnet.reference.motion_mask(frame, theirs, *NUMBERS)
        theirs.copy_(following)
        return mask

    wanted, following = sbnet.reference.motion_mask(frame, start, *NUMBERS)

    def check(side: str, got: Tensor) -> float:
        """Of a call that found the first background, which the next one finds again. A pixel may lie at the threshold
        to within rounding."""
        background = own if side == "motion_mask_" else theirs
        error = float((background - following).abs().max())
        background.copy_(start)
        if float((got != wanted).float().mean()) > 1e-4:
            raise WrongResult("another mask than the reference's")
        if not error <= 1e-5:
            raise WrongResult("another background than the reference's")
        return 0.0

    sides = {
        "motion_mask_": Side(lambda: sbnet.motion_mask_(frame, own, *NUMBERS), "ours"),
        "PyTorch": Side(in_torch, "dense"),
    }
    # the frame once, the background in and out, the mask
    moved = frame.numel() * frame.element_size() + start.numel() * 9
    return Work(sides, check, bytes=float(moved))
