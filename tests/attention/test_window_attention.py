"""window_attention_ against each window by itself in plain PyTorch, on the pixels that are active."""

import pytest
import torch

from sbnet.ops.attention.window_attention import takes, window_attention_
from support.helpers import FLOATS, assert_bitwise
from support.window_cases import Case, squares

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@dtypes
@pytest.mark.parametrize("dim", [8, 24, 32, 64, 80, 128])
def test_windows_and_a_bias_of_heads(device, dtype, dim):
    torch.manual_seed(0)
    Case(device, dtype, (28, 21), squares(28, 21, 7), dim=dim, bias=torch.randn(1, 2, 49, 49)).check()


@dtypes
def test_shifted_windows_with_a_bias_of_each(device, dtype):
    torch.manual_seed(0)
    rows = squares(24, 32, 8, 4)
    bias = torch.randn(len(rows), 3, 64, 64)
    bias[:, :, :, 40:] = torch.where(torch.rand(len(rows), 1, 64, 24) > 0.5, -torch.inf, bias[:, :, :, 40:])
    Case(device, dtype, (24, 32), rows, heads=3, bias=bias, density=0.6).check()


@dtypes
@pytest.mark.parametrize("dim", [24, 32, 64])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_many_windows(device, dtype, dim, density):
    """On CUDA some for each CTA, which stays and has the bias in shared memory."""
    torch.manual_seed(0)
    size = (42, 31) if device == "cpu" else (196, 185)
    rows = squares(*size, 7, pad=4)
    bias = torch.randn(len(rows), 3, 49, 49)
    Case(device, dtype, size, rows, heads=3, dim=dim, bias=bias, density=density).check()


@dtypes
@pytest.mark.parametrize("fills", [False, True])
def test_keys_of_padding_exist(device, dtype, fills):
    torch.manual_seed(0)
    given = {"k_fill": torch.randn(64), "v_fill": torch.randn(64)} if fills else {}
    Case(device, dtype, (14, 10), squares(14, 10, 7, pad=4), **given).check()


@dtypes
def test_cosines_times_a_number_a_head(device, dtype):
    torch.manual_seed(0)
    Case(device, dtype, (16, 16), squares(16, 16, 8), scales=torch.tensor([4.0, 9.0]), normalize=1e-5).check()


@dtypes
@pytest.mark.parametrize(
    ("size", "side", "density"), [((28, 28), 14, 0.5), ((20, 36), None, 0.3), ((64, 64), None, 0.1)]
)
def test_tables_of_rows_and_columns(device, dtype, size, side, density):
    """As SAM has them, in windows and of a whole plane, whose active keys take several tiles."""
    torch.manual_seed(0)
    rows = squares(*size, side) if side else torch.arange(1, size[0] * size[1] + 1)[None]
    high, wide = (side, side) if side else size
    tables = {"row_table": torch.randn(high, high, 32) / 5, "column_table": torch.randn(wide, wide, 32) / 5}
    Case(device, dtype, size, rows, density=density, **tables).check()


@dtypes
@pytest.mark.parametrize("size", [(24, 40), (96, 112)])
def test_keys_of_another_plane(device, dtype, size):
    """Of all pixels to those of a smaller plane, whose values are wider. The larger plane has too many rows to list."""
    torch.manual_seed(0)
    rows, keys = (torch.arange(1, h * w + 1)[None] for h, w in (size, (9, 11)))
    Case(device, dtype, size, rows, keys=keys, other=(9, 11), value_dim=48, density=0.2).check()


@dtypes
@pytest.mark.parametrize(("biased", "size"), [(False, (16, 24)), (True, (16, 24)), (False, (96, 112))])
def test_rows_and_keys_that_were_packed(device, dtype, biased, size):
    torch.manual_seed(0)
    pixels = size[0] * size[1]
    bias = {"bias": torch.randn(1, 2, pixels, pixels)} if biased else {}
    rows = torch.arange(1, pixels + 1)[None]
    keys, other = (rows, None) if pixels < 999 else (torch.arange(1, 100)[None], (9, 11))
    case = Case(device, dtype, size, rows, keys=keys, other=other, density=0.3, listed=True, **bias)
    if other:
        del case.options["key_order"], case.options["key_lengths"]
    case.check()


@dtypes
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_nothing_and_everything(device, dtype, density):
    torch.manual_seed(0)
    Case(device, dtype, (16, 24), squares(16, 24, 8), density=density, bias=torch.randn(1, 2, 64, 64)).check()


