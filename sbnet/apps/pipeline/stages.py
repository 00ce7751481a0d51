"""Threads before and after the network: decoding runs ahead, encoding runs behind, each by a few frames at most."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
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

    Attributes:
        busy: seconds that its own thread spent in `items`.
        shared: is it read by `reader`?

    Args:
        reader: goes on with it once the first item is there, if `items.prompt` is true then.
    """

    def __init__(self, items: Iterable[Any], depth: int = DEPTH, reader: Reader | None = None) -> None:
        self.busy = 0.0
        self._items, self._queue = items, queue.Queue[Any](depth)
        self._left: Iterator[Any] = iter(())
        self._stopped, self._ended = threading.Event(), threading.Event()
        self.shared = False
        self._reader = reader
        self._thread = threading.Thread(target=self._run, name="sbnet-decode", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        put = self._put
        try:
            self._left = iter(self._items)
        except BaseException as fault:
            put((_END, fault))
            self._ended.set()
            return
        while self.step(put, self):
            if self._reader is not None and getattr(self._items, "prompt", False):
                self.shared = True
                self._reader.add(self)
                return

    @property
    def has_place(self) -> bool:
        """May `step` be called by who must not wait? (To end it never does.)"""
        return not self._queue.full() or self._stopped.is_set()

    def step(self, put: Callable[[Any], None], who: Ahead | Reader) -> bool:
        """Reads one item, whose time is that of `who`, and says whether more may come."""
        item, error = _END, None
        begin = time.perf_counter()
        try:
            if not self._stopped.is_set():
                item = next(self._left, _END)
            if item is _END:
                close = getattr(self._left, "close", None)  # a generator's, in the thread that ran it
                if close is not None:
                    close()
        except BaseException as fault:
            item, error = _END, fault
        who.busy += time.perf_counter() - begin
        if not self._stopped.is_set():
            put((item, error))
        if item is _END:
            self._ended.set()
        return item is not _END

    def put_at_once(self, item: Any) -> None:
        """For who knows that there is place."""
        self._queue.put_nowait(item)

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
            if self.shared and self._reader is not None:
                self._reader.relieve()
            return None
        return self._item(*found)

    def _item(self, item: Any, error: BaseException | None) -> Any:
        if item is _END:
            self._queue.put((_END, error))  # asked again, it ends again
            if error is not None:
                raise error
            raise StopIteration
        if self.shared and self._reader is not None and self._queue.qsize() <= self._queue.maxsize // 2:
            self._reader.woken.set()  # not for each: who is woken wants Python's lock
        return item

    def close(self, timeout: float = 5) -> None:
        """Ends the thread; an iterator that waits for a camera ends with the process."""
        self._stopped.set()
        self._thread.join(timeout)
        if self.shared and self._reader is not None:
            self._reader.woken.set()
            self._ended.wait(timeout)


class Reader:
    """A thread that reads several sources in turn, until they have ended. With a thread for each of many sources, all
    of them wait for Python's lock, and with them who launches the network, far longer than their work takes; one alone
    keeps the decoders of 16 films busy.

    Args:
        context: what the thread enters.

    Attributes:
        woken: set, there may be something to do. busy: seconds that it worked.
    """

    STUCK = 1.0  # seconds

    def __init__(self, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.busy = 0.0
        self.woken = threading.Event()
        self._context = context
        self._added: deque[Ahead] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # while it has sources
        self._own: list[Ahead] = []
        self._at: tuple[Ahead, float] | None = None  # what it reads, and since when

    def add(self, ahead: Ahead) -> None:
        with self._lock:
            self._added.append(ahead)
            if self._thread is None:
                self._start()
        self.woken.set()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sbnet-decode", daemon=True)
        self._thread.start()

    def relieve(self) -> None:
        """Called by who waits for a source."""
        with self._lock:
            if self._at is None or time.perf_counter() - self._at[1] < self.STUCK:
                return
            stuck, self._at = self._at[0], None
            self._added.extend(ahead for ahead in self._own if ahead is not stuck)
            self._start()

    def close(self, timeout: float = 5) -> None:
        """After all of what it reads was closed."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        with self._context():
            self._read()

    def _read(self) -> None:
        own: list[Ahead] = []
        thread = threading.current_thread()
        while True:
            self.woken.clear()
            with self._lock:
                own += self._added
                self._added.clear()
                self._own = own
                if not own:
                    self._thread = None
                    return
            waits = True
            for ahead in list(own):
                if ahead.has_place:
                    waits = False
                    self._at = ahead, time.perf_counter()
                    more = ahead.step(ahead.put_at_once, self)
                    with self._lock:
                        relieved = self._thread is not thread
                        if not relieved:
                            self._at = None
                    if relieved:
                        if more:
                            self.add(ahead)
                        return
                    if not more:
                        own.remove(ahead)
            if waits:
                self.woken.wait()


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
            item = None  # its pictures go now, not when the next one comes

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
