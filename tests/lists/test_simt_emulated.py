"""CUDA kernels that every GPU runs, on the CPU: their own source in tests/tools/emulator, warps in random order."""

import ctypes
import random

import pytest
import torch

import sbnet
from sbnet import BlockGrid, Window, conv_output_size, reference
from sbnet.ops.masked.norm import norm_whole
from sbnet.ops.masked.rearrange import rearrange_whole
from sbnet.reference.frames import yuv_to_rgb_
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, laid_out, poison, random_active, tensor
from support.motion import assert_motion, motion_background, motion_frame

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3, torch.bool: 4, torch.uint8: 5}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SEEDS = range(6)
MAPS = [
    {"up": 2}, {"down": 3}, {"groups": 6}, {"pad": (1, 2, 3, 0), "value": -1.5}, {"up": 2, "groups": 3},
    {"up": 3, "down": 2, "groups": 4, "pad": (1, -3, -2, 5), "value": 7.0},
]  # fmt: skip


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    masked = [f"masked/{name}" for name in ("fill", "pool", "adaptive_pool", "norm", "rearrange", "squeeze_excite")]
    cuda = ["capability", "masked/copies"]  # whose core is a header
    lists = [f"lists/{name}" for name in ("reduce_mask", "fringe", "pyramid", "motion_mask")]
    kernels = ["frames/yuv_to_rgb", *lists, *masked, "attention/layout"]
    core = ["grid", "layer", "memory", "settled", "through", "window", *kernels]
    return emulated_library(
        tmp_path_factory, "simt", [CSRC / f"cuda/{name}.cu" for name in [*kernels, *cuda]],
        [TOOLS / "entry_simt.cpp", *(CSRC / f"core/{name}.cpp" for name in core)],
    )  # fmt: skip


def run(library, name: str, seed: int, *arguments) -> None:
    library.emulate_seed(seed)
    library.sbnet_settle_inputs(seed % 2)  # some kernels then read lists and weights before they wait
    message, given = ctypes.create_string_buffer(4096), []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            given.append(ctypes.c_void_p(value.data_ptr()))
        elif isinstance(value, list):
            long = any(isinstance(v, list) for v in value)  # [[...]]: 64 bits
            numbers = value[0] if long else value
            given.append(((ctypes.c_int64 if long else ctypes.c_int32) * len(numbers))(*numbers))
        else:
            given.append(value)
    assert not getattr(library, f"emulate_{name}")(*given, message, ctypes.c_int64(4096)), message.value.decode()


def shape_of(x: torch.Tensor) -> list[list[int]]:
    return [[*x.shape, *x.stride()]]


def int32(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=torch.int32)


