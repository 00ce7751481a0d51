"""Block-sparse resizing: PyTorch's 2-D interpolation on the active blocks of the output plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import RESIZE_MODES, resize_output_size, to_scales
from sbnet.ops.common import empty4, is_channels_last, refuse_meta_mix, require_active, require_tensor
from sbnet.ops.masked.conv_grad import active_of
from sbnet.ops.masked.layer import in_place_fake, layer_fakes, pairs, run_layer, run_layer_

_ops = torch.ops.sbnet


def sparse_resize2d(
    x: Tensor,
    active: ActiveBlocks,
    *,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """Interpolation computed on active blocks of the OUTPUT plane only; zeros elsewhere.

    Equals where(active, F.interpolate(x, size, scale_factor, mode, align_corners), 0). x is read as it is; a pixel
    that counts nothing in a bilinear one is not read.

    Args:
        x: [N,C,H,W] float32, float16 or bfloat16, any layout; channels_last is the fast one.
        active: active blocks of the output plane (the tiling grid of `sbnet.resize_output_size`).
        size: of the output plane; or
        scale_factor: output pixels an input pixel, up or down.
        mode: "nearest", "nearest-exact", "bilinear" or "bicubic".
        align_corners: as in F.interpolate; bilinear and bicubic only.

    Returns:
        [N,C,H_out,W_out] in x's memory format. Differentiable.

    Raises:
        RuntimeError, ValueError, TypeError: wrong shapes, dtypes, devices or grid.

    >>> small = torch.rand(1, 16, 24, 40)
    >>> sbnet.sparse_resize2d(small, active, scale_factor=2, mode="bilinear").shape
    torch.Size([1, 16, 48, 80])
    """
    op = "sparse_resize2d"
    require_tensor(op, "x", x)
    require_active(op, active)
    sides, how = resize_arguments(op, x, size, scale_factor, mode, align_corners)
    return run_layer(op, x, active, sides, *how)


def sparse_resize2d_(
    x: Tensor,
    active: ActiveBlocks,
    out: Tensor,
    *,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    fringe: Fringe | None = None,
) -> None:
    """As `sparse_resize2d`, writing the active blocks of `out`, zeroing the pixels of `fringe` and leaving the rest.

    Args:
        out: [N,C,H_out,W_out] of x's dtype, any layout; must not share memory with x.
        scale_factor: None where out's size says it.
        fringe: from `sbnet.fringe`, or None.

    >>> sbnet.sparse_resize2d_(torch.rand(1, 16, 24, 40), active, torch.empty_like(x), mode="bilinear")
    """
    op = "sparse_resize2d_"
    require_tensor(op, "x", x)
    require_tensor(op, "out", out)
    size = out.shape[2:] if scale_factor is None else None
    sides, how = resize_arguments(op, x, size, scale_factor, mode, align_corners)
    if sides != list(out.shape[2:]):
        raise ValueError(f"sbnet::{op}: out: expected a plane of {tuple(sides)}, got {tuple(out.shape[2:])}")
    run_layer_(op, x, active, out, fringe, *how)


def resize_arguments(
    op: str, x: Tensor, size: Any, scale_factor: Any, mode: str, align_corners: bool | None
) -> tuple[list[int], tuple[str, bool, float, float]]:
    """(output sides, (mode, align_corners, ratios)) as the op takes them."""
    if mode not in RESIZE_MODES:
        raise ValueError(f"sbnet::{op}: mode: expected {', '.join(RESIZE_MODES)}, got {mode!r}")
    if (size is None) == (scale_factor is None):
        raise ValueError(f"sbnet::{op}: size, scale_factor: expected one of them, got {size}, {scale_factor}")
    if align_corners is not None and mode.startswith("nearest"):
        raise ValueError(f"sbnet::{op}: align_corners: expected None of mode {mode}, got {align_corners}")
    ratios = (0.0, 0.0)
    if scale_factor is not None:
        if x.dim() != 4:
            raise RuntimeError(f"sbnet::{op}: x: expected 4 dimensions, got {x.dim()}")
        scales = to_scales(scale_factor, f"{op}: scale_factor")
        size = resize_output_size(x.shape[2:], scales)
        ratios = _ratios(x, size, scales, mode)
    return pairs(op, size=size)[0], (mode, bool(align_corners), *ratios)


def _ratios(x: Tensor, size: Sequence[int], scales: Sequence[float], mode: str) -> tuple[float, float]:
    """Input pixels from an output pixel to the next; 0: as the sides say.

    PyTorch does not always sample by the scale it is given: an axis whose side stays as it is, is copied (on a GPU, of
    a weighted mode, only together with the other axis; on a CPU not by nearest-exact and bicubic), and nearest on a CPU
    doubles a side by halving coordinates.
    """
    sides = x.shape[2:]
    known = [isinstance(n, int) and isinstance(m, int) for n, m in zip(size, sides, strict=True)]
    kept = [ints and out == side for ints, out, side in zip(known, size, sides, strict=True)]
    if not x.is_cuda:
        kept = [same and mode in ("nearest", "bilinear") for same in kept]
    elif not mode.startswith("nearest"):
        kept = [all(kept)] * 2
    if mode == "nearest" and not x.is_cuda:
        doubled = [ints and out == 2 * side for ints, out, side in zip(known, size, sides, strict=True)]
        kept = [a or b for a, b in zip(kept, doubled, strict=True)]
    # Where the scale says the same, it stays: sides that are not known yet follow from it.
    by_sides = [stays and scale not in (1, 2) for stays, scale in zip(kept, scales, strict=True)]
    rows, columns = (0.0 if stays else 1 / scale for stays, scale in zip(by_sides, scales, strict=True))
    return rows, columns


# ---- fake implementations and gradients

layer_fakes("sparse_resize2d", lambda shape, size, *_: (*shape[:2], *size))


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _indices, _count, block_map, grid, *how = inputs
    ctx.save_for_backward(block_map)
    ctx.grid, ctx.how, ctx.size, ctx.channels_last = grid, how, list(x.shape[2:]), is_channels_last(x)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    (block_map,) = ctx.saved_tensors
    _size, *how = ctx.how
    return _ops.sparse_resize2d_grad(grad, block_map, ctx.grid, ctx.size, *how, ctx.channels_last), *[None] * 9


torch.library.register_autograd("sbnet::sparse_resize2d", _backward, setup_context=_setup)


@torch.library.register_fake("sbnet::sparse_resize2d_grad")
def _grad_fake(
    grad: Tensor, block_map: Tensor, grid: list[int], size: list[int], method: str, align_corners: bool, ratio_h: float,
    ratio_w: float, channels_last: bool,
) -> Tensor:  # fmt: skip
    refuse_meta_mix("sparse_resize2d_grad", grad, block_map)
    return empty4(grad, (*grad.shape[:2], *size), channels_last)


in_place_fake("sparse_resize2d_grad_")


def _grad_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    grad, block_map, ctx.grid, _size, *ctx.how, _ = inputs
    ctx.save_for_backward(block_map)
    ctx.size = list(grad.shape[2:])


def _grad_backward(ctx: Any, grad: Tensor) -> tuple:
    """It is linear in dy: the interpolation again."""
    (block_map,) = ctx.saved_tensors
    indices, count, _, own = active_of(block_map >= 0, ctx.grid)
    return _ops.sparse_resize2d(grad, indices, count, own, ctx.grid, ctx.size, *ctx.how), *[None] * 8


torch.library.register_autograd("sbnet::sparse_resize2d_grad", _grad_backward, setup_context=_grad_setup)
