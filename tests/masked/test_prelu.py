"""PReLU in the epilogue of convolutions: through every kernel, its gradients, graph pass, export."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid, export, reference, sparse_conv2d, sparse_conv_transpose2d
from sbnet.graph.capture import capture
from sbnet.graph.passes import optimise
from sbnet.graph.passes.bottleneck import fuse_bottlenecks
from sbnet.graph.plan import plan
from sbnet.nn import SparseConv2d, SparseConvTranspose2d
from support.conv_cases import check
from support.helpers import assert_as_accurate_as_torch, lively, random_active, tensor

# What the kernels of a CPU and of a GPU are chosen by.
KINDS = {
    "3x3": {"channels": 64, "filters": 64},
    "direct 3x3 stride 2": {"channels": 24, "filters": 40, "stride": 2},
    "1x1": {"channels": 32, "filters": 80, "kernel": 1, "padding": 0},
    "depthwise": {"channels": 40, "filters": 40, "groups": 40},
    "groups, 5x5": {"channels": 12, "filters": 18, "groups": 2, "kernel": 5, "padding": 2},
    "odd channels": {"channels": 3, "filters": 7},
    "nchw": {"channels": 8, "filters": 12, "layout": "contiguous"},
    "stem": {"channels": 3, "filters": 16, "kernel": 7, "stride": 2, "padding": 3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel(device, kind, dtype):
    case = {**KINDS[kind], "dtype": dtype}
    slopes = tensor((case["filters"],), torch.float32, device)  # of both signs
    y = check(device, **case, activation="leaky_relu", slope=slopes.to(dtype))
    check(device, **case, activation="leaky_relu", slope=slopes, residual="channels_last")
    assert bool((y < 0).any())


def test_one_slope_is_every_channels(device):
    torch.manual_seed(3)
    one = check(device, channels=8, filters=20, activation="leaky_relu", slope=torch.full((1,), 0.3, device=device))
    torch.manual_seed(3)
    all_ = check(device, channels=8, filters=20, activation="leaky_relu", slope=torch.full((20,), 0.3, device=device))
    assert torch.equal(one, all_)


@pytest.mark.parametrize("stride", [2, 3])  # by phases; by pixel, as 3 does not divide the blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_transposed(device, stride, dtype):
    x, weight = tensor((2, 8, 11, 9), dtype, device), tensor((8, 3, 4, 4), dtype, device) / 8
    bias, slope = tensor((6,), dtype, device), tensor((6,), torch.float32, device)
    out = sbnet.conv_transpose_output_size((11, 9), 4, stride, 1)
    active = random_active(BlockGrid.cover(out, 8), 2, 0.5, device)
    options = {"stride": stride, "padding": 1, "groups": 2, "activation": "leaky_relu"}
    got = sparse_conv_transpose2d(x, weight, bias, active, **options, slope=slope)
    theirs = reference.sparse_conv_transpose2d(x, weight, bias, active, **options, slope=slope)
    exact = (t.double() for t in (x, weight, bias))
    assert_as_accurate_as_torch(
        got, theirs, reference.sparse_conv_transpose2d(*exact, active, **options, slope=slope.double())
    )
    into = torch.full_like(got, float("nan"))
    sbnet.sparse_conv_transpose2d_(x, weight, bias, active, into, **options, slope=slope)
    inside = active.pixel_mask(out).expand_as(got)
    assert torch.equal(into[inside], got[inside])


def test_nan_and_infinity_pass_as_in_pytorch(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -2.0], device=device).view(1, 6, 1, 1)
    eye = torch.eye(6, device=device).view(6, 6, 1, 1)
    slope = torch.tensor([0.5, 0.5, 0.5, 0.25, 0.25, -3.0], device=device)
    active = random_active(BlockGrid.cover((1, 1), 4), 1, 1.0, device)
    got = sparse_conv2d(x, eye, None, active, groups=1, activation="leaky_relu", slope=slope)
    depthwise = sparse_conv2d(
        x, torch.ones(6, 1, 1, 1, device=device), None, active, groups=6, activation="leaky_relu", slope=slope
    )
    assert bool(got.isnan().all())  # a channel's NaN is a factor of every sum
    torch.testing.assert_close(depthwise, F.prelu(x, slope), equal_nan=True)


@pytest.mark.parametrize("op", ["conv", "transposed"])
@pytest.mark.parametrize("one", [False, True], ids=["a slope a channel", "one slope"])
def test_gradients(device, op, one):
    channels = 6
    x, slope = tensor((2, 4, 13, 18), torch.float32, device), tensor((1 if one else channels,), torch.float32, device)
    weight = tensor((channels, 4, 3, 3) if op == "conv" else (4, channels, 3, 3), torch.float32, device) / 5
    bias, residual = tensor((channels,), torch.float32, device), tensor((2, channels, 13, 18), torch.float32, device)
    active = random_active(BlockGrid.cover((13, 18), 8), 2, 0.5, device)
    ours = sparse_conv2d if op == "conv" else sparse_conv_transpose2d
    plain = reference.sparse_conv2d if op == "conv" else reference.sparse_conv_transpose2d
    grads = []
    for call, dtype in ((ours, torch.float32), (plain, torch.float32), (plain, torch.float64)):
        given = [t.to(dtype).requires_grad_() for t in (x, weight, bias, residual, slope)]
        y = call(*given[:3], active, padding=1, activation="leaky_relu", residual=given[3], slope=given[4])
        grads.append(torch.autograd.grad((y * y.detach().cos()).sum(), given))
    for got, theirs, exact in zip(*grads, strict=True):
        assert_as_accurate_as_torch(got, theirs, exact)


def test_what_is_refused(device):
    x, weight = tensor((1, 4, 8, 8), torch.float32, device), tensor((6, 4, 1, 1), torch.float32, device)
    active = random_active(BlockGrid.cover((8, 8), 8), 1, 1.0, device)
    six = torch.ones(6, device=device)
    for message, error, more in (
        ("slope: expected the activation leaky_relu", RuntimeError, {"activation": "relu", "slope": six}),
        ("slope: expected the activation leaky_relu", RuntimeError, {"slope": six}),
        (r"slope: expected \[6\], got 5", RuntimeError, {"activation": "leaky_relu", "slope": six[:5]}),
        (
            "slope: dtype: expected float32, got float16",
            RuntimeError,
            {"activation": "leaky_relu", "slope": six.half()},
        ),
        ("slope: ", TypeError, {"activation": "leaky_relu", "slope": 0.25}),
    ):
        with pytest.raises(error, match=f"sbnet::sparse_conv2d: {message}"):
            sparse_conv2d(x, weight, None, active, **more)
    half = (x.half(), weight.half(), None, active)
    with pytest.raises(RuntimeError, match="slope: dtype: expected float32 or float16, got bfloat16"):
        sparse_conv2d(*half, activation="leaky_relu", slope=six.bfloat16())
    blocks = sbnet.BlockLayout(torch.ones(1, 1, dtype=torch.bool), 8)
    with pytest.raises(ValueError, match="layout: expected .* without residual and slope, got .* a slope"):
        sparse_conv2d(x, weight, None, active, layout=blocks, activation="leaky_relu", slope=six)


@pytest.mark.parametrize("layer", [SparseConv2d(3, 6, 3, padding=1), SparseConvTranspose2d(3, 6, 3, padding=1)])
def test_modules(device, layer):
    layer, slopes = layer.to(device), nn.PReLU(6, 0.3, device=device)
    x = tensor((1, 3, 16, 16), torch.float32, device)
    active = random_active(BlockGrid.cover((16, 16), 8), 1, 1.0, device)
    want = slopes(layer(x, None))
    for blocks in (active, None):
        got = layer(x, blocks, activation="leaky_relu", slope=slopes.weight)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


class Enlarge(nn.Module):
    """SRVGG's pattern, a sum and a PReLU of one slope, and one that follows no convolution."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 8), (8, 8)))
        self.acts = nn.ModuleList([nn.PReLU(8), nn.PReLU(8), nn.PReLU(1), nn.PReLU(8)])
        self.last = nn.ConvTranspose2d(8, 8, 2, 2)

    def forward(self, x):
        a = self.acts[0](self.convs[0](x))
        b = self.acts[1](self.convs[1](a) + a)
        c = self.acts[2](self.last(self.convs[2](b)))
        return self.acts[3](c.tanh())


