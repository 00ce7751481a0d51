"""Attention within windows of a plane, and what merges the pixels of squares."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, Context, Get, Given, Kind, Target
from sbnet.graph.kinds.pointwise import zero
from sbnet.ops import sparse_fill


class WindowAttention(Kind):
    """softmax(scale q k^T + bias) v within windows, over active pixels: args: q, k, v; which pixel each row of each
    window is [windows,rows], from 1 on, or 0 of padding; bias [1 or windows,heads,rows,rows]. starts: the first
    channels of q, k and v; heads, dim, scale. k_fill, v_fill: keys and values of padding, else zeros. relative: in
    place of a bias two tables [rows,rows,dim] and [columns,columns,dim] that q is multiplied by."""

    name = "window_attention"
    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def apply(self, node: Node, given: Given) -> Any:
        x, active = given.args[0], given.active.pixel_mask(given.args[0].shape[2:]).flatten(1)
        rows = [_attended(node, k, given.args, given.params, active[k]) for k in range(len(x))]
        n, c, h, w = node.output.shape
        made = torch.stack(rows).transpose(1, 2).reshape(n, c, h, w)
        return sparse_fill(made.contiguous(memory_format=torch.channels_last), given.active)

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        args = [context.constants[v] if v.constant else get(v) for v in node.args]
        params = {name: context.constants[v] for name, v in node.params.items()}
        if to.out.device.type != "cpu":
            to.out.copy_(self.apply(node, Given(args, {}, params, to.active)))
            return
        active, index = to.active.pixel_mask(to.out.shape[2:]).flatten(1), args[3]
        alone = len(index) == 1 and bool((index > 0).all())
        for k, out in enumerate(to.out.permute(0, 2, 3, 1).flatten(1, 2)):
            seen = F.pad(active[k], (1, 0))[index]
            chosen = seen.any(1).nonzero()[:, 0]
            if alone:  # one window: rows that are not active are left out
                rows = index[0][seen[0]] - 1
                out[rows] = _rows(node, k, args, seen[0].nonzero()[:, 0], rows)
            elif len(chosen):
                made = _windows(node, k, args, params, seen[chosen], chosen)
                out[index[chosen][seen[chosen]] - 1] = made[seen[chosen]]
        if to.clear is not None:
            zero(to.out, to.clear)


def _rows(node: Node, k: int, args: Any, places: Tensor, rows: Tensor) -> Tensor:
    """[rows,C] of image k, of some rows of its only window alone."""
    o = node.options
    heads, width = o["heads"], o["heads"] * o["dim"]
    parts = []
    for x, start in zip(args[:3], o["starts"], strict=True):
        taken = x[k].flatten(1).t()[rows, start : start + width]
        parts.append(taken.unflatten(1, (heads, -1)).transpose(0, 1)[None])
    bias = None
    if o.get("relative"):
        bias = _relative(parts[0], args[4], args[5], places)
    elif len(args) > 4:
        bias = args[4][:, :, places][:, :, :, places].to(parts[0].dtype)
    y = F.scaled_dot_product_attention(*parts, attn_mask=bias, scale=o["scale"])  # type: ignore[misc]
    return y[0].transpose(0, 1).flatten(1)


def _relative(q: Tensor, rows: Tensor, columns: Tensor, places: Tensor) -> Tensor:
    """The bias [windows,heads,places,places] of queries and keys at places of a window."""
    wide = len(columns)
    i, j = places // wide, places % wide
    of_rows = torch.einsum("nhtc,tkc->nhtk", q, rows.to(q.dtype)[i])
    of_columns = torch.einsum("nhtc,tkc->nhtk", q, columns.to(q.dtype)[j])
    return of_rows[..., i] + of_columns[..., j]


def _windows(
    node: Node, k: int, args: Any, params: dict[str, Tensor], seen: Tensor, chosen: Tensor | None = None
) -> Tensor:
    """[windows,rows,C] of image k; seen: rows that are active pixels."""
    o, index = node.options, args[3] if chosen is None else args[3][chosen]
    heads, width = o["heads"], o["heads"] * o["dim"]
    padding = index == 0
    parts = []
    for name, x, start in zip("qkv", args[:3], o["starts"], strict=True):
        rows = x[k].flatten(1).t()[:, start : start + width]
        taken = rows[(index - 1).clamp(min=0)]
        if name != "q":
            fill = params.get(f"{name}_fill")
            taken = torch.where(
                padding[..., None], taken.new_zeros(()) if fill is None else fill.to(taken.dtype), taken
            )
            # What is not active may hold anything, and 0 * NaN is NaN.
            taken = torch.where((padding | seen)[..., None], taken, taken.new_zeros(()))
        parts.append(taken.unflatten(2, (heads, -1)).transpose(1, 2))
    keys = torch.zeros(seen.shape, dtype=parts[0].dtype, device=seen.device)
    keys = keys.masked_fill(~(padding | seen), -torch.inf)[:, None, None]
    if o.get("relative"):
        keys = keys + _relative(parts[0], args[4], args[5], torch.arange(index.shape[1], device=index.device))
    elif len(args) > 4:
        bias = args[4] if chosen is None or len(args[4]) == 1 else args[4][chosen]
        keys = keys + bias.to(keys.dtype)
    y = F.scaled_dot_product_attention(*parts, attn_mask=keys, scale=o["scale"])  # type: ignore[misc]
    return y.transpose(1, 2).flatten(2)


def _attended(node: Node, k: int, args: Any, params: dict[str, Tensor], active: Tensor) -> Tensor:
    """[pixels,C] of image k: all windows; of those without an active pixel, anything finite."""
    index = args[3]
    seen = F.pad(active, (1, 0))[index]
    none = ~(seen.any(1, keepdim=True) | (index == 0).any(1, keepdim=True))  # a softmax of nothing is NaN
    made = _windows(node, k, args, params, seen | none)
    rows = made.new_zeros(len(active) + 1, made.shape[2])
    return rows.index_copy(0, index.flatten(), made.flatten(0, 1))[1:]


class Merge(Kind):
    """The pixels of squares of `factor` x `factor` side by side in channels, in the order of `offsets`."""

    name = "merge"
    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        factor = node.options["factor"]
        return Window.conv((factor, factor), (factor, factor), (0, 0), (1, 1))

    def apply(self, node: Node, given: Given) -> Any:
        x, factor = given.args[0], node.options["factor"]
        made = torch.cat([x[:, :, a::factor, e::factor] for a, e in node.options["offsets"]], 1)
        return sparse_fill(made.contiguous(memory_format=torch.channels_last), given.active)

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        x, factor = get(node.args[0]), node.options["factor"]
        if to.out.device.type != "cpu":
            to.out.copy_(self.apply(node, Given([x], {}, {}, to.active)))
            return
        n, i, j = to.active.pixel_mask(to.out.shape[2:])[:, 0].nonzero(as_tuple=True)
        rows, out = x.permute(0, 2, 3, 1), to.out.permute(0, 2, 3, 1)
        out[n, i, j] = torch.cat([rows[n, i * factor + a, j * factor + e] for a, e in node.options["offsets"]], 1)
        if to.clear is not None:
            zero(to.out, to.clear)
