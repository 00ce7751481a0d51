"""Networks that write maps in place: through views, lists and out=, what `sparsify` makes of them is what they do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.graph.capture import CaptureError


def out(write):
    """write(a, b) into a new map b."""

    def run(a):
        new = torch.empty_like(a)
        write(a, new)
        return new

    return run


def first(write):
    """write(a), and a."""

    def run(a):
        write(a)
        return a

    return run


WRITES = {
    "out= of a sum with a number": out(lambda a, b: torch.add(a, 1, out=b)),
    "out= of a difference": out(lambda a, b: torch.sub(a, 1, out=b)),
    "out= of joined maps": out(lambda a, b: torch.cat([a[:, 4:], a[:, :4]], 1, out=b)),
    "out= itself": first(lambda a: torch.clamp(a, 0, 1, out=a)),
    "a list": first(lambda a: torch._foreach_add_([a], 1.0)),
    "a list copied": out(lambda a, b: torch._foreach_copy_([b], [a * 3])),
    "items": first(lambda a: a.__setitem__((slice(None), slice(0, 3)), 2.0)),
    "items of a new map": out(lambda a, b: b.zero_()[..., 1:].copy_(a[..., :-1])),
    "a channel": first(lambda a: a.select(1, 2).fill_(4)),
    "a channel of all": first(lambda a: a.unbind(1)[0].add_(5)),
    "flat": first(lambda a: a.flatten(2)[:, 0].add_(1)),
    "channels last": first(lambda a: a.permute(0, 2, 3, 1)[..., 0].add_(2)),
    "an activation of some": first(lambda a: F.relu_(a[:, 2:])),
    "where": first(lambda a: a.masked_fill_(a > 0, 3.0)),
}


class Network(nn.Module):
    """A map is read before and after it is written."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.write = write

    def forward(self, x):
        a = self.one(x)
        before, normed = self.two(a), self.norm(a)
        b = self.write(a)
        return before + 1, F.relu(normed), self.two(b), b + 0, a + 0


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_map_is_written_as_in_pytorch(write):
    net, x = Network(write).eval(), torch.randn(2, 3, 24, 32)
    with torch.no_grad():
        want = net(x)
    got = sbnet.sparsify(net, x)(x, torch.ones(2, 24, 32, dtype=torch.bool))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def doubled(view, back=lambda v, a: v):
    """a and a view of it, or a copy, of which one was written."""

    def run(a):
        other = view(a)
        other.mul_(2)
        return a + back(other, a)

    return run


VIEWS_OR_COPIES = {
    "contiguous": doubled(lambda a: a.contiguous()),
    "channels_last": doubled(lambda a: a.contiguous(memory_format=torch.channels_last)),
    "a memory format": doubled(lambda a: a.to(memory_format=torch.channels_last)),
    "a cast that is none": doubled(lambda a: a.to(torch.float32)),
    "a cast that copies": doubled(lambda a: a.to(torch.float32, copy=True)),
    "a reshape": doubled(lambda a: a.reshape(len(a), -1), lambda v, a: v.view(a.shape)),
    "pixels first": doubled(lambda a: a.permute(0, 2, 3, 1).contiguous(), lambda v, a: v.permute(0, 3, 1, 2)),
    "there and back": doubled(lambda a: a.permute(0, 2, 3, 1).reshape(len(a), -1, 8).mT.reshape(a.shape)),
    "a dropout": doubled(lambda a: F.dropout(a, 0.5, False)),
    "channels of a dropout": doubled(lambda a: F.dropout2d(a, 0.5, False)[:, :3], lambda v, a: a),
    "a pool of one pixel": doubled(lambda a: F.adaptive_avg_pool2d(a, a.shape[2:])),
}


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("write", VIEWS_OR_COPIES.values(), ids=VIEWS_OR_COPIES.keys())
def test_what_may_be_a_view_or_a_copy_is_written(write, memory):
    """Which it is hangs on the memory format, as in PyTorch."""
    net, x = Network(write).eval(), torch.randn(2, 3, 24, 32).contiguous(memory_format=memory)
    with torch.no_grad():
        want = net(x)
    got = sbnet.sparsify(net, x)(x, torch.ones(2, 24, 32, dtype=torch.bool))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_einsum_that_is_a_view_and_written_is_refused():
    """PyTorch's decomposition of it is a copy."""
    net = Network(doubled(lambda a: torch.einsum("nchw->nhwc", a), lambda v, a: v.permute(0, 3, 1, 2))).eval()
    with pytest.raises(CaptureError, match="an einsum that is a view"):
        sbnet.sparsify(net, torch.randn(2, 3, 24, 32))


def test_an_assignment_to_data_is_refused():
    """torch.export does not follow it."""
    net = Network(first(lambda a: setattr(a, "data", torch.ones_like(a)))).eval()
    with pytest.raises(CaptureError, match="no assignment to .data"):
        sbnet.sparsify(net, torch.randn(2, 3, 24, 32))
