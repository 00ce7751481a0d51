"""Transformers under masks: an inactive token is no query and no key (docs/contracts.md)."""

from __future__ import annotations

import copy

import pytest
import torch

import sbnet
from sbnet.benchmarks.harness.held_positions import with_held_positions
from sbnet.graph.kinds import kind_of
from support import tokens
from support.contract import assert_holds, poison
from support.tokens import (
    FAMILIES,
    alone,
    assert_every_form_gives_the_same,
    kept,
    masks,
    on_kept,
    sam,
    sam_on,
    swin,
    swin_on,
    timm_net,
)

pytestmark = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")

QUICK = ("ViT", "DINOv2, registers", "DINOv3, rotary", "transformers YOLOS")
families = pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


@families
def test_active_tokens_see_active_tokens_alone(family):
    make, side, patch, prefix, suffix = FAMILIES[family]
    net, x = make(), torch.randn(2, 3, side, side)
    run, exact = sbnet.sparsify(net, x), copy.deepcopy(net).double()
    rows = torch.ops.aten.cat.default  # those before the tokens
    dense = [n for n in run.plan.graph.nodes if not kind_of(n).planned and not n.moves and len(n.output.shape) > 2]
    assert all(n.target == rows for n in dense), dense
    for mask in (torch.ones(2, side, side), masks(side), masks(side).flip(0)):
        poison(run)
        keep = kept(mask, patch, prefix, suffix)
        got = run(x, mask, copy=True)
        want, torchs = on_kept(exact, x.double(), keep), on_kept(net, x, keep)
        for n in range(2):  # each image by itself, against errors of as many numbers
            assert_holds(got[n], torchs[n], want[n], family)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_classifier_is_that_of_the_transformer_run_on_the_active_tokens_alone(pool):
    options = {"num_classes": 10, "global_pool": pool, "class_token": pool == "token"}
    net, x, mask = timm_net("vit_tiny_patch16_224", 96, **options), torch.randn(2, 3, 96, 96), masks(96)
    keep = kept(mask, 16, int(pool == "token"))
    got = sbnet.sparsify(net, x)(x, mask)
    exact = alone(copy.deepcopy(net).double(), x.double(), keep)
    assert_holds(got, alone(net, x, keep), exact)


def test_an_empty_mask_leaves_the_prefix_and_without_one_nothing():
    x, mask = torch.randn(1, 3, 96, 96), torch.zeros(1, 96, 96)
    net = timm_net("vit_tiny_patch16_224", 96)
    got = sbnet.sparsify(net, x)(x, mask)
    want = on_kept(net, x, kept(mask, 16, 1))
    assert torch.allclose(got, want, atol=1e-5)
    assert not got[:, 1:].any()
    assert not sbnet.sparsify(timm_net("vit_base_patch16_siglip_224", 96, depth=1), x)(x, mask).any()


def test_attention_that_is_not_recognised_leaves_the_network_as_it_was():
    net, x = timm_net("cait_xxs24_224", 96, depth=1), torch.randn(1, 3, 96, 96)
    run = sbnet.sparsify(net, x)
    assert not run.plan.tokens
    assert torch.allclose(run(x, torch.ones(1, 96, 96)), net(x), atol=1e-4)


@pytest.mark.parametrize(("side", "window"), [(112, 7), (96, 7)], ids=["whole windows", "padded windows"])
@pytest.mark.parametrize("block", [1, 4])
def test_windows_see_their_active_pixels_alone(side, window, block):
    """With cyclic shifts, biases of relative positions and merged patches."""
    net, x = swin(side, window), torch.randn(2, 3, side, side)
    for name, parameter in net.named_parameters():
        if name.endswith("qkv.bias"):
            torch.nn.init.normal_(parameter)  # of padding, keys and values are biases
    run, exact = sbnet.sparsify(net, x, block=block), copy.deepcopy(net).double()
    kinds = [node.kind for node in run.plan.graph.nodes]
    assert kinds.count("window_attention") == 4
    assert not [n for n in run.plan.graph.nodes if not kind_of(n).planned and not n.moves]
    for mask in (torch.ones(2, side, side), masks(side), masks(side).flip(0)):
        poison(run)
        got = run(x, mask, copy=True)
        assert_holds(got, swin_on(net, x, mask, block), swin_on(exact, x.double(), mask, block))


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, 7])
def test_windows_of_other_libraries_are_met(window):
    options = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    vision = tokens.torchvision().models.swin_transformer.SwinTransformer(**options, window_size=[window] * 2)
    import transformers

    config = transformers.SwinConfig(image_size=64, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=window)
    hugging = tokens.Output(transformers.SwinModel(config, add_pooling_layer=False))
    x = torch.randn(2, 3, 64, 64)
    for net in (vision.eval(), hugging.eval()):
        run = sbnet.sparsify(net, x)
        assert [node.kind for node in run.plan.graph.nodes].count("window_attention") == 4
        assert torch.allclose(run(x, torch.ones(2, 64, 64)), net(x), atol=1e-5)


