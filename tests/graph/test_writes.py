"""Counts of writes: whatever PyTorch counts is seen, tensor by tensor or by the library's one call for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sbnet
from sbnet.graph import writes
from sbnet.graph.writes import Writes
from support.networks import UNet, lively

WRITES = {
    "in place": lambda t: t.mul_(2),
    "an item": lambda t: t.__setitem__(0, 1),
    "a view": lambda t: t.view(-1)[1:].zero_(),
    "a detached tensor": lambda t: t.detach().fill_(3),
    "out=": lambda t: torch.add(t.clone(), 1, out=t),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
}


def tensors(device: str = "cpu") -> list[Tensor]:
    """A parameter, a buffer, a view of another and a tensor of integers."""
    wide = torch.rand(4, 3, device=device)
    return [nn.Parameter(torch.rand(4, 2, device=device)), torch.rand(5, device=device), wide[:, 1], wide.long()]


@pytest.mark.parametrize("how", ["one call", "another PyTorch", "a subclass"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_raises_the_count(write, how, device, monkeypatch):
    given = tensors(device)
    if how == "another PyTorch":
        monkeypatch.setattr(writes, "host_functions", lambda: Silent)
    if how == "a subclass":
        given[0] = given[0].detach().as_subclass(Sub)
    count = Writes(given)
    assert (count._pointers is not None) == (how == "one call")
    for tensor in given:
        before = count()
        assert count() == before
        with torch.no_grad():
            WRITES[write](tensor)
        assert count() > before


class Silent:
    """The library beside a PyTorch whose counts it cannot read."""

    @staticmethod
    def sbnet_count_writes(_pointers, _count):
        return -1


class Sub(Tensor):
    """Somebody's own."""


def test_counting_writes_nothing_and_keeps_no_memory():
    given = tensors()
    before = [t._version for t in given]
    count = Writes(given)
    assert [t._version for t in given] == before
    assert all(not counter.untyped_storage().nbytes() for counter in count._counted)


def test_tensors_may_be_swapped_and_freed():
    """The addresses that the library reads are of tensors of the count's own."""
    a, b = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
    count = Writes([a])
    torch.utils.swap_tensors(a, b)
    del a, b
    assert count() == 0


def test_tensors_of_inference_mode_are_left_out():
    with torch.inference_mode():
        made = torch.rand(3)
    assert Writes([made])() == 0


def test_a_write_of_any_parameter_makes_a_run_stale(device):
    net, x = lively(UNet("transpose")).to(device), torch.randn(1, 3, 24, 32, device=device)
    run, mask = sbnet.sparsify(net, x), torch.ones(1, 24, 32, device=device)
    run(x, mask)
    written = [(n, t) for n, t in (*net.named_parameters(), *net.named_buffers()) if t.is_floating_point()]
    assert len(written) > 10
    for name, tensor in written:
        with torch.no_grad():
            tensor.mul_(1)
        assert run.compiled.constants.stale(), name
        run(x, mask)
        assert not run.compiled.constants.stale(), name
