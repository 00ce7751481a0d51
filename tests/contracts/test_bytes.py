"""Tensors of float8 and int8: ops that are not made for them refuse them by name; copies keep their bits."""

import re

import pytest
import torch

from support.op_samples import sampled_ops, samples_of

BYTES = [torch.float8_e4m3fn, torch.int8]
COPIES = ("sparse_fill", "sparse_fill_", "sparse_gather", "sparse_scatter", "sparse_scatter_")
INTO = {"sparse_fill_": 0, "sparse_scatter_": 4}  # which argument is written
PACKERS = ("pack_attention_blocks", "pack_blocksparse_filters", "pack_conv_weight")  # other places, the same elements


def as_bytes(argument, dtype):
    if isinstance(argument, torch.Tensor) and argument.is_floating_point():
        return argument.detach().to(dtype)
    if isinstance(argument, (list, tuple)):
        return type(argument)(as_bytes(item, dtype) for item in argument)
    return argument


def tensors(arguments):
    for argument in arguments:
        yield from tensors(argument) if isinstance(argument, (list, tuple)) else [argument]


def called(op, arguments):
    """What it gives, or what its error says."""
    try:
        return op(*arguments), None
    except (RuntimeError, TypeError, ValueError) as error:
        return None, str(error)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", sampled_ops())
def test_bytes_are_refused_by_name_or_copied(device, name, dtype):
    op = getattr(torch.ops.sbnet, name)
    for arguments in samples_of(name, device):
        given = [as_bytes(argument, dtype) for argument in arguments]
        if not any(isinstance(t, torch.Tensor) and t.dtype == dtype for t in tensors(given)):
            continue  # of lists alone
        got, refusal = called(op, given)
        if refusal is not None:  # copies, too: -1.5 is no int8, and what is added is no copy
            assert re.match(r"sbnet::\w+: \w+: .*(float|expected )", refusal)
            continue
        assert name in COPIES + PACKERS
        if name in COPIES:
            wide = [as_bytes(argument, torch.float32) for argument in given]
            want = op(*wide)
            if want is None:
                got, want = given[INTO[name]], wide[INTO[name]]
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)
