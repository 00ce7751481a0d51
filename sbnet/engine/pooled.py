"""Runs what a network computes of globally pooled maps on a CPU: in memory that stays, by ops that recordings note."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.geometry import Pair
from sbnet.graph.constants import Constants
from sbnet.graph.ir import Node, Value
from sbnet.graph.passes.pooled import pooled
from sbnet.graph.plan import Plan
from sbnet.ops import reduce_mask, sparse_adaptive_avg_pool2d_, sparse_adaptive_max_pool2d_
from sbnet.ops import sparse_pointwise_ as pointwise_

BLOCK = 32  # rows of a matrix: a tile's width


class Product(NamedTuple):
    """A matrix [K,C] and a bias as feature maps of 1 x K pixels, and the list of all of those."""

    matrix: Tensor
    bias: Tensor | None
    pixels: ActiveBlocks


class PooledNodes:
    """Global pools and what reads nothing else: PyTorch's ops on so few numbers take as long to call as the layers
    around them to run.

    A product is a convolution of the matrix, whose pixels are its rows, with the vector as the only filter: lanes then
    sum parts of the channels, as PyTorch's product does, so that no chain of roundings is long, and the matrix is read
    once, as it is. What a bias adds is the residual.

    Args:
        plan: of a network; on CUDA no node of it is one of these.
        constants: of its graph.

    Attributes:
        forms: of the nodes, how each runs.
        tensors: what they give; `__call__` writes there.
    """

    def __init__(self, plan: Plan, constants: Constants) -> None:
        self.forms = pooled(plan) if constants.device.type == "cpu" else {}
        self._constants = constants
        self.tensors: dict[Value, Tensor] = {}
        self._samples: dict[int, ActiveBlocks] = {}
        for node, form in self.forms.items():
            y = node.output
            if form.kind == "view":
                self.tensors[y] = self.tensors[form.x].view(y.shape)
                continue
            self.tensors[y] = torch.zeros(y.shape, dtype=y.dtype)
            self._samples.setdefault(y.shape[0], _every(y.shape[0], (1, 1), (1, 1)))
        self.refresh()

    def refresh(self) -> None:
        """Takes weights as they are now."""
        self._products: dict[Node, Product] = {}
        for node, form in self.forms.items():
            if form.weight is not None:
                weight = self._constants[form.weight]
                rows, columns = weight.shape[:2]
                matrix = weight.reshape(1, 1, rows, columns).permute(0, 3, 1, 2)
                bias = None if form.bias is None else self._constants[form.bias].reshape(1, 1, 1, rows)
                self._products[node] = Product(matrix, bias, _every(1, (1, rows), (1, BLOCK)))

    def __call__(self, node: Node, get: Callable[[Value], Tensor], active: ActiveBlocks | None) -> None:
        """Runs a node. active: of the feature map that a pool reads."""
        form, out = self.forms[node], _planes(self.tensors[node.output])
        if form.kind == "pool":
            assert active is not None
            pool = sparse_adaptive_avg_pool2d_ if node.options["method"] == "avg" else sparse_adaptive_max_pool2d_
            pool(get(form.x), active, out)
        elif form.kind == "program":
            pointwise_(_planes(get(form.x)), self._samples[out.shape[0]], form.program, out=out)
        elif form.kind == "product":
            matrix, bias, pixels = self._products[node]
            for sample, y in zip(_planes(get(form.x)), out, strict=True):
                torch.ops.sbnet.sparse_conv2d_.default(
                    matrix, sample[None], None, bias, None, pixels.indices, pixels.count, pixels.grid.numbers(), [1, 1],
                    [0, 0], [1, 1], 1, "none", 0.0, False, False, y.reshape(1, 1, 1, -1), None, None, None,
                )  # fmt: skip


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution of planes of 1x1: x [N,C,1,1], weight [K,C,1,1], bias [K] or None, all of one floating dtype.

    PyTorch's linear layer, which adds the bias within its product on CUDA, where conv2d launches a kernel for it.

    Returns:
        [N,K,1,1], channels_last.
    """
    rows = F.linear(x.flatten(1), weight.flatten(1), bias)
    return rows[:, None, None].permute(0, 3, 1, 2)


def _every(batch: int, size: Pair, block: Pair) -> ActiveBlocks:
    return reduce_mask(torch.ones(batch, *size, dtype=torch.bool), BlockGrid.cover(size, block))


def _planes(vectors: Tensor) -> Tensor:
    """[N,C] and however many dimensions of one, as [N,C,1,1]."""
    return vectors.reshape(*vectors.shape[:2], 1, 1)
