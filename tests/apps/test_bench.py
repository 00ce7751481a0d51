"""sbnet bench: every benchmark at tiny sizes, and what is done with its figures."""

import copy
import csv
import functools
import itertools
import json
import mmap
import platform
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sbnet.benchmarks.harness import command, document, measure, registry, report, timing
from sbnet.benchmarks.harness.measure import Session
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Skip, Work, WrongResult
from sbnet.benchmarks.harness.timing import Timer, floor_us
from sbnet_command import cli

LIMITS = {
    "copy GB/s": 1.0, "cached copy GB/s": 2.0, "matrix TFLOP/s": {"float32": 1.0}, "launch us": 1.0, "cache MB": 1,
}  # fmt: skip
ONCE = Timer("cpu", rounds=1, repeat=1)


def tiny(device: str) -> list:
    quiet = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
    mark = [quiet, pytest.mark.gpu] if device == "cuda" else [quiet]
    return [pytest.param(device, case, id=case.title, marks=mark) for case in registry.cases(Setting(device, "tiny"))]


@pytest.mark.parametrize(("device", "case"), [*tiny("cpu"), *tiny("cuda")])
def test_every_benchmark(device, case):
    try:
        row = measure.measure(case, Timer(device, rounds=1, repeat=1), LIMITS)
    except Skip as lack:
        pytest.skip(str(lack))
    assert row["us"][row["ours"]] > 0
    json.dumps(row)


def test_sides_are_timed_once_a_round_in_changing_order():
    """Each after a call of its own that is not timed."""
    ran = []
    sides = {name: Side(functools.partial(ran.append, name)) for name in "abc"}
    found = Timer("cpu", rounds=6, repeat=1).medians(sides)
    turns = ran[-36:]
    assert turns[::2] == turns[1::2]
    rounds = ["".join(turns[at : at + 6 : 2]) for at in range(0, 36, 6)]
    assert found.keys() == sides.keys()
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}


@pytest.mark.gpu
def test_a_side_runs_alone_before_each_turn_that_is_timed():
    ran = []
    sides = {name: Side(functools.partial(ran.append, name), clock="eager") for name in "ab"}
    Timer("cuda", rounds=2, repeat=1, settle=0.05).medians(sides)
    turns = [(name, len(list(calls))) for name, calls in itertools.groupby(ran)][-3:]
    assert [name for name, _ in turns] == ["a", "b", "a"]  # b twice: the second round goes backwards
    assert min(calls for _, calls in turns) > 10


