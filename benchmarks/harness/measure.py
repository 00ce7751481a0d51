"""Runs cases: checks every side, times them in turn, keeps what was measured whatever happens."""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sbnet
from sbnet import _library, files
from sbnet.benchmarks.harness.registry import Case, Setting, Skip, Work, WrongResult, short
from sbnet.benchmarks.harness.timing import Timer, ceilings, fault_us, floor_us, page_faults

Row = dict[str, Any]
_RATES = "copy GB/s", "cached copy GB/s", "launch us", "cache MB"


@dataclass
class Session:
    """Measured rows with what they depend on: the content of a result file.

    Args:
        environment: device and versions.
        conditions: how it was timed.
        limits: ceilings of the run.
    """

    environment: dict[str, Any]
    conditions: dict[str, Any]
    limits: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        lines = [json.dumps(rounded(line)) for line in (head, *self.rows)]
        files.write(path, ("\n".join(lines) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Session:
        """A file of lines: the session, then its rows."""
        head, *rows = map(json.loads, path.read_text().splitlines())
        return cls(**head, rows=rows)


def key(row: Row) -> str:
    """What names a row in every run."""
    return json.dumps([row["group"], row["name"], row["facts"]], sort_keys=True)


def key_of(case: Case) -> str:
    return key({"group": case.group, "name": case.name, "facts": case.facts})


def rounded(value: Any) -> Any:
    """Five significant digits: files that can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def start(setting: Setting, timer: Timer) -> Session:
    """An empty session; measures the ceilings."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found = environment(setting.device)  # before the ceilings: they load the machine
    halves = [torch.float16, torch.bfloat16] if setting.cuda else []
    conditions = {
        "level": setting.level,
        "clock": "wall" if not setting.cuda else "eager" if timer.eager else "CUDA graph",
        "cache": "cold" if timer.cold else "warm",
        "rounds": timer.rounds,
        "torch.compile": setting.compiled and (setting.cuda or setting.level == "full"),
    }
    if timer.settle:
        conditions["settle ms"] = round(timer.settle * 1e3)
    return Session(found, conditions, ceilings(setting.device, [torch.float32, *halves], setting.level == "tiny"))


def measure(case: Case, timer: Timer, limits: dict[str, Any]) -> Row:
    """One row. Raises WrongResult before anything is timed."""
    torch.manual_seed(0)
    work = case.make()
    with torch.no_grad():
        wrong, errors = {}, {}
        for name, side in work.sides.items():
            try:
                errors[name] = work.check(name, side.run())
            except WrongResult as found:
                if side.kind != "peer":
                    raise WrongResult(f"{name}: {found}") from None
                wrong[name] = str(found)  # another library's fault: that side gets no time
        work.sides = {name: side for name, side in work.sides.items() if name not in wrong}
        machine, own = _cpu_seconds(), time.process_time()
        times = timer.medians(work.sides)
        machine, own = _cpu_seconds() - machine, time.process_time() - own
        faults = {} if timer.cuda else {name: page_faults(side.run) for name, side in work.sides.items()}
    ours = only(work, "ours")
    us = times[ours][0]
    row = {"group": case.group, "name": case.name, "facts": case.facts, **work.notes, "ours": ours}
    row["of"] = made_by(timer.cuda)
    row |= {"us": {name: t for name, (t, _) in times.items()}, "spread us": times[ours][1], "error": errors[ours]}
    if not timer.cuda:  # a machine that has other work measures badly
        row["others"] = max(0.0, 1 - own / machine) if machine else 0.0
        # the share of a side's time that the system spends on handing out fresh memory
        shares = {name: count * fault_us() / times[name][0] for name, count in faults.items()}
        row["page faults"] = {name: share for name, share in shares.items() if share > 0.005}
    if work.flops:
        row["TFLOP/s"] = work.flops / us / 1e6
    if work.bytes:
        row["GB/s"] = work.bytes / us / 1e3
    if work.flops or work.bytes:
        row["needs"] = {"flops": work.flops, "bytes": work.bytes, "dtype": short(work.dtype)}
        put_floor(row, limits, timer.cold)
    dense = [name for name, side in work.sides.items() if side.kind == "dense"]
    if dense:
        row["dense form"] = best = min(dense, key=lambda name: times[name][0])
        row["x dense"] = times[best][0] / us
        for name, side in work.sides.items():
            if side.kind == "indexed":
                row["x indexed"] = times[best][0] / times[name][0]
    if wrong:
        row["wrong"] = wrong
    if case.paper is not None:
        row["x paper"] = case.paper
    return row


def put_floor(row: Row, limits: dict[str, Any], cold: bool) -> None:
    """What its operations and bytes take at least, and the share of the time that this is."""
    if "needs" in row:
        row["floor us"] = floor_us(**row["needs"], limits=limits, cold=cold)
        row["of floor"] = row["floor us"] / row["us"][row["ours"]]


def resume(before: Session, now: Session) -> Session:
    """A session to be continued. Ceilings are the better ones of both: a slow moment of the machine is no ceiling."""
    a, b = before.limits, now.limits
    rates = {dtype: max(rate, b["matrix TFLOP/s"][dtype]) for dtype, rate in a["matrix TFLOP/s"].items()}
    before.limits = {k: min(v, b[k]) if k == "launch us" else max(v, b[k]) for k, v in a.items() if k in _RATES}
    before.limits["matrix TFLOP/s"] = rates
    for row in before.rows:
        put_floor(row, before.limits, before.conditions["cache"] == "cold")
    return before


def _cpu_seconds() -> float:
    """Seconds of processor time that all processes of this machine, and other guests of its host, have used."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def only(work: Work, kind: str) -> str:
    """The one side of that kind."""
    names = [name for name, side in work.sides.items() if side.kind == kind]
    if len(names) != 1:
        raise ValueError(f"benchmark: sides: expected one of kind {kind!r}, got {len(names)}")
    return names[0]


def run(
    cases: Iterable[Case],
    session: Session,
    timer: Timer,
    budget: float | None = None,
    told: Callable[[Case, Row | None], None] = lambda case, row: None,
    save: Callable[[], None] = lambda: None,
) -> bool:
    """Measures cases into the session; True if all of them ran.

    Ctrl-C and the time budget (seconds) end it early: rows stay. No case is begun that would end after the budget if it
    took as long as the longest before it. A case that the session has is left alone. A case that
    lacks something is noted in `skipped`. A wrong result ends the run with WrongResult, rows kept.
    """
    begin, longest = time.monotonic(), 0.0
    cases = list(cases)
    have = {key(row) for row in session.rows}
    try:
        for case in cases:
            if key_of(case) in have:
                continue
            started = time.monotonic()
            if budget is not None and started - begin + longest > budget:
                return False
            try:
                row = measure(case, timer, session.limits)
            except Skip as lack:
                session.skipped[case.title] = str(lack)
                told(case, None)
                continue
            except WrongResult as wrong:
                raise WrongResult(f"{case.title}: {wrong}") from None
            longest = max(longest, time.monotonic() - started)
            session.rows.append(row)
            session.skipped.pop(case.title, None)
            told(case, row)
            save()
            gc.collect()
    except KeyboardInterrupt:
        return False
    finally:
        place = {key_of(case): at for at, case in enumerate(cases)}
        session.rows.sort(key=lambda row: place.get(key(row), -1))  # a resumed run fills gaps
        save()
    return True


@functools.cache
def made_by(cuda: bool) -> dict[str, Any]:
    """What every row says for itself: hash of csrc, device, versions."""
    name = torch.cuda.get_device_name() if cuda else processor()
    return {"csrc": csrc_hash(), "device": name, "sbnet": sbnet.__version__, "torch": torch.__version__}


def csrc_hash() -> str:
    """git's hash of csrc/, with + where files differ from it; "not known" outside of a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True, check=True)
        changed = run(["git", "status", "--porcelain", "csrc"]).stdout.strip()
        return run(["git", "rev-parse", "HEAD:csrc"]).stdout.strip()[:12] + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not known"


def environment(device: str) -> dict[str, Any]:
    """What a figure depends on."""
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "sbnet": sbnet.__version__,
        "csrc": csrc_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        if _library.PORTABLE:
            facts["kernels"] = "portable"  # SBNET_GPU
    else:
        facts["threads"] = torch.get_num_threads()
        facts["instructions"] = _library.cpu_isa()  # several generations share a name
        facts["load before"] = os.getloadavg()[0]  # processes that wanted a core: a busy machine measures badly
    return facts


def keep_row(row: Callable[[argparse.Namespace], Row], parser: argparse.ArgumentParser) -> None:
    """Prints the row of the command line as JSON, and adds it to a file of such lines where one is named."""
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    line = json.dumps(row(given))
    print(line)
    if given.output:
        with given.output.open("a") as file:
            file.write(line + "\n")


def film_parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of a row about a pipeline on a film."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("network")
    parser.add_argument("--source", required=True)
    parser.add_argument("--mask")
    parser.add_argument("--mode")
    return parser


def film_facts(given: argparse.Namespace) -> Row:
    """What such a row says of its options."""
    return {"network": given.network, "source": Path(given.source).name, "mode": given.mode, "mask": given.mask}


def processor() -> str:
    """The CPU's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
