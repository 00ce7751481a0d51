"""What `make release` does: builds the packages, checks each, and lists them with what was seen of it and what was not.

    python .ci/release.py [--archs "80 90a"] [--parts cpu,cuda,aarch64] [--nvcc FLAGS] [--dist FOLDER]

Parts are folders of dist/: `cuda` holds both wheels with kernels of every GPU and of CPUs, `cpu` both without CUDA,
`aarch64` both for ARM, without CUDA, by a cross compiler. A part that cannot be built is named with the reason, and the
exit status is 1 where a check failed or a part that was asked for by --parts is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
sys.path.insert(0, str(ROOT / "sbnet"))
import needs  # noqa: E402  sbnet/needs.py, without the package

sys.path.pop(0)
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "sbnet/version.py").read_text())[1]
LARGEST = 100_000_000  # bytes of a file that package indexes take by default
ARM = "aarch64-linux-gnu-g++"
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
OURS = {"libsbnet.so", "libtorch_cpu.so"}  # beside it in the wheel, or loaded by `import torch`

# In an environment that has the wheel and what it declares, and nothing else.
TRY_SBNET = """
import sys, torch
import sbnet, sbnet.export, sbnet.models
assert "site-packages" in sbnet.__file__, sbnet.__file__
grid = sbnet.BlockGrid.cover((40, 56), 16)
x = torch.randn(1, 8, 40, 56).contiguous(memory_format=torch.channels_last)
active = sbnet.reduce_mask(torch.rand(1, 40, 56) > 0.99, grid)
call = x, torch.randn(8, 8, 3, 3), torch.randn(8), active
torch.testing.assert_close(sbnet.sparse_conv2d(*call, padding=1), sbnet.reference.sparse_conv2d(*call, padding=1))
frame, mask = torch.rand(1, 3, 96, 160), torch.zeros(1, 96, 160, dtype=torch.bool)
mask[:, 24:48, 40:80] = True
run = sbnet.sparsify(sbnet.models.contour_net(), frame, block=16)
run.export(sys.argv[1])
session = sbnet.export.session(sys.argv[1], ["CPUExecutionProvider"])
torch.testing.assert_close(sbnet.export.run(session, [frame, mask])[0], run(frame, mask), rtol=1e-4, atol=1e-5)
torch.save((frame, mask, run(frame, mask, copy=True)), sys.argv[1] + ".pt")
"""
TRY_RUNTIME = """
import importlib.util, sys
import numpy as np, onnxruntime, sbnet_runtime
assert importlib.util.find_spec("torch") is None and not sbnet_runtime.lacking(), sbnet_runtime.lacking()
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(sbnet_runtime.library_path())
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
mask = np.zeros((1, 96, 160), bool)
mask[:, 24:48, 40:80] = True
(y,) = session.run(None, {"x": np.random.default_rng(0).random((1, 3, 96, 160), np.float32), "mask": mask})
assert np.abs(y[..., 24:48, 40:80]).max() > 0 and not y[..., 64:, :].any()
"""
LOAD = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** names) {
  void* library = dlopen(names[1], RTLD_NOW);
  const char* (*info)(void) = library ? (const char* (*)(void))dlsym(library, "sbnet_build_info") : NULL;
  puts(info ? info() : dlerror());
  return !info;
}
"""


@dataclass
class Package:
    """A wheel, or why there is none; what was seen of it, and what was not."""

    name: str
    part: str
    wheel: Path | None = None
    note: str = ""
    seen: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        if self.wheel is None:
            return f"{self.part:8} {self.name:14} NOT BUILT: {self.note}"
        size = self.wheel.stat().st_size / 1e6
        verdict = "FAULTY: " + "; ".join(self.faults) if self.faults else ", ".join(self.seen)
        return f"{self.part:8} {self.wheel.name}  {size:.1f} MB  {verdict}{'; ' if self.note else ''}{self.note}"


# ---- checks of a wheel


def libraries_of(wheel: Path, folder: Path) -> list[Path]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return [Path(archive.extract(name, folder)) for name in names]


