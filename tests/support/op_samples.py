"""Sample calls of every registered op, as torch.ops.sbnet takes them: what tests that go over all ops read."""

import copy
import functools

import torch

from sbnet import BlockGrid, Window, fringe
from support.attention_cases import attention_samples
from support.blockconv_cases import blockconv_samples
from support.helpers import laid_out, random_active, tensor
from support.plain_layers import PLAIN
from support.token_cases import token_samples
from support.training_cases import training_samples
from support.weight_cases import weight_samples

OPS = torch.ops.sbnet
NO_LIST = (None, None, None, [])  # of x's plane
FLAGS = (False, False)  # residual_after, allow_tf32
CONV = ([1, 1], [1, 1], [1, 1], 1)
TRANSPOSED = ([1, 1], [1, 1], [0, 0], [1, 1], 1)


@functools.cache
def _made(device):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return op_samples(device)


def samples_of(op, device="cpu"):
    """The lists of arguments of an op, the caller's own. (To make those of all ops takes a seventh of a second.)"""
    return copy.deepcopy(_made(device)[op])


def sampled_ops():
    return list(_made("cpu"))


def op_samples(device):
    """op name -> list of arguments."""
    grid = BlockGrid.cover((20, 27), 8)
    halo = grid.conv_input(3, 1, 1)
    active = random_active(grid, 2, 0.5, device)
    lists = (active.indices, active.count, active.block_map)
    x = tensor((2, 8, 20, 27), torch.float32, device)
    last = laid_out(x, "channels_last")
    weight, bias = tensor((6, 8, 3, 3), torch.float32, device), tensor((6,), torch.float32, device)
    far = Window.conv((1, 5), 1, (0, 4), 2).numbers()
    wide_out = tensor((8, 6, 3, 3), torch.float32, device)
    residual = laid_out(tensor((2, 6, 20, 27), torch.float32, device), "channels_last")
    bottleneck = [tensor(s, torch.float32, device) / 6 for s in ((4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1))]
    bias8 = tensor((8,), torch.float32, device)
    squeeze = [tensor(s, torch.float32, device) for s in ((6, 8), (8, 6))]
    blocks = tensor((active.capacity, 8, 8, 8), torch.float32, device)
    wide = laid_out(tensor((active.capacity, 8, 10, 10), torch.float32, device), "channels_last")
    edge = fringe(active, active, (20, 27), 3, 1, 1)
    bytes_, filters, rest = (
        torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        for shape in ((2, 8, 20, 27), (6, 8, 3, 3), (2, 6, 20, 27))
    )
    scales, edges = torch.rand(6, device=device) / 1000, (edge.pixels, edge.count)
    packed = OPS.pack_conv_weight(weight, 1)
    g, h = grid.numbers(), halo.numbers()
    small = random_active(BlockGrid.cover((10, 14), 8), 2, 0.5, device)  # of half the plane, ceil_mode
    small_lists, s = (small.indices, small.count, small.block_map), small.grid.numbers()

    def grad(t):
        return t.detach().clone().requires_grad_()

    return {
        "reduce_mask": [
            (torch.rand(2, 20, 27, device=device), g, 0.97, False, 24),
            (torch.rand(2, 20, 27, device=device) > 0.9, h, 0.01, True, 5),
        ],
        "sparse_gather": [
            (x, *lists, g, False, True),
            (last, *lists, h, True, True),
            (grad(last), *lists, h, False, True),
            (grad(x), *lists, h, True, True),
            (laid_out(x, "channel_slice"), *lists, g, False, True),
        ],
        "sparse_scatter": [
            (blocks, *lists, x, g, False, False, False),
            (grad(blocks), *lists, grad(last), g, False, False, True),
            (grad(wide), *lists, grad(last), h, True, False, False),
            (grad(wide), *lists, x, h, True, False, True),
            (blocks[:5], *lists, grad(x), g, False, False, False),
        ],
        "sparse_scatter_": [
            (blocks, *lists, x.clone(), g, False, False, False),
            (wide, *lists, laid_out(x, "channels_last"), h, True, False, False),
        ],
        "fringe": [
            (active.block_map, active.block_map, [20, 27], g, [20, 27], g, Window.conv(3, 1, 1).numbers(), 1080),
            (active.block_map, active.block_map, [20, 27], g, [20, 27], g, far, 7),
        ],
        "mask_pyramid": [
            (torch.rand(2, 20, 27, device=device), [20, 27, 8, 8, 10, 14, 4, 8], 0.97, [], 3),
            (
                torch.rand(2, 20, 27, device=device) > 0.95,
                [20, 27, 8, 8, 10, 14, 8, 8],
                0.5,
                [
                    *(0, 2, 0, *Window.conv(3, 1, 1).numbers(), 1, *Window.conv(3, 2, 1).numbers()),
                    *(1, 1, 1, *Window.conv((1, 5), 1, (0, 2)).numbers()),
                ],
            ),
        ],
        "yuv_to_rgb_": [
            ((255 * x[:, 0, :18, :12]).byte().contiguous(), [*range(6), 0, 0, 1, 0], torch.rand_like(last[:, :3]))
        ],
        "connected_components": [
            (x[:, 0], 0.3, 2, 12),
            (last[:, 1].half(), 0.5, 1, 400),
        ],
        "motion_mask": [
            (torch.rand(2, 3, 20, 27, device=device), torch.rand(2, 20, 27, device=device), 0.08, 0.5, 0.3, 5),
            ((255 * torch.rand(1, 3, 20, 27, device=device)).byte(), x[:1, 0].contiguous(), 0.1, 1.0, 0.15, 1),
        ],
        "motion_mask_": [(x[:, :3], torch.rand(2, 20, 27, device=device), 0.08, 0.5, 0.3, 3)],
        "sparse_conv2d": [
            (x, weight, None, None, None, *lists, g, *CONV, "none", 0.0, *FLAGS, *NO_LIST),
            (last, weight, bias, residual, None, *lists, g, *CONV, "relu", 0.0, *FLAGS, *NO_LIST),
            (*map(grad, (last, weight, bias, residual)), None, *lists, g, *CONV, "silu", 0.0, *FLAGS, *NO_LIST),
            (grad(x), weight, grad(bias), None, None, *lists, g, *CONV, "leaky_relu", 0.1, *FLAGS, *NO_LIST),
            (
                grad(last), weight, bias, grad(residual), grad(bias), *lists, g, *CONV, "leaky_relu", 0.0, *FLAGS,
                *NO_LIST,
            ),
            (
                *map(grad, (last, weight)), bias, grad(residual), None, *lists, g, *CONV, "silu", 0.0, True, False,
                *NO_LIST,
            ),
            (*map(grad, (last, weight)), bias, None, None, *lists, g, *CONV, "relu", 0.0, *FLAGS, *lists, g),
        ],
        "sparse_conv2d_quantized": [
            (bytes_, filters, scales, None, None, None, *lists, g, *CONV, "none", 0.0, False, 0.0, 1.0, 0.5),
            (bytes_, filters, scales, bias, rest, None, *lists, g, *CONV, "silu", 0.0, False, 0.0, 0.1, 0.5),
            (
                bytes_, filters[:, :4], scales, bias, rest, None, *lists, g, *CONV[:3], 2, "relu", 0.0, False, 0.0, 0.1,
                0.5,
            ),
            (
                bytes_[:, :6], filters[:, :1], scales, bias, rest, None, *lists, g, *CONV[:3], 6, "none", 0.0, False,
                0.0, 0.1, 0.5,
            ),
            (
                bytes_.float(), filters, scales, None, rest.float(), bias, *lists, g, *CONV, "leaky_relu", 0.0, False,
                2.0, 0.1, 0.5,
            ),
        ],
        "sparse_conv2d_dequantized": [
            (bytes_, filters, scales, bias, rest.float(), None, *lists, g, *CONV, "relu", 0.0, False, 0.0, 0.1, None),
            (bytes_.float(), filters, scales, bias, rest, None, *lists, g, *CONV, "relu", 0.0, False, 2.0, 0.1, None),
            (
                bytes_, filters[:, :4], scales, bias, None, bias, *lists, g, *CONV[:3], 2, "leaky_relu", 0.0, False,
                0.0, 1.0, None,
            ),
        ],
        "sparse_conv2d_quantized_": [
            (
                bytes_, filters, scales, bias, None, None, *lists[:2], g, *CONV, "relu", 0.0, False, 0.0, 1.0, 0.5,
                0 * rest, *edges, None,
            ),
            (
                bytes_, filters, scales, None, None, None, *lists[:2], g, *CONV, "none", 0.0, False, 0.0, 1.0, 0.0,
                rest.float(), *edges, None,
            ),
        ],
        "sparse_conv_transpose2d": [
            (x, wide_out, None, None, None, *lists, g, *TRANSPOSED, "none", 0.0, False, *NO_LIST),
            (last, wide_out, bias, residual, None, *lists, g, *TRANSPOSED, "relu", 0.0, False, *NO_LIST),
            (*map(grad, (last, wide_out, bias, residual)), None, *lists, g, *TRANSPOSED, "silu", 0.0, False, *NO_LIST),
            (grad(x), wide_out, grad(bias), None, None, *lists, g, *TRANSPOSED, "leaky_relu", 0.1, False, *NO_LIST),
            (grad(last), wide_out, None, None, grad(bias), *lists, g, *TRANSPOSED, "leaky_relu", 0.0, False, *NO_LIST),
            (*map(grad, (last, wide_out)), bias, None, None, *lists, g, *TRANSPOSED, "relu", 0.0, False, *lists, g),
        ],
        "sparse_conv_transpose2d_": [
            (last, wide_out, bias, residual, None, *lists[:2], g, *TRANSPOSED, "relu", 0.0, False, 0 * residual, *edges)
        ],
        "sparse_conv2d_": [
            (x, weight, None, None, None, *lists[:2], g, *CONV, "none", 0.0, *FLAGS, 0 * residual, None, None, None),
            (last, weight, bias, residual, None, *lists[:2], g, *CONV, "relu", 0.0, *FLAGS, 0 * residual, *edges, None),
            (
                last, weight, None, None, bias, *lists[:2], g, *CONV, "leaky_relu", 0.0, *FLAGS, 0 * residual, *edges,
                None,
            ),
            (
                last, weight, bias, residual, None, *lists[:2], g, *CONV, "relu", 0.0, *FLAGS, 0 * residual, *edges,
                packed,
            ),
        ],
        "sparse_bottleneck2d": [
            (x, *bottleneck, None, None, None, *lists, g, "relu", 0.0, False),
            (last, *bottleneck, bias8[4:], None, bias8, *lists, g, "leaky_relu", 0.2, False),
            (grad(last), *map(grad, bottleneck), None, grad(bias8[:4]), grad(bias8), *lists, g, "silu", 0.0, False),
            (x, grad(bottleneck[0]), *bottleneck[1:], None, None, None, *lists, g, "relu", 0.0, False),
        ],
        "sparse_bottleneck2d_": [
            (x, *bottleneck, None, None, None, *lists, g, "relu", 0.0, False, 0 * x, *[None] * 5),
            (last, *bottleneck, None, None, bias8, *lists, g, "gelu", 0.0, False, 0 * last, *edges, *[None] * 3),
        ],
        "pack_conv_weight": [(weight, 1), (tensor((6, 1, 3, 5), torch.float16, device), 6)],
        "sparse_resize2d": [
            (x, *lists, g, [20, 27], "nearest", False, 0.0, 0.0),
            (grad(last), *lists, g, [20, 27], "bilinear", True, 0.0, 0.0),
            (grad(x), *small_lists, s, [10, 14], "bicubic", False, 2.0, 0.0),
        ],
        "sparse_resize2d_": [
            (x, *lists[:2], g, "nearest-exact", False, 0.5, 0.0, 0 * x, None, None),
            (last, *lists[:2], g, "bilinear", False, 0.0, 0.0, 0 * last, edge.pixels, edge.count),
        ],
        "sparse_adaptive_pool2d": [
            (x, active.block_map, g, [1, 1], "avg", True),
            (grad(last), active.block_map, g, [3, 2], "avg", False),
            (grad(x), active.block_map, g, [2, 2], "max", True),
        ],
        "sparse_adaptive_pool2d_": [
            (last, active.block_map, g, "max", False, torch.zeros(*x.shape[:2], 2, 3, device=device))
        ],
        "sparse_squeeze_excite2d": [
            (last, *squeeze, bias, bias8, active.block_map, g, "relu", "sigmoid"),
            (grad(x), *map(grad, squeeze), None, grad(bias8), active.block_map, g, "silu", "hardsigmoid"),
        ],
        "sparse_squeeze_excite2d_": [(last, *squeeze, bias, bias8, active.block_map, g, "relu", "sigmoid", 0 * last)],
        "sparse_norm2d": [
            (x, None, None, *lists, g, "group", 2, 1e-5),
            (grad(last), grad(bias8), grad(bias8), *lists, g, "group", 4, 1e-5),
            (grad(x), grad(bias8), None, *lists, g, "layer", 1, 1e-6),
            (grad(last), None, None, *lists, g, "log_softmax", 1, 0.0),
            (grad(last), grad(bias8), grad(bias8), *lists, g, "response", 1, 1e-6),
        ],
        "sparse_norm2d_": [
            (x, bias8, bias8, *lists, g, "group", 8, 1e-5, 0 * x, None, None),
            (last, None, None, *lists, g, "softmax", 1, 0.0, 0 * last, edge.pixels, edge.count),
        ],
        "sparse_pointwise": [
            (x, None, None, None, None, *lists, g, "mul 2; silu"),
            (grad(last), grad(0 * last + 1), grad(bias8[None, :, None, None]), None, None, *lists, g, "mul a; prelu b"),
        ],
        "sparse_pointwise_": [
            (last, x, None, None, None, *lists[:2], g, "add a; tanh", 0 * last, edge.pixels, edge.count)
        ],
        "sparse_fill": [(x, active.block_map, g, 0.0), (grad(last), active.block_map, g, -1.5)],
        "sparse_fill_": [
            (x.clone(), active.block_map, g, 0.0),
            (laid_out(x, "channels_last"), active.block_map, g, 2.0),
        ],
        **plain_samples(device),
        **training_samples(device),
        **weight_samples(device),
        **blockconv_samples(device),
        **token_samples(device),
        **attention_samples(device),
    }  # fmt: skip


def plain_samples(device):
    """Of layers that read x and numbers alone: with gradients of both memory formats, in place with a fringe."""
    samples = {}
    for op, plain in PLAIN.items():
        samples[op], samples[f"{op}_"] = [], []
        for k, numbers in enumerate(plain.numbers):
            x = laid_out(tensor((2, 8, 18, 27), torch.float32, device), "channels_last" if k % 2 else "contiguous")
            others = plain.further(x)
            dense = plain.whole(x, *others, **numbers)
            active = random_active(BlockGrid.cover(dense.shape[2:], 8), 2, 0.5, device)
            edge = fringe(active, active, tuple(dense.shape[2:]), 3, 1, 1)
            lists, grid = (active.indices, active.count), active.grid.numbers()
            leaf = x.clone().requires_grad_(k > 0)
            samples[op].append((leaf, *others, *lists, active.block_map, grid, *numbers.values()))
            edges = (edge.pixels, edge.count) if k else (None, None)
            samples[f"{op}_"].append((x, *others, *lists, grid, *numbers.values(), torch.zeros_like(dense), *edges))
    return samples
