"""Manners of what `sparsify` returns: arguments, memory, threads, copies, errors."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.engine.sparsify import MOST_SHAPES
from sbnet.graph.oracle import CachedOracle, PlaneMasks, masked_oracle
from support.contract import assert_holds
from support.networks import Residual, UNet, Yolo, conv, lively

SIZE = (40, 56)


def test_masks_of_any_dtype_and_shape():
    net, x = lively(conv(3, 8)), torch.randn(2, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8)
    mask = torch.rand(2, *SIZE) < 0.01
    want = run(x, mask, copy=True)
    for other in (mask.float(), mask.byte(), mask.long() * 255, mask[:, None], mask.half()[..., None]):
        assert torch.equal(run(x, other), want)
    assert torch.equal(run(x, mask=mask), want)
    assert torch.equal(run(x, mask[:1])[0], want[0])  # one mask for all samples
    for bad, message in ((mask[:, 1:], "mask: expected"), (mask.repeat(2, 1, 1), "mask: expected")):
        with pytest.raises(ValueError, match=message):
            run(x, bad)
    with pytest.raises(ValueError, match="1 inputs and a mask"):
        run(x)


def test_margins_grow_the_mask():
    net, x = lively(conv(3, 8)), torch.randn(1, 3, *SIZE)
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 20, 30] = True
    run = sbnet.sparsify(net, x, block=1, margin=3)
    assert int(run.active[0].count) == 0
    for margin, wide in ((None, 7), (0, 1), (5, 11)):
        run(x, mask, margin=margin)
        assert int(run.active[0].count) == wide**2
    wider = F.max_pool2d(mask.float(), 9, 1, 4) > 0
    assert torch.equal(sbnet.masks.grow(mask, 4), wider)


def test_another_shape_is_planned_anew():
    net = lively(UNet("nearest"))
    run = sbnet.sparsify(net, torch.zeros(1, 3, *SIZE), block=4)
    for size in ((40, 56), (24, 32), (40, 56)):
        x, mask = torch.randn(2, 3, *size), torch.rand(2, *size) < 0.01
        masks = PlaneMasks(mask, 4)
        exact = masked_oracle(copy.deepcopy(net).double(), [x.double()], masks)
        assert_holds(run(x, mask), masked_oracle(net, [x], masks), exact)
        assert run.planes[0][:2] == size


def test_plans_of_many_shapes_are_bounded():
    net = lively(conv(3, 8))
    run, sizes = sbnet.sparsify(net, torch.zeros(1, 3, 8, 8), block=4), [(8, 8 + 4 * k) for k in range(MOST_SHAPES + 2)]
    for size in (*sizes, sizes[0]):  # the first is planned again
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            assert_holds(run(x, torch.ones(1, *size)), net(x), copy.deepcopy(net).double()(x.double()))
        assert len(run._shapes) <= MOST_SHAPES
        assert len(run._compiled) <= MOST_SHAPES


def test_frames_of_any_layout(device):
    net, x = lively(UNet("nearest")).to(device), torch.randn(2, 3, *SIZE, device=device)
    run, mask = sbnet.sparsify(net, x, block=4), torch.rand(2, *SIZE, device=device) < 0.01
    want = run(x, mask, copy=True)
    wide = torch.randn(2, 5, SIZE[0], 2 * SIZE[1], device=device)
    wide[:, 1:4, :, ::2] = x
    for other in (x.contiguous(memory_format=torch.channels_last), wide[:, 1:4, :, ::2]):
        assert_holds(run(other, mask), want, want.double())


def test_parameters_written_in_place_are_seen():
    net, x = lively(Residual()), torch.randn(1, 3, *SIZE)
    run, mask = sbnet.sparsify(net, x), torch.ones(1, *SIZE)
    run(x, mask)
    with torch.no_grad():
        net.stem[0].weight.mul_(2)
        net.stem[1].running_mean.add_(0.5)
        net.fc.bias.add_(1)
        want, exact = net(x), copy.deepcopy(net).double()(x.double())
    assert_holds(run(x, mask), want, exact)


def test_weights_of_transposed_convolutions_written_in_place_are_seen(device):
    """Which a CPU holds in an order of its own."""
    net, x = lively(UNet("transpose")).to(device), torch.randn(1, 3, *SIZE, device=device)
    run, mask = sbnet.sparsify(net, x), torch.ones(1, *SIZE, device=device)
    run(x, mask)
    with torch.no_grad():
        net.up[0].weight.mul_(2)
        net.up[1].bias.add_(1)
        want, exact = net(x), copy.deepcopy(net).double()(x.double())
    assert_holds(run(x, mask), want, exact)


@pytest.mark.parametrize("at", [0, -2])  # before anything is written, and after most of it
def test_after_an_exception_the_next_call_is_right(at):
    net, x = lively(Yolo()), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=4)
    masks = [torch.rand(1, *SIZE) < 0.01 for _ in range(2)]
    want = run(x, masks[1], copy=True)
    run(x, masks[0])
    executor, plain = run.executor, run.executor.step

    def fails(node, *args):
        if node is executor.nodes[at]:
            raise KeyboardInterrupt
        plain(node, *args)

    executor.step = fails
    with pytest.raises(KeyboardInterrupt):
        run(x, torch.zeros(1, *SIZE))  # computes nothing where the call before did, and does not come to clear it
    del executor.step
    for got, right in zip(run(x, masks[1]), want, strict=True):
        assert torch.equal(got, right)


def test_after_an_exception_a_cached_run_begins_anew():
    """What the failed call computed is of a frame without a result: nothing of it may be kept."""
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=4, mode="cached")
    run(x, torch.ones(1, *SIZE))
    executor, plain = run.executor, run.executor.step

    def fails(node, *args):
        if node is executor.nodes[-1]:
            raise KeyboardInterrupt
        plain(node, *args)

    executor.step = fails
    with pytest.raises(KeyboardInterrupt):
        run(torch.randn_like(x), torch.ones(1, *SIZE))
    del executor.step
    with torch.no_grad():
        assert_holds(run(x, torch.zeros(1, *SIZE)), net(x), copy.deepcopy(net).double()(x.double()))


def test_dense_nodes_of_a_cached_run_keep_what_is_outside_the_mask():
    """Of a frame that differs everywhere, a reflected border, which runs dense, takes the mask's pixels alone."""
    net = lively(nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3)))
    theirs, exact = CachedOracle(net), CachedOracle(copy.deepcopy(net).double())
    run, mask = sbnet.sparsify(net, torch.zeros(1, 3, *SIZE), block=4, mode="cached"), torch.zeros(1, *SIZE)
    mask[:, 20:23, 30:33] = 1
    for given in (mask, mask, mask.roll(9, 2)):
        x, masks = torch.randn(1, 3, *SIZE), PlaneMasks(given, 4)
        assert_holds(run(x, given), theirs([x], masks), exact([x.double()], masks))


