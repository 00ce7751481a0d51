"""ConvNeXt's blocks inside `sbnet.masked`: layers of channels that lie last, and response norms, which libraries write
out in several forms. On active blocks alone, whatever else reads a step of them."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from support.helpers import assert_as_accurate_as_torch

SIZE, BLOCK, CHANNELS = (32, 40), 8, 8


def timms(x, weight, bias):
    size = x.norm(p=2, dim=(1, 2), keepdim=True)
    shares = size / (size.mean(dim=-1, keepdim=True) + 1e-6)
    return x + torch.addcmul(bias.view(1, 1, 1, -1), weight.view(1, 1, 1, -1), x * shares)


def timms_of_planes(x, weight, bias):
    x = x.permute(0, 3, 1, 2)
    size = x.norm(p=2, dim=(2, 3), keepdim=True)
    shares = size / (size.mean(dim=1, keepdim=True) + 1e-6)
    x = x + torch.addcmul(bias.view(1, -1, 1, 1), weight.view(1, -1, 1, 1), x * shares)
    return x.permute(0, 2, 3, 1)


def the_authors(x, weight, bias):
    size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
    shares = size / (size.mean(dim=-1, keepdim=True) + 1e-6)
    return weight.view(1, 1, 1, -1) * (x * shares) + bias.view(1, 1, 1, -1) + x


def huggingfaces(x, weight, bias):
    size = torch.linalg.vector_norm(x, ord=2, dim=(1, 2), keepdim=True)
    return weight * (x * (size / (size.mean(dim=-1, keepdim=True) + 1e-6))) + bias + x


def of_aten(x, weight, bias):
    size = torch.ops.aten.linalg_vector_norm(x, 2, [1, 2], True)
    shares = torch.ops.aten.div(size, torch.ops.aten.add(torch.ops.aten.mean(size, [-1], True), 1e-6))
    return torch.ops.aten.add(torch.ops.aten.addcmul(bias, weight, torch.ops.aten.mul(x, shares)), x)


FORMS = {f.__name__: f for f in (timms, timms_of_planes, the_authors, huggingfaces)}


def looked_at(what):
    """A response norm, one step of which another op reads, too."""

    def of(x, weight, bias):
        size = x.norm(p=2, dim=(1, 2), keepdim=True)
        mean = size.mean(-1, keepdim=True)
        divisor = mean + 1e-6
        shares = size / divisor
        product = x * shares
        weighted = weight * product
        shifted = weighted + bias
        steps = dict(locals())
        return (shifted + x) * (1 + 0.1 * torch.tanh(steps[what]))

    return of


STEPS = ("size", "mean", "divisor", "shares", "product", "weighted", "shifted")
# what is like one, and is none
OTHERS = {
    "of another map": lambda x, w, b: w * ((x + 1) * (lambda g: g / (g.mean(-1, keepdim=True) + 1e-6))(
        x.norm(p=2, dim=(1, 2), keepdim=True))) + b + x,
    "of another order": lambda x, w, b: w * (x * (lambda g: g / (g.mean(-1, keepdim=True) + 1e-6))(
        x.norm(p=1, dim=(1, 2), keepdim=True))) + b + x,
    "of rows": lambda x, w, b: w * (x * (lambda g: g / (g.mean(-1, keepdim=True) + 1e-6))(
        x.norm(p=2, dim=(2,), keepdim=True))) + b + x,
    "of two maps": lambda x, w, b: (lambda g, h: w * (x * (g / (h.mean(-1, keepdim=True) + 1e-6))) + b + x)(
        x.norm(p=2, dim=(1, 2), keepdim=True), F.gelu(x).norm(p=2, dim=(1, 2), keepdim=True)),
    "without a bias": lambda x, w, b: (lambda g: w * (x * (g / (g.mean(-1, keepdim=True) + 1e-6))) + x)(
        x.norm(p=2, dim=(1, 2), keepdim=True)),
    "weights of rows": lambda x, w, b: (lambda g: w[0] * (x * (g / (g.mean(-1, keepdim=True) + 1e-6))) + b + x)(
        x.norm(p=2, dim=(1, 2), keepdim=True)),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, response, channels=CHANNELS):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.wide = nn.LayerNorm(channels), nn.Linear(channels, 4 * channels)
        self.drop, self.back = nn.Dropout(0.0), nn.Linear(4 * channels, channels)
        self.weight, self.bias = (nn.Parameter(torch.randn(4 * channels)) for _ in range(2))
        self.response = response

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.response(self.drop(F.gelu(self.wide(y))), self.weight, self.bias)
        return self.drop(self.back(y)).permute(0, 3, 1, 2) + x


class Net(nn.Module):
    def __init__(self, *responses):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.down = nn.Conv2d(3, CHANNELS, 2, 2), nn.Conv2d(CHANNELS, 2 * CHANNELS, 2, 2)
        self.norm = nn.LayerNorm(CHANNELS)
        self.first = nn.Sequential(*(Block(r) for r in responses))
        self.second = nn.Sequential(*(Block(r, 2 * CHANNELS) for r in responses))

    def forward(self, x):
        x = self.norm(self.first(self.stem(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.second(self.down(x))


def data(device):
    torch.manual_seed(1)
    x, mask = torch.randn(3, 3, 2 * SIZE[0], 2 * SIZE[1]), torch.zeros(3, 2 * SIZE[0], 2 * SIZE[1], dtype=torch.bool)
    mask[0, 3:30, 5:9] = mask[1, 40, 70] = mask[1, 3, 3] = True  # nothing of the third
    return x.to(device), mask.to(device)


def gradients(net, x, mode, dtype):
    net = net.to(dtype)
    net.zero_grad()
    with mode:
        y = net(x.to(dtype))
    (y * torch.linspace(-1, 1, y.numel(), dtype=dtype, device=y.device).view(y.shape)).sum().backward()
    return [y.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in net.parameters())]


def assert_held(device, net, poisoned=False, loosely=False, **more):
    x, mask = data(device)
    net = net.to(device)
    torch.use_deterministic_algorithms(poisoned, warn_only=True)
    try:
        got = gradients(net, x, sbnet.masked(mask, BLOCK, **more), torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    torchs, exact = (gradients(net, x, DenseMasked(mask, BLOCK), dtype) for dtype in (torch.float32, torch.float64))
    for name, *parts in zip(["y", *dict(net.named_parameters())], got, torchs, exact, strict=True):
        if loosely and parts[2] is not None:  # PyTorch's own ops, of other memory than in a dense step: other sums
            got_off, torch_off = ((part.double() - parts[2]).norm() for part in parts[:2])
            assert got_off <= 4 * torch_off + torch.finfo(torch.float32).eps * parts[2].norm(), name
        elif parts[2] is not None:
            assert_as_accurate_as_torch(*parts, name)


class Calls(TorchDispatchMode):
    """How often ops are called, and those of PyTorch that read or write a map."""

    def __init__(self, batch):
        super().__init__()
        self.batch, self.counts, self.whole = batch, collections.Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        self.counts[name] += 1
        views = ("permute", "detach", "view", "empty", "expand", "slice", "unsqueeze", "alias")
        if name.startswith("aten") and not any(view in name for view in views):
            for t in (*args, out):
                if isinstance(t, torch.Tensor) and t.dim() == 4 and len(t) == self.batch and t[0].numel() > 1000:
                    self.whole.add(name)
        return out


@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_every_form(device, form, poisoned):
    """Poisoned: memory that was not written holds NaN."""
    assert_held(device, Net(FORMS[form], FORMS[form]), poisoned)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_no_op_of_theirs_runs_on_a_whole_plane(device, capacity):
    net, (x, mask) = Net(*FORMS.values(), of_aten).to(device), data(device)
    with sbnet.masked(mask, BLOCK):
        net(x)  # tries once which dtypes functions give
    calls = Calls(len(x))
    with calls, sbnet.masked(mask, BLOCK, capacity=capacity):
        y = net(x)
    assert y[2].abs().max() == 0
    if capacity is None:
        assert calls.counts["sbnet.sparse_norm2d_.default"] == 2 * 2 * 5 + 1
        assert calls.whole <= {"aten.clone.default", "aten._to_copy.default"}  # the network's input
        backward, ones = Calls(len(x)), torch.ones_like(y)
        with backward:
            y.backward(ones)
        assert backward.counts["sbnet.sparse_norm2d_backward_.default"] == 2 * 2 * 5 + 1
        assert not backward.whole


@pytest.mark.parametrize("what", STEPS)
def test_steps_that_another_op_reads(device, what):
    assert_held(device, Net(looked_at(what)))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_response_norm(device, name):
    assert_held(device, Net(OTHERS[name]), loosely=True)


def test_other_contexts(device):
    """With a capacity, and norms whose statistics are images' of maps that are not made yet."""
    assert_held(device, Net(timms), capacity=1.0)
    torch.manual_seed(0)
    norms = (nn.GroupNorm(2, 8), nn.GroupNorm(8, 8))
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False)]
    for norm in norms:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        layers += [norm, nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False)]
    net, instance = nn.Sequential(*layers), nn.InstanceNorm2d(8, affine=True)
    x, mask = data(device)
    net = net.to(device)
    got = gradients(net, x, sbnet.masked(mask, BLOCK), torch.float32)
    exact = gradients(net, x, DenseMasked(mask, BLOCK), torch.float64)
    for a, b in zip(got, exact, strict=True):  # a norm takes most of a sum away again
        assert (a - b).norm() < 1e-5 * max(b.norm(), *(t.norm() for t in exact[1:]))
    instance.load_state_dict(norms[1].state_dict())
    found = []
    for norm in (norms[1], instance):
        net[4] = norm.float().to(device)
        found.append(gradients(net, x, sbnet.masked(mask, BLOCK), torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_steps_are_made_for_who_holds_them(device):
    """Of the dtype that PyTorch gives, and zeros outside of the active blocks."""
    x, mask = data(device)
    net = Net(timms).to(device)
    with torch.autocast(device, torch.bfloat16), sbnet.masked(mask, BLOCK) as active:
        y = net.stem(x)
        held = [size := y.norm(p=2, dim=(2, 3), keepdim=True)]
        held += [mean := size.mean(1, keepdim=True), divisor := mean + 1e-6, shares := size / divisor]
        held += [y * shares]
        last = y.permute(0, 2, 3, 1)
        wide = F.gelu(net.first[0].wide(net.norm(last)))
    with torch.autocast(device, torch.bfloat16), DenseMasked(mask, BLOCK):
        y = net.stem(x)
        wanted = [size := y.norm(p=2, dim=(2, 3), keepdim=True)]
        wanted += [mean := size.mean(1, keepdim=True), mean + 1e-6, size / (mean + 1e-6), y * (size / (mean + 1e-6))]
    inside = active.active(SIZE).pixel_mask(SIZE)
    for got, want in zip(held, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.stride() == want.stride() or got.shape == y.shape
        torch.testing.assert_close(got, want * inside if got.shape == y.shape else want, rtol=2e-2, atol=2e-2)
    assert not (wide * ~inside.permute(0, 2, 3, 1)).any()
    assert (wide * inside.permute(0, 2, 3, 1)).any()


def test_gradients_of_maps_that_are_seen_so(device):
    """Hooks see zeros outside of the active blocks, and what is read afterwards is of their tensor."""
    x, mask = data(device)
    net, seen = Net(timms).to(device), []
    with sbnet.masked(mask, BLOCK) as active:
        y = net.stem(x).permute(0, 2, 3, 1)
        y.register_hook(lambda grad: seen.append(grad.clone()))
        z = net.norm(y)
        z.retain_grad()
        w = net.first[0].wide(z).permute(0, 3, 1, 2)
    w.square().sum().backward()
    inside = active.active(SIZE).pixel_mask(SIZE).permute(0, 2, 3, 1)
    for grad in (*seen, z.grad):
        assert grad.shape == y.shape
        assert not (grad * ~inside).any()
        assert (grad * inside).any()
    assert len(seen) == 1


def test_a_view_that_is_written(device):
    """What was noted of it is forgotten."""
    x, mask = data(device)
    net = Net(timms).to(device)

    def run(x):
        y = net.stem(x).permute(0, 2, 3, 1)
        z = net.norm(y)
        y = y.clone()
        y += z
        F.relu_(y)
        return net.first[0].wide(y).permute(0, 3, 1, 2)

    with torch.no_grad():
        with sbnet.masked(mask, BLOCK):
            got = run(x)
        with DenseMasked(mask, BLOCK):
            wanted = run(x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


FACTORS = {
    "a number": float("inf"),
    "of channels": torch.full((CHANNELS,), float("inf")),
    "of images": torch.full((3, 1, 1, CHANNELS), float("inf")),
    "of pixels": torch.full((3, *SIZE, CHANNELS), float("inf")),
}


@pytest.mark.parametrize("by", FACTORS)
@torch.no_grad()
def test_products_are_zero_outside_whatever_the_factor_is(device, by):
    x, mask = data(device)
    net = Net(timms).to(device)
    factor = FACTORS[by].to(device) if isinstance(FACTORS[by], torch.Tensor) else FACTORS[by]
    with sbnet.masked(mask, BLOCK) as active:
        y = net.stem(x).permute(0, 2, 3, 1)
        z = y * factor
        inside = active.active(SIZE).pixel_mask(SIZE).permute(0, 2, 3, 1)
    assert not z[~inside.expand_as(z)].any()
    assert torch.equal(z[inside.expand_as(z)], (y * factor)[inside.expand_as(z)])
