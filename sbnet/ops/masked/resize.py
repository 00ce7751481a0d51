"""Block-sparse resizing: PyTorch's 2-D interpolation on the active blocks of the output plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, Fringe
from sbnet.geometry import RESIZE_MODES, resize_output_size, to_scales
from sbnet.ops.common import require_active, require_tensor
from sbnet.ops.masked.layer import layer_fakes, pairs, run_layer, run_layer_

_ops = torch.ops.sbnet
_aten = torch.ops.aten


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
    sides, how = _arguments(op, x, size, scale_factor, mode, align_corners)
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
    sides, how = _arguments(op, x, size, scale_factor, mode, align_corners)
    if sides != list(out.shape[2:]):
        raise ValueError(f"sbnet::{op}: out: expected a plane of {tuple(sides)}, got {tuple(out.shape[2:])}")
    run_layer_(op, x, active, out, fringe, *how)


def _arguments(
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
    ctx.grid, ctx.how, ctx.shape = grid, how, list(x.shape)


NAMES = {
    "nearest": "upsample_nearest2d", "nearest-exact": "_upsample_nearest_exact2d", "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
}  # fmt: skip


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """PyTorch's own backward of the whole plane, on the gradient of active blocks. On a GPU it adds bilinear and
    bicubic gradients by atomics, in any order: torch.use_deterministic_algorithms(True) asks for products instead."""
    (block_map,) = ctx.saved_tensors
    size, mode, align_corners, *ratios = ctx.how
    grad = _ops.sparse_fill(grad, block_map, ctx.grid, 0.0)
    corners = () if mode.startswith("nearest") else (align_corners,)
    scales = [1 / r if r else None for r in ratios]
    atomics = grad.is_cuda and not mode.startswith("nearest") and torch.are_deterministic_algorithms_enabled()
    if all(isinstance(n, int) for n in (*size, *ctx.shape)) and not atomics:
        backward = getattr(_aten, NAMES[mode] + "_backward")
        return backward(grad, size, ctx.shape, *corners, *scales), *[None] * 9
    # It takes no symbolic sizes either. The weights of each axis as a matrix, from an identity's columns:
    forward, (height, width) = getattr(_aten, NAMES[mode]), ctx.shape[2:]
    wide = grad.float() if grad.dtype.itemsize == 2 else grad
    down = forward(torch.eye(height).to(wide)[None, :, :, None], [size[0], 1], *corners, scales[0], None)
    across = forward(torch.eye(width).to(wide)[None, :, :, None], [size[1], 1], *corners, scales[1], None)
    found = torch.einsum("nchw,ih,jw->ncij", wide, down[0, :, :, 0], across[0, :, :, 0])
    return found.to(grad.dtype), *[None] * 9


torch.library.register_autograd("sbnet::sparse_resize2d", _backward, setup_context=_setup)
