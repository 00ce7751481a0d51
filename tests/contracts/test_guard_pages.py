"""No CPU op touches memory beyond its tensors: samples of all ops beside pages that end the process when touched."""

import signal

import pytest

from support.helpers import run_python
from support.instruction_sets import instruction_sets

SIDES = ["end", "start"]


def calls_that_end_the_process(side: str, of: str, **environment: str) -> list[str]:
    """Their names. After one that does, a new process makes the others."""
    found: list[tuple[str, str]] = []
    while len(found) < 20:
        arguments = [side, of, *(number for number, _ in found)]
        code = f"import sys; sys.argv[1:] = {arguments!r}; from support.guard_pages import main; main()"
        ran = run_python(code, **environment)
        last = ran.stdout.splitlines()[-1] if ran.stdout else "nothing: "
        if ran.returncode == 0:
            assert last == "all"
            break
        assert ran.returncode in (-signal.SIGSEGV, -signal.SIGBUS), f"{last}: {ran.stderr}"
        number, _, what = last.partition(" ")
        found.append((number, what))
    return [what for _, what in found]


@pytest.mark.parametrize("side", SIDES)
def test_no_op_reads_or_writes_beyond_its_tensors(side):
    assert calls_that_end_the_process(side, "ops") == []


@pytest.mark.slow
@pytest.mark.parametrize("isa", instruction_sets("generic", "avx2", "avx512"))
@pytest.mark.parametrize("side", SIDES)
def test_no_op_does_so_by_any_instruction_set(side, isa):
    assert calls_that_end_the_process(side, "ops", SBNET_ISA=isa) == []


@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_wrong_call_ends_the_process(rounds):
    """Lists of garbage, arguments of other sizes, dtypes and values: each call runs or raises."""
    ran = run_python(f"import sys; sys.argv[1:] = ['0', '{rounds}']; from support.wrong_calls import main; main()")
    assert ran.returncode == 0, f"{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}"
    last, done, refused = ran.stdout.splitlines()[-1].split()
    assert last == "all"
    assert min(int(done), int(refused)) > 20 * rounds


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_no_planned_network_does_so(side):
    """Frames, masks and weights beside such pages; the kernels of a call are repeated as it noted them."""
    assert calls_that_end_the_process(side, "networks") == []


@pytest.mark.parametrize("side", SIDES)
def test_the_pages_are_where_they_should_be(side):
    """A copy has values and strides of its tensor, and a byte further ends the process."""
    code = f"""
import ctypes, torch
from support.guard_pages import guarded
from support.helpers import laid_out
x = torch.randn(1, 3, 4, 5)
for layout in ("contiguous", "channels_last", "channel_slice", "permuted"):
    view = laid_out(x, layout)
    copy = guarded(view, {side == "end"})
    assert torch.equal(copy, x) and copy.stride() == view.stride()
ends = copy.data_ptr() + 4 * copy.numel() if {side == "end"} else copy.data_ptr() - 1
print("all is as it was", flush=True)
ctypes.string_at(ends, 1)
print("but the byte beyond could be read")
"""
    ran = run_python(code)
    assert (ran.stdout, ran.returncode) == ("all is as it was\n", -signal.SIGSEGV), ran.stderr
