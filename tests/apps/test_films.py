"""A folder of films over two workers: each film whole, finished ones skipped, broken ones named."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import pytest
from torch import nn
from typer.testing import CliRunner

from sbnet.apps import video
from sbnet.apps.pipeline import Network, PipelineError, films
from sbnet_command import cli
from support.films import pictures
from support.films import walking_square as film

pytest.importorskip("av")


def test_films_are_found_by_name(tmp_path):
    for name in ("b.mp4", "a.MKV", "notes.txt"):
        (tmp_path / name).touch()
    assert [p.name for p in films.find_films(tmp_path)] == ["a.MKV", "b.mp4"]
    assert [p.name for p in films.find_films(f"{tmp_path}/*.mp4")] == ["b.mp4"]
    with pytest.raises(PipelineError, match="expected films"):
        films.find_films(tmp_path / "none")
    with pytest.raises(PipelineError, match="got a URL"):
        films.find_films("http://here/a.mp4")
    (tmp_path / "a.avi").touch()
    with pytest.raises(PipelineError, match=r"a.MKV and a.avi: expected films of different names"):
        films.find_films(tmp_path)


def test_pyav_that_knows_no_errors_of_tags_opens_a_film_too(tmp_path, monkeypatch):
    """From 19 on it has no argument for them."""
    film(tmp_path / "a.mp4", 3)
    av = video.pyav()
    of_today = av.open

    def without(file, mode="r", **options):
        assert mode != "r" or "metadata_errors" not in options or _raise(TypeError("unexpected keyword argument"))
        return of_today(file, mode, **options)

    monkeypatch.setattr(av, "open", without)
    assert video.video_info(tmp_path / "a.mp4").frames == 3


def _raise(error):
    raise error


def test_a_film_that_is_wrong_is_named_and_the_next_one_runs(tmp_path):
    """What an actor calls, in this process."""
    film(tmp_path / "good.mp4", 3)
    (tmp_path / "bad.mp4").write_bytes(b"no film")
    out, order = tmp_path / "out", {"network": "n"}
    network = Network(nn.Conv2d(3, 3, 3, padding=1).eval())
    runner = films.FilmRunner(network, "motion", "cpu", out, order, {"compare": 0})
    bad, good = (runner(tmp_path / name) for name in ("bad.mp4", "good.mp4"))
    assert "bad.mp4: not a video" in bad["fault"]
    assert good["fault"] == ""
    assert good["frames"] == 3
    assert good["device"].startswith("CPU, ")
    assert json.loads((out / "good.done.json").read_text())["device"] == good["device"]
    assert sorted(p.name for p in out.iterdir()) == ["good.done.json", "good.jsonl", "good.mp4"]
    assert runner.is_done(tmp_path / "good.mp4")
    assert not dataclasses.replace(runner, order={"network": "another"}).is_done(tmp_path / "good.mp4")
    assert not runner.is_done(tmp_path / "bad.mp4")
    (out / "good.jsonl").unlink()
    assert not runner.is_done(tmp_path / "good.mp4")


def test_a_worker_says_which_gpu_is_its_own(monkeypatch):
    monkeypatch.setattr(films, "device_name", lambda device: f"one {device.type}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert films._where("cuda") == "one cuda, GPU 3"
    assert films._where("cpu") == "one cpu"


@pytest.fixture
def cluster():
    """Ray with two cores, for the time of a test."""
    ray = pytest.importorskip("ray", reason="needs the extra distributed")
    pytest.importorskip("pyarrow")

    def start() -> None:
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    yield start
    ray.shutdown()


PATIENT = """
import time
from pathlib import Path
from torch import nn
from sbnet.apps import video
from sbnet.apps.pipeline import Network

def network():
    def finish(output, frame):
        told = Path(__file__).with_name("told")
        until = time.monotonic() + 60
        while int(frame.picture()[-1, -1, 0]) > 75 and not told.exists():  # the film's floor
            if time.monotonic() > until:
                raise TimeoutError("no row came before this film ended")
            time.sleep(0.05)
        return output, []

    return Network(nn.Conv2d(3, 3, 3, padding=1).eval(), "patient", finish=finish)
"""


@pytest.mark.slow
def test_two_workers_share_a_folder(tmp_path, cluster, monkeypatch):
    """Of names that are relative to where the call is made, not to where Ray was started; a film's row comes as soon
    as it is done: the last film waits for it."""
    folder, out = tmp_path / "films", tmp_path / "out"
    folder.mkdir()
    for k in range(4):
        film(folder / f"{k}.mp4", 2 + k, 100 if k == 3 else 40)
    (folder / "broken.mp4").write_bytes(b"no film")
    (tmp_path / "patient_network.py").write_text(textwrap.dedent(PATIENT))
    (tmp_path / "zones.json").write_text(json.dumps([[[0, 0], [8, 0], [8, 8]]]))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cluster()
    monkeypatch.chdir(tmp_path)
    order = {"mask": "motion | zones.json", "workers": 9, "device": "cpu", "compare": 0,
             "told": lambda row, count: (tmp_path / "told").touch() if not row["fault"] else None}  # fmt: skip
    found = films.run_films("films", "patient_network:network", "out", **order)
    assert not list(elsewhere.iterdir())
    whole = [row for row in found.rows if not row["fault"]]
    assert {row["film"]: row["frames"] for row in whole} == {f"{k}.mp4": 2 + k for k in range(4)}, found.rows
    assert [row["film"] for row in found.broken] == ["broken.mp4"]
    assert "broken.mp4: not a video" in str(found)
    assert "2 CPU workers" in str(found)
    for k in range(4):
        assert len(pictures(out / f"{k}.mp4")) == 2 + k
        assert len((out / f"{k}.jsonl").read_text().splitlines()) == 2 + k

    (out / "1.mp4").unlink()  # one of the finished is gone
    before = (out / "0.mp4").stat().st_mtime_ns
    film(folder / "4.mp4", 2)
    again = films.run_films("films", "patient_network:network", "out", **order)
    assert sorted(row["film"] for row in again.rows) == ["1.mp4", "4.mp4", "broken.mp4"]
    assert sorted(again.finished) == ["0.mp4", "2.mp4", "3.mp4"]
    assert (out / "0.mp4").stat().st_mtime_ns == before


MORTAL = """
import os, signal
from pathlib import Path
from torch import nn
from sbnet.apps import video
from sbnet.apps.pipeline import Network

