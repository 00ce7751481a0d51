"""sparse_conv2d_ (3x3, bias + ReLU, fringe zeroed) against the fastest dense form of the same layer.

python benchmarks/bench_conv.py [--device cuda|cpu] [--masks random topleft real] [--quick]

Dense baselines on CUDA: torch.cudnn_convolution_relu, F.conv2d + relu_, torch.compile(mode="max-autotune"); all
channels_last with cudnn.benchmark. On a CPU: F.conv2d + relu_ (oneDNN), channels_last. Every sparse result is checked
against a float32 convolution of the same inputs before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_blocks import show
from common import Timer, random_active, save

import sbnet
from sbnet.masks import MotionMask
from sbnet.video import read_frames

# (N, H, W, C): SBNet's four stages, then three larger maps.
SHAPES = [
    (1, 400, 704, 64),
    (1, 200, 352, 128),
    (1, 100, 176, 256),
    (1, 50, 88, 512),
    (1, 1024, 1024, 64),
    (8, 256, 256, 128),
    (8, 128, 128, 256),
]
DENSITIES = (1.0, 0.5, 0.3, 0.1, 0.05)


class Layer:
    """One 3x3 layer, its inputs and its dense forms."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str):
        n, h, w, c = shape
        self.shape, self.size = shape, (n, h, w)
        last = torch.channels_last
        self.x = torch.randn(n, c, h, w, device=device, dtype=dtype).contiguous(memory_format=last)
        self.weight = (torch.randn(c, c, 3, 3, device=device) / (9 * c) ** 0.5).to(dtype).contiguous(memory_format=last)
        self.bias = torch.randn(c, device=device, dtype=dtype)
        self.residual = torch.randn_like(self.x)
        self.out = torch.empty_like(self.x)

    def flops(self, pixels: float) -> float:
        return 2 * 9 * self.shape[3] ** 2 * pixels

    def dense_forms(self, compiled: bool) -> dict[str, Any]:
        x, weight, bias = self.x, self.weight, self.bias
        forms = {"F.conv2d + relu_": lambda: F.conv2d(x, weight, bias, padding=1).relu_()}
        if x.is_cuda:
            forms["cudnn_convolution_relu"] = lambda: torch.cudnn_convolution_relu(
                x, weight, bias, [1, 1], [1, 1], [1, 1], 1
            )
            if compiled:
                run = torch.compile(
                    lambda a, b, c: F.conv2d(a, b, c, padding=1).relu(), mode="max-autotune-no-cudagraphs"
                )
                forms["torch.compile"] = lambda: run(x, weight, bias)
        return forms

    def sparse(self, active: sbnet.ActiveBlocks, fringe: sbnet.Fringe | None, residual: bool = False) -> None:
        sbnet.sparse_conv2d_(
            self.x,
            self.weight,
            self.bias,
            active,
            self.out,
            padding=1,
            activation="relu",
            fringe=fringe,
            residual=self.residual if residual else None,
        )

    def check(self, active: sbnet.ActiveBlocks, fringe: sbnet.Fringe | None, residual: bool) -> float:
        """Relative error; raises if it is beyond rounding or a pixel outside blocks and fringe was touched."""
        want = F.conv2d(self.x.float(), self.weight.float(), self.bias.float(), padding=1)
        want = (want + self.residual.float() if residual else want).relu()
        self.out.fill_(float("nan"))
        self.sparse(active, fringe, residual)
        inside = active.pixel_mask(self.size[1:])
        error = torch.where(inside, self.out.float() - want, 0).norm() / torch.where(inside, want, 0).norm()
        zero = torch.zeros_like(inside).flatten()
        if fringe is not None:
            zero[fringe.pixels[: int(fringe.count)].long()] = True
        zero = zero.view_as(inside)
        ok = bool((torch.where(zero, self.out, 0) == 0).all()) and bool((self.out.isnan() | inside | zero).all())
        limit = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}[self.x.dtype]
        if not ok or not float(error) < limit:
            raise SystemExit(f"wrong result: {self.shape} {self.x.dtype} residual={residual}: error {float(error):.2e}")
        return float(error)


def top_left(size: tuple[int, int, int], grid: sbnet.BlockGrid, density: float, device: str) -> sbnet.ActiveBlocks:
    """SBNet's synthetic mask: one rectangle of the wanted area in the corner."""
    n, h, w = size
    mask = torch.zeros(n, h, w, device=device)
    mask[:, : round(h * density**0.5), : round(w * density**0.5)] = 1
    return sbnet.reduce_mask(mask, grid)


