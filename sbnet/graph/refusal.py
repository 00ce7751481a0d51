"""Where in a network something went wrong, and what to do about it, in one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import nn

MOST = 160  # characters of another library's message
VALUES = (
    "data-dependent",
    "symbolic_shapes",
    ".item()",
)  # in messages about sizes and branches that follow from values
NO_VALUES = "sizes and branches may not depend on values"
INSIDE = os.path.join(os.path.dirname(torch.__file__), "")  # torchvision's files are the network's own


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
        if found or at:
            path, line = found, at
            break
    where = f"{path or type(module).__name__}{f' ({line})' if line else ''}"
    if any(word in str(caught) for caught in causes(error) for word in VALUES):
        return f"{where}: {no_values(module, path)}"  # what PyTorch says of it is in symbols of its own
    return f"{where}: {_first_line(error)}; the network must take the example as it is, in ops of PyTorch alone"


def no_values(module: nn.Module, path: str) -> str:
    """What to do where the part at `path` asks for values: a part beside it that can be captured by itself, or, in a
    network without such parts, what to write instead."""
    part = beside(module, path)
    if part:
        return f"{NO_VALUES}: sparsify model.{part}, which has most of the convolutions, and run the rest as it is"
    instead = "use torch.where, or a fixed capacity (reduce_mask's argument)"
    return f"{NO_VALUES}, as after .item() or ActiveBlocks.trim(): {instead}"


def beside(module: nn.Module, path: str) -> str:
    """The name of the part of a network with most of the parameters of convolutions that neither is, holds nor lies in
    the part at `path`; nothing where none has half of them."""
    counts = {
        name: sum(_kernel_size(m) for m in part.modules())
        for name, part in module.named_modules()
        if name and not (path + ".").startswith(name + ".") and not (path and (name + ".").startswith(path + "."))
    }
    total = sum(map(_kernel_size, module.modules()))
    best = max(counts, key=lambda name: (counts[name], -len(name)), default="")
    return best if best and 2 * counts[best] > total > 0 else ""


def _kernel_size(module: nn.Module) -> int:
    convolves = isinstance(module, nn.modules.conv._ConvNd)
    return module.weight.numel() if convolves else 0  # type: ignore[union-attr, operator]


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
        if isinstance(owner, nn.Module) and id(owner) in names:
            path = names[id(owner)] or path
            line = line if inside else f"{os.path.basename(file)}:{at.tb_lineno}"
        at = at.tb_next
    return path, line


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (line if len(line) <= MOST else f"{line[: MOST - 3]}...").rstrip(" .;")
