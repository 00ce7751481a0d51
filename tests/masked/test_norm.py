"""Group, instance and layer norms and softmax on active blocks against float64 of their definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid, reference
from sbnet.nn import (
    SparseGroupNorm,
    SparseInstanceNorm2d,
    SparseLayerNorm2d,
    SparsePointwise,
    SparsePReLU,
    SparseSoftmax2d,
)
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, random_active, tensor
from support.layer_checks import assert_gradients, assert_in_place, assert_network, assert_same_bits_on_any_threads


def response_norm(x, weight, bias, eps=1e-6):
    """As ConvNeXtV2's authors write it, of channels that lie first."""
    size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
    shares = size / (size.mean(1, keepdim=True) + eps)
    return weight[:, None, None] * (x * shares) + bias[:, None, None] + x


FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# name of the op: how it is called with (weight, bias), and PyTorch's on a whole plane
NORMS = {
    "group_norm": (lambda w, b: ((4, w, b, 1e-3), {}), lambda x, w, b: F.group_norm(x, 4, w, b, 1e-3)),
    "instance_norm": (lambda w, b: ((w, b), {}), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "response_norm": (lambda w, b: ((w, b, 1e-6), {}), lambda x, w, b: response_norm(x, w, b)),
    "layer_norm2d": (
        lambda w, b: ((w, b, 1e-6), {}),
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], w, b, 1e-6).permute(0, 3, 1, 2),
    ),
    "softmax2d": (lambda w, b: ((), {}), lambda x, w, b: F.softmax(x, 1)),
    "log_softmax2d": (lambda w, b: ((), {"log": True}), lambda x, w, b: F.log_softmax(x, 1)),
}
IN_PLACE = [name for name in NORMS if name != "instance_norm"]


def op_of(module, name, suffix=""):
    return getattr(module, f"sparse_{name.removeprefix('log_')}{suffix}")


def make(device, dtype=torch.float32, shape=(2, 24, 19, 26), density=0.4, layout="channels_last", block=4, mean=1.0):
    x = laid_out((tensor(shape, torch.float32, device) + mean).to(dtype), layout)
    weight, bias = (tensor(shape[1:2], dtype, device) for _ in range(2))
    return x, weight, bias, random_active(BlockGrid.cover(shape[2:], block), shape[0], density, device)


def check(name, x, weight, bias, active):
    """Both forms; what is not active is NaN, and not read."""
    inside = active.pixel_mask(x.shape[2:])
    dirty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    dirty.copy_(torch.where(inside, x, torch.nan))
    args, more = NORMS[name][0](weight, bias)
    got = op_of(sbnet, name)(dirty, active, *args, **more)

    def exact(dtype):
        given = (None if t is None else t.to(dtype) for t in (weight, bias))
        wide, _ = NORMS[name][0](*given)
        return op_of(reference, name)(x.to(dtype), active, *wide, **more)

    assert_as_accurate_as_torch(got, exact(torch.float32).to(x.dtype), exact(torch.float64))
    assert not torch.where(inside, 0, got).any()
    if name in IN_PLACE:
        assert_in_place(lambda out: op_of(sbnet, name, "_")(dirty, active, out, *args, **more), got, active)
    return got


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("channels", [1056, 1288, 1536, 1768, 2048])
def test_layer_norms_of_many_channels(device, dtype, channels):
    """Up to eight words of a pixel a lane."""
    check("layer_norm2d", *make(device, dtype, (1, channels, 9, 10), density=0.6))


@pytest.mark.parametrize("name", NORMS)
def test_against_float64(device, name):
    for dtype in FLOATS:
        x, weight, bias, active = make(device, dtype)
        check(name, x, weight, bias, active)
        check(name, x, None, None, active)
        check(name, x, weight.float(), bias.float(), active)


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "odd_channel_slice", "permuted"])
@pytest.mark.parametrize("name", NORMS)
def test_any_memory_channels_and_blocks(device, name, layout):
    for channels, block in ((4, 4), (20, (3, 16)), (68, 64), (300, 8)):
        x, weight, bias, active = make(device, torch.float16, (2, channels, 19, 26), layout=layout, block=block)
        check(name, x, weight, bias, active)


@pytest.mark.parametrize("name", NORMS)
def test_a_full_list_is_pytorchs_own(device, name):
    x, weight, bias, active = make(device, density=1.0)
    got, dense = check(name, x, weight, bias, active), NORMS[name][1]
    wide = [t.double() for t in (x, weight, bias)]
    assert_as_accurate_as_torch(got, dense(x, weight, bias), dense(*wide))


@pytest.mark.parametrize("name", NORMS)
def test_an_empty_list_and_images_without_blocks(device, name):
    x, weight, bias, active = make(device, density=0.0)
    assert not check(name, x, weight, bias, active).any()
    one = sbnet.ActiveBlocks.from_indices(torch.tensor([[1, 2, 3]], device=device), active.grid, 2)
    check(name, x, weight, bias, one)


