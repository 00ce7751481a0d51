"""Hopper kernels on the CPU: their own source, compiled by g++ against tests/tools/emulator."""

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC, TOOLS = ROOT / "csrc", ROOT / "tests/tools/emulator"


def units_of(entry: str, *core: str) -> list[Path]:
    """An entry of the emulator, and what it needs of csrc/core: `core`, and what all layers share."""
    names = (*core, "grid", "layer", "memory", "settled")
    return [TOOLS / f"{entry}.cpp", *(CSRC / f"core/{name}.cpp" for name in names)]


def build(folder: Path, compiler: str, headers: Path, kernels: list[Path], units: list[Path]) -> Path:
    """The kernels as a library: one line of each differs (shared memory), and the instructions that C++ cannot say."""
    for header in TOOLS.glob("ptx*.h"):  # ptx.h, ptx_GROUP.h
        to = folder / "cuda/sm90" / header.stem.removeprefix("ptx").strip("_") / "ptx.cuh"
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(header, to)
    shutil.copy(TOOLS / "mma.h", folder / "cuda/mma.cuh")
    shutil.copy(TOOLS / "products.h", folder / "cuda/products.cuh")
    common = (CSRC / "cuda/common.cuh").read_text()
    common = re.sub(r'asm\("(max|min)\.NaN.*\);', r"r = a != a ? a : b != b ? b : \1(a, b);", common)
    (folder / "cuda/common.cuh").write_text('#include "machine.h"\n' + common)
    units = [TOOLS / "runtime.cpp", *units]
    for source in (*kernels, *(CSRC / "cuda").rglob("*.cuh")):
        text = source.read_text()
        text, found = re.subn(
            r"extern __shared__ .* (\w+) (shared|smem)\[\];",
            r"\1* \2 = reinterpret_cast<\1*>(emulator::self->cta->shared);", text,
        )  # fmt: skip
        assert "extern __shared__" not in text, source
        if source in kernels:
            units.append(folder / f"{source.stem}.cpp")
            units[-1].write_text(text)
        elif found:  # found before csrc's own
            to = folder / source.relative_to(CSRC)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text)
    paths = [f"-I{p}" for p in (folder, TOOLS, CSRC, headers)]

    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-Wno-psabi"]
    cache = [path] if (path := shutil.which("ccache")) else []
    anywhere = os.environ | {"CCACHE_BASEDIR": "/"}  # each run has a folder of its own

    def compiled(unit: Path) -> str:
        out = str(folder / f"{unit.parent.name}_{unit.stem}.o")
        command = [*cache, compiler, *flags, *paths, "-c", str(unit), "-o", out]
        subprocess.run(command, check=True, cwd=folder, env=anywhere)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / "libemulated.so"
    subprocess.run([compiler, "-shared", *objects, "-o", str(library)], check=True)
    return library


def cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)


def emulated_library(tmp_path_factory, name: str, kernels: list[Path], units: list[Path]) -> ctypes.CDLL:
    """The library of these kernels, which the first process that wants it builds for all."""
    compiler, headers = shutil.which("g++"), cuda_headers()
    if not compiler or not headers:
        pytest.skip("needs g++ and the headers of the CUDA toolkit")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / f"emulator_{name}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / "libemulated.so"
        if not library.exists():
            shutil.rmtree(folder, ignore_errors=True)
            build(folder, compiler, headers, kernels, units)
    return ctypes.CDLL(str(library))
