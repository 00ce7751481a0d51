"""The GPUs that a release is built for, and that the kernels compile for Jetsons, which no release has kernels for."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = ROOT / "Makefile"
if not MAKEFILE.is_file():
    pytest.skip("no source tree", allow_module_level=True)

# One of each group, of those that compile in seconds: tensor cores, asynchronous copies, shared memory, warps.
KERNELS = ("lists/fringe", "masked/fill", "masked/conv_quantized", "masked/conv_rows")
KERNELS += ("attention/forward_mma", "weights/matmul_mma")
JETSONS = "87", "110"  # Orin, Thor


def test_a_release_is_built_for_the_gpus_of_its_machines():
    (archs,) = re.findall(r"^RELEASE_ARCHS := (.+)$", MAKEFILE.read_text(), re.M)
    assert not set(archs.split()) & set(JETSONS), "machines of ARM, which the wheels of x86-64 do not fit"
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert f'for `"{archs}"`' in page
    assert f"Jetsons are {' and '.join(JETSONS)}" in page
    assert f'"--archs", default="{archs}"' in (ROOT / ".ci/release.py").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("arch", JETSONS)
def test_kernels_compile_for_jetsons(tmp_path, arch):
    """Configured as docs/without_pytorch.md says; nothing of Hopper gets into the build."""
    tools = Path(sysconfig.get_path("scripts"))
    cmake, ninja = (shutil.which(name, path=f"{tools}:/usr/bin:/usr/local/bin") for name in ("cmake", "ninja"))
    if not cmake or not ninja:
        pytest.skip("needs cmake and ninja")

    def run(*command: object) -> str:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    run(cmake, "-S", ROOT / "csrc", "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DSBNET_CUDA=1", f"-DSBNET_CUDA_ARCHS={arch}", f"-DPython3_EXECUTABLE={sys.executable}")  # fmt: skip
    objects = {f"CMakeFiles/sbnet.dir/cuda/{name}.cu.o" for name in KERNELS}
    listed = run(ninja, "-C", tmp_path, "-t", "targets", "all")
    assert objects <= {line.split(":")[0] for line in listed.splitlines()}
    assert "/sm90/" not in listed
    assert set(re.findall(r"sm_\w+", run(ninja, "-C", tmp_path, "-t", "commands", *objects))) == {f"sm_{arch}"}
    run(cmake, "--build", tmp_path, "--target", *sorted(objects))
