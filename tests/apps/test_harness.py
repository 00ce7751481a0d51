"""The benchmarks' own arithmetic: which time is reported, what it is divided by, which results are let through."""

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import sbnet
from sbnet.benchmarks.cases.network import chain
from sbnet.benchmarks.harness import layers, measure, planned, registry, timing
from sbnet.benchmarks.harness.pipelines import MaskTime
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult
from sbnet.benchmarks.harness.timing import Timer
from sbnet.engine import masked_oracle, plane_masks
from sbnet.engine.executor import Executor
from sbnet.nn import SparseBasicBlock

LIMITS = {
    "copy GB/s": 1.0,
    "cached copy GB/s": 2.0,
    "matrix TFLOP/s": {"float32": 1.0},
    "launch us": 1.0,
    "cache MB": 1,
}


class Scripted(Timer):
    """Whose sides say themselves how long they took."""

    def __init__(self, rounds: int) -> None:
        super().__init__("cpu", rounds=rounds)

    def _prepare(self, side: Side):
        return side.run


def times(*values: float):
    return iter(values).__next__


# ---- clocks
@pytest.mark.parametrize(
    ("values", "median", "spread"),
    [((5.0, 1.0, 9.0, 2.0, 100.0), 5.0, (54.5 - 1.5) / 2), ((9.0, 1.0, 2.0), 2.0, 4.0), ((3.0, 1.0), 2.0, 1.0)],
)
def test_a_figure_is_the_median_of_the_rounds(values, median, spread):
    found = Scripted(len(values)).medians({"a": Side(times(*values))})
    assert found == {"a": [median, spread]}


def test_a_ceiling_is_the_best_round():
    assert Scripted(4).best(times(5.0, 3.0, 7.0, 4.0)) == 3.0


