"""Rules of layers that read windows, and of what joins and parts channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sbnet.geometry import to_pair
from sbnet.graph.builder import (
    Builder,
    Call,
    back,
    feature_map,
    is_channels,
    is_map,
    order,
    plain,
    product,
    rule,
    single,
    weights,
)
from sbnet.graph.ir import Value


@rule("conv2d")
def _conv2d(b: Builder, call: Call) -> Value | None:
    x, weight, bias = call.args[0], call.argument("weight"), call.argument("bias")
    if plain(x) is None or not is_map(call.made) or not weight.constant or (bias is not None and not bias.constant):
        return None
    kernel, dilation = weight.shape[2:], to_pair(call.argument("dilation"), "conv2d: dilation")
    padding = call.argument("padding")
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
        if any(t % 2 for t in total):
            return None
        padding = [t // 2 for t in total]
    options = {
        "stride": to_pair(single(call.argument("stride")), "conv2d: stride"),
        "padding": to_pair(single(padding), "conv2d: padding"), "dilation": dilation, "groups": call.argument("groups"),
    }  # fmt: skip
    return b.add("conv", call, [x], call.made.shape, options=options, params=weights(weight, bias))


@rule("conv_transpose2d")
def _conv_transpose2d(b: Builder, call: Call) -> Value | None:
    x, weight, bias = call.args[0], call.argument("weight"), call.argument("bias")
    if plain(x) is None or not is_map(call.made) or not weight.constant or (bias is not None and not bias.constant):
        return None
    names = ("stride", "padding", "output_padding", "dilation")
    options = {name: to_pair(single(call.argument(name)), f"conv_transpose2d: {name}") for name in names}
    options["groups"] = call.argument("groups")
    return b.add("conv_transpose", call, [x], call.made.shape, options=options, params=weights(weight, bias))


@rule("max_pool2d", "avg_pool2d")
def _pool(b: Builder, call: Call) -> Value | None:
    x = call.args[0]
    if plain(x) is None or not is_map(call.made):
        return None
    kernel = to_pair(single(call.argument("kernel_size")), "pool: kernel_size")
    stride = call.argument("stride")
    options = {
        "kernel_size": kernel, "stride": to_pair(single(stride), "pool: stride") if stride else kernel,
        "padding": to_pair(single(call.argument("padding")), "pool: padding"), "ceil_mode": call.argument("ceil_mode"),
    }  # fmt: skip
    if call.name == "max_pool2d":
        options["dilation"] = to_pair(single(call.argument("dilation")), "pool: dilation")
        return b.add("max_pool", call, [x], call.made.shape, options=options)
    options |= {name: call.argument(name) for name in ("count_include_pad", "divisor_override")}
    return b.add("avg_pool", call, [x], call.made.shape, options=options)


@rule("adaptive_avg_pool2d")
def _adaptive(b: Builder, call: Call) -> Value | None:
    x = call.args[0]
    if plain(x) is None or not is_map(call.made):
        return None
    if tuple(call.made.shape) == x.shape:
        return x
    (h, w), (oh, ow) = x.shape[2:], call.made.shape[2:]
    if h % oh or w % ow or max(h // oh, w // ow) > 4:  # larger windows: passes/pools.py
        return None
    window = (h // oh, w // ow)
    options = {"kernel_size": window, "stride": window, "padding": (0, 0), "ceil_mode": False}
    options |= {"count_include_pad": True, "divisor_override": None}
    return b.add("avg_pool", call, [x], call.made.shape, options=options)


def repeat_plane(x: Tensor, size: list[int]) -> Tensor:
    """x [N,C,1,1] as a plane of `size` [N,C,H,W]: a map, which is masked, where aten's expand would only arrange."""
    return x.expand(size).contiguous(memory_format=torch.channels_last)


MODES = {"nearest": "nearest", "_upsample_nearest_exact": "nearest-exact"}


@rule("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d")
def _upsample(b: Builder, call: Call) -> Value | None:
    x = call.args[0]
    if plain(x) is None and x.shape[2:] == (1, 1) and call.name != "upsample_bicubic2d":  # a pooled plane, repeated
        args = [x, list(call.made.shape)]
        return b.dense(replace(call, target=repeat_plane, name="repeat_plane", args=args, kwargs={}))
    if plain(x) is None or not is_map(call.made):
        return None
    scales = call.argument("scale_factors") or [call.argument("scales_h"), call.argument("scales_w")]
    given = call.argument("output_size") or call.argument("size")
    options = {
        "size": tuple(int(n) for n in call.made.shape[2:]),
        "scale": None if given or None in scales else tuple(scales),
        "mode": call.name.removeprefix("upsample_").removesuffix("2d"),
        "align_corners": call.argument("align_corners"),
    }
    if "nearest" in options["mode"]:
        options |= {"mode": MODES[options["mode"]], "align_corners": None}
    return b.add("resize", call, [x], call.made.shape, options=options)


@rule("pixel_shuffle")
def _pixel_shuffle(b: Builder, call: Call) -> Value | None:
    return _rearrange(b, call, up=call.args[1])


