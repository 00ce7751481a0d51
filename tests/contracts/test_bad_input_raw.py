"""Bad input past the Python layer: torch.ops.sbnet.* called directly, lists that SBNET_DEBUG looks into, no library."""

import pytest
import torch

from sbnet import Window
from support.helpers import random_active, run_python
from support.refusals import GRID, OPS, refused, zeros

# ---- torch.ops.sbnet.* called directly, as an exported program or another language would
HUGE = [2**31, 2**62, -(2**62), -1]


def test_raw_grids(device):
    active = random_active(GRID, 2, 0.5, device)
    lists = (active.indices, active.count, active.block_map)
    x, blocks = zeros(2, 3, 16, 24, device=device), zeros(12, 3, 8, 8, device=device)
    weight = zeros(4, 3, 3, 3, device=device)
    grids = [[], [8], GRID.numbers()[:7], [*GRID.numbers(), 1], [0] * 8, [-1] * 8, [2**31 - 1] * 8]
    for at in range(8):
        for value in (*HUGE, 2**31 - 1, -(2**31), 2**30, *([0] if at < 4 else [])):
            numbers = GRID.numbers()
            numbers[at] = value
            if not (at in (4, 5) and value == -1):  # an offset of -1 is a fine grid
                grids.append(numbers)
    for grid in grids:
        refused("reduce_mask.*grid", OPS.reduce_mask, x[:, 0], grid, 0.5, False, 10)
        refused("sparse_gather.*(grid|block_map)", OPS.sparse_gather, x, *lists, grid, False, True)
        refused("sparse_scatter.*(grid|block)", OPS.sparse_scatter, blocks, *lists, x, grid, True, False, False)
        refused("sparse_scatter.*(grid|block)", OPS.sparse_scatter_, blocks, *lists, x.clone(), grid, True, True, False)
        conv = ([1, 1], [1, 1], [1, 1], 1, "none", 0.0, False, False, None, None, None, [])
        refused("sparse_conv2d.*(grid|active)", OPS.sparse_conv2d, x, weight, None, None, None, *lists, grid, *conv)


@pytest.mark.parametrize("value", [*HUGE, 2**31 - 1, 2**29 + 1])
def test_raw_capacities(device, value):
    x = zeros(2, 16, 24, device=device)
    refused("reduce_mask.*capacity", OPS.reduce_mask, x, GRID.numbers(), 0.5, False, value)
    active, g = random_active(GRID, 2, 0.5, device), GRID.numbers()
    if value > 2**31 - 1 or value < 0:
        arguments = (
            active.block_map, active.block_map, [16, 24], g, [16, 24], g, Window.conv(3, 1, 1).numbers(), value,
        )  # fmt: skip
        refused("fringe.*capacity", OPS.fringe, *arguments)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [[], [1], [1, 1, 1], *([v, 1] for v in HUGE), [1, -5], [1, 2**31 - 1]], ids=str)
def test_raw_convolutions(device, name, value):
    active = random_active(GRID, 2, 0.5, device)
    x, weight, out = (
        zeros(2, 3, 16, 24, device=device),
        zeros(4, 3, 3, 3, device=device),
        zeros(2, 4, 16, 24, device=device),
    )
    geometry = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], name: value}
    rest = (active.grid.numbers(), *geometry.values(), 1, "none", 0.0, False, False)
    lists = (active.indices, active.count)
    anything = f"sparse_conv2d.*({name}|x|out|active)"
    tensors = x, weight, None, None, None, *lists
    refused(anything, OPS.sparse_conv2d, *tensors, active.block_map, *rest, None, None, None, [])
    refused(anything, OPS.sparse_conv2d_, *tensors, *rest, out, None, None, None)


@pytest.mark.parametrize(
    "numbers", [[], [1] * 9, [1] * 11, *([*[1] * k, v, *[1] * (9 - k)] for k in range(10) for v in HUGE[:3])], ids=str
)
def test_raw_windows(device, numbers):
    active, g = random_active(GRID, 2, 0.5, device), GRID.numbers()
    call = active.block_map, active.block_map, [16, 24], g, [16, 24], g, numbers, 100
    refused("fringe: window", OPS.fringe, *call)


