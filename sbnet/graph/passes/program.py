"""Pointwise nodes as programs of sparse_pointwise, which runs them on active blocks in one pass."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Graph, Node, Ref, Step, Value, computed, only_user
from sbnet.ops.masked.pointwise import MOST_STEPS, OPERANDS

UNARY = {
    "relu", "relu6", "silu", "hardswish", "sigmoid", "hardsigmoid", "tanh", "mish", "log_sigmoid", "abs", "neg", "exp",
    "log", "sqrt", "rsqrt", "reciprocal", "square", "erf",
}  # fmt: skip
BINARY = {"add": "add", "sub": "sub", "rsub": "rsub", "mul": "mul", "div": "div", "maximum": "max", "minimum": "min"}
SWAPPED = {"add": "add", "mul": "mul", "max": "max", "min": "min", "sub": "rsub", "rsub": "sub", "div": "rdiv"}


class Unsupported(Exception):
    """No program does this."""


def write_programs(graph: Graph) -> Graph:
    """`program` in the options of pointwise nodes that have one; its operands are then params: a, b, c, d."""
    for node in graph.nodes:
        if node.kind != "pointwise":
            continue
        try:
            program, args = _Writer(node).write()
        except Unsupported:
            continue
        node.args, node.options = args[:1], {"program": program}
        node.params = dict(zip(OPERANDS, args[1:], strict=False))
    return graph


WORD = 8  # channels of 16 bits that a thread of the depthwise kernel has side by side


def sums_of_few_channels(graph: Graph) -> Graph:
    """Of a plan for CUDA: sums and activations of channels that fill no words, as of pictures, become programs. The
    depthwise convolution that a channelwise node is would move them element by element, a word to a thread."""
    for node in graph.nodes:
        if node.kind != "channelwise" or node.output.shape[1] % WORD == 0:
            continue
        params, activation = node.params, node.options.get("activation")
        scale: Value | None = params["weight"].producer.args[0]  # type: ignore[union-attr]
        given = [("mul", scale), ("add", params.get("bias")), ("add", params.get("residual"))]
        given.append(("prelu", params.get("slope")))
        taken = [(step, value) for step, value in given if value is not None]
        steps = [f"{step} {name}" for (step, _), name in zip(taken, OPERANDS, strict=False)]
        operands = [value if value is params.get("residual") else _as_1c11(value) for _, value in taken]
        if activation == "leaky_relu" and "slope" not in params:
            steps.append(f"leaky_relu {node.options['negative_slope']:.9g}")
        elif activation not in (None, "leaky_relu"):
            steps.append(activation)
        node.kind, node.options = "pointwise", {"program": "; ".join(steps)}
        node.params = dict(zip(OPERANDS, operands, strict=False))
    return graph.link()


def gates_into_programs(graph: Graph) -> Graph:
    """In plans for CUDA, a program activates its first operand itself where nothing else reads it. A launch for the few
    numbers of a gate, as of squeeze and excitation, takes as long as the program on a small plane."""
    for node in graph.nodes:
        while node.kind == "pointwise" and "program" in node.options and (found := _activated(node, graph)):
            operand, unary, program = found
            node.options, node.params[operand] = node.options | {"program": program}, unary.args[0]
            graph.link()
    return graph


def _activated(node: Node, graph: Graph) -> tuple[str, Node, str] | None:
    """The operand of a program's first step, the op that gives it, and the program with that op."""
    first, *rest = node.options["program"].split("; ")
    step, operand = [*first.split(), ""][:2]
    unary = node.params[operand].producer if operand in node.params else None
    if unary is None or unary.kind != "aten" or len(rest) + 3 > MOST_STEPS or step not in {"load", *SWAPPED}:
        return None
    y, name = unary.output, op_name(unary.target)
    if name not in UNARY or len(unary.args) != 1 or unary.kwargs or y.size is not None:
        return None  # what has a plane is a dense node's result, which the engine masks
    if unary.args[0].dtype != y.dtype:
        return None
    once = sum(v is y for v in node.inputs()) == 1 and not any(line.endswith(f" {operand}") for line in rest)
    if not once or only_user(y, graph) is not node:
        return None
    then = [] if step == "load" else [f"{SWAPPED[step]} x"]
    return operand, unary, "; ".join([f"load {operand}", name, *then, *rest])


