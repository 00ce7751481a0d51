"""CUDA kernels of convolutions with block-sparse weights, portable and Hopper, on the CPU: tests/tools/emulator."""

import ctypes
import random

import pytest
import torch

from sbnet import BlockGrid, ConvLayout, reference
from sbnet.ops.weights.conv import lifted
from sbnet.ops.weights.conv_geometry import output_sides, parts, to_geometry
from sbnet.ops.weights.conv_layout import HEADER, covering_mask
from support.blockconv_cases import B8, CASES
from support.emulator import CSRC, emulated_library, units_of
from support.helpers import assert_as_accurate_as_torch, random_active, tensor

pytestmark = pytest.mark.slow  # the compiler's time
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Case(ctypes.Structure):  # as in entry_blockconv.cpp
    _fields_ = [
        *fields(
            ctypes.c_int32, "seed dtype weight_grad transposed activation capacity block_h block_w rows columns hopper"
        ),
        ("geometry", ctypes.c_int32 * 12),
        ("x_shape", ctypes.c_int64 * 10),
        ("y_shape", ctypes.c_int64 * 10),
        *fields(ctypes.c_void_p, "x y weight bias tables indices count"),
    ]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    core = "weights/conv", "weights/conv_pieces", "masked/conv_select", "masked/conv_query"
    units = units_of("entry_blockconv", *core)
    kernels = [CSRC / "cuda/weights/conv.cu", CSRC / "cuda/sm90/conv/conv_blocksparse.cu"]
    return emulated_library(tmp_path_factory, "blockconv", kernels, units)


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
    """A device's tables are not checked: kernels follow no number out of bounds."""
    layout, geometry, x, w, _ = prepared("2d_uneven", torch.float32)
    size = output_sides(x, geometry, 2)
    for seed in range(20):
        torch.manual_seed(seed)
        for one in (layout, layout.swapped()):
            tables = one.on(x.device)[0].clone()
            tables[torch.randint(HEADER, len(tables), (8,))] = torch.randint(-9, 2**31 - 1, (8,)).int()
            y = torch.zeros(2, layout.out_channels, *size)
            dw = torch.zeros_like(w)
            if one is layout:
                run(emulated, x, y, weight=w, tables=tables, geometry=geometry, seed=seed)
                run(emulated, x, y, weight=dw, tables=tables, geometry=geometry, seed=seed, weight_grad=1)
            else:
                run(emulated, x, y, weight=w, tables=tables, geometry=geometry, seed=seed, transposed=1)


