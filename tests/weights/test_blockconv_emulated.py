"""The portable CUDA kernels of convolutions with block-sparse weights, on the CPU: tests/tools/emulator."""

import ctypes

import pytest
import torch

from sbnet import BlockGrid, ConvLayout, reference
from sbnet.ops.weights.conv import lifted, output_sides, to_geometry
from support.blockconv_cases import CASES
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch, random_active, tensor

pytestmark = pytest.mark.slow  # the compiler's time
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Case(ctypes.Structure):  # as in entry_blockconv.cpp
    _fields_ = [
        *fields(ctypes.c_int32, "seed dtype weight_grad transposed activation capacity block_h block_w rows columns"),
        ("geometry", ctypes.c_int32 * 12),
        ("x_shape", ctypes.c_int64 * 10),
        ("y_shape", ctypes.c_int64 * 10),
        *fields(ctypes.c_void_p, "x y weight bias tables indices count"),
    ]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    core = [CSRC / f"core/{name}.cpp" for name in ("weights/conv", "grid", "memory")]
    units = [TOOLS / "entry_blockconv.cpp", *core]
    return emulated_library(tmp_path_factory, "blockconv", [CSRC / "cuda/weights/conv.cu"], units)


def run(library, x, y, **values):
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    numbers = {name: v for name, v in values.items() if not isinstance(v, torch.Tensor)}
    numbers["geometry"] = (ctypes.c_int32 * 12)(*numbers["geometry"])
    for name, t in (("x", x), ("y", y)):
        numbers[f"{name}_shape"] = (ctypes.c_int64 * 10)(*lifted(t).shape, *lifted(t).stride())
    pointers = {name: t.data_ptr() for name, t in {"x": x, "y": y, **tensors}.items()}
    case = Case(dtype=DTYPES[x.dtype], **numbers, **pointers)
    message = ctypes.create_string_buffer(4096)
    assert not library.emulate_blockconv(ctypes.byref(case), message, ctypes.c_int64(4096)), message.value.decode()


def nan_filled(shape, dtype):
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def prepared(name, dtype):
    case = CASES[name]
    layout = ConvLayout(case.BCK, case.kernel)
    geometry = to_geometry("blocksparse_conv", layout, case.stride, case.padding, case.dilation)
    x = tensor((2, layout.in_channels, *case.image), dtype)
    weight = (torch.randn(layout.weights) / 8).to(dtype)
    options = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation}
    return layout, geometry, x, weight, options


@pytest.mark.parametrize("name", CASES)
def test_convolution_its_transpose_and_gradient(emulated, name):
    torch.manual_seed(0)
    for seed, dtype in enumerate(DTYPES):
        layout, geometry, x, w, options = prepared(name, dtype)
        b = tensor((layout.out_channels,), dtype)
        size = output_sides(x, geometry, x.dim() - 2)
        tables, more = layout.on(x.device)[0], {"geometry": geometry, "seed": seed}
        y = nan_filled((2, layout.out_channels, *size), dtype)
        run(emulated, x, y, weight=w, bias=b, tables=tables, activation=1, **more)

        def of(wide, x=x, w=w, b=b, layout=layout, options=options):
            return reference.blocksparse_conv(wide(x), wide(w), layout, wide(b), "relu", **options)

        assert_as_accurate_as_torch(y, of(lambda t: t), of(lambda t: t.double()))

        dy, dx, dw = tensor(y.shape, dtype), nan_filled(x.shape, dtype), nan_filled(w.shape, dtype)
        run(emulated, dy, dx, weight=w, tables=tables, transposed=1, **more)
        run(emulated, x, dy, weight=dw, tables=tables, weight_grad=1, **more)

        def gradients(wide, x=x, w=w, dy=dy, layout=layout, options=options):
            leaves = [wide(t).detach().clone().requires_grad_() for t in (x, w)]
            return torch.autograd.grad(reference.blocksparse_conv(*leaves, layout, **options), leaves, wide(dy))

        for got, torchs, exact in zip((dx, dw), gradients(lambda t: t), gradients(lambda t: t.double()), strict=True):
            assert_as_accurate_as_torch(got, torchs, exact)


def test_on_active_blocks(emulated):
    """Pixels of listed blocks; those past the plane and past the list, and rows that are no block, left alone."""
    torch.manual_seed(1)
    layout, geometry, x, w, options = prepared("2d_uneven", torch.float32)
    size = output_sides(x, geometry, 2)
    active = random_active(BlockGrid.cover(size, 4), 2, 0.6)
    hostile = torch.tensor([[9, 0, 0], [0, -1, 0], [1, 0, 2**30]], dtype=torch.int32)
    listed = active.indices[: int(active.count)]
    indices = torch.cat([listed, hostile, torch.zeros(2, 3, dtype=torch.int32)]).contiguous()
    count = torch.tensor([len(listed) + 3], dtype=torch.int32)
    y = nan_filled((2, layout.out_channels, *size), torch.float32)
    rows, columns = active.grid.bcount
    run(
        emulated, x, y, weight=w, tables=layout.on(x.device)[0], geometry=geometry, seed=2, indices=indices,
        count=count, capacity=len(indices), block_h=4, block_w=4, rows=rows, columns=columns,
    )  # fmt: skip
    mask = active.pixel_mask(size).expand_as(y)
    want = reference.blocksparse_conv(x, w, layout, **options)
    exact = reference.blocksparse_conv(x.double(), w.double(), layout, **options)
    assert_as_accurate_as_torch(y[mask], want[mask], exact[mask])
    assert y[~mask].isnan().all(), "wrote outside the active blocks"


def test_tables_that_name_nothing(emulated):
    """A device's tables are checked by nobody: kernels follow no number out of bounds."""
    layout, geometry, x, w, _ = prepared("2d_uneven", torch.float32)
    size = output_sides(x, geometry, 2)
    for seed in range(20):
        torch.manual_seed(seed)
        for one in (layout, layout.swapped()):
            tables = one.on(x.device)[0].clone()
            tables[torch.randint(10, len(tables), (8,))] = torch.randint(-9, 2**31 - 1, (8,)).int()
            y = torch.zeros(2, layout.out_channels, *size)
            dw = torch.zeros_like(w)
            if one is layout:
                run(emulated, x, y, weight=w, tables=tables, geometry=geometry, seed=seed)
                run(emulated, x, y, weight=dw, tables=tables, geometry=geometry, seed=seed, weight_grad=1)
            else:
                run(emulated, x, y, weight=w, tables=tables, geometry=geometry, seed=seed, transposed=1)
