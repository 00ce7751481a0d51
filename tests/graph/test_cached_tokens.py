"""Transformers under the cached contract: queries are active, keys and values of others those of the frame before."""

from __future__ import annotations

import copy

import pytest
import torch

import sbnet
from sbnet.graph.oracle import PlaneMasks
from support import tokens
from support.contract import assert_holds, poison
from support.remembering import Remembering, of_planes, of_tokens
from support.tokens import FAMILIES, kept, timm_net
from support.transformers import ViT, Windows
from support.window_nets import NETS, SIDES

libraries = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")
QUICK = ("ViT", "DINOv3, rotary", "BEiT, relative positions", "Swin v2, padded", "SegFormer", "YOLO11")


def quick(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def film(net, images: int, side: int):
    """Four frames and their masks: an empty one is the third's."""
    p = next(net.parameters())
    frames = torch.randn(4, images, 3, side, side, device=p.device, dtype=p.dtype)
    masks = torch.zeros(4, images, side, side, device=p.device)
    masks[1, 0, 10:40, 20:60] = masks[1, -1, 50:60, 3:9] = masks[3, 0, 5:9, 5:9] = masks[3, -1, :40, 30:] = 1
    return list(zip(frames, masks, strict=True))


def held_to(net, run, frames, keep, name=None):
    """Every frame against PyTorch's of the same contract; keep: of a mask, what `Remembering` asks for."""
    torchs, exact = Remembering(copy.deepcopy(net)), Remembering(copy.deepcopy(net).double())
    if frames[0][0].device.type == "cpu":
        poison(run)
    for x, mask in frames:
        got, new = run(x, mask, copy=True), keep(mask)
        assert_holds(got, torchs(x, new), exact(x.double(), new), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_tokens(device, dtype):
    torch.manual_seed(0)
    net = ViT(96).eval().to(device, dtype)
    frames = film(net, 2, 96)
    run = sbnet.sparsify(net, frames[0][0], mode="cached")
    kinds = [node.kind for node in run.plan.graph.nodes]
    assert kinds.count("remember") == 3, kinds  # of two layers, and of what leaves
    held_to(net, run, frames, lambda mask: of_tokens(kept(mask, 16, 1)))


@pytest.mark.parametrize(("channels", "heads"), [(36, 3), (20, 2)])
def test_heads_that_block_attention_does_not_take(device, channels, heads):
    torch.manual_seed(0)
    net = ViT(96, channels, heads).eval().to(device)
    frames = film(net, 2, 96)
    held_to(
        net, sbnet.sparsify(net, frames[0][0], mode="cached"), frames, lambda mask: of_tokens(kept(mask, 16, 1))
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_windows(device, dtype):
    torch.manual_seed(0)
    net = Windows().eval().to(device, dtype)
    frames = film(net, 2, 112)
    run = sbnet.sparsify(net, frames[0][0], mode="cached", block=4)
    assert [node.kind for node in run.plan.graph.nodes].count("window_attention") == 2
    held_to(net, run, frames, lambda mask: of_planes(PlaneMasks(mask, 4), 2))


@libraries
@pytest.mark.parametrize("family", quick(FAMILIES))
def test_libraries_transformers(family):
    make, side, patch, prefix, suffix = FAMILIES[family]
    net = make()
    frames = film(net, 2, side)
    run = sbnet.sparsify(net, frames[0][0], mode="cached")
    assert "attention" in [node.kind for node in run.plan.graph.nodes]
    held_to(net, run, frames, lambda mask: of_tokens(kept(mask, patch, prefix, suffix)), family)


@libraries
@pytest.mark.parametrize("name", quick(NETS))
def test_libraries_transformers_of_windows(name):
    side = SIDES.get(name, 64)
    net = NETS[name]()
    frames = film(net, 2, side)
    run = sbnet.sparsify(net, frames[0][0], mode="cached", block=1)
    assert "window_attention" in [node.kind for node in run.plan.graph.nodes]
    held_to(net, run, frames, lambda mask: of_planes(PlaneMasks(mask, 1), 2), name)


@libraries
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_classifier_looks_at_all_tokens(pool):
    options = {"num_classes": 10, "global_pool": pool, "class_token": pool == "token"}
    net = timm_net("vit_tiny_patch16_224", 96, **options)
    frames = film(net, 2, 96)
    run = sbnet.sparsify(net, frames[0][0], mode="cached")
    held_to(net, run, frames, lambda mask: of_tokens(kept(mask, 16, int(pool == "token"))))


@pytest.mark.parametrize(("net", "side"), [(ViT(96), 96), (Windows(), 112)], ids=["tokens", "windows"])
def test_the_functional_form_and_onnx_runtime_give_the_same(net, side, tmp_path):
    pytest.importorskip("onnxruntime")
    from sbnet.export import session

    frames = film(net.eval(), 2, side)
    run = sbnet.sparsify(net, frames[0][0], mode="cached", block=4)
    run.export(tmp_path / "net.onnx")
    exported, module = session(tmp_path / "net.onnx"), run.as_module()
    names = [i.name for i in exported.get_inputs()][2:]
    states = [torch.zeros(v.shape) for v in module.states]
    ort = [s.numpy() for s in states]
    for k, (x, mask) in enumerate(frames):
        given = torch.ones_like(mask) if k == 0 else mask
        want = run(x, mask, copy=True)
        with torch.no_grad():
            got, *states = module(x, given, *states)
        assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)
        feeds = {"x": x.numpy(), "mask": (given > 0).numpy(), **dict(zip(names, ort, strict=True))}
        y, *ort = exported.run(None, feeds)
        assert torch.allclose(torch.from_numpy(y), want, atol=1e-4, rtol=1e-4)


def test_the_exact_mode_says_why_attention_runs_dense():
    layers = sbnet.explain(ViT(96).eval(), torch.rand(1, 3, 96, 96), mode="exact")
    why = [layer.why for layer in layers if layer.kind == "scaled_dot_product_attention"]
    assert len(why) == 2
    assert all("exact: a token's result needs the keys and values of all others" in text for text in why)
