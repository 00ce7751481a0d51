"""Gradients of weights that are computed together at the end of their layers' backward passes (eager_grads.py)."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.engine import eager_grads
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, captured

SIZE, CHANNELS = (24, 32), 8


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """On a CPU too, in groups of three."""
    monkeypatch.setattr(eager_grads, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(eager_grads, "TOGETHER", 3)


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call had."""
    found: list[int] = []
    run = eager_grads.Group._run

    def counted(self):
        if self._works:
            found.append(len(self._works))
        run(self)

    monkeypatch.setattr(eager_grads.Group, "_run", counted)
    return found


class Net(nn.Module):
    """Seven convolutions, of which one is used twice and one has a bias."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(4))
        self.one = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(5))
        self.head = nn.Conv2d(CHANNELS, 4, 1)

    def forward(self, x):
        x = F.relu_(self.norms[0](self.stem(x)))
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            y = norm(conv(x))
            y += self.one(x) if conv is self.convs[0] or conv is self.convs[3] else x
            x = F.relu_(y)
        return self.head(x)


def made(device, seed=0):
    torch.manual_seed(seed)
    net = Net().to(device).to(memory_format=torch.channels_last)
    x, mask = torch.randn(2, 3, *SIZE), torch.zeros(2, *SIZE)
    mask[0, 3:9, 5:7] = mask[1, 20, 30] = 1
    return net, x.to(device), mask.to(device) > 0


def backward(net, x, mask, halves=False):
    """Gradients of a step, by name."""
    net.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=halves), sbnet.masked(mask, block=8):
        loss = net(x).float().square().mean()
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters()}


@contextlib.contextmanager
def apart(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(eager_grads, "DEVICES", set())
        yield


@pytest.mark.parametrize("halves", [False, True], ids=["float32", "bfloat16"])
def test_gradients_are_those_of_each_layer(device, halves, monkeypatch, calls):
    net, x, mask = made(device)
    with apart(monkeypatch):
        each = backward(net, x, mask, halves)
    assert not calls
    backward(net, x, mask, halves)  # a first step learns which layers there are
    calls.clear()
    together, again = backward(net, x, mask, halves), backward(net, x, mask, halves)
    assert calls == [1, 3, 3, 1] * 2  # from the last group on; a weight that is used twice makes four of three
    exact = exactly(net, x, mask)
    for name, grad in together.items():
        assert_bitwise(grad, again[name])
        if device == "cpu":  # a GPU cuts lists in other places
            assert_bitwise(grad, each[name])
        assert_as_accurate_as_torch(grad, each[name], exact[name])


def exactly(net, x, mask):
    wide, x = copy.deepcopy(net).double(), x.double()
    wide.zero_grad()
    with DenseMasked(mask, 8):
        loss = wide(x).square().mean()
    loss.backward()
    return {name: p.grad for name, p in wide.named_parameters()}


def test_hooks_and_sums_see_gradients(device, calls):
    net, x, mask = made(device)
    backward(net, x, mask)
    want = {name: grad.clone() for name, grad in backward(net, x, mask).items()}
    seen = {}
    hooks = [p.register_hook(lambda g, name=name: seen.update({name: g.clone()})) for name, p in net.named_parameters()]
    hooks.append(net.convs[1].weight.register_hook(lambda g: 2 * g))
    with sbnet.masked(mask, block=8):
        loss = net(x).square().mean()
    loss.backward()  # to those that are there
    for hook in hooks:
        hook.remove()
    for name, p in net.named_parameters():
        assert_bitwise(seen[name], want[name])
        times = 3 if name == "convs.1.weight" else 2
        torch.testing.assert_close(p.grad, times * want[name])
    assert sum(calls) == 2 * 8 + 1


def test_weights_that_are_used_often(device, calls, monkeypatch):
    net, x, mask = made(device)
    net.convs = nn.ModuleList([net.convs[0]] * 4)
    backward(net, x, mask)
    calls.clear()
    together = backward(net, x, mask)
    assert calls == [1, 3, 3, 3]  # the head, and one convolution beside each
    with apart(monkeypatch):
        each = backward(net, x, mask)
    for name, grad in together.items():
        torch.testing.assert_close(grad, each[name])


def test_a_weight_with_two_biases(device, monkeypatch):
    """A layer whose weight is known with another bias computes its gradients by itself."""
    net, x, mask = made(device)
    twin = nn.Conv2d(CHANNELS, 4, 1).to(device)
    twin.weight = net.head.weight
    net.head = nn.Sequential(net.head, nn.ConvTranspose2d(4, CHANNELS, 1).to(device), twin)
    backward(net, x, mask)
    together = backward(net, x, mask)
    exact = exactly(net, x, mask)
    with apart(monkeypatch):
        each = backward(net, x, mask)
    for name, grad in together.items():
        assert_as_accurate_as_torch(grad, each[name], exact[name])


def test_what_is_held_is_bounded(device, calls, monkeypatch):
    net, x, mask = made(device)
    backward(net, x, mask)
    want = backward(net, x, mask)
    calls.clear()
    monkeypatch.setattr(eager_grads, "MOST_HELD", 3 * 4 * CHANNELS * x[:, 0].numel())  # a layer has two maps of these
    for name, grad in backward(net, x, mask).items():
        torch.testing.assert_close(grad, want[name])
    assert calls == [1, 2, 1, 2, 2]


def test_passes_that_want_no_weights_hold_nothing(device, monkeypatch):
    net, x, mask = made(device)
    backward(net, x, mask)
    groups = []
    give = eager_grads.Group.give
    monkeypatch.setattr(eager_grads.Group, "give", lambda self, *of: groups.append(self) or give(self, *of))
    x.requires_grad_()
    with sbnet.masked(mask, block=8):
        loss = net(x).square().mean()
    torch.autograd.grad(loss, [x])
    assert len(groups) == 8
    assert not any(group._works for group in groups)


def test_layers_that_come_and_go(device):
    """Frozen ones, such as are not run this time, and new ones: None where there is no gradient."""
    net, x, mask = made(device)
    backward(net, x, mask)
    net.convs[0].weight.requires_grad_(False)
    net.convs[3] = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False).to(device)
    one, net.one = net.one, nn.Identity()
    one.zero_grad()
    for _ in range(2):
        found = backward(net, x, mask)
        assert found["convs.0.weight"] is None
        assert one.weight.grad is None
        exact = exactly(net, x, mask)
        for name, grad in found.items():
            if grad is not None:
                torch.testing.assert_close(grad.double(), exact[name], rtol=1e-3, atol=1e-5)


def test_two_steps_in_one_graph_of_autograd(device, calls):
    """Their gradients add up; a pass over a part of the graph, one that failed, and another over all of it."""
    net, x, mask = made(device)
    backward(net, x, mask)
    net.eval()  # batch norms do not follow
    losses = []
    for k in range(2):
        with sbnet.masked(mask, block=8):
            losses.append(net(x + k).square().mean())
    names = [name for name, _ in net.named_parameters()]
    parameters = list(net.parameters())
    both = torch.autograd.grad(losses[0] + losses[1], parameters, retain_graph=True)
    single = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    for name, a, *parts in zip(names, both, *single, strict=True):
        torch.testing.assert_close(a, sum(parts), msg=name)
    calls.clear()
    (head,) = torch.autograd.grad(losses[0], [net.head.weight], retain_graph=True)
    assert_bitwise(head, single[0][names.index("head.weight")])
    assert calls == [1]  # of no other weight

    def fail(grad):
        raise ZeroDivisionError

    hook = net.norms[1].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(losses[0], parameters, retain_graph=True)
    hook.remove()
    for a, b in zip(torch.autograd.grad(losses[0], parameters, retain_graph=True), single[0], strict=True):
        assert_bitwise(a, b)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(losses[0], parameters, create_graph=True)


def test_a_pass_inside_another_is_refused(device):
    """Over the same layers; over others it is none of ours."""
    net, x, mask = made(device)
    backward(net, x, mask)
    parameters = list(net.parameters())
    want = backward(net, x, mask)
    for other in (False, True):
        net.zero_grad()
        losses = []
        for _ in range(2):
            with sbnet.masked(mask, block=8):
                losses.append(net(x).square().mean())

        inner = [losses[other]]

        def again(grad, inner=inner):
            if inner:  # whose own gradients come here, too
                torch.autograd.grad(inner.pop(), parameters, retain_graph=True)

        hook = net.norms[3].bias.register_hook(again)
        with contextlib.nullcontext() if other else pytest.raises(RuntimeError, match="one backward pass at a time"):
            losses[0].backward(retain_graph=True)
        hook.remove()
    for name, p in net.named_parameters():
        assert_bitwise(p.grad, want[name])


def test_gradients_that_are_written_meanwhile_are_refused(device, monkeypatch):
    """As a hook of a node of autograd might do, which is given the same tensor."""
    net, x, mask = made(device)
    backward(net, x, mask)
    give = eager_grads.Group.give

    def written(self, place, x, grad, *more):
        give(self, place, x, grad, *more)
        grad.mul_(2)

    monkeypatch.setattr(eager_grads.Group, "give", written)
    with pytest.raises(RuntimeError, match="hooks that leave gradients"):
        backward(net, x, mask)


@pytest.mark.parametrize("density", [0.0, 1.0])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_and_full_masks(device, batch, density):
    net, x, _ = made(device)
    x = x[:batch]
    mask = torch.rand(batch, *SIZE, device=device) < density
    for _ in range(2):
        found = backward(net.eval(), x, mask)
    for name, grad in found.items():
        if batch:
            assert torch.isfinite(grad).all(), name
        if not density or not batch:
            assert name.startswith("head") or not grad.any() or batch == 0, name


def test_processes_that_send_gradients(device, calls, monkeypatch):
    """They are given layer by layer."""
    net, x, mask = made(device)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(2):
        backward(net, x, mask)
    assert not calls


@pytest.mark.gpu
def test_a_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    net, x, mask = made("cuda")
    backward(net, x, mask, True)
    want = {name: grad.clone() for name, grad in backward(net, x, mask, True).items()}
    graph, found = captured(lambda: backward(net, x, mask, True))
    for grad in found.values():
        grad.fill_(float("nan"))
    graph.replay()
    for name, grad in found.items():
        assert_bitwise(grad, want[name])
