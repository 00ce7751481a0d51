"""Networks over pictures that are larger than memory: tiles with the network's own halo, so that there are no seams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.apps.pipeline.compute import placed
from sbnet.apps.pipeline.frames import Frame, PipelineError, input_of, largest, mask_of, unit
from sbnet.apps.pipeline.large_files import LargeOutput, files_of, open_large
from sbnet.apps.pipeline.networks import Network, halo_of, open_network
from sbnet.apps.pipeline.pipeline import pick_device
from sbnet.apps.pipeline.stages import Ahead, Behind
from sbnet.engine.sparsify import SparseRun
from sbnet.masks.base import Mask
from sbnet.masks.named import open_mask

WAITING = 1  # windows that wait to be computed, and results that wait to be written
PROBE = 256  # side of the picture that the network's halo and strides are read off


@dataclass(frozen=True)
class Tiled:
    """What `run_large` did.

    Attributes:
        output: [H',W',K] float32, zeros outside the mask; mapped where a file was named.
        tiles, computed: how many there were, and in how many of them the mask had pixels.
        halo: pixels that were read beside each tile.
    """

    output: np.ndarray
    tiles: int
    computed: int
    halo: int


def run_large(
    picture: Any,
    mask: Any,
    network: Any,
    out: Any = None,
    *,
    tile: int = 1024,
    block: Any = "auto",
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Tiled:
    """A network on the mask's pixels of a picture of any size, tile by tile: one is read and one is written while
    another is computed. What it gives is what the dense network gives of the whole picture, on the mask; memory is that
    of a few tiles with their halo.

    Args:
        picture: [H,W,C] of whole numbers, which become 0 to 1 as a pipeline's do, or floats: an array, a .npy, a .tif
            or .tiff (extra `large`).
        mask: [h,w] of any size (a tissue mask found on a thumbnail), or a Mask or its name, called on each tile. What
            it takes from the whole picture (`Mask.survey`: tissue's threshold) it gets from all tiles first.
        network: as `Pipeline` takes it; its first feature map is the output. Networks that see the whole picture
            (global pools) are refused.
        out: a .npy, .tif or .tiff to write, there once it is whole; None: an array.
        tile: side of a tile in pixels, made a multiple of what the network divides by.
        told: called after each tile with how many are done, and of how many.

    >>> done = run_large("slide.tif", tissue, net, "probabilities.npy")
    """
    source, net = open_large(picture), open_network(network)
    if tile < 1:
        raise PipelineError(f"tile: expected at least 1, got {tile}")
    if net.pad or net.multiple != 1:
        raise PipelineError(f"network {net.name}: expected one that takes frames as they are, got one that widens them")
    given: Tensor | Mask = _coarse(mask) if isinstance(mask, (np.ndarray, Tensor)) else open_mask(mask)
    at = pick_device(device)
    dtype = dtype or torch.float32
    model = placed(net.model, at, dtype) if isinstance(net.model, torch.nn.Module) else net.model
    walk = _Walk(net, model, source, at, dtype, block)
    return walk(given, out, tile, told, files_of(picture))


def _coarse(mask: Any) -> Tensor:
    found = torch.as_tensor(np.ascontiguousarray(mask) if isinstance(mask, np.ndarray) else mask)
    if found.dim() != 2:
        raise PipelineError(f"mask: expected [h,w], got {tuple(found.shape)}")
    return found > 0.5 if found.is_floating_point() else found != 0


class _Walk:
    """One picture's tiles."""

    def __init__(
        self, net: Network, model: Any, source: Any, device: torch.device, dtype: torch.dtype, block: Any
    ) -> None:  # fmt: skip
        self.net, self.source, self.device, self.dtype = net, source, device, dtype
        self.height, self.width, channels = source.shape
        x = torch.zeros(1, channels, PROBE, PROBE, device=device, dtype=dtype)
        x = self._input(x.contiguous(memory_format=torch.channels_last))
        self.run = SparseRun(
            model, x, mode="exact", block=block, margin=0, masks=(), out=(), mask_source=None, allow_tf32=False
        )
        self.halo = halo_of(self.run)
        scales = [Fraction(PROBE, rows) for rows, _, _ in self.run.planes]
        self.align = math.lcm(*(max(1, math.ceil(scale)) for scale in scales))
        self.scale = Fraction(1)
        self.most: float | None = None
        probed = self._output(x, torch.zeros(1, PROBE, PROBE, dtype=torch.bool, device=device))
        self.scale = Fraction(probed.shape[2], PROBE)
        if probed.shape[3] != probed.shape[2] or PROBE % self.align or self.scale * self.align % 1:
            raise PipelineError(f"network {net.name}: expected planes that divide the picture, got {self.run.planes}")
        self.channels = probed.shape[1]

    def _input(self, x: Tensor) -> Tensor:
        return x if self.net.prepare is None else self.net.prepare(x)

    def _output(self, x: Tensor, mask: Tensor) -> Tensor:
        margin = math.ceil(1 / self.scale)  # output pixels that the mask touches are computed, however planes divide
        for found in pytree.tree_leaves(self.run(x, mask, margin=margin)):
            if isinstance(found, Tensor) and found.dim() == 4:
                return found
        raise PipelineError(f"network {self.net.name}: expected a feature map as its output, got none")

    def _spans(self, length: int, tile: int) -> Iterator[tuple[int, int, int, int]]:
        """(first, end) of each tile and of what is read for it; all but the last are read in windows of one length."""
        whole = -(-tile // self.align) * self.align
        border = -(-self.halo // self.align) * self.align
        for first in range(0, length, whole):
            end = min(first + whole, length)
            low, high = max(0, first - border), end + border
            if first - border < 0:  # as long as the others
                high = whole + 2 * border
            yield first, end, low, min(high, length)

    def __call__(
        self, mask: Tensor | Mask, out: Any, tile: int, told: Callable[[int, int], None] | None, sources: list[Any]
    ) -> Tiled:  # fmt: skip
        rows, columns = list(self._spans(self.height, tile)), list(self._spans(self.width, tile))
        size = self._size(rows[-1], 0), self._size(columns[-1], 1)
        output = LargeOutput(out, (*size, self.channels), sources)
        tiles, computed = [(row, column) for row in rows for column in columns], 0
        try:
            self._survey(mask, rows, columns)
            ahead = Ahead((self._begun(mask, *tile) for tile in tiles), WAITING)
            behind = Behind(lambda part: output.write(part[0], part[1], part[2].cpu().numpy()), depth=WAITING)
            try:
                for done, begun in enumerate(ahead):
                    part = None if begun is None else self._computed(mask, *tiles[done], *begun)
                    if part is not None:
                        behind.put(part)
                        computed += 1
                    if told is not None:
                        told(done + 1, len(tiles))
            finally:
                ahead.close()
                behind.close()
            return Tiled(output.keep(), len(tiles), computed, self.halo)
        except BaseException:
            output.drop()
            raise

    def _survey(self, mask: Tensor | Mask, rows: list[Any], columns: list[Any]) -> None:
        """What belongs to the whole picture: the largest of its numbers, where they are scaled by it, and what the mask
        asks of it."""
        kind = getattr(self.source, "dtype", None)
        if isinstance(kind, np.dtype) and kind.kind in "iu" and kind not in (np.uint8, np.uint16):
            found = [largest(self.source[y0:y1, x0:x1]) for y0, y1, *_ in rows for x0, x1, *_ in columns]
            self.most = -1.0 if min(found) < 0 else max(found)
        if isinstance(mask, Mask) and mask.surveys:
            mask.survey(self._read(span[:2], other[:2]) for span in rows for other in columns)

    def _read(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        """[1,C,h,w]: a window of the picture."""
        return input_of(self._pixels(rows, columns).to(self.device, non_blocking=True), self.dtype)

    def _pixels(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        """[h,w,C]: the same as it was read, for a GPU in pinned memory."""
        window = self.source[slice(*rows), slice(*columns)]
        pixels = window if isinstance(window, Tensor) else unit(np.asarray(window), self.most)
        found = Frame(0, pixels.movedim(2, 0) if isinstance(pixels, Tensor) else pixels).raw()
        return found.pin_memory() if self.device.type == "cuda" and not found.is_cuda else found

    def _size(self, last: tuple[int, int, int, int], axis: int) -> int:
        """Pixels of the output along an axis: what the network makes of the last window, beside what comes before."""
        _, _, low, high = last
        shape = [1, self.source.shape[2], PROBE, PROBE]
        shape[2 + axis] = high - low
        x = torch.zeros(shape, device=self.device, dtype=self.dtype).contiguous(memory_format=torch.channels_last)
        empty = torch.zeros(1, *shape[2:], dtype=torch.bool, device=self.device)
        return int(low * self.scale) + self._output(self._input(x), empty).shape[2 + axis]

    def _begun(
        self, given: Tensor | Mask, row: tuple[int, ...], column: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
        """In the thread that reads: a tile's window, and of a mask of the whole picture its window of that, [1,h,w];
        None of a tile without a pixel of it, of which nothing is read."""
        (y0, y1, top, bottom), (x0, x1, left, right) = row, column
        mask = None
        if isinstance(given, Tensor):
            mask = self._window(given, (top, bottom), (left, right))
            if not mask[:, y0 - top : y1 - top, x0 - left : x1 - left].any():
                return None
        return self._pixels((top, bottom), (left, right)), mask

    def _computed(
        self, given: Tensor | Mask, row: tuple[int, ...], column: tuple[int, ...], pixels: Tensor, mask: Tensor | None
    ) -> tuple[int, int, Tensor] | None:
        """What is to be written of a tile, [h,w,K], on the device, and where it begins; None of one without a pixel of
        the mask."""
        (y0, y1, top, _), (x0, x1, left, _) = row, column
        x = input_of(pixels.to(self.device, non_blocking=True), self.dtype)
        if isinstance(given, Mask):
            mask = mask_of(given, x)
        assert mask is not None
        mask = mask.to(self.device, non_blocking=True)
        wanted = torch.zeros_like(mask)
        inside = slice(None), slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
        wanted[inside] = mask[inside]
        if isinstance(given, Mask) and not wanted.any():
            return None
        found = self._output(self._input(x), wanted)
        kept = torch.where(self._at_output(wanted, tuple(found.shape[2:])), found, torch.zeros_like(found))
        a, b, c, d = (int(n * self.scale) for n in (y0 - top, y1 - top, x0 - left, x1 - left))
        b = found.shape[2] if y1 == self.height else b
        d = found.shape[3] if x1 == self.width else d
        return int(y0 * self.scale), int(x0 * self.scale), kept[0, :, a:b, c:d].movedim(0, 2).float()

    def _window(self, coarse: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """[1,H,W]: the window's pixels of a mask [h,w] that is stretched over the picture."""
        y, x = (
            torch.arange(low, high) * n // length
            for (low, high), n, length in zip((rows, columns), coarse.shape, (self.height, self.width), strict=True)
        )
        return coarse[y][:, x][None]

    def _at_output(self, mask: Tensor, size: tuple[int, ...]) -> Tensor:
        """[1,1,H',W']: output pixels that lie over one of the mask, the same whatever the tile."""
        found = mask[:, None].float()
        if self.scale < 1:
            found = F.max_pool2d(found, math.ceil(1 / self.scale), ceil_mode=True)
        elif self.scale > 1:
            found = F.interpolate(found, scale_factor=float(self.scale), mode="nearest")
        return found[:, :, : size[0], : size[1]] > 0
