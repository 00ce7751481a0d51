"""What a shared library needs of a machine: symbol versions of glibc and libstdc++, read off its ELF file.

Imports nothing of the package, so that it still speaks where the libraries cannot be loaded.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path

# What a wheel tagged manylinux_2_28 may ask for.
GLIBC = (2, 28)
GLIBCXX = (3, 4, 25)

_DEFINED, _NEEDED = 0x6FFFFFFD, 0x6FFFFFFE  # section types SHT_GNU_verdef, SHT_GNU_verneed


class _LinkMap(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


class _Elf:
    def __init__(self, path: str | Path) -> None:
        self.data = Path(path).read_bytes()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path}: expected a 64-bit little-endian ELF file")
        (at,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        # type, offset, link to the section of its strings, entries
        self.sections = [
            (s[1], s[4], s[6], s[7])
            for s in (struct.unpack_from("<IIQQQQIIQQ", self.data, at + k * size) for k in range(count))
        ]

    def text(self, table: int, at: int) -> str:
        start = self.sections[table][1] + at
        return self.data[start : self.data.index(b"\0", start)].decode()

    def versions(self, kind: int) -> Iterator[tuple[str, str]]:
        """Library and version of every version it needs; "" and version of every one that it defines."""
        for found, at, strings, entries in self.sections:
            if found != kind:
                continue
            for _ in range(entries):
                if kind == _NEEDED:
                    _, count, file, first, following = struct.unpack_from("<HHIII", self.data, at)
                    entry = at + first
                    for _ in range(count):
                        _, _, _, name, step = struct.unpack_from("<IHHII", self.data, entry)
                        yield self.text(strings, file), self.text(strings, name)
                        entry += step
                else:
                    first, following = struct.unpack_from("<II", self.data, at + 12)
                    (name,) = struct.unpack_from("<I", self.data, at + first)
                    yield "", self.text(strings, name)
                at += following


def needed(path: str | Path) -> dict[str, set[str]]:
    """The symbol versions that a library needs, by the library it needs them of."""
    found: dict[str, set[str]] = {}
    for library, version in _Elf(path).versions(_NEEDED):
        found.setdefault(library, set()).add(version)
    return found


def newest(path: str | Path, family: str) -> tuple[int, ...]:
    """The newest version of a family (GLIBC, GLIBCXX, CXXABI) that a library needs; empty: none of it."""
    texts = [v for versions in needed(path).values() for v in versions if v.startswith(f"{family}_")]
    return max((tuple(map(int, v.removeprefix(f"{family}_").split("."))) for v in texts), default=())


def serves_old_systems(path: str | Path) -> bool:
    """Does it load wherever a manylinux_2_28 wheel may be installed?"""
    return newest(path, "GLIBC") <= GLIBC and newest(path, "GLIBCXX") <= GLIBCXX


def lacking(path: str | Path) -> list[str]:
    """What this machine lacks to load a library, a line each; empty where it lacks nothing.

    Libraries that lie beside it, or that another package brings, are not looked at.
    """
    lines = []
    for library, versions in sorted(needed(path).items()):
        try:
            handle = ctypes.CDLL(library)._handle
        except OSError:
            lines.append(f"{library} was not found")
            continue
        where = (ctypes.cast(handle, ctypes.POINTER(_LinkMap)).contents.name or b"").decode()
        there = {version for _, version in _Elf(where).versions(_DEFINED)}
        lines += [f"{where} has no {version}" for version in sorted(versions - there)]
    return lines


def summary(path: str | Path) -> str:
    """In a line, for `sbnet info`."""
    asks = [f"{name} {'.'.join(map(str, newest(path, name)))}" for name in ("GLIBC", "GLIBCXX") if newest(path, name)]
    return f"{', '.join(asks)}: " + ("; ".join(lacking(path)) or "all there")
