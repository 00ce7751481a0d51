"""Rules of normalisations of active pixels: groups of channels of an image, and the channels of each pixel."""

from __future__ import annotations

from sbnet.graph.builder import Builder, Call, back, feature_map, is_channels, is_map, plain, rule
from sbnet.graph.ir import Value


@rule("group_norm")
def _group_norm(b: Builder, call: Call) -> Value | None:
    return _norm(b, call, "group", call.argument("num_groups")) if is_map(call.made) and plain(call.args[0]) else None


@rule("instance_norm")
def _instance_norm(b: Builder, call: Call) -> Value | None:
    x = plain(call.args[0])
    if x is None or not is_map(call.made) or not call.argument("use_input_stats"):
        return None
    return _norm(b, call, "group", x.shape[1])


@rule("layer_norm")
def _layer_norm(b: Builder, call: Call) -> Value | None:
    raw, x = call.args[0], feature_map(call.args[0])
    if x is None or not is_channels(raw, -1) or list(call.args[1]) != [x.shape[1]]:
        return None
    return _norm(b, call, "layer")


@rule("softmax", "log_softmax")
def _softmax(b: Builder, call: Call) -> Value | None:
    raw, x = call.args[0], feature_map(call.args[0])
    if x is None or not is_channels(raw, call.args[1]) or call.made.dtype != x.dtype:
        return None
    return _norm(b, call, call.name)


def _norm(b: Builder, call: Call, method: str, groups: int = 1) -> Value | None:
    raw, x = call.args[0], feature_map(call.args[0])
    assert x is not None
    given = {} if "softmax" in method else {name: call.argument(name) for name in ("weight", "bias")}
    params = {name: value for name, value in given.items() if value is not None}
    if any(not value.constant or value.dtype != x.dtype for value in params.values()):
        return None
    options = {"method": method, "groups": groups, "eps": float(call.argument("eps", 0.0) or 0.0)}
    return back(b, call, b.add("norm", call, [x], x.shape, options=options, params=params), raw)
