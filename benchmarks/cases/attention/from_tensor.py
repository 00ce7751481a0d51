"""A layout from a mask on the device, made at every step: beside a copy of the mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbnet import AttentionLayout
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, same

NAME = "AttentionLayout.from_tensor"
BITS = torch.arange(32, dtype=torch.int32)


def cases(setting: Setting) -> Iterator[Case]:
    for batch, heads, length in setting.pick(((1, 2, 1024),), ((1, 24, 65536),), ((1, 24, 65536), (4, 16, 8192))):
        facts = {"B": batch, "H": heads, "T": length, "block": 64}
        yield Case(NAME, "attention", facts, partial(work, setting, facts))


def work(setting: Setting, facts: dict[str, Any]) -> Work:
    side = facts["T"] // facts["block"]
    blocks = torch.rand(facts["B"], facts["H"], side, side, device=setting.device) < 0.25

    def words() -> tuple[Tensor, ...]:
        layout: Any = AttentionLayout.from_tensor(blocks, facts["block"])
        return layout.rows, layout.columns

    def check(name: str, got: Any) -> float:
        if name != NAME:
            return same(got, blocks)
        rows, columns = ((t[..., None] >> BITS.to(t.device) & 1).bool().flatten(-2)[..., :side] for t in got)
        return max(same(rows, blocks), same(columns, blocks.transpose(-1, -2)))

    copied = torch.empty_like(blocks)
    sides = {NAME: Side(words, "ours"), "a copy": Side(lambda: copied.copy_(blocks))}
    return Work(sides, check, 0.0, blocks.numel() * 1.25, torch.float32)
