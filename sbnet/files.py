"""Files that are whole or not there: written beside their place, and moved to it at the end."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 180  # bytes of a name that a temporary one may hold


class WriteError(OSError):
    """A file that cannot be written; the message is one line and names it."""


class Part:
    """A file under a temporary name in the folder of `path`. `keep()` puts it on the disk and in its place, `drop()`
    removes it; what was at `path` before stays until then. A symbolic link at `path` is replaced, not followed. SIGTERM
    and SIGHUP, where no other handler is set, remove what is open.

    A context manager: kept if it is left without an exception.

    Args:
        path: its name in the end. Missing folders are made.
        sources: files that are read meanwhile, none of which `path` may be.
        error: the exception that is raised for what is wrong, with a line that names the file.

    Attributes:
        file: open for writing, unbuffered.

    >>> with Part(Path("scores.json")) as part:
    ...     part.file.write(b"{}")
    """

    def __init__(self, path: Path, sources: Iterable[Any] = (), error: type[Exception] = WriteError) -> None:
        self.path, self._error = path, error
        if path.is_dir():
            raise error(f"{path}: cannot be written (expected the name of a file, got a folder)")
        if path.exists() and not path.is_file():
            raise error(f"{path}: cannot be written (not a regular file)")
        for source in sources if path.exists() else ():
            if is_same(path, source):
                raise error(f"{path}: expected another name than the source")
        make_folder(path.parent, path, error)
        self.part = _beside(path)
        self._process = os.getpid()
        watch()
        with _lock:  # none is opened once `_ended` has removed those that were
            try:
                self.file: BinaryIO = self.part.open("xb", buffering=0)
            except OSError as fault:
                raise self.failed(fault) from None
            _open.add(self)

    def failed(self, fault: Exception) -> Exception:
        """The error that says so of this file."""
        return self._error(f"{self.path}: cannot be written ({reason(fault)})")

    def write(self, data: bytes) -> None:
        """All of the data, or the error."""
        left = memoryview(data)
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError as fault:
            raise self.failed(fault) from None

    def keep(self, folder: bool = True) -> None:
        """The file is whole: to the disk, and to its name. folder: its entry is on the disk, too, when this returns."""
        try:
            if not self.file.closed:
                _to_disk(self.file.fileno())
                self.file.close()
            self.part.replace(self.path)
            if folder:
                settle(self.path.parent)
        except OSError as fault:
            raise self.failed(fault) from None
        finally:
            self.drop()

    def drop(self) -> None:
        """It never was. Does nothing after `keep`."""
        _open.discard(self)
        self.file.close()
        if self._process == os.getpid():
            self.part.unlink(missing_ok=True)

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.keep()
        else:
            self.drop()


_open: set[Part] = set()
_lock = threading.RLock()  # a signal's handler runs in a thread that may hold it


def write(path: Path, data: bytes, error: type[Exception] = WriteError) -> None:
    """A whole file of these bytes."""
    with Part(path, error=error) as part:
        part.write(data)


def is_same(path: Path, source: Any) -> bool:
    """Is a source, where it is a file's name, this file?"""
    if not isinstance(source, (str, os.PathLike)):
        return False
    try:
        return path.samefile(source)
    except (OSError, ValueError):  # one of them is not there, or no name of a file
        return False


def make_folder(folder: Path, target: Path, error: type[Exception] = WriteError) -> None:
    """Makes a folder, and those above it, for `target`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise error(f"{target}: cannot be written ({folder} is not a folder)") from None
    except OSError as fault:
        raise error(f"{target}: cannot be written ({reason(fault)})") from None


def reason(fault: Exception) -> str:
    """What the system says of a file, without its name."""
    return getattr(fault, "strerror", None) or str(fault) or type(fault).__name__


def settle(folder: Path) -> None:
    """What is in a folder is on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _to_disk(handle)
    finally:
        os.close(handle)


def _to_disk(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as fault:
        if fault.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise


def _beside(path: Path) -> Path:
    name = path.name
    if len(os.fsencode(name)) > LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return path.with_name(f".{name}.{os.getpid()}-{os.urandom(4).hex()}.part")


def watch() -> None:
    """From now on SIGTERM and SIGHUP remove what is open before they end the process, unless they are handled or
    ignored. Only the main thread can ask for it; in others it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ended)


def _ended(number: int, _: Any) -> None:
    with _lock:
        for part in list(_open):
            if part._process == os.getpid():
                part.part.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