@pytest.mark.parametrize("level", ["tiny", "quick", "full"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_two_cases_are_called_the_same(device, level):
    titles = [(case.group, case.title) for case in registry.cases(Setting(device, level))]
    assert len(titles) == len(set(titles))
    assert {group for group, _ in titles} >= {"ops", "conv", "network"}


# ---- what a case is held to
def case(name: str = "a", wrong: str = "", paper: float | None = None, ran: list | None = None, **facts) -> Case:
    """A case that takes no time; the result of the side `wrong` is wrong."""

    def make() -> Work:
        if ran is not None:
            ran.append(name)
        kinds = {"ours": "ours", "ours, indexed": "indexed", "dense": "dense", "peer": "peer"}
        sides = {side: Side(lambda side=side: torch.tensor(float(side == wrong)), kind) for side, kind in kinds.items()}
        return Work(sides, lambda _, got: registry.same(got, torch.tensor(0.0)), flops=1e6, notes={"density": 0.5})

    return Case(name, "ops", {"size": [1, 2], **facts}, make, paper)


def session(*rows: dict) -> Session:
    environment = {"date": "2026-11-21", "device": "a machine", "sbnet": "0"}
    conditions = {"level": "full", "clock": "wall", "cache": "warm", "rounds": 1, "torch.compile": False}
    return Session(environment, conditions, LIMITS, [copy.deepcopy(row) for row in rows])


def test_a_row_has_times_ratios_and_the_floor():
    row = measure.measure(case(paper=3.0), ONCE, LIMITS)
    assert set(row["us"]) == {"ours", "ours, indexed", "dense", "peer"}
    assert row["x dense"] == row["us"]["dense"] / row["us"]["ours"]
    assert row["x indexed"] == row["us"]["dense"] / row["us"]["ours, indexed"]
    assert row["floor us"] == 2.0  # 1e6 operations at 1 TFLOP/s, and a launch
    assert (row["x paper"], row["density"]) == (3.0, 0.5)


def test_floor_knows_the_cache():
    assert floor_us(0, 2e5, "float32", LIMITS, cold=False) == pytest.approx(101)
    assert floor_us(0, 2e5, "float32", LIMITS, cold=True) == pytest.approx(201)
    assert floor_us(0, 2e6, "float32", LIMITS, cold=False) == pytest.approx(2001)


@pytest.mark.parametrize("wrong", ["ours", "ours, indexed", "dense"])
def test_a_wrong_result_gets_no_time(wrong):
    done = session()
    with pytest.raises(WrongResult, match=f"b: 1x2: {wrong}: 1 elements differ"):
        measure.run([case("a"), case("b", wrong=wrong), case("c")], done, ONCE)
    assert [row["name"] for row in done.rows] == ["a"]


def test_a_wrong_peer_is_left_out():
    row = measure.measure(case(wrong="peer"), ONCE, LIMITS)
    assert "peer" not in row["us"]
    assert row["wrong"] == {"peer": "1 elements differ"}


def test_closeness_is_measured_against_torchs_own_error():
    exact = torch.ones(2, 4, dtype=torch.float64)
    torchs = (exact + 1e-4).float()
    assert registry.close((exact + 1.9e-4).float(), torchs, exact) == pytest.approx(1.9e-4, rel=1e-2)
    with pytest.raises(WrongResult, match="twice PyTorch's own"):
        registry.close((exact + 2.1e-4).float(), torchs, exact)
    with pytest.raises(WrongResult, match="rms error: expected .*, got nan"):
        registry.close(torch.full((2, 4), float("nan")), torchs, exact)
    inside = torch.tensor([True, False, False, False]).expand(2, 4)
    registry.close(torch.where(inside, 1.0, float("nan")), torchs, exact, inside)
    with pytest.raises(WrongResult, match="shape"):
        registry.close(torch.ones(1, 4), torchs, exact)


# ---- runs that end early
def test_an_interrupt_keeps_what_was_measured(tmp_path):
    def interrupted() -> Work:
        raise KeyboardInterrupt

    done, path = session(), tmp_path / "r.json"
    every = [case("a"), Case("b", "ops", {}, interrupted), case("c")]
    assert not measure.run(every, done, ONCE, save=lambda: done.save(path))
    assert [row["name"] for row in Session.load(path).rows] == ["a"]


def test_the_time_budget_and_resuming():
    done, ran = session(), []
    every = [case(name, ran=ran) for name in "abc"]
    assert not measure.run(every, done, ONCE, budget=-1)
    assert not ran
    assert measure.run(every[1:], done, ONCE)
    assert measure.run(every, done, ONCE)
    assert ran == ["b", "c", "a"]
    assert [row["name"] for row in done.rows] == ["a", "b", "c"]


def test_a_resumed_session_has_the_better_ceilings():
    row = measure.measure(case(), ONCE, LIMITS)
    before, now = session(row), session()
    now.limits = {**LIMITS, "matrix TFLOP/s": {"float32": 2.0}, "copy GB/s": 0.5, "launch us": 0.5}
    limits = measure.resume(before, now).limits
    assert (limits["matrix TFLOP/s"]["float32"], limits["copy GB/s"], limits["launch us"]) == (2.0, 1.0, 0.5)
    assert before.rows[0]["floor us"] == 1.0
    assert before.rows[0]["of floor"] == 1.0 / row["us"]["ours"]


def test_what_is_missing_is_noted():
    def missing() -> Work:
        raise Skip("no such package")

    done = session()
    assert measure.run([Case("a", "ops", {}, missing), case("b")], done, ONCE)
    assert done.skipped == {"a: ": "no such package"}
    assert len(done.rows) == 1


def test_groups_are_known():
    with pytest.raises(ValueError, match="group: expected one of ops, conv, block, network.*, got 'op'"):
        Case("a", "op", {}, lambda: None)


# ---- the command
def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["bench", *(str(a) for a in arguments)])


def test_command_measures_filters_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ceilings", lambda *_: LIMITS)
    path = tmp_path / "sub" / "r.json"
    options = "--quick", "--device", "cpu", "--rounds", 1, "-o", path
    result = invoke("ops", *options, "--only", "reduce_mask BOOL")
    assert result.exit_code == 0, result.output
    for word in ("reduce_mask, 16x16", "x dense", "device", "torch", "cache warm", "wrote"):
        assert word in result.output
    assert invoke("ops", *options, "--only", "reduce_mask", "--resume").exit_code == 0
    rows = Session.load(path).rows
    assert [row["facts"]["dtype"] for row in rows] == ["float32", "bool", "float32"]
    lines = list(csv.DictReader(path.with_suffix(".csv").open()))
    assert len(lines) == 3
    assert lines[0]["size"] == "1x400x704"
    assert float(lines[0]["us"]) > 0
    refused = invoke("ops", *options, "--only", "reduce_mask", "--resume", "--cold")
    assert refused.exit_code == 1
    assert "expected rows of this device and these settings, got others" in " ".join(refused.output.split())


def test_the_verdict_and_what_is_shared(tmp_path, monkeypatch):
    row = measure.measure(case(), ONCE, LIMITS) | {"group": "conv", "us": {"ours": 10.0, "dense": 80.0}}
    few = [row | {"density": 0.1, "x dense": 8.0}, row | {"density": 0.12, "x dense": 4.0}]
    done = session(*few, row | {"density": 1.0, "x dense": 1.2}, row | {"density": 0.5, "x dense": 2.0})
    few_blocks, every = report.verdict(done)
    assert "5 to 15 % of the blocks active: convolutions 4 to 8x as fast" in few_blocks
    assert "all of them: convolutions 1.2x as fast" in every
    assert report.verdict(session()) == []
    monkeypatch.setattr(measure, "ceilings", lambda *_: LIMITS)
    path = tmp_path / "share.json"
    result = invoke("ops", "--quick", "--device", "cpu", "--rounds", 1, "--only", "reduce_mask BOOL", "--share", path)
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    assert [row["name"] for row in told["rows"]] == ["reduce_mask, 16x16"]
    assert told["environment"]["torch"] == torch.__version__
    assert str(Path.home()) not in path.read_text()
    assert platform.node() not in path.read_text()


def test_command_lists_and_refuses():
    result = invoke("conv", "--list", "--device", "cpu")
    assert "conv 3x3, SBNet's grid: 1x400x704 24 float32 top-left 16x16 0.9" in result.output
    result = invoke("--only", "no such case", "--device", "cpu")
    assert result.exit_code == 1
    assert "no case of" in result.output


def compared(tmp_path, before: Session, after: Session, *options: object):
    before.save(tmp_path / "a.json")
    after.save(tmp_path / "b.json")
    return invoke("--compare", tmp_path / "a.json", tmp_path / "b.json", *options)


def test_command_compares(tmp_path):
    row = measure.measure(case(), ONCE, LIMITS) | {"us": {"ours": 10.0, "dense": 30.0}, "x dense": 3.0}
    slow = row | {"us": {"ours": 12.0, "dense": 30.0}, "x dense": 2.5}
    busy = row | {"us": {"ours": 20.0, "dense": 60.0}}  # everything took longer: the machine, not the code
    assert compared(tmp_path, session(row), session(row)).exit_code == 0
    assert compared(tmp_path, session(row), session(busy)).exit_code == 0
    assert compared(tmp_path, session(slow), session(row)).exit_code == 0
    result = compared(tmp_path, session(row), session(slow))
    assert result.exit_code == 1
    assert "1 cases compared: 1 slower, 0 faster by over 10%" in " ".join(result.output.split())
    assert compared(tmp_path, session(row), session(slow), "--threshold", 0.25).exit_code == 0
    plain = {k: v for k, v in row.items() if k != "x dense"}
    assert report.changes([plain], [plain | {"us": {"ours": 20.0}}])[0].factor == 2


@pytest.mark.parametrize("fault", ["device", "cases", "file"])
def test_command_compares_what_can_be_compared(tmp_path, fault):
    row = measure.measure(case(), ONCE, LIMITS)
    other = session(row | {"name": "b"} if fault == "cases" else row)
    if fault == "device":
        other.environment["device"] = "another machine"
    result = compared(tmp_path, session(row), other)
    if fault == "file":
        (tmp_path / "b.json").write_text("{}")
        result = invoke("--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert result.exit_code == 1
    message = {"device": "cannot be compared", "cases": "no case in common", "file": "is no result file"}[fault]
    assert message in " ".join(result.output.split())


# ---- the document
def sweep() -> Session:
    rows = []
    for sparsity in (0.0, 0.5, 0.9):
        row = measure.measure(case("conv", paper=2.0, sparsity=sparsity), ONCE, LIMITS)
        rows.append(row | {"density": 1 - sparsity, "x dense": 0.8 / (1 - sparsity)})
    for row in rows:
        row["facts"] |= {"channels": 8, "dtype": "float32", "mask": "random"}
    return session(*rows)


def test_document_of_a_sweep(tmp_path):
    text = document.document({"here": sweep()})
    assert "| conv | 1x2x8 | 2 |" in text  # beside the paper
    assert "| 0 | 0.5 | 0.9 |" in text
    assert "](plots/here-conv.svg)" in text
    judged = sweep()
    for row in judged.rows:
        row |= {"served by": "a kernel", "wanted": 5.0}
    assert re.search(r"\| a kernel \| 0\.8.* / 5 \|", document.document({"here": judged}))
    pytest.importorskip("matplotlib")
    from sbnet.benchmarks.harness import plots

    assert plots.crossing([(1.0, 0.8), (0.5, 1.6), (0.1, 8.0)]) == pytest.approx(0.839, abs=1e-3)
    assert plots.crossing([(1.0, 1.1), (0.5, 2.0)]) == 1.0
    assert plots.crossing([(1.0, 0.5), (0.5, 0.9)]) == 0.0
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        plots.draw("conv", sweep(), path)
        assert "1 / density" in path.read_text()


def test_the_document_is_made_of_the_results():
    """docs/benchmarks.md: `sbnet bench --docs` after a change of results or of document.py."""
    folder = Path(__file__).parents[2] / "docs"
    if not folder.is_dir():
        pytest.skip("no source tree")
    sessions = document.load_results(folder.parent / "benchmarks" / "results")
    assert document.page(sessions) == (folder / "benchmarks.md").read_text()
    shown = document.shown(sessions)
    plots = {document.plot_file(stem, name) for stem, s in shown.items() for name in document.swept(s)}
    assert plots == {path.relative_to(folder).as_posix() for path in (folder / "plots").glob("*.svg")}


def test_the_page_shows_the_named_tables_and_refuses_names_that_are_not_there():
    sessions = {"here": sweep()}
    assert document.shown(sessions, {"here": ["conv"]})["here"].rows == sessions["here"].rows
    whole, brief = (document.document(sessions, brief=brief) for brief in (False, True))
    assert "copy GB/s" in whole
    assert "copy GB/s" not in brief
    with pytest.raises(KeyError, match="here: no table other"):
        document.shown(sessions, {"here": ["conv", "other"]})
    with pytest.raises(KeyError, match="gone"):
        document.shown(sessions, {"gone": ["conv"]})


def test_command_writes_every_table_into_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    sessions = {"here": sweep()}
    monkeypatch.setattr(document, "load_results", lambda: sessions)
    assert invoke("--docs", "--tables", tmp_path / "all").exit_code == 0
    assert (tmp_path / "all" / "benchmarks.md").read_text() == document.document(sessions)
    assert (tmp_path / "all" / "plots" / "here-conv.svg").is_file()
    assert "--tables: goes with --docs" in invoke("--tables", tmp_path).output


def test_results_are_lines_that_say_what_they_are_of(tmp_path):
    row = measure.measure(case(), ONCE, LIMITS)
    assert set(row["of"]) == {"csrc", "device", "sbnet", "torch"}
    path = tmp_path / "r.jsonl"
    session(row, row).save(path)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[1])["of"] == row["of"]
    assert Session.load(path).rows[1]["of"] == row["of"]


def test_page_faults_are_counted_and_have_a_price():
    kept = torch.zeros(2**24)
    assert timing.page_faults(fresh) >= 32  # 64 MiB, if all of it came as huge pages
    assert timing.page_faults(lambda: kept.fill_(1)) < 32
    assert 0 < timing.fault_us() < 100
    row = measure.measure(Case("a", "ops", {}, lambda: faulty()), ONCE, LIMITS)
    assert set(row["page faults"]) <= {"ours", "dense"}
    assert row["page faults"]["dense"] > row["page faults"].get("ours", 0)


def faulty() -> Work:
    """Ours writes where it wrote before, dense makes its output anew."""
    kept = torch.zeros(2**24)
    sides = {"ours": Side(lambda: kept.fill_(1), "ours"), "dense": Side(fresh)}
    return Work(sides, lambda *_: 0.0)


def fresh() -> torch.Tensor:
    """64 MiB that the process never had: malloc may give back what earlier tests have touched."""
    return torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.float32).fill_(1)


def test_command_needs_a_checkout_for_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "RESULTS", tmp_path / "none")
    with pytest.raises(command.BenchError, match="works in a checkout"):
        command.make_documents(None)
