"""`sparsify` on networks of many shapes, against the contracts in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import sbnet
from sbnet.graph.cost import planned_share
from sbnet.graph.kinds import kind_of
from sbnet.graph.oracle import CachedOracle, PlaneMasks, exact_pixels, masked_oracle
from support.contract import assert_holds, poison
from support.networks import NETWORKS, UNet, conv, lively

SIZE = (40, 56)


def network(name: str, device: str = "cpu") -> nn.Module:
    return lively(NETWORKS[name]()).to(device)


def frames(device: str = "cpu", batch: int = 2, dtype: torch.dtype = torch.float32):
    """Frames, channels_last as the engine's feature maps, and masks, one after another: what an earlier call left in a
    buffer would show."""
    for density in (0.002, 1.0, 0.0, 0.0005):
        x = torch.randn(batch, 3, *SIZE, device=device).to(dtype, memory_format=torch.channels_last)
        yield x, torch.rand(batch, *SIZE, device=device) < density


@pytest.mark.parametrize("name", NETWORKS)
def test_the_masked_contract(name, device):
    net = network(name, device)
    exact, run = copy.deepcopy(net).double(), None
    for x, mask in frames(device):
        run = run or sbnet.sparsify(net, x, block=4)
        poison(run)
        masks = PlaneMasks(mask, 4)
        assert_holds(run(x, mask), masked_oracle(net, [x], masks), masked_oracle(exact, [x.double()], masks), name)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_exact_contract(name, device):
    net = network(name, device)
    exact, run, judged = copy.deepcopy(net).double(), None, []
    for x, mask in frames(device):
        mask[0] = False
        run = run or sbnet.sparsify(net, x, block=4, mode="exact")
        poison(run)
        with torch.no_grad():
            for results in zip(*map(tree_leaves, (run(x, mask), net(x), exact(x.double()))), strict=True):
                inside = mask.any((1, 2)).view(-1, *[1] * (results[0].dim() - 1))
                if results[0].dim() == 4:
                    inside = exact_pixels(results[0], mask)
                judged.append([r[inside.expand_as(r)] for r in results])
    assert_holds(*map(torch.cat, zip(*judged, strict=True)), name)  # of all frames: some have few pixels


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cached_contract(name, device):
    net = network(name, device)
    theirs, exact, run = CachedOracle(net), CachedOracle(copy.deepcopy(net).double()), None
    for at, (x, mask) in enumerate(frames(device)):
        run = run or sbnet.sparsify(net, x, block=4, mode="cached")
        if at == 3:
            theirs.reset(), exact.reset()
        got = run(x, mask, keyframe=at == 3)
        masks = PlaneMasks(mask, 4)
        assert_holds(got, theirs([x], masks), exact([x.double()], masks), f"{name}, frame {at}")


def test_a_cached_run_begins_anew_at_another_shape_and_goes_on_with_another_margin(device):
    net, mask = lively(UNet("nearest")).to(device), torch.zeros(1, *SIZE, device=device)
    run = sbnet.sparsify(net, torch.zeros(1, 3, *SIZE, device=device), block=4, mode="cached")
    other = torch.randn(1, 3, 24, 32, device=device)
    run(other, mask[:, :24, :32])
    x = torch.randn(1, 3, *SIZE, device=device)
    with torch.no_grad():  # an empty mask keeps what the frame before gave, and there is none
        assert_holds(run(x, mask), net(x), copy.deepcopy(net).double()(x.double()))
    kept = run(x, mask, copy=True)
    for margin in (None, 2, None, 7):
        assert torch.equal(run(torch.randn_like(x), mask, margin=margin), kept)
    one = mask.clone()
    one[:, 9, 9] = 1
    frame = torch.randn_like(x)
    changed = run(frame, one, margin=2, copy=True)
    again = sbnet.sparsify(net, x, block=4, mode="cached")
    again(x, mask)
    assert torch.equal(changed, again(frame, sbnet.masks.grow(one, 2)))
    assert not torch.equal(changed, kept)
    run(other, mask[:, :24, :32])
    with torch.no_grad():
        assert_holds(run(x, mask), net(x), copy.deepcopy(net).double()(x.double()))


def test_a_cached_run_keeps_its_memory(device):
    """A CUDA graph writes where its capture did, whatever was forgotten since."""
    x, mask = torch.randn(1, 3, *SIZE, device=device), torch.zeros(1, *SIZE, device=device)
    net = nn.Sequential(conv(3, 8), nn.ReflectionPad2d(1), conv(8, 8))
    run = sbnet.sparsify(lively(net).to(device), x, block=4, mode="cached")
    run(x, mask)
    executor = run.executor
    kept = {value: tensor.data_ptr() for value, tensor in executor.kept_dense.items()}
    assert kept  # a reflected border runs dense
    run.reset()
    run(x, mask)
    assert {value: tensor.data_ptr() for value, tensor in executor.kept_dense.items()} == kept


def test_a_cached_run_tells_the_blocks_of_its_last_call(device):
    x, mask = torch.randn(1, 3, *SIZE, device=device), torch.zeros(1, *SIZE, device=device)
    run = sbnet.sparsify(lively(conv(3, 8)).to(device), x, block=4, mode="cached")
    run(x, mask)
    assert run.density == 1  # the first frame is computed whole
    for set_pixels, count in ((slice(0), 0), (slice(0, 4), 1)):
        mask[:, set_pixels, set_pixels] = 1
        run(x, mask)
        assert int((run.active[0].block_map >= 0).sum()) == count


def test_a_run_goes_with_its_last_reference(device):
    """And its CUDA graph: one that waited for the garbage collector could end within another's capture."""
    x = torch.zeros(1, 3, *SIZE, device=device)
    run = sbnet.sparsify(lively(conv(3, 8)).to(device), x, block=4)
    run(x, torch.ones(1, *SIZE, dtype=torch.bool, device=device))
    gone = weakref.ref(run)
    gc.collect()
    gc.disable()
    try:
        del run
        assert gone() is None
    finally:
        gc.enable()


