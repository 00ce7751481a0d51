"""Weights from ncnn's files: NAME.param, text, one layer a line, and NAME.bin, their numbers in the same order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAGIC = "7767517"
HALVES = 0x01306B47  # stands before float16 weights; 0 before float32 ones
CONVOLUTIONS = ("Convolution", "Deconvolution")


@dataclass(frozen=True)
class NcnnLayer:
    """weight: [out,in,R,S] of convolutions (of a deconvolution as PyTorch has it, [in,out,R,S]), [K] of PReLU."""

    kind: str
    weight: Tensor
    bias: Tensor | None = None


def read_ncnn(param: str | os.PathLike[str]) -> list[NcnnLayer]:
    """The layers with weights of NAME.param and NAME.bin beside it, in order, float32.

    Raises:
        ValueError: the files are not ncnn's, or do not belong together.
    """
    path = Path(param)
    lines = path.read_text().split("\n")
    if lines[0].strip() != MAGIC:
        raise ValueError(f"sbnet: read_ncnn: {path}: expected {MAGIC} in the first line, got {lines[0][:20]!r}")
    numbers = _Numbers(path.with_suffix(".bin"))
    layers = []
    for line in filter(None, map(str.strip, lines[2:])):
        kind, _, inputs, outputs, *rest = line.split()
        options = dict(word.split("=", 1) for word in rest[int(inputs) + int(outputs) :])
        if kind in CONVOLUTIONS:
            layers.append(_convolution(kind, options, numbers))
        elif kind == "PReLU":
            layers.append(NcnnLayer(kind, numbers.floats(int(options["0"]))))
    numbers.ended()
    return layers


def _convolution(kind: str, options: dict[str, str], numbers: _Numbers) -> NcnnLayer:
    outputs, side, count = int(options["0"]), int(options["1"]), int(options["6"])
    rows = int(options.get("11", side))
    weight = numbers.weight(count).view(outputs, -1, rows, side)
    bias = numbers.floats(outputs) if options.get("5") == "1" else None
    return NcnnLayer(kind, weight.transpose(0, 1).contiguous() if kind == "Deconvolution" else weight, bias)


class _Numbers:
    """What a .bin holds, from its start on."""

    def __init__(self, path: Path) -> None:
        self._path, self._data, self._at = path, path.read_bytes(), 0

    def _take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise ValueError(f"sbnet: read_ncnn: {self._path}: expected {size} bytes at {self._at}, got {len(found)}")
        self._at += size
        return found

    def floats(self, count: int) -> Tensor:
        return torch.from_numpy(np.frombuffer(self._take(4 * count), "<f4").astype(np.float32))

    def weight(self, count: int) -> Tensor:
        tag = int.from_bytes(self._take(4), "little")
        if tag == 0:
            return self.floats(count)
        if tag != HALVES:
            raise ValueError(f"sbnet: read_ncnn: {self._path}: expected float32 or float16 weights, got tag {tag:#x}")
        padded = self._take((2 * count + 3) // 4 * 4)
        return torch.from_numpy(np.frombuffer(padded, "<f2", count).astype(np.float32))

    def ended(self) -> None:
        left = len(self._data) - self._at
        if left:
            raise ValueError(f"sbnet: read_ncnn: {self._path}: expected {self._at} bytes, got {left} more")
