"""What `sbnet run` says and shows of its frames: times, checks, outlines."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sbnet import BlockGrid, Pipeline
from sbnet.apps import video
from sbnet.apps.pipeline import Frame, Summary, checks, compute, dense_side, sources
from sbnet.benchmarks.harness import dense
from sbnet.engine.oracle import Agreement
from sbnet.engine.sparsify import SparseRun
from sbnet_command import cli

SIZE = (24, 40)


def table_of(summary: Summary) -> dict[str, str]:
    """The closing table: each row's name, and the rest of its line."""
    return {name: " ".join(rest).strip() for name, *rest in summary.rows()}


def summary(checks=()) -> Summary:
    found = Summary("film.mp4", "masked", dense_form="a form", seconds=0.5)
    for series, numbers in (
        (found.densities, [0.25, 0.05, 0.15]), (found.ms, [4.0, 1.0, 1.0]), (found.dense_ms, [20.0, 28.0, 24.0])
    ):  # fmt: skip
        for number in numbers:
            series.add(number)
    for check in checks:
        found.check(check)
        found.windows.append((32, 48))
    return found


def test_the_table_has_means_and_their_ratio():
    rows = table_of(summary())
    assert rows["frames"] == "3"
    assert rows["mean density"].startswith("15.0% ")
    assert rows["frames a second"].startswith("6 ")
    assert rows["dense"] == "24 ms mean of 3 frames, a form"
    assert rows["masked"].startswith("2 ms mean of all frames")
    assert rows["speed-up"].startswith("12.00x")


@pytest.mark.parametrize("worst", [0, 1, 2])
def test_the_table_has_the_worst_check(worst):
    checks = [Agreement(1.0, 4.0, 0.0, 0.5)] * 3
    checks[worst] = Agreement(3.0, 2.0, 0.0, 0.75)
    rows = table_of(summary(checks))
    assert rows["largest difference"] == "0.75 from the masked oracle; 3 frames checked, windows of up to 32x48"
    assert rows["its rms"].startswith("1.50x ")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_difference_that_is_no_number_is_not_lost(at):
    checks = [Agreement(1.0, 4.0, 0.0, 0.5)] * 3
    checks[at] = Agreement(float("nan"), 2.0, 0.0, float("nan"))
    rows = table_of(summary(checks))
    assert rows["largest difference"].startswith("nan ")
    assert rows["its rms"].startswith("nanx ")
    y = torch.ones(1, 2, 4, 4)
    broken = y.clone()
    broken[0, 1, 2, 3] = float("nan")
    outputs = [y, y, y]
    outputs[at] = broken
    error, largest, place = dense_side.compared(outputs, [y, y, y], None)
    assert math.isnan(error)
    assert math.isnan(largest)
    assert place == (0, 1, 2, 3)


def test_times_are_milliseconds_of_a_frame(monkeypatch):
    """On a clock of its own: 2 ms a masked frame, 30 ms a dense one, whatever they really take; making the dense
    network's input is not its time."""
    now = [0.0]
    form = dense.form_of_torch

    def slow_dense(net, x):
        own = form(net, x.dtype)

        def prepare(x):
            now[0] += 1.0
            return own.prepare(x)

        def run(x):
            now[0] += 30e-3
            return own.run(x)

        return {"slow": dense.Form(prepare, run)}

    true = compute.Compute._call

    def slow(*arguments):
        now[0] += 2e-3
        return true(*arguments)

    monkeypatch.setattr(dense, "forms", slow_dense)
    monkeypatch.setattr(compute.Compute, "_call", slow)
    monkeypatch.setattr(compute.time, "perf_counter", lambda: now[0])
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, (*SIZE, 3), np.uint8) for _ in range(11)]
    found = Pipeline(frames, block=8, device="cpu", compare=10).run()
    assert found.ms.count == 11
    assert found.ms.mean == pytest.approx(2.0)
    assert found.dense_ms.count == 4  # frames 1, 2, 3 and 10; the first was whole
    assert found.dense_ms.mean == pytest.approx(30.0)
    assert found.speed_up == pytest.approx(15.0)
    assert (found.checks, found.holds) == (0, True)
    assert (
        table_of(found)["its rms"] == "n/a not checked against the masked oracle: it would take more than 5% of the run"
    )


@pytest.fixture
def film(tmp_path, monkeypatch) -> Path:
    """A bright square that walks, as if PyAV had read it."""
    frames = [np.full((*SIZE, 3), 40, np.uint8) for _ in range(12)]
    for k, frame in enumerate(frames):
        frame[4:12, 2 * k : 2 * k + 8] = 230
    monkeypatch.setattr(video, "video_info", lambda _: video.VideoInfo(*SIZE, Fraction(10), len(frames)))
    monkeypatch.setattr(sources, "_of_film", lambda *_: (Frame(k, frame) for k, frame in enumerate(frames)))
    (tmp_path / "film.mp4").touch()
    return tmp_path / "film.mp4"


