"""A node of a random ONNX model being drawn, and the register of who draws which op."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import defs, helper

F32, I64 = np.float32, np.int64
Shape = tuple[int, ...]


class Draw:
    """One node being drawn: its random numbers, the shape that it reads, and constants beside it."""

    def __init__(self, rng: random.Random, op: str, opset: int, shape: Shape, prefix: str = "") -> None:
        self.rng, self.op, self.opset, self.shape, self.prefix = rng, op, opset, shape, prefix
        self.schema = defs.get_schema(op, opset, "")
        self.version = self.schema.since_version
        self.numbers = np.random.default_rng(rng.randrange(1 << 30))
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[str] = ["h"]
        self.attributes: dict[str, Any] = {}
        self.outputs = 1

    def has(self, name: str) -> bool:
        return name in self.schema.attributes

    def maybe(self, name: str, *values: Any, always: bool = False) -> None:
        """An attribute, where this version has it: always, or left out half the time."""
        required = self.has(name) and self.schema.attributes[name].required
        if self.has(name) and (always or required or self.rng.random() < 0.6):
            self.attributes[name] = self.rng.choice(values)

    def constant(self, array: Any, dtype: Any = None) -> None:
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants[name] = np.asarray(array, dtype)
        self.inputs.append(name)

    def skip(self) -> None:
        self.inputs.append("")

    def either(self, name: str, array: Any, dtype: Any = I64) -> None:
        """An attribute in old versions, an input in new ones."""
        if self.has(name):
            self.attributes[name] = np.asarray(array, dtype).tolist()
        else:
            self.constant(array, dtype)

    def floats(self, *shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
        return self.numbers.uniform(low, high, shape).astype(F32)

    def ints(self, count: int, low: int, high: int) -> list[int]:
        return [self.rng.randint(low, high) for _ in range(count)]

    def axis(self) -> int:
        """Negative ones only where the schema's text speaks of them: from version 11 on, as a rule."""
        rank = len(self.shape)
        return self.rng.randint(-rank if self.version >= 11 else 0, rank - 1)

    def axes(self) -> list[int]:
        rank = len(self.shape)
        found = self.rng.sample(range(rank), self.rng.randint(1, rank))
        return [k - rank if self.version >= 11 and self.rng.random() < 0.4 else k for k in found]


# What an op reads that takes no floats of four dimensions, made of "h" beside it.
BEFORE: dict[str, list[tuple[str, list[str], dict[str, Any]]]] = {
    "flat": [("Reshape", ["h", "rows"], {})],
    "bools": [("Greater", ["h", "zero"], {})],
    "ints": [("Mul", ["h", "ten"], {}), ("Cast", [], {"to": 6})],
    "bytes": [("Abs", ["h"], {}), ("Mul", ["", "ten"], {}), ("Cast", [], {"to": 2})],
    "squares": [("Slice", ["h", "from", "upto", "last"], {})],
    "columns": [("Reshape", ["h", "columns_of"], {})],
    "thetas": [("Slice", ["h", "first", "one_2_3", "all_but"], {}), ("Reshape", ["", "n_2_3"], {})],
}


def before(name: str, shape: Shape, prefix: str = "") -> tuple[list[Any], dict[str, np.ndarray]]:
    """(nodes that make it, constants that they read)."""
    n, c, h, w = shape
    side = min(h, w, 5)
    constants = {
        "rows": np.asarray([-1, w], I64), "zero": np.asarray(0, F32), "ten": np.asarray(10, F32),
        "from": np.zeros(2, I64), "upto": np.asarray([side, side], I64), "last": np.asarray([2, 3], I64),
        "first": np.zeros(3, I64), "one_2_3": np.asarray([1, 2, 3], I64), "all_but": np.asarray([1, 2, 3], I64),
        "n_2_3": np.asarray([n, 2, 3], I64), "columns_of": np.asarray([n, c, -1], I64),
    }  # fmt: skip
    steps, nodes, used, last = BEFORE[name], [], {}, ""
    for at, (op, inputs, attributes) in enumerate(steps):
        made = name if at == len(steps) - 1 else f"{name}{at}"
        given = [i or last for i in inputs] or [last]
        used |= {i: constants[i] for i in given if i in constants}
        nodes.append(helper.make_node(op, given, [made], **attributes))
        last = made
    return nodes, used


Maker = Callable[[Draw], None]
MAKERS: dict[str, Maker] = {}


def maker(*names: str) -> Callable[[Maker], Maker]:
    def register(function: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, function))
        return function

    return register
