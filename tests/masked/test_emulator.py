"""The Hopper convolution kernels on the CPU: their own source, run by tests/tools/emulator, warps in random order.

For machines without such a GPU. It finds what is computed wrongly, waits that are missing or never end, and shared
memory that is not the kernel's own; tests marked gpu run the same kernels where they belong.
"""

import ctypes
import random

import pytest
import torch

from sbnet import conv_output_size, fringe
from support.conv_cases import make, pair
from support.conv_draws import SOME_OF
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, dense_conv2d, poison, tensor, to_tf32

KERNELS = {
    "1x1": 0,
    "1x1 wide": 1,
    "1x1 wide, by taps": 1,
    "1x1 split, by taps": 2,
    "1x1 split": 2,
    "3x3": 3,
    "3x3 stride 2": 3,
    "stem": 4,
    "general": 5,
    "depthwise": 6,
    "few channels": 7,
    "tf32": 5,  # float32 by the general kernel
    "3x3 by patches": 8,
    "1x1 by rows": 9,
    "by rows": 9,
    "3x3 by groups": 10,
    "first layer": 11,
    "implicit GEMM": 12,
    "few tiles": 13,
}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # core/types.h
ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 3, "silu": 4, "gelu": 5}  # of all kernels
WITH_SLOPES = ACTIVATIONS | {"prelu": 3}  # leaky_relu, with slopes a channel
RESIDUALS = False, False, True, "after"  # after: added to what the activation gives
CASES = 12  # for each seed
MASKED = [f"masked/{name}" for name in ("bottleneck", "conv", "conv_select", "conv_query")]
CORE = [*MASKED, "grid", "layer", "memory", "settled", "through"]
# tests/weights/test_blockconv_emulated.py and test_conv_transpose_emulated.py run them
ELSEWHERE = {"conv_blocksparse", "conv_transpose"}


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Case(ctypes.Structure):  # as in conv_case.h
    _fields_ = [
        *fields(ctypes.c_int32, "kernel multiprocessors seed type n h w c k r s stride padding dilation groups ho wo"),
        *fields(ctypes.c_int32, "block_h block_w activation residual_after"),
        *fields(ctypes.c_void_p, "x weight weight2 weight3 bias bias2 bias3 residual y slope"),
        *fields(ctypes.c_void_p, "indices count block_map fringe fringe_count"),
        *fields(ctypes.c_int64, "capacity fringe_capacity"),
    ]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    core = [CSRC / f"core/{name}.cpp" for name in CORE]
    kernels = sorted(path for path in (CSRC / "cuda/sm90/conv").glob("*.cu") if path.stem not in ELSEWHERE)
    kernels += [
        CSRC / f"cuda/masked/conv_{name}.cu"
        for name in ("depthwise", "few_channels", "first", "groups", "implicit_gemm", "rows")
    ]
    kernels += [*sorted((CSRC / "cuda/masked").glob("conv_patch_*.cu")), CSRC / "cuda/capability.cu"]
    return emulated_library(tmp_path_factory, "conv", kernels, [TOOLS / "entry.cpp", *core])


def described(active, edge, tensors: dict, **values) -> Case:
    tensors |= {"indices": active.indices, "count": active.count, "block_map": active.block_map}
    tensors |= {"fringe": edge.pixels, "fringe_count": edge.count}
    x, y = tensors["x"], tensors["y"]
    return Case(
        type=DTYPES.get(x.dtype, 1), n=x.shape[0], h=x.shape[2], w=x.shape[3], c=x.shape[1], ho=y.shape[2],
        wo=y.shape[3], block_h=active.grid.bsize[0], block_w=active.grid.bsize[1], capacity=len(active.indices),
        fringe_capacity=len(edge.pixels), **values,
        **{name: None if v is None else v.data_ptr() for name, v in tensors.items()},
    )  # fmt: skip