def test_a_mean_far_from_zero(device):
    """No difference of large sums."""
    x, weight, bias, active = make(device, shape=(1, 8, 120, 150), mean=1000.0)
    for name in ("group_norm", "instance_norm", "response_norm", "layer_norm2d"):
        check(name, x, weight, bias, active)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("channels", [8, 72, 96, 320, 768, 1024, 2048, 2056])
def test_layer_norms_of_all_widths(device, channels, dtype):
    """Whatever a pixel's words share out to."""
    for block, density in ((4, 0.3), (16, 1.0)):
        given = make(device, dtype, shape=(1, channels, 9, 14), block=block, density=density, mean=3.0)
        check("layer_norm2d", *given)


@pytest.mark.parametrize("channels", [768, 2048, 8192])
@pytest.mark.parametrize("layout", ["contiguous", "odd_channel_slice"])
@pytest.mark.parametrize("name", ["layer_norm2d", "softmax2d", "log_softmax2d"])
def test_sums_over_many_channels(device, name, layout, channels):
    """One lane adds all channels of a pixel: roundings do not add up."""
    x, weight, bias, active = make(device, shape=(1, channels, 9, 14), layout=layout, mean=3.0)
    check(name, x, weight, bias, active)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_groups_of_many_parts(device, layout):
    for seed in range(3):
        torch.manual_seed(seed)
        x, weight, bias, active = make(device, shape=(1, 512, 96, 96), layout=layout, block=8, mean=3.0)
        got = sbnet.sparse_group_norm(x, active, 1, weight, bias)
        theirs, exact = (
            reference.sparse_group_norm(x.to(dtype), active, 1, weight.to(dtype), bias.to(dtype))
            for dtype in (torch.float32, torch.float64)
        )
        assert_as_accurate_as_torch(got, theirs, exact)


