"""Inside `sbnet.masked` zeros and activations are left undone until they are read, and then never missing."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from support.helpers import assert_as_accurate_as_torch, assert_bitwise

SIZE, BLOCK = (32, 40), 8


def data(device, channels=3, density=0.01):
    torch.manual_seed(1)
    x, mask = torch.randn(2, channels, *SIZE), torch.rand(2, *SIZE) < density
    mask[:, 3, 3] = True
    return x.to(device), mask.to(device)


def layers(device, channels=3):
    torch.manual_seed(0)
    found = nn.ModuleDict(
        {
            "conv": nn.Conv2d(channels, 8, 3, padding=1),
            "norm": nn.BatchNorm2d(8),
            "next": nn.Conv2d(8, 8, 3, padding=1),
            "one": nn.Conv2d(8, 8, 1, bias=False),
            "other": nn.BatchNorm2d(8),
            "down": nn.Conv2d(8, 8, 3, 2, 1),
            "wide": nn.Conv2d(8, 8, 5, padding=2, groups=8),
        }
    )
    for module in found.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight), nn.init.normal_(module.bias)
    return found.to(device)


def inline_(x, other):
    x += other
    return x


def response_norm(x, norm):
    """ConvNeXtV2's, of channels that lie last: a map is not an op's first argument."""
    x = x.permute(0, 2, 3, 1)
    size = x.norm(p=2, dim=(1, 2), keepdim=True)
    shares = x * (size / (size.mean(-1, keepdim=True) + 1e-6))
    return (x + torch.addcmul(norm.bias.view(1, 1, 1, -1), norm.weight.view(1, 1, 1, -1), shares)).permute(0, 3, 1, 2)


# what a network may do with maps that are not made yet
NETWORKS = {
    "activation in place": lambda n, x: F.relu_(n["norm"](n["conv"](x))),
    "both sides of an activation": lambda n, x: (lambda y: F.relu(y) + 2 * y)(n["norm"](n["conv"](x))),
    "both sides of a convolution": lambda n, x: (lambda y: n["next"](F.silu(y)) + n["one"](y))(n["conv"](x)),
    "residual": lambda n, x: (lambda y: n["next"](F.relu_(inline_(n["norm"](n["one"](y)), y))))(F.relu(n["conv"](x))),
    "residual after a norm": lambda n, x: (
        lambda y: F.relu_(inline_(n["norm"](n["one"](y)).clone(), n["other"](n["next"](y))))
    )(F.relu(n["conv"](x))),
    "a slice written": lambda n, x: n["next"](
        F.relu(inline_(torch.cat([n["conv"](x), n["wide"](n["conv"](x))], 1)[:, :8], n["norm"](n["one"](n["conv"](x)))))
    ),
    "two norms added": lambda n, x: (
        lambda y: n["next"](F.relu_(inline_(n["norm"](n["one"](y)), n["other"](n["next"](y)))))
    )(F.relu(n["conv"](x))),
    "sum, then silu": lambda n, x: (lambda y: F.silu(n["norm"](n["one"](y)) + y))(n["conv"](x)),
    "sum of convolutions": lambda n, x: (lambda y: F.gelu(n["one"](y) + n["next"](y)))(F.hardswish(n["conv"](x))),
    "leaky in place": lambda n, x: n["next"](F.leaky_relu_(n["norm"](n["conv"](x)), 0.1)),
    "an unknown op": lambda n, x: torch.tanh(n["norm"](n["conv"](x))) * n["conv"](x).sigmoid(),
    "larger windows": lambda n, x: n["wide"](F.relu(n["wide"](F.relu(n["norm"](n["conv"](x)))))),
    "strides": lambda n, x: n["next"](F.relu(n["other"](n["down"](F.relu(n["norm"](n["conv"](x))))))),
    "pools": lambda n, x: n["next"](F.max_pool2d(F.relu(n["norm"](n["conv"](x))), 3, 2, 1)),
    "average pools": lambda n, x: n["next"](
        F.avg_pool2d(F.relu(n["norm"](n["conv"](x))), 2) + F.avg_pool2d(n["conv"](x), 3, 2, 1, count_include_pad=False)
    ),
    "channels joined": lambda n, x: n["next"](
        torch.cat([n["norm"](n["conv"](x))[:, :4], F.relu(n["one"](n["conv"](x)))[:, 4:]], 1)
    ),
    "parts joined": lambda n, x: torch.cat([F.relu(n["norm"](n["conv"](x))), n["one"](n["conv"](x))], 1),
    "views": lambda n, x: (lambda y: y.flatten(1).view(2, 8, *SIZE)[:, :, :8])(n["norm"](n["conv"](x))),
    "activation without a layer": lambda n, x: n["one"](F.relu(F.silu(n["norm"](n["conv"](x))), inplace=True)),
    "losses": lambda n, x: (
        lambda a, b: (a - b).square().mean() + (a * b * 0.5).sum() + ((a - 1.5 * x[:, :1]) ** 2).sum()
    )(n["norm"](n["conv"](x)), F.relu(n["next"](n["conv"](x)))),
    "products with others": lambda n, x: (lambda a: (a - torch.ones_like(a)) * torch.full_like(a, 2.0))(n["conv"](x)),
    "a mean of a norm": lambda n, x: n["norm"](n["conv"](x)).square().mean() + F.relu(n["next"](n["conv"](x))).mean(),
    "shared weights": lambda n, x: n["next"](F.relu(n["next"](F.relu(n["next"](n["conv"](x)))))),
}


def gradients(of, net, x, mode, dtype):
    net = net.to(dtype)
    net.zero_grad()
    with mode:
        y = of(net, x.to(dtype))
        loss = (
            y.float().sum()
            if not y.dim()
            else (y * torch.linspace(-1, 1, y.numel(), dtype=dtype, device=y.device).view(y.shape)).sum()
        )
    loss.backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_left_undone_is_done_before_it_is_looked_at(device, name, poisoned):
    """Poisoned: memory that was not written holds NaN."""
    x, mask = data(device)
    of = NETWORKS[name]
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(poisoned, warn_only=True)
    try:
        got = gradients(of, layers(device), x, sbnet.masked(mask, BLOCK), torch.float32)
    finally:
        torch.use_deterministic_algorithms(was)
    torchs = gradients(of, layers(device), x, DenseMasked(mask, BLOCK), torch.float32)
    exact = gradients(of, layers(device), x, DenseMasked(mask, BLOCK), torch.float64)
    assert len(got) == len(torchs) == len(exact)
    for k, parts in enumerate(zip(got, torchs, exact, strict=True)):
        if not parts[2].dim():  # one number's error is a matter of luck
            torch.testing.assert_close(parts[0], parts[2].float(), rtol=1e-4, atol=1e-4)
        elif parts[2].norm() > 1e-9:
            assert_as_accurate_as_torch(*parts, f"{name}: {k}")
        else:  # of a bias that a norm takes away again: all that is there is rounding
            assert parts[0].norm() < 1e-2 * max(t.norm() for t in exact[1:])


def test_what_is_pending_reads_no_later_values(device):
    x, mask = data(device)
    net = layers(device)

    def run(x):
        y = net["conv"](x)
        z = net["one"](y)
        y.mul_(2)
        return F.relu(z)

    with torch.no_grad():
        with sbnet.masked(mask, BLOCK):
            got = run(x)
        with DenseMasked(mask, BLOCK):
            wanted = run(x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_who_holds_a_map_when_the_context_ends(device):
    x, mask = data(device)
    net = layers(device)
    active = sbnet.masked(mask, BLOCK)
    with active:
        a = net["conv"](x)
        b = net["norm"](a)
        c = F.relu(b)
    inside = active.active(SIZE).pixel_mask(SIZE)
    with DenseMasked(mask, BLOCK):
        wanted = F.relu(layers(device)["norm"](net["conv"](x)))
    for y in (a, b, c):
        assert not y[(~inside).expand_as(y)].any()
        assert y[inside.expand_as(y)].any()
    torch.testing.assert_close(c, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net["norm"].running_mean, 0.1 * a.sum((0, 2, 3)) / inside.sum())


def test_gradients_of_maps_are_zero_outside(device):
    """Of those whose gradient is asked for, inside or later."""
    x, mask = data(device)
    net = layers(device)
    active, seen = sbnet.masked(mask, BLOCK), []
    with active:
        a = net["conv"](x)
        b = F.relu(net["norm"](a))
        b.retain_grad()
        c = net["next"](b)
        c.register_hook(lambda grad: seen.append(grad))
        d = net["next"](F.relu(net["other"](c)))
    inside = active.active(SIZE).pixel_mask(SIZE)
    (of_a,) = torch.autograd.grad(d.square().sum(), a, retain_graph=True)
    d.square().sum().backward()
    for grad in (of_a, b.grad, *seen):
        assert torch.isfinite(grad).all()
        assert not grad[(~inside).expand_as(grad)].any()
        assert grad.any()


def test_a_result_that_was_written_since_is_refused(device):
    """As PyTorch does it."""
    x, mask = data(device)
    net = layers(device)
    with sbnet.masked(mask, BLOCK):
        y = F.relu(inline_(net["norm"](net["conv"](x)), net["other"](net["one"](net["conv"](x)))))
        z = y.square()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_second_derivatives_are_refused_but_with_stacks(device):
    x, mask = data(device)
    for capacity in (None, 1.0):
        net = layers(device)
        with sbnet.masked(mask, BLOCK, capacity=capacity):
            y = net["next"](F.silu(net["conv"](x)))
            loss = y.square().sum()
        if capacity is None:
            with pytest.raises(RuntimeError, match="create_graph: expected a context with a capacity"):
                torch.autograd.grad(loss, net["conv"].weight, create_graph=True)
        else:
            (first,) = torch.autograd.grad(loss, net["conv"].weight, create_graph=True)
            first.square().sum().backward()
            assert net["conv"].weight.grad.any()


class Again(torch.autograd.Function):
    """Computes again in its backward pass, as torch.utils.checkpoint does: a function that no mode sees."""

    @staticmethod
    def forward(ctx, x, net):
        ctx.save_for_backward(x)
        ctx.net = net
        return net["one"](net["other"](x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        Again.seen = x, grad
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = ctx.net["one"](ctx.net["other"](leaf))
        return torch.autograd.grad(y, leaf, grad)[0], None


def test_functions_of_autograd_are_given_whole_maps_and_gradients(device):
    x, mask = data(device)
    net = layers(device)
    active = sbnet.masked(mask, BLOCK)
    with active:
        y = Again.apply(net["norm"](net["conv"](x)), net)
        loss = net["next"](F.relu(y)).square().sum() + y.square().sum()
        loss.backward()
    inside = active.active(SIZE).pixel_mask(SIZE)
    for t in Again.seen:
        assert t.any()
        assert not t[(~inside).expand_as(t)].any()
    assert torch.isfinite(net["conv"].weight.grad).all()
    assert net["conv"].weight.grad.any()


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_masks(device, batch, density):
    torch.manual_seed(1)
    x = torch.randn(batch, 3, *SIZE, device=device)
    mask = torch.full((batch, *SIZE), bool(density), device=device)
    got = gradients(NETWORKS["residual"], layers(device), x, sbnet.masked(mask, BLOCK), torch.float32)
    assert all(torch.isfinite(t).all() for t in got)
    assert not density or not batch or all(t.any() for t in got[:2])
    if not density:
        assert not any(t.any() for t in got)


def test_channels_that_lie_last_in_another_argument(device):
    """A response norm's products are maps, though no op's first argument is one; its sums [N,1,1,C] are none. Neither
    has the mask of another plane."""
    x, mask = data(device)
    mask = torch.zeros_like(mask)
    mask[:, 20, 3] = True
    of = lambda n, x: n["next"](response_norm(F.relu(n["conv"](x)), n["norm"]))  # noqa: E731
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {"conv": nn.Conv2d(3, 32, 3, padding=1), "norm": nn.BatchNorm2d(32), "next": nn.Conv2d(32, 8, 3, padding=1)}
    ).to(device)
    nn.init.normal_(net["norm"].weight), nn.init.normal_(net["norm"].bias)
    got = gradients(of, net, x, sbnet.masked(mask, BLOCK), torch.float32)
    torchs = gradients(of, net, x, DenseMasked(mask, BLOCK), torch.float32)
    exact = gradients(of, net, x, DenseMasked(mask, BLOCK), torch.float64)
    for parts in zip(got, torchs, exact, strict=True):
        assert_as_accurate_as_torch(*parts)


@pytest.mark.parametrize("name", NETWORKS)
def test_planes_that_are_active_as_a_whole(name):
    """On a CPU they are PyTorch's own, bit for bit."""
    x, mask = data("cpu")
    x, mask = x.contiguous(memory_format=torch.channels_last), torch.ones_like(mask)
    got = gradients(NETWORKS[name], layers("cpu"), x, sbnet.masked(mask, BLOCK), torch.float32)
    want = gradients(NETWORKS[name], layers("cpu"), x, contextlib.nullcontext(), torch.float32)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b)