def test_feature_maps_lie_channels_last():
    """The layout that the kernels read a vector at a time; any other would be right as well, and slow."""
    run = sbnet.sparsify(lively(UNet("nearest")), torch.zeros(2, 3, *SIZE), block=4)
    tensors = run.executor.tensors.values()
    assert len(tensors) > 5
    assert all(t.stride(1) == 1 and t.stride(2) == t.shape[3] * t.stride(3) for t in tensors)


@pytest.mark.parametrize("mode", ["masked", "cached"])
def test_a_caller_may_write_into_the_result(mode, device):
    net, x = lively(conv(3, 8)).to(device), torch.randn(1, 3, *SIZE, device=device)
    run, fresh = (sbnet.sparsify(net, x, block=8, mode=mode) for _ in range(2))
    mask = torch.rand(1, *SIZE, device=device) < 0.01
    run(x, ~mask).add_(1)
    assert torch.equal(run(x, mask), fresh(x, mask))


def test_clones_and_threads():
    net, x = lively(Yolo()), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=4)
    masks = [torch.rand(1, *SIZE) < 0.02 for _ in range(4)]
    want = [run(x, mask, copy=True) for mask in masks]
    wrong: list[int] = []

    def work(own, k: int) -> None:
        for _ in range(5):
            got = own(x, masks[k], copy=True)
            wrong.extend(k for a, b in zip(got, want[k], strict=True) if not torch.equal(a, b))

    runs = [run, run, run.clone(), run.clone()]
    threads = [threading.Thread(target=work, args=(own, k)) for k, own in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert run.clone().compiled.constants is run.compiled.constants


def test_pickles_and_representation():
    net, x = lively(Residual()), torch.randn(1, 3, *SIZE)
    run, mask = sbnet.sparsify(net, x, block=4), torch.rand(1, *SIZE) < 0.01
    assert torch.equal(pickle.loads(pickle.dumps(run))(x, mask), run(x, mask))
    assert repr(run) == "<sbnet.masked Residual on 1x3x40x56: 10 nodes, 1 dense, 3 planes>"
    assert 0 < run.density < 1
    assert {kind for _, kind, _ in run.profile(x, mask, calls=1)} >= {"conv", "max_pool", "linear"}


def test_outputs_of_submodules():
    net, x = lively(Yolo()), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, out=("one", "two.first"))
    found = run(x, torch.ones(1, *SIZE))
    assert list(found) == ["one", "two.first"]
    with torch.no_grad():
        torch.testing.assert_close(found["one"], net.one(net.stem(x)), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="out: nothing: no such submodule"):
        sbnet.sparsify(net, x, out=["nothing"])


