"""One capture at a time: torch.export puts tensors of its own into a module, and patches PyTorch, while it runs."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Held during torch.export. A process that forks waits for it: the child could never end what another thread of its
# parent had begun.
EXPORTING = threading.RLock()
os.register_at_fork(before=EXPORTING.acquire, after_in_parent=EXPORTING.release, after_in_child=EXPORTING.release)


@contextmanager
def exporting() -> Iterator[None]:
    """One capture at a time, outside of the caller's inference, gradient and autocast modes."""
    with EXPORTING, torch.inference_mode(False), torch.no_grad(), no_autocast():
        yield


@contextmanager
def no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def collected_later() -> Iterator[None]:
    """Without garbage collection, which is a tenth of an export: it makes objects by the million and drops few."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
