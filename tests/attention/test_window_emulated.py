"""Attention in windows and the rows of tokens as CUDA runs them, on the CPU, by tests/tools/emulator."""

import ctypes
import functools

import pytest
import torch

from sbnet import BlockGrid
from sbnet.ops.masked.token_rows import pack_tokens
from support.attention_structs import Case as AttentionCase
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, random_active
from support.window_cases import Case, squares

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    files = (
        "attention/window_attention", "attention/window_attention_simt", "masked/token_rows", "sm90/attention/listed"
    )  # fmt: skip
    kernels = [CSRC / f"cuda/{name}.cu" for name in files]
    names = (
        "grid", "layer", "memory", "settled", "window", "attention/window_attention", "attention/attention",
        "attention/layout", "masked/token_rows",
    )  # fmt: skip
    core = [CSRC / f"core/{name}.cpp" for name in names]
    return emulated_library(tmp_path_factory, "window", kernels, [TOOLS / "entry_window.cpp", *core])


def run(function, *arguments, seed: int = 1) -> None:
    message = ctypes.create_string_buffer(4096)
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    assert not function(*given, ctypes.c_int64(seed), message, ctypes.c_int64(4096)), message.value.decode()


def int64s(*numbers: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def window_attention(
    library, q, k, v, rows, keys, active, out, *, starts, heads, dim, value_dim, scale, normalize=0.0,
    multiprocessors=0, seed=1, **given,
) -> None:  # fmt: skip
    bias, high, wide = (given.get(name) for name in ("bias", "row_table", "column_table"))
    views = [n for t in (q, k, v, out) for n in (*t.shape, *t.stride())]
    sides = [0 if t is None else len(t) for t in (bias, high, wide)]
    numbers = int64s(
        DTYPES[q.dtype], *views, *active.grid.numbers(), *starts, heads, dim, value_dim, *rows.shape, keys.shape[1],
        *sides,
    )  # fmt: skip
    names = (
        "active_keys", "bias", "row_table", "column_table", "scales", "k_fill", "v_fill", "row_order", "row_lengths",
        "key_order", "key_lengths",
    )  # fmt: skip
    tensors = [q, k, v, out, rows.contiguous(), keys.contiguous(), active.block_map, *map(given.get, names)]
    pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
    run(
        library.emulate_window_attention, pointers, numbers, ctypes.c_float(scale), ctypes.c_float(normalize),
        ctypes.c_int64(multiprocessors), seed=seed,
    )  # fmt: skip


def check(library, *arguments, **options) -> None:
    torch.manual_seed(0)
    case = Case("cpu", *arguments, **options)
    case.call = lambda *given, **named: window_attention(library, *given, **named)
    case.check()


@dtypes
@pytest.mark.parametrize("dim", [24, 32, 80])
def test_windows_and_a_bias_of_heads(emulated, dtype, dim):
    check(emulated, dtype, (14, 21), squares(14, 21, 7), dim=dim, bias=torch.randn(1, 2, 49, 49), batch=1)


def test_a_bias_of_each_window_beside_padding(emulated):
    rows = squares(16, 20, 8, 4, pad=4)
    fills = {"k_fill": torch.randn(64), "v_fill": torch.randn(64)}
    for dtype in (torch.float16, torch.float32):
        check(emulated, dtype, (16, 20), rows, bias=torch.randn(len(rows), 2, 64, 64), **fills)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cosines_times_a_number_a_head(emulated, dtype):
    check(emulated, dtype, (8, 16), squares(8, 16, 8), scales=torch.tensor([4.0, 9.0]), normalize=1e-5)


@dtypes
def test_tables_of_rows_and_columns(emulated, dtype):
    rows = torch.arange(1, 12 * 20 + 1)[None]
    tables = {"row_table": torch.randn(12, 12, 32) / 5, "column_table": torch.randn(20, 20, 32) / 5}
    check(emulated, dtype, (12, 20), rows, density=0.6, batch=1, **tables)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(24, 40), (92, 90)])
def test_keys_of_another_plane(emulated, size, dtype):
    rows, keys = (torch.arange(1, h * w + 1)[None] for h, w in (size, (9, 11)))
    density = 0.2 if size[0] < 90 else 0.02
    check(emulated, dtype, size, rows, keys=keys, other=(9, 11), value_dim=48, density=density, batch=1)


@dtypes
@pytest.mark.parametrize("biased", [False, True])
def test_listed_rows_and_keys(emulated, dtype, biased):
    """As they are packed once, in place of a scan in every CTA."""
    bias = {"bias": torch.randn(1, 2, 384, 384)} if biased else {}
    rows = torch.arange(1, 385)[None]
    check(emulated, dtype, (16, 24), rows, listed=True, density=0.6, **bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 99])
@pytest.mark.parametrize(("dim", "value_dim", "size", "density"), [(64, 64, (20, 36), 0.7), (24, 40, (9, 11), 0.3)])
def test_listed_rows_and_keys_on_hopper(emulated, dtype, multiprocessors, dim, value_dim, size, density):
    """By warpgroups that gather for themselves, two a CTA where rows are many, and one."""
    rows = torch.arange(1, size[0] * size[1] + 1)[None]
    for seed in range(2):
        torch.manual_seed(seed)
        case = Case(
            "cpu", dtype, size, rows, dim=dim, value_dim=value_dim, density=density, listed=True, batch=2 - seed
        )
        case.call = functools.partial(window_attention, emulated, multiprocessors=multiprocessors, seed=seed + 1)
        case.check()


