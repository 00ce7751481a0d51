"""sparse_conv2d on the CPU: instruction sets, runs of pixels, threads."""

import pytest
import torch
from conv_cases import check, make
from helpers import assert_bitwise, run_python

from sbnet import sparse_conv2d


# ---- instruction sets of the CPU
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "amx"])
def test_instruction_sets(isa):
    """SBNET_ISA lowers the choice that the processor allows."""
    code = """
import itertools, os, torch
import conv_cases as t
from sbnet import _library
levels = ["generic", "avx2", "avx512", "amx", "amx-fp16"]
used, wanted = (levels.index(v) for v in (_library.cpu_isa(), os.environ["SBNET_ISA"]))
assert used <= wanted + (wanted == 3), (used, wanted)
torch.manual_seed(0)
for dtype, (c, k, r, s, g) in itertools.product(
    [torch.float32, torch.float16, torch.bfloat16],
    [(16, 16, 3, 1, 1), (64, 40, 3, 1, 1), (17, 33, 3, 2, 1), (3, 5, 5, 1, 1), (64, 64, 1, 1, 1), (1, 1, 3, 1, 1),
     (24, 24, 3, 1, 24), (9, 18, 5, 2, 9), (12, 20, 3, 1, 4)]):
    for activation in ("relu", "silu", "gelu"):
        t.check("cpu", dtype=dtype, channels=c, filters=k, kernel=r, stride=s, groups=g, padding=r // 2,
                activation=activation, residual="channel_slice", layout="channel_slice")
        t.check("cpu", dtype=dtype, channels=c, filters=k, kernel=r, stride=s, groups=g, padding=r // 2, block=(5, 7),
                activation=activation, layout="contiguous", out_layout="plane_slice")
print("done")
"""
    result = run_python(code, SBNET_ISA=isa)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"


@pytest.mark.parametrize("block", [8, 10, (4, 17), 64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_runs_of_pixels(dtype, block):
    """Matrix units take pixels of a row in runs and channels in whole products: sizes that fill neither."""
    for channels, filters, kernel, stride, dilation, groups in (
        (20, 16, 3, 1, 1, 1),
        (40, 33, 3, 2, 1, 1),
        (70, 48, 1, 2, 1, 1),
        (33, 7, 5, 1, 2, 1),
        (72, 66, 3, 1, 1, 3),
        (24, 20, 9, 1, 1, 1),
        (130, 16, 2, 3, 3, 1),
    ):
        case = {"channels": channels, "filters": filters, "kernel": kernel, "stride": stride, "dilation": dilation}
        case |= {"groups": groups, "padding": kernel // 2, "block": block, "size": (27, 35), "dtype": dtype}
        check("cpu", residual="channel_slice", **case)
        check("cpu", layout="contiguous", out_layout="channel_slice", **case)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_bits_with_any_number_of_cpu_threads(threads):
    before = torch.get_num_threads()
    try:
        for channels, groups in ((24, 1), (24, 24), (3, 1)):
            x, weight, bias, active, options = make(
                "cpu", channels=channels, filters=24 if channels == 24 else 5, groups=groups
            )
            torch.set_num_threads(2)
            want = sparse_conv2d(x, weight, bias, active, **options)
            torch.set_num_threads(threads)
            assert_bitwise(sparse_conv2d(x, weight, bias, active, **options), want)
    finally:
        torch.set_num_threads(before)
