"""What a benchmark is: a Case says what is measured, its Work holds the functions to time and the check before it.

Every module below `sbnet.benchmarks.cases` has `cases(setting)`; nothing else is to be registered.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

GROUPS = ("ops", "conv", "block", "network", "networks", "weights", "attention", "training")
T = TypeVar("T")


class WrongResult(Exception):
    """A side's result is not what it should be: no time is printed for it."""


class Skip(Exception):
    """A case that this machine cannot run (a package or a file is missing); the message says what it lacks."""


@dataclass(frozen=True)
class Setting:
    """What the person asked for.

    level: "tiny" (the tests: seconds for everything), "quick" (under a minute on a CPU) or "full".
    """

    device: str = "cpu"
    level: str = "full"
    compiled: bool = True  # torch.compile among the dense forms

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What networks run in on this device."""
        return torch.float16 if self.cuda else torch.float32

    def pick(self, tiny: T, quick: T, full: T) -> T:
        return {"tiny": tiny, "quick": quick, "full": full}[self.level]


@dataclass(frozen=True)
class Side:
    """One of the functions that are timed in turn.

    kind:
        "ours": what is measured; one a case.
        "indexed": ours from the mask on, its blocks and fringe listed anew.
        "dense": does the whole plane (or copies as many bytes): the fastest of these is the baseline.
        "peer": another sparse way.
    clock:
        "graph": on CUDA, many calls in one CUDA graph (or eager with `--eager`); a plain loop on the CPU.
        "own": replays graphs of its own; CUDA events around many calls in a row, launches included.
        "eager": cannot be captured (it allocates or waits); CUDA events around many calls.
        "wall": waits for its result, as ONNX Runtime does; host clock.
    """

    run: Callable[[], Any]  # returns what `Work.check` looks at
    kind: str = "dense"
    clock: str = "graph"


@dataclass
class Work:
    """A case made ready: inputs are on the device, every side can run.

    check: takes a side's name and its result, returns the relative error, raises WrongResult.
    flops, bytes: what an ideal implementation of "ours" must compute, read and write; 0: no floor is given.
    dtype: whose matrix rate bounds the flops; "tf32": of float32 by products of tf32.
    notes: what is known only now (density, blocks); goes into the row.
    """

    sides: dict[str, Side]
    check: Callable[[str, Any], float]
    flops: float = 0.0
    bytes: float = 0.0
    dtype: torch.dtype | str = torch.float32
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of a table.

    name: of the table: cases of one name share columns. group: one of GROUPS.
    facts: what tells this case from the others of its name, plain JSON values: size, channels, dtype, mask, ...
    make: builds the Work; it is dropped before the next case, so keep nothing large elsewhere.
    paper: the SBNet paper's own speed-up over dense for this case, where it has one.
    """

    name: str
    group: str
    facts: dict[str, Any]
    make: Callable[[], Work]
    paper: float | None = None

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"benchmark {self.name}: group: expected one of {', '.join(GROUPS)}, got {self.group!r}")

    @property
    def title(self) -> str:
        return f"{self.name}: " + " ".join(format_fact(v) for v in self.facts.values())


def format_fact(value: Any) -> str:
    """A fact as tables show it."""
    if isinstance(value, (list, tuple)):
        return "x".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def short(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def modules() -> list[str]:
    """Dotted names of the modules below sbnet.benchmarks.cases."""
    root = importlib.import_module("sbnet.benchmarks.cases")
    return sorted(m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.") if not m.ispkg)


def cases(setting: Setting, groups: Iterable[str] = GROUPS, only: str = "") -> Iterator[Case]:
    """Every case of these groups whose title contains all words of `only`, or of one of its parts between commas."""
    choices = [part.split() for part in only.lower().split(",")]
    for module in modules():
        for case in importlib.import_module(module).cases(setting):
            title = case.title.lower()
            if case.group in groups and any(all(word in title for word in words) for words in choices):
                yield case


def close(got: Tensor, torchs: Tensor, exact: Tensor, inside: Tensor | None = None) -> float:
    """The project's error measure on the pixels `inside`: rms error at most twice that of PyTorch's own run in the same
    dtype and a unit in the last place. Returns the rms error relative to the rms of `exact`."""
    if got.shape != exact.shape:
        raise WrongResult(f"shape: expected {tuple(exact.shape)}, got {tuple(got.shape)}")

    def rms(x: Tensor) -> float:
        x = x if inside is None else torch.where(inside, x, torch.zeros_like(x))
        return float(x.double().square().mean().sqrt())

    wide = exact.dtype
    error, allowed, size = rms(got.to(wide) - exact), 2 * rms(torchs.to(wide) - exact), rms(exact)
    if not error <= allowed + torch.finfo(got.dtype).eps * size:
        raise WrongResult(f"rms error: expected at most twice PyTorch's own, {allowed:.3g}, got {error:.3g}")
    return error / size if size else 0.0


def same(got: Tensor, exact: Tensor, inside: Tensor | None = None) -> float:
    """Bit for bit on the pixels `inside`: for copies."""
    if got.shape != exact.shape:
        raise WrongResult(f"shape: expected {tuple(exact.shape)}, got {tuple(got.shape)}")
    equal = (got == exact) if inside is None else (got == exact) | ~inside
    if not bool(equal.all()):
        raise WrongResult(f"{int((~equal).sum())} elements differ")
    return 0.0
