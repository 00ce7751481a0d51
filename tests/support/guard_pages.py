"""Tensors that end, or begin, at a page that may not be touched, and every op's samples on such tensors.

`python -m support.guard_pages end|start [calls to leave out]` names each call before it makes it: an access out of
bounds ends the process, and the last name is the call's. tests/contracts/test_guard_pages.py runs it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sbnet import BlockGrid, conv_output_size, conv_transpose_output_size
from support.helpers import laid_out, random_active, tensor
from support.op_samples import op_samples

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
OPS = torch.ops.sbnet
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def guarded(t: Tensor, at_end: bool) -> Tensor:
    """A copy of t, of the same strides, whose memory ends (or begins) at a page that may not be touched."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    bytes_ = (last + 1) * t.element_size() if t.numel() else 0
    pages = max(1, -(-bytes_ // PAGE))
    area = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for page in (0, pages + 1):
        if LIBC.mprotect(ctypes.c_void_p(start + page * PAGE), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    at = PAGE + (pages * PAGE - bytes_ if at_end else 0)
    whole = torch.frombuffer(area, dtype=t.dtype, offset=at, count=((pages + 2) * PAGE - at) // t.element_size())
    if t.numel():
        whole[: last + 1].copy_(t.detach().as_strided((last + 1,), (1,)))
    return torch.as_strided(whole, t.shape, t.stride()).requires_grad_(t.requires_grad)


def on_guarded(arguments: Any, at_end: bool) -> list[Any]:
    return [guarded(a, at_end) if isinstance(a, Tensor) else a for a in arguments]


def in_dtype(arguments: Any, dtype: torch.dtype) -> list[Any]:
    return [a.to(dtype) if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in arguments]


def drawn_convs(draws: int) -> Iterator[tuple[str, list[Any]]]:
    """Convolutions and transposed ones of random geometry: kernels smaller than strides and dilations, output padding,
    channels of every kernel's taste, all layouts."""
    rng = random.Random(0)
    layouts = ("channels_last", "channels_last", "contiguous", "odd_channel_slice", "permuted")

    def pair(low: int, high: int) -> list[int]:
        return [rng.randint(low, high), rng.randint(low, high)]

    for k in range(draws):
        groups = rng.choice([1, 1, 1, 2, 8])
        channels, filters = (groups * rng.choice([1, 2, 3, 4, 8, 12, 16, 20, 33, 64]) for _ in range(2))
        kernel, stride, dilation, dtype = pair(1, 4), pair(1, 3), pair(1, 3), rng.choice((DTYPES[0], *DTYPES))
        if rng.random() < 0.3:
            groups, filters = channels, channels * rng.choice([1, 1, 2])
        if rng.random() < 0.4:
            kernel = list(stride)  # transposed: a tap for each phase
        size = [rng.randint(12, 20), rng.randint(12, 20)]
        padding = pair(0, 3)
        if k % 2:
            op, shape = "sparse_conv2d", [filters, channels // groups, *kernel]
            out, numbers = conv_output_size(size, kernel, stride, padding, dilation), [stride, padding, dilation]
        else:
            more = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
            op, shape = "sparse_conv_transpose2d", [channels, filters // groups, *kernel]
            out = conv_transpose_output_size(size, kernel, stride, padding, more, dilation)
            numbers = [stride, padding, more, dilation]
        grid = BlockGrid.cover(out, rng.choice([6, 8, 12, (6, 12)]))
        active = random_active(grid, 2, rng.choice([0.5, 1.0]))
        x = laid_out(tensor((2, channels, *size), dtype), rng.choice(layouts))
        weight, bias = tensor(tuple(shape), dtype), rng.choice([None, tensor((filters,), dtype)])
        residual = rng.choice([None, laid_out(tensor((2, filters, *out), dtype), rng.choice(layouts))])
        lists = [active.indices, active.count, active.block_map]
        activation = rng.choice(["none", "relu", "gelu"])
        yield op, [x, weight, bias, residual, *lists, grid.numbers(), *numbers, groups, activation, 0.0, False]


def calls() -> Iterator[tuple[str, Any, list[Any], bool]]:
    """(what, op, arguments, may it refuse them) of every sample of every op in every dtype of floats, and of draws."""
    for name, samples in op_samples("cpu").items():
        for (k, arguments), dtype in itertools.product(enumerate(samples), DTYPES):
            yield f"{name}, sample {k}, {dtype}", getattr(OPS, name), in_dtype(arguments, dtype), dtype != DTYPES[0]
    for k, (name, arguments) in enumerate(drawn_convs(1000)):
        numbers = [tuple(a.shape) if isinstance(a, Tensor) else a for a in arguments]
        yield f"{name}, draw {k}: {numbers}", getattr(OPS, name), arguments, False


def run(op: Any, arguments: list[Any], may_refuse: bool) -> None:
    """Forward and, where something takes a gradient, backward."""
    try:
        made = op(*arguments)
    except RuntimeError as e:
        if may_refuse and re.match("sbnet::.*: expected", str(e)):
            return
        raise
    made = [made] if isinstance(made, Tensor) else made or []
    sums = [t.double().square().sum() for t in made if t.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()


def main() -> None:
    at_end, left_out = sys.argv[1] == "end", {int(number) for number in sys.argv[2:]}
    torch.manual_seed(0)
    for number, (what, op, arguments, may_refuse) in enumerate(calls()):
        if number not in left_out:
            print(number, what, flush=True)
            run(op, on_guarded(arguments, at_end), may_refuse)
    print("all", flush=True)


if __name__ == "__main__":
    main()