def symbol_faults(wheel: Path, arch: str) -> list[str]:
    """What auditwheel would ask: the tag's symbol versions, the machine, the libraries that are needed."""
    faults = []
    if not wheel.name.endswith(f"-py3-none-manylinux_2_28_{arch}.whl"):
        faults.append(f"tag: expected py3-none-manylinux_2_28_{arch}")
    with tempfile.TemporaryDirectory() as folder:
        found = libraries_of(wheel, Path(folder))
        if not found:
            faults.append("no library inside")
        for library in found:
            machine = int.from_bytes(library.read_bytes()[18:20], "little")
            if machine != MACHINES[arch]:
                faults.append(f"{library.name}: expected code of {arch}, got ELF machine {machine}")
            if not needs.serves_old_systems(library):
                faults.append(f"{library.name}: symbols are newer than manylinux_2_28's: {needs.needed(library)}")
            dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
            asked = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
            strangers = sorted(name for name in asked - OURS if not SYSTEM.fullmatch(name))
            if strangers:
                faults.append(f"{library.name}: needs {', '.join(strangers)}")
            paths = set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dynamic)) - {"$ORIGIN"}
            if paths:
                faults.append(f"{library.name}: looks in {', '.join(paths)}")
    return faults


def check_file(package: Package, arch: str) -> None:
    """All that can be said of a wheel without installing it."""
    wheel = package.wheel
    assert wheel is not None
    size = wheel.stat().st_size
    if size >= LARGEST:
        package.faults.append(f"{size / 1e6:.0f} MB: split it by docs/releases.md")
    if f"-{VERSION}-" not in wheel.name:
        package.faults.append(f"version: expected {VERSION}")
    faults = symbol_faults(wheel, arch)
    package.faults += faults
    if not faults:
        package.seen.append("symbols")
    done = quiet([sys.executable, "-m", "twine", "check", "--strict", wheel])
    if done.returncode:
        package.faults.append(f"twine check: {done.stdout.strip().splitlines()[-1:]}")
    else:
        package.seen.append("twine check")


def check_installed(package: Package, model: Path) -> None:
    """Into an environment of its own, with what the wheel declares and no more; of torch, the build that is here."""
    runtime = package.name == "sbnet-runtime"
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", Path(folder) / "venv"], check=True)
        limits = Path(folder) / "constraints"
        have = "import torch; print('torch==' + torch.__version__)"
        limits.write_text("" if runtime else subprocess.check_output([sys.executable, "-c", have], text=True))
        asked = [package.wheel, "onnxruntime", "numpy"] if runtime else [f"{package.wheel}[onnx]"]
        code = TRY_RUNTIME if runtime else TRY_SBNET
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        for command, what in (
            ([*pip, "install", "-q", "-c", limits, *asked], "install"),
            ([*pip, "check"], "pip check"),
            ([python, "-c", code, model], "an array and ONNX Runtime"),
        ):
            done = quiet(command, cwd=folder)
            if done.returncode:
                last = (done.stderr or done.stdout).strip().splitlines()[-1:]
                package.faults.append(f"fresh environment, {what}: {' '.join(last)}")
                return
    package.seen.append("fresh environment: import, an array, ONNX Runtime")


def check_emulated(package: Package) -> None:
    """ARM's libsbnet.so loads and tells its version under QEMU, where that is at hand. No more: ONNX Runtime's own
    library crashes under QEMU 7.2."""
    qemu, sysroot = shutil.which("qemu-aarch64"), Path("/usr/aarch64-linux-gnu")
    if qemu is None or not sysroot.is_dir() or not shutil.which(ARM):
        return
    with tempfile.TemporaryDirectory() as folder:
        assert package.wheel is not None
        library = next(path for path in libraries_of(package.wheel, Path(folder)) if path.name == "libsbnet.so")
        source, program = Path(folder) / "load.c", Path(folder) / "load"
        source.write_text(LOAD)
        subprocess.run([ARM, "-x", "c", source, "-o", program, "-ldl"], check=True)
        done = quiet([qemu, "-L", sysroot, program, library])
    if f"version={VERSION};" in done.stdout:
        package.seen.append("loads under QEMU")
    else:
        package.faults.append(f"does not load under QEMU: {(done.stdout + done.stderr).strip()[-200:]}")


# ---- builds


def quiet(command: list, **options: object) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def wheels(part: str, dist: Path, environment: dict[str, str]) -> list[Package]:
    folder = dist / part
    shutil.rmtree(folder, ignore_errors=True)
    made = []
    for name, source in (("sbnet", "."), ("sbnet-runtime", "./runtime")):
        print(f"==== {part}: {name}", flush=True)
        pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
        if "CMAKE_CXX_COMPILER_LAUNCHER" not in environment and shutil.which("ccache"):
            environment = environment | {f"CMAKE_{k}_COMPILER_LAUNCHER": "ccache" for k in ("CXX", "CUDA")}
        subprocess.run([*pip, source], cwd=ROOT, env=os.environ | environment, check=True)
        (wheel,) = folder.glob(f"{name.replace('-', '_')}-*.whl")
        made.append(Package(name, part, wheel))
    return made


