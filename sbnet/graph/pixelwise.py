"""Rules of ops that look at one pixel at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.graph.axes import op_name, role
from sbnet.graph.builder import ANY, Builder, Call, back, feature_map, is_channels, order, plain, product, rule, weights
from sbnet.graph.ir import Ref, Step, Value, computed


@rule("linear", "matmul")
def _linear(b: Builder, call: Call) -> Value | None:
    raw, weight, bias = call.args[0], call.args[1], call.argument("bias")
    x = feature_map(raw)
    if x is None or not is_channels(raw, -1) or not weight.constant or len(weight.shape) != 2:
        return None
    transposed = call.name == "matmul"  # its weight is [inputs, outputs]
    k, c = weight.shape[::-1] if transposed else weight.shape

    def as_kernel(w: Tensor) -> Tensor:
        return (w.t() if transposed else w)[:, :, None, None]

    kernel = computed(f"{weight.name}.1x1", weight, as_kernel, weight, shape=(k, c, 1, 1))
    n, _, h, w = x.shape
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    made = b.add("conv", call, [x], (n, k, h, w), options=options, params=weights(kernel, bias))
    return back(b, call, made, raw)


@rule("_native_batch_norm_legit_no_training")
def _decomposed_batch_norm(b: Builder, call: Call) -> Any:
    """What a batch norm becomes where PyTorch rewrites ops in place; its statistics are not used."""
    made = _batch_norm(b, call)
    return None if made is None else [made, *b.dense(call)[1:]]


@rule("batch_norm")
def _batch_norm(b: Builder, call: Call) -> Value | None:
    raw, mean, var = call.args[0], call.argument("running_mean"), call.argument("running_var")
    x = feature_map(raw)
    if x is None or not is_channels(raw, 1) or call.argument("training") or mean is None:
        return None
    weight, bias, eps = call.argument("weight"), call.argument("bias"), call.argument("eps")
    name = mean.name.removesuffix(".running_mean")

    def scale(var: Tensor, weight: Tensor | None) -> Tensor:
        found = torch.rsqrt(var.double() + eps)
        return found if weight is None else found * weight.double()

    def shift(mean: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
        found = -mean.double() * scale
        return found if bias is None else found + bias.double()

    factor = computed(f"{name}.scale", mean, scale, var, weight)
    offset = computed(f"{name}.shift", mean, shift, mean, bias, factor)
    return back(b, call, b.add("affine", call, [x], x.shape, params={"scale": factor, "shift": offset}), raw)


ACTIVATIONS = {"relu": "relu", "relu6": "relu6", "silu": "silu", "hardswish": "hardswish"}


def activation(call: Call) -> dict[str, Any] | None:
    """Options of an activation that layers do by themselves."""
    if call.name in ACTIVATIONS:
        return {"activation": ACTIVATIONS[call.name]}
    if call.name == "gelu" and call.argument("approximate") == "none":
        return {"activation": "gelu"}
    if call.name == "leaky_relu":
        return {"activation": "leaky_relu", "negative_slope": float(call.argument("negative_slope"))}
    if call.name == "hardtanh" and (call.argument("min_val"), call.argument("max_val")) == (0, 6):
        return {"activation": "relu6"}
    if call.name == "clamp" and (call.argument("min"), call.argument("max")) == (0, 6):
        return {"activation": "relu6"}
    return None


PIXELWISE = {
    "add", "sub", "rsub", "mul", "div", "pow", "exp", "log", "sqrt", "rsqrt", "abs", "neg", "reciprocal", "square",
    "sigmoid", "hardsigmoid", "tanh", "hardtanh", "elu", "selu", "celu", "gelu", "softplus", "mish", "log_sigmoid",
    "relu", "relu6", "silu", "hardswish", "leaky_relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
    "addcmul", "addcdiv", "lerp", "prelu", "threshold", "hardshrink", "softshrink", "sin", "cos", "erf",
}  # fmt: skip


def pixelwise(b: Builder, call: Call) -> Value | None:
    """An elementwise op of feature maps, and of what is one number a channel, a sample or in all."""
    if call.name not in PIXELWISE:
        return None
    raws = [v for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)]
    raw = next((v for v in raws if feature_map(v) is not None and v.shape == tuple(call.made.shape)), None)
    x = feature_map(raw)
    if raw is None or x is None or not call.made.is_floating_point() or call.made.dtype != x.dtype:
        return None
    operands = {}
    for v in raws:
        found = _operand(b, call, v, raw, x)
        if found is None:
            return None
        operands[id(v)] = found
    simple = _simple(b, call, x, [operands[id(v)] for v in raws])
    if simple is None:
        order = list({id(v): v for v in [x, *operands.values()]}.values())
        refs = {key: Ref(next(k for k, o in enumerate(order) if o is v)) for key, v in operands.items()}

        def swap(v: Any) -> Any:
            return refs[id(v)] if isinstance(v, Value) else v

        args, kwargs = pytree.tree_map(swap, (tuple(call.args), dict(call.kwargs)))
        simple = b.add("pointwise", call, order, x.shape, options={"steps": [Step(call.target, args, kwargs)]})
    return back(b, call, simple, raw)


def _operand(b: Builder, call: Call, v: Value, raw: Value, x: Value) -> Value | None:
    """What stands for an operand beside a feature map [N,C,H,W]."""
    own = feature_map(v)
    if own is not None:
        if own.dtype != x.dtype:
            return None
        aligned = order(v) == order(raw) and own.shape[0] == x.shape[0] and own.shape[2:] == x.shape[2:]
        return own if aligned and own.shape[1] in (1, x.shape[1]) else None
    if product(v.shape) == 1:
        return v
    if call.name == "prelu":  # a slope for each of dimension 1, which a transposed map may have elsewhere
        of_channels = raw.axes is not None and all(role(part[0]) == "C" for part in raw.axes.dims[1])
        return v if of_channels and product(v.shape) == x.shape[1] else None
    shape = (1,) * (len(raw.shape) - len(v.shape)) + tuple(v.shape)
    if len(shape) != len(raw.shape) or raw.axes is None:
        return None
    full = [n in (1, m) for n, m in zip(shape, raw.shape, strict=True)]
    kinds = [role(dim[0][0]) for dim, n in zip(raw.axes.dims, shape, strict=True) if n != 1]
    if not all(full) or any(len(dim) > 1 for dim, n in zip(raw.axes.dims, shape, strict=True) if n != 1):
        return None
    if set(kinds) <= {"C"} and v.constant:
        channels = product(v.shape)
        return computed(f"{v.name}.c11", v, lambda t: t.reshape(-1, 1, 1), v, shape=(channels, 1, 1))
    if set(kinds) <= {"N", "C"} and len(set(kinds)) == len(kinds) and v.dtype == x.dtype:
        return v if feature_map(raw) is raw else _gate(b, call, v, raw, shape)
    return None


def _gate(b: Builder, call: Call, v: Value, raw: Value, shape: Sequence[int]) -> Value:
    """A number a channel or a sample beside an arrangement of a feature map: as [N,C,1,1]."""
    assert raw.axes is not None
    names = [role(dim[0][0]) if dim else "C" for dim in raw.axes.dims]
    sizes = {name: n for name, n in zip(names, shape, strict=True) if n != 1}
    if v.shape != tuple(shape):
        v = b.move(v, torch.ops.aten.reshape.default, list(shape), list(shape), call)
    order = sorted(range(len(names)), key=lambda k: "NCTHW".index(names[k]))
    moved = b.move(v, torch.ops.aten.permute.default, order, [shape[k] for k in order], call)
    gate = [sizes.get("N", 1), sizes.get("C", 1), 1, 1]
    return b.move(moved, torch.ops.aten.reshape.default, gate, gate, call)


def _simple(b: Builder, call: Call, x: Value, operands: list[Value]) -> Value | None:
    """An activation, a sum of two feature maps, or an affine function of one."""
    options = activation(call)
    if options is not None:
        return b.add("act", call, [x], x.shape, options=options)
    if call.name == "prelu":
        return _prelu(b, call, x)
    maps = [v for v in operands if not v.constant]
    if call.name == "add" and len(maps) == 2 and call.argument("alpha") == 1 and maps[0].shape == maps[1].shape:
        return b.add("add", call, maps, x.shape)
    if call.name not in ("add", "sub", "mul", "div") or len(maps) != 1 or len(operands) > 2 or call.args[0] is None:
        return None
    other = next((v for v in operands if v.constant), None)
    number = next((v for v in call.args[:2] if isinstance(v, (int, float))), None)
    first = isinstance(call.args[0], Value) and not call.args[0].constant
    if (other is None and number is None) or (not first and call.name in ("sub", "div")):
        return None
    if other is not None and product(other.shape) != 1 and other.shape != (x.shape[1], 1, 1):
        return None  # a number for each sample
    if call.argument("alpha", 1) != 1 or call.argument("rounding_mode") is not None:
        return None
    if number is not None and not (math.isfinite(number) and (number or call.name != "div")):
        return None  # an infinite weight is not an infinite result: sums of it are NaN
    channels = x.shape[1]
    signs = {"add": lambda t: t, "sub": lambda t: -t, "mul": lambda t: t, "div": lambda t: 1 / t}

    def per_channel(t: Tensor | float) -> Tensor:
        t = torch.as_tensor(t, dtype=torch.float64).to(getattr(t, "device", "cpu"))
        return signs[call.name](t).reshape(-1).expand(channels)

    like = Value("number", (channels,), x.dtype, constant=True)
    values = computed(f"{call.label}.{call.name}", like, per_channel, other if other is not None else number)
    name = "shift" if call.name in ("add", "sub") else "scale"
    return b.add("affine", call, [x], x.shape, params={name: values})


def _prelu(b: Builder, call: Call, x: Value) -> Value | None:
    """With constant slopes, a channel's or one."""
    slope, channels = call.args[1], x.shape[1]
    if not (slope.constant and product(slope.shape) in (1, channels)):
        return None

    def per_channel(t: Tensor) -> Tensor:
        return t.reshape(-1).expand(channels).contiguous()

    values = computed(f"{slope.name}.channels", slope, per_channel, slope, shape=(channels,))
    return b.add("act", call, [x], x.shape, options={"activation": "leaky_relu"}, params={"slope": values})


