"""Where in a network something went wrong, and what to do about it, in one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import nn

MOST = 160  # characters of what somebody else's message says
VALUES = (
    "data-dependent",
    "symbolic_shapes",
    ".item()",
)  # in messages about sizes and branches that follow from values
NO_VALUES = (
    "sizes and branches may not depend on values, as after .item() or "
    "ActiveBlocks.trim(): use torch.where, or a fixed capacity (reduce_mask's argument)"
)
INSIDE = os.path.dirname(torch.__file__)


@contextmanager
def no_dump() -> Iterator[None]:
    """torch.export without the graph that it prints where it fails."""
    caught = io.StringIO()
    with redirect_stderr(caught):
        yield
    sys.stderr.write(caught.getvalue())  # it did not fail: warnings


def refusal(module: nn.Module, error: BaseException) -> str:
    """`PATH (FILE:LINE): what happened; what to do` of an error that a run or a trace of `module` ended with.

    PATH is that of the innermost part of the module that was being called, or the module's class. The line is the last
    one that is not PyTorch's own.
    """
    names = {id(part): name for name, part in module.named_modules()}
    path, line = "", ""
    for caught in causes(error):
        found, at = _deepest(caught, names)
        if found:
            path, line = found, at
            break
    where = path or type(module).__name__
    return f"{where}{f' ({line})' if line else ''}: {_first_line(error)}; {_advice(error)}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _deepest(error: BaseException, names: dict[int, str]) -> tuple[str, str]:
    path, line, at = "", "", error.__traceback__
    while at is not None:
        owner, file = at.tb_frame.f_locals.get("self"), at.tb_frame.f_code.co_filename
        inside = file.startswith(INSIDE)
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            path = names[id(owner)]
            line = line if inside else f"{os.path.basename(file)}:{at.tb_lineno}"
        at = at.tb_next
    return path, line


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (line if len(line) <= MOST else f"{line[: MOST - 3]}...").rstrip(" .;")


def _advice(error: BaseException) -> str:
    if any(word in str(error) for word in VALUES):
        return NO_VALUES
    return "the network must take the example as it is, in ops of PyTorch alone"
