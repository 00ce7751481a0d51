"""Ops on maps seen as [N,H,W,C], as tokens and as they are, by `sbnet.masked` and `sparsify`: in lists, by name, in
place, with several results. The oracle multiplies by the mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from support.helpers import assert_as_accurate_as_torch

C, SIDE, BLOCK = 12, 16, 4
MASK = torch.zeros(2, SIDE, SIDE)
MASK[0, :4, 4:8] = MASK[1, 8:, :8] = 1
LAYOUTS = {  # what a map becomes, and is again; of the mask, too
    "map": (lambda x: x, lambda x: x),
    "last": (lambda x: x.permute(0, 2, 3, 1), lambda x: x.permute(0, 3, 1, 2)),
    "tokens": (lambda x: x.flatten(2).transpose(1, 2), lambda x: x.transpose(1, 2).unflatten(2, (SIDE, SIDE))),
}


def written(write):
    """An op in place whose result is known by the old name."""

    def through(x: Tensor, d: int) -> Tensor:
        write(x, d)
        return x

    return through


def set_first(x: Tensor, d: int) -> None:
    x[:1] = 1


OPS = {  # of x and the dimension of its channels
    "add_": written(lambda x, d: x.add_(1)),
    "exp_": written(lambda x, d: x.exp_()),
    "a slice filled": written(lambda x, d: x.narrow(d, 0, 4).fill_(1)),
    "set": written(set_first),
    "a list in place": written(lambda x, d: torch._foreach_add_([x], 1)),
    "a list": lambda x, d: torch._foreach_add([x], 1)[0],
    "cat": lambda x, d: torch.cat([half + 1 for half in x.chunk(2, d)][::-1], d),
    "cat, by name": lambda x, d: torch.cat(tensors=[half + 1 for half in x.chunk(2, d)], dim=d),
    "concatenate": lambda x, d: torch.concatenate(x.split([4, 8], d)[::-1], axis=d),
    "stack": lambda x, d: torch.stack([x, x + 1]).sum(0),
    "stack, last": lambda x, d: torch.stack([x, x + 1], -1).mean(-1),
    "unbind": lambda x, d: torch.stack([t + 1 for t in x.unbind(d)], d),
    "select": lambda x, d: torch.stack([x.select(d, k) + 1 for k in range(C)], d),
    "twice as many images": lambda x, d: torch.cat([x, x])[:2] + 1,
    "by name": lambda x, d: torch.add(input=x, other=1),
    "of a number": lambda x, d: 1 - x,
    "where": lambda x, d: torch.where(x > 0, x, torch.ones_like(x)),
    "copy_": lambda x, d: torch.empty_like(x).copy_(x + 1),
    "sort": lambda x, d: x.sort(d)[0],
    "topk": lambda x, d: x.topk(C, d)[0] + 1,
    "cummax": lambda x, d: x.cummax(d)[0],
    "glu": lambda x, d: F.glu(torch.cat([x, x + 1], d), d),
    "softmax": lambda x, d: x.softmax(d),
    "mean": lambda x, d: x - x.mean(d, keepdim=True) + 1,
    "one more dimension": lambda x, d: x.unsqueeze(0).add(1)[0],
    "turned": lambda x, d: (x.transpose(1, 2) + 1).transpose(1, 2),
    "heads": lambda x, d: (x.unflatten(d, (3, 4)) + 1).flatten(d if d == 1 else -2, 2 if d == 1 else -1),
    "gate": lambda x, d: torch.sigmoid(x.chunk(2, d)[0]).repeat_interleave(2, d) + x,
}  # fmt: skip


class Between(nn.Module):
    """An op between two convolutions."""

    def __init__(self, op: str, layout: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, C, 1), nn.Conv2d(C, 4, 3, padding=1)
        self.op, self.dim = OPS[op], 1 if layout == "map" else -1
        self.there, self.back = LAYOUTS[layout]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.back(self.op(self.there(self.first(x)), self.dim)))

    def oracle(self, x: Tensor) -> Tensor:
        m = MASK[:, None].to(x.dtype)
        y = self.op(self.there(self.first(x) * m).clone(), self.dim)
        return self.second(self.back(y) * m) * m


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_an_op_between_convolutions(op, layout):
    torch.manual_seed(0)
    net, x = Between(op, layout).eval(), torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        torchs = net.oracle(x)
        exact = net.double().oracle(x.double())
        net.float()
        assert_as_accurate_as_torch(sbnet.sparsify(net, x, block=BLOCK)(x, MASK), torchs, exact)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded), sbnet.masked(MASK, block=BLOCK):
            got = net(x)
        assert_as_accurate_as_torch(got.detach(), torchs, exact)


def test_results_elsewhere_are_refused():
    x, first = torch.randn(2, 3, SIDE, SIDE), nn.Conv2d(3, C, 1)
    with torch.no_grad(), sbnet.masked(MASK, block=BLOCK):
        y = first(x).permute(0, 2, 3, 1)
        with pytest.raises(ValueError, match=r"expected a result of its own, got add with out="):
            torch.add(y, 1, out=torch.empty_like(y))


def test_an_input_seen_with_its_channels_last():
    x, first = torch.randn(2, 3, SIDE, SIDE), nn.Conv2d(3, C, 3, padding=1)
    mask = MASK[:, None]
    with torch.no_grad():
        want = first((2 * x + 1) * mask) * mask
        with sbnet.masked(MASK, block=BLOCK):
            got = first((x.permute(0, 2, 3, 1) * 2 + 1).permute(0, 3, 1, 2))
    torch.testing.assert_close(got, want)


def test_zeros_outside_of_the_blocks_stay_so_where_a_factor_is_infinite():
    x, first = torch.randn(2, 3, SIDE, SIDE), nn.Conv2d(3, C, 1)
    factor = torch.where(MASK > 0, 2.0, torch.inf)[..., None]
    with torch.no_grad():
        want = 2 * first(x) * MASK[:, None]
        with sbnet.masked(MASK, block=BLOCK):
            got = (first(x).permute(0, 2, 3, 1) * factor).permute(0, 3, 1, 2)
    torch.testing.assert_close(got, want)


def test_moves_of_nothing():
    """A slice of no rows, as rotary embeddings of a trunk without class tokens take."""
    x = torch.randn(2, 3, SIDE, SIDE)
    net = nn.Conv2d(3, C, 1)
    with torch.no_grad():
        want = (net(x) * MASK[:, None]).flatten(2).transpose(1, 2)
        with sbnet.masked(MASK, block=BLOCK):
            tokens = net(x).flatten(2).transpose(1, 2)
            got = torch.cat([tokens[:, :0], tokens[:, 0:]], 1)
    torch.testing.assert_close(got, want)


class Patches(nn.Module):
    """Tokens by views and a linear layer: sbnet follows no pixel of them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        patches = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        return self.project(patches.reshape(n, h * w // 16, 16 * c))


def test_a_network_of_which_nothing_would_be_masked_is_refused():
    net, x = Patches().eval(), torch.randn(2, 3, SIDE, SIDE)
    with pytest.raises(ValueError, match=r"the network: expected layers whose pixels sbnet can follow .*, got none"):
        sbnet.sparsify(net, x)
    with pytest.raises(ValueError, match=r"got none of its images: nothing was masked"), sbnet.masked(MASK):
        net(x)


def test_a_condition_by_name_stays_the_first_argument():
    x, first = torch.randn(2, 3, SIDE, SIDE), nn.Conv2d(3, C, 1)
    with torch.no_grad():
        want = torch.where(first(x) > 0, first(x), 1.0) * MASK[:, None]
        with sbnet.masked(MASK, block=BLOCK):
            y = first(x)
            got = torch.where(condition=y > 0, input=y, other=torch.ones_like(y))
            turned = torch.where(input=y, condition=y > 0, other=torch.ones_like(y))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(turned, want)
