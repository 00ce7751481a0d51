"""Dynamic sparsity: weak blocks move to other places while a network trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from sbnet.nn.blocksparse import BlockSparseLinear
from sbnet.ops import BlockLayout


class SparseOptimizer:
    """Moves, each step, the weakest blocks of block-sparse layers to new places.

    The fraction `lr` of a layer's blocks of lowest norm is dropped and as many places that were empty are filled with
    zeros: at random, or (RigL) where a dense gradient would be largest. The number of blocks never changes. Moments
    of the attached optimizer are moved along with their blocks and are zero for new ones.

    After Evci et al., "Rigging the Lottery", ICML 2020, and the class of this name in pytorch_block_sparse.

    Args:
        modules: layers, or a model whose BlockSparseLinear layers are all taken.
        lr: share of the blocks to move in a step, 0 to 1.
        grow: "random", or a function of a layer that scores every block: [CB, KB], larger is better.

    >>> sparse = SparseOptimizer(model, lr=0.05)
    >>> sparse.attach_optimizer(adam)
    >>> sparse.step()  # every few hundred steps of adam
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[BlockSparseLinear],
        lr: float = 0.1,
        grow: str | Callable[[BlockSparseLinear], Tensor] = "random",
    ) -> None:
        found = modules.modules() if isinstance(modules, nn.Module) else modules
        self.layers = [m for m in found if isinstance(m, BlockSparseLinear)]
        if not self.layers:
            raise ValueError("SparseOptimizer: expected a BlockSparseLinear, got none")
        if not 0 <= lr <= 1:
            raise ValueError(f"SparseOptimizer: lr: expected 0 to 1, got {lr}")
        if grow != "random" and not callable(grow):
            raise ValueError(f"SparseOptimizer: grow: expected 'random' or a function, got {grow!r}")
        self.lr, self.grow = lr, grow
        self.optimizers: list[torch.optim.Optimizer] = []

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The torch optimizer whose moments go with the blocks.

        Raises:
            ValueError: it has none of the layers' weights; made before the model was patched, it trains what was there.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"SparseOptimizer: optimizer: expected a torch optimizer, got {type(optimizer).__name__}")
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        if trained.isdisjoint(layer.weight for layer in self.layers):
            raise ValueError("SparseOptimizer: optimizer: expected one of the layers' weights, got none of them")
        self.optimizers.append(optimizer)

    @torch.no_grad()
    def step(self) -> int:
        """Moves blocks in every layer; how many."""
        return sum(self._move(layer) for layer in self.layers)

    def _move(self, layer: BlockSparseLinear) -> int:
        before = layer.layout
        absent = ~before.mask()
        count = min(int(self.lr * before.blocks), int(absent.sum()))
        if not count:
            return 0
        norms = layer.weight.detach().float().square().sum((1, 2)).cpu()
        weakest = norms.argsort(stable=True)[:count]
        grow = self.grow
        score = grow(layer).detach().float().cpu() if callable(grow) else torch.rand(absent.shape)
        places = score.masked_fill(~absent, -torch.inf).flatten().argsort(descending=True, stable=True)[:count]
        coords = before.coords.clone()
        coords[weakest, 0] = (places // before.block_columns).int()
        coords[weakest, 1] = (places % before.block_columns).int()
        shape = before.block_rows, before.block_columns
        layout = BlockLayout.from_coords(
            coords, shape, before.block_size, in_features=before.in_features, out_features=before.out_features
        )
        layer._adopt(layout)  # in place: every other block keeps its number, values and moments
        moved = weakest.to(layer.weight.device)
        layer.weight[moved] = self._initial(layer.weight, count)
        if layer.weight.grad is not None:
            layer.weight.grad[moved] = 0.0
        for optimizer in self.optimizers:
            for value in optimizer.state.get(layer.weight, {}).values():
                if isinstance(value, Tensor) and value.shape == layer.weight.shape:
                    value[moved] = 0.0
        return count

    def _initial(self, weight: Tensor, count: int) -> Tensor:
        """[count, bs, bs]: what blocks hold in their new places."""
        return weight.new_zeros(count, *weight.shape[1:])
