"""What runs dense, and what passes replace before anything runs."""

from __future__ import annotations

import math
from typing import Any

from sbnet.graph.axes import op_name
from sbnet.graph.ir import Node
from sbnet.graph.kinds.kind import Given, Kind


class Aten(Kind):
    """target: any op of PyTorch, on whole tensors."""

    name = "aten"
    dense, casts = True, False

    def apply(self, node: Node, given: Given) -> Any:
        return node.target(*given.args, **given.kwargs)

    def multiply_adds(self, node: Node) -> int:
        """Of a convolution that gives more than one pixel."""
        name = op_name(node.target)
        if "conv" not in name or math.prod(node.output.shape[2:]) <= 1:
            return 0
        return math.prod((node.args[0] if "transpose" in name else node.output).shape) * math.prod(
            node.args[1].shape[1:]
        )


class Affine(Kind):
    """scale, shift: x * scale + shift, one number a channel."""

    name = "affine"


class Add(Kind):
    """Two feature maps."""

    name = "add"


class Act(Kind):
    """activation, negative_slope; slope."""

    name = "act"
