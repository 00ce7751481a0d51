"""sbnet-runtime's wheel, of the kernels that are there: compiling them takes minutes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sbnet import _library

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Made in a folder that holds what runtime/setup.py reads, and nothing else."""
    if not all(map(importlib.util.find_spec, ("pip", "setuptools"))):
        pytest.skip("needs pip and setuptools")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "runtime", folder / "runtime", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("csrc/kernel_build.py", "sbnet/needs.py", "sbnet/version.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps",
            "-w", folder / "dist", folder / "runtime",
        ],
        env=os.environ | {"SBNET_LIBRARY": str(_library.KERNEL_LIBRARY)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    (made,) = (folder / "dist").iterdir()
    return made


def build_sbnet_wheel(folder: Path) -> Path:
    """sbnet's own wheel, of the libraries that are there."""
    if not all(map(importlib.util.find_spec, ("pip", "setuptools"))):
        pytest.skip("needs pip and setuptools")
    source = folder / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "results")
    for name in ("sbnet", "command", "models", "export", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("csrc/kernel_build.py", "setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    command = ["-q", "--no-index", "--no-build-isolation", "--no-deps", "-w", folder / "dist", source]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *map(str, command)], capture_output=True, text=True, check=False,
        env=os.environ | {"SBNET_LIBRARY": str(_library.KERNEL_LIBRARY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = (folder / "dist").glob("sbnet-*.whl")
    return wheel