@rule("pixel_unshuffle")
def _pixel_unshuffle(b: Builder, call: Call) -> Value | None:
    return _rearrange(b, call, down=call.args[1])


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(b: Builder, call: Call) -> Value | None:
    return _rearrange(b, call, groups=call.args[1])


@rule("constant_pad_nd", "pad")
def _pad(b: Builder, call: Call) -> Value | None:
    pad, value = [int(n) for n in call.args[1]], call.argument("value")
    if call.argument("mode", "constant") != "constant" or len(pad) not in (2, 4):
        return None
    return _rearrange(b, call, pad=(*pad, 0, 0)[:4], value=float(value or 0))


def _rearrange(b: Builder, call: Call, **options: Any) -> Value | None:
    x = call.args[0]
    if plain(x) is None or not is_map(call.made):
        return None
    unchanged = {"up": 1, "down": 1, "groups": 1, "pad": (0, 0, 0, 0), "value": 0.0}
    return b.add("rearrange", call, [x], call.made.shape, options={**unchanged, **options})


# Parts of [N,C,H,W], as a view and a permute leave them, that one more view makes [N,C,H,W] again.
SHUFFLE = "N C1 C0 H W"
UNSHUFFLE, UNSHUFFLE_PIXELS_FIRST = "N C H1 W1 H0 W0", "N H1 W1 C H0 W0"


@rule("reshape", "flatten")
def _rearranged_by_hand(b: Builder, call: Call) -> Value | None:
    """A shuffle of channels, or space to depth, that is written as a view, a permute and a view."""
    x, source = call.args[0], call.args[0]
    parts = [] if x.axes is None else [dim[0] for dim in x.axes.dims if len(dim) == 1]
    if len(parts) < 5 or len(parts) != len(x.shape) or not is_map(call.made):
        return None
    while source.view_of is None and source.producer is not None and source.producer.moves and not source.constant:
        source = source.producer.args[0]
    if source.given:  # views of the input, which is not masked, are not masked either
        return None
    if plain(source) is None or any(
        product(n for name, n in parts if name[0] == letter) != length
        for letter, length in zip("NCHW", source.shape, strict=True)
    ):
        return None
    form, lengths = " ".join(name for name, _ in parts), dict(parts)
    n, c, h, w = source.shape
    if form == SHUFFLE:
        return _rearranged_to(b, call, source, source.shape, groups=lengths["C0"])
    if form in (UNSHUFFLE, UNSHUFFLE_PIXELS_FIRST):
        down, groups = lengths["H1"], 1 if form == UNSHUFFLE else c
        return _rearranged_to(b, call, source, (n, c * down**2, h // down, w // down), down=down, groups=groups)
    return None


def _rearranged_to(b: Builder, call: Call, x: Value, shape: tuple[int, ...], **options: Any) -> Value | None:
    return _rearrange(b, replace(call, args=[x]), **options) if tuple(call.made.shape) == shape else None


# ---- channels


@rule("cat", "concat", "concatenate")
def _cat(b: Builder, call: Call) -> Value | None:
    parts, axis = call.args[0], call.argument("dim", 0)
    maps = [m for m in map(feature_map, parts) if m is not None]
    if len(maps) < len(parts) or any(m.plane != maps[0].plane or m.dtype != maps[0].dtype for m in maps):
        return None
    if any(order(v) != order(parts[0]) or not is_channels(v, axis) for v in parts):
        return None
    n, _, h, w = maps[0].shape
    channels = sum(m.shape[1] for m in maps)
    return back(b, call, b.add("cat", call, maps, (n, channels, h, w)), parts[0])


@rule("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
def _chunk(b: Builder, call: Call) -> list[Value] | None:
    x = feature_map(call.args[0])
    axis = call.argument("dim", 0)
    if x is None or not is_channels(call.args[0], axis):
        return None
    at, parts = 0, []
    for k, made in enumerate(call.made):
        length = made.shape[axis]
        parts.append(_slice(b, call, call.args[0], at, length, f"{call.label}_{k}"))
        at += length
    return parts


def _slice(b: Builder, call: Call, raw: Value, start: int, length: int, label: str) -> Value:
    x = feature_map(raw)
    assert x is not None
    n, c, h, w = x.shape
    if (start, length) == (0, c):
        return raw
    part = b.add("slice", call, [x], (n, length, h, w), options={"start": start})
    part.name = label
    return back(b, call, part, raw)


@rule("slice")
def _slice_rule(b: Builder, call: Call) -> Value | None:
    raw, axis = call.args[0], call.argument("dim", 0)
    x = feature_map(raw)
    if x is None or call.argument("step") != 1:
        return None
    if tuple(call.made.shape) == raw.shape:
        return raw
    if not is_channels(raw, axis):
        return None
    start = call.argument("start") or 0
    start = start + x.shape[1] if start < 0 else start
    return _slice(b, call, raw, start, call.made.shape[axis], call.label)


@rule("narrow")
def _narrow(b: Builder, call: Call) -> Value | None:
    raw, axis, start, length = call.args
    if feature_map(raw) is None or not is_channels(raw, axis):
        return None
    return _slice(b, call, raw, start, length, call.label)
