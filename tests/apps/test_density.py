"""`sbnet density`: what a mask makes active, what recorded networks gained at that; the page that says so."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sbnet import masks
from sbnet.apps.density import GAINS, Curve, curves, measure, pays_from
from sbnet.apps.pipeline import Frame, PipelineError
from sbnet.benchmarks.harness import document, gains
from sbnet_command import cli
from support.films import walking_square

CURVE = Curve("a network", "a machine", "float32", "2026-01-01", [(0.1, 10.0), (0.5, 2.0), (1.0, 1.0)])


def floor(count: int) -> list[np.ndarray]:
    return [np.full((64, 96, 3), 40, np.uint8) for _ in range(count)]


def test_shares_are_those_of_the_masks_blocks():
    """Blocks of 16 in 64x96: 24; two are touched, with a margin six, in blocks of 32 one of six."""
    mask = masks.Boxes([[34, 20, 60, 30]])
    for given, wanted in (({}, 2 / 24), ({"margin": 12}, 12 / 24), ({"block": 32}, 1 / 6)):
        found = measure(floor(4), mask, **given)
        assert found.shares.tolist() == pytest.approx([wanted] * 3)
    assert measure(floor(1), mask).shares.tolist() == pytest.approx([2 / 24])  # the only one
    assert measure(floor(9), mask, limit=3).shares.size == 2


def test_the_first_frame_is_left_out_and_cuts_are_not():
    still = floor(6)
    cut = [np.full((64, 96, 3), 220, np.uint8) for _ in range(3)]
    found = measure(still + cut)
    assert found.shares.tolist() == [0.0] * 5 + [1.0, 0.0, 0.0]
    assert found.facts()["whole_frames"] == pytest.approx(1 / 8)
    assert found.facts()["density"] == pytest.approx(1 / 8)


def test_broken_frames_are_counted():
    frames = [
        Frame(k, None if k == 2 else picture, fault="torn" if k == 2 else "") for k, picture in enumerate(floor(4))
    ]
    found = measure(frames)
    assert (found.broken, found.shares.size) == (1, 2)
    with pytest.raises(PipelineError, match="no frames that can be read"):
        measure(frames[2:3])


def test_a_source_without_an_end_is_asked_for_no_more_than_the_limit():
    def forever():
        yield from floor(3)
        raise AssertionError("asked for a fourth frame")

    assert measure(forever(), limit=3).shares.size == 2


@pytest.mark.parametrize("mask", ["tracks", "motion | tracks + 8"])
def test_masks_that_want_a_network_are_refused(mask):
    with pytest.raises(PipelineError, match="follows what a network finds"):
        measure(floor(2), mask)


def test_the_gain_is_that_of_the_frames_times():
    """Half of the frames whole, half at a tenth: 2 / (1 + 1/10), not the gain at their mean."""
    assert CURVE.gain(np.array([0.1, 1.0])) == pytest.approx(2 / 1.1)
    assert CURVE.gain(np.array([0.3])) == pytest.approx(1 / 0.3)  # between 1/10 and 1/2 of the time
    assert CURVE.gain(np.array([0.01])) == pytest.approx(10.0)  # nothing below was measured
    assert CURVE.is_bound(np.array([0.01, 0.02, 0.9]))
    assert not CURVE.is_bound(np.array([0.1, 0.2]))


def test_from_where_on_it_pays():
    assert pays_from(4.0, 2.0) == "> 8 ms"
    assert pays_from(4.0, 1.0) == pays_from(4.0, 0.7) == "never"


def test_the_command(tmp_path):
    pytest.importorskip("av")
    film = walking_square(tmp_path / "square.mp4", 12)
    run = CliRunner().invoke(cli.app, ["density", str(film), "--json", "--device", "cpu", "--frames", "9"])
    assert run.exit_code == 0, run.output
    facts = json.loads(run.stdout)
    assert (facts["frames"], facts["broken"]) == (8, 0)
    assert 0 < facts["density"] < 0.9
    assert [g["like"] for g in facts["gains"]] == [c.like for c in curves()]
    assert all(key.isidentifier() for found in (facts, *facts["gains"]) for key in found)
    run = CliRunner().invoke(cli.app, ["density", str(film), "--device", "cpu", "--mask", "motion + 8"])
    said = " ".join(run.stdout.split())
    assert run.exit_code == 0, run.output
    assert all(word in said for word in ("motion + 8", "active blocks", "finding the mask", "x dense", "depthwise"))
    for order, wanted in ((["none.mp4"], "none.mp4: no such file"), ([str(film), "--mask", "what"], "mask")):
        run = CliRunner().invoke(cli.app, ["density", *order])
        assert run.exit_code == 1
        assert "sbnet: error" in run.stderr
        assert wanted in run.stderr
        assert len(run.stderr.strip().splitlines()) == 1


# ---- recorded figures


def test_the_page_and_the_curves_are_made_of_the_results():
    """docs/is_it_for_me.md and sbnet/apps/gains.json: `sbnet bench --docs` after a change of results or of gains.py."""
    page = Path(__file__).parents[2] / "docs" / "is_it_for_me.md"
    if not page.exists():
        pytest.skip("no source tree")
    sessions, results = document.load_results(document.RESULTS), document.RESULTS
    made = gains.parts(sessions, *gains.load(results))
    text = page.read_text()
    assert gains.filled(text, made, "page", "gains.py") == text
    stale = text.replace("x |", "1x |", 1)
    assert stale != text
    assert gains.filled(stale, made, "page", "gains.py") == text
    assert gains.as_json(gains.curves(sessions)) == GAINS.read_text()


def test_the_long_films_memory():
    page = Path(__file__).parents[2] / "docs" / "pipeline.md"
    if not page.exists():
        pytest.skip("no source tree")
    (row,) = map(json.loads, (document.RESULTS / "pipelines" / "long_film.jsonl").read_text().splitlines())
    taken = row["MiB after each thousand"]
    said = f"{row['frames']:,} small frames took {taken[0]:.0f} MiB after its first thousand, {taken[5]:.0f} after six"
    assert f"{said} and {taken[-1]:.0f} at the end" in " ".join(page.read_text().split())


def test_curves_hold_what_was_recorded():
    for curve in curves():
        at = [share for share, _ in curve.points]
        assert at == sorted(set(at)), curve.like
        assert all(0 < share <= 1 and gain > 0 for share, gain in curve.points), curve.like


def session_of(*rows: dict) -> document.Session:
    environment = {"device": "chip", "date": "2026-01-01", "threads": 2, "instructions": "avx2"}
    return document.Session(environment, {}, {}, list(rows))


def row(network: str, density: float, gain: float, **facts) -> dict:
    facts = {"network": network, "dtype": "float32", "wanted density": density, **facts}
    return {"group": "network", "name": "network", "facts": facts, "x dense": gain, "density": density}


def test_of_two_masks_the_slower_one_counts():
    rows = [
        row("n", 1.0, 1.5),
        row("n", 0.1, 9.0, mask="random"),
        row("n", 0.1, 7.0, mask="top-left"),
        row("m", 0.1, 1),
    ]
    rows.append({**row("n", 0.1, 0.1), "name": "ONNX Runtime"})  # of another row's kind
    found = gains.curve(session_of(*rows), {"network": "n"}, "like n")
    assert found.points == [(0.1, 7.0), (1.0, 1.5)]
    assert (found.device, found.dtype) == ("chip (avx2), 2 cores", "float32")
    table = gains.curve_table([found])
    assert "| like n |  |  | 7x |  |  | 1.5x | chip (avx2), 2 cores, float32, 2026-01-01 |" in table
    with pytest.raises(ValueError, match="like m: expected rows of two densities"):
        gains.curve(session_of(*rows), {"network": "m"}, "like m")
