"""Transformers under masks on every device, in every dtype, of modules written here."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from support.contract import assert_holds, poison
from support.helpers import assert_as_accurate_as_torch
from support.tokens import kept, on_kept
from support.transformers import Layer, ViT, Windows, WrittenNorm

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def masks(side: int, device) -> list[torch.Tensor]:
    mask = torch.zeros(2, side, side, device=device)
    mask[0, 10:40, 20:60] = 1
    mask[1, 50:60, 3:9] = 1
    return [torch.ones_like(mask), mask, mask.flip(0), torch.zeros_like(mask)]


def alone(net: ViT, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The layers, image by image, on the tokens that are kept and on no other; zeros for the rest."""
    with torch.no_grad():
        tokens = net.tokens(x)
        found = torch.zeros_like(tokens)
        for n, some in enumerate(keep):
            found[n, some] = net.layers(tokens[n : n + 1, some])[0]
    return found


@dtypes
def test_all_tokens(device, dtype):
    torch.manual_seed(0)
    net, x = ViT(96).eval().to(device, dtype), torch.randn(2, 3, 96, 96, device=device, dtype=dtype)
    run, exact = sbnet.sparsify(net, x), copy.deepcopy(net).double()
    assert run.plan.tokens
    for mask in masks(96, device):
        if device == "cpu":
            poison(run)
        keep = kept(mask, 16, 1)
        assert_holds(run(x, mask, copy=True), alone(net, x, keep), alone(exact, x.double(), keep))


class Turned(Layer):
    """Queries and keys are turned by where they are (rotary embeddings): halves of a head, or neighbours in it."""

    def __init__(self, channels: int, heads: int, tokens: int, neighbours: bool) -> None:
        super().__init__(channels, heads)
        self.neighbours, width = neighbours, channels // heads
        self.register_buffer("angles", torch.rand(tokens, width) * 3)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        if self.neighbours:
            other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        else:
            half = x.shape[-1] // 2
            other = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.angles.cos() + other * self.angles.sin()

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return self.proj(y.transpose(1, 2).flatten(2))


@dtypes
@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
def test_turned_tokens(device, dtype, neighbours):
    torch.manual_seed(0)
    net = ViT(96)
    net.layers = nn.Sequential(*(Turned(96, 3, 37, neighbours) for _ in range(2)))
    net, x = net.eval().to(device, dtype), torch.randn(2, 3, 96, 96, device=device, dtype=dtype)
    run, exact = sbnet.sparsify(net, x), copy.deepcopy(net).double()
    assert [node.kind for node in run.plan.graph.nodes].count("rope") == 4
    for mask in masks(96, device):
        if device == "cpu":
            poison(run)
        keep = kept(mask, 16, 1)
        assert_holds(run(x, mask, copy=True), on_kept(net, x, keep), on_kept(exact, x.double(), keep))


class TurnedBack(Layer):
    """Queries are turned by tables, keys by the same ones the other way."""

    def __init__(self, channels: int, heads: int, tokens: int) -> None:
        super().__init__(channels, heads)
        angles = torch.rand(tokens, channels // heads) * 3
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        turned = [torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) for t in (q, k)]
        q, k = q * self.cos + turned[0] * self.sin, k * self.cos - turned[1] * self.sin
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_keys_that_are_turned_the_other_way(device):
    torch.manual_seed(0)
    net = ViT(96)
    net.layers = nn.Sequential(*(TurnedBack(96, 3, 37) for _ in range(2)))
    net, x = net.eval().to(device), torch.randn(2, 3, 96, 96, device=device)
    run, mask = sbnet.sparsify(net, x), torch.ones(2, 96, 96, device=device)
    assert [node.kind for node in run.plan.graph.nodes].count("rope") == 4
    assert_as_accurate_as_torch(run(x, mask), net(x), copy.deepcopy(net).double()(x.double()))


@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_turned_tokens_follow_their_tables(device, learned):
    torch.manual_seed(0)
    net = ViT(96)
    net.layers = nn.Sequential(*(Turned(96, 3, 37, False) for _ in range(2)))
    if learned:
        for layer in net.layers:
            angles = layer.angles
            del layer.angles
            layer.angles = nn.Parameter(angles)
    net, x = net.eval().to(device), torch.randn(2, 3, 96, 96, device=device)
    run, mask = sbnet.sparsify(net, x), torch.ones(2, 96, 96, device=device)
    assert [node.kind for node in run.plan.graph.nodes].count("rope") == 4
    run(x, mask)
    for layer in net.layers:
        layer.angles.mul_(0.5)
    assert_as_accurate_as_torch(run(x, mask), net(x), copy.deepcopy(net).double()(x.double()))


