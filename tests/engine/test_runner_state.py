"""What a runner keeps between calls: an error, another thread or a caller's write must not spoil later results."""

import threading

import pytest
import torch
from torch import nn

from sbnet import mask_pyramid
from sbnet.engine import SparseRun, plane_masks
from sbnet.engine.lists import Lists
from sbnet.graph.kinds import KINDS
from sbnet.models import resnet18
from sbnet.nn import SparseConv2d
from support.runs import run_of

SIZE = (40, 48)
PLANES = [(*SIZE, 8)]


class Net(nn.Module):
    """Two layers; `fail` raises between them, once blocks of a frame are known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SparseConv2d(3, 8, 3, padding=1), SparseConv2d(8, 4, 3, padding=1)

    def forward(self, x, active=None):
        x = self.first(x, active, activation="relu")
        return x, self.second(x, active)


def runner() -> SparseRun:
    torch.manual_seed(1)
    return run_of(Net(), SIZE)


def masks() -> list[torch.Tensor]:
    """Three that share no block."""
    found = [torch.zeros(1, *SIZE, dtype=torch.bool) for _ in range(3)]
    for mask, at in zip(found, (2, 20, 37), strict=True):
        mask[0, at, at] = True
    return found


def copies(result):
    return [t.clone() for t in result]


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_call_that_raised_leaves_no_pixels_behind(monkeypatch):
    x, (first, failing, last) = torch.randn(1, 3, *SIZE), masks()
    run = runner()
    want = copies(run(x, last))
    run(x, first)
    step = KINDS["conv"].step
    with monkeypatch.context() as patch:
        patch.setattr(run.executor, "step", run.executor.step)  # each node by itself: none is repeated unseen
        patch.setattr(KINDS["conv"], "step", lambda node, *rest: step(node, *rest) if node.path == "first" else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(x, failing)
    assert same(run(x, last), want)


def test_a_frame_in_the_output_is_refused_and_forgotten():
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)).eval()
    run, (first, failing, last) = run_of(net, SIZE, 8), masks()
    x = torch.randn(1, 3, *SIZE)
    want = run(x, last).clone()
    out = run(x, first)
    with pytest.raises(RuntimeError, match="memory of its own|memory apart"):
        run(out, failing)
    assert torch.equal(run(x, last), want)


def test_an_interrupt_leaves_no_pixels_behind(monkeypatch):
    x, (first, failing, last) = torch.randn(1, 3, *SIZE), masks()
    run = runner()
    want = copies(run(x, last))
    run(x, first)

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KINDS["conv"], "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(x, failing)
    assert same(run(x, last), want)


def test_lists_alone_forget_nothing():
    x, (first, other, last) = torch.randn(1, 3, *SIZE), masks()
    run = runner()
    want = copies(run(x, last))
    run(x, first)
    assert isinstance(run.lists(other), Lists)
    assert same(run(x, last), want)


def test_memory_of_the_call_before_last_ends():
    """The blocks of a call are cleared once: what is to be cleared must not grow from call to call."""
    x, (first, second, last) = torch.randn(1, 3, *SIZE), masks()
    run = runner()
    for mask in (first, second, last):
        run(x, mask)
    active = mask_pyramid(last, PLANES).planes[0]
    for old in run.executor.previous.values():
        assert torch.equal(old.block_map >= 0, active.block_map >= 0)


@pytest.mark.parametrize("write", ["one pixel", "all of it", "another view"])
def test_a_caller_may_write_into_the_result(write, device):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).eval()
    run, (first, _, last) = run_of(net, SIZE, 8, device=device), [m.to(device) for m in masks()]
    x = torch.randn(1, 3, *SIZE, device=device)
    want = run(x, last).clone()
    result = run(x, first)
    if write == "one pixel":
        result[0, 0, 39, 0] = 5
    elif write == "all of it":
        result.fill_(7)
    else:
        result.permute(0, 2, 3, 1)[..., 1].add_(1)
    assert torch.equal(run(x, last), want)


def test_copies_are_the_callers_own(device):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).eval()
    run, (first, _, last) = run_of(net, SIZE, 8, device=device), [m.to(device) for m in masks()]
    x = torch.randn(1, 3, *SIZE, device=device)
    kept = run(x, first, copy=True)
    want = kept.clone()
    kept_memory = kept.data_ptr()
    assert run(x, last).data_ptr() != kept_memory
    assert torch.equal(kept, want)
    kept.fill_(9)
    assert torch.equal(run(x, first), want)


def test_copies_of_every_output():
    x, (first, _, last) = torch.randn(1, 3, *SIZE), masks()
    run = runner()
    kept = run(x, first, copy=True)
    want = copies(kept)
    run(x, last)
    assert isinstance(kept, tuple)
    assert same(kept, want)


def test_threads_share_a_runner():
    """Calls wait for one another; each takes a copy of its own."""
    run, wrong = runner(), []
    x = torch.randn(1, 3, *SIZE)
    generator = torch.Generator().manual_seed(3)
    given = [torch.rand(1, *SIZE, generator=generator) < 0.01 for _ in range(8)]
    want = [copies(run(x, mask)) for mask in given]
    start = threading.Barrier(len(given))

    def work(k: int) -> None:
        start.wait()
        for _ in range(10):
            if not same(run(x, given[k], copy=True), want[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for mask, wanted in zip(given, want, strict=True):
        assert same(run(x, mask), wanted)  # and nothing of the threads stays


@pytest.fixture(scope="module")
def doors():
    """A network, its runner and a chain; a frame, a mask, and what they give of it."""
    size = (64, 96)
    x, plain = torch.randn(1, 3, *size), torch.zeros(1, *size, dtype=torch.bool)
    plain[0, 3, 5] = plain[0, 40, 70] = True
    net = resnet18(weights=0, classes=0, blocks=8).eval()
    run, layers = net.capture(x), nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    chain = run_of(layers, size, 8)
    return x, plain, [(f, f(x, plain).clone()) for f in (net, run, chain)], layers


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("axis", [None, 1, 3])
def test_masks_of_any_kind_go_through_every_door(doors, dtype, axis):
    """Bool, integers, floats; [N,H,W], [N,1,H,W], [N,H,W,1]: what one entry takes the others take, with one meaning."""
    x, plain, takers, layers = doors
    size = plain.shape[1:]
    mask = plain.to(dtype)
    if dtype.is_floating_point:
        mask = torch.where(plain, 0.75, 0.25).to(dtype)
    elif dtype != torch.bool:
        mask = mask * 100
    mask = mask if axis is None else mask.unsqueeze(axis)
    for take, want in takers:
        take(x, ~plain)  # nothing of what was right before is left
        assert torch.equal(take(x, mask), want)
    sourced = run_of(layers, size, 8, mask_source=lambda _: mask)
    sourced(x)
    for planes in ([(*size, 8)], [(32, 48, 4)]):
        for got, wanted in zip(plane_masks(mask, planes).values(), plane_masks(plain, planes).values(), strict=True):
            assert torch.equal(got, wanted)
        lists = [mask_pyramid(m, planes).planes[0].block_map for m in (mask, plain)]
        assert torch.equal(*lists)
    assert torch.equal(sourced.active[0].block_map, mask_pyramid(plain, [(*size, 8)]).planes[0].block_map)
