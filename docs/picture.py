"""Makes docs/picture.png: a frame, the blocks in which something moves, and a network's output on those alone.

The street is drawn, so that the picture is anybody's to use: python docs/picture.py
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sbnet.apps.video import compose
from sbnet.engine import sparsify
from sbnet.masks import MotionMask
from sbnet.models import contour_net, paint_contours

HEIGHT, WIDTH, BLOCK = 192, 320, 16


def street(step: int) -> np.ndarray:
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


def main() -> None:
    motion = MotionMask((HEIGHT, WIDTH))
    net = sparsify(contour_net(), torch.rand(1, 3, HEIGHT, WIDTH), block=BLOCK, mask_source=motion)
    motion.reset()
    for step in range(6):
        frame = street(step)
        output = net(torch.from_numpy(frame)[None].permute(0, 3, 1, 2) / 255)
    (blocks,) = net.active
    active = (blocks.block_map[0] >= 0).numpy()
    both = compose(frame, active, blocks.grid, paint_contours(output)[0].numpy())
    shown, result = np.split(both, 2, axis=0 if both.shape[0] > HEIGHT else 1)
    gap = np.full((HEIGHT, 6, 3), 255, np.uint8)
    picture = np.concatenate([frame, gap, shown, gap, result], axis=1)
    Image.fromarray(picture).save(Path(__file__).with_name("picture.png"), optimize=True)
    print(f"{active.mean():.0%} of the blocks")


if __name__ == "__main__":
    main()
