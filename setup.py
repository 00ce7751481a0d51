"""Drives CMake once and packs the two shared libraries. Options (environment): SBNET_CUDA, SBNET_CUDA_ARCHS."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent.resolve()
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "sbnet/version.py").read_text())[1]
LIBRARIES = ["libsbnet.so", "libsbnet_torch.so"]


class BuildKernels(Command):
    """Builds csrc/ and puts the libraries into the package (the source tree's one for an editable install)."""

    description = "build libsbnet.so and libsbnet_torch.so with CMake"
    user_options: ClassVar[list] = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        import torch

        cuda = os.environ.get("SBNET_CUDA") or "auto"
        if cuda not in ("auto", "0", "1"):
            raise SystemExit(f"sbnet: SBNET_CUDA={cuda}: auto, 0 or 1 is wanted")
        options = {
            "SBNET_VERSION": VERSION,
            "SBNET_TORCH_DIR": Path(torch.__file__).parent,
            "SBNET_CUDA": cuda,
            "SBNET_CUDA_ARCHS": re.sub(r"[ ,]+", ";", os.environ.get("SBNET_CUDA_ARCHS", "").strip()),
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
        target = ROOT / "sbnet" if self.editable_mode else Path(self.build_lib) / "sbnet"
        target.mkdir(parents=True, exist_ok=True)
        for name in LIBRARIES:
            (target / name).unlink(missing_ok=True)  # a new file: a running process may have the old one mapped
            shutil.copy2(build_dir / name, target / name)

    def get_source_files(self):
        return [str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()]

    def get_outputs(self):
        return [] if self.editable_mode else [str(Path(self.build_lib) / "sbnet" / name) for name in LIBRARIES]

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands: ClassVar[list] = [*build.sub_commands, ("build_kernels", None)]


class Wheel(bdist_wheel):
    """The libraries use stable ABIs only: one wheel serves every Python and torch."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    version=VERSION,
    distclass=BinaryDistribution,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": Wheel},
)