def test_raw_activation_and_fringe(device):
    active = random_active(GRID, 2, 0.5, device)
    x, weight, out = (
        zeros(2, 3, 16, 24, device=device),
        zeros(4, 3, 3, 3, device=device),
        zeros(2, 4, 16, 24, device=device),
    )
    head = (x, weight, None, None, None, active.indices, active.count, active.grid.numbers(), [1, 1], [1, 1], [1, 1], 1)
    wrong = "sparse_conv2d_.*activation: expected .*, got 'tanh'"
    refused(wrong, OPS.sparse_conv2d_, *head, "tanh", 0.0, False, False, out, None, None, None)
    refused("sparse_conv2d_.*activation", OPS.sparse_conv2d_, *head, "", 0.0, False, False, out, None, None, None)
    pixels = torch.zeros(5, dtype=torch.int32, device=device)
    tail = ("none", 0.0, False, False, out)
    refused("sparse_conv2d_.*fringe", OPS.sparse_conv2d_, *head, *tail, pixels, None, None)
    refused("sparse_conv2d_.*fringe", OPS.sparse_conv2d_, *head, *tail, None, pixels[:1], None)
    refused("sparse_conv2d_.*fringe", OPS.sparse_conv2d_, *head, *tail, pixels.long(), pixels[:1], None)
    refused("sparse_conv2d_.*fringe", OPS.sparse_conv2d_, *head, *tail, pixels, pixels, None)


# ---- SBNET_DEBUG
CHANGES = {  # what is done to a list of 12 blocks: do the ops raise where SBNET_DEBUG=1?
    "pass": False,
    "active.indices[3, 1] = 2": True,
    "active.indices[0, 0] = -1": True,
    "active.count.fill_(13)": True,
    "active.count.fill_(-1)": True,
    "active.count.fill_(3); active.indices[3] = 99": False,  # past the count anything may stand
}
DEBUG = """
import torch, sbnet
from sbnet import *
grid = BlockGrid.cover((16, 24), 8)
x = torch.zeros(2, 4, 16, 24, device="{device}")
weight = torch.zeros(4, 4, 3, 3, device="{device}")
small = torch.zeros(4, 4, 1, 1, device="{device}")
blocks = torch.zeros(12, 4, 8, 8, device="{device}")
for change in {changes}:
    active = reduce_mask(torch.ones(2, 16, 24, device="{device}"), grid)
    exec(change)
    for name, call in dict(
        sparse_gather=lambda: sparse_gather(x, active),
        sparse_scatter=lambda: sparse_scatter(blocks, active, x),
        sparse_scatter_=lambda: sparse_scatter_(blocks, active, x),
        sparse_conv2d=lambda: sparse_conv2d(x, weight, None, active, padding=1),
        sparse_conv2d_=lambda: sparse_conv2d_(x, weight, None, active, x.clone(), padding=1),
        sparse_bottleneck2d=lambda: sparse_bottleneck2d(x, (small, weight, small), None, active),
        sparse_fill=lambda: sparse_fill(x, active),
    ).items():
        try:
            call()
            print(change, name, "passed", sep="|")
        except IndexError as error:
            assert f"sbnet::{{name}}: active:" in str(error), error
            print(change, name, "raised", sep="|")
"""


@pytest.mark.parametrize("debug", ["1", "0", ""])
def test_debug_checks_what_the_device_holds(device, debug):
    result = run_python(DEBUG.format(device=device, changes=list(CHANGES)), SBNET_DEBUG=debug)
    assert result.returncode == 0, result.stderr[-2000:]
    outcomes = [line.split("|") for line in result.stdout.splitlines()]
    assert len(outcomes) == 7 * len(CHANGES)
    for change, name, outcome in outcomes:
        assert outcome == ("raised" if debug == "1" and CHANGES[change] else "passed"), (change, name)


def test_an_unknown_value_of_sbnet_gpu_is_refused():
    result = run_python("import sbnet", SBNET_GPU="ampere")
    assert "SBNET_GPU: expected portable or nothing, got 'ampere'" in result.stderr


def test_a_missing_library_says_what_to_do(tmp_path):
    """An unbuilt checkout on the path."""
    import shutil
    from pathlib import Path

    import sbnet

    shutil.copytree(
        Path(sbnet.__file__).parent, tmp_path / "sbnet", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    result = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sbnet")
    assert result.returncode == 1
    assert "ImportError: sbnet:" in result.stderr
    assert "pip install" in result.stderr
