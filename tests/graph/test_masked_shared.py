"""What a step under `sbnet.masked` does once for several layers: gradients of a map that several layers read, batches
that norms count, weights turned for gradients."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.engine.eager_once import Weights
from support.helpers import assert_as_accurate_as_torch, assert_bitwise

SIZE, BLOCK, CHANNELS = (24, 32), 8, 8


class Readers(nn.Module):
    """A map that two convolutions, a sum and a head of its own read."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.one, self.other = (nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False) for _ in range(2))
        self.next, self.head = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(3))

    def forward(self, x, cut=False):
        x = F.relu_(self.norms[0](self.stem(x)))
        y = self.norms[1](self.next(F.relu(self.one(x))))
        y += x
        z = F.relu_(y) + self.norms[2](self.other(x.detach() if cut else x))
        return x, z, self.head(x)


def made(device, dtype=torch.float32):
    torch.manual_seed(0)
    net = Readers().to(device, dtype)
    x, mask = torch.randn(2, 3, *SIZE), torch.zeros(2, *SIZE)
    mask[0, 3:9, 5:7] = mask[1, 20, 30] = 1
    return net, x.to(device, dtype), mask.to(device)


@pytest.mark.parametrize("over", ["the same layers", "others"])
def test_a_backward_pass_inside_another(device, over):
    """The readers of a map hold what they give for the last of them: another pass would take it for its own."""
    net, x, mask = made(device)
    with sbnet.masked(mask, block=BLOCK):
        _, z, head = net(x)
        loss, other = z.square().mean() + head.square().mean(), net(x)[2].square().mean()
    want = torch.autograd.grad(loss, net.norms[0].weight, retain_graph=True)[0]
    inner = [loss if over == "the same layers" else other]

    def again(_):
        if inner:
            torch.autograd.grad(inner.pop(), net.stem.weight, retain_graph=True)

    hook = net.norms[2].bias.register_hook(again)
    refused = pytest.raises(RuntimeError, match="one backward pass at a time")
    with refused if over == "the same layers" else contextlib.nullcontext():
        loss.backward(retain_graph=True)
        assert_bitwise(net.norms[0].weight.grad, want)
    hook.remove()
    assert_bitwise(torch.autograd.grad(loss, net.norms[0].weight)[0], want)


def total(y):
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)).sum()


# Which derivatives are asked for: of the map and of weights before and behind it, of one loss or both.
ASKED = {
    "all": lambda net, x, z, h: torch.autograd.grad(total(z) + total(h), list(net.parameters())),
    "the map": lambda net, x, z, h: torch.autograd.grad(total(z), [x], retain_graph=True),
    "behind it": lambda net, x, z, h: torch.autograd.grad(total(z), [net.other.weight, net.next.weight]),
    "one reader": lambda net, x, z, h: torch.autograd.grad(total(h), [net.stem.weight, net.head.weight]),
    "one after the other": lambda net, x, z, h: [
        *torch.autograd.grad(total(z), [net.next.weight], retain_graph=True),
        *torch.autograd.grad(total(h), [net.stem.weight], retain_graph=True),
        *torch.autograd.grad(total(z), [net.stem.weight, net.one.weight], retain_graph=True),
        *torch.autograd.grad(total(z) + total(h), [net.stem.weight, x, net.norms[0].bias]),
    ],
}


@pytest.mark.parametrize("cut", [False, True], ids=["", "cut"])
@pytest.mark.parametrize("asked", ASKED)
def test_gradients_of_a_map_that_several_layers_read(device, asked, cut):
    def run(mode, dtype):
        net, x, mask = made(device, dtype)
        with mode(mask, BLOCK):
            maps = net(x, cut)
        return ASKED[asked](net, *maps)

    if asked == "behind it" and cut:
        pytest.skip("asked for as without")
    inside = sbnet.masked(made(device)[2], BLOCK).active(SIZE).pixel_mask(SIZE)

    def inner(mode, dtype):
        return [torch.where(inside, t, 0.0) if t.shape[2:] == SIZE else t for t in run(mode, dtype)]

    got, torchs, exact = (
        inner(sbnet.masked, torch.float32), inner(DenseMasked, torch.float32), inner(DenseMasked, torch.float64),
    )  # fmt: skip
    for k, parts in enumerate(zip(got, torchs, exact, strict=True)):
        assert_as_accurate_as_torch(*parts, f"{asked}: {k}")
    for a, b in zip(got, inner(sbnet.masked, torch.float32), strict=True):
        assert_bitwise(a, b)


