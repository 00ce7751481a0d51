"""blocksparse_matmul and blocksparse_weight_grad against float64, on every path that serves them."""

import pytest
import torch

from sbnet import BlockLayout, blocksparse_matmul, blocksparse_weight_grad, reference
from sbnet._library import kernel_capability
from support.helpers import ACTIVATIONS, FLOATS, assert_as_accurate_as_torch, assert_bitwise, tensor
from support.weight_cases import BLOCK_SIZES, barabasi_albert, random_layout, weights_of


def check_matmul(layout, x, weight, gate=None, bias=None, **options):
    got = blocksparse_matmul(x, weight, layout, gate, bias, **options)
    options.pop("allow_tf32", None)
    results = [
        reference.blocksparse_matmul(
            x.to(d), weight.nan_to_num(0.0).to(d), layout, gate, None if bias is None else bias.to(d), **options
        )
        for d in (x.dtype, torch.float64)
    ]
    assert_as_accurate_as_torch(got, *results, str(options))
    return got


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_forward_and_input_gradient(device, size, dtype):
    """Every block size and dtype: rows that fill tiles and rows that do not, ragged features, empty rows, columns."""
    for ragged in (0, 3, 8 if size > 8 else 0):
        layout = random_layout(3, 4, size, 0.6, ragged=ragged, z_order=ragged == 0)
        weight = weights_of(layout, dtype, device)
        for rows in (1, 3, 13, 150):
            x = tensor((rows, layout.in_features), dtype, device)
            check_matmul(layout, x, weight)
            check_matmul(layout, tensor((rows, layout.out_features), dtype, device), weight, transposed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_rows_that_fill_a_device(size, dtype):
    """The largest tiles: of all GPUs' kernels they serve nothing smaller."""
    layout = random_layout(6, 6, size, 0.5, ragged=8)
    weight, gate = weights_of(layout, dtype, "cuda"), torch.rand(len(layout.coords), device="cuda").round()
    x, dy = (tensor((13000, n), dtype, "cuda") for n in (layout.in_features, layout.out_features))
    check_matmul(layout, x, weight, bias=tensor((layout.out_features,), dtype, "cuda"), activation="gelu")
    check_matmul(layout, dy, weight, gate, transposed=True)
    apart = tensor((layout.in_features, 13000), dtype, "cuda").T  # rows next to each other
    check_matmul(layout, apart, weight)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_weight_gradient(device, size, dtype):
    for ragged, rows in ((0, 150), (3, 37), (8 if size > 8 else 1, 300), (0, 1)):
        layout = random_layout(3, 3, size, 0.6, ragged=ragged)
        x = tensor((rows, layout.in_features), dtype, device)
        dy = tensor((rows, layout.out_features), dtype, device)
        got = blocksparse_weight_grad([(x, dy)], layout)
        results = [reference.blocksparse_weight_grad([(x.to(d), dy.to(d))], layout) for d in (dtype, torch.float64)]
        assert_as_accurate_as_torch(got, *results, f"{ragged} {rows}")


def test_weight_gradient_of_pairs(device):
    """group_param_grads: eight pairs in a launch, more in several, each with its own rows."""
    layout = random_layout(3, 4, 16)
    for count in (2, 8, 11):
        pairs = [
            (tensor((5 + 40 * i, 48), torch.float32, device), tensor((5 + 40 * i, 64), torch.float32, device))
            for i in range(count)
        ]
        got = blocksparse_weight_grad(pairs, layout)
        results = [
            reference.blocksparse_weight_grad([(x.to(d), dy.to(d)) for x, dy in pairs], layout)
            for d in (torch.float32, torch.float64)
        ]
        assert_as_accurate_as_torch(got, *results, str(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 128])
def test_weight_gradient_of_many_rows(device, size, dtype):
    """More rows than a CPU packs at once, the first pair's and the last's, one of three rows between."""
    layout = random_layout(256 // size, 256 // size, size, 0.5, ragged=3)
    pairs = [
        (tensor((rows, layout.in_features), dtype, device), tensor((rows, layout.out_features), dtype, device))
        for rows in (17000, 3, 9001)
    ]
    got = blocksparse_weight_grad(pairs, layout)
    results = [
        reference.blocksparse_weight_grad([(x.to(d), dy.to(d)) for x, dy in pairs], layout)
        for d in (dtype, torch.float64)
    ]
    assert_as_accurate_as_torch(got, *results)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(device, dtype, activation):
    for size, ragged, bias_dtype in ((8, 3, dtype), (32, 0, torch.float32), (64, 8, dtype)):
        layout = random_layout(3, 3, size, ragged=ragged)
        x, weight = tensor((40, layout.in_features), dtype, device), weights_of(layout, dtype, device, 0.5)
        bias = tensor((layout.out_features,), bias_dtype, device)
        check_matmul(layout, x, weight, None, bias, activation=activation, negative_slope=0.3)
        bias = tensor((layout.in_features,), bias_dtype, device)
        y = tensor((40, layout.out_features), dtype, device)
        check_matmul(layout, y, weight, None, bias, activation=activation, negative_slope=0.3, transposed=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gates(device, dtype):
    """blocksparse's own case: blocks of 8, a checkerboard of gates. Blocks with gate 0 may hold anything."""
    for size in (8, 32):
        layout = random_layout(6, 7, size, 0.7)
        weight = weights_of(layout, dtype, device)
        gate = torch.rand(layout.blocks, device=device) + 0.5
        off = layout.coords.sum(1) % 2 == 0
        gate[off.to(device)] = 0.0
        clean = weight.clone()
        weight[off.to(device)] = float("nan")
        x, dy = tensor((33, 6 * size), dtype, device), tensor((33, 7 * size), dtype, device)
        for t, transposed in ((x, False), (dy, True)):
            got = blocksparse_matmul(t, weight, layout, gate, transposed=transposed)
            results = [
                reference.blocksparse_matmul(
                    t.to(d), (clean * gate[:, None, None]).to(dtype).to(d), layout, transposed=transposed
                )
                for d in (dtype, torch.float64)
            ]
            assert_as_accurate_as_torch(got, *results, f"{size} {transposed}")


def test_gates_all_zero(device):
    layout = random_layout(3, 3, 16, 1.0)
    weight = torch.full(layout.weight_shape, float("nan"), device=device)
    y = blocksparse_matmul(torch.ones(5, 48, device=device), weight, layout, torch.zeros(layout.blocks, device=device))
    assert_bitwise(y, torch.zeros_like(y))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strides_and_feature_axes(device, dtype):
    layout = random_layout(3, 4, 32)
    weight = weights_of(layout, dtype, device)
    x = tensor((2, 19, 96), dtype, device)
    want = blocksparse_matmul(x, weight, layout)
    wide = torch.full((2, 19, 112), float("nan"), dtype=dtype, device=device)
    wide[..., 8:104] = x
    odd = torch.full((2, 19, 2, 99), float("nan"), dtype=dtype, device=device)
    odd[..., 0, 3:] = x
    for other in (wide[..., 8:104], odd[..., 0, 3:], x.transpose(0, 1).contiguous().transpose(0, 1)):
        got = blocksparse_matmul(other, weight, layout)
        assert got.shape == (2, 19, 128)
        torch.testing.assert_close(got, want, rtol=0, atol=0 if dtype == torch.float32 and device == "cpu" else 1e-2)
    for shape in ((96, 40), (96, 5, 7), (96,), (96, 1)):
        check_matmul(layout, tensor(shape, dtype, device), weight, feature_axis=0)
    y = blocksparse_matmul(tensor((96, 40), dtype, device), weight, layout, feature_axis=0)
    assert y.is_contiguous()
    pairs = [(tensor((96, 5, 7), dtype, device), tensor((128, 5, 7), dtype, device))]
    got = blocksparse_weight_grad(pairs, layout, feature_axis=0)
    results = [
        reference.blocksparse_weight_grad([(x.to(d), dy.to(d)) for x, dy in pairs], layout, feature_axis=0)
        for d in (dtype, torch.float64)
    ]
    assert_as_accurate_as_torch(got, *results)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("size", "nodes"), [(32, 40), (16, 80), (8, 160), (64, 20), (128, 10)])
def test_barabasi_albert(device, size, nodes, axis):
    """The layouts of blocksparse's tests, W ~ N(0, 0.01), x ~ N(0, 0.1), batches of 256 down to 1."""
    layout = BlockLayout(barabasi_albert(nodes, 5), size, z_order=True)
    features = nodes * size
    weight = torch.randn(layout.weight_shape, device=device) * 0.01
    for rows in (256, 64, 8, 1):
        x, dy = (torch.randn((rows, features) if axis else (features, rows), device=device) * 0.1 for _ in range(2))
        check_barabasi_albert(layout, x, dy, weight, axis)


def check_barabasi_albert(layout, x, dy, weight, axis):
    """fprop, bprop and updat."""
    check_matmul(layout, x, weight, feature_axis=axis)
    check_matmul(layout, dy, weight, feature_axis=axis, transposed=True)
    got = blocksparse_weight_grad([(x, dy)], layout, feature_axis=axis)
    results = [
        reference.blocksparse_weight_grad([(x.to(d), dy.to(d))], layout, feature_axis=axis)
        for d in (torch.float32, torch.float64)
    ]
    assert_as_accurate_as_torch(got, *results)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "axes"), [(32, (0, 1)), (16, (0, 1)), (8, (0, 1)), (64, (1,)), (128, (1,))])
