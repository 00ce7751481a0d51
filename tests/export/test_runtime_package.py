"""sbnet-runtime, the wheel without PyTorch, and the library as CMake installs it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from sbnet import _library, needs, version
from support.runtime_wheel import build_wheel

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

USER = """
cmake_minimum_required(VERSION 3.24)
project(user NONE)
find_package(sbnet MINOR REQUIRED)
get_target_property(path sbnet::sbnet LOCATION)
file(REAL_PATH "${path}" path)
file(WRITE ${CMAKE_BINARY_DIR}/path.txt "${path}")
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, timeout=300, **options
    )
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, of the kernels that are there."""
    return build_wheel(tmp_path_factory.mktemp("runtime"))


def test_the_wheel(wheel, tmp_path):
    tag = "manylinux_2_28" if needs.serves_old_systems(_library.KERNEL_LIBRARY) else "linux"
    assert wheel.name.startswith(f"sbnet_runtime-{version.__version__}-py3-none-{tag}_")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist()}
        archive.extractall(tmp_path)
        metadata = archive.read(f"sbnet_runtime-{version.__version__}.dist-info/METADATA").decode()
    assert {"libsbnet.so", "needs.py", "LICENSE", "NOTICE"} <= names
    assert "Requires-Dist" not in metadata
    code = f"""
import sys
sys.modules["torch"] = sys.modules["sbnet"] = None  # importing them is an error
sys.path.insert(0, {str(tmp_path)!r})
import sbnet_runtime
assert sbnet_runtime.lacking() == []
assert sbnet_runtime.build_info()["version"] in ({version.__version__!r}, "0")
print(sbnet_runtime.library_path())
"""
    assert run(sys.executable, "-c", code).strip() == str(tmp_path / "sbnet_runtime/libsbnet.so")
    said = run(sys.executable, "-m", "sbnet_runtime", cwd=tmp_path)
    assert "all there" in said
    assert f"sbnet-runtime {version.__version__}" in said


def test_installed_by_cmake(tmp_path):
    """As `cmake -S csrc` plans it, without torch. Compiling takes minutes: the kernels that are there stand in."""
    cmake = shutil.which("cmake", path=PATH)
    if cmake is None or shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("needs cmake, g++ and make")
    build, prefix = tmp_path / "build", tmp_path / "installed"
    run(cmake, "-S", ROOT / "csrc", "-B", build, "-G", "Unix Makefiles", "-DSBNET_CUDA=0")
    major = version.__version__.split(".")[0]
    assert f"-soname,libsbnet.so.{major} " in (build / "CMakeFiles/sbnet.dir/link.txt").read_text()
    shutil.copy2(_library.KERNEL_LIBRARY, build / f"libsbnet.so.{version.__version__}")
    (build / f"libsbnet.so.{major}").symlink_to(f"libsbnet.so.{version.__version__}")
    (build / "libsbnet.so").symlink_to(f"libsbnet.so.{major}")
    run(cmake, "--install", build, "--prefix", prefix)
    user = tmp_path / "user"
    user.mkdir()
    (user / "CMakeLists.txt").write_text(USER.replace("MINOR", version.__version__.rpartition(".")[0]))
    run(cmake, "-S", user, "-B", tmp_path / "user-build", "-G", "Unix Makefiles", f"-DCMAKE_PREFIX_PATH={prefix}")
    found = Path((tmp_path / "user-build/path.txt").read_text())
    assert found.is_relative_to(prefix)
    assert found.name == f"libsbnet.so.{version.__version__}"
