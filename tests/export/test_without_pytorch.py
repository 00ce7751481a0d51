"""docs/without_pytorch.md, from top to bottom: the wheel, Python and C++, in an environment that has no torch."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

import numpy as np
import onnxruntime

from sbnet import _library, export
from support.runtime_wheel import build_wheel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/without_pytorch.md").read_text()
SCRIPTS = sysconfig.get_path("scripts")


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with the repository's documents, and the environment of a Python that has numpy and onnxruntime only."""
    if not list(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")):
        pytest.skip("this onnxruntime comes without its C library")
    for tool in ("cmake", "g++"):
        if shutil.which(tool, path=os.pathsep.join([SCRIPTS, os.environ["PATH"]])) is None:
            pytest.skip(f"needs {tool}")
    folder = tmp_path_factory.mktemp("machine")
    (folder / "docs").symlink_to(ROOT / "docs")
    venv.create(folder / "venv", with_pip=False)
    packages = folder / "packages"
    packages.mkdir()
    for module in (np, onnxruntime):
        for path in Path(module.__file__).parents[1].glob(f"{module.__name__}*"):
            (packages / path.name).symlink_to(path)
    return folder, {
        "PATH": os.pathsep.join([str(folder / "venv/bin"), str(folder / "tools"), os.environ["PATH"]]),
        "PYTHONPATH": str(packages),
        "PIP_NO_INDEX": "1",
        "HOME": str(folder),
    }


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def test_the_page(machine):
    folder, environment = machine
    make, install, python, cpp = (text for _, text in blocks())
    (folder / "tools").mkdir()
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=SCRIPTS):
            (folder / "tools" / tool).symlink_to(Path(SCRIPTS) / tool)
    # The first machine: this Python.
    there = os.environ | {"PATH": os.pathsep.join([SCRIPTS, os.environ["PATH"]])}
    run(["bash", "-ec", f'sbnet() {{ "{sys.executable}" -m sbnet "$@"; }}; {make}'], folder, there)
    shutil.copy2(build_wheel(folder / "wheel"), folder)
    # The second one; a pip of its own would take seconds to install.
    pip = f'pip() {{ PYTHONPATH= "{sys.executable}" -m pip -q --python venv/bin/python "$@"; }}\n'
    code = "import importlib.util as u; print([m for m in ('torch', 'sbnet', 'onnxruntime') if u.find_spec(m)])"
    assert run(["python", "-c", code], folder, environment).strip() == "['onnxruntime']"
    assert "all there" in run(["bash", "-ec", pip + install], folder, environment)
    assert "10% of the blocks" in run(["python", "-c", python], folder, environment)
    said = run(["bash", "-ec", cpp], folder, environment)
    assert said.count("y: 1 3 96 160 in") == 3
    assert np.array_equal(np.fromfile(folder / "y.bin", np.float32).reshape(1, 3, 96, 160), wanted(folder))


def wanted(folder: Path) -> np.ndarray:
    """What main.cpp computes, in this process."""
    state, x = 1, np.empty(3 * 96 * 160, np.float32)
    for k in range(x.size):
        state = (state * 1664525 + 1013904223) % 2**32
        x[k] = (state >> 8) / 2**24
    mask = np.zeros((1, 96, 160), bool)
    mask[:, 24:48, 40:80] = True
    session = export.session(folder / "contours.onnx", ["CPUExecutionProvider"])
    return session.run(["y"], {"x": x.reshape(1, 3, 96, 160), "mask": mask})[0]


def test_the_program_takes_inputs_of_any_names(machine):
    """In any order; and refuses by name what is no frame and mask."""
    onnx = pytest.importorskip("onnx")
    folder, environment = machine
    program = folder / "build-cpp/masked"
    if not program.exists():
        pytest.skip("needs test_the_page")
    model = onnx.load(folder / "contours.onnx")
    names = {"x": "picture", "mask": "where it matters", "y": "edges"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    turned = list(model.graph.input)[::-1]
    del model.graph.input[:]
    model.graph.input.extend(turned)
    onnx.save(model, folder / "named.onnx")

    def called(name):
        command = [program, name, str(_library.KERNEL_LIBRARY), "named.bin"]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    done = called("named.onnx")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("edges: 1 3 96 160 in") == 3
    assert np.array_equal(np.fromfile(folder / "named.bin", np.float32).reshape(1, 3, 96, 160), wanted(folder))
    helper = onnx.helper
    floats, bools = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
    frame, mask = (helper.make_tensor_value_info(*v) for v in (("a", floats, [1, 3, 4, 4]), ("m", bools, [1, 4, 4])))
    odd = helper.make_tensor_value_info("odd", bools, [1, 8, 8])
    y = helper.make_tensor_value_info("y", floats, [1, 3, 4, 4])
    for inputs, message in (([frame], "expected a mask"), ([mask], "expected a frame"), ([frame, odd], "odd: expected"),
                            ([frame, mask, odd], "got m and odd")):  # fmt: skip
        node = helper.make_node("Identity", ["a"], ["y"]) if frame in inputs else helper.make_node(
            "Constant", [], ["y"], value=helper.make_tensor("v", floats, [1, 3, 4, 4], [0.0] * 48)
        )  # fmt: skip
        graph = helper.make_graph([node], "g", inputs, [y])
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "o.onnx"
        )
        done = called("o.onnx")
        assert done.returncode == 1
        assert message in done.stderr


def test_the_program_says_what_is_wrong(machine):
    folder, environment = machine
    program = folder / "build-cpp/masked"
    if not program.exists():
        pytest.skip("needs test_the_page")
    kernels = str(_library.KERNEL_LIBRARY)
    for arguments, code, text in (
        ([], 2, "usage: masked MODEL"),
        (["contours.onnx", "nothing.so"], 1, "nothing.so"),
        (["nothing.onnx", kernels], 1, "nothing.onnx"),
        (["contours.onnx", kernels, "/nowhere/y.bin"], 1, "/nowhere/y.bin: cannot be written"),
    ):
        done = subprocess.run(
            [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code
        assert text in done.stderr
