"""Attention within windows of a plane, and what merges the pixels of squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sbnet.geometry import Window
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds.kind import ACTIVE, Context, Get, Given, Kind, Target
from sbnet.graph.kinds.pointwise import put, zero
from sbnet.ops import sparse_fill, sparse_fill_
from sbnet.ops.attention.window_attention import takes, window_attention, window_attention_
from sbnet.ops.common import is_recorded
from sbnet.ops.masked.token_rows import MOST_OFFSETS, merge_pixels, merge_pixels_, pack_tokens

MOST_SCORES = 1 << 28  # that are made at once
LISTS = "row_order", "row_lengths", "key_order", "key_lengths"


class WindowAttention(Kind):
    """softmax(scale q k^T + bias) v within windows, over active pixels: args: q, k, v; which pixel each row of each
    window is [windows,rows], from 1 on, or 0 of padding; and what `extras` names:

    key_index, active_keys: the same of keys and values, where they are other rows, or of another plane; and which
    pixels of theirs are active [N,pixels]. (Of the cached contract all are: they hold what the frame before left.)
    row_order, row_lengths, key_order, key_lengths: of one window of all pixels, the active ones [N,pixels] and their
    number [N].
    scales: [heads,1,1], by which the scores are multiplied.
    bias: [1 or windows,heads,rows,keys].
    row_table, column_table: in place of a bias, [rows,rows,dim] and [columns,columns,dim] that q is multiplied by.

    starts: the first channels of q, k and v; heads, dim, value_dim, scale. normalize: queries and keys are divided by
    their length, or by this where it is more. k_fill, v_fill: keys and values of padding, else zeros."""

    name = "window_attention"
    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def whole(self, node: Node, device: str) -> str:
        o, at = node.options, dict(zip(node.options["extras"], node.args[4:], strict=True))
        keys, dtype = at.get("key_index", node.args[3]).shape[1], node.args[0].dtype
        tables = [at[name].shape[0] for name in ("row_table", "column_table") if name in at]
        if device != "cuda" or takes(dtype, o["starts"], o["dim"], o["value_dim"], keys, tables):
            return ""
        return f"heads of {o['dim']} channels, {keys} keys: no kernel on CUDA; PyTorch computes all windows"

    def apply(self, node: Node, given: Given) -> Any:
        options = None
        if not is_recorded(*given.args, *given.params.values()):
            options = _options(node, given.args, given.params, given.everywhere, "")  # a file runs on both
        if options is not None:
            q, k, v = (t.contiguous(memory_format=torch.channels_last) for t in given.args[:3])
            return window_attention(q, k, v, given.args[3], active=given.active, **options)
        active = given.active.pixel_mask(given.args[0].shape[2:]).flatten(1)
        inputs = Inputs.of(node, given.args, given.params, active, given.everywhere)
        n, c, h, w = node.output.shape
        scores = len(inputs.index) * inputs.index.shape[1] * inputs.key_index.shape[1] * node.options["heads"]
        at_once = max(1, MOST_SCORES // scores)
        made = torch.cat([_attended(inputs, slice(k, k + at_once)) for k in range(0, n, at_once)])
        made = made.transpose(1, 2).reshape(n, c, h, w)
        return sparse_fill(made.contiguous(memory_format=torch.channels_last), given.active)

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        args = [context.constants[v] if v.constant else get(v) for v in node.args]
        params = {name: context.constants[v] for name, v in node.params.items()}
        if not _by_kernel(node, args, params, to, context.everywhere):
            made = self.apply(node, Given(args, {}, params, to.active, context.everywhere))
            put(made, to, to.active.pixel_mask(to.out.shape[2:]), context)


def _by_kernel(node: Node, args: list[Tensor], params: dict[str, Tensor], to: Target, everywhere: bool) -> bool:
    """By a kernel whose cost follows the active pixels, where there is one: on a CPU always."""
    options = _options(node, args, params, everywhere, to.out.device.type)
    last = torch.channels_last
    if options is None or any(not t.is_contiguous(memory_format=last) for t in (*args[:3], to.out)):
        return False
    q, k, v, rows = args[:4]
    window_attention_(q, k, v, rows, options.pop("keys"), to.active, to.out, **options)
    if to.clear is not None:
        sparse_fill_(to.out, to.active)
    return True


def _options(
    node: Node, args: Sequence[Tensor], params: dict[str, Tensor], everywhere: bool, device: str
) -> dict[str, Any] | None:
    """What ops of window attention take besides q, k, v and rows: keys, and options; None: they do not, on devices of a
    kind, or of all."""
    o, (q, k, _, rows) = node.options, args[:4]
    extras = dict(zip(o["extras"], args[4:], strict=True))
    keys = extras.pop("key_index", rows)
    tables = [extras[name] for name in ("row_table", "column_table") if name in extras]
    if q.dtype == torch.float64 or (
        device != "cpu"
        and not takes(q.dtype, o["starts"], o["dim"], o["value_dim"], keys.shape[1], [len(t) for t in tables])
    ):
        return None
    if everywhere:
        extras["active_keys"] = torch.ones(len(k), k.shape[2] * k.shape[3], dtype=torch.bool, device=k.device)
    lists = {name: extras.pop(name) for name in LISTS if name in extras}
    given = {name: t if name == "active_keys" else t.to(q.dtype).contiguous() for name, t in (extras | params).items()}
    given |= lists if device == "cuda" else {}
    numbers = {name: o[name] for name in ("starts", "heads", "dim", "value_dim", "scale")}
    return {"keys": keys, "normalize": o.get("normalize", 0.0), **numbers, **given}


@dataclass
class Inputs:
    """What a WindowAttention reads, by name; see there. active, active_keys: [N,pixels] bool."""

    options: dict[str, Any]
    parts: tuple[Tensor, ...]
    index: Tensor
    key_index: Tensor
    active: Tensor
    active_keys: Tensor
    extras: dict[str, Tensor]
    params: dict[str, Tensor]

    @classmethod
    def of(cls, node: Node, args: Any, params: dict[str, Tensor], active: Tensor, everywhere: bool = False) -> Inputs:
        extras = dict(zip(node.options["extras"], args[4:], strict=True))
        keys, active_keys = extras.get("key_index", args[3]), extras.get("active_keys", active)
        active_keys = torch.ones_like(active_keys) if everywhere else active_keys
        return cls(node.options, tuple(args[:3]), args[3], keys, active, active_keys, extras, params)

    def seen(self, k: slice) -> Tensor:
        """Keys [images,windows,keys] of some images that are active pixels."""
        return F.pad(self.active_keys[k], (1, 0))[..., self.key_index]

    def heads(self, at: int, taken: Tensor) -> Tensor:
        """[...,heads,rows,dim] of rows [...,rows,heads * dim] of q, k or v."""
        made = taken.unflatten(-1, (self.options["heads"], -1)).transpose(-3, -2)
        least = self.options.get("normalize")
        return F.normalize(made, dim=-1, eps=least) if least and at < 2 else made

    def rows(self, at: int, k: slice) -> Tensor:
        """[images,pixels,heads * dim] of some of q, k or v."""
        o, start = self.options, self.options["starts"][at]
        width = o["heads"] * o["value_dim" if at == 2 else "dim"]
        return self.parts[at][k].flatten(-2).transpose(-1, -2)[..., start : start + width]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[...,windows,rows,C] of heads."""
        if "scales" in self.extras:
            q = q * self.extras["scales"].to(q.dtype)
        windows = q.shape[:-3]
        if len(windows) > 1:  # PyTorch's fused kernels take four dimensions
            q, k, v, mask = (None if t is None else t.flatten(0, 1) for t in (q, k, v, mask))  # type: ignore[assignment]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.options["scale"])
        return y.transpose(1, 2).flatten(2).unflatten(0, windows)

    def bias(self, q: Tensor, places: Tensor) -> Tensor | None:
        """What is added to the scores of windows."""
        if "row_table" in self.extras:
            return _relative(q, self.extras["row_table"], self.extras["column_table"], places)
        bias = self.extras.get("bias")
        if bias is None:
            return None
        return bias.to(q.dtype)


