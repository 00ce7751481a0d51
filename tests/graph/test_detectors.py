"""Detectors and transformers of which parts run dense: what is planned of them, and that all of it holds."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import sbnet
from sbnet.graph.axes import op_name
from sbnet.graph.kinds import kind_of
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from support import tokens
from support.contract import assert_holds, poison
from support.detectors import LEVIT, NETS, WindowKeys, dpt, levit, lively, rf_detr
from support.remembering import Remembering
from support.tokens import masks
from support.window_nets import SEGFORMER, hugging_face

pytestmark = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")

PATCHES = {"Depth Anything": 14, "DPT": 16}  # of trunks with a class token, which the oracle of planes cannot follow
QUICK = ("RT-DETR's encoder", "DETR", "CaiT", "XCiT", "Depth Anything", "DPT", "RF-DETR's backbone")


def dense_ops(run) -> set[str]:
    nodes = [n for n in run.plan.graph.nodes if not kind_of(n).planned and not n.moves]
    return {op_name(n.target) if n.target is not None else n.kind for n in nodes}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETS])
def test_keys_are_active_pixels_and_what_follows_is_planned(name):
    make, side, dense = NETS[name]
    net, x = lively(make()), torch.randn(2, 3, side, side)
    with torch.no_grad():
        firsts = [y if isinstance(y, torch.Tensor) else y[0] for y in (net(x), net(x.flip(0)))]
    assert (firsts[0] - firsts[1]).abs().max() > 0.01 * firsts[0].abs().max()
    run, exact = sbnet.sparsify(net, x, block=1), copy.deepcopy(net).double()
    assert dense_ops(run) >= dense
    assert dense or not dense_ops(run)
    convolutions = [
        n for n in run.plan.graph.nodes if n.kind == "aten" and op_name(n.target) in ("conv2d", "batch_norm")
    ]
    assert name.startswith(("CvT", "EfficientViT")) or not convolutions
    for mask in (torch.ones(2, side, side), masks(side), masks(side).flip(0)):
        poison(run)
        got = run(x, mask, copy=True)
        of, keep = PlaneMasks(mask, 1), tokens.kept(mask, PATCHES.get(name, 1), 1)

        def called(net, x, keep=keep, mask=mask, of=of):
            seen = WindowKeys(mask) if name.startswith("RF-DETR") else tokens.ActiveKeys(keep)
            with seen if name in PATCHES or name.startswith("RF-DETR") else nullcontext():
                y = net(x)
            return y if "backbone" not in name else [torch.where(of(t.shape[2:]), t, 0) for t in y]

        torchs, want = (
            masked_oracle(partial(called, net), [x], of),
            masked_oracle(partial(called, exact), [x.double()], of),
        )
        if isinstance(got, torch.Tensor):
            got, torchs, want = [got], [torchs], [want]
        for one in zip(got, torchs, want, strict=True):
            assert_holds(*one, name)


class Joined(nn.Module):
    """A class token before or behind the channels of each pixel, by `expand`."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.vit, self.first, self.project = tokens.timm_net("vit_tiny_patch16_224", 96), first, nn.Linear(384, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = self.vit(x)
        parts = [t[:, 1:], t[:, :1].expand(-1, t.shape[1] - 1, -1)]
        return self.project(torch.cat(parts[::-1] if self.first else parts, -1))


def test_windows_with_class_tokens_and_the_frame_before():
    """RF-DETR's backbone: queries are active, keys and values of others those of the frame before."""
    net, side = rf_detr("backbone"), 112
    run = sbnet.sparsify(net, torch.randn(2, 3, side, side), mode="cached", block=1)
    kinds = [n.kind for n in run.plan.graph.nodes]
    assert (kinds.count("token_windows"), kinds.count("attention")) == (3, 1)
    poison(run)
    torchs, exact = Remembering(copy.deepcopy(net)), Remembering(copy.deepcopy(net).double())
    for mask in (torch.ones(2, side, side), masks(side), torch.zeros(2, side, side), masks(side).flip(0)):
        x, keep = torch.randn(2, 3, side, side), WindowKeys(mask).keep

        def new(module, t, keep=keep, mask=mask):
            if t.dim() == 4:  # patches
                return PlaneMasks(mask, 1)(t.shape[2:])
            if t.shape[1] == keep[0].numel() or t.shape[1] == 4 * keep[0].numel():
                return keep.view(*t.shape[:2], 1)
            return None

        got = run(x, mask, copy=True)
        for one in zip(got, torchs(x, new), exact(x.double(), new), strict=True):
            assert_holds(*one)


def test_windows_with_class_tokens_in_every_form(tmp_path):
    pytest.importorskip("onnxruntime")
    tokens.assert_every_form_gives_the_same(First(rf_detr("backbone")), 112, tmp_path)


