"""blocksparse's ops that are bound by memory, in PyTorch's own ops: as they are, compiled, and a copy of as many bytes.

The rows say which of them a kernel would help: none where torch.compile reaches the rate of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult, short
from sbnet.compat.blocksparse import ewops as ew
from sbnet.compat.blocksparse import lstm, norms
from sbnet.compat.blocksparse import transformer as rows

WIDTH = 1024
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def ops(x: Tensor) -> dict[str, tuple[Function, list[Tensor], float]]:
    """Of each op: the function, what it takes, how many times x's bytes it must move. x [rows, WIDTH]."""
    wide = torch.randn(x.shape[0], 4 * x.shape[1], device=x.device, dtype=x.dtype)
    g, b = (torch.rand(x.shape[1], device=x.device, dtype=x.dtype) for _ in range(2))
    labels = torch.randint(x.shape[1], x.shape[:1], device=x.device)
    _, bits = ew.dropout(x, 0.8)
    there = torch.ones(1, x.shape[1], device=x.device).cumsum(1) <= x.shape[1] // 2
    return {
        "fused_lstm_gates": (lstm.fused_lstm_gates, [x, wide], 7),
        "layer_norm": (norms.layer_norm, [x, g, b], 2),
        "layer_norm of 4 segments, relu": (partial(norms.layer_norm, segments=4, relu=True), [x, g, b], 2),
        "bias_relu, fast_gelu": (partial(ew.bias_relu, fast_gelu=True), [x, b], 2),
        "cwise_linear, relu": (partial(ew.cwise_linear, relu=True), [x, g, b], 2),
        "add_n8": (lambda *xs: ew.add_n8(xs), list(torch.randn(8, *x.shape, device=x.device, dtype=x.dtype)), 9),
        "filter_tensor": (partial(ew.filter_tensor, scale=0.5, saturate=9.0, zero_nans=True), [x], 2),
        "dropout, given mask": (lambda x, bits: ew.dropout(x, 0.8, bits)[0], [x, bits], 2),
        "masked_softmax": (rows.masked_softmax, [x, there.float()], 2),
        "softmax_cross_entropy": (rows.softmax_cross_entropy, [x, labels], 1),
    }


def cases(setting: Setting) -> Iterator[Case]:
    count = setting.pick(4, 2**11, 2**16 if setting.cuda else 2**12)
    for op in ops(torch.ones(1, WIDTH)):
        facts = {"op": op, "size": [count, WIDTH], "dtype": short(setting.dtype)}
        yield Case("memory-bound", "weights", facts, partial(work, setting, op, count))


def work(setting: Setting, op: str, count: int) -> Work:
    x = torch.randn(count, WIDTH, device=setting.device, dtype=setting.dtype)
    function, arguments, times = ops(x)[op]
    exact = first(function(*(t.double() if t.is_floating_point() else t for t in arguments))).double()
    moved = float(times * x.numel() * x.itemsize)
    source = torch.ones(int(moved) // 2, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)

    def check(side: str, got: Any) -> float:
        if side == "copy":
            return 0.0
        y = first(got)
        error = float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        if not error <= 4 * torch.finfo(y.dtype).eps:
            raise WrongResult(f"{op}: relative rms error {error:.3g}")
        return error

    sides = {"eager": Side(lambda: function(*arguments), "ours"), "copy": Side(lambda: target.copy_(source))}
    if setting.compiled and setting.level == "full":
        torch._dynamo.reset()
        compiled = torch.compile(function)
        sides["torch.compile"] = Side(lambda: compiled(*arguments), "peer")
    return Work(sides, check, bytes=moved, dtype=setting.dtype)


def first(y: Any) -> Tensor:
    return y if isinstance(y, Tensor) else y[0]