def _relative(q: Tensor, rows: Tensor, columns: Tensor, places: Tensor) -> Tensor:
    """The bias [...,windows,heads,places,places] of queries and keys at places of a window."""
    wide = len(columns)
    i, j = places // wide, places % wide
    of_rows = torch.einsum("...htc,tkc->...htk", q, rows.to(q.dtype)[i])
    of_columns = torch.einsum("...htc,tkc->...htk", q, columns.to(q.dtype)[j])
    return of_rows[..., i] + of_columns[..., j]


def _windows(inputs: Inputs, k: slice, there: Tensor) -> Tensor:
    """[images,windows,rows,C] of some images; there: keys that are active pixels [images,windows,keys]."""
    index, key_index = inputs.index, inputs.key_index
    padding = key_index == 0
    parts = [inputs.heads(0, inputs.rows(0, k)[..., (index - 1).clamp(min=0), :])]
    for at, name in ((1, "k_fill"), (2, "v_fill")):
        taken = inputs.rows(at, k)[..., (key_index - 1).clamp(min=0), :]
        fill = inputs.params.get(name)
        none = taken.new_zeros(())
        taken = torch.where(padding[..., None], none if fill is None else fill.to(taken.dtype), taken)
        # What is not active may hold anything, and 0 * NaN is NaN.
        parts.append(inputs.heads(at, torch.where((padding | there)[..., None], taken, none)))
    mask = torch.zeros(there.shape, dtype=parts[0].dtype, device=there.device)
    mask = mask.masked_fill(~(padding | there), -torch.inf)[..., None, None, :]
    bias = inputs.bias(parts[0], torch.arange(index.shape[1], device=index.device))
    return inputs.attend(*parts, mask if bias is None else mask + bias)  # type: ignore[call-arg]


