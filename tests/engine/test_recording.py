"""Recordings of a CPU's kernels: what calls repeat is what they would do anew."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.nets import UNet, Yolo, conv
from sbnet.engine.executor import concatenate
from sbnet.engine.recording import Recording
from sbnet.engine.replay import RECORDED
from sbnet.engine.steps import PLANNED
from support.contract import poison

SIZE = (32, 64)


class Kinds(nn.Module):
    """A layer of every kind that is recorded, and dense ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv(3, 16), conv(16, 16)
        self.pool, self.mean = nn.MaxPool2d(2), nn.AvgPool2d(2)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.norm, self.shuffle = nn.GroupNorm(4, 16), nn.PixelShuffle(2)
        self.last = conv(52, 8, 1)

    def forward(self, x):
        x = self.deep(self.stem(x))
        half = torch.cat([self.pool(x), self.mean(x)], 1)
        up = self.up(self.norm(half[:, :16]))
        flipped = torch.flip(torch.flip(up, [3]), [3])  # no sparse form: dense
        wide = F.interpolate(half, scale_factor=2.0, mode="bilinear", align_corners=False)[:, 16:]
        rest = self.shuffle(half[:, 16:])
        return self.last(torch.cat([x, flipped, wide, rest], 1))


def masks(count: int = 6):
    generator = torch.Generator().manual_seed(3)
    shares = [0.05, 1.0, 0.0, 0.3, 0.001, 0.1] * (-(-count // 6))
    return [torch.rand(1, *SIZE, generator=generator) < share for share in shares[:count]]


def plain(run, *args, **options):
    """A call that records nothing and repeats nothing."""
    executor = run._last.executor
    executor.step = executor.step
    try:
        return run(*args, **options)
    finally:
        del executor.step


@pytest.mark.parametrize(
    ("net", "mode"), [(Kinds, "masked"), (Kinds, "exact"), (Kinds, "cached"), (Yolo, "masked")], ids=str
)
def test_what_is_repeated_is_what_is_done_anew(net, mode):
    torch.manual_seed(0)
    net, frames = net().eval(), [torch.rand(1, 3, *SIZE) for _ in range(6)]
    again, anew = (sbnet.sparsify(net, frames[0], mode=mode, block=8) for _ in range(2))
    for frame, mask in zip(frames, masks(), strict=True):
        if mode == "masked":
            poison(again)
        got, want = again(frame, mask), plain(anew, frame, mask)
        if mode == "exact":  # elsewhere anything
            pixels = mask[:, None].expand_as(got) if got.shape[2:] == mask.shape[1:] else torch.zeros_like(got) > 0
            got, want = got[pixels], want[pixels]
        assert torch.equal(got, want)
    if mode != "exact":
        assert again._last.executor._noted_nodes is not None
        assert anew._last.executor._noted_nodes is None


def test_every_kind_is_recorded_and_runs_of_nodes_are_as_long_as_they_can_be():
    net, x = Kinds().eval(), torch.rand(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8)
    for mask in masks(2):
        run(x, mask)
    executor = run._last.executor
    kinds = {node.kind for node in executor._lasting}
    assert kinds >= RECORDED - {"bottleneck", "pointwise"}, kinds
    assert RECORDED <= PLANNED
    parts = executor._noted_nodes._parts
    alone = [node.kind for node in parts if not isinstance(node, Recording)]
    assert alone.count("conv") == 1  # the first, which reads the caller's frame
    assert len([part for part in parts if isinstance(part, Recording)]) < len(executor.nodes) / 2
    assert not any(isinstance(a, Recording) and isinstance(b, Recording) for a, b in pairwise(parts))


def test_weights_written_in_place_and_thread_counts_are_seen():
    torch.manual_seed(0)
    net, x = UNet().eval(), torch.rand(1, 3, *SIZE)
    run, mask = sbnet.sparsify(net, x, block=8), masks(1)[0]
    before = run(x, mask, copy=True)
    with torch.no_grad():
        net.join[0][3].weight.mul_(0.5)
    assert not torch.equal(run(x, mask), before)
    assert torch.equal(run(x, mask), plain(sbnet.sparsify(net, x, block=8), x, mask))
    want, threads = run(x, mask, copy=True), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(x, mask), want)
            assert torch.equal(run(x, mask), want)
    finally:
        torch.set_num_threads(threads)


def test_a_first_call_in_inference_mode_spoils_no_later_one():
    net, x = UNet().eval(), torch.rand(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8)
    first, second = masks(2)
    with torch.inference_mode():
        run(x, first)
    want = plain(sbnet.sparsify(net, x, block=8), x, second)
    assert torch.equal(run(x, second), want)
    with torch.inference_mode():
        assert torch.equal(run(x, second), want)


def test_a_kernel_that_fails_when_repeated_raises_its_message(monkeypatch):
    """Blocks that the list names are checked by the kernel: a packed weight that is another's is refused there."""
    net, x = nn.Sequential(conv(3, 16), conv(16, 16)).eval(), torch.rand(1, 3, *SIZE)
    run, (first, second) = sbnet.sparsify(net, x, block=8), masks(2)
    run(x, first)
    executor = run._last.executor
    packed = executor.context.bound[executor.nodes[-1]].packed
    kept = packed.clone()
    packed[:64] = 0
    with pytest.raises(RuntimeError, match="sbnet::sparse_conv2d_: packed: made for a weight of another shape"):
        run(x, second)
    packed.copy_(kept)
    assert torch.equal(run(x, first), plain(sbnet.sparsify(net, x, block=8), x, first))


def test_recordings_of_threads_are_their_own():
    net, x = UNet(width=8).eval(), torch.rand(1, 3, *SIZE)
    runs = [sbnet.sparsify(net, x, block=8)]
    runs += [runs[0].clone() for _ in range(3)]
    wanted = [plain(sbnet.sparsify(net, x, block=8), x, mask) for mask in masks(4)]
    wrong: list[int] = []

    def work(k):
        for _ in range(5):
            if not torch.equal(runs[k](x, masks(4)[k]), wanted[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_noting_is_left_by_an_exception_of_is_not_kept():
    x = torch.rand(1, 4, 16, 16).contiguous(memory_format=torch.channels_last)
    active = sbnet.reduce_mask(torch.ones(1, 16, 16), sbnet.BlockGrid.cover((16, 16), 8))
    out, recording = torch.zeros_like(x), Recording()
    with recording.noting():
        sbnet.sparse_max_pool2d_(x, active, out, 3, stride=1, padding=1)

    def left_by_an_exception():
        with recording.noting():
            sbnet.sparse_avg_pool2d_(x, active, out, 3, stride=1, padding=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        left_by_an_exception()
    x.neg_()
    recording()
    assert torch.equal(out, F.max_pool2d(x, 3, 1, 1))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_concatenations_keep_the_order_in_memory(order):
    given = [torch.rand(2, n, 5).permute(order) for n in (3, 4)]
    dim = order.index(1)
    got = concatenate(given, dim)
    assert torch.equal(got, torch.cat(given, dim))
    assert got.permute([order.index(k) for k in range(3)]).is_contiguous()
    mixed = [given[0], given[1].contiguous()]  # no order in common
    assert torch.equal(concatenate(mixed, dim - 3), torch.cat(mixed, dim))