def test_a_response_norm_is_that_of_a_map_times_its_mask(device):
    """Zeros add nothing to the sums of squares."""
    x, weight, bias, active = make(device)
    inside = active.pixel_mask(x.shape[2:])
    got = sbnet.sparse_response_norm(x, active, weight, bias)
    torchs, exact = (
        response_norm((x * inside).to(dtype), weight.to(dtype), bias.to(dtype)) * inside
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_accurate_as_torch(got, torchs, exact)
    with pytest.raises(RuntimeError, match="sparse_norm2d: eps: expected more than 0, got 0"):
        sbnet.sparse_response_norm(x, active, weight, bias, 0.0)


def test_softmax_of_large_infinite_and_nan(device):
    x, _, _, active = make(device, shape=(1, 24, 8, 8), density=1.0)
    x *= 100
    x[0, 3, 0, 0], x[0, :, 0, 1], x[0, 5, 0, 2], x[0, 8:16, 0, 3] = -torch.inf, -torch.inf, torch.nan, -torch.inf
    for log in (False, True):
        got = sbnet.sparse_softmax2d(x, active, log=log)
        want = (F.log_softmax if log else F.softmax)(x.double(), 1)
        torch.testing.assert_close(got, want.float(), equal_nan=True)


def test_the_same_bits_on_any_number_of_threads():
    x, weight, bias, active = make("cpu", shape=(1, 16, 100, 120))
    assert_same_bits_on_any_threads(lambda: sbnet.sparse_group_norm(x, active, 4, weight, bias))
    assert_same_bits_on_any_threads(lambda: sbnet.sparse_response_norm(x, active, weight, bias))


@pytest.mark.parametrize("name", NORMS)
def test_gradients(device, name):
    x, weight, bias, active = make(device)

    def of(module):
        def run(x, *rest):
            args, more = NORMS[name][0](*rest)
            return op_of(module, name)(x, active, *args, **more)

        return run

    assert_gradients(of(sbnet), of(reference), [x, weight, bias])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradients_of_many_channels(device, layout):
    x, weight, bias, active = make(device, shape=(1, 2048, 9, 14), layout=layout, mean=3.0)
    ours, theirs = (
        lambda x, *rest, op=op: op(x, active, *rest)
        for op in (sbnet.sparse_layer_norm2d, reference.sparse_layer_norm2d)
    )
    assert_gradients(ours, theirs, [x, weight, bias])


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_an_image_without_active_pixels_are_zero(device, name):
    x, weight, bias, active = make(device)

    def grads(x, indices):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        blocks = sbnet.ActiveBlocks.from_indices(torch.tensor(indices, device=device), active.grid, len(x))
        args, more = NORMS[name][0](*leaves[1:])
        op_of(sbnet, name)(leaves[0], blocks, *args, **more).square().sum().backward()
        return [t.grad for t in leaves if t.grad is not None]

    both, alone = grads(x, [[1, 2, 3]]), grads(x[1:], [[0, 2, 3]])
    assert not both[0][0].any()
    for got, want in zip([both[0][1:], *both[1:]], alone, strict=True):
        torch.testing.assert_close(got, want)


BAD = [
    ({"num_groups": 5}, "groups: expected a divisor of 24"),
    ({"num_groups": 0}, "groups: expected a divisor of 24"),
    ({"num_groups": 1.5}, "num_groups: expected an int"),
    ({"num_groups": 2**40}, "groups: expected numbers of 32 bits"),
    ({"eps": -1.0}, "eps: expected at least 0, got -1"),
    ({"eps": "x"}, "eps: expected a number"),
    ({"weight": torch.zeros(23)}, "weight: expected \\[24\\], got 23"),
    ({"bias": torch.zeros(24).half()}, "(weight, bias|bias): dtype: expected"),
    ({"weight": torch.zeros(24), "bias": torch.zeros(24).half()}, "bias: dtype: expected that of weight, float32"),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_names_the_op(device, changes, pattern):
    x, _, _, active = make(device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    with pytest.raises((RuntimeError, ValueError, TypeError), match=f"sbnet::sparse_\\w*norm\\w*: ({pattern})"):
        sbnet.sparse_group_norm(**{"x": x, "active": active, "num_groups": 4, **moved})


def test_modules(device):
    x, weight, bias, active = make(device)
    for module, dense, name, args in (
        (SparseGroupNorm(4, 24), nn.GroupNorm(4, 24), "group_norm", (4, weight, bias)),
        (SparseInstanceNorm2d(24, affine=True), nn.InstanceNorm2d(24, affine=True), "instance_norm", (weight, bias)),
        (SparseLayerNorm2d(24, eps=1e-6), None, "layer_norm2d", (weight, bias, 1e-6)),
        (SparseSoftmax2d(), nn.Softmax(1), "softmax2d", ()),
        (SparseSoftmax2d(log=True), nn.LogSoftmax(1), "log_softmax2d", ()),
    ):
        for m in filter(None, (module, dense)):
            m.to(device).requires_grad_(False)
            if "norm" in name:
                m.weight.copy_(weight), m.bias.copy_(bias)
        more = {"log": True} if name.startswith("log") else {}
        want = op_of(sbnet, name)(x, active, *args, **more)
        assert_bitwise(module(x, active), want)
        torch.testing.assert_close(module(x, None), NORMS[name][1](x, weight, bias) if dense is None else dense(x))
        out = torch.zeros_like(x)
        module.run_(x, active, out, None)
        assert_bitwise(out, want)
    with pytest.raises(ValueError, match="track_running_stats"):
        SparseInstanceNorm2d(24, track_running_stats=True)


def test_modules_of_programs(device):
    x, _, _, active = make(device)
    gate, out = torch.rand(2, 24, 1, 1, device=device), torch.zeros_like(x)
    module = SparsePointwise("sigmoid; mul a; add b")
    want = sbnet.sparse_pointwise(x, active, "sigmoid; mul a; add b", gate, x)
    assert_bitwise(module(x, active, gate, x), want)
    assert_bitwise(module(x, None, gate, x), torch.sigmoid(x) * gate + x)
    module.run_(x, active, out, None, gate, x)
    assert_bitwise(out, want)
    for slopes in (1, 24):
        prelu = SparsePReLU(slopes, 0.3).to(device).requires_grad_(False)
        inside, out = active.pixel_mask(x.shape[2:]), torch.zeros_like(x)
        torch.testing.assert_close(prelu(x, active), torch.where(inside, prelu(x, None), 0))
        prelu.run_(x, active, out, None)
        assert_bitwise(out, prelu(x, active))


# ---- networks


class Norms(nn.Module):
    """What networks without batch statistics put between convolutions, and a dense prediction's head."""

    def __init__(self):
        super().__init__()
        self.stem, self.group = nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16)
        self.middle, self.instance = nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.layer, self.last = nn.LayerNorm(16, 1e-6), nn.Conv2d(16, 5, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.group(self.stem(x)))
        x = F.relu(self.instance(self.middle(x)) + x)
        x = F.gelu(self.layer(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return F.softmax(self.last(x), 1)


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_networks_run_them(device, mode):
    net = Norms()
    with torch.no_grad():
        for norm in (net.group, net.instance, net.layer):
            norm.weight.uniform_(0.5, 1.5), norm.bias.uniform_(-1, 1)
    assert_network(net, mode, device, {"norm": 4, "adaptive_pool": 0})


OVER_A_PLANE = {
    "softmax of rows": lambda x: F.softmax(x, 3),
    "softmax of columns": lambda x: F.log_softmax(x, -2),
    "layer norm of rows": lambda x: F.layer_norm(x, [16]),
    "softmax in float64": lambda x: F.softmax(x, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("name", OVER_A_PLANE)
def test_norms_over_a_plane_or_in_another_dtype_stay_dense(device, name):
    """Even where a row has as many pixels as there are channels."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x):
            return OVER_A_PLANE[name](self.stem(x))

    x, net = torch.randn(1, 3, 16, 16, device=device), Net().to(device).eval()
    run = sbnet.sparsify(net, x, block=8)
    assert [node.kind for node in run.plan.graph.nodes] == ["conv", "aten"]
    with torch.no_grad():
        torch.testing.assert_close(run(x, torch.ones(1, 16, 16, device=device)), net(x), rtol=1e-4, atol=1e-5)
