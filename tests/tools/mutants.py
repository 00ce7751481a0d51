"""Mutation testing: each fault of mutants.txt is put into a copy of the source, and the tests named there must find it.

python tests/tools/mutants.py              all faults; ends with those that no test found, and with 1 if there are any
python tests/tools/mutants.py --only fuse  those whose file, or whose text, has this word
python tests/tools/mutants.py --due        those without a verdict, and those that no test found
python tests/tools/mutants.py --record     writes the verdicts into the list, with date and commit
python tests/tools/mutants.py --list       what there is, and the last verdicts; runs nothing

The copy is build/mutants; the checkout is not touched. Faults below csrc/ are built there with CMake (and ccache, where
it is installed), but for those of csrc/cuda, which the tests' emulators compile. A fault marked with `=` in the list
changes nothing that a test could see; the line says why. One whose text is not in its file any more is reported and
skipped: write it anew.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")
COPY = ROOT / "build/mutants"
LIBRARIES = ("libsbnet.so", "libsbnet_torch.so")
NO_TESTS = 5  # pytest's exit status: a fault is not found by tests that are not there


@dataclass(frozen=True)
class Mutant:
    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    equivalent: str
    verdict: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"


def read(text: str) -> list[Mutant]:
    """Of `@ file | tests` for the faults after it; a fault is `-` and `+` lines, perhaps `= why`, `! verdict`."""
    found: list[Mutant] = []
    file, tests = "", ()
    for block in text.split("\n\n"):
        old, new, why, verdict = [], [], "", ""
        for line in block.splitlines():
            mark, rest = line[:1], line[2:]
            if mark == "@":
                file, _, words = (part.strip() for part in rest.partition("|"))
                tests = tuple(shlex.split(words))
            elif mark == "-":
                old.append(rest)
            elif mark == "+":
                new.append(rest)
            elif mark == "=":
                why = rest
            elif mark == "!":
                verdict = rest
            elif mark not in ("", "#"):
                raise ValueError(f"{LIST.name}: expected a line of @, -, +, =, ! or #, got {line!r}")
        if old:
            found.append(Mutant(file, tests, "\n".join(old), "\n".join(new), why, verdict))
    return found


def recorded(text: str, verdicts: dict[Mutant, str]) -> str:
    """The list with these verdicts."""
    mutants = iter(read(text))
    blocks = text.split("\n\n")
    for at, block in enumerate(blocks):
        if not any(line.startswith("-") for line in block.splitlines()):
            continue
        mutant = next(mutants)
        if mutant in verdicts:
            kept = [line for line in block.rstrip("\n").split("\n") if not line.startswith("!")]
            blocks[at] = "\n".join([*kept, f"! {verdicts[mutant]}"])
    return "\n\n".join(blocks).rstrip("\n") + "\n"


def is_there(mutant: Mutant, root: Path) -> bool:
    path = root / mutant.file
    return path.exists() and path.read_text().count(mutant.old) == 1


def is_due(mutant: Mutant) -> bool:
    return mutant.verdict.split(" ")[0] not in ("found", "equivalent")


def is_built(mutant: Mutant) -> bool:
    """Is it in the copy's libraries? They are the CPU's."""
    return mutant.file.startswith("csrc/") and not mutant.file.startswith("csrc/cuda/")


def listed(mutants: list[Mutant]) -> str:
    rows = [f"{m.verdict or 'no verdict'}: {m}" + ("" if is_there(m, ROOT) else " (gone)") for m in mutants]
    counts: dict[str, int] = {}
    for m in mutants:
        word = m.verdict.split(" ")[0] or "without a verdict"
        counts[word] = counts.get(word, 0) + 1
    return "\n".join([*rows, ", ".join(f"{n} {word}" for word, n in counts.items())])


def copy_source() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("docs/plots/"):
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)
    for folder in ("models", "export", "benchmarks"):  # as they are installed
        (COPY / "sbnet" / folder).symlink_to(COPY / folder)
    for library in LIBRARIES:
        shutil.copy2(ROOT / "sbnet" / library, COPY / "sbnet" / library)


def build() -> bool:
    """The copy's libraries from its csrc. False: it does not compile."""
    folder = COPY / "build/dev-cpu"
    if not (folder / "build.ninja").exists():
        import torch

        options = {"SBNET_VERSION": "0", "SBNET_TORCH_DIR": Path(torch.__file__).parent, "SBNET_CUDA": 0}
        if shutil.which("ccache"):
            options["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
        command = ["cmake", "-S", COPY / "csrc", "-B", folder, "-G", "Ninja"]
        subprocess.run([*command, *(f"-D{k}={v}" for k, v in options.items())], check=True, stdout=subprocess.DEVNULL)
    environment = {**os.environ, "CCACHE_BASEDIR": str(COPY), "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run(["cmake", "--build", folder], env=environment, stdout=subprocess.DEVNULL, check=False)
    for library in LIBRARIES:
        if done.returncode == 0:
            (COPY / "sbnet" / library).unlink()  # a process may have the old file mapped
            shutil.copy2(folder / library, COPY / "sbnet" / library)
    return done.returncode == 0


def run(tests: tuple[str, ...], seconds: float) -> str:
    """passed, failed or hung. In a fork of this process, which has imported what takes time and nothing of sbnet."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.setsid()
        os.chdir(COPY)
        sys.path[:0] = [str(COPY)]
        os.environ["PYTHONPATH"] = str(COPY)
        import pytest

        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *tests]))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status) == NO_TESTS:
                raise ValueError(f"{shlex.join(tests)}: expected tests, got none")
            return "passed" if status == 0 else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def judge(mutant: Mutant, seconds: float) -> str:
    """found, survived, hung (the tests did not end), gone (its text is not there once), or does not compile."""
    if not is_there(mutant, COPY):
        return "gone"
    path = COPY / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        if is_built(mutant) and not build():
            return "does not compile"
        return {"passed": "survived", "failed": "found", "hung": "hung"}[run(mutant.tests, seconds)]
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--due", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=300, help="after which tests count as hung")
    options = parser.parse_args()
    mutants = [m for m in read(LIST.read_text()) if options.only in f"{m.file} {m.old} {m.new}"]
    mutants = [m for m in mutants if not options.due or is_due(m)]
    if options.list:
        print(listed(mutants))
        return 0
    for name in ("hypothesis", "numpy", "onnx", "pytest", "torch"):  # the forks have them, then
        importlib.import_module(name)
    copy_source()
    if any(map(is_built, mutants)) and not build():
        raise SystemExit("csrc does not compile as it is")
    for tests in dict.fromkeys(m.tests for m in mutants):
        if run(tests, options.seconds) != "passed":
            raise SystemExit(f"these tests do not pass as the code is: {' '.join(tests)}")
    results: dict[str, list[Mutant]] = {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for at, mutant in enumerate(mutants, 1):
        start = time.monotonic()
        result = judge(mutant, options.seconds)
        if result == "survived" and mutant.equivalent:
            result = "equivalent"
        results.setdefault(result, []).append(mutant)
        if options.record:
            verdict = f"{result} {datetime.date.today()} {commit.stdout.strip()}"
            LIST.write_text(recorded(LIST.read_text(), {mutant: verdict}))
        print(f"{at}/{len(mutants)} {result}, {time.monotonic() - start:.0f} s: {mutant}", flush=True)
    print(", ".join(f"{len(found)} {result}" for result, found in results.items()))
    for result in ("survived", "hung", "gone", "does not compile"):
        for mutant in results.get(result, []):
            print(f"{result}: {mutant}")
    return int("survived" in results)


if __name__ == "__main__":
    sys.exit(main())
