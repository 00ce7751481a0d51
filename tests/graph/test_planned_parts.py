"""Parts of networks that ran dense, or that exact mode could not plan: one-sided pads, GRN, a stack that is summed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.graph.kinds import kind_of
from sbnet.graph.oracle import PlaneMasks, exact_pixels, masked_oracle
from sbnet.graph.rules import repeat_plane
from support.contract import assert_holds

SIZE, BLOCK = (24, 32), 4


def pixels(batch: int = 1) -> Tensor:
    mask = torch.zeros(batch, *SIZE, dtype=torch.bool)
    mask[:, 5:9, 8:20] = True
    mask[0, -1, -1] = True
    return mask


def assert_modes_hold(net: nn.Module, x: Tensor, mask: Tensor) -> list:
    """The masked contract, and the dense result of the exact one. Returns the masked plan's nodes."""
    double, masks = copy.deepcopy(net).double(), PlaneMasks(mask, BLOCK)
    run = sbnet.sparsify(net, x, block=BLOCK)
    with torch.no_grad():
        dense, right = net(x), double(x.double())
        assert_holds(run(x, mask), masked_oracle(net, [x], masks), masked_oracle(double, [x.double()], masks), "masked")
        got = sbnet.sparsify(net, x, block=BLOCK, mode="exact")(x, mask)
    where = exact_pixels(dense, mask)
    assert_holds(got * where, dense * where, right * where, "exact")
    return run.plan.graph.nodes


# ---- pads of one side


class Same(nn.Module):
    """Layers of TensorFlow: pads as large as they must be, the larger one at the end."""

    def __init__(self, kernel: int, stride: int, pad: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.pad = nn.Conv2d(3, 4, kernel, stride), nn.Conv2d(4, 4, 3, 2), pad

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(F.pad(self.first(F.pad(x, self.pad)), self.pad)))


@pytest.mark.parametrize("pad", [(0, 1, 0, 1), (1, 0, 1, 0), (0, 2, 1, 0), (1, 2, 0, 1), (0, -1, 0, 0), (-1, 0, -1, 1)])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (2, 2), (3, 2)])
def test_pads_of_one_side_hold_in_every_mode(kernel, stride, pad):
    assert_modes_hold(Same(kernel, stride, pad).eval(), torch.randn(1, 3, *SIZE), pixels())


class TwoReaders(nn.Module):
    """One reads what the other pads, so that both demands are of one plane."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.plain, self.padded = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.plain(y) + self.padded(F.pad(y, (0, 1, 0, 1)))


def test_a_padded_map_that_another_layer_reads_as_it_is():
    assert_modes_hold(TwoReaders().eval(), torch.randn(1, 3, *SIZE), pixels())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tf_efficientnetv2_s", "tf_mobilenetv3_small_100"])
def test_networks_of_tensorflow_in_exact_mode(name):
    from support import zoo

    if not zoo.available():
        pytest.skip("torchvision and timm are not installed")
    zoo.build("torchvision resnet18")  # makes torchvision importable
    import timm

    net, x = timm.create_model(name, features_only=True).eval(), torch.randn(1, 3, 224, 224)
    mask = torch.zeros(1, 224, 224, dtype=torch.bool)
    mask[:, 50:60, 70:90] = True
    with torch.no_grad():
        dense, right = net(x), copy.deepcopy(net).double()(x.double())
    for got, torchs, exact in zip(sbnet.sparsify(net, x, mode="exact")(x, mask), dense, right, strict=True):
        where = exact_pixels(exact, mask)
        assert_holds(got * where, torchs * where, exact * where, name)


# ---- GRN


class GRN(nn.Module):
    """ConvNeXtV2's normalisation, channels first or last."""

    def __init__(self, last: bool, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.out, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 1), last
        self.weight, self.bias = nn.Parameter(torch.randn(channels)), nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.last:
            x = x.permute(0, 2, 3, 1)
            norm = torch.linalg.vector_norm(x, ord=2, dim=(1, 2), keepdim=True)
            x = self.weight * (x * (norm / (norm.mean(-1, keepdim=True) + 1e-6))) + self.bias + x
            return self.out(x.permute(0, 3, 1, 2))
        norm = x.norm(p=2, dim=(2, 3), keepdim=True)
        weight, bias = self.weight.view(1, -1, 1, 1), self.bias.view(1, -1, 1, 1)
        return self.out(x + torch.addcmul(bias, weight, x * (norm / (norm.mean(1, keepdim=True) + 1e-6))))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_grn_runs_on_active_blocks(last, batch):
    nodes = assert_modes_hold(GRN(last).eval(), torch.randn(batch, 3, *SIZE), pixels(batch))
    assert not [n for n in nodes if not kind_of(n).planned and n.output.size is not None and not n.moves]
    assert not [n for n in nodes if n.kind == "aten" and any(v.size for v in n.inputs())]  # none reads a whole plane


