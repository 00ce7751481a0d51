"""Cameras as the network gives them: a JPEG after the other over HTTP, a transport stream over TCP."""

import io
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

from sbnet.apps.pipeline import Cameras, Network, Pipeline, open_source
from sbnet_command import cli

pytest.importorskip("av")
image = pytest.importorskip("PIL.Image")
SIZE = (48, 64)


def picture(k: int) -> np.ndarray:
    """A bright square that walks over a dark floor."""
    found = np.full((*SIZE, 3), 40, np.uint8)
    found[16:32, 4 * k % 48 : 4 * k % 48 + 16] = 230
    return found


@contextmanager
def camera(count: int | None = None, rate: float = 200.0):
    """Address of one that sends so many frames, or never ends, and a list of how many it has sent."""
    sent, stop = [0], threading.Event()

    class Camera(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            k = 0
            while not stop.is_set() and (count is None or k < count):
                file = io.BytesIO()
                image.fromarray(picture(k)).save(file, "JPEG", quality=95)
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {file.tell()}\r\n\r\n"
                try:
                    self.wfile.write(head.encode() + file.getvalue() + b"\r\n")
                except OSError:
                    return
                k, sent[0] = k + 1, sent[0] + 1
                time.sleep(1 / rate)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Camera)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/video", sent
    finally:
        stop.set()
        server.shutdown()
        server.server_close()


def column_of(pixels: np.ndarray) -> int:
    """Where the square begins."""
    return int((pixels[24, :, 0] > 128).argmax())


def test_a_camera_that_hangs_up_gives_its_frames_and_is_named():
    with camera(30) as (address, _):
        *found, last = open_source(address)
    assert [column_of(frame.pixels) for frame in found] == [4 * k % 48 for k in range(30)]
    assert last.fault
    assert address in last.name


def test_a_camera_that_never_ends_is_left_at_the_limit(tmp_path):
    with camera() as (address, sent):
        order = ["run", address, "-o", str(tmp_path / "out.jsonl"), "--device", "cpu", "--compare", "0"]
        result = CliRunner().invoke(cli.app, [*order, "--frames", "12"])
        assert result.exit_code == 0, result.output
        now = sent[0]
        time.sleep(0.2)
        assert sent[0] <= now + 50  # no more is read
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 12


def test_two_cameras_in_one_call():
    torch_net = nn.Conv2d(3, 3, 3, padding=1).eval()
    seen: list[list[int]] = [[], []]
    with camera(25) as (first, _), camera(25) as (second, _):
        run = Cameras([first, second], "motion", Network(torch_net), lambda k, r: seen[k].append(r.frame.index),
                      device="cpu", compare=0, patience=5.0)  # fmt: skip
        run.run()
    assert seen == [list(range(25))] * 2
    assert all(f"{address}, frame 25" in fault for address, fault in zip((first, second), run.faults, strict=True))


def test_a_transport_stream_over_tcp():
    """As an encoder sends it; it ends when the encoder hangs up."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        stream = container.add_stream("mpeg2video", rate=25)
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        for k in range(30):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(k), format="rgb24")))
        container.mux(stream.encode())
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(file.getvalue())

    threading.Thread(target=send, daemon=True).start()
    seen: list[int] = []
    with listener:
        summary = Pipeline(
            f"tcp://127.0.0.1:{listener.getsockname()[1]}", "motion", Network(nn.Conv2d(3, 3, 3, padding=1).eval()),
            lambda r: seen.append(column_of(r.frame.pixels)), device="cpu", compare=0,
        ).run()  # fmt: skip
    assert summary.frames == 30
    assert seen == [4 * k % 48 for k in range(30)]
