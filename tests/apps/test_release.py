"""`make release`: what it says of wheels that are right, and of ones that are not; one version everywhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import sbnet
from sbnet import _library
from support.runtime_wheel import build_sbnet_wheel, build_wheel

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "release.py"
if not SCRIPT.is_file():
    pytest.skip("no source tree", allow_module_level=True)
if not shutil.which("readelf"):
    pytest.skip("needs binutils", allow_module_level=True)


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return build_sbnet_wheel(folder / "sbnet"), build_wheel(folder / "runtime")


def test_wheels_that_are_right(release, wheels):
    for wheel in wheels:
        assert release.symbol_faults(wheel, "x86_64") == []
        assert wheel.stat().st_size < release.LARGEST


def altered(wheel: Path, folder: Path, name: str, before: bytes, after: bytes) -> Path:
    """A copy by another name whose libraries have other bytes."""
    made = folder / name
    found = False
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(made, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            if item.filename.endswith(".so"):
                found |= before in data
                data = data.replace(before, after)
            target.writestr(item, data)
    assert found
    return made


def test_wheels_that_are_not(release, wheels, tmp_path):
    _, runtime = wheels
    assert any("aarch64" in fault for fault in release.symbol_faults(runtime, "aarch64"))
    tag = altered(runtime, tmp_path, runtime.name.replace("manylinux_2_28", "linux"), b"ELF", b"ELF")
    assert release.symbol_faults(tag, "x86_64") == ["tag: expected py3-none-manylinux_2_28_x86_64"]
    needy = altered(runtime, tmp_path, runtime.name, b"\0libdl.so.2\0", b"\0libxy.so.2\0")
    assert release.symbol_faults(needy, "x86_64") == ["libsbnet.so: needs libxy.so.2"]
    empty = tmp_path / "empty" / runtime.name
    empty.parent.mkdir()
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("sbnet/__init__.py", "")
    assert release.symbol_faults(empty, "x86_64") == ["no library inside"]


def test_what_cannot_be_built_is_named(release, monkeypatch, tmp_path):
    monkeypatch.setattr(release.shutil, "which", lambda *_, **__: None)
    lines = [p.line() for part in ("cuda", "aarch64") for p in release.built(part, tmp_path, "90a", "")]
    assert all("NOT BUILT" in line for line in lines)
    assert sum("nvcc was not found" in line for line in lines) == 2
    assert sum("aarch64-linux-gnu-g++ was not found" in line for line in lines) == 2


def test_the_page_tells_what_the_script_does(release):
    page = (ROOT / "docs" / "releases.md").read_text()
    (archs,) = re.findall(r"^RELEASE_ARCHS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert archs.replace(" ", ", ") in page
    assert release.ARM in page
    assert f"below {release.LARGEST // 1_000_000} MB" in page


def test_the_version_stands_in_one_place(wheels):
    assert sbnet.__version__ == _library.build_info()["version"]
    for wheel in wheels:
        assert f"-{sbnet.__version__}-" in wheel.name
    stated = re.compile(rf"(?<![\d.]){re.escape(sbnet.__version__)}(?![\d.])")
    files = [ROOT / name for name in ("pyproject.toml", "runtime/pyproject.toml", "setup.py", "csrc/CMakeLists.txt")]
    assert not [file for file in files if stated.search(file.read_text())]


def test_a_bug_report_begins_with_what_info_prints():
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.md").read_text()
    body = template.split("---")[2].strip()
    assert body.startswith("**What `sbnet info` prints**")
    assert "`sbnet bench --quick --share report.json`" in body
