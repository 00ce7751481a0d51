"""Kernels of block-sparse products on the CPU, Hopper's and the widest of sm_80: their own source, run by
tests/tools/emulator."""

import ctypes
import random

import pytest
import torch
import torch.nn.functional as F

from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch

pytestmark = pytest.mark.slow  # the compiler's time
WIDE, NARROW, WEIGHT_GRAD, WIDE_MMA = range(4)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 5}


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Case(ctypes.Structure):  # as in entry_weights.cpp
    _fields_ = [
        *fields(
            ctypes.c_int32, "kernel multiprocessors seed bfloat16 rows c k block_size blocks transposed activation"
        ),
        *fields(ctypes.c_int32, "cluster images height width block_h block_w capacity"),
        *fields(ctypes.c_int64, "x_stride y_stride"),
        *fields(ctypes.c_void_p, "x y weight bias coords indices count"),
    ]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    core = [
        CSRC / f"core/{name}.cpp" for name in ("weights/plan", "weights/layout", "weights/matmul", "grid", "memory")
    ]
    kernels = [*sorted((CSRC / "cuda/sm90/matmul").glob("*.cu")), CSRC / "cuda/weights/matmul_wide.cu"]
    return emulated_library(tmp_path_factory, "matmul", kernels, [TOOLS / "entry_weights.cpp", *core])


def random_layout(rows: int, columns: int, density: float) -> torch.Tensor:
    """Block coordinates in random order; with a density between 0 and 1, some row and some column without a block."""
    hits = torch.rand(rows, columns) < density
    if 0 < density < 1:
        hits[random.randrange(rows)] = False
        hits[:, random.randrange(columns)] = False
    hits[-1, -1] = True
    coords = hits.nonzero().int()
    return coords[torch.randperm(len(coords))].contiguous()


def dense(coords, weight, rows: int, columns: int):
    """The matrix of blocks, padded to whole blocks."""
    size = weight.shape[-1]
    full = weight.new_zeros(rows, columns, size, size)
    full[tuple(coords.long().T)] = weight
    return full.permute(0, 2, 1, 3).reshape(rows * size, columns * size)


