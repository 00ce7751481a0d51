"""Networks of legal but unusual PyTorch: what `sparsify` makes of them is what PyTorch does, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.graph.capture import CaptureError
from sbnet.graph.oracle import PlaneMasks

SIZE = (24, 40)


class Around(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function, self.last = nn.Conv2d(3, 8, 3, padding=1), function, nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.function(self.first(x))
        return y, self.last(y)


def full(n: int) -> Tensor:
    return torch.ones(n, *SIZE, dtype=torch.bool)


def assert_dense(net: nn.Module, x: Tensor, mode: str = "masked") -> None:
    """With a full mask the result is PyTorch's."""
    with torch.no_grad():
        want = net(x)
    for a, b in zip(sbnet.sparsify(net, x, mode=mode, block=4)(x, full(len(x))), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


OF_SAMPLES = {
    "product": lambda y, t: y * t,
    "quotient": lambda y, t: y / t,
    "sum": lambda y, t: y + t,
    "difference": lambda y, t: y - t,
    "from": lambda y, t: t - y,
    "pixels first": lambda y, t: (y.permute(0, 2, 3, 1) * t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "flat": lambda y, t: (y.flatten(2) * t[..., 0]).view_as(y),
}


@pytest.mark.parametrize("n", [2, 8])  # 8: as many as channels
@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("how", OF_SAMPLES)
def test_constants_that_are_a_number_for_each_sample(how, channels, n):
    t = torch.arange(1.0, 1 + n * channels).view(n, channels, 1, 1)
    assert_dense(Around(lambda y: OF_SAMPLES[how](y, t)).eval(), torch.randn(n, 3, *SIZE))


# ---- views, what is computed on them, and back: the result is a plane again, and masked as one


def windows(y: Tensor) -> Tensor:
    n, c, h, w = y.shape
    return y.reshape(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)


def joined(t: Tensor, y: Tensor) -> Tensor:
    n, c, h, w = y.shape
    return t.reshape(n, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(y.shape)


ARRANGED = {
    "movedim": (lambda y: y.movedim(1, -1), lambda t, y: t.movedim(-1, 1)),
    "movedim of two": (lambda y: y.movedim((2, 3), (0, 1)), lambda t, y: t.movedim((0, 1), (2, 3))),
    "moveaxis": (lambda y: y.moveaxis(1, 3), lambda t, y: t.moveaxis(3, 1)),
    "swapdims": (lambda y: y.swapdims(1, 3), lambda t, y: t.swapdims(1, 3)),
    "mT": (lambda y: y.mT, lambda t, y: t.mT),
    "adjoint": (lambda y: y.adjoint(), lambda t, y: t.mH),
    "tokens": (lambda y: y.flatten(2).mT, lambda t, y: t.mT.reshape(y.shape)),
    "T": (lambda y: y.permute(3, 2, 1, 0).permute(3, 2, 1, 0), lambda t, y: t),
    "ravel": (lambda y: y.ravel(), lambda t, y: t.view(y.shape)),
    "einsum": (lambda y: torch.einsum("nchw->nhwc", y), lambda t, y: torch.einsum("nhwc->nchw", t)),
    "windows": (windows, joined),
    "rows in parts": (lambda y: y.unflatten(2, (4, -1)), lambda t, y: t.flatten(2, 3)),
}
UNSEEN = {  # their results are masked where a convolution reads them
    "rows by themselves": (lambda y: torch.stack(y.unbind(2), 2), lambda t, y: t),
    "images by themselves": (lambda y: torch.stack([y[k] for k in range(len(y))]), lambda t, y: t),
    "a diagonal": (torch.diag_embed, lambda t, y: torch.diagonal(t, 0, -2, -1)),
    "repeated": (lambda y: y.repeat(2, 1, 1, 1, 1), lambda t, y: t[0]),
}


@pytest.mark.parametrize("size", [SIZE, (24, 24)], ids=str)
@pytest.mark.parametrize("name", [*ARRANGED, *UNSEEN])
def test_planes_that_are_viewed_and_computed_on_are_masked(name, size):
    there, back = {**ARRANGED, **UNSEEN}[name]
    net, x = Around(lambda y: back(there(y).cos(), y)).eval(), torch.randn(2, 3, *size)
    mask = torch.zeros(2, *size, dtype=torch.bool)
    mask[:, 5:9, 8:20] = True
    mask[1, -2:, :3] = True
    pixels = PlaneMasks(mask, 4)(size)
    got = sbnet.sparsify(net, x, block=4)(x, mask)
    with torch.no_grad():
        y = torch.where(pixels, net.first(x).cos(), 0.0)
        z = torch.where(pixels, net.last(y), 0.0)
    torch.testing.assert_close(got[1], z, rtol=1e-4, atol=1e-4)
    if name in ARRANGED:
        torch.testing.assert_close(got[0], y, rtol=1e-4, atol=1e-4)


COMPUTED = {
    "one_hot": lambda y: F.one_hot(y.argmax(1), 8).permute(0, 3, 1, 2).float(),
    "embedding": lambda y: F.embedding(y.argmax(1), torch.arange(1.0, 65).view(8, 8)).permute(0, 3, 1, 2),
    "einsum": lambda y: torch.einsum("nchw,dc->ndhw", y, torch.ones(8, 8)).exp(),
    "roll": lambda y: y.roll((2, 3), (2, 3)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_planes_that_functions_give_are_masked(name):
    net, x = Around(COMPUTED[name]).eval(), torch.randn(2, 3, *SIZE)
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[:, 5:9, 8:20] = True
    pixels = PlaneMasks(mask, 4)(SIZE)
    with torch.no_grad():
        y = torch.where(pixels, COMPUTED[name](torch.where(pixels, net.first(x), 0.0)), 0.0)
        z = torch.where(pixels, net.last(y), 0.0)
    for got, want in zip(sbnet.sparsify(net, x, block=4)(x, mask), (y, z), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_views_of_memory_are_refused():
    """A run's maps lie in memory as it decides."""
    net = Around(lambda y: y.as_strided(y.shape, y.stride()) + 1).eval()
    with pytest.raises(CaptureError, match="as_strided"):
        sbnet.sparsify(net, torch.randn(1, 3, *SIZE))


@pytest.mark.parametrize("transform", [torch.vmap(lambda t: t * 2), lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1]])
def test_transforms_of_functions_are_refused(transform):
    with pytest.raises(CaptureError, match="no vmap and no torch.func"):
        sbnet.sparsify(Around(transform).eval(), torch.randn(2, 3, *SIZE))


ALIASES = {
    "broadcast_to": lambda x, p: x.broadcast_to(x.shape),
    "broadcast_tensors": lambda x, p: torch.broadcast_tensors(x, p)[1] + x,
    "moveaxis": lambda x, p: x.moveaxis(1, -1).moveaxis(-1, 1),
    "swapdims": lambda x, p: x.swapdims(1, 1),
    "sum_to_size": lambda x, p: x.sum_to_size(x.shape),
    "atleast_3d": lambda x, p: torch.atleast_3d(x),
    "real": lambda x, p: torch.real(x),
    "half of the rows": lambda x, p: torch.dsplit(x.transpose(1, 2), 1)[0].transpose(1, 2),
    "rows": lambda x, p: torch.hsplit(x.transpose(1, 2), 2)[1].transpose(1, 2),
}


class Alias(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.conv, self.p = function, nn.Conv2d(3, 4, 3), nn.Parameter(torch.ones(1, 3, *SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(x, self.p), self.conv(x), self.p * 1


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", ALIASES)
def test_neither_frames_nor_parameters_are_masked_in_place(name, memory):
    net, x = Alias(ALIASES[name]).eval(), torch.rand(1, 3, *SIZE).contiguous(memory_format=memory)
    before, mask = x.clone(), torch.zeros(1, *SIZE)
    mask[:, 5:9, 8:20] = 1
    sbnet.sparsify(net, x, block=4)(x, mask)
    assert torch.equal(x, before)
    assert bool((net.p == 1).all())


# ---- what a call is given


def test_integers_of_a_mask_are_set_where_they_are_not_zero():
    """255 in int8 is -1."""
    net, x = Around(torch.relu).eval(), torch.rand(1, 3, *SIZE)
    mask = torch.zeros(1, *SIZE, dtype=torch.int8)
    mask[:, 5:9, 8:20] = -1
    run = sbnet.sparsify(net, x, block=4)
    want = run(x, mask != 0, copy=True)
    assert want[0].any()
    for given in (mask, mask.long(), (mask != 0).to(torch.float8_e4m3fn)):
        for a, b in zip(run(x, given), want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("margin", [1.5, "2", -1, None])
def test_margins_are_whole_numbers(margin):
    net, x = Around(torch.relu).eval(), torch.rand(1, 3, *SIZE)
    with pytest.raises(ValueError, match="sparsify: margin"):
        sbnet.sparsify(net, x, margin=margin)
    if margin is not None:
        run = sbnet.sparsify(net, x)
        with pytest.raises(ValueError, match="run: margin"):
            run(x, full(1), margin=margin)


def test_a_name_alone_is_no_list_of_names():
    with pytest.raises(TypeError, match="out: expected a list of names"):
        sbnet.sparsify(Around(torch.relu), torch.rand(1, 3, *SIZE), out="first")


class Sum(nn.Module):
    def forward(self, x: Tensor, more) -> Tensor:
        return x + (more["a"] if isinstance(more, dict) else more[0])


@pytest.mark.parametrize(
    "more", [(torch.ones(1),), [torch.ones(1)], {"a": torch.ones(1)}], ids=["tuple", "list", "dict"]
)
def test_tensors_inside_of_inputs_are_refused(more):
    with pytest.raises(TypeError, match="as input 1"):
        sbnet.sparsify(Sum(), (torch.rand(1, 3, *SIZE), more))


def test_what_is_no_tensor_is_refused_by_name():
    run = sbnet.sparsify(Around(torch.relu).eval(), torch.rand(1, 3, *SIZE))
    with pytest.raises(ValueError, match="run: x: expected .* got ndarray"):
        run(torch.rand(1, 3, *SIZE).numpy(), full(1))


# ---- norms of groups, and attention around them: only active pixels exist for both

GROUPED = {
    "flat": lambda norm, y: norm(y.flatten(2)).view_as(y),
    "of one more dimension": lambda norm, y: norm(y[:, :, None])[:, :, 0],
    "there and back": lambda norm, y: norm(y.flatten(2).mT.mT).view_as(y),
    "instances": lambda norm, y: F.instance_norm(y.flatten(2)).view_as(y),
    "groups as instances": lambda norm, y: F.instance_norm(y.reshape(len(y), 4, -1)).view_as(y),
    "all as an instance": lambda norm, y: F.instance_norm(y.reshape(len(y), 1, -1)).view_as(y),
    "groups of groups": lambda norm, y: F.group_norm(y.unflatten(1, (4, 2)), 2, norm.weight[:4], norm.bias[:4]).view_as(
        y
    ),
    "computed weights": lambda norm, y: F.group_norm(y, 4, norm.weight.exp() * y.new_ones(8), norm.bias),
    "behind a write": lambda norm, y: norm(torch.cat([y[:, :4].clone().mul_(2), y[:, 4:]], 1)),
}


@pytest.mark.parametrize("how", GROUPED)
def test_norms_of_groups_see_active_pixels_alone(how):
    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    net, x = Around(lambda y: GROUPED[how](norm, y)).eval(), torch.randn(2, 3, *SIZE)
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[:, 5:9, 8:20] = True
    pixels = PlaneMasks(mask, 4)(SIZE)
    (got, _), place = sbnet.sparsify(net, x, block=4)(x, mask), pixels[0, 0]
    with torch.no_grad():
        alone = GROUPED[how](norm, net.first(x)[:, :, place][..., None])
    torch.testing.assert_close(got[:, :, place][..., None], alone, rtol=1e-4, atol=1e-4)
    assert not got[:, :, ~place].any()


@pytest.mark.parametrize("how", [lambda y: F.group_norm(y.mT, 4).mT, lambda y: F.group_norm(y.double(), 4).float()])
def test_other_norms_of_groups_are_refused(how):
    with pytest.raises(CaptureError, match="group_norm: expected norms of"):
        sbnet.sparsify(Around(how).eval(), torch.randn(2, 3, *SIZE))


class Diffusion(nn.Module):
    """Attention of pixels as in diffusion's U-Nets: [N,C,H*W], einsum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.GroupNorm(4, 8), nn.Conv1d(8, 24, 1), nn.Conv1d(8, 8, 1)

    def forward(self, t: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(t)).chunk(3, 1)
        weights = torch.softmax(torch.einsum("bct,bcs->bts", q * 0.6, k * 0.6), -1)
        return t + self.out(torch.einsum("bts,bcs->bct", weights, v))


def test_attention_by_einsum_with_channels_first():
    part, x = Diffusion().eval(), torch.randn(2, 3, *SIZE)
    net = Around(lambda y: part(y.flatten(2)).view_as(y)).eval()
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[:, 5:9, 8:20] = True
    place = PlaneMasks(mask, 4)(SIZE)[0, 0]
    got = sbnet.sparsify(net, x, block=4)(x, mask)[0]
    with torch.no_grad():
        alone = part(net.first(x)[:, :, place])
    torch.testing.assert_close(got[:, :, place], alone, rtol=1e-4, atol=1e-4)
    assert_dense(net, x)