@pytest.fixture
def enlarge(device):
    torch.manual_seed(0)
    net = lively(Enlarge().eval(), device)
    for k, act in enumerate(net.acts):
        act.weight.data.copy_(torch.randn(act.weight.shape) / (k + 1))
    return net


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_networks_fuse_it(device, enlarge, mode):
    x, mask = torch.randn(1, 3, 32, 40, device=device), torch.zeros(1, 32, 40, device=device)
    mask[0, 8:20, 10:30] = 1
    run = sbnet.sparsify(enlarge, x, mode=mode, block=8)
    with torch.no_grad():
        full = torch.ones_like(mask)
        torch.testing.assert_close(run(x, full), enlarge(x), atol=1e-4, rtol=1e-4)
        run(x, mask)
        enlarge.acts[0].weight.mul_(-0.5)  # slopes are read anew after a write
        torch.testing.assert_close(run(x, full), enlarge(x), atol=1e-4, rtol=1e-4)
    kinds = [(node.kind, "slope" in node.params) for node in run.plan.graph.nodes]
    assert [kind for kind, fused in kinds if fused] == ["conv", "conv", "conv_transpose"]
    assert [kind for kind, fused in kinds if not fused] == ["conv", "pointwise"]


def test_exported_networks_keep_it(enlarge, device, tmp_path):
    if device != "cpu":
        pytest.skip("the runtime on a CPU is asked")
    x, mask = torch.randn(1, 3, 32, 40), torch.zeros(1, 32, 40)
    mask[0, 8:20, 10:30] = 1
    run = sbnet.sparsify(enlarge, x, block=8)
    path = tmp_path / "enlarge.onnx"
    run.export(path)
    import onnx

    nodes = [node for node in onnx.load(path).graph.node if node.domain == "sbnet"]
    slopes = [node.op_type for node in nodes if "conv" in node.op_type and any(node.input[7:8])]
    assert slopes == ["sparse_conv2d", "sparse_conv2d", "sparse_conv_transpose2d"]
    filled = [a.i for node in nodes if node.op_type in slopes for a in node.attribute if a.name == "zero_outside"]
    assert sum(filled) < len(filled)
    session = export.session(path, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        torch.testing.assert_close(export.run(session, [x, mask > 0])[0], run(x, mask), atol=1e-4, rtol=1e-4)


class Computed(nn.Module):
    """Slopes that are no weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.slopes = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(3, 6)

    def forward(self, x):
        return F.prelu(self.conv(x), self.slopes(x.mean((0, 2, 3))))


def test_computed_slopes_are_not_fused(device):
    net, x = lively(Computed().eval(), device), torch.randn(1, 3, 16, 24, device=device)
    run = sbnet.sparsify(net, x, block=8)
    with torch.no_grad():
        torch.testing.assert_close(run(x, torch.ones(1, 16, 24, device=device)), net(x), atol=1e-4, rtol=1e-4)


class Bottleneck(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 16, 1), act
        self.a, self.b, self.c = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 16, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.act(self.c(self.act(self.b(self.act(self.a(x))))) + x)


@pytest.mark.parametrize(("act", "one"), [(nn.ReLU(), True), (nn.PReLU(), False)])
def test_bottleneck_kernels_take_no_slopes(act, one):
    graph = optimise(capture(Bottleneck(act).eval().half(), (torch.zeros(1, 3, 16, 16, dtype=torch.float16),)))
    kinds = [node.kind for node in fuse_bottlenecks(plan(graph, 8), None).graph.nodes]
    assert ("bottleneck" in kinds) == one
