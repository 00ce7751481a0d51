"""mask_pyramid: the active blocks and fringes of every plane of a network, from one mask in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid, Fringe, MaskPyramid
from sbnet.geometry import Window, as_window, to_pair
from sbnet.ops.common import mask_planes

Plane = Sequence[Any]  # height, width, block size
Consumer = Sequence[Any]  # plane, then a Window, or kernel_size, stride = 1, padding = 0, dilation = 1
CONSUMER_NUMBERS = 11  # as the op takes it: plane, then a window's


def mask_pyramid(
    mask: Tensor,
    planes: Sequence[Plane],
    tol: float = 0.5,
    fringes: Sequence[tuple[int, Sequence[Consumer]]] = (),
    margin: int = 0,
) -> MaskPyramid:
    """The active blocks of every plane of a network, and the fringes of its tensors, as the `masked` contract has them.

    A block of an H x W plane is active iff the pixel mask (mask > tol, grown by `margin`), adaptively max-pooled to
    H x W, is set in it. Equals reduce_mask of that on BlockGrid.cover((H, W), block), and fringe() of each consumer,
    united.

    Args:
        mask: [N,H,W], [N,H,W,1] or [N,1,H,W] (a shape that is both is refused); bool, integers or floating: pixels
            of the network's input.
        planes: (height, width, block size) of each plane; may be larger than the mask.
        tol: a pixel is set iff it is greater (NaN is not); compared in float32 (float64 masks: float64).
        fringes: (plane, consumers) of each tensor whose fringe is wanted, where a consumer is (plane of its output,
            Window) or, of a convolution or pool, (plane, kernel_size[, stride[, padding[, dilation]]]); planes are
            indices into `planes`. The pixels are those that any of the consumers reads.
        margin: rows and columns by which the pixel mask is grown on each side, as by `masks.grow`: a block
            looks at as many more pixels.

    Returns:
        MaskPyramid with as many ActiveBlocks and Fringes, lists large enough for everything; nothing is read on the
        host.

    >>> pyramid = sbnet.mask_pyramid(mask, [(48, 80, 16), (24, 40, 8)], fringes=[(0, [(1, 3, 2, 1), (1, 1, 2)])])
    >>> [int(plane.count) for plane in pyramid.planes]
    [6, 6]
    """
    return PyramidRequest.of(planes, fringes).run(mask, tol, margin)


@dataclass(frozen=True)
class PyramidRequest:
    """Planes and fringes of a `mask_pyramid`, checked once for many masks."""

    grids: tuple[BlockGrid, ...]
    planes: list[int]
    fringes: list[int]

    @staticmethod
    def of(planes: Sequence[Plane], fringes: Sequence[tuple[int, Sequence[Consumer]]] = ()) -> PyramidRequest:
        """Arguments as for `mask_pyramid`."""
        op = "mask_pyramid"
        numbers: list[int] = []
        grids = []
        for k, plane in enumerate(_items(op, "planes", planes)):
            if len(_items(op, f"planes[{k}]", plane)) != 3:
                raise ValueError(f"sbnet::{op}: planes[{k}]: expected (height, width, block size), got {plane}")
            size = to_pair(tuple(plane[:2]), f"{op}: planes[{k}]")
            grids.append(BlockGrid.cover(size, to_pair(plane[2], f"{op}: planes[{k}]: block size")))
            numbers += [*size, *grids[-1].bsize]
        wanted = []
        for k, request in enumerate(_items(op, "fringes", fringes)):
            wanted += _fringe_numbers(f"{op}: fringes[{k}]", request, len(grids))
        return PyramidRequest(tuple(grids), numbers, wanted)

    def run(self, mask: Tensor, tol: float = 0.5, margin: int = 0) -> MaskPyramid:
        """The lists of one mask."""
        lists = torch.ops.sbnet.mask_pyramid(mask_planes("mask_pyramid", mask), self.planes, tol, self.fringes, margin)
        left = iter(lists)
        actives = tuple(ActiveBlocks(next(left), next(left), next(left), next(left), grid) for grid in self.grids)
        return MaskPyramid(actives, tuple(Fringe(pixels, next(left)) for pixels in left))


def _items(op: str, name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"sbnet::{op}: {name}: expected a sequence, got {type(value).__name__}")
    return value


def _fringe_numbers(name: str, request: Any, planes: int) -> list[int]:
    """What the op takes: plane, number of consumers, then plane and window of each."""

    def plane_index(value: Any) -> int:
        if not isinstance(value, int) or not 0 <= value < planes:
            raise ValueError(f"sbnet::{name}: plane: expected an index of one of the {planes} planes, got {value!r}")
        return value

    if not isinstance(request, (tuple, list)) or len(request) != 2 or not isinstance(request[1], (tuple, list)):
        raise ValueError(f"sbnet::{name}: expected (plane, consumers), got {request!r}")
    numbers = [plane_index(request[0]), len(request[1])]
    for consumer in request[1]:
        alone = isinstance(consumer, (tuple, list)) and len(consumer) > 1 and isinstance(consumer[1], Window)
        if not isinstance(consumer, (tuple, list)) or not 2 <= len(consumer) <= (2 if alone else 5):
            raise ValueError(
                f"sbnet::{name}: expected consumers (plane, Window) or (plane, kernel_size[, stride[, padding[, "
                f"dilation]]]), got {consumer!r}"
            )
        numbers += [plane_index(consumer[0]), *as_window(name, *consumer[1:]).numbers()]
    return numbers


@torch.library.register_fake("sbnet::mask_pyramid")
def _mask_pyramid_fake(
    mask: Tensor, planes: list[int], tol: float, fringes: list[int], margin: int = 0
) -> list[Tensor]:
    batch = mask.shape[0]
    torch._check(
        len(planes) % 4 == 0 and all(v >= 1 for v in planes),
        lambda: f"sbnet::mask_pyramid: planes: expected height, width and block size of each, at least 1, got {planes}",
    )
    at = 0
    while at < len(fringes):
        torch._check(
            len(fringes) - at >= 2 and fringes[at + 1] >= 1 and 0 <= fringes[at] < len(planes) // 4,
            lambda: (
                f"sbnet::mask_pyramid: fringes: expected an index of a plane, the number "
                f"of its consumers and eleven numbers for each of those, got {fringes}"
            ),
        )
        at += 2 + CONSUMER_NUMBERS * fringes[at + 1]

    def made(*shape: Any) -> Tensor:
        return mask.new_empty(shape, dtype=torch.int32)

    lists = []
    for height, width, bh, bw in zip(*(planes[k::4] for k in range(4)), strict=True):
        rows, columns = -(-height // bh), -(-width // bw)
        lists += [made(batch * rows * columns, 3), made(1), made(1), made(batch, rows, columns)]
    at = 0
    while at < len(fringes):
        height, width = planes[4 * fringes[at] : 4 * fringes[at] + 2]
        lists += [made(batch * height * width), made(1)]
        at += 2 + CONSUMER_NUMBERS * fringes[at + 1]
    return lists
