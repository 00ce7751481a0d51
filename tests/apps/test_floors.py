"""Scripts of `benchmarks/floors` that can run without a GPU."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

import sbnet
from sbnet.benchmarks.harness.timing import Timer

FLOORS = Path(__file__).parents[2] / "benchmarks/floors"


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(name, FLOORS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calls_that_leave_out_a_kind_launch_nothing_of_it():
    left_out = loaded("left_out")
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)
    ).eval()
    x, mask = torch.rand(1, 3, 32, 32), torch.zeros(1, 32, 32)
    mask[:, 8:20, 8:20] = 1
    with torch.no_grad():
        took = left_out.times(net, x, mask, Timer("cpu", rounds=2, repeat=2))
        assert list(took) == [left_out.CALL, "conv 3x3 (2)", "conv 1x1 (1)", "norm (1)"]
        assert all(us > 0 for us in took.values())
        whole = sbnet.sparsify(net, x)._for((x,))
        last = whole.plan.graph.nodes[-1]
        y, none = (left_out.without(whole, nodes, x, mask)()[0].clone() for nodes in (set(), {last}))
    assert y.any()
    assert not none.any()  # memory of a run that nothing wrote
