"""Plans of runs: which blocks run as one op, which tensors may share memory."""

import random

import pytest
import torch
from torch import nn

from sbnet import mask_pyramid
from sbnet.graph.passes import bottleneck
from sbnet.nn import SparseConv2d
from support.runs import run_of

SIZE = (24, 32)


class Block(nn.Module):
    """A bottleneck block behind a 1x1 convolution; `change` makes it something else."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        groups = 2 if change == "groups" else 1
        self.first, self.change = SparseConv2d(3, 16, 1), change
        self.a, self.c = SparseConv2d(16, 8, 1), SparseConv2d(8, 16, 1)
        self.b = SparseConv2d(8, 8, 3, padding=1, groups=groups)
        self.other = SparseConv2d(16, 16, 1) if change == "other input" else None
        self.more = SparseConv2d(8, 16, 1) if change == "second reader" else None
        self.wide, self.narrow = SparseConv2d(16, 16, 1), SparseConv2d(16, 8, 1)

    def forward(self, x, active=None):
        change = self.change
        x = self.first(x, active)
        options = [{"activation": "relu"} for _ in range(3)]
        if change in ("options of the first", "options of the second", "options of the third"):
            options[["first", "second", "third"].index(change.split()[-1])] = {"activation": "silu"}
        y = self.a(x if self.other is None else self.other(x, active), active, **options[0])
        z = self.b(y, active, residual=y if change == "residual of the second" else None, **options[1])
        if change == "second reader":
            return self.c(z, active, residual=self.more(y, active), **options[2])
        if change == "the last reads the input":
            last = self.wide(x, active, residual=x, **options[2])
            return last, self.c(z, active)
        if change in ("added later", "the second added later"):
            last = self.c(z, active, residual=x, **options[2])
            return self.narrow(last, active, residual=y if change == "added later" else z)
        if change == "read again":
            last = self.c(z, active, residual=x, **options[2])
            return last, self.c(y, active)
        residual = None if change == "no shortcut" else x
        return self.c(z, active, residual=residual, **options[2])


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(bottleneck, "one_kernel", lambda *_: True)


def planned(net: nn.Module) -> list[str]:
    run = run_of(net, SIZE, dtype=next(net.parameters()).dtype)
    return [node.kind for node in run.plan.graph.nodes]


def test_a_bottleneck_block_is_seen():
    assert planned(Block()) == ["conv", "bottleneck"]


@pytest.mark.parametrize(
    "change",
    [
        "groups", "other input", "second reader", "read again", "no shortcut",
        "the last reads the input", "added later", "the second added later",
        "residual of the second", *(f"options of the {n}" for n in ("first", "second", "third")),
    ],
)  # fmt: skip
def test_what_is_none(change):
    assert "bottleneck" not in planned(Block(change))


class Crossed(nn.Module):
    """Three layers as a block has them, but the last one reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = SparseConv2d(3, 3, 1), SparseConv2d(3, 3, 3, padding=1), SparseConv2d(3, 3, 1)

    def forward(self, x, active=None):
        a = self.a(x, active)
        b = self.b(a, active)
        return self.c(a, active, residual=x), b


class OfTheInput(Crossed):
    def forward(self, x, active=None):
        self.a(x, active)
        return self.c(self.b(x, active), active, residual=x)


@pytest.mark.parametrize("kind", [Crossed, OfTheInput])
def test_blocks_whose_layers_do_not_follow_one_another(kind):
    assert "bottleneck" not in planned(kind())


class Random(nn.Module):
    """Layers that read, and add, any tensor before them; several outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.wiring = []
        self.layers = nn.ModuleList()
        widths = [3]
        for at in range(rng.randint(3, 9)):
            source = rng.choice([at, max(at - 1, 0), rng.randint(0, at)])
            kernel = rng.choice([1, 3])
            width = rng.choice([widths[source], 8, 12])
            same = [t for t, w in enumerate(widths) if w == width and t]
            residual = rng.choice(same) if same and rng.random() < 0.6 else None
            self.layers.append(SparseConv2d(widths[source], width, kernel, padding=kernel // 2))
            self.wiring.append((source, residual, rng.choice([None, "relu", "silu"])))
            widths.append(width)
        self.outputs = sorted({len(widths) - 1, rng.randint(1, len(widths) - 1)}, reverse=seed % 2 == 0)

    def forward(self, x, active=None):
        tensors = [x]
        for layer, (source, residual, activation) in zip(self.layers, self.wiring, strict=True):
            added = None if residual is None else tensors[residual]
            tensors.append(layer(tensors[source], active, activation=activation, residual=added))
        return tuple(tensors[t] for t in self.outputs)


@pytest.mark.parametrize("seed", range(24))
def test_plans_of_random_networks(seed):
    """Buffers that tensors take turns in, sums in place, fringes: the result is that of the ops one by one."""
    torch.manual_seed(seed)
    net = Random(seed).eval().requires_grad_(False)
    run = run_of(net, SIZE, batch=2)
    for density in (1.0, 0.004, 0.004, 0.02, 0.0):
        x, mask = torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < density
        want = net(x, *mask_pyramid(mask, [(*SIZE, 8)]).planes)
        for got, wanted in zip(run(x, mask), want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
