"""What tests/gpu_record.json must say for the GPU run to speak of the code as it is.

python tests/tools/gpu_record.py    prints `csrc` and `python` of HEAD, to be written into the record after a GPU run
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/gpu_record.json"
RAN = ("sbnet", "models", "export", "tests")  # the Python that GPU tests run


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def state() -> dict[str, str]:
    """`csrc`: the tree of the kernels. `python`: a hash over the files that the tests ran, but for the record."""
    record = RECORD.relative_to(ROOT).as_posix()
    files = [line for line in git("ls-tree", "-r", "HEAD", "--", *RAN).splitlines() if not line.endswith("\t" + record)]
    return {
        "csrc": git("rev-parse", "HEAD:csrc").strip(),
        "python": hashlib.sha1("\n".join(files).encode()).hexdigest(),
    }


def stale() -> list[str]:
    """What the record speaks of in another version; empty: it holds."""
    recorded = json.loads(RECORD.read_text())
    return [name for name, now in state().items() if recorded.get(name) != now]


if __name__ == "__main__":
    print(json.dumps(state(), indent=2))
