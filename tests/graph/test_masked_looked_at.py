"""Inside `sbnet.masked`: the gradient of a map whose layer a sum or an activation joined. It is asked for before or
after the context ends, and is that of everything that reads the map."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from sbnet.engine.eager_chains import Conv, Norm
from sbnet.engine.eager_passes import Readers
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, unwritten_is_nan

SIZE, BLOCK = (24, 32), 8


def joined(n, x):
    return F.relu(n["conv"](x))


# a map, and what is made of it
NETWORKS = {
    "activation": lambda n, x: (lambda z: (z, F.gelu(z)))(n["conv"](x)),
    "norm, activation": lambda n, x: (lambda z: (z, F.silu(z)))(n["norm"](n["conv"](x))),
    "norm, relu": lambda n, x: (lambda z: (z, F.relu(z)))(n["norm"](n["conv"](x))),
    "sum": lambda n, x: (lambda r, z: (z, z + r))(joined(n, x), n["next"](x)),
    "sum, activation": lambda n, x: (lambda r, z: (z, F.silu(z + r)))(joined(n, x), n["next"](x)),
    "sum, activation in place": lambda n, x: (lambda r, z: (z, F.relu_(z + r)))(joined(n, x), n["norm"](n["next"](x))),
    "of a sum": lambda n, x: (lambda z: (z, F.relu(z)))(n["norm"](n["next"](x)) + joined(n, x)),
    "residual in place": lambda n, x: (lambda r, z: (z, F.relu_(r.add_(z))))(
        n["norm"](joined(n, x)).clone(), n["next"](x)
    ),
    "several": lambda n, x: (lambda z: (z, F.relu(z) + 2 * z + F.silu(z)))(n["norm"](n["conv"](x))),
    "its own residual": lambda n, x: (lambda z: (z, F.relu(z) + z))(n["conv"](x)),
}
ASKED = ["hook", "changing hook", "retain_grad", "backward", "grad", "hook, later", "retain_grad, later", "grad, later"]


def gradients(of, asked, mode, dtype, device):
    """Of the map, and of all parameters."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, *SIZE, device=device, dtype=dtype)
    parts = {"conv": nn.Conv2d(8, 8, 3, padding=1, bias=False), "norm": nn.BatchNorm2d(8)}
    net = nn.ModuleDict({**parts, "next": nn.Conv2d(8, 8, 3, padding=1, bias=False)}).to(device, dtype)
    nn.init.normal_(net["norm"].weight), nn.init.normal_(net["norm"].bias)
    seen = []
    with mode:
        z, y = of(net, x)
        if asked == "hook":
            z.register_hook(lambda grad: seen.append(grad.clone()))
        elif asked == "changing hook":
            z.register_hook(lambda grad: 2 * grad + 1)
        elif asked == "retain_grad":
            z.retain_grad()
        loss = (net["next"](y) * torch.linspace(-1, 1, y.numel(), dtype=dtype, device=device).view(y.shape)).sum()
        if asked == "backward":
            loss.backward(inputs=[z, *net.parameters()])
        elif asked == "grad":
            seen += torch.autograd.grad(loss, [z], retain_graph=True)
    if asked == "hook, later":
        z.register_hook(lambda grad: seen.append(grad.clone()))
    elif asked == "retain_grad, later":
        z.retain_grad()
    elif asked == "grad, later":
        seen += torch.autograd.grad(loss, [z], retain_graph=True)
    if asked != "backward":
        loss.backward()
    if z.retains_grad or asked == "backward":
        seen.append(z.grad)
    return seen + [p.grad for p in net.parameters() if p.grad is not None]


def data(device):
    mask = torch.zeros(2, *SIZE, dtype=torch.bool, device=device)
    mask[0, 3:12, 5:20] = mask[1, 20, 30] = True
    return mask


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_maps_are_those_of_all_that_reads_them(device, name, asked):
    of, mask = NETWORKS[name], data(device)
    with unwritten_is_nan():
        got = gradients(of, asked, sbnet.masked(mask, BLOCK), torch.float32, device)
    torchs = gradients(of, asked, DenseMasked(mask, BLOCK), torch.float32, device)
    exact = gradients(of, asked, DenseMasked(mask, BLOCK), torch.float64, device)
    assert len(got) == len(torchs) == len(exact) > 1
    for k, parts in enumerate(zip(got, torchs, exact, strict=True)):
        assert_as_accurate_as_torch(*parts, f"{k}")


def test_a_map_that_nobody_looks_at_has_no_gradient_of_its_own(device, monkeypatch):
    """Its layer's is computed once, through the activation."""
    ran = []
    for kind in (Conv, Norm):
        method = kind.gradients
        monkeypatch.setattr(kind, "gradients", lambda of, *args, method=method: ran.append(of) or method(of, *args))
    of = NETWORKS["norm, relu"]
    gradients(lambda n, x: (torch.zeros(()), of(n, x)[1]), "", sbnet.masked(data(device), BLOCK), torch.float32, device)
    assert [layer.activation for layer in ran] == ["none", "relu", "none"]


def test_readers_of_a_map_add_up_their_gradients_in_their_own_launches(device, monkeypatch):
    """Nodes of maps whose layers others joined are none of its readers."""
    summed, mask = [], data(device)
    method = Readers._sum
    monkeypatch.setattr(Readers, "_sum", lambda of, a, b: summed.append((a, b)) or method(of, a, b))
    torch.manual_seed(0)
    stem, one, two = (nn.Conv2d(8, 8, 3, padding=1, device=device) for _ in range(3))
    with sbnet.masked(mask, BLOCK):
        y = stem(torch.randn(2, 8, *SIZE, device=device))
        loss = (F.silu(one(y)) + F.gelu(two(y))).square().sum()
        del y
    loss.backward()
    assert not any(a is not None and b is not None for a, b in summed)


def test_what_was_made_without_gradients_has_none(device):
    mask, x = data(device), torch.randn(2, 8, *SIZE, device=device)
    conv = nn.Conv2d(8, 8, 3, padding=1, device=device)
    with sbnet.masked(mask, BLOCK):
        with torch.no_grad():
            z = conv(x)
        y = F.relu(z)
        with torch.no_grad():
            want = F.relu(conv(x))
    assert not y.requires_grad
    assert_bitwise(y, want)
