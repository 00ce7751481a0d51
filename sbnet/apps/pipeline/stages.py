"""Threads before and after the network: decoding runs ahead, encoding runs behind, each by a few frames at most."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

DEPTH = 4  # frames that wait between two stages
_END = object()


def give_back_memory() -> None:
    """Returns to the system what glibc's heap holds free. Frames of some 100 KB come and go among what stays, in
    several threads, so that the heap grows for thousands of frames, most of it free. Elsewhere it does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Ahead:
    """Iterates over `items` in a thread of its own, at most DEPTH of them ahead. What it raises, `__next__` raises.

    busy: seconds that the thread spent in `items`.
    """

    def __init__(self, items: Iterable[Any], depth: int = DEPTH) -> None:
        self.busy = 0.0
        self._items, self._queue = items, queue.Queue[Any](depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sbnet-decode", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            items = iter(self._items)
            while not self._stopped.is_set():
                begin = time.perf_counter()
                item = next(items, _END)
                self.busy += time.perf_counter() - begin
                if item is _END:
                    break
                self._put((item, None))
            close = getattr(items, "close", None)  # a generator's, in the thread that ran it
            if close is not None:
                close()
        except BaseException as fault:
            error = fault
        self._put((_END, error))

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._item(*self._queue.get())

    def poll(self, timeout: float) -> Any:
        """The next item, or None where none came within so many seconds; at the end what `__next__` raises."""
        try:
            found = self._queue.get(timeout > 0, timeout)
        except queue.Empty:
            return None
        return self._item(*found)

    def _item(self, item: Any, error: BaseException | None) -> Any:
        if item is _END:
            self._queue.put((_END, error))  # asked again, it ends again
            if error is not None:
                raise error
            raise StopIteration
        return item

    def close(self, timeout: float = 5) -> None:
        """Ends the thread; an iterator that waits for a camera ends with the process."""
        self._stopped.set()
        self._thread.join(timeout)


class Behind:
    """Calls `work` on one item after another in a thread of its own; DEPTH of them wait at most. What it raises, `put`
    or `close` raises, and the rest is dropped. then: gets the items after it, and is closed with it.

    busy: seconds that the thread spent in `work`.
    """

    def __init__(self, work: Callable[[Any], None], then: Behind | None = None, depth: int = DEPTH) -> None:
        self.busy = 0.0
        self._work, self._then, self._queue = work, then, queue.Queue[Any](depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sbnet-encode", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not _END:
            if self._error is not None:
                continue
            begin = time.perf_counter()
            try:
                self._work(item)
                self.busy += time.perf_counter() - begin
                if self._then is not None:
                    self._then.put(item)
            except BaseException as fault:
                self._error = fault

    def put(self, item: Any) -> None:
        self._queue.put(item)
        self._raise()

    def close(self) -> None:
        """Waits for what was put."""
        self._queue.put(_END)
        self._thread.join()
        try:
            if self._then is not None:
                self._then.close()
        finally:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