class Stemmed(nn.Module):
    """A transformer of the pixels of a convolution, whose active blocks are smaller than a block of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.vit = nn.Conv2d(3, 3, 3, 2, 1), ViT(48, patch=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vit(self.stem(x).relu())

    def alone(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        blocks = F.max_pool2d(mask[:, None].to(x.dtype), 4)
        small = blocks.repeat_interleave(2, 2).repeat_interleave(2, 3)
        coarse = F.max_pool2d(blocks, 4).repeat_interleave(16, 2).repeat_interleave(16, 3)[:, 0]
        with torch.no_grad():
            return alone(self.vit, self.stem(x).relu() * small, kept(coarse, 8, 1))


def test_patches_of_a_layer_are_zero_outside_of_its_blocks(device):
    """Whatever an earlier call has left there."""
    torch.manual_seed(0)
    net, x = Stemmed().eval().to(device), torch.randn(2, 3, 96, 96, device=device)
    run, exact = sbnet.sparsify(net, x, block=2), copy.deepcopy(net).double()
    assert next(node.options["patch"] for node in run.plan.graph.nodes if node.kind == "pack") == (4, 4)
    for mask in masks(96, device)[:3]:
        if device == "cpu":
            poison(run)
        assert_holds(run(x, mask, copy=True), net.alone(x, mask), exact.alone(x.double(), mask))


@pytest.mark.parametrize(("channels", "heads"), [(36, 3), (24, 3), (20, 2)])
def test_heads_that_block_attention_does_not_take(device, channels, heads):
    """Of 12, 8 and 10 channels: by PyTorch's attention, in the run and in its functional form."""
    torch.manual_seed(0)
    net, x = ViT(96, channels, heads).eval().to(device), torch.randn(2, 3, 96, 96, device=device)
    run, exact = sbnet.sparsify(net, x), copy.deepcopy(net).double()
    assert run.plan.tokens
    module = run.as_module()
    for mask in masks(96, device)[:2]:
        keep = kept(mask, 16, 1)
        want, true = alone(net, x, keep), alone(exact, x.double(), keep)
        assert_holds(run(x, mask, copy=True), want, true)
        with torch.no_grad():
            assert_holds(module(x, mask), want, true)


@dtypes
def test_windows(device, dtype):
    torch.manual_seed(0)
    net, x = Windows().eval().to(device, dtype), torch.randn(2, 3, 112, 112, device=device, dtype=dtype)
    run, exact = sbnet.sparsify(net, x, block=4), copy.deepcopy(net).double()
    assert [node.kind for node in run.plan.graph.nodes].count("window_attention") == 2
    for mask in masks(112, device):
        if device == "cpu":
            poison(run)
        planes = PlaneMasks(mask, 4)
        want = masked_oracle(exact, [x.double()], planes)
        assert_holds(run(x, mask, copy=True), masked_oracle(net, [x], planes), want)


@pytest.mark.parametrize("squared", [False, True])
def test_norms_written_out_look_at_active_tokens(device, squared):
    torch.manual_seed(0)
    net = ViT(96)
    for layer in net.layers:
        layer.norm1, layer.norm2 = WrittenNorm(96, squared), WrittenNorm(96, squared)
    net, x = net.eval().to(device), torch.randn(2, 3, 96, 96, device=device)
    run, exact = sbnet.sparsify(net, x), copy.deepcopy(net).double()
    assert [node.kind for node in run.plan.graph.nodes].count("each") == 4
    assert not [node for node in run.plan.graph.nodes if node.kind == "aten" and not node.moves]
    for mask in masks(96, device):
        keep = kept(mask, 16, 1)
        assert_holds(run(x, mask, copy=True), alone(net, x, keep), alone(exact, x.double(), keep))


class Masked(torch.nn.Module):
    """Attention whose mask is a buffer that shows all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv = torch.nn.Conv2d(3, 32, 16, 16), torch.nn.Linear(32, 96)
        self.register_buffer("mask", torch.ones(36, 36, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, c = (x := self.stem(x).flatten(2).transpose(1, 2)).shape
        q, k, v = self.qkv(x).view(n, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return y.transpose(1, 2).reshape(n, length, c)


def test_a_mask_of_attention_that_is_written_later_is_followed(device):
    torch.manual_seed(0)
    net, x, mask = Masked().eval().to(device), torch.randn(1, 3, 96, 96, device=device), masks(96, device)[0][:1]
    run = sbnet.sparsify(net, x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(run(x, mask, copy=True), net(x), atol=1e-5, rtol=1e-5)
            net.mask[:, 5:] = False
