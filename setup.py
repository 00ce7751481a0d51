"""Drives CMake once and packs the two shared libraries. Options (environment): SBNET_CUDA, SBNET_CUDA_ARCHS, and
SBNET_LIBRARY, a libsbnet.so that was built before, with libsbnet_torch.so beside it."""

import os
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import setup

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc"))
import kernel_build  # noqa: E402


class BuildKernels(kernel_build.BuildKernels):
    package = ROOT / "sbnet"
    libraries: ClassVar[list[str]] = ["libsbnet.so", "libsbnet_torch.so"]

    def made(self) -> Path:
        if os.environ.get("SBNET_LIBRARY"):
            return Path(os.environ["SBNET_LIBRARY"]).parent
        import torch

        return kernel_build.build_csrc(Path(torch.__file__).parent)


setup(**kernel_build.commands(BuildKernels))