def missing(part: str, why: str) -> list[Package]:
    return [Package(name, part, note=why) for name in ("sbnet", "sbnet-runtime")]


def built(part: str, dist: Path, archs: str, nvcc: str) -> list[Package]:
    if part == "cpu":
        return wheels(part, dist, {"SBNET_CUDA": "0"})
    if part == "cuda":
        if not shutil.which("nvcc"):
            return missing(part, "nvcc was not found")
        flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {nvcc}".strip()
        environment = {"SBNET_CUDA": "1", "SBNET_CUDA_ARCHS": archs} | ({"NVCC_APPEND_FLAGS": flags} if flags else {})
        made = wheels(part, dist, environment)
        for package in made:
            package.note = f"GPUs {archs}; nothing of them was run here"
        return made
    if not shutil.which(ARM):
        return missing(part, f"{ARM} was not found (of Debian: g++-aarch64-linux-gnu)")
    library = cross_built()
    machine = {"SBNET_LIBRARY": str(library), "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    made = wheels(part, dist, machine)
    for package in made:
        package.note = "cross-compiled, CPU only; not installed, and not run on a device"
    return made


def cross_built() -> Path:
    """libsbnet.so and libsbnet_torch.so for ARM; the path of the first."""
    import torch

    folder = ROOT / "build" / "aarch64"
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    options = {
        "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", "CMAKE_CXX_COMPILER": ARM,
        "CMAKE_MAKE_PROGRAM": ninja, "SBNET_CUDA": "0", "SBNET_VERSION": VERSION,
        "SBNET_TORCH_DIR": torch_stub(Path(torch.__file__).parent, folder / "torch"),
        "Python3_EXECUTABLE": sys.executable,
    }  # fmt: skip
    configure = [cmake, "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items())]
    subprocess.run([str(word) for word in configure], check=True)
    subprocess.run([str(cmake), "--build", str(folder), "--parallel", str(os.cpu_count() or 1)], check=True)
    return folder / "libsbnet.so"


def torch_stub(torch_dir: Path, folder: Path) -> Path:
    """A torch to link against for ARM: this one's headers, and a libtorch_cpu.so without code that has the names of the
    stable ABI, which are C's and the same on every machine."""
    listing = subprocess.check_output(["readelf", "-W", "--dyn-syms", torch_dir / "lib/libtorch_cpu.so"], text=True)
    names = sorted(set(re.findall(r"FUNC +GLOBAL DEFAULT +\d+ ((?:aoti_torch|torch)_\w+)$", listing, re.M)))
    if not names:
        raise SystemExit("release: torch: expected functions of the stable ABI in libtorch_cpu.so, got none")
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    flags = ["-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "-x", "c", "-fno-builtin", "-w"]
    subprocess.run([ARM, *flags, source, "-o", folder / "lib/libtorch_cpu.so"], check=True)
    (folder / "include").unlink(missing_ok=True)
    (folder / "include").symlink_to(torch_dir / "include")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default="80 90a 100 120", help="compute capabilities")
    parser.add_argument("--parts", default="", help="cpu, cuda, aarch64; default: all that can be built here")
    parser.add_argument("--nvcc", default="", help="further flags of nvcc")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    parts = [part for part in given.parts.split(",") if part]
    if set(parts) - {"cpu", "cuda", "aarch64"}:
        parser.error(f"--parts: expected cpu, cuda, aarch64, got {given.parts}")
    packages = []
    for part in parts or ("cpu", "cuda", "aarch64"):
        packages += built(part, given.dist, given.archs, given.nvcc)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        for package in packages:  # each sbnet comes before its runtime, and writes the model that the latter runs
            if package.wheel is not None:
                check_file(package, "aarch64" if package.part == "aarch64" else "x86_64")
                if package.part == "aarch64":
                    check_emulated(package)
                else:
                    check_installed(package, model)
    text = "\n".join(package.line() for package in packages)
    (given.dist / "RELEASE.txt").write_text(text + "\n")
    print(f"\n==== sbnet {VERSION}\n{text}")
    lost = [p for p in packages if p.wheel is None and parts]
    return 1 if lost or any(package.faults for package in packages) else 0


if __name__ == "__main__":
    sys.exit(main())
