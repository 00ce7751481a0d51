"""sparse_adaptive_avg_pool2d and sparse_adaptive_max_pool2d against PyTorch's pools of the masked plane."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid, reference
from sbnet.nn import SparseAdaptiveAvgPool2d, SparseAdaptiveMaxPool2d
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, poison, random_active, tensor
from support.layer_checks import assert_gradients, assert_network, assert_same_bits_on_any_threads

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, (1, 3), 7, (20, 5)]
POOLS = {
    "avg": (sbnet.sparse_adaptive_avg_pool2d, sbnet.sparse_adaptive_avg_pool2d_, reference.sparse_adaptive_avg_pool2d),
    "max": (sbnet.sparse_adaptive_max_pool2d, sbnet.sparse_adaptive_max_pool2d_, reference.sparse_adaptive_max_pool2d),
}


def make(device, dtype=torch.float32, shape=(2, 24, 19, 26), density=0.4, layout="channels_last", block=4):
    x = laid_out(tensor(shape, dtype, device), layout)
    return x, random_active(BlockGrid.cover(shape[2:], block), shape[0], density, device)


def check(method, x, active, size, count_inactive=True):
    """Both forms; what is not active is NaN, and not read."""
    op, op_, definition = POOLS[method]
    dirty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    dirty.copy_(torch.where(active.pixel_mask(x.shape[2:]), x, torch.nan))
    got = op(dirty, active, size, count_inactive=count_inactive)
    exact = definition(x.double(), active, size, count_inactive=count_inactive)
    if method == "max":
        assert_bitwise(got.double(), exact + 0.0)
    else:
        theirs = definition(x.float(), active, size, count_inactive=count_inactive).to(x.dtype)
        assert_as_accurate_as_torch(got, theirs, exact)
    out = poison(got.shape, x.dtype, x.device.type)
    assert op_(dirty, active, out, count_inactive=count_inactive) is None
    assert_bitwise(out, got)
    return got


@pytest.mark.parametrize("method", POOLS)
@pytest.mark.parametrize(
    ("shape", "block"), [((1, 960, 20, 20), 4), ((20, 72, 33, 18), 8), ((2, 8, 5, 700), 2)], ids=str
)
def test_whole_planes(device, method, shape, block):
    for dtype in FLOATS:
        for density in (0.0, 0.2, 1.0):
            check(method, *make(device, dtype, shape, density, block=block), 1, density < 1)


@pytest.mark.parametrize("count_inactive", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("method", POOLS)
def test_against_float64(device, method, size, count_inactive):
    for dtype in FLOATS:
        x, active = make(device, dtype)
        check(method, x, active, size, count_inactive)


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "odd_channel_slice", "permuted"])
@pytest.mark.parametrize("method", POOLS)
def test_any_memory_channels_and_blocks(device, method, layout):
    for channels, block in ((1, 4), (5, (3, 16)), (40, 64), (300, 8)):
        x, active = make(device, torch.float16, (2, channels, 19, 26), layout=layout, block=block)
        for size in (1, 3):
            check(method, x, active, size)


@pytest.mark.parametrize("density", [0.0, 1.0])
@pytest.mark.parametrize("method", POOLS)
def test_nothing_and_everything(device, method, density):
    x, active = make(device, density=density)
    got = check(method, x, active, 2)
    check(method, x, active, 2, False)
    if density == 1.0:
        dense = F.adaptive_avg_pool2d if method == "avg" else F.adaptive_max_pool2d
        torch.testing.assert_close(got, dense(x, 2))
    else:
        assert not got.any()


def test_maxima_below_zero_and_nan(device):
    x, active = make(device)
    x = -x.abs() - 1
    assert bool((sbnet.sparse_adaptive_max_pool2d(x, active) == 0).all())  # inactive pixels are zeros
    assert bool((sbnet.sparse_adaptive_max_pool2d(x, active, count_inactive=False) < 0).all())
    n, i, j = active.indices[0].tolist()
    x[n, 3, 4 * i, 4 * j] = torch.nan
    for op, _, _ in POOLS.values():
        assert op(x, active).isnan().nonzero().tolist() == [[n, 3, 0, 0]]


def test_nan_is_the_maximum_wherever_it_lies(device):
    """In whichever of the parts that a large plane is pooled in."""
    x, active = make(device, shape=(1, 8, 200, 300), density=1.0)
    for row in range(0, 200, 9):
        x[0, row % 8, row, row] = torch.nan
        got = sbnet.sparse_adaptive_max_pool2d(x, active)
        assert got.isnan().nonzero().tolist() == [[0, row % 8, 0, 0]]
        x[0, row % 8, row, row] = 0.0


def test_many_pixels_far_from_zero(device):
    """Sums of many parts, in float32."""
    x = (tensor((1, 16, 200, 300), device=device) + 100).contiguous(memory_format=torch.channels_last)
    active = random_active(BlockGrid.cover((200, 300), 8), 1, 0.5, device)
    check("avg", x, active, 1)


def test_the_same_bits_on_any_number_of_threads():
    x, active = make("cpu", shape=(1, 16, 100, 120))
    assert_same_bits_on_any_threads(lambda: sbnet.sparse_adaptive_avg_pool2d(x, active, 3))


@pytest.mark.parametrize("count_inactive", [True, False])
@pytest.mark.parametrize("method", POOLS)
def test_gradients(device, method, count_inactive):
    x, active = make(device, torch.float64)
    op, _, definition = POOLS[method]
    ours, theirs = (lambda x, f=f: f(x, active, (3, 5), count_inactive=count_inactive) for f in (op, definition))
    (got,) = assert_gradients(ours, theirs, [x])
    assert not torch.where(active.pixel_mask(x.shape[2:]), 0, got).any()


BAD = [
    ({"output_size": 0}, "output_size: expected 1 to 4096, got 0"),
    ({"output_size": -3}, "output_size: expected 1 to 4096|out: size"),
    ({"output_size": 2**20}, "output_size: expected 1 to 4096"),
    ({"output_size": 2**40}, "output_size: .*expected a number of 32 bits"),
    ({"output_size": (1, 2, 3)}, "output_size: .* an int or two ints"),
    ({"output_size": 1.5}, "output_size: .* an int or two ints"),
    ({"x": None}, "x: expected .*, got NoneType"),
    ({"x": torch.zeros(2, 24, 19)}, "x: expected 4 dimensions, got 3"),
    ({"x": torch.zeros(2, 24, 19, 26).double()}, "x: dtype: expected float32, float16 or bfloat16, got float64"),
    ({"x": torch.zeros(2, 24, 30, 26)}, "active: expected the tiling grid"),
    ({"x": torch.zeros(3, 24, 19, 26)}, "active: expected the images of x"),
    ({"active": 3}, "active: expected .*, got int"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op(device, changes, pattern):
    x, active = make(device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    with pytest.raises((RuntimeError, ValueError, TypeError), match=f"sbnet::sparse_adaptive_\\w*pool2d: ({pattern})"):
        sbnet.sparse_adaptive_avg_pool2d(**{"x": x, "active": active, **moved})


def test_bad_outputs(device):
    x, active = make(device)
    for out, pattern in (
        (torch.zeros(2, 25, 1, 1), "out: shape"), (torch.zeros(2, 24, 1, 1).half(), "out: dtype"),
        (torch.zeros(1, 24, 1, 1, device=device).expand(2, -1, -1, -1), "out: expected a tensor of its own memory"),
        (x[:, :, :2, :2], "out: expected memory of its own, got that of x"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"sbnet::sparse_adaptive_pool2d_: {pattern}"):
            sbnet.sparse_adaptive_avg_pool2d_(x, active, out if out is x else out.to(device))
    with pytest.raises(RuntimeError, match="has no gradient"):
        sbnet.sparse_adaptive_max_pool2d_(x.requires_grad_(), active, torch.zeros(2, 24, 1, 1, device=device))


def test_modules(device):
    x, active = make(device)
    for module, dense, op in (
        (SparseAdaptiveAvgPool2d((3, None)), nn.AdaptiveAvgPool2d((3, None)), sbnet.sparse_adaptive_avg_pool2d),
        (SparseAdaptiveMaxPool2d((3, None)), nn.AdaptiveMaxPool2d((3, None)), sbnet.sparse_adaptive_max_pool2d),
    ):
        assert_bitwise(module(x, active), op(x, active, (3, 26)))
        assert_bitwise(module(x, None), dense(x))
        out = torch.zeros_like(dense(x))
        module.run_(x, active, out)
        assert_bitwise(out, op(x, active, (3, 26)))
    with pytest.raises(ValueError, match="return_indices"):
        SparseAdaptiveMaxPool2d(1, return_indices=True)


# ---- networks


class Pools(nn.Module):
    """A squeeze-excite gate, an attention of maxima, a pyramid of pools, and heads."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 1)
        self.last, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True) + F.adaptive_max_pool2d(x, 1)))
        y = self.last(x)
        cells = F.adaptive_avg_pool2d(y, 3)
        return self.head(y.mean((-1, -2))), F.adaptive_avg_pool2d(y, 1), cells, y.amax((2, 3)), cells + 1


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_networks_run_them(device, mode):
    run = assert_network(Pools(), mode, device, {"adaptive_pool": 6}, judged=2 if mode == "exact" else None)
    if mode == "masked":  # what is not active is not read: no buffer is kept clean for the pools
        assert not any(root.kept for root in run.executor.storage.roots if root.shape[2] > 3)