def test_no_active_key_gives_zeros(device):
    dtype = torch.float16
    rows, keys = torch.arange(1, 65)[None], torch.arange(1, 5)[None]
    case = Case(device, dtype, (8, 8), rows, keys=keys, other=(2, 2), density=1.0)
    case.options["active_keys"] = torch.zeros(2, 4, dtype=torch.bool, device=device)
    assert not case.run().any()


@dtypes
def test_nan_of_a_key_reaches_its_window_alone(device, dtype):
    torch.manual_seed(0)
    case = Case(device, dtype, (8, 16), squares(8, 16, 8), density=1.0)
    case.k[0, :, 3, 3] = torch.nan
    got = case.run()
    assert got[0, :, :, :8].isnan().all()
    assert not got[0, :, :, 8:].isnan().any()
    assert not got[1].isnan().any()


def test_what_points_past_the_plane_is_padding(device):
    """No index, however bad, is followed."""
    torch.manual_seed(0)
    dtype = torch.float16
    case = Case(device, dtype, (14, 10), squares(14, 10, 7, pad=4))
    want = case.run()
    case.rows = case.keys = torch.where(
        case.rows == 0, torch.tensor([2**40, -5, 141])[torch.randint(3, case.rows.shape)], case.rows
    )
    assert_bitwise(case.run(), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 3), (12, 20), (36, 60), (136, 200)])
def test_a_cpu_takes_heads_of_any_width(dtype, dim, value_dim):
    torch.manual_seed(0)
    bias = torch.randn(1, 2, 49, 49)
    Case("cpu", dtype, (28, 21), squares(28, 21, 7), dim=dim, value_dim=value_dim, bias=bias).check()
    tables = {name: torch.randn(7, 7, dim) / dim**0.5 for name in ("row_table", "column_table")}
    Case("cpu", dtype, (28, 21), squares(28, 21, 7), dim=dim, value_dim=value_dim, **tables).check()


def test_what_cudas_kernels_take():
    assert takes(torch.float16, (0, 32, 64), 32, 32, 49)
    assert takes(torch.float32, (0, 32, 64), 32, 32, 49)
    assert not takes(torch.float64, (0, 32, 64), 32, 32, 49)
    assert not takes(torch.float16, (4, 32, 64), 32, 32, 49)
    assert not takes(torch.float16, (0, 32, 64), 36, 32, 49)
    assert not takes(torch.float16, (0, 32, 64), 32, 32, 9000)
    assert not takes(torch.float16, (0, 80, 160), 80, 80, 4096, (64, 64))
    assert takes(torch.float32, (0, 80, 160), 80, 80, 4096, (64, 64))
    assert not takes(torch.float32, (0, 80, 160), 80, 80, 4096, (257, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"heads": 9}, "q: expected 288 channels from 8 on"),
        (lambda c: {"dim": 0}, "heads, dim, value_dim"),
        (lambda c: {"bias": torch.zeros(3, 2, 49, 49, dtype=torch.float16)}, "bias: expected one or 12 windows"),
        (lambda c: {"bias": torch.zeros(1, 2, 49, 48, dtype=torch.float16)}, "bias: expected 4802"),
        (lambda c: {"k_fill": torch.zeros(64)}, "k_fill: dtype: expected float16"),
        (lambda c: {"row_table": torch.zeros(7, 7, 32, dtype=torch.float16)}, "row_table, column_table: expected both"),
        (lambda c: {"scale": float("nan")}, "scale"),
    ],
)  # fmt: skip
def test_errors(change, message):
    case = Case("cpu", torch.float16, (28, 21), squares(28, 21, 7))
    given = {"starts": case.starts, "heads": 2, "dim": 32, "value_dim": 32, "scale": 1.0} | change(case)
    with pytest.raises(RuntimeError, match=message):
        window_attention_(case.q, case.k, case.v, case.rows, case.keys, case.active, case.out, **given)


def test_it_does_not_write_over_what_it_reads():
    case = Case("cpu", torch.float16, (28, 21), squares(28, 21, 7))
    out = case.q[:, :64]
    with pytest.raises(RuntimeError, match="out: expected memory of its own"):
        window_attention_(
            case.q, case.k, case.v, case.rows, case.keys, case.active, out, starts=case.starts, heads=2, dim=32,
            value_dim=32, scale=1.0,
        )  # fmt: skip