@pytest.mark.parametrize("seed", SEEDS)
def test_reduce_mask(emulated, seed):
    rng = random.Random(seed)
    for dtype, average, case in zip(DTYPES, [False, True] * 3, range(6), strict=True):
        torch.manual_seed(100 * seed + case)
        size = rng.randint(1, 2), rng.randint(1, 70), rng.choice([rng.randint(1, 90), 64])
        grid = rng.choice([
            BlockGrid.cover(size[1:], rng.choice([1, 4, 16])), BlockGrid((5, 7), (3, 4), (-2, -3), (9, 11)),
            BlockGrid((40, 48), (16, 16), (0, -16), (2, 4)), BlockGrid.cover(size[1:], (2, 64)),
        ])  # fmt: skip
        mask = (torch.rand(size) > 0.97).to(dtype)
        blocks = size[0] * grid.bcount[0] * grid.bcount[1]
        capacity = rng.choice([blocks, blocks + 5, blocks // 2])
        tol = 0.02 if average else 0.5
        got = [int32(capacity, 3), int32(1), int32(1), int32(size[0], *grid.bcount)]
        run(
            emulated, "reduce_mask", seed, mask, DTYPES[dtype], shape_of(mask), grid.numbers(), ctypes.c_double(tol),
            int(average), ctypes.c_int64(capacity), *got,
        )  # fmt: skip
        want = reference.reduce_mask(mask, grid, tol, average, capacity)
        for mine, name in zip(got, ("indices", "count", "total", "block_map"), strict=True):
            assert_bitwise(mine, getattr(want, name), f"{name}: {dtype}, {size}, {grid}, {average}, {capacity}")


@pytest.mark.parametrize("seed", SEEDS)
def test_fringe(emulated, seed):
    rng = random.Random(seed)
    for case in range(4):
        torch.manual_seed(100 * seed + case)
        size, batch = (rng.randint(9, 60), rng.randint(9, 90)), rng.randint(1, 2)
        k, s, d = rng.choice([1, 3, 5]), rng.choice([1, 2]), rng.choice([1, 2])
        p = k // 2 * d
        out = conv_output_size(size, k, s, p, d)
        producer = random_active(BlockGrid.cover(size, rng.choice([4, 8])), batch, 0.2)
        consumer = random_active(BlockGrid.cover(out, rng.choice([4, (3, 1)])), batch, 0.2)
        capacity = rng.choice([batch * size[0] * size[1], 40])
        pixels, count = int32(capacity), int32(1)
        window = [s, s, 1, 1, -p, -p, d * (k - 1) - p, d * (k - 1) - p, d, d]
        run(
            emulated, "fringe", seed, producer.block_map, consumer.block_map, [[batch, *size, *out]],
            producer.grid.numbers(), consumer.grid.numbers(), window, ctypes.c_int64(capacity), pixels, count,
        )  # fmt: skip
        want = reference.fringe(producer, consumer, size, k, s, p, d, capacity=capacity)
        assert_bitwise(count, want.count)
        assert_bitwise(pixels, want.pixels)


def pyramid(
    emulated,
    seed: int,
    mask: torch.Tensor,
    planes: list,
    fringes: list,
    margin: int = 0,
    want: torch.Tensor | None = None,
) -> None:
    """Bitwise what the reference lists; `planes` and `fringes` as `mask_pyramid` takes them, of Windows. want: another
    mask that the lists are of."""
    want = reference.mask_pyramid(mask if want is None else want, planes, 0.5, fringes, margin)
    sides = [v for height, width, block in planes for v in (height, width, *block)]
    reads = []
    for plane, consumers in fringes:
        reads += [plane, len(consumers), *(v for to, window in consumers for v in (to, *window.numbers()))]
    lists = [t for a in want.planes for t in (a.indices, a.count, a.total, a.block_map)]
    lists += [t for f in want.fringes for t in (f.pixels, f.count)]
    got = [int32(*t.shape) for t in lists]
    run(
        emulated, "pyramid", seed, mask, DTYPES[mask.dtype], shape_of(mask), ctypes.c_double(0.5),
        ctypes.c_int64(margin), [sides], ctypes.c_int64(len(sides)), [reads], ctypes.c_int64(len(reads)),
        [[t.data_ptr() for t in got]],
    )  # fmt: skip
    for k, (mine, theirs) in enumerate(zip(got, lists, strict=True)):
        assert_bitwise(mine, theirs, f"list {k} of {tuple(mask.shape)}, {planes}, {fringes}, {margin}")


@pytest.mark.parametrize("seed", SEEDS)
def test_pyramid(emulated, seed):
    """Planes of one stride and of another, smaller and larger than the mask, whose blocks cut it into all strips."""
    rng = random.Random(seed)
    for dtype in DTYPES:
        torch.manual_seed(100 * seed + DTYPES[dtype])
        size = rng.randint(1, 80), rng.choice([rng.randint(1, 90), 64])
        planes = [
            (rng.randint(1, 60), rng.randint(1, 70), rng.choice([(1, 1), (4, 4), (8, 3), (16, 64)])) for _ in range(2)
        ]
        planes += [(-(-size[0] // 2), -(-size[1] // 2), (8, 8)), (*size, rng.choice([(16, 16), (50, 40)]))]
        fringes = [(3, [(2, Window.conv(3, 2, 1)), (3, Window.conv(3, 1, 1))]), (2, [(2, Window.conv(3, 1, 1))])]
        mask = (torch.rand(rng.randint(1, 2), *size) > rng.choice([0.9, 0.99, 0.999])).to(dtype)
        pyramid(emulated, seed, mask, planes, fringes, rng.choice([0, 1, 5, 16, 100]))


@pytest.mark.parametrize(
    ("planes", "fringes", "consumers"), [(12, 20, 20), (13, 1, 1), (1, 21, 21), (1, 20, 21), (40, 50, 70)]
)
def test_pyramids_that_just_fit_into_a_launch_and_just_do_not(emulated, planes, fringes, consumers):
    torch.manual_seed(planes)
    sides = [(12 + k, 40 - k % 9, (4, 8)) for k in range(planes)]
    reads = [(k % planes, [(k % planes, Window.conv(3, 1, 1))]) for k in range(fringes)]
    for k in range(consumers - fringes):  # dilated ones: the fringe is wider for them
        reads[k][1].append((reads[k][0], Window.conv(3, 1, 2, 2)))
    pyramid(emulated, 0, torch.rand(1, 24, 48) > 0.98, sides, reads)


@pytest.mark.parametrize(("height", "plane"), [(6, (12, 4, (7, 2))), (200, (200, 4, (100, 2))), (90, (60, 4, (20, 4)))])
def test_a_row_is_in_no_strip_but_its_own(emulated, height, plane):
    pyramid(emulated, 0, torch.eye(height, dtype=torch.bool)[:: height // 30 + 1, :, None].repeat(1, 1, 4), [plane], [])


@pytest.mark.parametrize("apart", [0, 4])
def test_a_mask_that_lies_elsewhere(emulated, apart):
    """Told of one place, with another's address in memory: aligned for words of 16 bytes or not."""
    torch.manual_seed(apart)
    room = torch.zeros(apart + 2 * 24 * 64, dtype=torch.uint8)
    mask = (torch.rand(2, 24, 64) > 0.98).byte()
    decoy, read = 1 - mask, room[apart:].view(2, 24, 64)
    read.copy_(mask)
    address = torch.tensor([read.data_ptr()])
    tell, at = emulated.sbnet_read_through, ctypes.c_void_p(decoy.data_ptr())
    assert tell(at, ctypes.c_void_p(address.data_ptr()))
    try:
        pyramid(emulated, 0, decoy, [(24, 64, (8, 8))], [], want=mask)
        assert emulated.sbnet_reads_through(at) == 1
    finally:
        tell(at, None)
    pyramid(emulated, 0, decoy, [(24, 64, (8, 8))], [])
    assert emulated.sbnet_reads_through(at) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_yuv_to_rgb(emulated, seed):
    """Rows that are whole numbers of quads of pixels and such that are not; borders; all ways that a picture lies."""
    rng = random.Random(seed)
    for case, dtype in enumerate([torch.uint8, *FLOATS] * 3):
        high, wide = rng.choice([(6, 16), (34, 40), (4, 6), (2, 44)])
        planes = torch.randint(0, 256, (2, high // 2 * 3, wide), dtype=torch.uint8)
        ways = [rng.randint(0, 1), *(rng.randint(0, 1) if case > 3 else 0 for _ in range(3))]
        look, size = [76309, 13074, 16525, -3209, -6660, 16, *ways], [wide, high] if ways[1] else [high, wide]
        made = torch.full((2, size[0] + case % 3, size[1] + rng.choice([0, 4]), 3), 77, dtype=dtype).movedim(3, 1)
        run(emulated, "yuv_to_rgb", seed, planes, [list(planes.shape)], look, made, shape_of(made), DTYPES[dtype])
        yuv_to_rgb_(planes, look, wanted := torch.empty_like(made))
        assert_bitwise(made, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_motion_mask(emulated, seed):
    """Frames of all dtypes and layouts, several tiles; one image a cut, the other none; in place and not."""
    rng = random.Random(seed)
    for case, dtype in enumerate([torch.uint8, *FLOATS]):
        torch.manual_seed(100 * seed + case)
        size, channels, smooth = (rng.randint(1, 70), rng.randint(1, 70)), rng.choice([1, 3, 4]), rng.choice([1, 5, 31])
        x = motion_frame((2, channels, *size), dtype, rng.choice(["contiguous", "channels_last", "channel_slice"]))
        background = motion_background(x, smooth)
        mask, given = torch.full((2, *size), 7, dtype=torch.uint8), background.clone()
        following = given if case % 2 else torch.full_like(given, torch.nan)
        run(
            emulated, "motion_mask", seed, x, shape_of(x), DTYPES[dtype], given, following, mask,
            torch.tensor([0.05, 0.25, 0.5]), ctypes.c_int64(smooth),
        )  # fmt: skip
        assert set(mask.unique().tolist()) <= {0, 1}
        assert_motion(mask.bool(), following, x, background, 0.05, 0.25, 0.5, smooth)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies(emulated, seed):
    """Of any size, from and to any address, none, and nothing beside them."""
    rng = random.Random(seed)
    given, to = torch.randint(1, 255, (200_000,), dtype=torch.uint8), torch.zeros(200_000, dtype=torch.uint8)
    want, spans, at = to.clone(), [], 0
    for _ in range(rng.randint(1, 8)):
        size = rng.choice([0, 1, 15, 16, 4096, 16384, 16385, rng.randint(1, 24_000)])
        begin, at = rng.choice([rng.randint(0, 170_000), 16 * rng.randint(0, 10_000)]), at + rng.choice([0, 3, 16])
        want[at : at + size] = given[begin : begin + size]
        spans += [begin, at, size]
        at += size
    run(emulated, "copies", seed, given, to, torch.tensor(spans), ctypes.c_int32(len(spans) // 3))
    assert torch.equal(to, want)
    run(emulated, "copies", seed, given, to, torch.tensor([5, 8, -1, 0, 100, 9]), ctypes.c_int32(2))
    assert to[8:16].view(torch.int64).item() == given.data_ptr() + 5
    assert torch.equal(to[100:109], given[:9])


@pytest.mark.parametrize("seed", SEEDS)
def test_fill(emulated, seed):
    rng = random.Random(seed)
    for dtype, layout in zip(FLOATS * 2, ["contiguous", "channels_last", "channel_slice"] * 2, strict=True):
        size, channels = (rng.randint(3, 30), rng.randint(3, 40)), rng.choice([8, 16, 5])
        x = laid_out(tensor((2, channels, *size), dtype), layout)
        active = random_active(BlockGrid.cover(size, rng.choice([4, (3, 8)])), 2, 0.4)
        y = poison(x.shape, dtype, "cpu", layout)
        run(
            emulated, "fill", seed, x, shape_of(x), y, shape_of(y), DTYPES[dtype], active.block_map,
            active.grid.numbers(), ctypes.c_float(1.5),
        )  # fmt: skip
        assert_bitwise(y, reference.sparse_fill(x, active, 1.5))


@pytest.mark.parametrize("seed", SEEDS)
def test_pool(emulated, seed):
    rng = random.Random(seed)
    for dtype, kind in zip(FLOATS * 2, ["avg", "avg", "avg", "max", "max", "max"], strict=True):
        size, channels = (rng.randint(6, 24), rng.randint(6, 30)), rng.choice([8, 16, 5])
        k, s = rng.choice([2, 3]), rng.choice([1, 2])
        p, ceil, include = rng.randint(0, k // 2), rng.random() < 0.5, rng.random() < 0.5
        x = laid_out(tensor((2, channels, *size), dtype), rng.choice(["contiguous", "channels_last"]))
        out = sbnet.pool_output_size(size, k, s, p, 1, ceil)
        active = random_active(BlockGrid.cover(out, 4), 2, 0.4)
        edge = reference.fringe(active, active, out, 3, 1, 1)
        y = poison((2, channels, *out), dtype, "cpu", rng.choice(["contiguous", "channels_last"]))
        run(
            emulated, "pool", seed, x, shape_of(x), y, shape_of(y), DTYPES[dtype], active.indices, active.count,
            ctypes.c_int64(active.capacity), active.grid.numbers(), edge.pixels, edge.count,
            ctypes.c_int64(len(edge.pixels)), [int(kind == "avg"), k, k, s, s, p, p, 1, 1, int(ceil), int(include)],
        )  # fmt: skip
        options = {"count_include_pad": include} if kind == "avg" else {}
        want = getattr(reference, f"sparse_{kind}_pool2d")(x.float(), active, k, s, p, ceil_mode=ceil, **options)
        inside = active.pixel_mask(out).expand_as(y)
        near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(y[inside].float(), want[inside], **near)
        left_alone_but(y, edge, inside)


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_pool(emulated, seed):
    rng = random.Random(seed)
    for dtype, kind in zip(FLOATS * 2, ["avg", "avg", "avg", "max", "max", "max"], strict=True):
        size, channels = (rng.randint(6, 60), rng.randint(6, 50)), rng.choice([8, 16, 5, 80])
        x = laid_out(tensor((2, channels, *size), dtype), rng.choice(["contiguous", "channels_last", "channel_slice"]))
        active = random_active(BlockGrid.cover(size, rng.choice([4, (3, 16)])), 2, rng.choice([0.1, 0.6]))
        out, count_inactive = rng.choice([(1, 1), (3, 2), (7, 7)]), rng.random() < 0.5
        y = poison((2, channels, *out), dtype, "cpu", rng.choice(["contiguous", "channels_last"]))
        run(
            emulated, "adaptive_pool", seed, x, shape_of(x), y, shape_of(y), DTYPES[dtype], active.block_map,
            active.grid.numbers(), int(kind == "max"), int(count_inactive),
        )  # fmt: skip
        definition = getattr(reference, f"sparse_adaptive_{kind}_pool2d")
        want = definition(x.double(), active, out, count_inactive=count_inactive)
        theirs = definition(x.float(), active, out, count_inactive=count_inactive).to(dtype)
        assert_as_accurate_as_torch(y, theirs, want)


@pytest.mark.parametrize("seed", SEEDS)
def test_squeeze_excite(emulated, seed):
    rng = random.Random(seed)
    for dtype in FLOATS:
        size = rng.randint(6, 40), rng.randint(6, 50)
        channels, hidden = rng.choice([8, 5, 640]), rng.choice([8, 3, 40])
        x = laid_out(tensor((2, channels, *size), dtype), rng.choice(["contiguous", "channels_last"]))
        active = random_active(BlockGrid.cover(size, rng.choice([4, (3, 16)])), 2, 0.5)
        weight1, bias1 = tensor((hidden, channels), dtype) / channels**0.5, tensor((hidden,), dtype)
        weight2, bias2 = tensor((channels, hidden), dtype) / hidden**0.5, tensor((channels,), dtype)
        x, scaled = torch.where(active.pixel_mask(size), x, torch.nan), poison(x.shape, dtype, "cpu", "channels_last")
        for out in (None, scaled):
            y = poison((2, channels, 1, 1), dtype, "cpu", "contiguous")
            run(
                emulated, "squeeze_excite", seed, x, shape_of(x), y, shape_of(y), DTYPES[dtype], weight1, bias1,
                weight2, bias2, ctypes.c_int64(hidden), active.block_map, active.grid.numbers(), out, shape_of(scaled),
            )  # fmt: skip
        assert_bitwise(scaled, torch.where(active.pixel_mask(size), x * y, poison(x.shape, dtype, "cpu")))
        given, steps = (weight1, bias1, weight2, bias2), {"activation": "silu", "gate": "hardsigmoid"}
        exact = reference.sparse_squeeze_excite2d(x.double(), active, *(t.double() for t in given), **steps)
        assert_as_accurate_as_torch(y, reference.sparse_squeeze_excite2d(x, active, *given, **steps), exact)


NORM_KINDS = ["group", "layer", "softmax", "log_softmax", "response"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", NORM_KINDS)
def test_norm(emulated, kind, seed):
    rng = random.Random(seed)
    for dtype in FLOATS:
        size = rng.randint(6, 40), rng.randint(6, 30)
        channels = rng.choice([8, 16, 6, 80, *([1288, 1536, 2048] if kind == "layer" else [])])
        x = laid_out(tensor((2, channels, *size), dtype) + 3, rng.choice(["contiguous", "channels_last"]))
        active = random_active(BlockGrid.cover(size, rng.choice([4, (3, 8)])), 2, 0.4)
        edge = reference.fringe(active, active, size, 3, 1, 1)
        y = poison(x.shape, dtype, "cpu", rng.choice(["contiguous", "channels_last"]))
        weight, bias = (tensor((channels,), dtype) for _ in range(2)) if "softmax" not in kind else (None, None)
        groups, eps = (2 if kind == "group" else 1), 1e-5
        run(
            emulated, "norm", seed, x, shape_of(x), y, shape_of(y), DTYPES[dtype], weight, bias, active.indices,
            active.count, active.block_map, ctypes.c_int64(active.capacity), active.grid.numbers(), edge.pixels,
            edge.count, ctypes.c_int64(len(edge.pixels)),
            NORM_KINDS.index(kind), groups, ctypes.c_float(eps),
        )  # fmt: skip
        inside = active.pixel_mask(size)
        want, theirs = (
            norm_whole(*(None if t is None else t.to(d) for t in (x, weight, bias)), inside, kind, groups, eps)
            for d in (torch.float64, torch.float32)
        )
        inside = inside.expand_as(y)
        assert_as_accurate_as_torch(y[inside], theirs.to(dtype)[inside], want[inside])
        left_alone_but(y, edge, inside)


@pytest.mark.parametrize("seed", SEEDS)
def test_rearrange(emulated, seed):
    rng = random.Random(seed)
    for dtype, how in zip(FLOATS * 2, MAPS, strict=True):
        channels = rng.choice([72, 36])
        x = laid_out(tensor((2, channels, 12, 18), dtype), rng.choice(["contiguous", "channels_last"]))
        plain = rearrange_whole(x, **how)
        out = tuple(plain.shape[2:])
        active = random_active(BlockGrid.cover(out, rng.choice([4, (3, 8)])), 2, 0.4)
        edge = reference.fringe(active, active, out, 3, 1, 1)
        y = poison(plain.shape, dtype, "cpu", rng.choice(["contiguous", "channels_last"]))
        numbers = [how.get("up", 1), how.get("down", 1), how.get("groups", 1), *how.get("pad", (0, 0, 0, 0))]
        run(
            emulated, "rearrange", seed, x, shape_of(x), y, shape_of(y), DTYPES[dtype], active.indices, active.count,
            ctypes.c_int64(active.capacity), active.grid.numbers(), edge.pixels, edge.count,
            ctypes.c_int64(len(edge.pixels)), numbers, ctypes.c_float(how.get("value", 0.0)),
        )  # fmt: skip
        inside = active.pixel_mask(out).expand_as(y)
        assert_bitwise(y[inside], plain[inside])
        left_alone_but(y, edge, inside)


def left_alone_but(y: torch.Tensor, edge: sbnet.Fringe, inside: torch.Tensor) -> None:
    """The fringe's pixels are zero, and what is neither they nor inside is poison still."""
    zeros = torch.zeros(y[:, 0].numel(), dtype=torch.bool)
    zeros[edge.pixels[: int(edge.count)].long()] = True
    zeros = zeros.view(y.shape[0], 1, *y.shape[2:]).expand_as(y)
    assert not y[zeros].any()
    assert bool(y[~zeros & ~inside].isnan().all())


@pytest.mark.parametrize("seed", SEEDS)
def test_pack_attention_blocks(emulated, seed):
    """Rows of bytes that are aligned and rows that are not, tiles that are cut off; any byte but 0 counts."""
    rng = random.Random(seed)
    for planes, rows, columns in ((2, 300, 264), (1, 5, 8), (3, rng.randint(1, 270), rng.randint(1, 270))):
        blocks = torch.randint(0, 256, (planes, rows, columns), dtype=torch.uint8) * (torch.rand(rows, columns) < 0.4)
        got = int32(planes, rows, -(-columns // 32)), int32(planes, columns, -(-rows // 32))
        run(emulated, "pack_attention_blocks", seed, blocks, *got, ctypes.c_int64(planes), rows, columns)
        want = torch.ops.sbnet.pack_attention_blocks(blocks[None] != 0)
        for mine, theirs in zip(got, want, strict=True):
            assert_bitwise(mine, theirs[0])
