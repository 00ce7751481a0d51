"""A graph with its planes: what every backend walks. Where tensors lie in memory is storage.py's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from sbnet.geometry import Pair, to_pair
from sbnet.graph.ir import Graph, Value
from sbnet.graph.kinds import kind_of
from sbnet.graph.passes.bottleneck import fuse_bottlenecks
from sbnet.graph.passes.gates import join_gates
from sbnet.graph.passes.program import gates_into_programs, sums_of_few_channels
from sbnet.graph.passes.remember import remember_tokens
from sbnet.graph.passes.siblings import join_siblings
from sbnet.graph.tokens import Tokens
from sbnet.progress import step

Plane = tuple[int, int, Pair]  # height, width, block size
LEAVE = ("unpack", "spread")  # kinds that give a plane of packed tokens


@dataclass
class Plan:
    """A network and how it is cut.

    Attributes:
        planes: (height, width, block size) of every plane that planned nodes write, largest first.
        mode: "masked", "exact" or "cached".
            Behind them those that hold packed tokens.
        lists: the planes' indices of values that share their size with a plane of other blocks.
        tokens: of the planes that hold packed tokens, whose, and the index of the plane that they are packed from.
    """

    graph: Graph
    planes: list[Plane]
    mode: str = "masked"
    lists: dict[Value, int] = field(default_factory=dict)
    tokens: list[tuple[Tokens, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = {(height, width): k for k, (height, width, _) in enumerate(self.images)}

    @property
    def images(self) -> list[Plane]:
        """The planes that masks are brought to: all but those of packed tokens."""
        return self.planes[: len(self.planes) - len(self.tokens)]

    def plane(self, value: Value) -> int:
        """The index of a spatial value's plane."""
        if value in self.lists:
            return self.lists[value]
        assert value.size is not None
        return self.index[value.size]


def plan(graph: Graph, block: Any = "auto", mode: str = "masked", device: torch.device | str = "cpu") -> Plan:
    """Gives each plane of the network its block size, and takes residual blocks together where one kernel serves them.

    Args:
        block: an int or (height, width) for all planes, {(height, width) of a plane: block size} (None for the planes
            that are not named; else "auto" holds for them), or "auto".

    Raises:
        ValueError: no input has a height and a width; no layer would follow the mask; a block size below 1; no named
            plane is one of the network's.
    """
    step("planning its layers")
    first = next((v.size for v in graph.inputs if v is not None and v.size is not None), None)
    if first is None:
        raise ValueError("sbnet: sparsify: example: expected an input [N,C,H,W], got none")
    given = [v.size for v in pytree.tree_leaves(graph.outputs) if isinstance(v, Value)]
    if not any(kind_of(node).planned for node in graph.nodes) and not any(given):
        raise ValueError(
            "sbnet: sparsify: the network: expected layers whose pixels sbnet can follow from the input's, got none: "
            "with any mask it would give the same"
        )
    values = [v for node in graph.nodes for v in node.outputs if v.tokens is not None]
    tokens = list(dict.fromkeys(v.tokens for v in values))
    layers = {v.size for n in graph.nodes if n.kind not in LEAVE and not n.moves for v in n.outputs if v.tokens is None}
    sizes = sorted({*spatial_sizes(graph), *(t.size for t in tokens if t)}, key=lambda s: (-s[0] * s[1], s))
    if isinstance(block, Mapping) and block and None not in block and not any(size in block for size in sizes):
        known = ", ".join(f"{h}x{w}" for h, w in sizes)
        raise ValueError(f"sbnet: sparsify: block: expected (height, width) of planes ({known}), got {list(block)}")
    kind = torch.device(device).type
    fine = fine_planes(graph) if kind == "cuda" else ()
    planes = []
    for size in sizes:
        alone = size not in layers and block == "auto"  # no layer writes it, but what packs and unpacks tokens
        of = f"{kind}, fine" if size in fine else kind
        planes.append((*size, (1, 1) if alone else _block(block, size, first, of)))
    packed = [(t, sizes.index(t.size)) for t in tokens if t is not None]
    lists = {v: len(sizes) + tokens.index(v.tokens) for v in values}
    made = Plan(graph, [*planes, *(t.plane for t, _ in packed)], mode, lists, packed)
    if mode == "cached":
        remember_tokens(made)
    if kind == "cuda":
        gates_into_programs(sums_of_few_channels(join_siblings(join_gates(made)).graph))
    return fuse_bottlenecks(made, torch.device(device))


def spatial_sizes(graph: Graph) -> list[Pair]:
    """(height, width) of every plane of a network, largest first; not of those that hold packed tokens."""
    sizes = {v.size for node in graph.nodes for v in node.outputs if v.size is not None and v.tokens is None}
    return sorted(sizes, key=lambda s: (-s[0] * s[1], s))


# By how many pixels of the input a pixel of the plane is wide: blocks of some 16 to 64 input pixels.
AUTO = {
    "cpu": ((1, 16), (2, 16), (4, 8), (8, 4)),
    "cuda": ((1, 16), (2, 16), (4, 16), (8, 8)),
    "cuda, fine": ((1, 16), (2, 16), (4, 8), (8, 4)),  # fine_planes()
}


def fine_planes(graph: Graph) -> set[Pair]:
    """Planes whose layers' Hopper kernels take blocks of 4: 1x1, depthwise, windows side by side. On a plane of 20x20,
    small things are in every block of 8."""
    sizes, coarse = set(), set()
    for node in graph.nodes:
        size = node.outputs[0].size
        if size is None:
            continue
        sizes.add(size)
        weight = node.params.get("weight") if node.kind in ("conv", "conv_quantized") else None
        if node.kind in ("conv_transpose", "bottleneck", "conv_quantized") or node.output.dtype == torch.float32:
            coarse.add(size)
        elif weight is not None:
            kernel, stride, groups = tuple(weight.shape[2:]), tuple(node.options["stride"]), node.options["groups"]
            few = weight.shape[1] <= 4 and groups == 1
            if kernel not in ((1, 1), stride) and not few and groups != node.output.shape[1]:
                coarse.add(size)
    return sizes - coarse


def _block(block: Any, size: Pair, first: Pair, device: str) -> Pair:
    if block == "auto":
        scale = max(1, round(first[0] / size[0]))
        fitting = [b for least, b in AUTO[device] if scale >= least]
        return fitting[-1], fitting[-1]
    if isinstance(block, Mapping):
        given = block.get(size, block.get(None, "auto"))
        return _block(given, size, first, device)
    if isinstance(block, str):
        raise ValueError(f'sbnet: sparsify: block: expected an int, a pair, a mapping or "auto", got {block!r}')
    pair = to_pair(block, "sparsify: block")
    if min(pair) < 1:
        raise ValueError(f"sbnet: sparsify: block: expected at least 1, got {block!r}")
    return pair