def test_a_backward_pass_that_failed_leaves_nothing(device):
    def run(fails):
        net, x, mask = made(device)
        with sbnet.masked(mask, BLOCK):
            x, z, h = net(x)

        def fail(grad):
            raise ZeroDivisionError

        if fails:
            hook = net.next.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                torch.autograd.grad(total(z), list(net.parameters())[:5], retain_graph=True)
            hook.remove()
        return torch.autograd.grad(total(z) + total(h), list(net.parameters()))

    for a, b in zip(run(True), run(False), strict=True):
        assert_bitwise(a, b)


def test_norms_count_batches(device):
    """Once a call, before anybody looks; of a norm without a momentum the average depends on it."""
    net, x, mask = made(device)
    shared, average = nn.BatchNorm2d(3).to(device), nn.BatchNorm2d(3, momentum=None).to(device)
    seen = []
    for step in (1, 2, 3):
        with sbnet.masked(mask, BLOCK):
            net(x)
            shared(shared(x))
            y = average(x * step)
            if step == 2:
                seen += [int(shared.num_batches_tracked), net.norms[0].num_batches_tracked.view(1) + 0]
        assert [int(n.num_batches_tracked) for n in net.norms] == [step] * 3
        assert int(shared.num_batches_tracked) == 2 * step
        assert int(average.num_batches_tracked) == step
        assert y.any()
    assert list(map(int, seen)) == [4, 2]
    inside = sbnet.masked(mask, BLOCK).active(SIZE).pixel_mask(SIZE)
    mean = torch.where(inside, x, 0.0).sum((0, 2, 3)) / inside.sum()
    torch.testing.assert_close(average.running_mean, 2 * mean)


def test_an_error_inside_loses_no_count(device):
    net, x, mask = made(device)

    def fails():
        with sbnet.masked(mask, BLOCK):
            net(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert int(net.norms[0].num_batches_tracked) == 1


@pytest.mark.parametrize("halves", [False, True], ids=["float32", "bfloat16"])
def test_weights_that_change_between_steps(device, halves):
    """A context turns the weights of the step before at once: as they are now, whichever are used."""
    net, x, mask = made(device)

    def gradients(mode, skip):
        net.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=halves), mode(mask, BLOCK):
            y = net.one(F.relu(net.norms[0](net.stem(x))))
            y = y if skip else net.head(y)
            loss = (total(net.next(F.relu(y)).float())) / 100
        loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    for step in range(4):
        got, wanted = gradients(sbnet.masked, step == 2), gradients(DenseMasked, step == 2)
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() < (0.1 if halves else 1e-4) * b.norm() + 1e-6
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)


@pytest.mark.parametrize("how", ["data", "data anew", "a list", "in place"])
def test_weights_written_between_layers(how):
    """A context turns all weights when it meets the first: one that a hook of its layer writes is turned again."""
    first, weight = (torch.randn(4, 4, 3, 3) for _ in range(2))
    held = weight.data

    def step(write):
        weights = Weights()
        weights.of(first, torch.float32, True)
        if write:
            if how == "data anew":
                weight.data = weight.data * 3
            elif how == "in place":
                weight.mul_(3)
            else:
                weights.written([[held]] if how == "a list" else [held])
                held.mul_(3)
        return weights.of(weight, torch.float32, True)

    step(False)
    for write in (False, True):
        same, turned = step(write)
        assert_bitwise(same, weight)
        assert_bitwise(turned, weight.transpose(0, 1).flip(2, 3))


@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: t.__setitem__(0, 2.0), lambda t: t.copy_(t * 2)])
def test_what_writes_weights_is_seen(write, monkeypatch):
    seen = []
    monkeypatch.setattr(Weights, "written", lambda self, tensors: seen.extend(tensors))
    net = nn.Conv2d(3, 3, 1)
    with sbnet.masked(torch.ones(1, 8, 8, dtype=torch.bool), block=4):
        data = net.weight.data
        write(data)
    assert any(t is data for t in seen)
