"""Transformers of windows and of pooled keys under masks: what is not active is no query and no key."""

import copy

import pytest
import torch

import sbnet
from sbnet.graph.kinds import kind_of
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from support import tokens
from support.contract import assert_holds, poison
from support.tokens import assert_every_form_gives_the_same, masks
from support.window_nets import BY_HAND, NETS, SIDES, hiera, hiera_on, nest

pytestmark = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")

QUICK = ("Swin v2, padded", "TinyViT", "SegFormer", "YOLO11", "YOLO12", "Twins")
LEFT = {"MaxViT", "CoAtNet"}  # whose gates look at means of planes: a few numbers an image


def by_the_contract(name: str, net: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor, block: int) -> torch.Tensor:
    """Written by hand where masks are lost in padded or swapped windows that the oracle does not follow."""
    if name not in BY_HAND:
        return masked_oracle(net, [x], PlaneMasks(mask, block))
    with torch.no_grad():
        return torch.cat([BY_HAND[name](net, x[n : n + 1], PlaneMasks(mask[n : n + 1], block)) for n in range(len(x))])


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETS])
@pytest.mark.parametrize("block", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_active_pixels_see_active_pixels_alone(name, block):
    side = SIDES.get(name, 64)
    net, x = NETS[name](), torch.randn(2, 3, side, side)
    run, exact = sbnet.sparsify(net, x, block=block), copy.deepcopy(net).double()
    dense = [n for n in run.plan.graph.nodes if not kind_of(n).planned and not n.moves]
    assert name in LEFT or not dense, dense
    assert all(n.output.shape[2:] == (1, 1) for n in dense), dense
    for mask in (torch.ones(2, side, side), masks(side), masks(side).flip(0)):
        poison(run)
        got = run(x, mask, copy=True)
        torchs, want = (by_the_contract(name, f, v, mask, block) for f, v in ((net, x), (exact, x.double())))
        if bool(mask.all()):  # what is written by hand is the network
            with torch.no_grad():
                torch.testing.assert_close(want, exact(x.double()))
        assert_holds(got, torchs, want, name)


def test_hiera_sees_its_active_units_alone():
    """As it does where it leaves out others by itself, in pretraining."""
    net, units = hiera(), torch.zeros(2, 16, dtype=torch.bool)
    units[0, [1, 2, 6, 9]] = units[1, 5] = True
    mask = units.view(2, 4, 4).repeat_interleave(32, 1).repeat_interleave(32, 2)
    x = torch.randn(2, 3, 128, 128) * mask[:, None]
    run, exact = sbnet.sparsify(net, x, block=1), copy.deepcopy(net).double()
    assert not [n for n in run.plan.graph.nodes if not kind_of(n).planned and not n.moves]
    poison(run)
    got = run(x, mask, copy=True)
    for n in range(2):
        torchs, want = hiera_on(net, x[n : n + 1], units[n]), hiera_on(exact, x[n : n + 1].double(), units[n])
        assert_holds(got[n][units[n]], torchs, want, "Hiera")
    assert not got[~units].any()


@pytest.mark.parametrize("batch", [1, 2])
def test_keys_of_windows_that_run_dense_are_active(batch):
    """NesT adds positions to windows, which no rule knows: they are computed whole, and see active keys alone."""
    net = nest()
    x, mask = torch.randn(batch, 3, 64, 64), masks(64)[:batch]
    run, exact = sbnet.sparsify(net, x, block=1), copy.deepcopy(net).double()
    for some in (torch.ones_like(mask), mask):
        planes = PlaneMasks(some, 1)
        want = masked_oracle(exact, [x.double()], planes)
        assert_holds(run(x, some, copy=True), masked_oracle(net, [x], planes), want, "NesT")
        if bool(some.all()):
            with torch.no_grad():
                torch.testing.assert_close(want, exact(x.double()))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETS])
def test_the_functional_form_and_onnx_runtime_give_the_same(name, tmp_path):
    """What gradients flow through, GPUs run and export writes down."""
    pytest.importorskip("onnxruntime")
    assert_every_form_gives_the_same(NETS[name](), SIDES.get(name, 64), tmp_path)


class Squares(torch.nn.Module):
    """A norm of pixels that lie as MobileViTv2 lays them: those of each place in 2x2 squares side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = (x := self.stem(x)).shape
        return self.norm(x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, c, 4, -1))


def test_norms_of_pixels_in_other_places_are_refused():
    with pytest.raises(ValueError, match="norm: group_norm: expected pixels where the image has them"):
        sbnet.sparsify(Squares().eval(), torch.randn(1, 3, 16, 16))


class Written(torch.nn.Module):
    """Attention over all pixels, written out, whose scores `how` makes of q k^T, a bias and a number a head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.stem, self.qkv = how, torch.nn.Conv2d(3, 16, 8, 8), torch.nn.Linear(16, 48)
        self.bias = torch.nn.Parameter(torch.randn(2, 64, 64))
        self.scale = torch.nn.Parameter(torch.rand(2, 1, 1) + 0.5)
        self.register_buffer("number", torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).view(n, h * w, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1)
        scores = {
            "scaled, then biased": lambda: scores * self.scale + self.bias,
            "biased, then scaled": lambda: (scores + self.bias) * self.scale,
            "by a buffer": lambda: scores * self.number + self.bias,
        }[self.how]()
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, h * w, c).transpose(1, 2).reshape(n, c, h, w)


@pytest.mark.parametrize("how", ["scaled, then biased", "biased, then scaled", "by a buffer"])
def test_scores_are_what_the_network_makes_of_them(how):
    """At a full mask whatever is recognised, and after its numbers are written."""
    net, x, mask = Written(how).eval(), torch.randn(2, 3, 64, 64), torch.ones(2, 64, 64)
    run = sbnet.sparsify(net, x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(run(x, mask), net(x))
            net.scale.mul_(2)
            net.number.mul_(2)
    assert how != "scaled, then biased" or "window_attention" in [n.kind for n in run.plan.graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["YOLO11", "YOLO12", "SegFormer", "TinyViT", "Swin v2", "Swin v2, padded", "SAM2"])
def test_a_file_of_it_is_planned_as_the_module_is(name, tmp_path):
    pytest.importorskip("onnxscript")
    net, x = NETS[name](), torch.randn(2, 3, SIDES.get(name, 64), SIDES.get(name, 64))
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    module, file = sbnet.sparsify(net, x), sbnet.sparsify(tmp_path / "net.onnx", x)
    counts = [[n.kind for n in run.plan.graph.nodes].count("window_attention") for run in (module, file)]
    assert counts[0] == counts[1] > 0
    mask = masks(x.shape[2])
    torch.testing.assert_close(file(x, mask, copy=True), module(x, mask, copy=True), atol=2e-4, rtol=2e-4)