def invoke(film: Path, *options: str):
    return CliRunner().invoke(cli.app, ["run", str(film), "-o", str(film.parent / "o"), *options])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_run_on_a_gpu_without_pyav(film, dtype):
    result = invoke(film, "--device", "cuda", "--block", "8", "--dtype", dtype, "--check", "1000", "--decoder", "host")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert ("float16" if dtype == "auto" else "float32") in said
    assert torch.cuda.get_device_name() in said
    assert "3 frames checked" in said
    assert len(list((film.parent / "o").iterdir())) == 12


@pytest.mark.parametrize("wrong", [0, 2, None])
def test_one_wrong_check_of_several_fails(wrong, film, monkeypatch):
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})
    found = []

    def compare(*_):
        found.append(Agreement(3.0 if len(found) == wrong else 1.0, 1.0, 0.0, 0.0))
        return found[-1]

    monkeypatch.setattr(checks, "compare", compare)
    result = invoke(film, "--device", "cpu", "--block", "8", "--check", "1000")
    assert len(found) == 3, result.output
    assert result.exit_code == (0 if wrong is None else 1), result.output


@pytest.mark.parametrize(("height", "width", "axis"), [(23, 30, 1), (30, 21, 1), (13, 30, 0)])
def test_active_blocks_are_outlined_where_they_are(height, width, axis):
    """No plane or list here is its own mirror image."""
    rng = np.random.default_rng(0)
    grid = BlockGrid.cover((height, width), (4, 7))
    active = np.zeros(grid.bcount, bool)
    active[0, 1] = active[2, 0] = active[-1, -1] = True
    frame, output = (rng.integers(0, 255, (height, width, 3), np.uint8) for _ in range(2))
    want = frame // 3
    for i, j in zip(*active.nonzero(), strict=True):
        top, left = 4 * i, 7 * j
        bottom, right = min(top + 4, height), min(left + 7, width)
        want[top:bottom, left:right] = frame[top:bottom, left:right] // 2 + video.OUTLINE // 2
        inner = slice(top + 1, bottom - 1), slice(left + 1, right - 1)
        want[inner] = frame[inner]
    picture = video.compose(frame, active, grid, output)
    assert np.array_equal(picture, np.concatenate([want, output], axis))


def test_the_bar_says_that_the_dense_form_is_looked_for(monkeypatch):
    """It may take longer than all frames; later ones are compared at once."""
    stages = []
    true, beside = compute.dense_side, compute.compared

    def seen(*given):
        stages.append(pipeline.summary.stage)
        return true(*given)

    def compared(*given):
        stages.append(pipeline.summary.stage)
        return beside(*given)

    monkeypatch.setattr(compute, "dense_side", seen)
    monkeypatch.setattr(compute, "compared", compared)
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense.form_of_torch(net, x.dtype)})
    frames = np.zeros((3, *SIZE, 3), np.uint8)
    pipeline = Pipeline(frames, "all", "contours", device="cpu", compare=2)
    pipeline.run(lambda summary, expected: stages.append(summary.stage))
    timing, comparing = "timing dense forms", "comparing"
    assert stages == ["running", timing, timing, "running", comparing, "running"]


@pytest.mark.parametrize("mask", ["all", "all & nodata:300"])  # found by the run itself, and before the call
@pytest.mark.parametrize("mode", ["masked", "cached"])
def test_plans_for_further_sizes_are_no_part_of_the_run(mask, mode, monkeypatch):
    """Pictures of a folder have sizes of their own; one that was there before is not planned again."""
    inside, planned = [], []
    set_up, plan = compute.Compute._set_up, SparseRun._planned

    def setting_up(self, given):
        inside.append(True)
        try:
            return set_up(self, given)
        finally:
            inside.pop()

    def seen(self, given):
        planned.append((tuple(given[0].shape[2:]), bool(inside)))
        return plan(self, given)

    monkeypatch.setattr(compute.Compute, "_set_up", setting_up)
    monkeypatch.setattr(SparseRun, "_planned", seen)
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, (*size, 3), np.uint8) for size in (SIZE, (40, 56), SIZE, (40, 56))]
    results = []
    done = Pipeline(frames, mask, "contours", results.append, mode=mode, device="cpu", compare=0).run()
    assert planned == [(SIZE, True), ((40, 56), True)]
    assert done.plans.count == 2
    assert "2 sizes" in table_of(done)["setting up"]
    for frame, result in zip(frames, results, strict=True):
        alone = []
        Pipeline([frame], mask, "contours", alone.append, mode=mode, device="cpu", compare=0).run()
        assert torch.equal(torch.as_tensor(result.picture), torch.as_tensor(alone[0].picture))
