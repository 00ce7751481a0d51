"""The time of what a device does."""

from __future__ import annotations

import time
from typing import Any

import torch

from sbnet.apps.pipeline.frames import Result


class Clock:
    """Milliseconds from now to `end`, or to `stop` where nothing was said before: the device's, which the thread that
    waits for it reads."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin = self._event()
        self._end: Any = None
        self._at = time.perf_counter()

    def _event(self) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it leaves the processor to others
        event.record()
        return event

    def end(self) -> None:
        self._end = self._event()

    def stop(self, *results: Result, here: Any = None) -> None:
        """All that the results of a call need has been asked for. here: an event, they are on the host; None: once the
        current stream has come here."""
        landed = self.landed(here or self._event())
        for result in results:
            result.landed, result.ms = landed if self._cuda else None, landed.ms

    def landed(self, here: Any) -> Landed:
        """What the results of a call wait for. here: as of `stop`; None: they are on the host."""
        return Landed(self._begin, self._end or here, here, (time.perf_counter() - self._at) * 1e3)


class Landed:
    """What a call's results wait for: once for all of them.

    ms: what the call took, the device's once it was waited for."""

    def __init__(self, begin: Any, end: Any, here: Any, ms: float) -> None:
        self._events: Any = None if here is None else (begin, end, here)
        self.ms = ms

    def wait(self) -> tuple[float, float]:
        """Milliseconds that the call took, and seconds that this waited. Threads that share it call it in turn."""
        if self._events is None:
            return self.ms, 0.0
        begin, end, here = self._events
        asked = time.perf_counter()
        here.synchronize()
        waited = time.perf_counter() - asked
        self.ms, self._events = begin.elapsed_time(end), None
        return self.ms, waited
