"""The libraries load where ONNX Runtime and torch do: the symbols they ask for, and what is said where one lacks."""

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sbnet import _library, needs
from sbnet.apps import machine

ROOT = Path(__file__).parents[2]
LIBRARIES = _library.KERNEL_LIBRARY, _library.TORCH_LIBRARY


def elf_hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value


def asking_for(library: Path, before: bytes, after: bytes, target: Path) -> Path:
    """A copy of a library that asks for another symbol version (of a name as long)."""
    data = library.read_bytes()
    for old, new in ((before + b"\0", after + b"\0"), *([struct.pack("<I", elf_hash(v)) for v in (before, after)],)):
        assert old in data
        data = data.replace(old, new)
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_symbols_are_those_of_a_manylinux_2_28_system(library):
    assert needs.newest(library, "GLIBC") <= (2, 28), needs.needed(library)
    assert needs.newest(library, "GLIBCXX") <= (3, 4, 25), needs.needed(library)
    assert needs.newest(library, "CXXABI") <= (1, 3, 11), needs.needed(library)
    assert needs.serves_old_systems(library)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_versions_are_those_that_readelf_shows(library):
    if not shutil.which("readelf"):
        pytest.skip("needs binutils")
    text = subprocess.run(["readelf", "-W", "-V", library], check=True, capture_output=True, text=True).stdout
    shown = {word for line in text.splitlines() if " Name: " in line for word in line.split() if "_" in word}
    assert set().union(*needs.needed(library).values()) == shown
    text = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert "stubs" not in text  # what they were linked against has no code


def test_what_a_machine_lacks_is_said(tmp_path):
    assert all(needs.lacking(library) == [] for library in LIBRARIES)
    assert all(line.endswith("all there") for line in machine.gather_info()["needs"])
    newer = asking_for(_library.TORCH_LIBRARY, b"GLIBC_2.14", b"GLIBC_2.99", tmp_path / "newer.so")
    (line,) = needs.lacking(newer)
    assert line.endswith("libc.so.6 has no GLIBC_2.99")
    assert needs.summary(newer).startswith("GLIBC 2.99, GLIBCXX 3.4.")
    assert not needs.serves_old_systems(newer)


def test_an_import_that_fails_says_what_lacks(tmp_path, monkeypatch):
    newer = asking_for(_library.TORCH_LIBRARY, b"GLIBC_2.14", b"GLIBC_2.99", tmp_path / "libsbnet_torch.so")
    monkeypatch.setattr(_library, "TORCH_LIBRARY", newer)
    with pytest.raises(ImportError, match=r"^sbnet: libsbnet_torch.so cannot be loaded.*libc.so.6 has no GLIBC_2.99$"):
        _library._load()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no library")
    with pytest.raises(ValueError, match="expected a 64-bit"):
        needs.needed(tmp_path / "text")


def test_exceptions_cross_the_bindings():
    """Thrown in a library that holds parts of libstdc++ of its own, caught in torch: many times, in several threads."""
    code = """
import threading, torch, sbnet
def fail():
    for _ in range(200):
        try:
            torch.ops.sbnet.sparse_fill(torch.zeros(1, 2, 8, 8), torch.zeros(1), [4], 0.0)
        except RuntimeError as error:
            assert str(error).startswith("sbnet::sparse_fill: grid: "), error
        else:
            raise AssertionError("nothing was raised")
threads = [threading.Thread(target=fail) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
active = sbnet.reduce_mask(torch.ones(1, 8, 8), sbnet.BlockGrid.cover((8, 8), 4))
assert int(active.count) == 4
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-2000:]
    assert "Error" not in done.stderr, done.stderr[-2000:]
