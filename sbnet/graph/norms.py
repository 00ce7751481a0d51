"""Rules of normalisations of active pixels: groups of channels of an image, and the channels of each pixel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.graph.axes import Axes, planes_of
from sbnet.graph.builder import PLANNED_DTYPES, Builder, Call, back, feature_map, is_channels, rule
from sbnet.graph.ir import Ref, Step, Value

ATEN = torch.ops.aten


@rule("group_norm")
def _group_norm(b: Builder, call: Call) -> Value | None:
    axes = getattr(call.args[0], "axes", None)
    if axes is not None and any(name[0] in "HW" and len(name) > 1 for dim in axes.dims for name, _ in dim):
        from sbnet.graph.capture import CaptureError

        raise CaptureError(  # its statistics would be those of all pixels, and the layers behind it lose the mask
            f"sbnet: {call.path or 'the network'}: group_norm: expected pixels where the image has them, got those of "
            "squares side by side, as in MobileViTv2, which no mask follows; sparsify the parts before and after"
        )
    return _of_planes(b, call, call.argument("num_groups"))


@rule("instance_norm")
def _instance_norm(b: Builder, call: Call) -> Value | None:
    return _of_planes(b, call, call.args[0].shape[1]) if call.argument("use_input_stats") else None


@rule("native_group_norm")
def _native_group_norm(b: Builder, call: Call) -> None:
    if call.args[0].size is not None:
        raise _no_norm(call, "by torch.nn.functional.group_norm")


def _of_planes(b: Builder, call: Call, groups: int) -> Value | None:
    """With statistics of active pixels, which PyTorch's op on whole tensors would take of all."""
    if b.tokens is not None:
        call = b.tokens.spread(b, call)  # packed tokens, which a norm of groups does not read, as planes
    raw = call.args[0]
    if raw.size is None or not isinstance(call.made, Tensor):
        return None
    shape = planes_of(raw.axes)
    if shape is None:
        raise _no_norm(call, "of planes as they lie in [N,C,H,W], flat or not, got another arrangement")
    if call.made.dtype not in PLANNED_DTYPES:
        raise _no_norm(call, f"of float32, float16 or bfloat16, got {call.made.dtype}")
    x = feature_map(raw)
    if x is None:
        x = b.move(raw, ATEN.reshape.default, list(shape), list(shape), call)
        x.axes = Axes.planes(shape)
    given = {name: call.argument(name) for name in ("weight", "bias")}
    params = {name: value for name, value in given.items() if value is not None}
    if (each := shape[1] // raw.shape[1]) > 1:  # channels in a group, of which the weights have one number
        like = torch.empty(shape[1], dtype=x.dtype, device="meta")
        for name, value in params.items():
            label = f"{call.label}_{name}s"
            params[name] = b.read(ATEN.repeat_interleave.self_int, (value, each), {}, like, label, call.path, call.line)
    if any(value.dtype != x.dtype for value in params.values()):
        raise _no_norm(call, f"with weights of {x.dtype}, got others")
    constant = all(value.constant for value in params.values())
    options = {"method": "group", "groups": groups, "eps": float(call.argument("eps"))}
    made = b.add("norm", call, [x], x.shape, options=options, params=params if constant else {})
    for name, value in {} if constant else params.items():  # what the network computes
        number = b.move(value, ATEN.reshape.default, [1, -1, 1, 1], [1, x.shape[1], 1, 1], call)
        target = ATEN.mul.Tensor if name == "weight" else ATEN.add.Tensor
        like = torch.empty(x.shape, dtype=x.dtype, device="meta")
        made = b.read(target, (made, number), {}, like, f"{call.label}_{name}", call.path, call.line)
    assert made.axes is not None
    if {atom for dim in raw.axes.dims for atom in dim} == {dim[0] for dim in made.axes.dims}:
        return b.arranged(made, raw.axes, call)
    again = b.move(made, ATEN.reshape.default, list(raw.shape), list(raw.shape), call)
    again.axes = raw.axes
    return again


def _no_norm(call: Call, what: str) -> Exception:
    from sbnet.graph.capture import CaptureError

    return CaptureError(f"sbnet: {call.path or 'the network'}: {call.name}: expected norms {what}")


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


@rule("linalg_vector_norm", "norm")
def _norm_of_planes(b: Builder, call: Call) -> Value | None:
    """The root of the sum of squares over the plane, as in a GRN: squares of active pixels, pooled, of the few numbers
    that are left the root. In float32, where squares have room."""
    raw, x = call.args[0], feature_map(call.args[0])
    order = call.argument("ord", call.argument("p", 2))
    if x is None or raw.axes is None or x.given or order != 2 or x.dtype != torch.float32 or call.made.dtype != x.dtype:
        return None
    dims = call.argument("dim")
    gone = {int(k) % len(raw.shape) for k in (dims if isinstance(dims, (list, tuple)) else [dims])} if dims else set()
    names = [[name for name, _ in dim] for dim in raw.axes.dims]
    flat = [k for k, dim in enumerate(names) if set(dim) & {"H", "W"}]
    if sorted(name for k in gone for name in names[k]) != ["H", "W"] or gone != set(flat):
        return None
    n, c, h, w = x.shape
    squares = b.add("pointwise", call, [x], x.shape, options={"steps": [Step(ATEN.square.default, (Ref(0),), {})]})

    def then(target: Any, value: Value, *args: Any, shape: Any = (n, c, 1, 1)) -> Value:
        made = torch.empty(shape, dtype=x.dtype, device="meta")
        return b.read(target, (value, *args), {}, made, f"{call.label}_{len(b.nodes)}", call.path, call.line)

    total = then(ATEN.mul.Scalar, then(ATEN.mean.dim, squares, [2, 3], True), float(h * w))
    root = then(ATEN.sqrt.default, total)
    kept = [0 if dim == ["N"] else 1 for k, dim in enumerate(names) if k not in gone]
    if kept == [1, 0]:
        root = then(ATEN.permute.default, root, [1, 0, 2, 3], shape=(c, n, 1, 1))
    made = list(call.made.shape)
    return root if made == [n, c, 1, 1] else then(ATEN.reshape.default, root, made, shape=made)