def test_memory_of_many_margins_is_bounded():
    run, mask = sbnet.sparsify(lively(conv(3, 8)), torch.zeros(1, 3, *SIZE), block=4), torch.zeros(1, *SIZE)
    for margin in range(20):
        run(torch.zeros(1, 3, *SIZE), mask, margin=margin)
    assert len(run._compiled) <= 8


@pytest.mark.parametrize("name", NETWORKS)
def test_a_full_mask_is_the_dense_network(name):
    net, x = network(name), torch.randn(1, 3, *SIZE)
    with torch.no_grad():
        dense, exact = net(x), copy.deepcopy(net).double()(x.double())
    assert_holds(sbnet.sparsify(net, x)(x, torch.ones(1, *SIZE)), dense, exact, name)


@pytest.mark.parametrize("name", ["U-Net, bilinear", "YOLO-like", "MobileNet with gates", "ConvNeXt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(name, dtype, device):
    net = network(name, device).to(dtype)
    exact, run = copy.deepcopy(net).double(), None
    for x, mask in frames(device, 1, dtype):
        run = run or sbnet.sparsify(net, x, block=8)
        masks = PlaneMasks(mask, 8)
        want = masked_oracle(exact, [x.double()], masks)
        assert_holds(run(x, mask), masked_oracle(net, [x], masks), want, name)


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_are_planned(name):
    run = sbnet.sparsify(network(name), torch.zeros(1, 3, *SIZE))
    share = planned_share(run.plan.graph)
    assert 0 < share < 1 if name == "batches that hold more" else share == 1


class Neighbours(nn.Module):
    """A gate that convolves the channels' averages, as ECA-Net's."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate = conv(3, 8), nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x * self.gate(x.mean((2, 3))[:, None]).sigmoid().view(x.shape[0], -1, 1, 1)


def test_convolutions_of_vectors_run_dense_and_are_counted():
    net, x, mask = lively(Neighbours()), torch.randn(2, 3, *SIZE), torch.rand(2, *SIZE) < 0.01
    run, masks = sbnet.sparsify(net, x, block=4), PlaneMasks(mask, 4)
    exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], masks)
    assert_holds(run(x, mask), masked_oracle(net, [x], masks), exact)
    dense = [layer for layer in sbnet.explain(run) if layer.kind == "conv1d"]
    assert [(layer.planned, layer.multiply_adds) for layer in dense] == [(False, 2 * 8 * 3)]


def test_explain_leads_with_the_time_and_the_gain(monkeypatch):
    """Of a network whose convolutions are all planned, and whose time goes elsewhere, as a ViT's."""
    run = sbnet.sparsify(lively(Neighbours()), torch.randn(1, 3, *SIZE), block=4)
    planned = [kind_of(node).planned for node in run.plan.graph.nodes]

    def profile(self, x, mask, calls):
        share = float(mask.float().mean())
        assert share == 1 or abs(share - 0.1) < 0.02
        return [("", "", share if on_blocks else 3.0) for on_blocks in planned]

    monkeypatch.setattr(type(run), "profile", profile)
    found = sbnet.explain(run)
    few, many = sum(planned), len(planned) - sum(planned)
    shown = [layer for layer in found if layer.planned]
    assert found.time_share == pytest.approx(len(shown) / (few + 3 * many))
    assert found.gain == pytest.approx((few + 3 * many) / (0.1 * few + 3 * many), rel=0.02)
    first = str(found).splitlines()[0]
    assert first == found.summary
    assert first.startswith(
        f"{found.time_share:.1%} of the time at a full mask goes to nodes that run on active blocks"
    )
    assert f"expect {found.gain:.1f}x with 10% of the frame active" in first


def test_what_is_folded_and_fused():
    run = sbnet.sparsify(network("RepVGG"), torch.zeros(1, 3, *SIZE))
    assert [n.kind for n in run.plan.graph.nodes] == ["conv", "conv"]
    run = sbnet.sparsify(network("ResNet"), torch.zeros(1, 3, *SIZE))
    assert [n.kind for n in run.plan.graph.nodes[:-3]] == ["conv", "max_pool", *["conv"] * 5]
    run = sbnet.sparsify(network("DenseNet"), torch.zeros(1, 3, *SIZE))
    assert not any(run.executor.storage.copies.values())  # all concatenations lie where they are written