def launch(function, active, edge, tensors: dict, **values) -> bool:
    return run(function, described(active, edge, tensors, **values))


def run(function, case: ctypes.Structure) -> bool:
    """False: the kernel does not take it."""
    message = ctypes.create_string_buffer(4096)
    result = function(ctypes.byref(case), message, ctypes.c_int64(len(message)))
    assert result < 2, message.value.decode()
    return result == 0


def judge(y, active, edge, torchs, exact) -> None:
    """Right on active blocks, zeros on the fringe, NaN as before elsewhere."""
    size = y.shape[2:]
    mask = active.pixel_mask(size).expand(y.shape)
    assert_as_accurate_as_torch(y[mask], torchs[mask], exact[mask])
    zeros = torch.zeros(y[:, 0].numel(), dtype=torch.bool)
    zeros[edge.pixels[: int(edge.count)].long()] = True
    zeros = zeros.view(-1, 1, *size).expand(y.shape)
    assert bool((y[zeros] == 0).all()), "the fringe"
    assert bool((y.isnan() | mask | zeros).all()), "other pixels were written"


def emulate(
    library, which: str, seed: int, multiprocessors: int, activation, residual, again=False, infinite=(), nan=(), **case
) -> bool:
    """Runs a convolution and checks it; again: twice, for the same bits. infinite: channels of a pixel that are, by
    turns with their sign; nan: others, whose payload is in bits that tf32 does not have. False: that kernel does not
    take it.
    """
    x, weight, bias, active, options = make("cpu", **case)
    if x.dtype == torch.float32 and case.get("groups", 1) > 1:
        x, weight = x.abs(), weight.abs()  # cut off in the place of rounded, every sum would be too small
    middle = x[0, :, x.shape[2] // 2, x.shape[3] // 2]
    for number, channel in enumerate(infinite):
        middle[channel] = float("-inf" if number % 2 else "inf")
    for channel in nan:
        middle[channel] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
    geometry = [[options[k]] * 2 for k in ("stride", "padding", "dilation")]
    size = conv_output_size(x.shape[2:], weight.shape[2:], *geometry)
    shape = (x.shape[0], weight.shape[0], *size)
    options |= {"activation": activation, "residual": None}
    if residual:
        options["residual"] = tensor(shape, x.dtype).contiguous(memory_format=torch.channels_last)
    options["residual_after"] = residual == "after"
    if activation == "prelu":
        options |= {"activation": "leaky_relu", "slope": tensor(shape[1:2], x.dtype)}
    weight = weight.contiguous(memory_format=torch.channels_last)
    edge, ys = fringe(active, active, size, 3, 1, 1), []
    library.sbnet_settle_inputs(seed % 2)  # kernels then read lists and weights before they wait
    for order in (seed, seed ^ 1) if again else (seed,):
        ys.append(poison(shape, x.dtype, "cpu", "channels_last"))
        if not launch(
            library.emulate_conv, active, edge,
            {"x": x, "weight": weight, "bias": bias, "residual": options["residual"], "y": ys[-1],
             "slope": options.get("slope")},
            kernel=KERNELS[which], multiprocessors=multiprocessors, seed=order, k=weight.shape[0], r=weight.shape[2],
            s=weight.shape[3], activation=WITH_SLOPES[activation], residual_after=options["residual_after"],
            **{name: options[name] for name in ("stride", "padding", "dilation", "groups")},
        ):  # fmt: skip
            return False
    exact = dense_conv2d(x, weight, bias, torch.float64, **options)
    if x.dtype == torch.float32:
        x, weight = to_tf32(x), to_tf32(weight)
    judge(ys[0], active, edge, dense_conv2d(x, weight, bias, x.dtype, **options), exact)
    assert_bitwise(ys[-1], ys[0])
    return True


def some_general(rng: random.Random) -> dict:
    """Any small convolution: kernels, strides, dilations, groups, channels of all alignments, blocks."""
    groups = rng.choice([1, 1, 1, 2, 5, 8])
    inputs, outputs = rng.choice([1, 3, 4, 8, 16, 24, 60, 64, 80, 136]), rng.choice([1, 3, 8, 16, 20, 60, 64, 80, 96])
    if groups > 1:
        inputs, outputs = rng.choice([2, 3, 4, 8, 12, 24, 72]), rng.choice([1, 3, 4, 8, 16, 40])
    kernel, dilation = rng.choice([1, 3, 3, 3, 5, 7, (1, 3), (3, 1), (2, 5)]), rng.choice([1, 1, 1, 2, 3, 4, 6, 12])
    reach = tuple(dilation * (side - 1) + 1 for side in pair(kernel))
    return {
        "channels": groups * inputs, "filters": groups * outputs, "groups": groups, "kernel": kernel,
        "size": (max(rng.randint(1, 40), reach[0]), max(rng.randint(1, 40), reach[1])), "dilation": dilation,
        "padding": rng.randint(0, max(reach)), "stride": rng.choice([1, 1, 1, 2, 3]), "batch": rng.choice([1, 1, 2]),
        "block": rng.choice([8, 10, 12, 16, 20, 24, (8, 16), (16, 8), (12, 20), 32, (40, 7)]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


def some_depthwise(rng: random.Random) -> dict:
    """Any small depthwise convolution, the usual square kernels most of all."""
    channels = rng.choice([8, 16, 24, 72, 120, 136, 20, 3])
    return {
        "channels": channels, "groups": channels, "filters": channels * rng.choice([1, 1, 1, 1, 2]),
        "kernel": rng.choice([3, 3, 5, 5, 7, 2, (3, 5)]), "stride": rng.choice([1, 1, 2, 2, 3]),
        "dilation": rng.choice([1, 1, 1, 1, 2]), "padding": rng.choice([0, 1, 2, 3]), "batch": rng.choice([1, 1, 2]),
        "size": (rng.randint(13, 40), rng.randint(13, 40)), "block": rng.choice([2, 4, 8, (8, 6), (3, 10), 16, 64]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


def some_few_channels(rng: random.Random) -> dict:
    """Any small convolution of up to four channels and sixteen taps, 3x3 most of all."""
    kernel, dilation = rng.choice([3, 3, 3, 3, 1, 2, 4, (3, 4), (1, 12), (5, 3)]), rng.choice([1, 1, 1, 2])
    reach = tuple(dilation * (side - 1) + 1 for side in pair(kernel))
    return {
        "channels": rng.choice([1, 2, 3, 3, 3, 4]), "filters": rng.choice([1, 3, 8, 16, 17, 24, 32, 40, 64, 96, 128]),
        "kernel": kernel, "stride": rng.choice([1, 1, 2, 2, 3, 4]), "dilation": dilation, "padding": rng.randint(0, 2),
        "size": (max(rng.randint(1, 40), reach[0]), max(rng.randint(1, 40), reach[1])),
        "batch": rng.choice([1, 1, 2]), "block": rng.choice([1, 2, 4, 8, (8, 6), (3, 10), 16, 64]),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]), "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


def some_taps(rng: random.Random) -> dict:
    """Any small convolution without a stride that is a product of wide tiles, some of few channels."""
    kernel, dilation = rng.choice([3, 3, 3, 5, 2, (1, 7), (3, 1)]), rng.choice([1, 2, 4, 12])
    reach = tuple(dilation * (side - 1) + 1 for side in pair(kernel))
    return {
        "channels": rng.choice([64, 64, 128, 192]), "filters": rng.choice([128, 256, 256, 384]), "kernel": kernel,
        "dilation": dilation, "padding": rng.randint(0, max(reach)), "stride": 1, "batch": rng.choice([1, 1, 2]),
        "size": (max(rng.randint(1, 32), reach[0]), max(rng.randint(1, 32), reach[1])),
        "block": rng.choice([8, 8, 16, (8, 16), 4, (4, 12)]), "density": rng.choice([0.0, 0.1, 0.4, 0.8, 1.0, 1.0]),
        "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


def some(rng: random.Random, kernel: str) -> dict:
    """A small convolution that `kernel` may take."""
    if kernel in SOME_OF:
        return SOME_OF[kernel](rng)
    if kernel in ("general", "tf32"):
        return some_general(rng) | ({"dtype": torch.float32} if kernel == "tf32" else {})
    if kernel == "depthwise":
        return some_depthwise(rng)
    if kernel == "few channels":
        return some_few_channels(rng)
    if kernel.endswith("by taps"):
        return some_taps(rng) | ({"channels": 320} if "split" in kernel else {})
    few, stride = rng.choice([8, 24, 64, 72, 128, 192]), 1
    sizes = {
        "1x1": ([8, 24, 64, 72, 256, 384], [8, 40, 64, 136, 200, 264]),
        "1x1 wide": ([64, 128, 192, 320, 512], [128, 256, 384, 512, 1024]),
        "1x1 split": ([1536, 1600], [64, 128, 256, 384]),
        "3x3": ([few], [8, 40, 64, 72, 128]),
        "3x3 stride 2": ([few], [8, 64, 72, 128]),
        "stem": ([3], [8, 24, 64]),
    }  # fmt: skip
    blocks = {"stem": [8, 10, 16], "3x3": [8, 16, (8, 16), (16, 8)], "3x3 stride 2": [8, 16, (8, 16)]}
    size = (rng.randint(1, 40), rng.randint(1, 40))
    if kernel in ("3x3 stride 2", "stem") or (kernel in ("1x1", "1x1 wide") and rng.random() < 0.3):
        stride = 2
    size = (size[0] * 2, size[1] // 8 * 8 + 8) if kernel == "stem" else size
    side, inputs = {"s": 7, "3": 3, "1": 1}[kernel[0]], rng.choice(sizes[kernel][0])
    if side == 1 and rng.random() < 0.3:  # patches
        side, inputs = rng.choice([(2, 32), (2, 96), (4, 16), (3, 64), (8, 8)])
        inputs *= {"1x1 wide": 2, "1x1 split": 6}.get(kernel, 1)
        stride, size = side, (size[0] * side + rng.randrange(side), size[1] * side + rng.randrange(side))
    return {
        "channels": inputs, "filters": rng.choice(sizes[kernel][1]), "size": size,
        "batch": rng.choice([1, 1, 2]), "block": rng.choice(blocks.get(kernel, [8, 8, 16, (8, 16), 4, (4, 12)])),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 0.95, 1.0, 1.0]), "stride": stride,
        "kernel": side, "padding": {"s": 3, "3": 1, "1": 0}[kernel[0]],
        "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "density", "batch", "multiprocessors"),
    [
        *[(size, 1.0, 1, 4) for size in ((17, 16), (12, 24), (19, 20), (16, 24))],  # 272, 288: 144 each; 380, 384: 192
        *[(size, 1.0, 2, 8) for size in ((17, 16), (19, 20))],  # one image's pixels run on into the next one's
        ((31, 28), 1.0, 1, 12),  # ten jobs for twelve
        ((19, 23), 1.0, 1, 6),  # six, in clusters of two
        ((19, 20), 0.6, 1, 4),
    ],
)
def test_jobs_that_are_larger_if_all_blocks_are_active(emulated, size, density, batch, multiprocessors):
    """1x1 split: one for each multiprocessor, if there are as many blocks as the plane has."""
    torch.manual_seed(sum(size))
    case = {"channels": 1536, "filters": 256, "batch": batch, "block": 8, "stride": 1, "kernel": 1, "padding": 0}
    for seed, dtype in enumerate([torch.float16, torch.bfloat16]):
        more = {"seed": seed, "multiprocessors": multiprocessors, "activation": "silu", "residual": False}
        assert emulate(emulated, "1x1 split", density=density, size=size, dtype=dtype, **more, **case)


@pytest.mark.parametrize("height", [7, 8, 9, 24, 25])
@pytest.mark.parametrize(("channels", "block"), [(24, (16, 8)), (64, 16), (72, (16, 8)), (72, 16)])
def test_tiles_of_16_rows_at_the_lower_border(emulated, height, channels, block):
    """A warpgroup computes 8 of its rows where no more are on the plane, 16 where there is a ninth."""
    torch.manual_seed(height)
    case = {"channels": channels, "filters": channels, "batch": 1, "block": block, "kernel": 3, "padding": 1}
    more = {"seed": height, "multiprocessors": 2, "activation": None, "residual": height == 9, "stride": 1}
    assert emulate(emulated, "3x3", density=1.0, size=(height, 20), dtype=torch.float16, **more, **case)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_kernels_without_one(emulated, kernel, seed):
    rng, taken = random.Random(f"{kernel} {seed}"), 0
    while taken < CASES:
        case = some(rng, kernel)
        more = {"activation": rng.choice(list(WITH_SLOPES)), "residual": kernel != "stem" and rng.choice(RESIDUALS)}
        more |= {"seed": rng.randrange(2**31), "multiprocessors": rng.choice([1, 2, 4, 6, 12])}
        torch.manual_seed(more["seed"])
        try:
            taken += emulate(emulated, kernel, **more, **case)
        except AssertionError as error:
            raise AssertionError(f"{more} {case}: {error}") from error


# Weights that stay, copied by hand or by TMA, for three teams and two; weights in a ring, for two teams and one.
BOTTLENECKS = [
    (96, 24), (40, 32), (192, 48), (64, 64), (256, 64), (384, 56), (320, 32), (128, 96), (136, 104), (512, 128),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_hopper_bottleneck_without_one(emulated, seed):
    rng = random.Random(f"bottleneck {seed}")
    for channels, width in BOTTLENECKS:
        block, size = rng.choice([8, 8, 16, (8, 16), 24]), (rng.randint(1, 36), rng.randint(1, 36))
        activation, dtype = rng.choice(list(ACTIVATIONS)), rng.choice([torch.float16, torch.bfloat16])
        seed, multiprocessors = rng.randrange(2**31), rng.choice([1, 2, 3, 6])
        torch.manual_seed(seed)
        grid = {"size": size, "block": block, "density": rng.choice([0.0, 0.2, 0.5, 0.8, 1.0, 1.0]), "dtype": dtype}
        x, _, _, active, _ = make("cpu", channels=channels, batch=rng.choice([1, 2]), **grid)
        shapes = [(width, channels, 1, 1), (width, width, 3, 3), (channels, width, 1, 1)]
        weights = [tensor(shape, dtype) / (shape[1] * shape[2] ** 2) ** 0.5 for shape in shapes]
        weights = [w.contiguous(memory_format=torch.channels_last) for w in weights]
        biases = [tensor(shape[:1], dtype) if rng.random() < 0.8 else None for shape in shapes]
        edge, y = fringe(active, active, size, 3, 1, 1), poison(x.shape, dtype, "cpu", "channels_last")
        tensors = {"x": x, "y": y, **dict(zip(("weight", "weight2", "weight3"), weights, strict=True))}
        tensors |= dict(zip(("bias", "bias2", "bias3"), biases, strict=True))
        assert launch(
            emulated.emulate_bottleneck, active, edge, tensors, multiprocessors=multiprocessors, seed=seed, k=width,
            activation=ACTIVATIONS[activation],
        )  # fmt: skip

        def chain(dtype, x=x, weights=weights, biases=biases, active=active, size=size, activation=activation):
            h = dense_conv2d(x, weights[0], biases[0], dtype, activation=activation) * active.pixel_mask(size)
            h = dense_conv2d(h, weights[1], biases[1], dtype, activation=activation, padding=1)
            return dense_conv2d(h, weights[2], biases[2], dtype, activation=activation, residual=x)

        judge(y, active, edge, chain(dtype), chain(torch.float32))


@pytest.mark.parametrize(("channels", "width"), [(96, 24), (64, 40), (192, 48), (512, 104)])
def test_hopper_bottleneck_of_infinities(emulated, channels, width):
    """A channel of h1 that overflows must not meet the zeros of the channels that pad it."""
    size = (12, 16)
    x, _, _, active, _ = make("cpu", channels=channels, size=size, block=8, density=1.0, dtype=torch.float16)
    x.fill_(1.0)
    shapes = [(width, channels, 1, 1), (width, width, 3, 3), (channels, width, 1, 1)]
    weights = [tensor(shape, torch.float16).abs() / (shape[1] * shape[2] ** 2) ** 0.5 for shape in shapes]
    weights = [w.contiguous(memory_format=torch.channels_last) for w in weights]
    weights[0][0] = 2000.0
    weights[1][:, 0] *= -1.0
    edge, y = fringe(active, active, size, 3, 1, 1), poison(x.shape, torch.float16, "cpu", "channels_last")
    tensors = {"x": x, "y": y, **dict(zip(("weight", "weight2", "weight3"), weights, strict=True))}
    tensors |= dict.fromkeys(("bias", "bias2", "bias3"))
    assert launch(
        emulated.emulate_bottleneck, active, edge, tensors, multiprocessors=2, seed=0, k=width,
        activation=ACTIVATIONS["relu"],
    )  # fmt: skip
    assert bool(y.isfinite().all())


def test_all_hopper_kernels_are_emulated():
    stems = {"bottleneck", "conv1x1", "conv1x1_wide", "conv1x1_split", "conv3x3", "conv3x3_stride2", "conv_stem"}
    stems |= {"conv_few", "conv_general", "conv_bytes", "conv1x1_bytes"}
    assert {p.stem for p in (CSRC / "cuda/sm90/conv").glob("*.cu")} == stems | ELSEWHERE


@pytest.mark.parametrize("aligned", [True, False])
def test_few_channels_that_lie_elsewhere(emulated, aligned):
    """The kernel is told of one x, and finds the address of another in memory."""
    sizes = {"channels": 3, "filters": 32, "kernel": 3, "size": (20, 24), "stride": 2, "padding": 1}
    x, weight, bias, active, options = make("cpu", dtype=torch.float16, **sizes)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    room = torch.zeros(x.numel() + 8, dtype=x.dtype)[0 if aligned else 1 :]
    real = room[: x.numel()].view(x.shape[0], 20, 24, 3).permute(0, 3, 1, 2).copy_(x)
    decoy, address = torch.full_like(x, float("nan")), torch.tensor([real.data_ptr()])
    shape = (x.shape[0], 32, 10, 12)
    y, edge = poison(shape, x.dtype, "cpu", "channels_last"), fringe(active, active, shape[2:], 3, 1, 1)
    at = ctypes.c_void_p(decoy.data_ptr())
    assert emulated.sbnet_read_through(at, ctypes.c_void_p(address.data_ptr()))
    try:
        assert launch(
            emulated.emulate_conv, active, edge,
            {"x": decoy, "weight": weight, "bias": bias, "residual": None, "y": y, "slope": None},
            kernel=KERNELS["few channels"], multiprocessors=2, seed=1, k=32, r=3, s=3, activation=0,
            residual_after=False,
            **{name: options[name] for name in ("stride", "padding", "dilation", "groups")},
        )  # fmt: skip
        assert emulated.sbnet_reads_through(at) == 1
    finally:
        emulated.sbnet_read_through(at, None)
    judge(y, active, edge, *(dense_conv2d(x, weight, bias, dtype, **options) for dtype in (x.dtype, torch.float64)))
