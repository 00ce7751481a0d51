"""Modes of PyTorch around a run, and processes that fork while one computes."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sbnet.graph.exporting import no_autocast

F = TypeVar("F", bound=Callable[..., Any])
# `inside`: the `sbnet.masked` that a thread is in, or False: modes of functions are a thread's own.
ENTERED = threading.local()


def plainly(of: str) -> Callable[[F], F]:
    """Decorates what plans or runs a network: it computes alike under inference_mode and autocast and without them.

    Memory that is made in inference mode could never be written outside of it, and a plan has dtypes of its own: those
    of the example that it was made of. Inside `sbnet.masked`, which would mask single ops again, it raises.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(ENTERED, "inside", False):
                raise RuntimeError(f"sbnet: {of}: expected a call outside of sbnet.masked, got one inside of it")
            if torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
                with torch.inference_mode(False), torch.set_grad_enabled(False), no_autocast():
                    return method(*args, **kwargs)
            return method(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


class Turns:
    """A lock of what computes for one thread at a time. It survives a fork: in a child no other thread goes on, so
    that a turn that one had is over, and what it wrote is not to be relied on.

    Args:
        unfinished: called in a child, before its next turn, where a turn of another thread was cut off.
    """

    def __init__(self, unfinished: Callable[[], None]) -> None:
        self._lock, self._unfinished, self._cut_off = threading.RLock(), weakref.WeakMethod(unfinished), False
        _TURNS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._cut_off:
            self._cut_off = False
            method = self._unfinished()
            if method is not None:
                method()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _in_child(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or held by this thread
            self._lock.release()
        else:
            self._lock, self._cut_off = threading.RLock(), True


_TURNS: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_TURNS):
        turns._in_child()


os.register_at_fork(after_in_child=_after_fork)


def open_of(mode: Any) -> Any:
    """Maps of a context whose zeros are still to be written; None where all of them are: in stacks, and in a trace.
    (Dynamo follows no property of a context that it did not see made.)"""
    return None if torch.compiler.is_compiling() else mode.maps