@pytest.mark.parametrize("dim", [(2,), (1, 2, 3), (3,)])
def test_norms_of_other_axes_stay_dense(dim):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return y / (torch.linalg.vector_norm(y, 2, dim, keepdim=True) + 1)

    assert_modes_hold(Net().eval(), torch.randn(1, 3, *SIZE), pixels())


# ---- a stack that is reduced

REDUCED = {
    "sum of the first axis": lambda maps: torch.stack(maps).sum(0),
    "sum of the last": lambda maps: torch.stack(maps, -1).sum(-1),
    "sum of an inner one": lambda maps: torch.stack(maps, 1).sum(dim=1),
    "mean": lambda maps: torch.stack(maps).mean(0),
    "maximum": lambda maps: torch.stack(maps).amax(0),
    "one twice": lambda maps: torch.stack([F.relu(maps[0])] * 2).sum(0) + maps[1],
    "one, and all": lambda maps: torch.stack([maps[0], *maps]).sum(0),
}
DENSE = {
    "kept": lambda maps: torch.stack(maps).sum(0, keepdim=True)[0],
    "of one": lambda maps: torch.stack(maps[:1]).sum(0),
}


class Stacked(nn.Module):
    def __init__(self, join) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.join = nn.ModuleList(nn.Conv2d(3, 8, 3, padding=1) for _ in range(3)), join

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.join([part(x) for part in self.parts]))


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_stack_runs_on_active_blocks(name):
    nodes = assert_modes_hold(Stacked(REDUCED[name]).eval(), torch.randn(2, 3, *SIZE), pixels(2))
    assert all(kind_of(n).planned for n in nodes)


@pytest.mark.parametrize("name", DENSE)
def test_other_reductions_of_a_stack_are_right(name):
    assert_modes_hold(Stacked(DENSE[name]).eval(), torch.randn(2, 3, *SIZE), pixels(2))


def test_in_halves_a_stack_is_rounded_once():
    net, x = Stacked(REDUCED["sum of the first axis"]).eval().half(), torch.randn(1, 3, *SIZE).half()
    full = torch.ones(1, *SIZE, dtype=torch.bool)
    with torch.no_grad():
        assert_holds(sbnet.sparsify(net, x)(x, full), net(x), copy.deepcopy(net).double()(x.double()))


# ---- a pooled plane made as large as a map (DeepLab's image pooling)


class Pooled(nn.Module):
    def __init__(self, alone: bool, **how: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.alone, self.border = alone, nn.Conv2d(4, 4, 3, 1, 1)
        self.first, self.pooled, self.last, self.how = (
            nn.Conv2d(3, 4, 3, 1, 1),
            nn.Conv2d(4, 4, 1),
            nn.Conv2d(8, 4, 1),
            how,
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        pooled = self.pooled(F.adaptive_avg_pool2d(y, 1))
        repeated = F.interpolate(pooled, size=y.shape[2:], **self.how)
        return self.border(repeated if self.alone else self.last(torch.cat([y, repeated], 1)))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [None, True, False])
@pytest.mark.parametrize("alone", [False, True], ids=["joined", "alone"])
def test_a_pooled_plane_is_repeated(mode, corners, alone):
    if "nearest" in mode and corners is not None:
        pytest.skip("has no corners")
    nodes = assert_modes_hold(
        Pooled(alone, mode=mode, align_corners=corners).eval(), torch.randn(2, 3, *SIZE), pixels(2)
    )
    repeats = [n for n in nodes if n.target is repeat_plane]
    assert len(repeats) == (mode != "bicubic")  # whose weights add up to one only nearly
