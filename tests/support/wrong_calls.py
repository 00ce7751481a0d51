"""Ops called with what nobody should pass: lists that name no block, sizes, dtypes and numbers of any kind.

`python -m support.wrong_calls seed rounds` prints each such call and makes it, on tensors beside pages that may not be
touched: an op runs, or raises. tests/contracts/test_guard_pages.py runs it."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from typing import Any

import torch
from tools.fuzz_ort import DTYPES, PAIRS, garbage, reshaped
from torch import Tensor

from support.guard_pages import each_tensor, guarded, run
from support.op_samples import sampled_ops, samples_of

# Not the largest int32, which sizes may be: that takes gigabytes and minutes.
INTS = [0, 1, -1, 2, 3, 7, 8, 64, 999, -(1 << 31), 1 << 33, 1 << 62, -(1 << 63)]
FLOATS = [0.0, float("nan"), float("inf"), 1e-30, -3.5]
NAMES = ["", "none", "relu", "silu", "prelu", "gelu", "bilinear", "max", "x" * 300]
# An op's own words; PyTorch's of a value that its schema does not take, of no tensors at all, and of memory.
CLEAR = r"sbnet::\w+: |sbnet::\w+\(\) |There were no tensor arguments|torch_call_dispatcher"


def changed(rng: random.Random, value: Any) -> Any:
    match value:
        case Tensor():
            return changed_tensor(rng, value)
        case bool():
            return not value
        case int():
            return rng.choice(INTS)
        case float():
            return rng.choice(FLOATS)
        case str():
            return rng.choice(NAMES)
        case [_, *_] | (_, *_):
            at = rng.randrange(len(value))
            one = [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
            return rng.choice([one, one, list(value[:-1]), [*value, value[-1]]])
        case [] | ():
            return rng.choice(PAIRS)
    return value


def changed_tensor(rng: random.Random, t: Tensor) -> Tensor:
    t = t.detach()
    match rng.randrange(6):
        case 0:
            return reshaped(rng, t)
        case 1:
            return t.to(rng.choice(DTYPES))
        case 2 if t.dim() > 1:
            return t.transpose(rng.randrange(t.dim()), rng.randrange(t.dim()))
        case 3 if t.dim():
            return t[..., ::2]
        case 4 if t.is_floating_point():
            return torch.full_like(t, rng.choice(FLOATS))
    return t.expand(2, *t.shape) if rng.random() < 0.2 else garbage(rng, t)


def wrong_call(rng: random.Random, op: str) -> list[Any]:
    arguments = list(rng.choice(samples_of(op)))
    if rng.random() < 0.4:
        arguments = each_tensor(arguments, lambda t: garbage(rng, t))
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(arguments))
        arguments[at] = changed(rng, arguments[at])
    return each_tensor(arguments, lambda t: guarded(t, rng.random() < 0.7))


def described(arguments: Any) -> Any:
    """Shapes in place of tensors, as text."""
    return [
        f"{a.dtype}{list(a.shape)}" if isinstance(a, Tensor) else described(a) if isinstance(a, (list, tuple)) else a
        for a in arguments
    ]


def main() -> None:
    """Prints each call; at the end "all", how many ran, and how many were refused."""
    torch.set_num_threads(1)
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    for op in sampled_ops():
        rng = random.Random(f"{op} {seed}")
        for number in range(rounds):
            arguments = wrong_call(rng, op)
            print(op, number, described(arguments), flush=True)
            try:
                run(getattr(torch.ops.sbnet, op), arguments, False)
            except Exception as error:
                if not re.match(CLEAR, str(error)):
                    raise
                counts["refused"] += 1
            else:
                counts["ran"] += 1
    print("all", counts["ran"], counts["refused"], flush=True)


if __name__ == "__main__":
    main()
