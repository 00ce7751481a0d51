"""Large pictures by tiles: what comes out is what the whole picture gives, and no more than a tile is held."""

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbnet.apps.pipeline import PipelineError, run_large
from sbnet.apps.pipeline.large import _Walk
from sbnet.apps.pipeline.large_files import KEPT, LargeOutput, LargeTiff, open_large
from sbnet.models import SRVGG, UNet

HEIGHT, WIDTH = 150, 118


def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 5, 2, 2), nn.ReLU(), nn.Conv2d(4, 2, 3, 1, 1)
    )


def whole(net: nn.Module, pixels: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        return net(x)[0].movedim(0, 2).numpy()


@pytest.mark.parametrize("name", ["plain", "strided", "upscale", "unet"])
def test_tiles_leave_no_seam(name):
    torch.manual_seed(0)
    net = {
        "plain": nn.Sequential(nn.Conv2d(3, 8, 7, padding=3), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=2, dilation=2)),
        "strided": strided(),
        "upscale": SRVGG(3, 8, 1),
        "unet": UNet(widths=(4, 8, 8)),
    }[name].eval()  # fmt: skip
    pixels = picture()[:148, :116] if name == "unet" else picture()  # a U-Net takes multiples of 4
    wanted = whole(net, pixels)
    mask = np.zeros(pixels.shape[:2], bool)
    mask[30:90, 40:100] = mask[140, 3] = True
    done = run_large(pixels, mask, net, tile=32, device="cpu", block=4)
    assert done.output.shape == wanted.shape
    assert done.tiles == 20
    assert done.computed < 12
    scale = wanted.shape[0] / pixels.shape[0]
    inside = torch.from_numpy(mask)[None, None].float()
    if scale < 1:
        inside = F.max_pool2d(inside, round(1 / scale), ceil_mode=True)
    else:
        inside = inside.repeat_interleave(round(scale), 2).repeat_interleave(round(scale), 3)
    inside = inside[0, 0].numpy() > 0
    np.testing.assert_allclose(done.output[inside], wanted[inside], atol=1e-4, rtol=1e-4)
    assert not done.output[~inside].any()


def test_masks_of_a_thumbnail_and_of_each_tile():
    net, pixels = strided().eval(), picture()
    pixels[40:] = 0
    wanted = whole(net, pixels)
    coarse = torch.zeros(15, 12)
    coarse[:4] = 1
    done = run_large(pixels, coarse, net, tile=40, device="cpu")
    np.testing.assert_allclose(done.output[:10], wanted[:10], atol=1e-4, rtol=1e-4)
    assert done.computed == 3
    own = run_large(pixels, "nodata:0", net, tile=40, device="cpu")
    np.testing.assert_allclose(own.output[:10], wanted[:10], atol=1e-4, rtol=1e-4)
    assert own.computed == 3


def test_only_tiles_of_the_mask_are_read_and_no_more_than_one(tmp_path):
    class Reader:
        shape, asked = (400, 400, 3), []

        def __getitem__(self, at):
            window = tuple(len(range(*s.indices(400))) for s in at)
            self.asked.append(window)
            return np.zeros((*window, 3), np.uint8)

    mask = np.zeros((4, 4), bool)
    mask[0, 0] = mask[3, 3] = True
    reader, calls = Reader(), []
    net = nn.Conv2d(3, 2, 3, padding=1).eval()
    done = run_large(reader, mask, net, tmp_path / "o.npy", tile=50, device="cpu", told=lambda *at: calls.append(at))
    assert len(reader.asked) == done.computed == 8
    assert max(max(window) for window in reader.asked) <= 50 + 2 * done.halo
    assert calls[-1] == (64, 64)
    assert np.load(tmp_path / "o.npy").shape == (400, 400, 2)


