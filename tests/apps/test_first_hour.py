"""docs/first_hour.md: five stories as the page tells them, each in an environment in which nothing is installed.

They install from the package index: slow, and part of `make nightly`. Of torch they take the build that is here.
`-rP` shows how long each took; SBNET_FIRST_HOUR=FILE appends it to a file as JSON lines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.runtime_wheel import build_sbnet_wheel, build_wheel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first_hour.md"
if not PAGE.is_file():
    pytest.skip("no source tree", allow_module_level=True)

# What the output of a story has to hold, and the most error lines that it may print.
STORIES = {
    "A ResNet under a mask": [r"\(1, 2048, 15, 20\) 14% of the blocks computed", r"margin +32 +error"],
    "A film, zones, boxes": [r"active blocks", r"centerface", r"wrote boxes.jsonl, boxes.mp4", r'"records": \[\{'],
    "An ONNX file, without PyTorch, from C++": [r"nodes", r"rms difference", r"ms"],
    "A vision transformer": [r"120 of 1024 patches computed", r"ms, dense"],
    "Fine-tuning under a mask": [r"trained dense: error [\d.]+ dense, [\d.]+ masked", r"fine-tuned under masks: error"],
}


def sections() -> dict[str, list[tuple[str, str]]]:
    """The code blocks under each heading."""
    parts = re.split(r"^#+ (.+)$", PAGE.read_text(), flags=re.M)[1:]
    return {
        title: re.findall(r"^```(sh|python)\n(.*?)^```", text, re.M | re.S)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def script(title: str) -> str:
    """What a person types, in one shell: Python as if into `python`."""
    found = sections()
    lines = [f"python - <<'PYTHON'\n{text}PYTHON\n" if kind == "python" else text
             for kind, text in (*found["The first hour"], *found[title])]  # fmt: skip
    return "".join(lines)


def test_every_story_of_the_page_is_run():
    assert [title for title, blocks in sections().items() if blocks] == ["The first hour", *STORIES]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return build_sbnet_wheel(folder / "sbnet"), build_wheel(folder / "runtime")


@pytest.mark.slow
@pytest.mark.parametrize("title", STORIES)
def test_the_story(title, wheels, tmp_path):
    for wheel in wheels:
        shutil.copy2(wheel, tmp_path)
    shutil.copytree(ROOT / "docs/examples/cpp", tmp_path / "cpp")
    (tmp_path / "constraints").write_text(f"torch=={torch.__version__}\n")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    kept |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    python = Path(sys.executable).resolve().parent
    environment = kept | {"PIP_CONSTRAINT": "constraints", "PATH": f"{python}{os.pathsep}{kept['PATH']}"}
    begin = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script(title)], cwd=tmp_path, env=environment, text=True,
        capture_output=True, timeout=1800, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - begin
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    print(f"{title}: {seconds:.0f} s")
    if os.environ.get("SBNET_FIRST_HOUR"):
        with open(os.environ["SBNET_FIRST_HOUR"], "a") as file:
            file.write(json.dumps({"story": title, "s": round(seconds), "torch": torch.__version__}) + "\n")
    for wanted in STORIES[title]:
        assert re.search(wanted, done.stdout), f"{wanted}:\n{done.stdout[-3000:]}"
    if title.startswith("Fine-tuning"):
        before, after = (float(v) for v in re.findall(r"([\d.]+) masked", done.stdout))
        assert after < before
    # LeafSpec: the page calls torch.onnx.export itself, and so hears PyTorch's warning of itself
    warned = [line for line in done.stderr.splitlines() if "Warning:" in line and "LeafSpec" not in line]
    assert not warned, "\n".join(warned)