JOINED = {"sum": "add", "mean": "add", "amax": "maximum", "amin": "minimum"}


@rule(*JOINED)
def _over_a_stack(b: Builder, call: Call) -> Value | None:
    """torch.stack of feature maps, reduced over what they were stacked along: one pixel after another, as in an FPN."""
    stack = call.args[0].producer if isinstance(call.args[0], Value) else None
    if stack is None or stack.kind != "aten" or op_name(stack.target) != "stack" or call.argument("keepdim"):
        return None
    maps, rank = [plain(v) for v in stack.args[0]], len(call.args[0].shape)
    at = int(stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)) % rank
    dims = call.argument("dim")
    gone = [int(k) % rank for k in (dims if isinstance(dims, (list, tuple)) else [dims])] if dims is not None else []
    first = maps[0]
    if (
        first is None
        or gone != [at]
        or any(m is None or (m.shape, m.dtype) != (first.shape, first.dtype) for m in maps)
    ):
        return None
    if call.made.dtype != first.dtype:
        return None
    if call.name == "sum" and first.dtype == torch.float32:  # sums that a convolution before may do itself
        total = first
        for other in maps[1:]:
            total = b.add("add", call, [total, other], first.shape)  # type: ignore[list-item]
        return total if len(maps) > 1 else None
    target = getattr(torch.ops.aten, JOINED[call.name])
    target = target.Tensor if call.name in ("sum", "mean") else target.default
    steps, last = list[Step](), Ref(0)
    distinct = list({id(v): v for v in maps}.values())
    places = [next(k for k, v in enumerate(distinct) if v is m) for m in maps]
    for k in places[1:]:
        steps.append(Step(target, (last, Ref(k)), {}))
        last = Ref(len(steps) - 1, step=True)
    if call.name == "mean":
        steps.append(Step(torch.ops.aten.mul.Tensor, (last, 1 / len(maps)), {}))
    return b.add("pointwise", call, distinct, first.shape, options={"steps": steps}) if steps else None  # type: ignore[arg-type]


ANY.append(pixelwise)