@pytest.mark.parametrize("block", [1, 4])
def test_sam_sees_its_active_pixels_alone(block):
    """Padded windows, all tokens, and biases that queries are multiplied with."""
    net, x = sam(128), torch.randn(2, 3, 128, 128)
    torch.nn.init.normal_(net.pos_embed)
    for one in net.blocks:
        torch.nn.init.normal_(one.attn.rel_pos_h)
        torch.nn.init.normal_(one.attn.rel_pos_w)
    run, exact = sbnet.sparsify(net, x, block=block), copy.deepcopy(net).double()
    assert [node.kind for node in run.plan.graph.nodes].count("window_attention") == 2
    assert not [n for n in run.plan.graph.nodes if not kind_of(n).planned and not n.moves]
    for mask in (torch.ones(2, 128, 128), masks(128), masks(128).flip(0)):
        poison(run)
        got = run(x, mask, copy=True)
        assert_holds(got, sam_on(net, x, mask, block), sam_on(exact, x.double(), mask, block))


def test_the_dense_form_of_sam_that_benchmarks_time_is_sam():
    net, x = sam(48), torch.randn(2, 3, 48, 48)
    for one in net.blocks:
        torch.nn.init.normal_(one.attn.rel_pos_h)
        torch.nn.init.normal_(one.attn.rel_pos_w)
    held = with_held_positions(copy.deepcopy(net))
    with torch.no_grad():
        assert torch.equal(held(x), net(x))
    assert {name.split(".")[-1] for name, _ in held.named_buffers()} >= {"at_h", "at_w"}


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: timm_net("vit_tiny_patch16_224", 96), 96),
        pytest.param(lambda: tokens.hugging_face("Yolos", image_size=[96, 96]), 96, marks=pytest.mark.slow),
        pytest.param(lambda: timm_net("vit_small_patch16_dinov3", 96), 96, marks=pytest.mark.slow),
        pytest.param(lambda: swin(96, 7), 96, marks=pytest.mark.slow),
        pytest.param(lambda: sam(128), 128, marks=pytest.mark.slow),
    ],
    ids=["ViT", "YOLOS", "DINOv3", "Swin", "SAM"],
)
def test_the_functional_form_and_onnx_runtime_give_the_same(make, side, tmp_path):
    """What gradients flow through, GPUs run and export writes down."""
    pytest.importorskip("onnxruntime")
    assert_every_form_gives_the_same(make(), side, tmp_path)


FILES = [
    "ViT", "DINOv2, registers", "DINOv3, rotary", "EVA02, rotary, SwiGLU", "AIMv2, RMSNorm",
    "transformers ViT", "transformers DINOv2", "transformers DINOv3", "transformers CLIP",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_it_is_planned_as_the_module_is(name, tmp_path):
    """Attention as exporters write it: guarded softmax, masks that hide nothing, turned keys turned once more."""
    pytest.importorskip("onnxscript")
    make, side, *_ = FAMILIES[name]
    net, x = make(), torch.randn(2, 3, side, side)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    module, file = sbnet.sparsify(net, x), sbnet.sparsify(tmp_path / "net.onnx", x)
    counts = [[node.kind for node in run.plan.graph.nodes].count("attention") for run in (module, file)]
    assert counts[0] == counts[1] > 0
    mask = masks(side)
    torch.testing.assert_close(file(x, mask, copy=True), module(x, mask, copy=True), atol=2e-4, rtol=2e-4)
