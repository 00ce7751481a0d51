"""The Hopper kernels of block-sparse products: sizes at which they change their ways (tiles, halves of tiles, clusters,
skew, many rows). test_matmul.py has the op's cases on every device.
"""

import pytest
import torch
import torch.nn.functional as F

from sbnet import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet._library import kernel_capability
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, captured

pytestmark = pytest.mark.gpu
SIZES = [128, 64, 32, 16, 8]


@pytest.fixture(autouse=True)
def _hopper():
    if kernel_capability(0) != 90:
        pytest.skip("needs Hopper's kernels")


def random_layout(rows: int, columns: int, size: int, density: float, **features) -> BlockLayout:
    mask = torch.rand(rows, columns) < density
    mask[0, 0] = True
    return BlockLayout(mask, size, **features)


def layouts(size: int) -> dict[str, BlockLayout]:
    def n(features: int) -> int:
        return max(features // size, 1)

    skewed = torch.rand(n(1024), n(4096)) < 0.02
    skewed[:, 0] = skewed[:, n(4096) // 2] = True
    holes = torch.rand(n(1024), n(1024)) < 0.5
    holes[:, 1::2] = False
    holes[n(1024) // 2] = False
    odd = {"in_features": (n(640) + 1) * size, "out_features": (n(1536) + 1) * size - (8 if size > 8 else 0)}
    return {
        "random": random_layout(n(640) + 1, n(1536) + 1, size, 0.3, **odd),
        "full": BlockLayout(torch.ones(n(512), n(768)), size),
        "thin": random_layout(n(2048), n(1024), size, 0.03),
        "skewed": BlockLayout(skewed, size),
        "holes": BlockLayout(holes, size),
    }


def weights(layout: BlockLayout, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(layout.weight_shape, device="cuda") / 8).to(dtype)


def poisoned(f):
    """What f allocates holds NaN before: results that a kernel leaves out show."""
    for elements in (2**16, 2**20, 2**22, 2**24):
        torch.full((elements,), torch.nan, dtype=torch.float16, device="cuda")
    return f()


def check(layout, weight, x, transposed=False, bias=None, activation=None, gate=None):
    dense = layout.to_dense(weight if gate is None else (weight * gate[:, None, None]).to(weight.dtype))
    dense = dense[: layout.in_features, : layout.out_features]
    dense = (dense if transposed else dense.t()).contiguous()  # [out, in]
    finish = getattr(F, activation) if activation else lambda v: v
    y = poisoned(lambda: blocksparse_matmul(x, weight, layout, gate, bias, activation, transposed=transposed))
    torchs = finish(F.linear(x, dense, bias))
    exact = finish(F.linear(x.double(), dense.double(), None if bias is None else bias.double()))
    what = f"{layout} rows {x.shape[0]} transposed {transposed}"
    assert_as_accurate_as_torch(y, torchs, exact, what)
    again = blocksparse_matmul(x, weight, layout, gate, bias, activation, transposed=transposed)
    assert_bitwise(again, y, what + ", run again")


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_products(size, dtype, transposed):
    for layout in layouts(size).values():
        weight = weights(layout, dtype)
        features = layout.out_features if transposed else layout.in_features
        for rows in (1, 3, 16, 17, 64, 65, 130, 300, 1000):
            check(layout, weight, torch.randn(rows, features, device="cuda").to(dtype), transposed)


@pytest.mark.parametrize("size", SIZES)
def test_many_rows(size):
    """Several tiles for each CTA, in bands of rows."""
    layout = random_layout(2048 // size, 2048 // size, size, 0.2)
    for rows in (4096, 8111):
        check(layout, weights(layout, torch.float16), torch.randn(rows, 2048, device="cuda").half())


@pytest.mark.parametrize("size", SIZES)
def test_few_outputs(size):
    """The CTAs of a cluster share one tile out."""
    for outputs in (128, 384, 1024):
        layout = random_layout(4096 // size, outputs // size, size, 0.4)
        for rows in (1, 16, 40):
            check(layout, weights(layout, torch.bfloat16), torch.randn(rows, 4096, device="cuda").bfloat16())


@pytest.mark.parametrize("rows", [3, 16, 33, 64])
def test_few_rows_of_blocks_of_8(rows):
    """Input that stays in shared memory and input that goes by in chunks; one warp to an output block and several."""
    for inputs, outputs in ((64, 64), (4096, 520), (8200, 2048), (12000, 64), (320, 40000)):
        layout = random_layout(inputs // 8, outputs // 8, 8, 0.2)
        weight = weights(layout, torch.float16)
        check(layout, weight, torch.randn(rows, inputs, device="cuda").half())
        check(layout, weight, torch.randn(rows, outputs, device="cuda").half(), transposed=True)


def test_infinite_weights_of_blocks_of_8():
    """An infinity in a block that shares a step with blocks of another chunk is infinity still, and no NaN."""
    layout = random_layout(1025, 12, 8, 0.5)
    weight = weights(layout, torch.float16)
    x = torch.rand(50, 8200, device="cuda").half() + 0.5
    column = layout.coords[:, 1].to("cuda") == 5
    weight[column] = torch.inf
    y = blocksparse_matmul(x, weight, layout)
    assert bool((y[:, 40:48] == torch.inf).all())
    assert bool(y[:, :40].isfinite().all())
    assert bool(y[:, 48:].isfinite().all())


@pytest.mark.parametrize("activation", [None, "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"])
def test_epilogue(activation):
    layout = random_layout(8, 9, 32, 0.5)
    bias, weight = torch.randn(288, device="cuda").half(), weights(layout, torch.float16)
    for rows in (5, 300):
        x = torch.randn(rows, 256, device="cuda").half()
        check(layout, weight, x, bias=bias, activation=activation)
        x[1] = torch.nan
        y = blocksparse_matmul(x, weight, layout, None, bias.float(), activation)
        assert bool(y[1].isnan().any())
        assert not bool(y[2:].isnan().any())


@pytest.mark.parametrize("size", [64, 8])
def test_gates(size):
    layout = random_layout(8, 8, size, 0.6)
    gate = torch.rand(layout.blocks, device="cuda")
    gate[::3] = 0
    weight = weights(layout, torch.float16)
    for rows in (5, 300):
        x = torch.randn(rows, 8 * size, device="cuda").half()
        check(layout, weight, x, gate=gate)
        broken = weight.clone()
        broken[::3] = torch.nan
        assert_bitwise(blocksparse_matmul(x, broken, layout, gate), blocksparse_matmul(x, weight, layout, gate))


def test_strides():
    layout = random_layout(8, 8, 32, 0.5)
    weight = weights(layout, torch.float16)
    for rows in (10, 500):
        wide = torch.randn(2 * rows, 256 + 64, device="cuda").half()
        check(layout, weight, wide[::2, 8 : 8 + 256])
        check(layout, weight, wide[:rows, 3 : 3 + 256])  # not for TMA: another kernel
        check(layout, weight, torch.randn(256, rows, device="cuda").half().t())


def test_graph():
    layout = random_layout(16, 16, 32, 0.3)
    weight = weights(layout, torch.float16).requires_grad_()
    x = torch.randn(700, 512, device="cuda").half().requires_grad_()

    def step():
        y = blocksparse_matmul(x, weight, layout, activation="relu")
        return y, *torch.autograd.grad(y.float().square().sum(), (x, weight))

    graph, results = captured(step)
    with torch.no_grad():
        x.normal_(), weight.normal_()
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert_bitwise(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_weight_gradient(size, dtype):
    for name, layout in layouts(size).items():
        for rows in ([1], [72], [1000], [300, 5, 64]):
            x = [torch.randn(r, layout.in_features, device="cuda").to(dtype) for r in rows]
            dy = [torch.randn(r, layout.out_features, device="cuda").to(dtype) for r in rows]
            pairs = list(zip(x, dy, strict=True))
            got = poisoned(lambda pairs=pairs, layout=layout: blocksparse_weight_grad(pairs, layout))
            beyond = layout.block_columns * size - layout.out_features
            left, right = torch.cat(x), F.pad(torch.cat(dy), (0, beyond))

            def blocks(of, left=left, right=right, layout=layout):
                full = of(left).t() @ of(right)
                full = full.view(layout.block_rows, size, layout.block_columns, size).transpose(1, 2)
                rows, columns = layout.coords.long().to("cuda").unbind(1)
                return full[rows, columns]

            what = f"{name}, {layout}, rows {rows}"
            assert_as_accurate_as_torch(got, blocks(lambda t: t), blocks(lambda t: t.double()), what)
            assert_bitwise(blocksparse_weight_grad(pairs, layout), got, what)
