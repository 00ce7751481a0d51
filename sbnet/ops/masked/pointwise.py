"""Sums, products, activations and gates on active blocks: a short program of steps in one pass over the pixels."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.ops.common import require_tensor
from sbnet.ops.masked.layer import layer_fakes, run_layer, run_layer_

_ops = torch.ops.sbnet
OPERANDS = "abcd"
MOST_STEPS = 24


def sparse_pointwise(x: Tensor, active: ActiveBlocks, program: str, *others: Tensor) -> Tensor:
    """Runs the steps of `program` on each element of the active blocks, in float32; zeros elsewhere.

    A step works on what the one before it gave, at first x. `add`, `sub`, `rsub` (operand - v), `mul`, `div`, `rdiv`
    (operand / v), `max`, `min`, `prelu` (slopes) and `load` take an operand: x, the others a, b, c, d, a number, or s
    or t after `save s`, `save t`. `clamp` takes its bounds, `leaky_relu` and `elu` their slope or alpha, `softplus`
    beta and threshold. `relu`, `relu6`, `silu`, `gelu`, `gelu_tanh`, `hardswish`, `sigmoid`, `hardsigmoid`, `tanh`,
    `mish`, `log_sigmoid`, `abs`, `neg`, `exp`, `log`, `sqrt`, `rsqrt`, `reciprocal`, `square` and `erf` take none.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        active: active blocks of x's plane.
        program: steps, separated by semicolons; at most 24.
        others: a, b, c, d: of x's dtype, each side x's or 1: maps, [1,C,1,1] of channels, [N,C,1,1] gates.

    Returns:
        [N,C,H,W] in x's memory format. Differentiable with respect to x and the others.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices, grid or program.

    >>> gate, shortcut = torch.rand(1, 16, 1, 1), torch.rand_like(x)
    >>> gated = sbnet.sparse_pointwise(x, active, "mul a; add b; hardswish", gate, shortcut)
    """
    op = "sparse_pointwise"
    return run_layer(op, x, active, program, tensors=_operands(op, program, others))


def sparse_pointwise_(
    x: Tensor, active: ActiveBlocks, program: str, *others: Tensor, out: Tensor, fringe: Fringe | None = None
) -> None:
    """As `sparse_pointwise`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: [N,C,H,W] of x's dtype, any layout; must not share memory with x or the others.
        fringe: from `sbnet.fringe`, or None.

    >>> sbnet.sparse_pointwise_(x, active, "mul a; silu", torch.rand_like(x), out=torch.empty_like(x))
    """
    op = "sparse_pointwise_"
    run_layer_(op, x, active, out, fringe, program, tensors=_operands(op, program, others))


def _operands(op: str, program: str, others: tuple[Tensor, ...]) -> list[Tensor | None]:
    if not isinstance(program, str):
        raise TypeError(f"sbnet::{op}: program: expected a string of steps, got {type(program).__name__}")
    if len(others) > len(OPERANDS):
        raise ValueError(f"sbnet::{op}: others: expected at most {len(OPERANDS)}, got {len(others)}")
    for name, tensor in zip(OPERANDS, others, strict=False):
        require_tensor(op, name, tensor)
    return [*others, *[None] * (len(OPERANDS) - len(others))]


STEPS = {
    "load": lambda _, o: o, "add": torch.add, "sub": torch.sub, "rsub": lambda v, o: o - v, "mul": torch.mul,
    "div": torch.div, "rdiv": lambda v, o: o / v, "max": torch.maximum, "min": torch.minimum,
    "prelu": lambda v, o: torch.where(v > 0, v, v * o), "clamp": torch.clamp, "leaky_relu": F.leaky_relu,
    "elu": F.elu, "softplus": F.softplus, "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "hardswish": F.hardswish, "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid, "tanh": torch.tanh, "mish": F.mish, "log_sigmoid": F.logsigmoid, "abs": torch.abs,
    "neg": torch.neg, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "square": torch.square, "erf": torch.erf,
}  # fmt: skip
# Whose functions the CPU's kernel computes value by value, and PyTorch in vectors.
BY_VALUE = {"elu", "softplus", "gelu_tanh", "tanh", "log_sigmoid", "exp", "log"}
ACTIVATIONS = ("relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish")  # whose gradient is an op
BINARY = ("load", "add", "sub", "rsub", "mul", "div", "rdiv", "max", "min", "prelu")


def run_program(program: str, x: Tensor, *others: Tensor | None) -> Tensor:
    """What a program gives on whole planes, by PyTorch, in the tensors' own dtype."""
    held: dict[str, Any] = {"x": x, **dict(zip(OPERANDS, others, strict=False))}
    v = x
    for step in filter(None, (part.split() for part in program.split(";"))):
        name, *words = step
        if name == "save":
            held[words[0]] = v
        elif name in BINARY:
            o = held[words[0]] if words[0] in held else torch.full_like(v, float(words[0]))
            v = STEPS[name](v, o)  # type: ignore[operator]
        else:
            v = STEPS[name](v, *map(float, words))  # type: ignore[operator]
    return v.expand_as(x)


@functools.cache
def in_vectors(program: str | None) -> bool:
    """Has the CPU's kernel vectors for every step? Of None, which is no program, not."""
    return program is not None and BY_VALUE.isdisjoint(program.replace(";", " ").split())


# ---- fake implementations and gradients

layer_fakes("sparse_pointwise")


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, _indices, _count, block_map, grid, program = inputs
    ctx.save_for_backward(*tensors, block_map)
    ctx.grid, ctx.program = grid, program


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """PyTorch's own, of the program on the whole plane, in active blocks; operands' are summed of those alone."""
    *tensors, block_map = ctx.saved_tensors
    x = tensors[0]
    alone = _of_one_step(ctx, grad, tensors, block_map)
    if alone is not None:
        return alone
    wanted = [k for k in range(len(tensors)) if ctx.needs_input_grad[k]]
    with torch.enable_grad():
        leaves = [
            None if t is None else t.detach().expand_as(x).requires_grad_(k in wanted) for k, t in enumerate(tensors)
        ]
        y = run_program(ctx.program, *leaves)  # type: ignore[arg-type]
    found = torch.autograd.grad(y, [leaves[k] for k in wanted], grad, allow_unused=True)  # type: ignore[arg-type]
    grads: list[Tensor | None] = [None] * len(tensors)
    for k, g in zip(wanted, found, strict=True):
        if g is None:
            grads[k] = torch.zeros_like(tensors[k])
        else:  # what lies outside may be NaN: 0 * log(0)
            grads[k] = _ops.sparse_fill(g, block_map, ctx.grid, 0.0).sum_to_size(tensors[k].shape)
    return *grads, *[None] * 5


def _of_one_step(ctx: Any, grad: Tensor, tensors: list, block_map: Tensor) -> tuple | None:
    """The gradients of a program of one step that networks are full of, in one pass over the blocks; else None."""
    words = ctx.program.replace(";", " ").split()
    if words == ["add", "a"] and tensors[1].shape == tensors[0].shape:
        given = _ops.sparse_fill(grad, block_map, ctx.grid, 0.0)
        return given, given, *[None] * 8
    if words and words[0] in ACTIVATIONS and len(words) == (2 if words[0] == "leaky_relu" else 1):
        param = float(words[1]) if len(words) == 2 else 0.0
        given = _ops.sparse_activation_grad(grad, tensors[0], None, block_map, ctx.grid, words[0], param)
        return given, *[None] * 9
    return None


torch.library.register_autograd("sbnet::sparse_pointwise", _backward, setup_context=_setup)
