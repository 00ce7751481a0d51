"""Transformers under masks: an inactive token is no query and no key (docs/contracts.md)."""

from __future__ import annotations

import copy

import pytest
import torch

import sbnet
from sbnet.graph.kinds import kind_of
from support import tokens
from support.contract import assert_holds, poison
from support.tokens import FAMILIES, alone, kept, on_kept, timm_net

pytestmark = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")

QUICK = ("ViT", "DINOv2, registers", "DINOv3, rotary", "transformers YOLOS")
families = pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


def masks(side: int) -> torch.Tensor:
    """Two images, of unlike numbers of tokens."""
    mask = torch.zeros(2, side, side)
    mask[0, 10:40, 20:60] = 1
    mask[1, 50:60, 3:9] = 1
    return mask


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
