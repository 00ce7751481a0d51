"""Packs libsbnet.so alone, for machines without PyTorch. Options: SBNET_CUDA, SBNET_CUDA_ARCHS, and SBNET_LIBRARY, a
libsbnet.so that was built before."""

import os
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import setup

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE.parent / "csrc"))
import kernel_build  # noqa: E402


class BuildKernels(kernel_build.BuildKernels):
    package = HERE / "sbnet_runtime"
    libraries: ClassVar[list[str]] = ["libsbnet.so", "needs.py", "version.py"]

    def made(self) -> Path:
        ready = os.environ.get("SBNET_LIBRARY")
        built = Path(ready).parent if ready else kernel_build.build_csrc(None)
        folder = kernel_build.ROOT / "build" / "runtime"
        folder.mkdir(parents=True, exist_ok=True)
        for source in (built / "libsbnet.so", *(kernel_build.ROOT / "sbnet" / name for name in self.libraries[1:])):
            shutil.copy2(source, folder)
        return folder


setup(**kernel_build.commands(BuildKernels))
