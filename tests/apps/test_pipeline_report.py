"""The page of a run: whole in itself, and of what was run."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from sbnet.apps.pipeline import Frame, Network, Pipeline, PipelineError, Result
from sbnet.apps.pipeline.report import body
from sbnet.apps.pipeline.summary import SHOTS, Shot, Summary

image = pytest.importorskip("PIL.Image")


class Tags(HTMLParser):
    """Opened and closed tags, and where pictures come from."""

    VOID = ("meta", "img", "input", "!doctype")

    def __init__(self):
        super().__init__()
        self.open, self.pictures, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.outside += [v for k, v in found.items() if k in ("src", "href") and not v.startswith("data:")]
        if tag == "img":
            self.pictures.append(found["src"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_of_a_run(tmp_path):
    frames = [np.full((32, 48, 3), 10, np.uint8) for _ in range(5)]
    for k, frame in enumerate(frames):
        frame[8:16, 4 * k : 4 * k + 8] = 200
    network = Network(nn.Conv2d(3, 3, 3, padding=1).eval(), "<b>mine</b>")
    path = tmp_path / "sub" / "report.html"
    pipeline = Pipeline(frames, "motion", network, device="cpu", mode="cached", compare=0, report=path)
    assert "not run" in pipeline._repr_html_()
    summary = pipeline.run()
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.outside
    assert "http" not in text
    assert "<b>mine" not in text
    assert "&lt;b&gt;mine" in text
    assert len(tags.pictures) == 3
    for source in tags.pictures:
        assert image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).size == (48, 32)
    lines = re.findall(r"<polyline points='([^']*)'", text)
    assert [len(line.split()) for line in lines] == [4, 4]  # the first frame is apart
    for name, much, _ in summary.rows():
        assert name in text
        assert much in text
    for wanted in ("id='bar'", "clipPath", "active blocks"):
        assert wanted in text
    assert "differences" not in text  # nothing was compared
    assert summary._repr_html_() in pipeline._repr_html_()


def test_compared_frames_are_shown_with_the_worst_first(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), np.uint8)
    path = tmp_path / "report.html"
    network = Network(nn.Conv2d(3, 3, 3, padding=1).eval(), mask=lambda x: x[:, 0] > 2, mode="cached")
    summary = Pipeline(frames, None, network, device="cpu", compare=1, report=path).run()
    assert len(summary.shots) == 6
    kept = {k: shot.largest for k, shot in summary.shots.items()}
    assert max(kept.values()) == pytest.approx(summary.largest)
    assert 8 in kept  # the newest
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert len(tags.pictures) == 4 * 6
    worst = max(kept, key=kept.get)
    assert f"Frame {worst}; largest difference from the dense result {kept[worst]:.2g} (the worst)" in text
    assert f"max='5' value='{sorted(kept).index(worst)}'" in text
    bright = [shot.differences.max() for shot in summary.shots.values()]
    assert bright == [255] * 6


def test_the_frame_of_the_worst_seam_is_kept_and_named():
    summary = Summary("film", "cached")
    for k, (largest, seam) in enumerate([(0.9, 1.0), (0.1, 3.0), *[(0.5, 1.1)] * 9]):
        result = Result(Frame(k, np.zeros((8, 8, 3), np.uint8)), picture=np.zeros((8, 8, 3), np.uint8))
        result.active = np.zeros((1, 1), bool)
        summary.show(k, Shot(result, largest, np.zeros((8, 8), np.uint8), seam))
    assert {0, 1, 10} <= set(summary.shots)
    assert len(summary.shots) == SHOTS
    text = body(summary)
    assert "result 0.1, white on the map of differences; seams 3.00x (the worst)" in text
    assert "Frame 0; largest difference from the dense result 0.9 (the worst), " in text


@pytest.mark.parametrize(
    ("ms", "ticks"),
    [(12800.0, ("0 s", "6.4 s", "12.8 s")), (250.0, ("0 ms", "125 ms", "250 ms")), (0.02, ("0 µs", "10 µs", "20 µs"))],
)
def test_axes_have_units_that_fit(ms, ticks):
    summary = Summary("film", "masked")
    for _ in range(8):
        summary.add(ms, 0.37)
    text = body(summary)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert labels == ["0 %", "18.5 %", "37 %", "0", "4", "8", "frames", *ticks, "0", "4", "8", "frames"]
    assert f"mean {ticks[2]}, 8 frames" in text
    assert "e+" not in text


def test_a_page_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    frames = [np.zeros((8, 8, 3), np.uint8)]
    network = nn.Conv2d(3, 3, 1).eval()
    with pytest.raises(PipelineError, match="cannot be written"):
        Pipeline(frames, "all", network, device="cpu", compare=0, report=tmp_path / "file" / "r.html").run()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
USER = """<script>
const bar = document.getElementById("bar"), left = document.getElementById("left");
bar.value = 25; left.value = "marked"; left.dispatchEvent(new Event("input"));
const [plain, marked, over] = document.querySelectorAll("img");
const found = [over, plain, marked].map(image => image.complete && image.naturalWidth);
const lines = [...document.querySelectorAll("polyline")].map(line => line.getBoundingClientRect().width > 100);
document.title = JSON.stringify([over.style.clipPath, plain.className, marked.className, found, lines,
                                 document.querySelectorAll("tr").length]);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_in_a_browser(tmp_path):
    """What is seen of it, and what slider and checkbox do."""

    def browse(name: str, *arguments: str) -> str:
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,900", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", *arguments,
            (tmp_path / name).as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout

    frames = [np.full((32, 48, 3), (0, 0, 250), np.uint8) for _ in range(4)]
    red = np.full((32, 48, 3), (250, 0, 0), np.uint8)
    network = Network(nn.Conv2d(3, 3, 3, padding=1).eval(), finish=lambda y, frame: (red, []))
    path = tmp_path / "report.html"
    summary = Pipeline(frames, "motion", network, device="cpu", compare=0, report=path).run()

    browse("report.html", f"--screenshot={tmp_path / 'seen.png'}")
    seen = np.array(image.open(tmp_path / "seen.png").convert("RGB")).astype(int)
    blue = (seen[..., 2] > 200) & (seen[..., 0] < 60)
    result = (seen[..., 0] > 200) & (seen[..., 1:].max(2) < 60)
    assert blue.sum() > 5e4
    assert 0.95 < blue.sum() / result.sum() < 1.05  # the slider is in the middle
    assert np.percentile(np.nonzero(blue)[1], 99) < np.percentile(np.nonzero(result)[1], 1)

    (tmp_path / "used.html").write_text(path.read_text().replace("</body>", USER + "</body>"))
    title = re.search(r"<title>(.*?)</title>", browse("used.html", "--dump-dom"))[1]
    rows = len(summary.rows())
    assert json.loads(html.unescape(title)) == [
        "inset(0px 0px 0px 25%)", "none", "", [48, 48, 48], [True, True], rows
    ]  # fmt: skip


def test_a_report_that_cannot_be_written_is_said_before_the_work(tmp_path):
    def frames():
        raise AssertionError("read")
        yield

    for path in (tmp_path, Path("/proc/nothing/report.html")):
        with pytest.raises(PipelineError, match="cannot be written"):
            Pipeline(frames(), network=nn.Conv2d(3, 3, 3, padding=1), device="cpu", report=path).run()
    found = tmp_path / "earlier.html"
    found.write_text("earlier")
    with pytest.raises(AssertionError, match="read"):
        Pipeline(frames(), network=nn.Conv2d(3, 3, 3, padding=1), device="cpu", report=found).run()
    assert found.read_text() == "earlier"
    with pytest.raises(AssertionError, match="read"):
        Pipeline(frames(), network=nn.Conv2d(3, 3, 3, padding=1), device="cpu", report=tmp_path / "new.html").run()
    assert not (tmp_path / "new.html").exists()
