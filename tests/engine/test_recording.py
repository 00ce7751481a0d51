"""Recordings of a CPU's kernels: what calls repeat is what they would do anew."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.nets import UNet, Yolo, conv
from sbnet.engine.recording import Recording
from sbnet.graph.kinds import KINDS
from sbnet.nn import SparseConv2d
from support import quantized
from support.contract import poison
from support.helpers import assert_same_active
from support.networks import lively

SIZE = (32, 64)


class Kinds(nn.Module):
    """A layer of every kind that is recorded, and dense ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv(3, 16), conv(16, 16)
        self.pool, self.mean = nn.MaxPool2d(2), nn.AvgPool2d(2)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.norm, self.shuffle = nn.GroupNorm(4, 16), nn.PixelShuffle(2)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.last = conv(52, 8, 1)

    def forward(self, x):
        x = self.deep(self.stem(x))
        x = x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        half = torch.cat([self.pool(x), self.mean(x)], 1)
        up = self.up(self.norm(half[:, :16]))
        flipped = torch.flip(torch.flip(up, [3]), [3])  # no sparse form: dense
        wide = F.interpolate(half, scale_factor=2.0, mode="bilinear", align_corners=False)[:, 16:]
        rest = self.shuffle(half[:, 16:])
        return self.last(torch.cat([x, flipped, wide, rest], 1))


