"""What setup.py and runtime/setup.py share: the CMake build, and the systems that a wheel of it is for."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parents[1].resolve()
sys.path.insert(0, str(ROOT / "sbnet"))
import needs  # noqa: E402  sbnet/needs.py, without the package, which needs what is built here

sys.path.pop(0)
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "sbnet/version.py").read_text())[1]


def build_csrc(torch_dir: Path | None) -> Path:
    """Builds csrc/, with the torch binding where the folder of a torch is given; the folder of the libraries."""
    cuda = os.environ.get("SBNET_CUDA") or "auto"
    if cuda not in ("auto", "0", "1"):
        raise SystemExit(f"sbnet: SBNET_CUDA: expected auto, 0 or 1, got {cuda}")
    options = {
        "SBNET_VERSION": VERSION,
        "SBNET_TORCH_DIR": torch_dir or "",
        "SBNET_CUDA": cuda,
        "SBNET_CUDA_ARCHS": re.sub(r"[ ,]+", ";", os.environ.get("SBNET_CUDA_ARCHS", "").strip()),
        "Python3_EXECUTABLE": sys.executable,
    }
    # cmake and ninja from pip lie beside this Python, which need not be on PATH.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    if cmake is None:
        raise SystemExit("sbnet: cmake was not found: pip install cmake ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"]
    build_dir = ROOT / "build" / f"cuda-{cuda}"
    cache = build_dir / "CMakeCache.txt"
    must_hold = f"CMAKE_GENERATOR:INTERNAL={generator[1]}\n", f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT / 'csrc'}\n"
    if cache.exists() and not all(line in cache.read_text() for line in must_hold):
        shutil.rmtree(build_dir)  # another generator, or a tree that was moved: CMake would refuse
    configure = [cmake, "-S", ROOT / "csrc", "-B", build_dir, *generator]
    subprocess.check_call([*configure, *(f"-D{k}={v}" for k, v in options.items())])
    subprocess.check_call([cmake, "--build", build_dir, "--parallel", str(os.cpu_count() or 1)])
    return build_dir


class BuildKernels(Command):
    """Builds csrc/ and puts the libraries into the package (the source tree's one for an editable install)."""

    description = "build the kernel libraries with CMake"
    user_options: ClassVar[list] = []
    editable_mode = False
    package: ClassVar[Path]
    libraries: ClassVar[list[str]]

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def made(self) -> Path:
        """The folder in which the libraries lie after the build."""
        raise NotImplementedError

    def run(self):
        made = self.made()
        target = self.package if self.editable_mode else Path(self.build_lib) / self.package.name
        target.mkdir(parents=True, exist_ok=True)
        for name in self.libraries:
            (target / name).unlink(missing_ok=True)  # a new file: a running process may have the old one mapped
            shutil.copy2(made / name, target / name)

    def get_source_files(self):
        return []  # of no source distribution: csrc/ lies outside some of the packages

    def get_outputs(self):
        return [] if self.editable_mode else [f"{self.build_lib}/{self.package.name}/{name}" for name in self.libraries]

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands: ClassVar[list] = [*build.sub_commands, ("build_kernels", None)]


class Wheel(bdist_wheel):
    """The libraries use stable ABIs only: one wheel serves every Python and torch, on every system that loads them."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        here = super().get_tag()[2]
        libraries = [*Path(self.bdist_dir).rglob("*.so")]
        old = libraries and all(map(needs.serves_old_systems, libraries))
        return "py3", "none", re.sub("^linux_", "manylinux_2_28_", here) if old else here


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


def commands(build_kernels: type[BuildKernels]) -> dict:
    """What setup() takes besides the project's metadata."""
    return {
        "version": VERSION,
        "distclass": BinaryDistribution,
        "cmdclass": {"build": Build, "build_kernels": build_kernels, "bdist_wheel": Wheel},
    }