def _as_1c11(value: Value) -> Value:
    """Numbers a channel, in whatever shape they come, as an operand."""

    def as_channels(t: Tensor) -> Tensor:
        return t.reshape(1, -1, 1, 1)

    return computed(f"{value.name}.1c11", value, as_channels, value, shape=(1, math.prod(value.shape), 1, 1))


class _Writer:
    """Puts steps into the order of a machine with one running value and two saved ones.

    A lowered step is (name, operands, numbers); operands are Refs or numbers. What a step gives is saved where it is
    read more than once, or later than by the step after it.
    """

    def __init__(self, node: Node) -> None:
        self.node, self.args = node, list(node.args)
        shape = node.output.shape
        full = [k for k, v in enumerate(self.args) if v.shape == shape and v.plane is not None and not v.constant]
        if not full:
            raise Unsupported
        self.x = full[0]
        self.others: list[Value] = []
        self.names: dict[int, str] = {}
        self.steps: list[tuple[str, list[Any], list[float]]] = []
        self.slots: dict[str, int | None] = {"s": None, "t": None}

    def write(self) -> tuple[str, list[Value]]:
        done: dict[int, Ref] = {}  # where a step's result is, among the lowered ones
        for k, step in enumerate(self.node.options["steps"]):
            self._lower(step, done)
            done[k] = Ref(len(self.steps) - 1, step=True)
        uses = [0] * len(self.steps)
        last = [0] * len(self.steps)
        for k, (_, operands, _) in enumerate(self.steps):
            for ref in operands:
                if isinstance(ref, Ref) and ref.step:
                    uses[ref.at] += 1
                    last[ref.at] = k
        lines: list[str] = []
        running: Ref = Ref(self.x)
        for k, (name, given, numbers) in enumerate(self.steps):
            operands = list(given)
            if len(operands) == 2 and operands[0] != running and operands[1] == running and name in SWAPPED:
                name, operands = SWAPPED[name], operands[::-1]
            if operands[0] != running:
                lines.append(f"load {self._named(operands[0])}")
            words = [self._named(o) for o in operands[1:]] + [f"{n:.9g}" for n in numbers]
            if name != "load":
                lines.append(" ".join([name, *words]))
            running = Ref(k, step=True)
            for slot, held in self.slots.items():
                if held is not None and last[held] <= k:
                    self.slots[slot] = None
            if uses[k] > 1 or (uses[k] == 1 and last[k] != k + 1):
                free = next((slot for slot, held in self.slots.items() if held is None), None)
                if free is None:
                    raise Unsupported
                self.slots[free] = k
                lines.append(f"save {free}")
        if len(lines) > MOST_STEPS:
            raise Unsupported
        return "; ".join(lines), [self.args[self.x], *self.others]

    def _named(self, operand: Any) -> str:
        if not isinstance(operand, Ref):
            return f"{operand:.9g}"
        if operand.step:
            found = next((slot for slot, held in self.slots.items() if held == operand.at), None)
            if found is None:
                raise Unsupported
            return found
        if operand.at == self.x:
            return "x"
        if operand.at not in self.names:
            if len(self.others) == len(OPERANDS):
                raise Unsupported
            self.names[operand.at] = OPERANDS[len(self.others)]
            self.others.append(self._operand(self.args[operand.at]))
        return self.names[operand.at]

    def _operand(self, value: Value) -> Value:
        """Four dimensions, each the output's or 1."""
        x = self.args[self.x]
        if not value.constant and value.dtype != x.dtype:
            raise Unsupported
        shape = tuple(value.shape)
        if len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, x.shape, strict=True)):
            return value
        if not value.constant or math.prod(shape) not in (1, x.shape[1]):
            raise Unsupported
        return _as_1c11(value)

    def _lower(self, step: Step, done: dict[int, Ref]) -> None:
        name, kwargs = op_name(step.target), dict(step.kwargs)
        args = [done[a.at] if isinstance(a, Ref) and a.step else a for a in step.args]

        def add(name: str, operands: list[Any], *numbers: float) -> Ref:
            if not all(isinstance(v, (Ref, int, float)) for v in operands) or isinstance(operands[0], (int, float)):
                raise Unsupported
            self.steps.append((name, operands, [float(n) for n in numbers]))
            return Ref(len(self.steps) - 1, step=True)

        def option(at: int, key: str, otherwise: Any) -> Any:
            return args[at] if len(args) > at else kwargs.get(key, otherwise)

        if name == "channelwise":
            self._affine(args, kwargs, add)
        elif name in BINARY:
            if kwargs.get("rounding_mode") is not None or option(2, "alpha", 1) != 1:
                raise Unsupported
            op, operands = BINARY[name], args[:2]
            if isinstance(operands[0], (int, float)) and op in SWAPPED:
                op, operands = SWAPPED[op], operands[::-1]
            add(op, operands)
        elif name in ("clamp", "hardtanh", "clamp_min", "clamp_max"):
            low = option(1, "min_val" if name == "hardtanh" else "min", -1.0 if name == "hardtanh" else None)
            high = option(2, "max_val" if name == "hardtanh" else "max", 1.0 if name == "hardtanh" else None)
            if name == "clamp_max":
                low, high = None, low if "max" not in kwargs else high
            bounds = (-math.inf if low is None else low, math.inf if high is None else high)
            if not all(isinstance(v, (int, float)) and v == v for v in bounds):
                raise Unsupported  # tensors, or NaN, which makes all NaN
            add("clamp", args[:1], *bounds)
        elif name == "leaky_relu":
            add("leaky_relu", args[:1], option(1, "negative_slope", 0.01))
        elif name == "elu" and (option(2, "scale", 1), option(3, "input_scale", 1)) == (1, 1):
            add("elu", args[:1], option(1, "alpha", 1.0))
        elif name == "softplus":
            add("softplus", args[:1], option(1, "beta", 1.0), option(2, "threshold", 20.0))
        elif name == "gelu":
            add("gelu" if option(1, "approximate", "none") == "none" else "gelu_tanh", args[:1])
        elif name == "prelu":
            add("prelu", args[:2])
        elif name == "pow" and len(args) == 2 and args[1] in (2, 0.5):
            add("square" if args[1] == 2 else "sqrt", args[:1])
        elif name in UNARY and len(args) == 1 and not kwargs:
            add(name, args)
        else:
            raise Unsupported

    def _affine(self, args: list[Any], kwargs: dict[str, Any], add: Any) -> None:
        """act(x * weight + bias + residual) of a channelwise node that joined."""
        found, weight, bias, residual = args[0], *args[1:]
        for ref in (weight, bias):
            if isinstance(ref, Ref) and not (not ref.step and self.args[ref.at].constant):
                raise Unsupported
        if math.prod(self.args[weight.at].shape) != 1:
            found = add("mul", [found, self._channels(weight)])
        else:
            found = add("mul", [found, weight])
        if bias is not None:
            found = add("add", [found, self._channels(bias)])
        if residual is not None:
            found = add("add", [found, residual])
        activation = kwargs.get("activation")
        if kwargs.get("slope") is not None:
            add("prelu", [found, self._channels(kwargs["slope"])])
        elif activation == "leaky_relu":
            add("leaky_relu", [found], kwargs.get("negative_slope", 0.01))
        elif activation not in (None, "none"):
            add(activation, [found])

    def _channels(self, ref: Ref) -> Ref:
        """Of numbers a channel, in whatever shape they come: as an argument [1,C,1,1]."""
        self.args.append(_as_1c11(self.args[ref.at]))
        return Ref(len(self.args) - 1)
