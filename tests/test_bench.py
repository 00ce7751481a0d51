"""sbnet bench: every benchmark at tiny sizes, and what is done with its figures."""

import pytest

from sbnet.benchmarks import measure, registry
from sbnet.benchmarks.registry import Setting, Skip
from sbnet.benchmarks.timing import Timer

TINY = Setting("cpu", "tiny")
LIMITS = {
    "copy GB/s": 1.0,
    "cached copy GB/s": 1.0,
    "matrix TFLOP/s": {"float32": 1.0},
    "launch us": 1.0,
    "cache MB": 1,
}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.title) for case in registry.cases(TINY)])
def test_every_benchmark_on_the_cpu(case):
    try:
        row = measure.measure(case, Timer("cpu", rounds=1, repeat=1), LIMITS)
    except Skip as lack:
        pytest.skip(str(lack))
    assert row["us"][row["ours"]] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.title) for case in registry.cases(Setting("cuda", "tiny"))]
)
def test_every_benchmark_on_a_gpu(case):
    try:
        row = measure.measure(case, Timer("cuda", rounds=1, repeat=1), LIMITS)
    except Skip as lack:
        pytest.skip(str(lack))
    assert row["us"][row["ours"]] > 0


@pytest.mark.parametrize("level", ["tiny", "quick", "full"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_two_cases_are_called_the_same(device, level):
    titles = [(case.group, case.title) for case in registry.cases(Setting(device, level))]
    assert len(titles) == len(set(titles))
    assert {group for group, _ in titles} >= {"ops", "conv", "network"}
