"""What `sbnet run` says and shows of its frames: times, checks, outlines."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sbnet import BlockGrid
from sbnet.apps import cli, run, video, video_job
from sbnet.benchmarks.harness import dense
from sbnet.engine.oracle import Agreement
from sbnet.models import contour_net

SIZE = (24, 40)


def table_of(report: video_job.Report) -> dict[str, str]:
    """The closing table: each row's name, and the rest of its line."""
    order = run.Order(
        Path("film.mp4"), Path("o"), SIZE, None, 8, 0.08, torch.device("cpu"), torch.float32, None
    )  # fmt: skip
    console = Console(width=200)
    with console.capture() as capture:
        console.print(run.closing_table(order, report))
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]
    return {name: " ".join(rest) for name, *rest in cells}


def report(**changes) -> video_job.Report:
    given = {
        "densities": [0.25, 0.05, 0.15], "masked_ms": [4.0, 1.0, 1.0], "dense_ms": [20.0, 28.0],
        "checks": [Agreement(1.0, 1.0, 0.0, 0.125)], "dense_form": "a form",
    }  # fmt: skip
    return video_job.Report(**{**given, **changes})


def test_the_table_has_means_and_their_ratio():
    rows = table_of(report())
    assert rows["frames"].split() == ["3"]
    assert rows["mean density"].startswith("15.0% ")
    assert rows["dense"] == "24 ms mean of 2 frames, a form"
    assert rows["masked"].startswith("2 ms mean of all frames")
    assert rows["speed-up"].split() == ["12.00x"]


@pytest.mark.parametrize("worst", [0, 1, 2])
def test_the_table_has_the_worst_check(worst):
    checks = [Agreement(1.0, 4.0, 0.0, 0.5)] * 3
    checks[worst] = Agreement(3.0, 2.0, 0.0, 0.75)
    rows = table_of(report(checks=checks))
    assert rows["largest difference"] == "0.75 from the masked oracle, 3 frames checked"
    assert rows["rms error"].startswith("1.50x ")


@pytest.fixture
def job(monkeypatch) -> tuple[video_job.VideoJob, list[float]]:
    """A job on a clock of its own: 2 ms a masked frame, 30 ms a dense one, whatever they really take."""
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense._eager(net, x.dtype)})
    job, now = video_job.VideoJob(contour_net(), SIZE, block=8), [0.0]
    masked, form = job.masked, job._dense

    class Slow:
        active = property(lambda _: masked.active)

        def __call__(self, x):
            now[0] += 2e-3
            return masked(x)

    def slow_dense(x):
        now[0] += 30e-3
        return form.run(x)

    def prepare(x):
        now[0] += 1.0  # not of the network
        return form.prepare(x)

    job.masked, job._dense = Slow(), dense.Form(prepare, slow_dense)
    monkeypatch.setattr(video_job.time, "perf_counter", lambda: now[0])
    return job, now


def test_times_are_milliseconds_of_a_frame(job):
    job, _ = job
    rng = np.random.default_rng(0)
    for _ in range(11):
        job.step(rng.integers(0, 255, (*SIZE, 3), np.uint8))
    assert job.report.masked_ms == pytest.approx([2.0] * 11)
    assert job.report.dense_ms == pytest.approx([30.0] * 2)  # frames 0 and 10
    assert job.report.speed_up == pytest.approx(15.0)
    assert [check.holds for check in job.report.checks] == [True, True]  # frames 0 and 1


@pytest.fixture
def film(tmp_path, monkeypatch) -> Path:
    """A bright square that walks, as if PyAV had read it."""
    frames = [np.full((*SIZE, 3), 40, np.uint8) for _ in range(12)]
    for k, frame in enumerate(frames):
        frame[4:12, 2 * k : 2 * k + 8] = 230
    monkeypatch.setattr(video, "video_info", lambda _: video.VideoInfo(*SIZE, Fraction(10), len(frames)))
    monkeypatch.setattr(video, "read_frames", lambda *_: iter(frames))
    (tmp_path / "film.mp4").touch()
    return tmp_path / "film.mp4"


def invoke(film: Path, *options: str):
    return CliRunner().invoke(cli.app, ["run", str(film), "-o", str(film.parent / "o"), *options])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_run_on_a_gpu_without_pyav(film, dtype):
    result = invoke(film, "--device", "cuda", "--block", "8", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert ("float16" if dtype == "auto" else "float32") in said
    assert torch.cuda.get_device_name() in said
    assert "2 frames checked" in said
    assert len(list((film.parent / "o").iterdir())) == 12


@pytest.mark.parametrize("wrong", [0, 1, None])
def test_one_wrong_check_of_several_fails(wrong, film, monkeypatch):
    monkeypatch.setattr(dense, "forms", lambda net, x: {"PyTorch": dense._eager(net, x.dtype)})
    checks = []

    def compare(*_):
        checks.append(Agreement(3.0 if len(checks) == wrong else 1.0, 1.0, 0.0, 0.0))
        return checks[-1]

    monkeypatch.setattr(video_job, "compare", compare)
    result = invoke(film, "--device", "cpu")
    assert len(checks) == 2, result.output
    assert result.exit_code == (0 if wrong is None else 1), result.output


@pytest.mark.parametrize(("height", "width", "axis"), [(21, 30, 1), (30, 21, 1), (13, 30, 0)])
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
