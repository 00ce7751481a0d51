"""Normalisations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, POINTWISE, Context, Get, Given, Kind, Target, edge
from sbnet.ops import sparse_fill, sparse_group_norm, sparse_layer_norm2d, sparse_softmax2d
from sbnet.ops.common import check_active


class Norm(Kind):
    """method ("group", "layer", "softmax", "log_softmax"), groups, eps; weight, bias."""

    name = "norm"
    written = planned = recorded = sizeless = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE if node.options["method"] == "group" else POINTWISE

    def apply(self, node: Node, given: Given) -> Any:
        x, o, weight, bias = given.args[0], node.options, given.params.get("weight"), given.params.get("bias")
        match o["method"]:
            case "group" if given.everywhere:
                return sparse_fill(_dense(node, x, weight, bias), given.active)
            case "group":
                return sparse_group_norm(x, given.active, o["groups"], weight, bias, o["eps"])
            case "layer":
                return sparse_layer_norm2d(x, given.active, weight, bias, o["eps"])
            case method:
                return sparse_softmax2d(x, given.active, log=method == "log_softmax")

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        x, weight, bias = get(node.args[0]), *(context.held(node, name) for name in ("weight", "bias"))
        if self._of_all(node, context):
            to.out.copy_(torch.where(to.active.pixel_mask(to.out.shape[2:]), _dense(node, x, weight, bias), to.out))
            return
        check_active("sparse_norm2d_", to.active)
        torch.ops.sbnet.sparse_norm2d_.default(
            x, weight, bias, to.active.indices, to.active.count, to.active.block_map, to.active.grid.numbers(),
            *node.options.values(), to.out, *edge(to.clear),
        )  # fmt: skip

    def lasts(self, node: Node, context: Context) -> bool:
        return not self._of_all(node, context)  # PyTorch's

    def _of_all(self, node: Node, context: Context) -> bool:
        return context.everywhere and node.options["method"] == "group"


def _dense(node: Node, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A norm node of groups, of all pixels: of one channel each as instance_norm, whose rounding is another."""
    groups, eps = node.options["groups"], node.options["eps"]
    if groups == x.shape[1]:
        return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
    return F.group_norm(x, groups, weight, bias, eps)