@pytest.mark.parametrize("cold", [False, True])
def test_a_time_is_of_one_call(monkeypatch, cold):
    """Calls of 100 us each, fifty to a round; what flushes the caches takes longer and is not in it."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    timer = Timer("cpu", rounds=2, repeat=50)
    timer.cold = cold
    if cold:
        monkeypatch.setattr(timer, "_flushed", type("Buffer", (), {"fill_": lambda *_: spend(1.0)})())
    found = timer.medians({"a": Side(lambda: spend(1e-4))})
    assert found["a"][0] == pytest.approx(100.0)


def test_rates_count_bytes_read_and_written():
    timer = Scripted(1)
    timer.best = lambda run: 8.0
    assert timing._copy_rate(timer, "cpu", 1000) == pytest.approx(1.0)  # 8000 bytes in 8 us


@pytest.mark.parametrize(("flops", "bytes", "want"), [(3e6, 1e3, 4.0), (1e6, 4e3, 3.0), (0, 0, 1.0)])
def test_the_floor_is_the_larger_of_both(flops, bytes, want):
    assert timing.floor_us(flops, bytes, "float32", LIMITS, cold=False) == pytest.approx(want)


# ---- rows
def test_the_fastest_dense_form_is_the_baseline():
    sides = {
        "ours": Side(times(2.0), "ours"), "from the mask": Side(times(4.0), "indexed"), "slow": Side(times(30.0)),
        "fast": Side(times(8.0)), "middle": Side(times(9.0)),
    }  # fmt: skip
    checked = {name: Side(lambda: 0, side.kind) for name, side in sides.items()}
    timer = Scripted(1)
    timer._prepare = lambda side: next(sides[name].run for name in checked if checked[name] is side)
    work = Work(checked, lambda name, got: 0.0, bytes=4000.0)
    row = measure.measure(Case("a", "ops", {}, lambda: work), timer, LIMITS)
    assert row["dense form"] == "fast"
    assert row["x dense"] == 4.0
    assert row["x indexed"] == 2.0
    assert row["GB/s"] == 2.0


@pytest.mark.parametrize(("name", "kind"), [("ours", "ours"), ("dense", "dense"), ("ours, indexed", "indexed")])
def test_every_side_but_a_peer_is_held_to_the_check(name, kind):
    sides = {"ours": Side(lambda: 0, "ours"), name: Side(lambda: 0, kind)}

    def check(side: str, got: object) -> float:
        if side == name:
            raise WrongResult("wrong")
        return 0.0

    with pytest.raises(WrongResult, match=f"{name}: wrong"):
        measure.measure(Case("a", "ops", {}, lambda: Work(sides, check)), Timer("cpu", 1, 1), LIMITS)


# ---- checks
def test_copies_are_compared_inside():
    exact, inside = torch.arange(6.0), torch.tensor([True, True, True, False, False, False])
    assert registry.same(torch.where(inside, exact, -1.0), exact, inside) == 0.0
    with pytest.raises(WrongResult, match="1 elements differ"):
        registry.same(torch.where(torch.arange(6) == 2, -1.0, exact), exact, inside)
    with pytest.raises(WrongResult, match="1 elements differ"):
        registry.same(torch.where(torch.arange(6) == 2, -1.0, exact), exact)


@pytest.fixture
def layer() -> layers.Layer:
    return layers.Layer((1, 9, 12, 4), torch.float32, Setting("cpu", "tiny"), filters=6)


def judged(layer: layers.Layer, residual: bool = False):
    """A right result, its active pixels, and its fringe."""
    active = sbnet.reduce_mask(torch.rand(layer.size) < 0.05, sbnet.BlockGrid.cover(layer.size[1:], 4))
    active.block_map[0, 1, 1] = -1  # one at least is not
    active = sbnet.ActiveBlocks.from_indices((active.block_map >= 0).nonzero(), active.grid, 1)
    edge = sbnet.fringe(active, active, layer.size[1:], 3, 1, 1)
    inside = active.pixel_mask(layer.size[1:])
    layer.out.fill_(float("nan"))
    return layer.sparse(active, edge, residual), inside, layers.fringe_mask(edge, inside)


@pytest.mark.parametrize("residual", [False, True])
def test_a_layer_is_checked_everywhere(layer, residual):
    torch.manual_seed(3)
    got, inside, zero = judged(layer, residual)
    assert bool(zero.any())
    assert bool((~zero & ~inside).any())
    assert layer.check(got, inside, zero, residual) < 1e-5
    faults = {
        "rms error": (inside, 1.0),
        "the fringe is not zero": (zero, 1.0),
        "outside of the active blocks": (~zero & ~inside, 1.0),
    }
    for message, (where, value) in faults.items():
        wrong = got.clone()
        at = where.expand_as(got).nonzero()[0]
        wrong[tuple(at)] = value if message != "rms error" else wrong[tuple(at)] + 1
        with pytest.raises(WrongResult, match=message):
            layer.check(wrong, inside, zero, residual)
    with pytest.raises(WrongResult, match="rms error"):
        layer.check(got, inside, zero, not residual)


def test_what_an_ideal_layer_reads_and_writes(layer):
    grid = sbnet.BlockGrid.cover((9, 12), 3)
    weights = 6 * 4 * 9
    one = sbnet.ActiveBlocks.from_indices(torch.tensor([[0, 1, 1]]), grid, 1)
    assert layer.bytes(one) == 4 * (25 * 4 + 9 * 6 + weights)
    assert layer.bytes(one, residual=True) == 4 * (25 * 4 + 9 * 6 * 2 + weights)
    every = sbnet.reduce_mask(torch.ones(1, 9, 12), grid)
    assert layer.bytes(every) == 4 * (9 * 12 * 4 + 9 * 12 * 6 + weights)  # a halo is no more than the plane
    assert layer.flops(10) == 2 * weights * 10


@pytest.mark.parametrize("side", [*planned.MASKED, "PyTorch"])
def test_networks_are_checked_by_what_a_side_computes(side):
    net, x, planes = SparseBasicBlock(4, 4).eval(), torch.randn(1, 4, 16, 16), [(16, 16, 4)]
    mask = torch.rand(1, 16, 16) < 0.05
    check = planned.contract(net, x, mask, planes)
    results = {"masked": masked_oracle(net, x, plane_masks(mask, planes)), "dense": net(x).detach()}
    right, wrong = ("masked", "dense") if side in planned.MASKED else ("dense", "masked")
    assert check(side, results[right]) < 1e-6
    with pytest.raises(WrongResult):
        check(side, results[wrong])


def test_a_masked_network_is_timed_from_the_mask_on(monkeypatch):
    """Its lists, its fringes, and what is to be cleared of the frame before."""
    work = chain.chain(Setting("cpu", "tiny"), lambda: chain.four_layers(2), (1, 64, 24, 32), 0.1)
    calls = []
    for name in ("_listed", "layers"):  # which a CPU repeats without a call of an op
        true = getattr(Executor, name)
        monkeypatch.setattr(Executor, name, lambda *a, name=name, true=true, **o: calls.append(name) or true(*a, **o))
    for name, side in work.sides.items():
        calls.clear()
        side.run()
        if side.kind in ("ours", "indexed"):
            assert calls == ["_listed", "layers"], name
        else:
            assert calls == [], name
    assert isinstance(chain.four_layers(), nn.Sequential)


@pytest.mark.parametrize(
    "words", ["mask_pyramid", "fringe of 3x3", "fringe of a 3x3", "reduce_mask", "sparse_fill", "gather", "scatter"]
)
def test_every_side_of_a_list_or_copy_is_looked_at(words):
    """Whatever a side returns, something else is refused."""

    def spoilt(v):
        return v + 1 if v.dtype not in (torch.bool,) else ~v

    for case in registry.cases(Setting("cpu", "tiny"), ["ops"], words):
        work = case.make()
        for name, side in work.sides.items():
            got = pytree.tree_map_only(torch.Tensor, torch.clone, side.run())
            work.check(name, got)
            with pytest.raises(WrongResult):
                work.check(name, pytree.tree_map_only(torch.Tensor, spoilt, got))


def test_motion_masks_are_looked_at_and_the_background_they_leave():
    (case,) = registry.cases(Setting("cpu", "tiny"), ["ops"], "motion_mask")
    work = case.make()
    for name, side in work.sides.items():
        got = side.run()
        work.check(name, got)  # the background is as before the call, then: that of no call
        with pytest.raises(WrongResult, match="background"):
            work.check(name, got)
        with pytest.raises(WrongResult, match="mask"):
            work.check(name, ~side.run())


def test_the_time_of_a_pipelines_masks():
    """Of the mask, its border and the lists, each a part of the frame's time."""
    masks = MaskTime()
    frames = [np.full((32, 48, 3), 40 * k, np.uint8) for k in range(4)]
    net = nn.Conv2d(3, 3, 3, padding=1)
    order = {"mode": "cached", "margin": 2, "device": "cpu", "compare": 0}
    pipeline = sbnet.Pipeline(frames, "changed:8 | motion", net, masks.see, **order)
    with masks.of(pipeline):
        pipeline.run(masks.told)
    share = masks.share()
    assert len(masks.ms) == 4
    assert set(share) == {"all", "mask", "border", "lists"}
    assert all(0 < part < 1 for part in share.values())
    assert share["all"] == pytest.approx(share["mask"] + share["border"] + share["lists"])