def test_the_input_of_a_network_is_not_masked(device):
    """Its pool is dense, of parts of it as well."""

    class Global(nn.Module):
        def forward(self, x):
            return F.relu(x) + x[:, :1].mean((2, 3), keepdim=True) + F.adaptive_avg_pool2d(x[:, 2:3], 1)

    x, mask = torch.randn(1, 4, 24, 24, device=device), torch.zeros(1, 24, 24, device=device)
    mask[0, 3, 4] = 1
    run = sbnet.sparsify(Global().eval(), x, block=8)
    from sbnet.graph.oracle import PlaneMasks, masked_oracle

    torch.testing.assert_close(run(x, mask), masked_oracle(Global(), [x], PlaneMasks(mask, 8)))


TAKEN = {
    "places of maxima": (lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), "aten"),
    "another dtype": (lambda x: x.mean((2, 3), dtype=torch.float64), "aten"),
    "its own dtype": (lambda x: x.mean((2, 3), dtype=torch.float32), "adaptive_pool"),
    "one side": (lambda x: x.mean((1, 2)), "aten"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_pools_that_give_more_than_a_masked_one_stay_dense(device, name):
    pool, kind = TAKEN[name]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x):
            return pool(self.stem(x))

    x, net = torch.randn(1, 3, 16, 24, device=device), Net().to(device).eval()
    run = sbnet.sparsify(net, x, block=8)
    assert [node.kind for node in run.plan.graph.nodes] == ["conv", kind]
    with torch.no_grad():
        torch.testing.assert_close(run(x, torch.ones(1, 16, 24, device=device)), net(x), rtol=1e-4, atol=1e-5)
