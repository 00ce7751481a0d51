"""Tensors that end, or begin, at a page that may not be touched, and every op's samples on such tensors.

`python -m support.guard_pages end|start ops|networks [calls to leave out]` names each call before it makes it: an
access out of bounds ends the process, and the last name is the call's. tests/contracts/test_guard_pages.py runs it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sbnet import BlockGrid, conv_output_size, conv_transpose_output_size, pool_output_size, sparsify
from sbnet.geometry import RESIZE_MODES
from support.helpers import laid_out, random_active, tensor
from support.op_samples import op_samples

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
OPS = torch.ops.sbnet
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("channels_last", "channels_last", "contiguous", "odd_channel_slice", "permuted")


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


def each_tensor(arguments: Any, f: Callable[[Tensor], Tensor]) -> list[Any]:
    """The arguments with f of every tensor, those in lists, too."""
    return [
        f(a) if isinstance(a, Tensor) else each_tensor(a, f) if isinstance(a, (list, tuple)) else a for a in arguments
    ]


def on_guarded(arguments: Any, at_end: bool) -> list[Any]:
    return each_tensor(arguments, lambda t: guarded(t, at_end))


def in_dtype(arguments: Any, dtype: torch.dtype) -> list[Any]:
    return each_tensor(arguments, lambda t: t.to(dtype) if t.dtype == torch.float32 else t)


def drawn_convs(draws: int) -> Iterator[tuple[str, list[Any]]]:
    """Convolutions and transposed ones of random geometry: kernels smaller than strides and dilations, output padding,
    channels of every kernel's taste, all layouts."""
    rng = random.Random(0)

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
        x = laid_out(tensor((2, channels, *size), dtype), rng.choice(LAYOUTS))
        weight, bias = tensor(tuple(shape), dtype), rng.choice([None, tensor((filters,), dtype)])
        residual = rng.choice([None, laid_out(tensor((2, filters, *out), dtype), rng.choice(LAYOUTS))])
        lists = [active.indices, active.count, active.block_map]
        activation = rng.choice(["none", "relu", "gelu"])
        flags = [False, False] if k % 2 else [False]
        options = [groups, activation, 0.0, *flags, None, None, None, []]
        yield op, [x, weight, bias, residual, None, *lists, grid.numbers(), *numbers, *options]


def drawn_layers(draws: int) -> Iterator[tuple[str, list[Any]]]:
    """Pools, resizing, int8 convolutions and bottlenecks, likewise."""
    rng = random.Random(1)
    for k in range(draws):
        channels, dtype = rng.choice([1, 3, 8, 16, 20, 33, 64]), rng.choice(DTYPES)
        size = (rng.randint(5, 20), rng.randint(5, 20))
        x = laid_out(tensor((2, channels, *size), dtype), rng.choice(LAYOUTS))
        match k % 4:
            case 0:
                kernel, padding = (rng.randint(1, 4), rng.randint(1, 4)), rng.randint(0, 1)
                stride, ceil = (rng.randint(1, 4), rng.randint(1, 4)), rng.random() < 0.5
                padding = min(padding, min(kernel) // 2)
                out = pool_output_size(size, kernel, stride, padding, 1, ceil)
                window = [list(kernel), list(stride), [padding] * 2]
                op = rng.choice(["sparse_max_pool2d", "sparse_avg_pool2d"])
                rest = [*window, [1, 1], ceil] if op == "sparse_max_pool2d" else [*window, ceil, True, None]
            case 1:
                op, out, mode = "sparse_resize2d", (rng.randint(1, 40), rng.randint(1, 40)), rng.choice(RESIZE_MODES)
                ratios = [rng.choice([0.0, rng.uniform(0.2, 4.0)]) for _ in range(2)]
                rest = [list(out), mode, mode.startswith("bi") and rng.random() < 0.5, *ratios]
            case 2:
                filters, side, stride, padding = rng.choice([3, 16, 40]), rng.randint(1, 4), rng.randint(1, 2), 1
                op, out = "sparse_conv2d_quantized", conv_output_size(size, side, stride, padding)
                x, weight = (x.float().clamp(-1, 1) * 99).to(torch.int8), torch.ones(filters, channels, side, side)
                x = laid_out(x, rng.choice(LAYOUTS))
                first = [weight.to(torch.int8), torch.ones(filters), None, None, None]
                rest = [[stride] * 2, [padding] * 2, [1, 1], 1, "relu", 0.0, False, 0.0, 1.0, 0.5]
            case _:
                op, out, hidden = "sparse_bottleneck2d", size, rng.choice([3, 8, 20])
                shapes = ((hidden, channels, 1, 1), (hidden, hidden, 3, 3), (channels, hidden, 1, 1))
                first, rest = [*(tensor(shape, dtype) for shape in shapes), None, None, None], ["relu", 0.0, False]
        grid = BlockGrid.cover(out, rng.choice([3, 6, 8]))
        active = random_active(grid, 2, rng.choice([0.5, 1.0]))
        before = first if k % 4 > 1 else []
        yield op, [x, *before, active.indices, active.count, active.block_map, grid.numbers(), *rest]


def planned_networks(at_end: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(what, call) of networks that `sparsify` plans: twice, so that recordings of their kernels run."""
    from support.networks import NETWORKS, lively

    for name, mode in itertools.product(NETWORKS, ("masked", "exact", "cached")):
        net, x = lively(NETWORKS[name]()), torch.randn(2, 3, 40, 56)
        for module in net.modules():
            for home in (module._parameters, module._buffers):
                for key, t in home.items():
                    if t is not None:
                        own = guarded(t.detach(), at_end)
                        home[key] = nn.Parameter(own, False) if home is module._parameters else own

        def call(net: nn.Module = net, x: Tensor = x, mode: str = mode) -> None:
            run = sparsify(net, x, block=8, mode=mode)
            for density in (1.0, 0.01, 0.01):
                run(guarded(x, at_end), guarded(torch.rand(2, 40, 56) < density, at_end))

        yield f"{name}, {mode}", call


def calls() -> Iterator[tuple[str, Any, list[Any], bool]]:
    """(what, op, arguments, may it refuse them) of every sample of every op in every dtype of floats, and of draws."""
    for name, samples in op_samples("cpu").items():
        for (k, arguments), dtype in itertools.product(enumerate(samples), DTYPES):
            yield f"{name}, sample {k}, {dtype}", getattr(OPS, name), in_dtype(arguments, dtype), dtype != DTYPES[0]
    for k, (name, arguments) in enumerate(itertools.chain(drawn_convs(1000), drawn_layers(400))):
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
    at_end, left_out = sys.argv[1] == "end", {int(number) for number in sys.argv[3:]}
    torch.manual_seed(0)
    ops = ((what, lambda c=c: run(c[0], on_guarded(c[1], at_end), c[2])) for what, *c in calls())
    every = ops if sys.argv[2] == "ops" else planned_networks(at_end)
    for number, (what, call) in enumerate(every):
        if number not in left_out:
            print(number, what, flush=True)
            call()
    print("all", flush=True)


if __name__ == "__main__":
    main()