def test_without_gradients(device):
    x, mask = data(device)
    net = layers(device)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), sbnet.masked(mask, BLOCK):
            y = NETWORKS["residual"](net, x)
        assert torch.isfinite(y).all()
        assert not y.requires_grad


@pytest.mark.parametrize("written", ["items", "items of a new map", "chosen items"])
@torch.no_grad()
def test_items_that_are_written(device, written):
    """Layers that read the map before see it as it was, those after it see zeros where it is not active."""
    net = layers(device)
    x, mask = data(device)

    def run():
        y = net["conv"](x)
        before = net["next"](y), net["norm"](y)
        if written == "items of a new map":
            new = torch.zeros_like(y)
            new[:, 1:] = y[:, :-1]
            y = new
        elif written == "items":
            y[:, :, 2:20] = 7
        else:
            y[y > 0] = 0.5
        return torch.cat([net["next"](y), y + 0, before[0] + 1, F.relu(before[1])], 1)

    with sbnet.masked(mask, block=BLOCK):
        got = run()
    with DenseMasked(mask, BLOCK) as dense:
        inside = dense.planes(SIZE)
        y = torch.where(inside, net["conv"](x), 0)
        before = net["next"](y) + 1, F.relu(net["norm"](y))
        if written == "items of a new map":
            y = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        else:
            new = y.clone()
            new[(slice(None), slice(None), slice(2, 20)) if written == "items" else new > 0] = (
                7 if written == "items" else 0.5
            )
            y = torch.where(inside, new, 0)
        want = torch.cat([net["next"](y), y, *before], 1)
    torch.testing.assert_close(got, torch.where(inside, want, 0), rtol=1e-4, atol=1e-4)


