"""Activations, clamps and arithmetic with numbers: every argument that PyTorch takes gives what PyTorch gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sbnet

INF, NAN = math.inf, math.nan
ODD = (-INF, -1.5, -0.5, -0.0, 0.0, 1 / 6, 0.5, 2.0, 6.0, INF, NAN)
numbers = st.one_of(st.sampled_from(ODD), st.floats(-8, 8, width=32), st.integers(-7, 7))
bounds = st.one_of(st.none(), numbers)
scales = st.one_of(st.sampled_from((0.0, 0.5, -1.0, 3.0)), st.floats(-4, 4, width=32))

# Of each function, what its further arguments are drawn from.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[st.SearchStrategy[Any], ...]]] = {
    "clamp": (torch.clamp, (bounds, bounds)),
    "clamp of integers": (torch.clamp, (st.integers(-7, 7), st.integers(-7, 7))),
    "clamp of tensors": (lambda y, a, b: y.clamp(torch.tensor(a), torch.tensor(b)), (scales, scales)),
    "clip": (torch.clip, (bounds, bounds)),
    "clamp_min": (torch.clamp_min, (numbers,)),
    "clamp_max": (torch.clamp_max, (numbers,)),
    "hardtanh": (F.hardtanh, (numbers, numbers)),
    "relu6": (F.relu6, ()),
    "relu": (F.relu, ()),
    "leaky_relu": (F.leaky_relu, (numbers,)),
    "prelu": (lambda y, a: F.prelu(y, torch.full((1,), float(a))), (numbers,)),
    "rrelu": (lambda y, a, b: F.rrelu(y, min(a, b), max(a, b), False), (scales, scales)),
    "elu": (F.elu, (numbers,)),
    "celu": (F.celu, (numbers,)),
    "selu": (F.selu, ()),
    "gelu": (lambda y, how: F.gelu(y, approximate=how), (st.sampled_from(("none", "tanh")),)),
    "silu": (F.silu, ()),
    "mish": (F.mish, ()),
    "hardswish": (F.hardswish, ()),
    "hardsigmoid": (F.hardsigmoid, ()),
    "logsigmoid": (F.logsigmoid, ()),
    "softsign": (F.softsign, ()),
    "softplus": (F.softplus, (numbers, numbers)),
    "threshold": (F.threshold, (numbers, numbers)),
    "hardshrink": (F.hardshrink, (numbers,)),
    "softshrink": (F.softshrink, (st.floats(0, 4, width=32),)),
    "tanhshrink": (F.tanhshrink, ()),
    "add": (lambda y, a, b: torch.add(y, a, alpha=b), (numbers, scales)),
    "sub": (lambda y, a, b: torch.sub(y, a, alpha=b), (numbers, scales)),
    "rsub": (lambda y, a, b: torch.rsub(y, a, alpha=b), (numbers, scales)),
    "mul": (torch.mul, (numbers,)),
    "div": (
        lambda y, a, how: torch.div(y, a, rounding_mode=how), (numbers, st.sampled_from((None, "trunc", "floor"))),
    ),
    "number / y": (lambda y, a: a / y, (numbers,)),
    "pow": (torch.pow, (numbers,)),
    "remainder": (torch.remainder, (numbers,)),
    "lerp": (lambda y, a: torch.lerp(y, y * 2, a), (scales,)),
    "addcmul": (lambda y, a: torch.addcmul(y, y, y, value=a), (scales,)),
    "itself": (lambda y: y + y, ()),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], convolution: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 4, 1) if convolution else nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before(x))


def frame() -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(1, 3, 8, 12) * 4
    x[0, 0, 0, :6] = torch.tensor([NAN, 0.0, -0.0, 1e30, -1e30, 6.0])
    return x


@st.composite
def calls(draw):
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    return name, [draw(drawn) for drawn in FUNCTIONS[name][1]]


def check(name: str, arguments: list[Any], convolution: bool) -> None:
    function, x = FUNCTIONS[name][0], frame()
    net = Net(lambda y: function(y, *arguments), convolution).eval()
    try:
        with torch.no_grad():
            want = net(x)
    except (RuntimeError, ValueError, ZeroDivisionError):  # what PyTorch does not take
        return
    got = sbnet.sparsify(net, x, block=4)(x, torch.ones(1, 8, 12))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-4, equal_nan=True)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(calls(), st.booleans())
@example(("clamp", [0.5, -0.5]), True)
@example(("clamp", [None, NAN]), False)
@example(("mul", [INF]), True)
@example(("div", [0.0, None]), True)
@example(("mish", []), False)
@example(("itself", []), True)
def test_arguments_mean_what_they_mean_in_pytorch(call, convolution):
    check(*call, convolution)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, database=None)
@given(calls(), st.booleans())
def test_many_arguments(call, convolution):
    check(*call, convolution)


def test_an_op_clamps_to_its_upper_bound_where_the_bounds_are_crossed():
    x = torch.randn(1, 2, 8, 8)
    active = sbnet.reduce_mask(torch.ones(1, 8, 8), sbnet.BlockGrid.cover((8, 8), 4))
    assert torch.equal(sbnet.sparse_pointwise(x, active, "clamp 0.5 -0.5"), torch.clamp(x, 0.5, -0.5))
