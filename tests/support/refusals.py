"""What the tests of bad input share."""

import re

import pytest
import torch

from sbnet import BlockGrid

OPS = torch.ops.sbnet
ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
GRID = BlockGrid.cover((16, 24), 8)


def refused(pattern, function, *arguments, **options):
    with pytest.raises(ERRORS) as raised:
        function(*arguments, **options)
    text = str(raised.value)
    assert re.search(pattern, text, re.DOTALL), f"{text!r} does not match {pattern!r}"


def zeros(*shape, device="cpu", dtype=torch.float32):
    return torch.zeros(shape, device=device, dtype=dtype)
