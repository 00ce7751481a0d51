"""Every op of support/plain_layers.py, in both forms: PyTorch's result on active blocks."""

import pytest
import torch

import sbnet
from sbnet import BlockGrid, reference
from support.helpers import (
    FLOATS,
    assert_as_accurate_as_torch,
    assert_bitwise,
    assert_layout,
    laid_out,
    poison,
    random_active,
    tensor,
)
from support.layer_checks import assert_gradients
from support.plain_layers import PLAIN

CASES = [(op, k) for op, plain in PLAIN.items() for k in range(len(plain.numbers))]


def make(op, k, device, dtype=torch.float32, channels=8, density=0.5, layout="channels_last", block=(3, 4)):
    """x, active blocks of the output's plane, its size, what PyTorch gives there."""
    x = laid_out(tensor((2, channels, 12, 18), dtype, device), layout)
    others = PLAIN[op].further(x)
    dense = PLAIN[op].whole(x, *others, **PLAIN[op].numbers[k])
    active = random_active(BlockGrid.cover(dense.shape[2:], block), 2, density, device)
    return (x, *others), active, dense


def call(op, *tensors, numbers, **more):
    return getattr(sbnet, op)(*tensors, **numbers, **more)


@pytest.mark.parametrize("layout", ["contiguous", "channel_slice", "permuted", "channels_last"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("op", "k"), CASES)
def test_both_forms(device, op, k, dtype, layout):
    plain, numbers = PLAIN[op], PLAIN[op].numbers[k]
    for channels, block in ((8, (3, 4)), (72, 64), (8, (5, 32))):
        tensors, active, dense = make(op, k, device, dtype, channels, 0.4, layout, block)
        inside = active.pixel_mask(dense.shape[2:]).expand_as(dense)
        got, zero = call(op, *tensors, active, numbers=numbers), torch.zeros((), dtype=dtype, device=device)
        want = torch.where(inside, dense, zero)
        assert_bitwise(getattr(reference, op)(*tensors, active, **numbers), want, "the definition")
        if plain.copies:
            assert_bitwise(got, want)
        else:
            exact = torch.where(inside, plain.whole(*(t.double() for t in tensors), **numbers), 0.0)
            assert_as_accurate_as_torch(got, want, exact)
        if layout in ("contiguous", "channels_last"):
            assert_layout(got, layout == "channels_last")
        into = poison(dense.shape, dtype, device, layout)
        assert call(f"{op}_", *tensors, active, into, numbers=numbers) is None
        assert_bitwise(into, torch.where(inside, got, torch.full_like(got, float("nan"))), "in place")


@pytest.mark.parametrize(("op", "k"), CASES)
def test_gradients(device, op, k):
    plain, numbers = PLAIN[op], PLAIN[op].numbers[k]
    tensors, active, dense = make(op, k, device)
    inside = active.pixel_mask(dense.shape[2:])
    assert_gradients(
        lambda *leaves: call(op, *leaves, active, numbers=numbers),
        lambda *leaves: torch.where(inside, plain.whole(*leaves, **numbers), 0.0),
        tensors,
    )