def test_barabasi_albert_whole(device, size, axes):
    layout = BlockLayout(barabasi_albert(160, 5), size, z_order=True)
    features = 160 * size
    weight = torch.randn(layout.weight_shape, device=device) * 0.01
    for axis in axes:
        for rows in (256, 8, 1):
            x, dy = (torch.randn((rows, features) if axis else (features, rows), device=device) * 0.1 for _ in range(2))
            check_barabasi_albert(layout, x, dy, weight, axis)


def test_empty(device):
    """No block, no row, no block in a column: zeros, or the bias through the activation."""
    for mask in (torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        layout = BlockLayout(mask, 16)
        weight = torch.randn(layout.weight_shape, device=device)
        bias = torch.randn(48, device=device)
        check_matmul(layout, torch.randn(5, 32, device=device), weight, None, bias, activation="silu")
        assert blocksparse_matmul(torch.randn(0, 32, device=device), weight, layout).shape == (0, 48)
        assert blocksparse_matmul(torch.randn(3, 0, 32, device=device), weight, layout).shape == (3, 0, 48)
        pairs = [(torch.randn(0, 32, device=device), torch.randn(0, 48, device=device))]
        grad = blocksparse_weight_grad(pairs, layout)
        assert_bitwise(grad, torch.zeros(layout.weight_shape, device=device))


def test_not_a_number_passes(device):
    """NaN in a row of x reaches what that row feeds. Nothing else, but for the Hopper kernels of blocks below 64: there
    it may reach the 64 outputs that one product covers, as in a dense layer it reaches all of them."""
    layout = BlockLayout([[1, 0, 0, 0], [1, 1, 1, 1]], 32)
    hopper = device == "cuda" and kernel_capability(0) == 90
    for dtype in FLOATS:
        x = torch.ones(4, 64, dtype=dtype, device=device)
        x[2, 3] = float("nan")
        y = blocksparse_matmul(
            x, torch.ones(layout.weight_shape, dtype=dtype, device=device), layout, activation="relu"
        )
        want = torch.zeros(4, 128, dtype=torch.bool, device=device)
        want[2, :32] = True
        if hopper and dtype != torch.float32:
            want[2, 32:64] = y[2, 32:64].isnan()
        assert_bitwise(y.isnan(), want)


def test_same_call_same_bits(device):
    layout = random_layout(9, 9, 32)
    for dtype in FLOATS:
        x, weight = tensor((300, 288), dtype, device), weights_of(layout, dtype, device)
        assert_bitwise(blocksparse_matmul(x, weight, layout), blocksparse_matmul(x, weight, layout))
        dw = [blocksparse_weight_grad([(x, x)], layout) for _ in range(2)]
        assert_bitwise(*dw)


@pytest.mark.gpu
def test_tf32_is_opt_in():
    layout = random_layout(8, 8, 64, 1.0)
    x, weight = torch.randn(128, 512, device="cuda"), torch.randn(layout.weight_shape, device="cuda")
    exact = reference.blocksparse_matmul(x.double(), weight.double(), layout)
    errors = [float((blocksparse_matmul(x, weight, layout, allow_tf32=t) - exact).abs().max()) for t in (False, True)]
    assert errors[0] < 1e-3 < errors[1] < 0.3
    full = reference.blocksparse_weight_grad([(x.double(), x.double())], layout)
    errors = [
        float((blocksparse_weight_grad([(x, x)], layout, allow_tf32=t) - full).abs().max()) for t in (False, True)
    ]
    assert errors[0] < 1e-3 < errors[1] < 0.3
    for size in (8, 16, 32, 64, 128):
        layout = random_layout(5, 4, size, ragged=4)
        x, weight = torch.randn(70, layout.in_features, device="cuda"), weights_of(layout, torch.float32, "cuda")
        y = blocksparse_matmul(x, weight, layout, allow_tf32=True)
        want = reference.blocksparse_matmul(x, weight.nan_to_num(0.0), layout)
        torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
        back = blocksparse_matmul(y, weight, layout, allow_tf32=True, transposed=True)
        want = reference.blocksparse_matmul(y, weight.nan_to_num(0.0), layout, transposed=True)
        torch.testing.assert_close(back, want, rtol=2e-2, atol=2e-2)
        got = blocksparse_weight_grad([(x, y)], layout, allow_tf32=True)
        torch.testing.assert_close(got, reference.blocksparse_weight_grad([(x, y)], layout), rtol=2e-2, atol=5e-2)