def real_masks() -> dict[str, torch.Tensor]:
    """Masks of real recordings, [1,H,W] bool, where the files are at hand (SBNET_DATA names their folder)."""
    folder = Path(os.environ.get("SBNET_DATA", Path(__file__).parents[2] / "shared" / "data"))
    masks = {}
    scan = folder / "kitti_000008.bin"
    if scan.exists():  # occupancy of 70.4 x 80 m at 0.1 m a pixel
        points = np.fromfile(scan, np.float32).reshape(-1, 4)
        x, y = (points[:, 0] / 0.1).astype(int), ((points[:, 1] + 40) / 0.1).astype(int)
        keep = (x >= 0) & (x < 704) & (y >= 0) & (y < 800)
        occupancy = torch.zeros(1, 704, 800, dtype=torch.bool)
        occupancy[0, x[keep], y[keep]] = True
        masks["LiDAR occupancy"] = occupancy
    clip = folder / "bikes.mp4"
    if clip.exists():
        motion = None
        for frame in read_frames(clip, limit=40):
            image = torch.from_numpy(frame).permute(2, 0, 1)[None].float() / 255
            motion = motion or MotionMask((image.shape[2], image.shape[3]))
            masks["street motion"] = motion(image).clone()
    return masks


def time_case(
    timer: Timer, layer: Layer, active: sbnet.ActiveBlocks, dense: dict[str, Any], residual: bool = False
) -> dict[str, Any]:
    fringe = sbnet.fringe(active, active, layer.size[1:], 3, 1, 1)
    error = layer.check(active, fringe, residual)
    runs = {**dense, "sparse": functools.partial(layer.sparse, active, fringe, residual)}
    times = timer.interleaved(runs, repeat=20 if timer.cuda else 2)
    best = min((name for name in dense), key=times.__getitem__)
    blocks = int(active.count)
    pixels = blocks * active.grid.bsize[0] * active.grid.bsize[1]
    return {
        "blocks": blocks,
        "density": blocks / active.capacity,
        "fringe": int(fringe.count),
        "us": times["sparse"],
        "TFLOP/s": layer.flops(pixels) / times["sparse"] / 1e6,
        "dense us": times[best],
        "dense form": best,
        "x dense": times[best] / times["sparse"],
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--masks", nargs="+", default=["random", "topleft", "real"], choices=["random", "topleft", "real"]
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile baseline")
    parser.add_argument("--quick", action="store_true", help="one small case")
    options = parser.parse_args()
    device = options.device
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    dtype = torch.float16 if device == "cuda" else torch.float32
    timer = Timer(device, rounds=9 if device == "cuda" else 5)
    repeat_shapes = SHAPES[:1] if options.quick else SHAPES if device == "cuda" else SHAPES[:4]
    densities = (0.1,) if options.quick else DENSITIES
    rows: list[dict[str, Any]] = []

    def add(mask: str, layer: Layer, active: sbnet.ActiveBlocks, dense: dict[str, Any], **case: Any) -> None:
        head = {"mask": mask, "shape": list(layer.shape), "block": list(active.grid.bsize)}
        dtype_name = str(layer.x.dtype).removeprefix("torch.")
        rows.append({**head, "dtype": dtype_name, **case, **time_case(timer, layer, active, dense, **case)})

    with contextlib.suppress(KeyboardInterrupt):  # what was measured is kept
        for shape in repeat_shapes:
            layer = Layer(shape, dtype, device)
            grid = sbnet.BlockGrid.cover(shape[1:3], 16)
            dense = layer.dense_forms(options.compile)
            total = shape[0] * grid.bcount[0] * grid.bcount[1]
            for density in densities:
                if "random" in options.masks:
                    active = random_active(layer.size, grid, max(1, round(total * density)), device)
                    add("random", layer, active, dense, residual=False)
                if "topleft" in options.masks and density < 1:
                    add("topleft", layer, top_left(layer.size, grid, density, device), dense, residual=False)
            if "random" in options.masks and device == "cuda" and not options.quick:
                for density in (1.0, 0.1):
                    count = max(1, round(total * density))
                    add("random", layer, random_active(layer.size, grid, count, device), dense, residual=True)
                    for block in ((8, 16), (8, 8)):
                        small = sbnet.BlockGrid.cover(shape[1:3], block)
                        finer = count * 256 // (block[0] * block[1])
                        whole = shape[0] * small.bcount[0] * small.bcount[1]
                        active = random_active(layer.size, small, min(finer, whole), device)
                        add("random", layer, active, dense, residual=False)
                layer = Layer(shape, torch.bfloat16, device)
                for density in (1.0, 0.1):
                    active = random_active(layer.size, grid, max(1, round(total * density)), device)
                    add("random", layer, active, layer.dense_forms(options.compile), residual=False)
        if "real" in options.masks and not options.quick:
            for name, mask in real_masks().items():
                for channels in (64, 128):
                    layer = Layer((1, *mask.shape[1:], channels), dtype, device)
                    active = sbnet.reduce_mask(mask.to(device), sbnet.BlockGrid.cover(mask.shape[1:], 16))
                    add(name, layer, active, layer.dense_forms(options.compile), residual=False)
    show("sparse_conv2d_, 3x3, bias + ReLU, fringe zeroed", rows)
    if not options.quick:
        print(save("conv", device, rows, {"torch.compile among the dense forms": options.compile}))


if __name__ == "__main__":
    main()
