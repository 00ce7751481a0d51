"""What is drawn for ops of ONNX that read windows or move elements."""

from __future__ import annotations

import numpy as np

from support.onnx_draw import F32, I64, Draw, maker


def _window(d: Draw, kernel: list[int], same: bool = True) -> None:
    d.maybe("kernel_shape", kernel)
    d.maybe("strides", [1, 1], [2, 2], [2, 1], [3, 2])
    d.maybe("dilations", [1, 1], [2, 1], [2, 2])
    d.maybe("ceil_mode", 0, 1)
    d.maybe("count_include_pad", 0, 1)
    if same and d.rng.random() < 0.35:
        d.maybe("auto_pad", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    if d.attributes.get("auto_pad", "NOTSET") == "NOTSET":
        most = [k - 1 for k in kernel]
        d.maybe("pads", [0, 0, 0, 0], [most[0] // 2, most[1] // 2] * 2, [d.rng.randint(0, m) for m in most * 2])


@maker("MaxPool", "AveragePool", "LpPool")
def _pool(d: Draw) -> None:
    _window(d, d.rng.choice([[1, 1], [2, 2], [3, 3], [3, 2], [4, 3]]))
    d.maybe("p", 1, 2, 3)


@maker("Conv")
def _conv(d: Draw) -> None:
    kernel, c = d.rng.choice([[1, 1], [3, 3], [2, 3], [4, 4]]), d.shape[1]
    d.maybe("group", 1, 2, c)
    d.constant(d.floats(2 * c, c // d.attributes.get("group", 1), *kernel))
    if d.rng.random() < 0.6:
        d.constant(d.floats(2 * c))
    _window(d, kernel)


@maker("ConvTranspose")
def _conv_transpose(d: Draw) -> None:
    kernel, c = d.rng.choice([[1, 1], [3, 3], [2, 3], [4, 4]]), d.shape[1]
    d.maybe("group", 1, 2, c)
    d.constant(d.floats(c, 2, *kernel))
    if d.rng.random() < 0.6:
        d.constant(d.floats(2 * d.attributes.get("group", 1)))
    _window(d, kernel)
    stride, dilation = d.attributes.get("strides", [1, 1]), d.attributes.get("dilations", [1, 1])
    most = [max(s, 1) - 1 for s, _ in zip(stride, dilation, strict=True)]
    if d.rng.random() < 0.4:
        d.attributes["output_padding"] = [d.rng.randint(0, m) for m in most]
    if d.rng.random() < 0.25 and "pads" not in d.attributes:
        full = [(n - 1) * s + g * (k - 1) + 1 for n, s, g, k in zip(d.shape[2:], stride, dilation, kernel, strict=True)]
        d.attributes["output_shape"] = [f - d.rng.randint(-1, min(k - 1, 2)) for f, k in zip(full, kernel, strict=True)]
        d.attributes.pop("output_padding", None)


SCALES = [0.4, 0.5, 0.75, 1.0, 1.5, 1.6, 2.0, 2.3, 3.0]


@maker("Resize")
def _resize(d: Draw) -> None:
    if d.version < 11:
        d.constant([1, 1, d.rng.choice(SCALES), d.rng.choice(SCALES)], F32)
        d.maybe("mode", "nearest", "linear")
        return
    mode = d.rng.choice(["nearest", "linear", "cubic"])
    if mode != "nearest" or d.rng.random() < 0.6:
        d.attributes["mode"] = mode
    d.maybe("coordinate_transformation_mode", *("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
            *(["tf_crop_and_resize"] if d.rng.random() < 0.3 else []),
            *(["half_pixel_symmetric"] if d.version >= 19 else []))  # fmt: skip
    if mode == "nearest":
        d.maybe("nearest_mode", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    if mode == "cubic":
        d.maybe("cubic_coeff_a", -0.75, -0.5)
        d.maybe("exclude_outside", 0, 1)
    if mode != "nearest" and d.rng.random() < 0.5:
        d.maybe("antialias", 0, 1)
    crops = d.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    axes = [0, 1, 2, 3]
    if d.has("axes") and d.rng.random() < 0.4:
        axes = d.attributes["axes"] = d.rng.choice([[2, 3], [3, 2], [-2, -1], [3]])
    if crops:
        d.maybe("extrapolation_value", 0.0, 2.5)
        planes = [k % 4 in (2, 3) for k in axes]
        d.constant([0.1 if p else 0.0 for p in planes] + [d.rng.choice([0.8, 1.2]) if p else 1.0 for p in planes], F32)
    else:
        d.skip()
    if d.rng.random() < 0.5:
        d.constant([d.rng.choice(SCALES) if k % 4 in (2, 3) else 1 for k in axes], F32)
    else:
        d.skip()
        d.constant([d.rng.randint(3, 20) if k % 4 in (2, 3) else d.shape[k] for k in axes], I64)
        d.maybe(
            "keep_aspect_ratio_policy", *(["stretch"] if len(axes) > 2 else ["stretch", "not_larger", "not_smaller"])
        )


@maker("Upsample")
def _upsample(d: Draw) -> None:
    d.maybe("mode", "nearest", "linear")
    d.either("scales", [1, 1, d.rng.choice([1.0, 1.5, 2.0, 3.0]), d.rng.choice([1.0, 2.0, 2.3])], F32)


@maker("GridSample")
def _grid_sample(d: Draw) -> None:
    names = ("bilinear", "nearest", "bicubic") if d.version < 20 else ("linear", "nearest", "cubic")
    d.constant(d.floats(d.shape[0], 5, 6, 2, low=-1.2, high=1.2))
    d.maybe("mode", *names)
    d.maybe("padding_mode", "zeros", "border", "reflection")
    d.maybe("align_corners", 0, 1)


@maker("AffineGrid")
def _affine_grid(d: Draw) -> None:
    d.inputs = ["thetas"]
    d.constant([d.shape[0], 2, 5, 6], I64)
    d.maybe("align_corners", 0, 1)


@maker("DepthToSpace", "SpaceToDepth")
def _shuffle(d: Draw) -> None:
    d.maybe("blocksize", 2, always=True)
    d.maybe("mode", "DCR", "CRD")


@maker("Gemm")
def _gemm(d: Draw) -> None:
    d.inputs.clear()
    d.inputs.append("flat")
    d.maybe("transA", 0, 1)
    d.maybe("transB", 0, 1)
    rows, inner, columns = d.shape[0] * d.shape[1] * d.shape[2], d.shape[-1], d.rng.randint(2, 5)
    if d.attributes.get("transA"):
        rows, inner = inner, rows
    d.maybe("alpha", 1.0, 0.5)
    d.maybe("beta", 1.0, 2.0)
    d.constant(d.floats(*((columns, inner) if d.attributes.get("transB") else (inner, columns))))
    if d.version < 11 or d.rng.random() < 0.7:
        d.constant(d.floats(*d.rng.choice([(columns,), (1, columns), (rows, 1), (rows, columns), ()])))


@maker("MatMul")
def _matmul(d: Draw) -> None:
    d.constant(d.floats(*d.rng.choice([(), (d.shape[1],)]), d.shape[-1], 5))


@maker("Einsum")
def _einsum(d: Draw) -> None:
    d.constant(d.floats(d.shape[1], 3))
    d.attributes["equation"] = d.rng.choice(["nchw,cd->ndhw", "nchw, cd -> nhwd", "...chw,cd->...dhw"])


@maker("Concat")
def _concat(d: Draw) -> None:
    d.maybe("axis", d.axis(), always=True)
    d.inputs += ["h"] * d.rng.randint(0, 2)


@maker("Split")
def _split(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    n = d.shape[axis]
    d.outputs = d.rng.randint(1, min(n, 3))
    even = d.version >= 18 or n % d.outputs == 0
    if not even or d.rng.random() < 0.5:
        d.either("split", [1] * (d.outputs - 1) + [n - d.outputs + 1])
    elif d.has("num_outputs"):
        d.attributes["num_outputs"] = d.outputs


@maker("Slice")
def _slice(d: Draw) -> None:
    axes = d.rng.sample(range(4), d.rng.randint(1, 3))
    starts, ends = [d.rng.choice([0, 1, -3, 0]) for _ in axes], [d.rng.choice([2, 4, -1, 1 << 40]) for _ in axes]
    if d.has("starts"):
        d.attributes |= {"starts": starts, "ends": ends, "axes": axes}
        return
    steps = [d.rng.choice([1, 1, 2, -1, -2]) for _ in axes]
    for k, step in enumerate(steps):
        if step < 0:
            starts[k], ends[k] = d.rng.choice([(-1, -(1 << 40)), (3, 0), (100, 1)])
    for values in (starts, ends, axes, steps):
        d.constant(values, I64)


@maker("Gather")
def _gather(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    n = d.shape[axis]
    low = -n if d.version >= 11 else 0
    shape = d.rng.choice([(), (2,), (2, 3)])
    d.constant(d.numbers.integers(low, n, shape), I64)


@maker("GatherElements", "ScatterElements", "Scatter")
def _elements(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    shape = [*d.shape]
    shape[axis] = d.shape[axis] - 1
    index = np.argsort(d.numbers.random(d.shape), axis)
    index = np.take(index, range(shape[axis]), axis)
    d.constant(index, I64)
    if d.op != "GatherElements":
        d.constant(d.floats(*shape))
        d.maybe("reduction", "none", "add", "mul", *(["max", "min"] if d.version >= 18 else []))


@maker("GatherND")
def _gather_nd(d: Draw) -> None:
    d.maybe("batch_dims", 0, 1)
    batch = d.attributes.get("batch_dims", 0)
    depth = d.rng.randint(1, 3 - batch)
    front = d.shape[:batch]
    d.constant(np.stack([d.numbers.integers(0, d.shape[batch + k], (*front, 3)) for k in range(depth)], -1), I64)


@maker("ScatterND")
def _scatter_nd(d: Draw) -> None:
    depth = d.rng.randint(1, 3)
    places = [d.numbers.permutation(d.shape[k])[:1] for k in range(depth)]
    d.constant(np.stack(places, -1), I64)
    d.constant(d.floats(1, *d.shape[depth:]))
    d.maybe("reduction", "none", "add", "mul", *(["max", "min"] if d.version >= 18 else []))


@maker("Compress")
def _compress(d: Draw) -> None:
    axis = d.axis()
    d.maybe("axis", axis, always=True)
    d.constant(d.numbers.random(d.shape[axis]) > 0.3, np.bool_)


@maker("Reshape")
def _reshape(d: Draw) -> None:
    n, c, h, w = d.shape
    d.constant(d.rng.choice([[0, -1], [0, 0, -1], [n, c, h * w], [0, 2, -1, h, w], [-1]]), I64)
    d.maybe("allowzero", 0)


@maker("Flatten")
def _flatten(d: Draw) -> None:
    d.maybe("axis", *range(-4 if d.version >= 11 else 0, 5))


@maker("Transpose")
def _transpose(d: Draw) -> None:
    d.maybe("perm", [0, 2, 3, 1], [0, 1, 3, 2], [3, 2, 1, 0])


@maker("Squeeze")
def _squeeze(d: Draw) -> None:
    if d.rng.random() < 0.7:
        d.either("axes", [0])


@maker("Unsqueeze")
def _unsqueeze(d: Draw) -> None:
    d.either("axes", d.rng.choice([[0], [4], [1, 3], [0, 2]] + ([[-1], [-2, 0]] if d.version >= 11 else [])))


@maker("Expand")
def _expand(d: Draw) -> None:
    n, c, h, w = d.shape
    d.constant(d.rng.choice([[1], [3, 1, 1, 1, 1], [n, c, h, w], [1, c, 1, 1]]), I64)


@maker("Tile")
def _tile(d: Draw) -> None:
    d.constant(d.rng.choice([[1, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 3], [2, 1, 1, 1]]), I64)


@maker("Trilu")
def _trilu(d: Draw) -> None:
    if d.rng.random() < 0.6:
        d.constant(d.rng.choice([-2, 0, 1]), I64)
    d.maybe("upper", 0, 1)


@maker("ReverseSequence")
def _reverse(d: Draw) -> None:
    batch, time = d.rng.choice([(0, 1), (1, 0)])
    d.constant([d.rng.randint(1, d.shape[time]) for _ in range(d.shape[batch])], I64)
    d.attributes |= {"batch_axis": batch, "time_axis": time}


@maker("Pad")
def _pad(d: Draw) -> None:
    d.maybe("mode", *("constant", "reflect", "edge"), *(["wrap"] if d.version >= 19 else []))
    mode = d.attributes.get("mode", "constant")
    low = -1 if mode == "constant" else 0
    pads = [d.rng.randint(low, 2) if k % 4 > 1 else 0 for k in range(8)]
    if d.has("pads"):
        d.attributes["pads"] = pads
        if mode == "constant":
            d.maybe("value", 0.7)
        return
    axes = d.version >= 18 and d.rng.random() < 0.4
    d.constant([pads[2], pads[3], pads[6], pads[7]] if axes else pads, I64)
    if mode == "constant" and d.rng.random() < 0.5:
        d.constant(0.7, F32)
    elif axes:
        d.skip()
    if axes:
        d.constant(d.rng.choice([[2, 3], [-2, -1]]), I64)


@maker("CenterCropPad")
def _center_crop(d: Draw) -> None:
    d.constant([d.rng.randint(3, 12), d.rng.randint(3, 12)], I64)
    d.attributes["axes"] = [2, 3]


@maker("QuantizeLinear")
def _quantize(d: Draw) -> None:
    c = d.shape[1]
    per_axis = d.version >= 13 and d.rng.random() < 0.5
    kind = d.rng.choice([np.uint8, np.int8])
    d.constant(d.floats(c, low=0.01, high=0.1) if per_axis else 0.03, F32)
    d.constant(np.full(c, 3) if per_axis else 3, kind)
    d.maybe("axis", 1)


@maker("OneHot")
def _one_hot(d: Draw) -> None:
    """Of bytes, as integers would be too large."""
    d.inputs = ["ints"]
    d.maybe("axis", -1, 0, 1, 4)
    d.constant(5, I64)
    d.constant([-0.5, 2.0], F32)


@maker("EyeLike")
def _eye_like(d: Draw) -> None:
    d.inputs = ["flat"]
    d.maybe("k", -1, 0, 2)
    d.maybe("dtype", 1, 7)


def _zero(d: Draw, count: int = 1) -> None:
    d.constant(d.numbers.integers(0, 9, count) if count > 1 else d.rng.randint(0, 9), np.uint8)


@maker("ConvInteger", "QLinearConv")
def _conv_of_bytes(d: Draw) -> None:
    d.inputs = ["bytes"]
    kernel, c = d.rng.choice([[1, 1], [3, 3], [2, 3]]), d.shape[1]
    d.maybe("group", 1, 2)
    weight = d.numbers.integers(0, 20, (2 * c, c // d.attributes.get("group", 1), *kernel))
    if d.op == "ConvInteger":
        d.constant(weight, np.uint8)
        _zero(d)
        _zero(d)
    else:
        channels = d.rng.choice([1, 2 * c])
        d.constant(0.05, F32)
        _zero(d)
        d.constant(weight, np.int8)
        d.constant(d.floats(channels, low=0.01, high=0.02) if channels > 1 else 0.02, F32)
        d.constant(np.zeros(channels) if channels > 1 else 0, np.int8)
        d.constant(0.11, F32)
        _zero(d)
        if d.rng.random() < 0.6:
            d.constant(d.numbers.integers(-40, 40, 2 * c), np.int32)
    _window(d, kernel)


@maker("MatMulInteger", "QLinearMatMul")
def _matmul_of_bytes(d: Draw) -> None:
    d.inputs = ["bytes"]
    if d.op == "QLinearMatMul":
        d.constant(0.05, F32)
        _zero(d)
    d.constant(d.numbers.integers(0, 20, (d.shape[-1], 5)), np.uint8)
    if d.op == "MatMulInteger":
        _zero(d)
        _zero(d)
        return
    d.constant(0.02, F32)
    _zero(d)
    d.constant(0.11, F32)
    _zero(d)
