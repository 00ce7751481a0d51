"""Transformers inside `sbnet.masked`: tokens are followed, attention sees active ones, and what is not followed is
refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet.engine import eager_tokens
from support import tokens
from support.contract import assert_holds
from support.helpers import run_python
from support.tokens import FAMILIES, kept, on_kept, timm_net
from support.transformers import ViT, Windows

libraries = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")
QUICK = ("ViT", "DINOv2, registers", "DeiT, distilled")
WRITTEN_OUT: set[str] = set()  # families whose attention is products and a softmax


def masks(side: int, device="cpu") -> torch.Tensor:
    mask = torch.zeros(2, side, side, dtype=torch.bool, device=device)
    mask[0, 10:40, 20:60] = mask[1, 50:60, 3:9] = True
    return mask


def alone(net: ViT, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The layers on the tokens that are kept and on no other; zeros for the rest."""
    embedded, rows = net.tokens(x), []
    for n, some in enumerate(keep):
        made = torch.zeros_like(embedded[n]).index_put(
            (some.nonzero()[:, 0],), net.layers(embedded[n : n + 1, some])[0]
        )
        rows.append(made)
    return torch.stack(rows)


@pytest.mark.parametrize("full", [False, True], ids=["some", "all"])
def test_the_gradients_are_those_of_the_active_tokens_alone(device, full):
    torch.manual_seed(0)
    net, x = ViT(96).to(device), torch.randn(2, 3, 96, 96, device=device)
    mask = masks(96, device) | full
    weight = torch.randn(2, 37, 96, device=device)
    found = []
    for one, dtype in ((net, torch.float32), (copy.deepcopy(net), torch.float32), (copy.deepcopy(net), torch.double)):
        one, given = one.to(dtype), x.to(dtype, copy=True).requires_grad_()
        if one is net:
            with sbnet.masked(mask, block=1):
                y = one(given)
        else:
            y = alone(one, given, kept(mask.float(), 16, 1))
        (y * weight.to(dtype)).sum().backward()
        found.append([y.detach(), given.grad, *(p.grad for p in one.parameters())])
    for got, torchs, exact in zip(*found, strict=True):
        assert_holds(got, torchs, exact)


@libraries
@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_libraries_transformers(family):
    make, side, patch, prefix, suffix = FAMILIES[family]
    net, x = make(), torch.randn(2, 3, side, side)
    mask, keep = masks(side), kept(masks(side).float(), patch, prefix, suffix)
    if family in WRITTEN_OUT:
        with sbnet.masked(mask, block=1), pytest.raises(NotImplementedError, match="of tokens with tokens"):
            net(x)
        return
    with torch.no_grad(), sbnet.masked(mask, block=1):
        got = net(x)
    exact = copy.deepcopy(net).double()
    for n in range(2):
        assert_holds(got[n], on_kept(net, x, keep)[n], on_kept(exact, x.double(), keep)[n], family)


@libraries
def test_torchvisions_transformer():
    """nn.MultiheadAttention, whose tokens come first; a class token."""
    vision = tokens.torchvision().models.vision_transformer
    torch.manual_seed(0)
    net = vision.VisionTransformer(96, 16, 2, 3, 48, 96, num_classes=5).eval()
    x, mask = torch.randn(2, 3, 96, 96), masks(96)
    with sbnet.masked(mask, block=1):
        got = net(x)
    got.sum().backward()
    assert torch.allclose(got, sbnet.sparsify(net, x, block=1)(x, mask), atol=1e-5)
    changed = torch.where(F.interpolate(mask[:, None].float(), (6, 6), mode="area").repeat_interleave(16, 2)
                          .repeat_interleave(16, 3) > 0, x, torch.randn_like(x))  # fmt: skip
    with sbnet.masked(mask, block=1):
        assert torch.allclose(net(changed), got, atol=1e-5)  # inactive tokens do not exist


@libraries
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_classifier(pool):
    options = {"num_classes": 10, "global_pool": pool, "class_token": pool == "token"}
    net, x, mask = timm_net("vit_tiny_patch16_224", 96, **options), torch.randn(2, 3, 96, 96), masks(96)
    with torch.no_grad(), sbnet.masked(mask, block=1):
        got = net(x)
    assert torch.allclose(got, sbnet.sparsify(net, x)(x, mask), atol=1e-5)


