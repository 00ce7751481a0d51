"""Files that are whole or not there: full disks, interrupts, signals, outputs that are inputs."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sbnet import files
from sbnet.apps.pipeline import Network, Pipeline, PipelineError, run_large
from sbnet.masks import Tissue
from sbnet_command import cli

NET = nn.Conv2d(3, 2, 3, padding=1).eval()


def listed(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---- one file
def test_a_part_is_not_there_until_it_is_whole(tmp_path):
    path = tmp_path / "sub" / "a.txt"
    with files.Part(path) as part:
        part.write(b"abc")
        assert not path.exists()
    assert path.read_bytes() == b"abc"
    with pytest.raises(ZeroDivisionError), files.Part(path) as part:
        part.write(b"d" * (1 // 0))
    assert path.read_bytes() == b"abc"
    assert listed(path.parent) == ["a.txt"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: order.append("fsync") or fsync(handle))
    monkeypatch.setattr(Path, "replace", lambda self, to: order.append("rename") or replace(self, to))
    files.write(tmp_path / "a", b"abc")
    assert order == ["fsync", "rename", "fsync"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_what_fails_names_the_file_and_leaves_the_earlier_one(call, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"earlier")

    def full(*_):
        raise OSError(28, "No space left on device")

    if call == "write":
        path_open = Path.open
        monkeypatch.setattr(Path, "open", lambda self, *a, **k: Full(path_open(self, *a, **k)))
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PipelineError, match=r"a\.json: cannot be written \(No space left on device\)"):
        files.write(path, b"abc", PipelineError)
    monkeypatch.undo()
    assert path.read_bytes() == b"earlier"
    assert listed(tmp_path) == ["a.json"]


class Full:
    def __init__(self, file):
        self.file, self.closed = file, False

    def write(self, data):
        raise OSError(28, "No space left on device")

    def close(self):
        self.file.close()


def test_names_that_leave_no_room_for_more(tmp_path):
    name = "x" * 251 + ".txt"
    files.write(tmp_path / name, b"abc")
    assert listed(tmp_path) == [name]


# ---- run_large
def picture(side: int = 96) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)


@pytest.mark.parametrize("suffix", [".npy", ".tif"])
def test_a_large_picture_is_written_whole_and_mapped(suffix, tmp_path):
    if suffix == ".tif":
        pytest.importorskip("tifffile")
    wanted = run_large(picture(), "all", NET, tile=32, device="cpu").output
    done = run_large(picture(), "all", NET, tmp_path / f"o{suffix}", tile=32, device="cpu")
    assert isinstance(done.output, np.memmap)
    assert np.array_equal(done.output, wanted)
    if suffix == ".npy":
        assert np.array_equal(np.load(tmp_path / "o.npy"), wanted)
    assert listed(tmp_path) == [f"o{suffix}"]


@pytest.mark.parametrize("suffix", [".npy", ".tif"])
@pytest.mark.parametrize("how", ["full", "interrupt", "error"])
def test_a_run_that_ends_early_leaves_the_earlier_file(suffix, how, tmp_path, monkeypatch):
    if suffix == ".tif":
        pytest.importorskip("tifffile")
    path = tmp_path / f"o{suffix}"
    path.write_bytes(b"earlier")
    true, calls = os.pwrite, []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 40:
            raise OSError(28, "No space left on device")
        return true(*arguments)

    def told(done, _):
        if how != "full" and done == 3:
            raise KeyboardInterrupt if how == "interrupt" else ZeroDivisionError

    if how == "full":
        monkeypatch.setattr(os, "pwrite", full)
    wanted = {"full": PipelineError, "interrupt": KeyboardInterrupt, "error": ZeroDivisionError}[how]
    with pytest.raises(wanted, match="cannot be written" if how == "full" else ""):
        run_large(picture(), "all", NET, path, tile=32, device="cpu", told=told)
    assert path.read_bytes() == b"earlier"
    assert listed(tmp_path) == [path.name]


def test_the_source_is_no_output(tmp_path):
    np.save(tmp_path / "a.npy", picture())
    before = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "link.npy").symlink_to(tmp_path / "a.npy")
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for source in (tmp_path / "a.npy", str(tmp_path / "link.npy"), mapped):
        with pytest.raises(PipelineError, match="expected another name than the source"):
            run_large(source, "all", NET, tmp_path / "a.npy", tile=32, device="cpu")
    assert (tmp_path / "a.npy").read_bytes() == before


def test_tiles_that_a_geotiff_leaves_out_are_nodata(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    tile = np.full((128, 128), 7, np.float32)
    net = nn.Conv2d(1, 1, 1, bias=False).eval()
    for tags, mask in (([(42113, "s", 0, "-9999", True)], "nodata:-9999"), ([], "nodata:0")):
        tifffile.imwrite(
            tmp_path / "sparse.tif", iter([tile, tile, None, None]), shape=(256, 256), dtype=np.float32,
            tile=(128, 128), compression="deflate", photometric="minisblack", extratags=tags,
        )  # fmt: skip
        done = run_large(tmp_path / "sparse.tif", mask, net, tile=128, device="cpu")
        assert (done.computed, done.tiles) == (2, 4)


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_a_threshold_of_the_whole_picture_is_that_of_its_tiles(tile):
    """Tissue on a slide: tiles that are all tissue have no bright background of their own."""
    rng = np.random.default_rng(0)
    stain = np.kron(rng.uniform(0.25, 0.75, (32, 32)), np.ones((16, 16)))
    slide = np.dstack([np.full((512, 512), 200), 200 * (1 - stain), np.full((512, 512), 200)]).astype(np.uint8)
    slide[:128], slide[:, :128] = 245, 245
    net = nn.Conv2d(3, 1, 1).eval()
    nn.init.zeros_(net.weight)
    nn.init.ones_(net.bias)
    found = run_large(slide, "tissue & all", net, tile=tile, device="cpu").output[..., 0] > 0
    whole = Tissue()(torch.from_numpy(slide).movedim(2, 0)[None].float() / 255)[0].numpy()
    assert 0.4 < whole.mean() < 0.6
    assert np.array_equal(found, whole)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.uint32, np.float64])
def test_large_pictures_and_pipelines_scale_numbers_alike(kind):
    """Each tile alone has another largest number."""
    ramp = np.linspace(0, 1, 96)[None, :, None].repeat(96, 0)
    pixels = (ramp if kind == np.float64 else ramp * (65535 if kind == np.uint16 else 40000)).astype(kind)
    net = nn.Conv2d(1, 1, 1, bias=False).eval()
    nn.init.ones_(net.weight)
    got = run_large(pixels, "all", net, tile=32, device="cpu").output
    seen = []
    network = Network(net, "n", finish=lambda y, frame: seen.append(y.clone()) or (None, []))
    Pipeline([pixels], "all", network, None, device="cpu", compare=0).run()
    assert np.allclose(got[..., 0], seen[0][0, 0].numpy(), atol=1e-6)
    top = 1 if kind in (np.uint16, np.float64) else 40000 / 65535
    assert got.max() == pytest.approx(top, abs=1e-4)


# ---- signals
FILM = """
import sys, time
import numpy as np
import torch
from torch import nn
from sbnet.apps.pipeline import Network, Pipeline, run_large
folder = sys.argv[1]
net = nn.Conv2d(3, 3, 3, padding=1).eval()
def frames():
    for k in range(10**6):
        if k == 20:
            print("running", flush=True)
        time.sleep(1e-3)
        yield np.zeros((32, 48, 3), np.uint8)