VIEWS = {
    "of a channel": lambda y: y.select(1, 2).fill_(4),
    "unbound": lambda y: y.unbind(1)[0].add_(5),
    "of channels last": lambda y: y.permute(0, 2, 3, 1)[..., 0].add_(2),
    "flat": lambda y: y.flatten(2)[:, 0].add_(1),
    "of some rows": lambda y: y[:, :, 3:7].mul_(3),
    "dropped": lambda y: F.dropout(y[:, :2], 1.0, True, True),
    "in a list": lambda y: torch._foreach_add_([y], 1.0),
    "another's result": lambda y: torch.clamp(y, 0, 1, out=y),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@torch.no_grad()
def test_a_map_written_through_a_view(device, view):
    """Layers that read it before see it as it was, those after it what was written, where it is active."""
    net = layers(device)
    x, mask = data(device)
    with sbnet.masked(mask, block=BLOCK):
        y = net["conv"](x)
        before = net["next"](y), net["norm"](y)
        view(y)
        got = torch.cat([net["next"](y), y + 0, before[0] + 1, F.relu(before[1])], 1)
    with DenseMasked(mask, BLOCK) as dense:
        y, inside = net["conv"](x), dense.planes(SIZE)
        before = net["next"](y) + 1, F.relu(net["norm"](y))
    view(y)
    y = torch.where(inside, y, 0)
    with DenseMasked(mask, BLOCK):
        want = torch.cat([net["next"](y), y, *before], 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("write", "why"),
    [(lambda y: y.view(2, -1)[:, :5].zero_(), "a view of"), (lambda y: y.transpose_(2, 3), "keep its shape")],
)
def test_writes_that_cannot_be_followed_are_refused(write, why):
    net = layers("cpu")
    x, mask = data("cpu")
    with torch.no_grad(), sbnet.masked(mask, block=BLOCK), pytest.raises(ValueError, match=why):
        write(net["conv"](x))
