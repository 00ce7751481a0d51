"""Layouts and samples for tests of block-sparse weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sbnet import BlockGrid, BlockLayout
from support.helpers import random_active, tensor

BLOCK_SIZES = (8, 16, 32, 64, 128)


def random_layout(
    rows: int, columns: int, size: int, density: float = 0.4, ragged: int = 0, z_order: bool = False
) -> BlockLayout:
    """Blocks at random; with `ragged`, so many features fewer than the blocks hold, on both sides. Row 0 and the last
    column are empty where there are others."""
    mask = torch.rand(rows, columns) < density
    if rows > 1 and columns > 1 and density < 1:
        mask[0] = mask[:, -1] = False
    features = {"in_features": rows * size - ragged, "out_features": columns * size - ragged}
    return BlockLayout(mask, size, z_order=z_order, **features)


def barabasi_albert(nodes: int, edges: int, seed: int = 0) -> Tensor:
    """The adjacency matrix of a Barabasi-Albert graph with itself: blocksparse's own test layout."""
    generator = torch.Generator().manual_seed(seed)
    adjacent = torch.eye(nodes, dtype=torch.bool)
    ends: list[int] = list(range(edges))
    for node in range(edges, nodes):
        targets: set[int] = set()
        while len(targets) < edges:
            targets.add(ends[int(torch.randint(len(ends), (1,), generator=generator))])
        for target in targets:
            adjacent[node, target] = adjacent[target, node] = True
            ends += [node, target]
    return adjacent


def weights_of(layout: BlockLayout, dtype: torch.dtype, device: str, scale: float = 0.1) -> Tensor:
    """Random weights; what lies beyond the features is NaN, and may not be read."""
    size = layout.block_size
    weight = torch.randn(layout.weight_shape) * scale
    inputs, outputs = (layout.coords.long() * size).unbind(1)
    beyond = (inputs[:, None] + torch.arange(size) >= layout.in_features)[:, :, None]
    beyond = beyond | (outputs[:, None] + torch.arange(size) >= layout.out_features)[:, None, :]
    return weight.masked_fill(beyond, float("nan")).to(device, dtype)


def weight_samples(device: str) -> dict[str, list[tuple]]:
    """op name -> list of arguments, for opcheck."""
    torch.manual_seed(0)
    layout = random_layout(3, 4, 8, 0.6, ragged=3)
    tables, numbers = layout.on(torch.device(device))
    weight = torch.randn(layout.weight_shape, device=device)
    x, dy = tensor((5, 21), torch.float32, device), tensor((5, 29), torch.float32, device)
    bias, gate = tensor((29,), torch.float32, device), torch.rand(layout.blocks, device=device)
    shape = numbers[:6]
    active = random_active(BlockGrid.cover((6, 9), 4), 2, 0.5, device)
    lists = (active.indices, active.count, active.block_map, active.grid.numbers())
    image = tensor((2, 21, 6, 9), torch.float32, device)
    rows_last = image.contiguous(memory_format=torch.channels_last)

    def grad(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_()

    rest = (False, "none", 0.0, False)
    samples = {
        "blocksparse_matmul": [
            (x, weight, None, None, tables, numbers, *rest),
            (grad(x), grad(weight), grad(gate), grad(bias), tables, numbers, False, "silu", 0.0, False),
            (grad(dy), grad(weight), None, None, tables, numbers, True, "none", 0.0, False),
            (x.t().contiguous().t(), weight, gate, bias, tables, numbers, False, "relu", 0.0, True),
            (x[:1], weight, gate, None, tables, numbers, *rest),
            (x[:0], weight, gate, None, tables, numbers, *rest),
        ],
        "blocksparse_conv1x1": [
            (image, weight, None, None, tables, numbers, *lists, "none", 0.0, False),
            (grad(image), grad(weight), grad(gate), grad(bias), tables, numbers, *lists, "silu", 0.0, False),
            (rows_last, weight, gate, bias, tables, numbers, *lists, "relu", 0.0, True),
        ],
        "blocksparse_weight_grad": [
            ([x], [dy], tables, numbers, False, False),
            ([x.half()], [dy.half()], tables, numbers, False, True),
            ([grad(x), grad(x)], [grad(dy), dy], tables, numbers, False, False),
        ],
        "block_layout_tables": [],
        "blocksparse_plan": [],
    }
    if device == "cpu":
        samples["block_layout_tables"] = [(layout.coords, shape)]
        samples["blocksparse_plan"] = [(tables, shape, 0)]
    return samples


def assert_trains_alike_compiled(model: nn.Module, x: Tensor) -> None:
    """A compiled model learns what the eager one learns: classes, of ten."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    labels = torch.randint(10, x.shape[:1], device=x.device)
    losses = []
    for run in (model, torch.compile(twin, fullgraph=True, backend="aot_eager")):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(x), labels)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) <= 1e-4 * losses[1], losses
