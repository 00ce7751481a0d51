"""The page of a run: whole in itself, and of what was run."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from torch import nn

from sbnet.apps.pipeline import Network, Pipeline, PipelineError

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
    assert [len(line.split()) for line in lines] == [5, 5]
    for name, much, _ in summary.rows():
        assert name in text
        assert much in text
    for wanted in ("id='bar'", "clipPath", "active blocks"):
        assert wanted in text
    assert summary._repr_html_() in pipeline._repr_html_()


def test_a_page_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    frames = [np.zeros((8, 8, 3), np.uint8)]
    network = nn.Conv2d(3, 3, 1).eval()
    with pytest.raises(PipelineError, match="cannot be written"):
        Pipeline(frames, "all", network, device="cpu", compare=0, report=tmp_path / "file" / "r.html").run()