def network():
    def finish(output, frame):
        level = int(frame.picture()[-1, -1, 0])  # the film's floor
        alive = Path(__file__).with_name("died")
        with open(alive, "a") as file:
            file.write(f"{os.getpid()} {level} {frame.index}\\n")
        once = frame.index == 1 and alive.read_text().count(f" {level} 1\\n") == 1
        if frame.index == 1 and (level > 150 or (level > 75 and once)):
            os.kill(os.getpid(), signal.SIGKILL)
        return output, []

    return Network(nn.Conv2d(3, 3, 3, padding=1).eval(), "mortal", finish=finish)
"""


@pytest.mark.slow
def test_a_killed_worker_costs_no_other_film(tmp_path, cluster, monkeypatch):
    """By the command itself: a film whose worker is killed is run once more; one that kills it again is named, leaves
    nothing under its name, and is tried anew by the next call."""
    folder, out = tmp_path / "films", tmp_path / "out"
    folder.mkdir()
    for name, floor in {"a": 40, "once": 100, "b": 40, "always": 180, "c": 40}.items():
        film(folder / f"{name}.mp4", 4, floor)
    (tmp_path / "mortal_network.py").write_text(textwrap.dedent(MORTAL))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    cluster()
    arguments = ["run", str(folder), "--network", "mortal_network:network", "--distributed", "--workers", "2", "-o",
                 str(out), "--device", "cpu", "--compare", "0"]  # fmt: skip
    result = CliRunner().invoke(cli.app, arguments)
    said = " ".join(result.output.split())
    assert result.exit_code == 1, said
    assert "always.mp4: its worker died" in said
    assert "4 films, 16 frames on 2 CPU workers" in said
    for name in ("a", "b", "c", "once"):
        assert len(pictures(out / f"{name}.mp4")) == 4
        assert (out / f"{name}.done.json").is_file()
    assert not list(out.glob("always.*"))
    assert not list(out.glob(".*"))  # nor parts of what was begun
    died = {line.split()[0] for line in (tmp_path / "died").read_text().splitlines() if line.endswith(" 1")}
    assert len(died) > 2  # processes
    again = " ".join(CliRunner().invoke(cli.app, arguments).output.split())
    assert "0 films, 0 frames on 1 CPU workers; 4 were finished before" in again


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from sbnet_command import cli
from sbnet.apps.pipeline import films

run_films = films.run_films

def one_then_ctrl_c(*given, told, **options):
    def both(row, count):
        told(row, count)
        os.kill(os.getpid(), signal.SIGINT)

    return run_films(*given, told=both, **options)

films.run_films = one_then_ctrl_c
sys.argv[0] = "sbnet"
cli.main()
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_nothing_else(tmp_path):
    pytest.importorskip("ray", reason="needs the extra distributed")
    folder, out = tmp_path / "films", tmp_path / "out"
    folder.mkdir()
    for name, frames in {"a": 3, "b": 4000}.items():
        film(folder / f"{name}.mp4", frames)
    arguments = ["run", str(folder), "--distributed", "--workers", "2", "-o", str(out), "--device", "cpu", "--compare",
                 "0"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stdout + done.stderr
    assert "ended by Ctrl-C; the same command goes on" in " ".join(done.stdout.split())
    assert sorted(p.name for p in out.iterdir()) == ["a.done.json", "a.jsonl", "a.mp4"]


def test_the_command(tmp_path, monkeypatch):
    """What it passes on; and it exits with 1 where a film is broken."""
    seen = {}

    def run_films(source, network, out, told, **options):
        seen.update(options, source=source, network=network, out=out)
        rows = [films.row_of(tmp_path / "a.mp4", "", frames=3), films.row_of(tmp_path / "b.mp4", "torn")]
        for row in rows:
            told(row, 2)
        return films.Films(rows, [], "2 CPU workers")

    monkeypatch.setattr(films, "run_films", run_films)
    arguments = ["run", "folder", "--network", "contours", "--distributed", "--workers", "2", "-o", "out", "--mode",
                 "cached", "--device", "cpu", "--mask", "motion"]  # fmt: skip
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "b.mp4: torn" in result.output
    assert seen["mode"] == "cached"
    assert (seen["source"], seen["network"], str(seen["out"]), seen["workers"]) == ("folder", "contours", "out", 2)
    json.dumps({k: v for k, v in seen.items() if k not in ("out", "told")})
    refused = CliRunner().invoke(cli.app, ["run", "folder", "--distributed"])
    assert refused.exit_code == 2
