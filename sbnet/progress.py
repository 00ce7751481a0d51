"""What takes seconds says so: a line on the terminal once three of them have passed, gone when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported only where there is a terminal
    from rich.console import Console

PATIENCE = 3.0  # seconds until something is said
_of_thread = threading.local()  # .line: what this thread is busy with
_terminal = threading.Lock()  # held while drawing: two live displays would overwrite each other


class _Line:
    """The line of one task. A timer's thread draws it first, as the task itself may be inside PyTorch by then."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._step, self._began = title, "", time.monotonic()
        self._console, self._lock = console, threading.Lock()
        self._shown: Any = None
        self._over = False
        self._timer = threading.Timer(PATIENCE, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._over or not _terminal.acquire(blocking=False):
                return
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self._shown = Progress(*columns, console=self._console, transient=True)
            self._shown.start()
            task = self._shown.add_task(self._text(), total=None)
            self._shown.tasks[task].start_time = self._shown.get_time() - (time.monotonic() - self._began)

    def step(self, name: str) -> None:
        with self._lock:
            self._step = name
            if self._shown is not None:
                self._shown.update(self._shown.tasks[0].id, description=self._text())

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown is not None:
                self._shown.stop()
                _terminal.release()

    def _text(self) -> str:
        return f"{self._title}: {self._step}" if self._step else self._title


@contextmanager
def progress(title: str, console: Console | None = None) -> Iterator[None]:
    """Around what may take seconds, or its decorator. Nothing is printed where standard error is no terminal and no
    notebook, nor by a task inside another one, whose steps are then those of the outer one."""
    if getattr(_of_thread, "line", None) is not None:
        yield
        return
    if console is None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False, emoji=False)
    if not (console.is_terminal or console.is_jupyter):
        yield
        return
    _of_thread.line = line = _Line(title, console)
    try:
        yield
    finally:
        _of_thread.line = None
        line.end()


def step(name: str) -> None:
    """What the task around is doing now."""
    line = getattr(_of_thread, "line", None)
    if line is not None:
        line.step(name)


def drawing() -> threading.Lock:
    """Held, with `with`, by what draws on the terminal itself: no task says anything meanwhile."""
    return _terminal
