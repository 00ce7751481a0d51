"""The instruction sets that SBNET_ISA names, as parameters of tests."""

import pytest

from sbnet import _library

ISAS = ("generic", "avx2", "avx512", "amx", "amx-fp16")
HERE = ISAS[: ISAS.index(_library.cpu_isa()) + 1]


def instruction_sets(*names: str) -> list:
    """Those that this processor lacks are skipped: they would repeat the best that it has."""
    lacks = pytest.mark.skip(reason="an instruction set that this processor lacks")
    return [pytest.param(name, marks=[] if name in HERE else [lacks]) for name in names]