def some_grid(rng: random.Random) -> dict:
    """A small convolution that Hopper's kernel takes, forward or transposed, of whole planes or active blocks."""
    size = rng.choice([16, 16, 32, 32, 64, 128])
    most = max(1, 160 // size)
    transposed, side = rng.random() < 0.4, rng.choice([9, 12, 16, 19, 26])
    return {
        "size": size, "blocks": (rng.randint(1, most), rng.randint(1, most)), "density": rng.choice([0, 0.3, 0.6, 1]),
        "kernel": rng.choice([(1, 1), (3, 3), (3, 3), (1, 5), (4, 3)]), "image": (side, rng.randint(7, 30)),
        "stride": 1 if transposed else rng.choice([1, 1, 2]), "dilation": rng.choice([1, 1, 2]),
        "padding": rng.choice([0, 1, 1, (2, 1)]), "transposed": transposed,
        "activation": rng.choice(["none", "relu", "silu"]), "dtype": rng.choice([torch.float16, torch.bfloat16]),
        "block": None if transposed else rng.choice([None, None, 6, 8, (16, 5)]),
    }  # fmt: skip


class Sample:
    """Tensors of such a convolution."""

    def __init__(
        self, size, blocks, density, kernel, image, stride, dilation, padding, transposed, dtype, layout=None, **_
    ):
        rows, columns = blocks
        mask = covering_mask(torch.rand(rows, columns), density)
        self.layout = layout or ConvLayout.from_mask(mask, rows * size, columns * size, size, kernel)
        self.options = {"stride": stride, "padding": padding, "dilation": dilation}
        self.geometry = to_geometry("blocksparse_conv", self.layout, **self.options)
        wide = torch.empty(2, self.layout.in_channels, *(side + 8 for side in image))
        self.shapes = [tuple(wide.shape), (2, self.layout.out_channels, *output_sides(wide, self.geometry, 2))]
        if transposed:
            self.shapes.reverse()
        last = {"memory_format": torch.channels_last}
        self.x = tensor(self.shapes[0], dtype).contiguous(**last)
        self.y = nan_filled(self.shapes[1], dtype).contiguous(**last)
        self.w = (torch.randn(self.layout.weights) / 8).to(dtype)
        self.b = tensor((self.shapes[1][1],), dtype)
        self.transposed = transposed

    def run(self, library, seed, **values):
        run(
            library, self.x, self.y, weight=self.w, bias=self.b, geometry=self.geometry, hopper=3, seed=seed,
            transposed=int(self.transposed), **{"tables": self.layout.on(self.x.device)[0], **values},
        )  # fmt: skip

    def expected(self, dtype, activation="none"):
        x, w, b = (t.to(dtype) for t in (self.x, self.w, self.b))
        f = torch.nn.functional
        _, *geometry = (part[1:] for part in parts(self.geometry))
        dense = self.layout.to_dense(w)
        if self.transposed:
            stride, padding, dilation = geometry
            y = f.conv_transpose2d(x, dense, b, stride, padding, dilation=dilation)
        else:
            y = f.conv2d(x, dense, b, *geometry)
        return {"none": lambda t: t, "relu": f.relu, "silu": f.silu}[activation](y)


ACTIVATIONS = {"none": 0, "relu": 1, "silu": 4}


@pytest.mark.parametrize("seed", range(24))
def test_hopper(emulated, seed):
    """Squares of a grid, at any density; both directions; planes and active blocks."""
    rng = random.Random(f"hopper {seed}")
    torch.manual_seed(seed)
    case = some_grid(rng)
    sample, more, inside = Sample(**case), {}, torch.tensor(True)
    if case["block"]:
        grid = BlockGrid.cover(sample.shapes[1][2:], case["block"])
        active = random_active(grid, 2, rng.choice([0.0, 0.3, 1.0]))
        more = {"indices": active.indices, "count": active.count, "capacity": len(active.indices)}
        for name, value in (("block_h", grid.bsize[0]), ("block_w", grid.bsize[1])):
            more[name] = value
        more["rows"], more["columns"] = grid.bcount
        inside = active.pixel_mask(sample.shapes[1][2:])
    sample.run(emulated, seed, activation=ACTIVATIONS[case["activation"]], **more)
    inside = inside.expand(sample.y.shape)
    assert sample.y[~inside].isnan().all(), "wrote outside the active blocks"
    want, exact = (sample.expected(t, case["activation"]) for t in (case["dtype"], torch.float64))
    assert_as_accurate_as_torch(sample.y[inside], want[inside], exact[inside])


GRID = {
    "size": 16, "blocks": (5, 6), "density": 0.3, "kernel": (3, 3), "image": (9, 9), "stride": 1, "dilation": 1,
    "padding": 1, "transposed": False, "dtype": torch.float16,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_hopper_few_blocks_of_32(emulated, seed):
    """conv_blocks.cuh: pairs of tiles, odd numbers of them, every cut."""
    rng = random.Random(f"few {seed}")
    torch.manual_seed(seed)
    kernel, dilation = rng.choice([((3, 3), 1), ((3, 1), 1), ((1, 3), 2), ((3, 3), 3)])
    case = GRID | {
        "size": 32, "blocks": (3, 4), "density": 0.3, "kernel": kernel,
        "image": (rng.randint(4, 20), rng.randint(4, 24)), "padding": rng.choice([0, dilation]), "dilation": dilation,
        "transposed": bool(seed & 1), "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip
    sample = Sample(**case)
    assert sample.layout.density < 0.5, "the general kernel's"
    activation = rng.choice(sorted(ACTIVATIONS))
    sample.run(emulated, seed // 2, activation=ACTIVATIONS[activation])
    want, exact = (sample.expected(t, activation) for t in (case["dtype"], torch.float64))
    assert_as_accurate_as_torch(sample.y, want, exact)


@pytest.mark.parametrize(("size", "density"), [(16, 0.1), (16, 0.9), (32, 0.1), (32, 0.9)])
def test_hopper_infinity_stays_with_its_blocks(emulated, size, density):
    """Absent blocks are zeros to WGMMA, but an infinity does not become NaN where no block has it."""
    torch.manual_seed(3)
    mask = torch.zeros(5, 6, dtype=torch.bool)
    mask[0, 0] = True  # inputs 0 feed outputs 0 alone
    mask[1:, 1:] = covering_mask(torch.rand(4, 5), density)
    sample = Sample(**GRID, layout=ConvLayout.from_mask(mask, 5 * size, 6 * size, size, (3, 3)))
    sample.x[:, 3] = float("inf")
    sample.run(emulated, 1)
    assert not sample.y[:, :size].isfinite().any()
    sample.x[:, 3] = 0.0
    exact, want = (sample.expected(t)[:, size:] for t in (torch.float64, torch.float16))
    assert_as_accurate_as_torch(sample.y[:, size:], want, exact)


def test_hopper_declines(emulated):
    """What the portable kernel keeps, and why."""

    def declined(why, sample):
        with pytest.raises(AssertionError, match=f"declined: .*{why}"):
            sample.run(emulated, 0)

    square, between = (range(16), range(16)), (range(8, 24), range(16, 32))
    for BCK in (B8, [square, square], [square, between], [(range(16), range(48))], [(range(8), range(8))]):
        declined("squares of a grid", Sample(**GRID, layout=ConvLayout(BCK, (3, 3))))
    declined("another stride", Sample(**GRID | {"stride": 2, "transposed": True}))
    declined("few pixels", Sample(**GRID | {"image": (0, 0), "padding": 0, "kernel": (4, 4)}))
    declined("float32 without allow_tf32", Sample(**GRID | {"dtype": torch.float32}))
    planes = Sample(**GRID)
    planes.x = planes.x.contiguous()
    declined("not adjacent", planes)


def test_hopper_tables_that_name_nothing(emulated):
    """Pieces out of bounds are clamped: nothing is read beyond what is there, and the kernel ends."""
    sample = Sample(**GRID)
    tables = sample.layout.on(sample.x.device)[0]
    for seed in range(4):
        torch.manual_seed(seed)
        hostile = tables.clone()
        hostile[torch.randint(len(tables) // 2, len(tables), (20,))] = torch.randint(-9, 2**31 - 1, (20,)).int()
        sample.run(emulated, seed, tables=hostile)
