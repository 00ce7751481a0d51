"""Nodes on several streams: what is one after another where they say so, and memory that no two of them share."""

import random

import pytest
import torch
from torch import nn

import sbnet
from sbnet.engine import executor as executor_module
from sbnet.engine.executor import Executor
from sbnet.graph.passes import lanes as lanes_module
from sbnet.graph.passes.storage import store
from support.networks import NETWORKS

SIZE = (64, 96)


class Branches(nn.Module):
    """Branches of several lengths from one map, and one behind another."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.SiLU()) for _ in range(n)))
            for n in (1, 2, 3, 3, 4, 2)
        )
        self.last = nn.Conv2d(6 * c, c, 1)

    def forward(self, x):
        x = self.stem(x)
        found = [branch(x) for branch in self.branches[:5]]
        found.append(self.branches[5](found[0]) + found[1])
        return self.last(torch.cat(found, 1)), found[2] + found[3]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (Branches() if name == "branches" else NETWORKS[name]()).eval()


def some_order(lanes, rng):
    """Launches in an order in which the streams may run them."""
    left = [[node for node, lane in lanes.of.items() if lane == k] for k in range(lanes.count)]
    done = set()
    while any(left):
        ready = [queue for queue in left if queue and done.issuperset(lanes.waits[queue[0]])]
        node = rng.choice(ready).pop(0)
        done.add(node)
        yield node


def on_streams(run, monkeypatch) -> Executor:
    """What would run on a GPU's streams, on the CPU."""
    ((_, plan, constants),) = run._shapes.values()
    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "store", lambda *args, **_: store(*args[:2], side_by_side=True))
        patch.setattr(executor_module, "Streams", lambda *_: None)
        patch.setattr(executor_module, "chains", lambda _: {})
        return Executor(plan, constants)


@pytest.mark.parametrize("name", ["branches", "YOLO-like", "FPN", "ASPP", "DenseNet", "MobileNet with gates"])
def test_any_order_of_the_streams_gives_the_same(name, monkeypatch):
    x, mask = torch.rand(2, 3, *SIZE), torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, 10:40, 20:50] = mask[1, 50:, :30] = True
    run = sbnet.sparsify(built(name), x)
    run(x, mask)
    wanted = [v.clone() for v in torch.utils._pytree.tree_leaves(run(x, mask))]
    executor = on_streams(run, monkeypatch)
    lanes = executor.storage.lanes
    assert lanes.count > 1 or name in ("DenseNet", "MobileNet with gates")
    for seed in range(8):
        order = list(some_order(lanes, random.Random(seed)))
        executor.nodes = [*order, *(node for node in executor.plan.graph.nodes if node not in lanes.of)]
        for root in executor.storage.roots:
            if not root.kept:
                executor.buffers[root.buffer].fill_(torch.nan)
        for got, want in zip(executor([x], mask), wanted, strict=True):
            assert torch.equal(got, want), seed


def test_branches_start_side_by_side():
    """As many streams as there may be take branches; what joins them waits for all of their launches."""
    run = sbnet.sparsify(built("branches"), torch.rand(1, 3, *SIZE))
    nodes = run.plan.graph.nodes
    at = {node: k for k, node in enumerate(nodes)}
    beside = lanes_module.lanes(nodes, {n for n in nodes if n.kind == "cat"})
    assert len({beside.of[n] for n in nodes if n.args[0] is nodes[0].output}) == lanes_module.MOST
    (last,) = (n for n in nodes if n.path == "last")
    branches = sum(1 << at[n] for n in nodes if n.path.startswith("branches"))
    assert beside.before[at[last]] & branches == branches


def test_memory_is_not_taken_while_another_stream_may_read_it(monkeypatch):
    """Each buffer's next tenant starts when all that touch the one before have ended."""
    run = sbnet.sparsify(built("branches"), torch.rand(1, 3, *SIZE))
    executor = on_streams(run, monkeypatch)
    before, tenants = executor.storage.lanes.before, {}
    for root in sorted(executor.storage.roots, key=lambda root: root.first):
        old = tenants.get(root.buffer)
        if old is not None:
            others = old.touched & ~(1 << root.first)  # a sum in its residual's place reads it itself
            assert all(others & ~before[at] == 0 for at in root.writers)
        tenants[root.buffer] = root
    assert len(tenants) < len(executor.storage.roots)
