"""What a CUDA graph reads is what the call was given, however that lies in memory."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sbnet
from sbnet.engine import inputs
from sbnet.engine.compiled import static
from sbnet.engine.inputs import Inputs

SHAPE = (2, 3, 7, 9)


class Memory:
    """The library's copies, where memory is the host's."""

    @staticmethod
    def sbnet_copy_inputs(to, given, count_of_bytes, count, _device):
        for k in range(count):
            if given[k] and count_of_bytes[k] < 0:
                ctypes.c_int64.from_address(to[k]).value = given[k]
            elif given[k]:
                ctypes.memmove(to[k], given[k], count_of_bytes[k])


def filled(device: str, monkeypatch) -> tuple[list[Tensor], Inputs]:
    """A frame, a state and a mask that hold rubbish, and what fills them."""
    at = torch.device(device, 0)
    if device == "cpu":
        monkeypatch.setattr(inputs, "host_functions", lambda: Memory)
    own = [static(torch.empty(SHAPE, dtype=torch.float16), at), torch.empty(2, 5, device=at)]
    own += [torch.ones(2, 7, 9, dtype=torch.bool, device=at)]
    for tensor in own[:2]:
        tensor.fill_(float("nan"))
    return own, Inputs(own, at)


def forms(x: Tensor) -> dict[str, Tensor]:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    found = {"contiguous": x.contiguous(), "every second": wide[..., ::2], "a subclass": x.as_subclass(Sub)}
    if x.dim() == 4:
        found["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    if x.is_floating_point():
        found["with a gradient"] = x.clone().requires_grad_() * 1
    return found


class Sub(Tensor):
    """Somebody's own."""


def given(device: str) -> list[Tensor]:
    return [
        torch.randn(SHAPE, device=device).half(), torch.randn(2, 5, device=device),
        torch.rand(2, 7, 9, device=device) < 0.5,
    ]  # fmt: skip


@pytest.mark.parametrize("at", range(3))
def test_all_layouts(at, device, monkeypatch):
    for name, form in forms(given(device)[at]).items():
        own, fill = filled(device, monkeypatch)
        call = given(device)
        call[at] = form
        fill(call)
        for mine, theirs in zip(own, call, strict=True):
            assert torch.equal(mine, theirs.detach().as_subclass(Tensor)), name


def test_what_is_there_already_stays(device, monkeypatch):
    own, fill = filled(device, monkeypatch)
    call = given(device)
    fill([call[0].contiguous(memory_format=torch.channels_last), *call[1:]])
    own[0].fill_(7)
    own[2].logical_not_()
    fill([own[0], torch.zeros_like(call[1]), own[2]])
    assert (own[0] == 7).all()
    assert not own[1].any()
    assert torch.equal(own[2], ~call[2])


def test_what_is_read_where_it_lies_is_told_and_not_copied(device, monkeypatch):
    """Its address, where it lies alike and begins as kernels want it; else that of the copy. Told once."""
    own, _ = filled(device, monkeypatch)
    at = torch.device(device, 0)
    addresses = torch.tensor([t.data_ptr() for t in own], device=at)
    fill = Inputs(own, at, addresses, [True, False, True])
    calls, real = [], fill._copy
    fill._copy = lambda *given: calls.append(1) or real(*given)
    call = given(device)
    call[0] = call[0].contiguous(memory_format=torch.channels_last)
    fill(call)
    assert addresses.tolist() == [call[0].data_ptr(), own[1].data_ptr(), call[2].data_ptr()]
    assert own[0].isnan().all()
    assert torch.equal(own[1], call[1])
    fill([call[0], own[1], call[2]])
    assert len(calls) == 1
    room = torch.zeros(call[0].numel() + 1, dtype=call[0].dtype, device=device)[1:]
    odd = room.view(2, 7, 9, 3).permute(0, 3, 1, 2).copy_(call[0])
    for other in (odd, call[0].contiguous()):
        fill([other, call[1], own[2]])
        assert addresses.tolist() == [t.data_ptr() for t in own]
        assert torch.equal(own[0], call[0])
        own[0].fill_(float("nan"))


@pytest.mark.parametrize("alike", [True, False])
def test_what_lies_alike_is_no_op_of_pytorch(alike, device, monkeypatch):
    _, fill = filled(device, monkeypatch)
    call, seen = given(device), []
    if alike:
        call[0] = call[0].contiguous(memory_format=torch.channels_last)

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Ops():
        fill(call)
    assert bool(seen) != alike, seen


@pytest.mark.gpu
def test_copies_are_of_the_current_stream(monkeypatch):
    own, fill = filled("cuda", monkeypatch)
    call, side = given("cuda"), torch.cuda.Stream()
    call[0] = call[0].contiguous(memory_format=torch.channels_last)
    want, late = call[0].clone(), torch.zeros_like(call[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(want)
        fill([late, *call[1:]])
    side.synchronize()
    assert torch.equal(own[0], want)


def test_an_error_of_the_library_is_raised(monkeypatch):
    own, fill = filled("cpu", monkeypatch)
    fill._copy = lambda *_: b"sbnet::copy: a launch failed"
    with pytest.raises(RuntimeError, match="sbnet::copy: a launch failed"):
        fill(given("cpu"))
    assert own[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "through"), [(3, [True, True]), (7, [False, True])])
def test_a_graph_reads_frames_and_masks_wherever_they_lie(kernel, through):
    """The bits of a call without a graph, for tensors of all layouts that are gone after the call; the 7x7 kernel's
    copies want another form."""
    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 64, kernel, 2, kernel // 2)
    net = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3, padding=1)).half().eval().cuda()
    size = (2, 3, 64, 96)
    run = sbnet.sparsify(net, torch.zeros(size, dtype=torch.float16, device="cuda"))
    assert run.compiled.through == through
    for seed in range(6):
        x, mask = torch.randn(size, device="cuda").half(), torch.rand(2, 64, 96, device="cuda") > 0.99
        want = run.body(x.contiguous(memory_format=torch.channels_last), mask=mask).clone()
        for form in forms(x).values():
            assert torch.equal(run(form.clone() if seed % 2 else form, mask.clone() if seed % 2 else mask), want)
        run.frame.copy_(x)
        run.mask.copy_(mask)
        assert torch.equal(run(run.frame, run.mask), want)
