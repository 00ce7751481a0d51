"""Arrangements of a feature map that are traced: the same ops on the pixels' numbers say which pixel each row is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.graph.axes import op_name
from sbnet.graph.builder import Call, feature_map
from sbnet.graph.ir import Node, Value

ATEN = torch.ops.aten
MOVING = {"roll", "constant_pad_nd", "pad"}


def take(x: Tensor, index: Tensor, fill: Tensor | None = None) -> Tensor:
    """Rows [...,C] of a feature map [N,C,H,W] by their numbers from 1 on; 0: `fill` [C], or zeros."""
    rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    first = rows.new_zeros(1, rows.shape[1]) if fill is None else fill.to(rows.dtype)[None]
    return torch.cat([first, rows])[index]


def pick(x: Tensor, index: Tensor, fill: Tensor | None = None) -> Tensor:
    """Numbers of `fill` [C], or C zeros, and of a feature map [N,C,H,W] behind it, counted in this order from 0 on."""
    first = x.new_zeros(x.shape[1]) if fill is None else fill.to(x.dtype)
    return torch.cat([first, x.reshape(-1)])[index]


@dataclass
class Traced:
    """Rows of a feature map.

    Attributes:
        root: the feature map.
        pixels: of each number of the value its pixel, from 1 on, of all images; 0: none.
        channels: and its channel.
        fill: what stands where there is none: zeros, or a constant [C].
        undefined: it is anything.
    """

    root: Value
    pixels: Tensor
    channels: Tensor
    fill: Value | None = None
    undefined: bool = False


def plane_root(value: Value) -> tuple[Value, list[tuple[Node, int]]] | None:
    """The feature map of which a value is an arrangement, and what arranges it, from the last op on."""
    chain = []
    while feature_map(value) is not value:
        node = value.producer
        if value.constant or node is None or node.kind != "aten" or value.tokens is not None:
            return None
        if not (node.moves or op_name(node.target) in MOVING or node.target in (take, pick)):
            return None
        chain.append((node, node.outputs.index(value)))
        value = node.args[0]
        if not isinstance(value, Value):
            return None
    if value.tokens is not None and not (chain and chain[-1][0].target is take):  # tokens.py: views of its own
        return None
    return None if value.given else (value, chain)


def rolled(call: Call) -> Call | None:
    """Of slices of one value that change places along a dimension, as exporters write a roll, the roll."""
    parts, dim = call.args[0], call.argument("dim", 0)
    if not isinstance(call.made, Tensor) or len(parts) != 2 or not isinstance(dim, int):
        return None
    sources, dim, places = list[Any](), dim % call.made.dim(), list[int]()
    for part in parts:
        node = part.producer if isinstance(part, Value) else None
        if node is None or node.kind != "aten" or op_name(node.target) != "slice" or node.kwargs:
            return None
        given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
        source, axis, start, end, step = given
        if axis % call.made.dim() != dim or plane_root(source) is None:
            return None
        sources.append(source)
        places += list(range(source.shape[dim]))[slice(start, end, step)]
    size = call.made.shape[dim]
    if not places or sources[0] is not sources[1] or places != [(k + places[0]) % size for k in range(size)]:
        return None
    args = (sources[0], [-places[0]], [dim])
    return dataclasses.replace(call, target=ATEN.roll.default, name="roll", args=args, kwargs={})


def traced(value: Value, call: Call | None = None) -> Traced | None:
    """What a value, or what a call makes of it, shows of a feature map."""
    found = plane_root(value)
    if found is None:
        return None
    root, chain = found
    n, c, h, w = root.shape
    pixels: Any = torch.arange(1, n * h * w + 1, dtype=torch.int32).view(n, 1, h, w).expand(n, c, h, w)
    channels: Any = torch.arange(c, dtype=torch.int32).view(1, c, 1, 1).expand(n, c, h, w)
    result = Traced(root, pixels, channels)
    steps: list[Any] = [(node.target, node.args[1:], node.kwargs, at, node) for node, at in chain[::-1]]
    if call is not None:
        steps.append((call.target, call.args[1:], call.kwargs, 0, None))
    for target, args, kwargs, at, node in steps:
        if op_name(target) in ("constant_pad_nd", "pad") and any(v not in (None, 0, "constant") for v in args[1:]):
            return None
        if target in (take, pick):
            assert node is not None
            index, result.fill, result.undefined = args[0].tensor, args[1], bool(node.options.get("undefined"))
            if target is take and pixels.shape == root.shape:  # of the feature map itself
                pixels = index[..., None].to(torch.int32).expand(*index.shape, c)
                channels = torch.arange(c, dtype=torch.int32).expand(pixels.shape)
            else:
                pixels, channels = target(pixels, index), target(channels, index, torch.arange(c, dtype=torch.int32))
            continue
        pixels, channels = target(pixels, *args, **kwargs), target(channels, *args, **kwargs)
        if node is not None and node.options.get("many"):
            pixels, channels = pixels[at], channels[at]
    result.pixels, result.channels = pixels, channels
    return result


def rows_of(found: Traced) -> Tensor | None:
    """The pixel of each row of what is [...,C] with all channels in order."""
    pixels, c = found.pixels, found.root.shape[1]
    if pixels.shape[-1] != c or not torch.equal(pixels, pixels[..., :1].expand_as(pixels)):
        return None
    numbers = torch.arange(c, dtype=torch.int32)
    return pixels[..., 0] if bool(((found.channels == numbers) | (pixels == 0)).all()) else None
