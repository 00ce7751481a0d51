"""Encoders of films, and that nothing is drawn or waited for that was not asked for."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from torch import nn

from sbnet.apps import writers
from sbnet.apps.pipeline import Network, Pipeline
from sbnet.apps.video import VideoError

av = pytest.importorskip("av")

FILM = np.random.default_rng(0).integers(0, 255, (6, 32, 48, 3), np.uint8)


def run(sink, **options):
    net = nn.Conv2d(3, 3, 3, padding=1).eval()
    return Pipeline(FILM, "changed:0", net, sink, device="cpu", compare=0, **options).run()


def test_nvenc_is_taken_where_a_card_has_it_and_refused_by_name_elsewhere(monkeypatch, tmp_path):
    """No card here has it: FFmpeg's MPEG-4 stands in for what opens."""
    to = tmp_path / "out.mkv"
    with pytest.raises(VideoError, match="encoder: expected one of x264, nvenc, got 'quick'"):
        run(to, encoder="quick")
    with monkeypatch.context() as patch:
        patch.setattr(writers, "NVENC", "an encoder that is not there")
        with pytest.raises(VideoError, match="encoder nvenc: this machine's cards, or PyAV, do not have it"):
            run(to, encoder="nvenc")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(writers, "NVENC", "mpeg4")
    run(to, encoder="nvenc")
    with av.open(str(to)) as made:
        assert made.streams.video[0].codec_context.name == "mpeg4"
        assert len(list(made.decode(video=0))) == len(FILM)


def test_the_network_goes_on_while_a_frame_is_encoded(monkeypatch, tmp_path):
    """The encoder waits for the network's third frame: a network that waited for the encoder would never come there."""
    third, seen = threading.Event(), []
    encode, reset = writers.VideoWriter._encode, []

    def waits(self, frame) -> None:
        assert threading.current_thread().name == "sbnet-encode" or frame is None
        if not reset:
            reset.append(third.wait(20))
        encode(self, frame)

    monkeypatch.setattr(writers.VideoWriter, "_encode", waits)
    net = nn.Conv2d(3, 3, 3, padding=1).eval()

    def told(summary, expected) -> None:
        seen.append(expected)
        if len(seen) == 3:
            third.set()

    Pipeline(FILM, "changed:0", net, tmp_path / "out.mp4", device="cpu", compare=0).run(told)
    assert reset == [True]


def test_pictures_with_boxes_are_drawn_only_where_a_film_shows_them(tmp_path):
    drawn = []

    def finish(output, frame):
        def picture():
            drawn.append(frame.index)
            return frame.picture()

        return picture, [{"box": [0, 0, 4, 4]}]

    network = Network(nn.Conv2d(3, 3, 3, padding=1).eval(), finish=finish)
    for sink in (tmp_path / "out.jsonl", lambda result: result.records):
        Pipeline(FILM, "changed:0", network, sink, device="cpu", compare=0).run()
    assert not drawn
    Pipeline(FILM, "changed:0", network, tmp_path / "out.mp4", device="cpu", compare=0).run()
    assert drawn == list(range(len(FILM)))