class Recurrent(nn.Module):
    """An image and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3 + 8, 8, 3, padding=1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.mix(torch.cat([x, state], 1)))
        return state[:, :4].relu(), state


def test_several_inputs(device):
    net = lively(Recurrent()).to(device)
    x, state = torch.randn(2, 3, *SIZE, device=device), torch.randn(2, 8, *SIZE, device=device)
    mask = torch.rand(2, *SIZE, device=device) < 0.01
    run, masks = sbnet.sparsify(net, (x, state), block=4), PlaneMasks(mask, 4)
    exact = masked_oracle(copy.deepcopy(net).double(), [x.double(), state.double()], masks)
    assert_holds(run(x, state, mask), masked_oracle(net, [x, state], masks), exact)


def test_mask_sources():
    net, x = lively(conv(3, 8)), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8, mask_source=lambda frame: frame.amax(1) > 3)
    assert torch.equal(run(x), sbnet.sparsify(net, x, block=8)(x, x.amax(1) > 3))
    with pytest.raises(ValueError, match="mask_source"):
        run(x, mask=torch.ones(1, *SIZE))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sbnet.sparsify(Branches().eval(), torch.zeros(1, 3, 8, 8)), "may not depend on values"),
        (lambda: sbnet.sparsify(Noisy().eval(), torch.zeros(1, 3, 8, 8)), "rand_like, which is random"),
        (lambda: sbnet.sparsify(conv(3, 4), torch.zeros(3, 8, 8)), "example: expected"),
        (lambda: sbnet.sparsify(conv(3, 4).double(), torch.zeros(1, 3, 8, 8).double()), "example: expected"),
        (
            lambda: sbnet.sparsify(conv(3, 4), torch.zeros(1, 3, 8, 8))(torch.zeros(3, 8, 8), torch.ones(1, 8, 8)),
            "run: x: expected",
        ),
        (lambda: sbnet.sparsify(conv(3, 4), torch.zeros(1, 3, 8, 8), mode="dense"), "mode: expected"),
        (lambda: sbnet.sparsify(conv(3, 4), torch.zeros(1, 3, 8, 8), block=0), "block: expected"),
        (lambda: sbnet.sparsify(conv(3, 4), torch.zeros(1, 3, 8, 8), block="best"), "block: expected"),
        (lambda: sbnet.sparsify(conv(3, 4), torch.zeros(1, 3, 8, 8), block={(5, 5): 8}), r"planes \(8x8\), got"),
        (lambda: sbnet.sparsify(conv(3, 4), torch.zeros(1, 3, 8, 8), margin=-1), "margin: expected"),
    ],
)
def test_errors_are_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


class Drops(nn.Module):
    """Random whatever its mode, as those are who take several samples of a network."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.drop = conv(3, 8), drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


def attend(x: Tensor, p: float) -> Tensor:
    q = x.flatten(2).transpose(1, 2)[:, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=p)


@pytest.mark.parametrize(
    ("drop", "name"),
    [
        (lambda x: F.dropout(x, 0.5, training=True), "dropout"),
        (lambda x: F.dropout2d(x, 0.5, training=True), "feature_dropout"),
        (lambda x: F.alpha_dropout(x, 0.5, training=True), "alpha_dropout"),
        (lambda x: F.rrelu(x, training=True), "rrelu"),
        (lambda x: attend(x, 0.5), "scaled_dot_product_attention"),
        (lambda x: torch.empty_like(x).exponential_() + x, "exponential"),
        (lambda x: torch.bernoulli(x.sigmoid()), "bernoulli"),
    ],
)
def test_what_is_random_is_refused_by_name(drop, name):
    with pytest.raises(ValueError, match=f"expected a network in eval mode, got {name}, which is random"):
        sbnet.sparsify(Drops(drop).eval(), torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0, training=True),
        lambda x: F.rrelu(x, training=False),
        lambda x: attend(x, 0.0),
    ],
)
def test_what_could_be_random_and_is_not_is_taken(drop):
    net, x = Drops(drop).eval(), torch.rand(1, 3, 8, 8)
    torch.testing.assert_close(sbnet.sparsify(net, x)(x, torch.ones(1, 8, 8)), net(x), rtol=1e-5, atol=1e-6)