def strided(rows: int, features: int, dtype, fill=None):
    """Rows at a distance that TMA takes, NaN between them."""
    buffer = torch.full((rows, (features + 7) // 8 * 8 + 8), float("nan"), dtype=dtype)
    if fill is not None:
        buffer[:, :features] = fill
    return buffer


def run(library, **values) -> None:
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    numbers = {name: v for name, v in values.items() if not isinstance(v, torch.Tensor)}
    case = Case(**numbers, **{name: t.data_ptr() for name, t in tensors.items()})
    message = ctypes.create_string_buffer(4096)
    result = library.emulate_matmul(ctypes.byref(case), message, ctypes.c_int64(len(message)))
    assert result == 0, message.value.decode() or "not taken"


def multiply(library, kernel, size, *, rows, c, k, density, transposed=False, dtype=torch.float16, activation=None,
             bias=True, multiprocessors=3, seed=1):  # fmt: skip
    block_rows, block_columns = -(-c // size), -(-k // size)
    c, k = (c, block_columns * size) if transposed else (block_rows * size, k)
    coords = random_layout(block_rows, block_columns, density)
    weight = (torch.randn(len(coords), size, size) / 8).to(dtype)
    w = dense(coords, weight, block_rows, block_columns)[:c, :k]
    inputs, outputs = (k, c) if transposed else (c, k)
    if transposed:
        w = w.T
    x = strided(rows, inputs, dtype, torch.randn(rows, inputs))
    y = strided(rows, outputs, dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    run(
        library, kernel=kernel, multiprocessors=multiprocessors, seed=seed, bfloat16=dtype == torch.bfloat16, rows=rows,
        c=c, k=k, block_size=size, blocks=len(coords), transposed=transposed, activation=ACTIVATIONS[activation],
        x=x, y=y, weight=weight, coords=coords, x_stride=x.shape[1], y_stride=y.shape[1],
        **({"bias": b} if bias else {}),
    )  # fmt: skip
    finish = getattr(F, activation) if activation else lambda v: v
    x = x[:, :inputs]

    def result(of):
        return finish(F.linear(of(x), of(w.T.contiguous()), of(b) if bias else None))

    assert_as_accurate_as_torch(y[:, :outputs], result(lambda t: t), result(lambda t: t.double()))
    assert y[:, outputs:].isnan().all(), "wrote between the rows"


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_wide(emulated, size, transposed):
    multiply(emulated, WIDE, size, rows=300, c=200, k=264, density=0.5, transposed=transposed, activation="relu")


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("size", [128, 64])
def test_wide_mma(emulated, size, transposed):
    """Features that fill no block, on either side; output blocks without an entry."""
    for dtype in (torch.float16, torch.bfloat16):
        sizes = {"rows": 300, "c": 200, "k": 328, "density": 0.5, "transposed": transposed, "dtype": dtype}
        multiply(emulated, WIDE_MMA, size, **sizes, activation="gelu")
    multiply(emulated, WIDE_MMA, size, rows=20, c=640, k=128, density=1.0, transposed=transposed, bias=False)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_narrow(emulated, size, transposed):
    multiply(emulated, NARROW, size, rows=3, c=456, k=200, density=0.4, transposed=transposed, activation="gelu")
    multiply(emulated, NARROW, size, rows=70, c=200, k=136, density=0.6, transposed=transposed, dtype=torch.bfloat16)


def test_ctas_of_a_cluster_share_a_tile(emulated):
    for multiprocessors in (4, 9, 16):  # clusters of 1, 2, 4
        multiply(emulated, NARROW, 32, rows=9, c=1024, k=192, density=0.5, multiprocessors=multiprocessors, bias=False)


def test_halves_of_tiles(emulated):
    multiply(emulated, WIDE, 64, rows=600, c=128, k=256, density=0.7, multiprocessors=4)
    multiply(emulated, WIDE, 64, rows=100, c=128, k=256, density=0.7, multiprocessors=4)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize(
    ("size", "kernel"), [(128, WIDE), (64, WIDE), (32, WIDE), (16, WIDE), (128, WIDE_MMA), (64, WIDE_MMA)]
)
def test_active_blocks(emulated, size, kernel, transposed):
    """Pixels of listed blocks, rows past the plane and past the list left alone, indices that are none passed over."""
    c, k, (images, height, width) = 256, 384, (2, 20, 21)
    coords = random_layout(c // size, k // size, 0.4)
    weight = (torch.randn(len(coords), size, size) / 8).half()
    w = dense(coords, weight, c // size, k // size)
    w, inputs, outputs = (w.T, k, c) if transposed else (w, c, k)
    for block_h, block_w in ((8, 8), (16, 16), (4, 32)):
        grid = [images, -(-height // block_h), -(-width // block_w)]
        listed = (torch.rand(grid) < 0.5).nonzero().int()
        hostile = torch.tensor([[9, 0, 0], [0, -1, 0], [1, 0, 2**30]], dtype=torch.int32)
        after = torch.zeros(4, 3, dtype=torch.int32)
        indices = torch.cat([listed, hostile, after]).contiguous()
        count = torch.tensor([len(listed) + len(hostile)], dtype=torch.int32)
        x = strided(images * height * width, inputs, torch.float16, torch.randn(images * height * width, inputs))
        y = strided(images * height * width, outputs, torch.float16)
        run(
            emulated, kernel=kernel, multiprocessors=4, seed=1, rows=len(x), c=c, k=k, block_size=size,
            blocks=len(coords), transposed=transposed, images=images, height=height, width=width, block_h=block_h,
            block_w=block_w, capacity=len(indices), x=x, y=y, weight=weight, coords=coords, indices=indices,
            count=count, x_stride=x.shape[1], y_stride=y.shape[1],
        )  # fmt: skip
        active = torch.zeros(images, grid[1] * block_h, grid[2] * block_w, dtype=torch.bool)
        for n, i, j in listed.tolist():
            active[n, i * block_h : (i + 1) * block_h, j * block_w : (j + 1) * block_w] = True
        active = active[:, :height, :width].flatten()
        assert_as_accurate_as_torch(
            y[active, :outputs], x[active, :inputs] @ w, x[active, :inputs].double() @ w.double()
        )
        assert y[~active].isnan().all(), "wrote outside the active blocks"
        assert y[:, outputs:].isnan().all(), "wrote between the rows"


@pytest.mark.parametrize(("kernel", "rows"), [(WIDE, 520), (NARROW, 200)])
def test_skewed_layouts(emulated, kernel, rows):
    """One group of outputs has nearly all blocks: workers take runs of equal cost."""
    size, hits = 64, torch.rand(30, 12) < 0.02
    hits[:, 5] = True
    coords = hits.nonzero().int().contiguous()
    weight = (torch.randn(len(coords), size, size) / 8).half()
    w = dense(coords, weight, 30, 12)
    x, y = (
        strided(rows, 30 * size, torch.float16, torch.randn(rows, 30 * size)),
        strided(rows, 12 * size, torch.float16),
    )
    run(
        emulated, kernel=kernel, multiprocessors=3, seed=2, rows=rows, c=30 * size, k=12 * size, block_size=size,
        blocks=len(coords), x=x, y=y, weight=weight, coords=coords, x_stride=x.shape[1], y_stride=y.shape[1],
    )  # fmt: skip
    x = x[:, : 30 * size]
    assert_as_accurate_as_torch(y[:, : 12 * size], x @ w, x.double() @ w.double())


@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_weight_gradient(emulated, size):
    rows, c, k = 150, 256 if size == 128 else 200, 328
    block_rows, block_columns = -(-c // size), -(-k // size)
    coords = random_layout(block_rows, block_columns, 0.4)
    x, dy = strided(rows, c, torch.float16, torch.randn(rows, c)), strided(rows, k, torch.float16, torch.randn(rows, k))
    dw = torch.full((len(coords), size, size), float("nan"), dtype=torch.float16)
    run(
        emulated, kernel=WEIGHT_GRAD, multiprocessors=2, seed=3, rows=rows, c=c, k=k, block_size=size,
        blocks=len(coords), x=x, y=dy, weight=dw, coords=coords, x_stride=x.shape[1], y_stride=dy.shape[1],
    )  # fmt: skip
    padding = (0, block_columns * size - k), (0, block_rows * size - c)
    left, right = F.pad(x[:, :c], padding[1]), F.pad(dy[:, :k], padding[0])

    def blocks(of):
        full = of(left).t() @ of(right)
        return full.view(block_rows, size, block_columns, size).transpose(1, 2)[coords.long().unbind(1)]

    assert_as_accurate_as_torch(dw, blocks(lambda t: t), blocks(lambda t: t.double()))