class Back(torch.nn.Module):
    """Attention over the pixels of a plane, and a convolution of what it gives."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.stem, self.qkv = how, torch.nn.Conv2d(3, 16, 8, 8), torch.nn.Linear(16, 48)
        self.last = torch.nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        n, c, h, w = x.shape
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).view(n, h * w, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "written out":
            y = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1) @ v
        elif self.how == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q * 1.5, k, v)
        return self.last(y.transpose(1, 2).reshape(n, h * w, c).transpose(1, 2).reshape(n, c, h, w) + x)


def test_tokens_that_become_a_plane_again():
    net, x, mask = Back("plain").eval(), torch.randn(2, 3, 96, 96), masks(96)
    with sbnet.masked(mask, block=1):
        got = net(x)
    assert torch.allclose(got, sbnet.sparsify(net, x, block=1)(x, mask), atol=1e-5)


@pytest.mark.parametrize(
    ("net", "side", "got"),
    [
        (Back("written out"), 96, "matmul of tokens with tokens"),
        (Back("causal"), 96, "causal attention"),
        (Windows(), 112, "windows, or queries and keys of two planes"),
    ],
    ids=["written out", "causal", "windows"],
)
def test_what_is_not_followed_is_refused_by_name(net, side, got):
    with sbnet.masked(torch.ones(2, side, side)), pytest.raises(NotImplementedError, match=got):
        net(torch.randn(2, 3, side, side))


COMPILED = """
import torch
import sbnet
from support.transformers import ViT

net = ViT(96)

def step(x, mask):
    with sbnet.masked(mask):
        return net(x)

x, mask, said = torch.randn(2, 3, 96, 96), torch.ones(2, 96, 96), []
for options in ({"backend": "eager"}, {"fullgraph": True}):
    try:
        torch.compile(step, **options)(x, mask)
    except Exception as error:
        said.append("compiled" in str(error) and "attention" in str(error))
assert said == [True, True], said
"""


def test_attention_in_a_compiled_step_is_refused():
    result = run_python(COMPILED)
    assert result.returncode == 0, result.stderr[-2000:]


def test_attention_of_other_tensors_is_as_it_was():
    """Of a decoder's queries, whose heads look like feature maps."""
    q = torch.randn(2, 4, 10, 8)
    with sbnet.masked(torch.zeros(2, 96, 96)):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
        got = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(got, F.scaled_dot_product_attention(q, q, q))


def test_the_default_device_is_not_asked():
    """Where tokens lie is found on the CPU: a step on a GPU waits for nothing, and may be captured."""
    net, x, mask = ViT(96).eval(), torch.randn(2, 3, 96, 96), masks(96)
    with torch.no_grad(), sbnet.masked(mask, block=1):
        want = net(x)
    eager_tokens._looked_up.cache_clear()
    with torch.device("meta"), torch.no_grad(), sbnet.masked(mask, block=1):
        assert torch.equal(net(x), want)


class Mean(torch.nn.Module):
    """The mean of a plane's tokens after `how` did something to them, and attention among what they are then."""

    def __init__(self, how, attend=False):
        super().__init__()
        self.how, self.attend, self.stem = how, attend, torch.nn.Conv2d(3, 16, 16, 16)

    def forward(self, x):
        x = self.how(self.stem(x).flatten(2).transpose(1, 2))
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0] if self.attend else x
        return x.mean(axis=1)


def written(x):
    x = x * 1.0
    x.add_(2.0)
    x[:, :, 3] = 5.0
    return x


@pytest.mark.parametrize("how", [written, lambda x: 1 / (x + 2), lambda x: x.flip(2)], ids=["in place", "1/x", "flip"])
def test_means_are_of_active_tokens_whatever_was_done_to_them(how):
    net, x, mask = Mean(how), torch.randn(2, 3, 96, 96), masks(96)
    with torch.no_grad():
        with sbnet.masked(mask, block=1):
            got = net(x)
        every = how(net.stem(x).flatten(2).transpose(1, 2))
        for n, some in enumerate(kept(mask.float(), 16, 0)):
            assert torch.allclose(got[n], every[n, some].mean(0), atol=1e-5)


@pytest.mark.parametrize("how", [lambda x: x.flip(1), lambda x: x.roll(3, 1), lambda x: x.sort(1)[0]],
                         ids=["flip", "roll", "sort"])  # fmt: skip
def test_tokens_in_another_order_are_not_taken_for_those_that_were_there(how):
    with sbnet.masked(masks(96), block=1), pytest.raises(NotImplementedError, match="windows, or queries and keys"):
        Mean(how, attend=True)(torch.randn(2, 3, 96, 96))


def test_a_mean_has_the_dtype_that_is_asked_for():
    x, mask = torch.randn(2, 3, 96, 96), masks(96)
    net = Mean(lambda t: t)
    with torch.no_grad(), sbnet.masked(mask, block=1):
        tokens_ = net.stem(x).flatten(2).transpose(1, 2)
        assert tokens_.mean(1, dtype=torch.double).dtype == torch.double