class Net(nn.Module):
    """Two layers that take lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SparseConv2d(3, 8, 3, padding=1), SparseConv2d(8, 4, 3, padding=1)

    def forward(self, x, active=None):
        return self.second(self.first(x, active, activation="relu"), active)


def masks(count: int = 6):
    generator = torch.Generator().manual_seed(3)
    shares = [0.05, 1.0, 0.0, 0.3, 0.001, 0.1] * (-(-count // 6))
    return [torch.rand(1, *SIZE, generator=generator) < share for share in shares[:count]]


def plain(run, *args, **options):
    """A call that records nothing and repeats nothing."""
    executor = run.executor
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
        assert again.executor._noted_nodes is not None
        assert anew.executor._noted_nodes is None


def test_lists_that_are_repeated_are_those_made_anew():
    """Fringes to their last -1: of few pixels after many, and of many after few."""
    net, x = UNet().eval(), torch.rand(1, 3, *SIZE)
    run, counts = sbnet.sparsify(net, x, block=8), []
    for mask in masks(12):
        run(x, mask)
        executor = run.executor
        lists, (active, fringes) = executor._noted_lists.lists, executor.lists(mask)
        for mine, theirs in zip(lists.active, active, strict=True):
            assert_same_active(mine, theirs)
        for mine, theirs in zip(lists.fringes, fringes, strict=True):
            assert torch.equal(mine.count, theirs.count)
            assert torch.equal(mine.pixels, theirs.pixels)
        for mine in lists.stale.values():
            assert bool((mine.pixels[: int(mine.count)] >= 0).all())
            assert bool((mine.pixels[int(mine.count) :] == -1).all())
        counts.append([int(f.count) for f in (*lists.fringes, *lists.stale.values())])
    series = list(zip(*counts, strict=True))
    assert any({(a > b) - (a < b) for a, b in pairwise(one)} >= {-1, 1} for one in series), "the test tests nothing"


def test_every_kind_is_recorded_and_runs_of_nodes_are_as_long_as_they_can_be():
    net, x = Kinds().eval(), torch.rand(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8)
    for mask in masks(2):
        run(x, mask)
    executor = run.executor
    kinds = {node.kind for node in executor._lasting}
    recorded = {name for name, kind in KINDS.items() if kind.recorded}
    assert kinds >= recorded - {"bottleneck", "conv_quantized", "channelwise"}, kinds
    assert all(kind.planned for kind in KINDS.values() if kind.recorded)
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


def test_a_first_call_in_inference_mode_leaves_later_ones_right():
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
    executor = run.executor
    packed = executor.context.bound[executor.nodes[-1]].packed
    kept = packed.clone()
    packed[:64] = 0
    with pytest.raises(RuntimeError, match="sbnet::sparse_conv2d_: packed: expected .*a pack of another shape"):
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


def test_an_exception_discards_the_recording():
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


def test_nested_recordings_do_not_mix():
    x = torch.rand(1, 4, 16, 16).contiguous(memory_format=torch.channels_last)
    active = sbnet.reduce_mask(torch.ones(1, 16, 16), sbnet.BlockGrid.cover((16, 16), 8))
    outs, recordings = [torch.zeros_like(x) for _ in range(3)], [Recording(), Recording()]

    def pool(out):
        sbnet.sparse_max_pool2d_(x, active, out, 3, stride=1, padding=1)

    with recordings[0].noting():
        pool(outs[0])
        with recordings[1].noting():
            pool(outs[1])
        pool(outs[2])
    x.neg_()
    want = F.max_pool2d(x, 3, 1, 1)
    recordings[0]()
    assert [torch.equal(out, want) for out in outs] == [True, False, True]
    recordings[1]()
    assert torch.equal(outs[1], want)


def test_recordings_that_cannot_be_run_or_copied_say_so():
    recording = Recording()
    with pytest.raises(RuntimeError, match="sbnet: recording: expected kernels that were noted, got none"):
        recording()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"clone\(\) the run"):
            copied(recording)


def test_what_a_recording_points_to_lives_as_long():
    x = torch.rand(1, 8, 32, 32).contiguous(memory_format=torch.channels_last)
    weight, recording = torch.rand(8, 8, 3, 3), Recording()
    active = sbnet.reduce_mask(torch.ones(1, 32, 32), sbnet.BlockGrid.cover((32, 32), 8))
    out, bias = torch.zeros_like(x), torch.rand(16)[::2]  # an op makes a copy of both weight and bias
    want = F.conv2d(x, weight, bias, padding=1)
    with recording.noting():
        sbnet.sparse_conv2d_(x, weight, bias, active, out, padding=1)
    kept = out.new_zeros(0).set_(out.untyped_storage(), 0, out.shape, out.stride())
    kept.zero_()
    del x, weight, bias, active, out
    gc.collect()
    junk = [torch.full((8, 8, 3, 3), float("nan")) for _ in range(64)] + [torch.full((8192,), -1.0) for _ in range(64)]
    recording()
    assert torch.allclose(kept, want, atol=1e-4)
    del junk


@pytest.mark.parametrize("change", ["load_state_dict", "data"])
def test_weights_that_another_run_has_seen_first_are_seen(change):
    torch.manual_seed(0)
    net, x, mask = UNet().eval(), torch.rand(1, 3, *SIZE), masks(1)[0]
    run = sbnet.sparsify(net, x, block=8)
    shared = [run.clone(), run]  # of the same constants, which one of them makes anew
    before = [other(x, mask, copy=True) for other in (*shared, run)]
    wide = run(x, mask, margin=8, copy=True)
    if change == "load_state_dict":
        net.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in net.state_dict().items()})
    else:
        net.join[0][3].weight.data = net.join[0][3].weight.data * 0.5
    fresh = sbnet.sparsify(net, x, block=8)
    want = plain(fresh, x, mask)
    assert not torch.equal(want, before[0])
    for other in (*shared, run):
        assert torch.equal(other(x, mask), want)
        assert torch.equal(other(x, mask), want)
    assert torch.equal(run(x, mask, margin=8), plain(fresh, x, mask, margin=8))
    assert not torch.equal(run(x, mask, margin=8), wide)


def test_parameters_that_others_take_the_place_of():
    """Of the last of them PyTorch counts no writes: it is refused, whenever it comes."""
    net, x, mask = Net().eval().requires_grad_(False), torch.randn(1, 3, *SIZE), masks(1)[0]
    run = sbnet.sparsify(net, x, block=8)
    run(x, mask)
    with torch.inference_mode():
        uncounted = nn.Parameter(torch.randn_like(net.second.weight), requires_grad=False)
    net.second.weight = nn.Parameter(torch.randn_like(net.second.weight), requires_grad=False)
    for factor in (1, 2):
        with torch.inference_mode():
            net.second.weight.mul_(factor)
        want = plain(sbnet.sparsify(net, x, block=8), x, mask)
        for _ in range(2):
            assert torch.equal(run(x, mask), want)
    net.second.weight = uncounted
    for call in (lambda: run(x, mask), lambda: sbnet.sparsify(net, x, block=8)):
        with pytest.raises(ValueError, match="made outside of torch.inference_mode, got second.weight"):
            call()


def test_int8_convolutions_are_repeated():
    torch.manual_seed(5)
    net, (given, few) = lively(quantized.Chain()), quantized.frames(count=4)
    run = sbnet.quantize(net, given, few, block=quantized.BLOCK)
    anew = run.clone()
    for x, mask in zip(given, few, strict=True):
        poison(run)
        got, want = run(x, mask, copy=True), plain(anew, x, mask)
        assert torch.equal(got, want)
    executor = run.executor
    assert sum(node.kind == "conv_quantized" for node in executor._lasting) == 4
    assert executor._noted_nodes is not None


def test_sizes_that_change_and_copies_of_runs():
    torch.manual_seed(0)
    net, mask = UNet().eval(), masks(1)[0]
    small, large = torch.rand(1, 3, *SIZE), torch.rand(2, 3, 2 * SIZE[0], SIZE[1])
    both = [(small, mask), (large, mask.repeat(2, 2, 1))]
    want = [plain(sbnet.sparsify(net, x, block=8), x, m) for x, m in both]
    run = sbnet.sparsify(net, small, block=8)
    for _ in range(3):
        for (x, m), right in zip(both, want, strict=True):
            assert torch.equal(run(x, m), right)
    for other in (run.clone(), copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert torch.equal(other(small, mask), want[0])
        assert torch.equal(other(small, mask), want[0])
    result = run(small, mask)
    del run, other
    gc.collect()
    assert torch.equal(result, want[0])


@pytest.mark.parametrize("call", [1, 2])
def test_an_exception_between_recordings_spoils_no_later_call(call, monkeypatch):
    """Of a node that runs dense, while kernels are noted or repeated."""
    net, x, (first, second, last) = Kinds().eval(), torch.rand(1, 3, *SIZE), masks(3)
    run = sbnet.sparsify(net, x, block=8)
    want = plain(sbnet.sparsify(net, x, block=8), x, last)
    if call == 2:
        run(x, first)

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.executor, "_dense", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(x, second)
    for _ in range(2):
        assert torch.equal(run(x, last), want)


def test_masks_of_a_source_that_are_not_bool():
    """Integers, of which an op makes a copy that kernels read."""
    net, marks = Net().eval().requires_grad_(False), []

    def source(x):
        return marks[-1]

    x = torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=8, mask_source=source)
    other = sbnet.sparsify(net, x, block=8)
    for mask in masks(3):
        marks.append(mask[:, None].int())
        assert torch.equal(run(x), other(x, mask))
    assert run.executor._noted_lists is not None


def test_lists_in_a_callers_hands():
    net, x = Net().eval().requires_grad_(False), torch.randn(1, 3, *SIZE)
    run, fresh = (sbnet.sparsify(net, x, block=8) for _ in range(2))
    for mask in masks(3):
        want = fresh(x, mask)
        lists = run.lists(mask)
        for _ in range(2):
            poison(run.executor)
            assert torch.equal(run.layers(x, lists=lists), want)
        assert torch.equal(run(x, mask), want)


def test_profile_looks_at_single_nodes():
    net, x = Kinds().eval(), torch.rand(1, 3, *SIZE)
    run, mask = sbnet.sparsify(net, x, block=8), masks(1)[0]
    want = run(x, mask, copy=True)
    assert len(run.profile(x, mask, calls=2)) == len(run.plan.graph.nodes)
    assert torch.equal(run(x, mask), want)