@pytest.mark.parametrize(
    "options", [{"tile": (32, 48)}, {"tile": (32, 32), "compression": "zlib"}, {"rowsperstrip": 7}, {}]
)
def test_windows_of_tiff_files(options, tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="needs the extra large (tifffile)")
    pixels, path = picture(), tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", **options)
    tiff = LargeTiff(path)
    assert tiff.shape == pixels.shape
    for rows, columns in (
        (slice(0, 150), slice(0, 118)),
        (slice(31, 97), slice(5, 50)),
        (slice(149, 150), slice(117, 118)),
    ):
        assert np.array_equal(tiff[rows, columns], pixels[rows, columns])
    assert len(tiff._decoded) <= KEPT
    tiff.close()
    net = nn.Conv2d(3, 2, 3, padding=1).eval()
    run_large(path, np.ones((1, 1), bool), net, tmp_path / "o.tif", tile=64, device="cpu")
    np.testing.assert_allclose(tifffile.imread(tmp_path / "o.tif"), whole(net, pixels), atol=1e-4, rtol=1e-4)


class Whole(nn.Module):
    def forward(self, x):
        return x * x.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": nn.Sequential(nn.Conv2d(3, 3, 1), Whole())}, "sees the whole frame"),
        ({"picture": "none.tif"}, "no such file"),
        ({"picture": np.zeros((4, 4))}, r"expected an array \[H,W,C\]"),
        ({"mask": np.zeros(3)}, r"mask: expected \[h,w\]"),
        ({"tile": 0}, "tile: expected at least 1"),
        ({"out": "out.xyz"}, "expected .npy, .tif or .tiff"),
    ],
)
def test_what_cannot_be_tiled_is_said(change, message):
    order = {"picture": picture(), "mask": np.ones((1, 1), bool), "network": nn.Conv2d(3, 2, 1), "device": "cpu"}
    with pytest.raises(PipelineError, match=message):
        run_large(**(order | change))


@pytest.mark.parametrize(
    ("reader", "package", "name"), [("LargeSlide", "openslide", "a.svs"), ("LargeRaster", "rasterio", "a.gtiff")]
)
def test_slides_and_rasters_leave_no_seam(reader, package, name, tmp_path):
    """Read through their packages by windows: what the whole picture gives."""
    tifffile = pytest.importorskip("tifffile", reason="needs the extra large (tifffile)")
    pytest.importorskip(package)
    pixels = picture()
    tifffile.imwrite(tmp_path / name, pixels, tile=(32, 32), photometric="rgb", compression=None)
    opened = open_large(tmp_path / name)
    assert type(opened).__name__ == reader
    assert tuple(opened.shape) == pixels.shape
    assert opened.dtype == np.uint8
    assert np.array_equal(opened[5:40, 30:77], pixels[5:40, 30:77])
    opened.close()
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 5, padding=2)).eval()
    done = run_large(tmp_path / name, "all", net, tile=32, device="cpu")
    np.testing.assert_allclose(done.output, whole(net, pixels), atol=1e-5)
    assert done.tiles > 1
    (tmp_path / f"bad{name[1:]}").write_bytes(b"nothing")
    with pytest.raises(PipelineError, match="cannot be read"):
        open_large(tmp_path / f"bad{name[1:]}")


def test_a_tile_is_read_and_one_is_written_while_another_is_computed(monkeypatch):
    """Computing a tile waits until the next is read, writing it until the next is being computed."""
    pixels = np.random.default_rng(0).integers(0, 255, (32, 4 * 32, 3), np.uint8)
    seen, counts, met = threading.Condition(), {"read": 0, "computing": 0}, []

    def count(what: str) -> None:
        with seen:
            counts[what] += 1
            seen.notify_all()

    def meet(what: str, least: int) -> None:
        with seen:
            met.append(seen.wait_for(lambda: counts[what] >= min(least, 4), 5))

    class Source:
        shape, dtype = pixels.shape, pixels.dtype

        def __getitem__(self, at):
            count("read")
            return pixels[at]

    write, compute = LargeOutput.write, _Walk._computed

    def computed(self, *given):
        count("computing")
        meet("read", counts["computing"] + 1)
        return compute(self, *given)

    def written(self, row, column, window):
        meet("computing", column // 32 + 2)
        write(self, row, column, window)

    monkeypatch.setattr(_Walk, "_computed", computed)
    monkeypatch.setattr(LargeOutput, "write", written)
    net = nn.Conv2d(3, 2, 1).eval()
    done = run_large(Source(), np.ones((1, 4), bool), net, tile=32, device="cpu")
    assert met == [True] * 8
    np.testing.assert_allclose(done.output, whole(net, pixels), atol=1e-5)
