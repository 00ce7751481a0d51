"""Sample calls of the ops that gradients are made of, as torch.ops.sbnet takes them."""

import torch

import sbnet
from sbnet import BlockGrid
from support.helpers import laid_out, random_active, tensor


def training_samples(device):
    """op name -> list of arguments."""
    grid = BlockGrid.cover((20, 27), 8)
    active = random_active(grid, 2, 0.5, device)
    lists, g = (active.indices, active.count), grid.numbers()
    x, dy = (tensor((2, 8, 20, 27), torch.float32, device) for _ in range(2))
    last, last_dy = laid_out(x, "channels_last"), laid_out(dy, "channels_last")
    small = random_active(BlockGrid.cover((10, 14), 8), 2, 0.5, device)  # of half the plane
    half, s = tensor((2, 8, 10, 14), torch.float32, device), small.grid.numbers()
    numbers = torch.rand(8, device=device) + 0.5
    ring = sbnet.fringe(active, active, (20, 27), 3, 1, 1)
    statistics = torch.cat([0 * numbers, numbers, numbers.new_tensor([500.0])])

    def grad(t):
        return t.detach().clone().requires_grad_()

    window, down = ([1, 1], [1, 1], [1, 1]), ([2, 2], [1, 1], [1, 1])
    pool = ([3, 3], [2, 2], [1, 1], [1, 1])
    return {
        "sparse_conv2d_weight_grad": [
            (x, dy, *lists, g, [3, 3], *window, 1, False, False, True),
            (grad(last), grad(last_dy), *lists, g, [3, 3], *window, 2, False, True, True),
            (grad(last), last_dy, *lists, g, [3, 3], *window, 8, False, False, False),
            (x, grad(half), small.indices, small.count, s, [3, 3], *down, 1, False, True, False),
        ],
        "sparse_conv2d_weight_grads": [
            (
                [x, last],
                [dy, half],
                [lists[0], small.indices],
                [lists[1], small.count],
                [*g, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, *s, 3, 3, 2, 2, 1, 1, 1, 1, 1, 0, 1, 0, 1],
            ),
        ],
        "sparse_batch_norm2d": [
            (x, None, None, *lists, active.block_map, g, 1e-5),
            (grad(last), grad(numbers), grad(numbers), *lists, active.block_map, g, 1e-5),
        ],
        "sparse_batch_norm2d_backward": [
            (dy, x, None, statistics, *lists, active.block_map, g, 1e-5),
            (last_dy, last, numbers, statistics, *lists, active.block_map, g, 1e-5),
        ],
        "sparse_norm2d_backward": [
            (dy, x, None, *lists, active.block_map, g, "layer", 1, 1e-6),
            (last_dy, last, numbers, *lists, active.block_map, g, "group", 2, 1e-6),
            (last_dy, x, numbers, *lists, active.block_map, g, "response", 1, 1e-6),
        ],
        "sparse_norm2d_backward_": [
            (dy, x, None, *lists, active.block_map, g, "response", 1, 1e-6, torch.empty_like(x), None, None),
            (
                last_dy,
                last,
                numbers,
                *lists,
                active.block_map,
                g,
                "layer",
                1,
                1e-6,
                torch.empty_like(last),
                ring.pixels,
                ring.count,
            ),
        ],
        "sparse_batch_norm2d_": [
            (
                x,
                None,
                None,
                None,
                *lists,
                active.block_map,
                g,
                1e-5,
                "none",
                0.0,
                torch.empty_like(x),
                None,
                None,
                None,
                None,
                0.0,
            ),
            (
                last,
                numbers,
                numbers,
                last_dy,
                *lists,
                active.block_map,
                g,
                1e-5,
                "relu",
                0.0,
                torch.empty_like(last),
                ring.pixels,
                ring.count,
                numbers.clone(),
                numbers.clone(),
                0.1,
            ),
        ],
        "sparse_batch_norm2d_backward_": [
            (
                dy,
                x,
                None,
                numbers,
                numbers,
                statistics,
                *lists,
                active.block_map,
                g,
                1e-5,
                "silu",
                0.0,
                torch.empty_like(x),
                None,
                None,
                None,
            ),
            (
                last_dy,
                last,
                last.relu(),
                numbers,
                None,
                statistics,
                *lists,
                active.block_map,
                g,
                1e-5,
                "relu",
                0.0,
                torch.empty_like(last),
                torch.empty_like(last),
                ring.pixels,
                ring.count,
            ),
        ],
        "turn_conv_weights": [
            (
                [tensor((9, 5, 3, 3), torch.float32, device), tensor((8, 16, 1, 1), torch.float32, device)],
                torch.bfloat16,
            ),
            ([laid_out(tensor((8, 16, 1, 1), torch.float16, device), "channels_last")], torch.float16),
        ],
        "sparse_activation_grad_": [
            (dy, x, None, *lists, g, "gelu", 0.0, torch.empty_like(x), None, None),
            (last_dy, last, numbers, *lists, g, "leaky_relu", 0.0, torch.empty_like(last), ring.pixels, ring.count),
        ],
        "batch_norm_follow_": [(numbers.clone(), numbers.clone(), statistics, 0.1)],
        "sparse_activation_grad": [
            (dy, x, None, active.block_map, g, "silu", 0.0),
            (grad(last_dy), grad(last), None, active.block_map, g, "relu", 0.0),
            (grad(dy), x, grad(numbers), active.block_map, g, "leaky_relu", 0.0),
        ],
        "activate_blocks_": [
            (x.clone(), None, active.block_map, g, "gelu", 0.0),
            (laid_out(x, "channels_last"), dy, active.block_map, g, "leaky_relu", 0.1),
        ],
        "sparse_pool2d_grad_": [
            (half, x, small.block_map, s, True, *pool, False, True, 0, active.block_map, g, torch.empty_like(x)),
            (half, x, small.block_map, s, False, *pool, False, False, 0, active.block_map, g, torch.empty_like(last)),
        ],
        "sparse_resize2d_grad_": [
            (
                half,
                small.block_map,
                s,
                "bicubic",
                True,
                0.0,
                0.0,
                *lists,
                g,
                torch.empty_like(last),
                ring.pixels,
                ring.count,
            ),
            (half, small.block_map, s, "nearest", False, 2.0, 0.0, *lists, g, torch.empty_like(x), None, None),
        ],
        "sparse_resize2d_grad": [
            (grad(half), small.block_map, s, [20, 27], "nearest", False, 0.0, 0.0, False),
            (grad(laid_out(half, "channels_last")), small.block_map, s, [20, 27], "bilinear", False, 0.0, 2.0, True),
            (half, small.block_map, s, [33, 8], "bicubic", True, 0.0, 0.0, True),
        ],
        "sparse_pool2d_grad": [
            (grad(half), x, small.block_map, s, True, *pool, False, True, 0),
            (grad(laid_out(half, "channels_last")), last, small.block_map, s, False, *pool, False, False, 0),
        ],
    }