@pytest.mark.parametrize("multiprocessors", [1, 99])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.bfloat16, 32)], ids=str)
def test_packed_tokens_attend_on_hopper(emulated, multiprocessors, dtype, dim):
    """Up to each image's length, heads of keys shared by two, beside each other or apart."""
    lengths = [torch.tensor(n, dtype=torch.int32) for n in ([150, 0, 61, 999], [133, 200, 1, -3])]
    q, k, v = (torch.randn(4, n, h, dim).to(dtype).transpose(1, 2) for n, h in ((150, 4), (200, 2), (200, 2)))
    for b, (some, every) in enumerate(zip(*lengths, strict=True)):
        q[b, :, max(some, 0) :] = torch.nan
        k[b, :, max(every, 0) :] = v[b, :, max(every, 0) :] = torch.nan
    for given in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        case = AttentionCase(*given, q_lengths=lengths[0], k_lengths=lengths[1])
        params = case.params()
        run(emulated.emulate_packed_attention, ctypes.byref(params), ctypes.c_int64(multiprocessors))
        case.q_lengths, case.k_lengths = (n.clamp(0, t.shape[2]) for n, t in zip(lengths, (q, k), strict=True))
        out, lse = case.reference(torch.float64)
        assert_as_accurate_as_torch(case.out, case.reference(dtype)[0], out)
        torch.testing.assert_close(case.lse.double(), lse, atol=2e-3, rtol=0)


def test_packed_tokens_of_many_images_on_hopper(emulated):
    """More than a warp has lanes; none, some or all of each image's tokens are there."""
    lengths = torch.randint(0, 91, (40,), dtype=torch.int32)
    q, k, v = (torch.randn(40, 90, 2, 64).half().transpose(1, 2) for _ in range(3))
    case = AttentionCase(q, k, v, q_lengths=lengths, k_lengths=lengths)
    run(emulated.emulate_packed_attention, ctypes.byref(case.params()), ctypes.c_int64(99))
    out, lse = case.reference(torch.float64)
    assert_as_accurate_as_torch(case.out, case.reference(torch.float16)[0], out)
    torch.testing.assert_close(case.lse.double(), lse, atol=2e-3, rtol=0)


def test_no_listed_key_gives_zeros_on_hopper(emulated):
    case = Case("cpu", torch.float16, (8, 8), torch.arange(1, 65)[None], listed=True, density=1.0)
    case.options["key_lengths"] = torch.zeros(2, dtype=torch.int32)
    case.call = functools.partial(window_attention, emulated, multiprocessors=1)
    assert not case.run().any()


def test_what_points_past_the_plane_is_padding(emulated):
    for dtype in DTYPES:
        torch.manual_seed(0)
        fills = {"k_fill": torch.randn(64), "v_fill": torch.randn(64)}
        case = Case("cpu", dtype, (14, 10), squares(14, 10, 7, pad=4), **fills)
        case.call = lambda *given, **named: window_attention(emulated, *given, **named)
        want = case.run()
        bad = torch.tensor([2**40, -5, 141, -(2**40)])[torch.randint(4, case.rows.shape)]
        case.rows = case.keys = torch.where(case.rows == 0, bad, case.rows)
        assert_bitwise(case.run(), want)


@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (3, 2)])
def test_packed_tokens(emulated, prefix, suffix):
    for size, grid in (
        ((13, 21), BlockGrid((6, 5), (4, 3), (-1, -2), (4, 8))),
        ((41, 50), BlockGrid.cover((41, 50), 4)),  # 21 rows a CTA
    ):
        active = random_active(grid, 2, 0.3, "cpu")
        want = pack_tokens(active, size, prefix, suffix, prefix + size[0] * size[1] + suffix + 9)
        got = [torch.full_like(t, 1) for t in want]
        numbers = int64s(*grid.numbers(), 2, *size, prefix, suffix, want.order.shape[1])
        run(emulated.emulate_pack_tokens, active.block_map, numbers, *got)
        for ours, theirs, name in zip(got, want, want._fields, strict=True):
            assert_bitwise(ours, theirs, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [7, 40])
def test_moved_rows(emulated, dtype, channels):
    x, table = torch.randn(2, 24, channels).to(dtype), torch.randn(1, 5, channels).to(dtype)
    index, mask = torch.randint(24, (2, 31)), torch.rand(2, 31) > 0.5
    lengths = torch.tensor([23, 6], dtype=torch.int32)

    def moved(start, *given):
        out = torch.full((2, 31, channels), torch.nan, dtype=dtype)
        sizes = [int64s(*t.shape[:2], *t.stride()[:2]) for t in (x, table, out)]
        held, by, up_to, there = given
        run(
            emulated.emulate_move_rows, x, sizes[0], held, sizes[1], out, sizes[2],
            int64s(channels, x.element_size(), start), by, up_to, there,
        )  # fmt: skip
        return out

    got = moved(0, None, index, lengths, None)
    for n, length in enumerate(lengths.tolist()):
        assert_bitwise(got[n, :length], x[n][index[n, :length]])
        assert got[n, length:].isnan().all()
    picked = torch.stack([x[n][index[n]] for n in range(2)])
    assert_bitwise(moved(0, None, index, None, mask), torch.where(mask[:, :, None], picked, 0))
    got = moved(2, table, None, lengths, None)
    for n, length in enumerate(lengths.tolist()):
        assert_bitwise(got[n, :length], torch.cat([table[0, :2], x[n, : length - 5], table[0, 2:]]))