def _attended(inputs: Inputs, images: slice) -> Tensor:
    """[images,pixels,C]: all windows of some images; of those without an active key, anything finite."""
    there = inputs.seen(images)
    none = ~(there.any(-1, keepdim=True) | (inputs.key_index == 0).any(1, keepdim=True))  # a softmax of nothing is NaN
    made = _windows(inputs, images, there | none)
    rows = made.new_zeros(len(made), inputs.active.shape[1] + 1, made.shape[-1])
    return rows.index_copy(1, inputs.index.flatten(), made.flatten(1, 2))[:, 1:]


class ActivePixels(Kind):
    """Of a plane, or of tokens: keys [N,pixels] bool, their order [N,rows] int64 and number [N] int32; then order
    and number of the active ones. In the cached mode all are keys."""

    name = "active_pixels"
    planned = dense = True
    casts = False

    def window(self, node: Node, value: Value) -> Window | str:
        return ACTIVE

    def listed(self, node: Node, mode: str) -> Value | None:
        return node.args[0]

    def apply(self, node: Node, given: Given) -> Any:
        x, active = given.args[0], given.active
        if node.args[0].tokens is None:
            active = pack_tokens(active, x.shape[2:])
        rows = active.order, active.lengths
        if not given.everywhere:
            return active.mask, *rows, *rows
        every = torch.arange(active.order.shape[1], device=x.device).clamp(max=active.mask.shape[1] - 1)
        count = torch.full_like(active.lengths, active.mask.shape[1])
        return torch.ones_like(active.mask), every.expand_as(active.order).contiguous(), count, *rows


class Merge(Kind):
    """The pixels of squares of `factor` x `factor` side by side in channels, in the order of `offsets`."""

    name = "merge"
    written = planned = True

    def window(self, node: Node, value: Value) -> Window | str:
        factor = node.options["factor"]
        return Window.conv((factor, factor), (factor, factor), (0, 0), (1, 1))

    def apply(self, node: Node, given: Given) -> Any:
        x, factor, offsets = given.args[0], node.options["factor"], node.options["offsets"]
        if not is_recorded(x) and len(offsets) <= MOST_OFFSETS and x.dtype != torch.float64:
            x = x.contiguous(memory_format=torch.channels_last)
            return merge_pixels(x, given.active, factor, offsets)
        made = torch.cat([x[:, :, a::factor, e::factor] for a, e in offsets], 1)
        return sparse_fill(made.contiguous(memory_format=torch.channels_last), given.active)

    def step(self, node: Node, get: Get, to: Target, context: Context) -> None:
        x, factor = get(node.args[0]), node.options["factor"]
        if to.out.device.type != "cpu":
            offsets, last = node.options["offsets"], torch.channels_last
            if len(offsets) > MOST_OFFSETS or not all(t.is_contiguous(memory_format=last) for t in (x, to.out)):
                made = self.apply(node, Given([x], {}, {}, to.active))
                put(made, to, to.active.pixel_mask(to.out.shape[2:]), context)
                return
            merge_pixels_(x, to.active, factor, offsets, to.out)
            if to.clear is not None:
                sparse_fill_(to.out, to.active)
            return
        n, i, j = to.active.pixel_mask(to.out.shape[2:])[:, 0].nonzero(as_tuple=True)
        rows, out = x.permute(0, 2, 3, 1), to.out.permute(0, 2, 3, 1)
        out[n, i, j] = torch.cat([rows[n, i * factor + a, j * factor + e] for a, e in node.options["offsets"]], 1)
        if to.clear is not None:
            zero(to.out, to.clear)
