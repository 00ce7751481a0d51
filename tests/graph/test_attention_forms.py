"""Attention that is written in other words than a softmax of q k^T: inactive tokens are no keys. The oracle is the same
network, told which tokens are keys."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from support.helpers import assert_as_accurate_as_torch

CHANNELS, HEADS, PATCH, SIZE = 16, 4, 4, 32
WIDTH = CHANNELS // HEADS


def split(x: Tensor) -> Tensor:
    return x.unflatten(2, (HEADS, WIDTH)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def scores(q: Tensor, k: Tensor, keys: Tensor | None) -> Tensor:
    found = q @ k.transpose(-1, -2) * WIDTH**-0.5
    return found if keys is None else found.masked_fill(~keys[:, None, None], -torch.inf)


def heads_in_the_batch(q, k, v, keys, bias=None):
    """As diffusers has it: baddbmm, of what is not read where there is no bias."""
    q, k, v = (split(t).flatten(0, 1) for t in (q, k, v))
    added = q.new_empty(len(q), q.shape[1], k.shape[1]) if bias is None else bias.expand(len(q), q.shape[1], -1)
    found = torch.baddbmm(added, q, k.mT, beta=0 if bias is None else 0.5, alpha=WIDTH**-0.5)
    if keys is not None:
        found = found.masked_fill(~keys.repeat_interleave(HEADS, 0)[:, None], -torch.inf)
    return joined((found.softmax(-1) @ v).unflatten(0, (-1, HEADS)))


def a_bias_in_the_product(q, k, v, keys):
    return heads_in_the_batch(q, k, v, keys, torch.arange(k.shape[1], dtype=q.dtype) / 64)


def a_bias_of_heads_in_the_batch(q, k, v, keys):
    q, k, v = (split(t).flatten(0, 1) for t in (q, k, v))
    bias = torch.arange(k.shape[1], dtype=q.dtype).expand(len(q), q.shape[1], -1) / 64
    if keys is not None:
        bias = bias.masked_fill(~keys.repeat_interleave(HEADS, 0)[:, None], -torch.inf)
    return joined(F.scaled_dot_product_attention(q, k, v, bias).unflatten(0, (-1, HEADS)))


def keys_in_rows(q, k, v, keys):
    q, k, v = map(split, (q, k, v))
    found = k @ q.mT * WIDTH**-0.5
    if keys is not None:
        found = found.masked_fill(~keys[:, None, :, None], -torch.inf)
    return joined(found.softmax(-2).mT @ v)


def by_hand(q, k, v, keys):
    q, k, v = map(split, (q, k, v))
    found = scores(q, k, keys)
    weights = (found - found.amax(-1, keepdim=True)).exp()
    return joined(weights / weights.sum(-1, keepdim=True) @ v)


def by_logarithms(q, k, v, keys):
    q, k, v = map(split, (q, k, v))
    found = scores(q, k, keys)
    return joined((found - found.logsumexp(-1, keepdim=True)).exp() @ v + found.log_softmax(-1).exp() @ v)


def the_best_three(q, k, v, keys):
    q, k, v = map(split, (q, k, v))
    best, at = scores(q, k - 8, keys).topk(3)
    rows = v[:, :, None].expand(*v.shape[:2], q.shape[2], *v.shape[2:])
    return joined((best.softmax(-1)[..., None] * rows.gather(3, at[..., None].expand(*at.shape, WIDTH))).sum(3))


def keys_by_themselves(q, k, v, keys):
    """Efficient attention (Shen et al., 2018): a softmax of k over all tokens."""
    q, k, v = map(split, (q, k, v))
    k = k if keys is None else k.masked_fill(~keys[:, None, :, None], -torch.inf)
    return joined(q.softmax(-1) @ (k.softmax(-2).mT @ v))


def parted(x: Tensor, side: int = SIZE // PATCH, window: int = 4) -> Tensor:
    """[N,T,...] as [N,windows,rows,...]."""
    x = x.unflatten(1, (side // window, window, side // window, window))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def whole(x: Tensor, side: int = SIZE // PATCH, window: int = 4) -> Tensor:
    x = x.unflatten(2, (window, window)).unflatten(1, (side // window, side // window))
    return x.transpose(2, 3).flatten(1, 4)


def seen_in_windows(keys: Tensor) -> Tensor:
    """[N,windows,rows]; a window without keys sees all of its rows, which are not active."""
    keys = parted(keys)
    return keys | ~keys.any(-1, keepdim=True)


def windows_in_the_batch(q, k, v, keys):
    q, k, v = (split(parted(t).flatten(0, 1)) for t in (q, k, v))
    found = q.softmax(-1) @ k.mT
    if keys is not None:
        found = found.masked_fill(~seen_in_windows(keys).flatten(0, 1)[:, None, None], -torch.inf)
    return whole(joined(found.softmax(-1) @ v).unflatten(0, (-1, 4)))


def windows_in_one_op(q, k, v, keys):
    q, k, v = (split(parted(t).flatten(0, 1)) for t in (q, k, v))
    mask = None if keys is None else seen_in_windows(keys).flatten(0, 1)[:, None, None]
    return whole(joined(F.scaled_dot_product_attention(q.softmax(-1), k, v, mask)).unflatten(0, (-1, 4)))


def windows_beside_heads(q, k, v, keys):
    q, k, v = (parted(t).unflatten(3, (HEADS, WIDTH)).permute(0, 3, 1, 2, 4) for t in (q, k, v))
    found = q @ k.mT * WIDTH**-0.5 + torch.arange(k.shape[3], dtype=q.dtype).view(1, 1, 1, 1, -1) / 64
    if keys is not None:
        found = found.masked_fill(~seen_in_windows(keys)[:, None, :, None], -torch.inf)
    return whole((found.softmax(-1) @ v).permute(0, 2, 3, 1, 4).flatten(3))


def every_fourth_token(q, k, v, keys):
    """Windows of tokens that lie apart, as in Hiera."""
    q, k, v = (t.unflatten(1, (-1, 4)).unflatten(3, (HEADS, WIDTH)).permute(0, 3, 2, 1, 4) for t in (q, k, v))
    mask = None
    if keys is not None:
        mask = keys.unflatten(1, (-1, 4)).mT
        mask = (mask | ~mask.any(-1, keepdim=True))[:, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, mask).permute(0, 3, 2, 1, 4).flatten(3).flatten(1, 2)


FORMS = [
    every_fourth_token,
    windows_in_the_batch, windows_in_one_op, windows_beside_heads,
    heads_in_the_batch, a_bias_in_the_product, a_bias_of_heads_in_the_batch, keys_in_rows, by_hand, by_logarithms,
    the_best_three, keys_by_themselves,
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, CHANNELS, PATCH, PATCH), nn.Conv2d(CHANNELS, 4, 1)
        self.q, self.k, self.v, self.out = (nn.Linear(CHANNELS, CHANNELS) for _ in range(4))
        self.norm, self.attend = nn.LayerNorm(CHANNELS), attend

    def forward(self, x, keys=None):
        x = self.stem(x)
        size, x = x.shape[2:], x.flatten(2).transpose(1, 2)
        y = self.norm(x)
        x = x + self.out(self.attend(self.q(y), self.k(y), self.v(y), keys))
        return self.head(x.transpose(1, 2).unflatten(2, size))


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("attend", FORMS)
@torch.no_grad()
def test_inactive_tokens_are_no_keys(attend, images):
    net, x = Net(attend).eval(), torch.randn(images, 3, SIZE, SIZE)
    mask = torch.zeros(images, SIZE, SIZE, dtype=torch.bool)
    mask[0, 8:24, 4:20] = mask[1:, :12, :16] = True
    run = sbnet.sparsify(net, x, block=1)
    tokens = F.max_pool2d(mask[:, None].float(), PATCH) > 0
    got = run(x, mask)
    there = tokens.expand_as(got)
    assert float(got[~there].abs().max()) == 0
    torchs, exact = net(x, tokens.flatten(1)), net.double()(x.double(), tokens.flatten(1))
    assert_as_accurate_as_torch(got[there], torchs[there], exact[there])


class Pooled(nn.Module):
    """A learned query gathers all pixels."""

    def __init__(self):
        super().__init__()
        self.stem, self.k, self.v = nn.Conv2d(3, CHANNELS, PATCH, PATCH), *(nn.Linear(CHANNELS, CHANNELS) for _ in "kv")
        self.query = nn.Parameter(torch.randn(1, CHANNELS))

    def forward(self, x, keys=None):
        x = self.stem(x).flatten(2).transpose(1, 2)
        found = self.query.expand(len(x), 1, -1) @ self.k(x).mT / 4
        if keys is not None:
            found = found.masked_fill(~keys[:, None], -torch.inf)
        return found.softmax(-1) @ self.v(x)


@torch.no_grad()
def test_a_learned_query_sees_active_tokens():
    net, x, mask = Pooled().eval(), torch.randn(2, 3, SIZE, SIZE), torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    mask[0, 8:24, 4:20] = mask[1, :12, :16] = True
    keys = (F.max_pool2d(mask[:, None].float(), PATCH) > 0).flatten(1)
    got = sbnet.sparsify(net, x, block=1)(x, mask)
    torchs, exact = net(x, keys), net.double()(x.double(), keys)
    assert_as_accurate_as_torch(got, torchs, exact)