class First(nn.Module):
    """The first of what a network returns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


@pytest.mark.parametrize("first", [True, False])
def test_a_row_of_each_image_beside_the_channels_of_its_tokens(first):
    """Image by image, on the tokens that are kept and on no other."""
    net, x = Joined(first).eval(), torch.randn(2, 3, 96, 96)
    run, exact = sbnet.sparsify(net, x), copy.deepcopy(net).double()
    assert not dense_ops(run)
    assert [n.kind for n in run.plan.graph.nodes].count("beside") == 1

    def alone(net: Joined, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        made = x.new_zeros(2, 36, 8)
        for n in range(2):
            t = tokens.alone(net.vit, x[n : n + 1], keep[n : n + 1])
            pixels, row = t[:, 1:], t[:, :1].repeat(1, t.shape[1] - 1, 1)
            with torch.no_grad():
                made[n, keep[n, 1:]] = net.project(torch.cat([row, pixels] if first else [pixels, row], 2))[0]
        return made

    for mask in (masks(96), torch.ones(2, 96, 96), masks(96).flip(0), torch.zeros(2, 96, 96)):
        poison(run)
        keep, x = tokens.kept(mask, 16, 1), torch.randn_like(x)
        assert_holds(run(x, mask, copy=True), alone(net, x, keep), alone(exact, x.double(), keep))


def test_dpts_run_its_functional_form_and_onnx_runtime_give_the_same(tmp_path):
    pytest.importorskip("onnxruntime")
    tokens.assert_every_form_gives_the_same(lively(dpt()), 96, tmp_path)


class Resizes(TorchFunctionMode):
    """What they give is held as what modules give is."""

    def __init__(self, frames: Remembering) -> None:
        super().__init__()
        self.frames = frames

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return self.frames.remembered("resize", out) if func is F.interpolate else out


def test_dpts_keep_the_frame_before():
    """Tokens, class tokens beside channels, and planes of several sizes."""
    net, side = lively(dpt()), 96
    run = sbnet.sparsify(net, torch.randn(2, 3, side, side), mode="cached", block=1)
    assert not dense_ops(run)
    poison(run)
    torchs, exact = Remembering(copy.deepcopy(net)), Remembering(copy.deepcopy(net).double())
    before = None
    for mask in (torch.ones(2, side, side), masks(side), torch.zeros(2, side, side), masks(side).flip(0)):
        x, of, keep = torch.randn(2, 3, side, side), PlaneMasks(mask, 1), tokens.kept(mask, 16, 1)

        def new(module, t, keep=keep, of=of):
            if t.dim() == 4:  # but positions, which are resized, too
                return of(t.shape[2:]) if len(t) == 2 else None
            pixels = keep if t.shape[1] == keep.shape[1] else keep[:, 1:]
            return pixels[:, :, None] if t.shape[:2] == pixels.shape else None

        found = []
        for frames in (torchs, exact):
            with Resizes(frames):
                found.append(frames(x.to(next(frames.net.parameters())), new))
        got = run(x, mask, copy=True)
        assert_holds(got, *found)
        assert before is None or (got != before).any() == mask.any()
        before = got


@pytest.mark.slow
def test_levit_gives_what_its_form_of_convolutions_gives():
    """The oracle follows those; of linear layers over pixels of all images it loses the mask."""
    net, twin, x = levit("levit"), levit("levit_conv"), torch.randn(2, 3, 128, 128)
    shapes = twin.state_dict()
    twin.load_state_dict({name: t.reshape(shapes[name].shape) for name, t in net.state_dict().items()})
    run = sbnet.sparsify(net, x, block=1)
    assert not dense_ops(run)
    for mask in (torch.ones(2, 128, 128), masks(128)):
        poison(run)
        of = PlaneMasks(mask, 1)
        torchs = masked_oracle(twin, [x], of).flatten(2).mT
        want = masked_oracle(copy.deepcopy(twin).double(), [x.double()], of).flatten(2).mT
        assert_holds(run(x, mask, copy=True), torchs, want)


def test_the_transformers_librarys_levit_is_planned():
    net, x = hugging_face("Levit", image_size=128, **LEVIT), torch.randn(1, 3, 128, 128)
    run = sbnet.sparsify(net, x)
    assert not dense_ops(run)
    with torch.no_grad():
        torch.testing.assert_close(run(x, torch.ones(1, 128, 128)), net(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: tokens.timm_net("vit_tiny_patch16_224", 96), 96),
        (lambda: tokens.swin(112, 7), 112),
        (lambda: hugging_face("Segformer", **SEGFORMER), 64),
        (lambda: tokens.sam(128), 128),
    ],
    ids=["ViT", "Swin", "SegFormer", "SAM"],
)
def test_all_but_a_twentieth_of_the_time_goes_to_active_blocks(make, side):
    found = sbnet.explain(make(), torch.randn(1, 3, side, side))
    assert found.time_share >= 0.95, str(found)


def test_attention_without_a_kernel_on_cuda_says_what_computes_it():
    for net, side, channels in ((tokens.swin(112, 7), 112, 12), (tokens.timm_net("beit_base_patch16_224", 96), 96, 64)):
        for dtype in (torch.float32, torch.float16):
            x = torch.randn(1, 3, side, side, dtype=dtype)
            nodes = sbnet.sparsify(net.to(dtype), x).plan.graph.nodes
            found = [n for n in nodes if n.kind in ("attention", "window_attention")]
            assert all(n.options["dim"] == channels for n in found)
            assert not any(kind_of(n).whole(n, "cpu") for n in found)
            why = {kind_of(n).whole(n, "cuda") for n in found}
            if side == 96:
                assert why == {"a bias: no kernel on CUDA; PyTorch computes attention of all rows"}
            else:
                assert why == {"heads of 12 channels, 49 keys: no kernel on CUDA; PyTorch computes all windows"}