def slow(done, of):
    print("running", flush=True)
    time.sleep(60)
if sys.argv[2] == "large":
    run_large(np.zeros((64, 64, 3), np.uint8), "all", net, folder + "/o.npy", tile=32, device="cpu", told=slow)
sinks = [folder + name for name in ("/o.mp4", "/o.jsonl", "/pictures")]
Pipeline(frames(), "all", Network(net, "n"), sinks, device="cpu", compare=0).run()
"""


@pytest.mark.parametrize("what", ["film", "large"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_leaves_nothing_half_done(what, number, tmp_path):
    pytest.importorskip("av")
    for name in ("o.mp4", "o.jsonl", "o.npy"):
        (tmp_path / name).write_bytes(b"earlier")
    command = [sys.executable, "-c", FILM, str(tmp_path), what]
    # As a shell starts it, whatever this process ignores: nohup passes on that SIGHUP is.
    started = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=started) as child:
        try:
            assert child.stdout.readline() == "running\n"
            assert any(name.endswith(".part") for name in listed(tmp_path))
            time.sleep(0.05)
            child.send_signal(number)
            assert child.wait(20) == -number
        finally:
            child.kill()
    left = [name for name in listed(tmp_path) if name != "pictures"]
    assert left == ["o.jsonl", "o.mp4", "o.npy"]
    assert all((tmp_path / name).read_bytes() == b"earlier" for name in left)
    assert not list(tmp_path.glob("pictures/.*"))


def test_handlers_of_others_stay(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with files.Part(tmp_path / "a"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- outputs that are there
def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["run", *map(str, arguments), "--device", "cpu", "--compare", "0"])


@pytest.fixture
def pictures(tmp_path) -> Path:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "in").mkdir()
    for k in range(2):
        image.fromarray(np.full((32, 48, 3), 50 * k, np.uint8)).save(tmp_path / "in" / f"{k}.png")
    return tmp_path / "in"


@pytest.mark.parametrize("name", ["o.mp4", "o.jsonl", "o"])
def test_outputs_that_are_there_are_not_replaced_unasked(name, pictures, tmp_path):
    pytest.importorskip("av")
    target = tmp_path / name
    assert invoke(pictures, "-o", target).exit_code == 0
    kept = target / "00000.png" if target.is_dir() else target
    kept.write_bytes(b"earlier")
    refused = invoke(pictures, "-o", target)
    assert refused.exit_code == 1
    assert "--overwrite replaces it" in " ".join(refused.stderr.split())
    assert kept.read_bytes() == b"earlier"
    assert invoke(pictures, "-o", target, "--overwrite").exit_code == 0
    assert kept.read_bytes() != b"earlier"


def test_a_report_that_is_there_is_not_replaced_unasked(pictures, tmp_path):
    (tmp_path / "r.html").write_text("earlier")
    refused = invoke(pictures, "-o", tmp_path / "o.jsonl", "--report", tmp_path / "r.html")
    assert refused.exit_code == 1
    assert "r.html: is there already" in " ".join(refused.stderr.split())
    assert not (tmp_path / "o.jsonl").exists()


def test_pictures_are_not_written_over_their_own_sources(pictures, tmp_path):
    before = {path.name: path.read_bytes() for path in pictures.iterdir()}
    refused = invoke(pictures, "-o", pictures, "--overwrite")
    assert refused.exit_code == 1
    assert {path.name: path.read_bytes() for path in pictures.iterdir()} == before
    for sink in (pictures, pictures / "0.png"):
        with pytest.raises((PipelineError, Exception), match="expected|source"):
            Pipeline(pictures, "all", Network(NET, "n"), sink, device="cpu").run()


def test_one_output_twice_is_refused(pictures, tmp_path):
    twice = invoke(pictures, "-o", tmp_path / "o.jsonl", "-o", tmp_path / "o.jsonl")
    assert twice.exit_code == 1
    assert "twice" in twice.stderr


def test_masks_and_networks_are_no_outputs(pictures, tmp_path):
    """Of any ending: what a run reads, it does not replace."""
    pytest.importorskip("av")
    pytest.importorskip("onnx")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "zones.json").write_text("[[0, 0, 20, 20]]")
    (tmp_path / "masks").mkdir()
    image.fromarray(np.full((32, 48), 255, np.uint8)).save(tmp_path / "masks" / "00000.png")
    (tmp_path / "film.mp4").symlink_to(tmp_path / "zones.json")
    for mask, sink in (("zones.json", "film.mp4"), ("masks", "masks")):
        with pytest.raises(Exception, match="expected another name than the source"):
            Pipeline(pictures, str(tmp_path / mask), Network(NET, "n"), tmp_path / sink, device="cpu").run()
    assert listed(tmp_path / "masks") == ["00000.png"]
