"""The families of gradients for sanitize.py: shapes that reach every kernel and the ends of its tiles."""

from __future__ import annotations

import torch
from sanitize_convs import some_active

import sbnet
from sbnet import BlockGrid
from sbnet.geometry import conv_output_size
from sbnet.ops.masked.norm import norm_whole

CONVS = [  # channels, filters, kernel, stride, padding, dilation, groups
    (6, 4, 3, 1, 1, 1, 1),
    (16, 24, 3, 2, 1, 1, 1),
    (40, 40, 3, 1, 1, 1, 1),
    (160, 136, 1, 1, 0, 1, 1),  # tiles that are square, tall and flat
    (16, 136, 1, 1, 0, 1, 1),
    (264, 24, 1, 1, 0, 1, 1),
    (40, 40, 5, 1, 2, 1, 40),
    (72, 72, 7, 1, 3, 1, 72),  # strips that are cut off
    (8, 8, 3, 1, 2, 2, 2),
]


def like_dense(made: torch.Tensor, active: sbnet.ActiveBlocks, leaves: list[torch.Tensor], dense) -> None:
    """Gradients against PyTorch's of the masked dense layer, in float64."""
    upstream = torch.randn_like(made)
    got = torch.autograd.grad(made, leaves, upstream)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    inside = active.pixel_mask(made.shape[2:])
    want = torch.autograd.grad(torch.where(inside, dense(*wide), 0.0), wide, upstream.double())
    for a, b in zip(got, want, strict=True):
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-6))
        assert error < 50 * torch.finfo(a.dtype).eps, f"relative error {error:.2g}"


def conv_gradients(device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        for channels, filters, k, s, p, d, groups in CONVS:
            size = conv_output_size((19, 30), (k, k), (s, s), (p, p), (d, d))
            active = some_active((2, *size), BlockGrid.cover(size, (5, 8)), 0.6, device)
            options = {"stride": s, "padding": p, "dilation": d, "groups": groups}
            for channels_last in (True, False):
                x = torch.randn(2, channels, 19, 30, device=device, dtype=dtype)
                x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
                weight = torch.randn(filters, channels // groups, k, k, device=device, dtype=dtype) / 4
                bias = torch.randn(filters, device=device, dtype=dtype)
                leaves = [t.requires_grad_() for t in (x, weight, bias)]
                made = sbnet.sparse_conv2d(x, weight, bias, active, **options)

                def dense(x, weight, bias, options=options):
                    return torch.nn.functional.conv2d(x, weight, bias, **options)

                like_dense(made, active, leaves, dense)


def layer_gradients(device: str) -> None:
    """Norms, pools, resizes and activations."""
    active = some_active((2, 19, 30), BlockGrid.cover((19, 30), (5, 8)), 0.6, device)
    for channels, channels_last in ((6, False), (24, True), (200, True)):
        x = torch.randn(2, channels, 19, 30, device=device)
        x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
        weight, bias = (torch.randn(channels, device=device).requires_grad_() for _ in range(2))

        def layer_norm(x, weight, bias):
            return torch.nn.functional.layer_norm(x.movedim(1, -1), weight.shape, weight, bias, 1e-5).movedim(-1, 1)

        inside = active.pixel_mask((19, 30))

        def response_norm(x, weight, bias, inside=inside):
            x = torch.where(inside, x, 0.0)
            size = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
            shares = size / (size.mean(1, keepdim=True) + 1e-5)
            return x + weight[:, None, None] * x * shares + bias[:, None, None]

        def group_norm(x, weight, bias, inside=inside):
            return norm_whole(x, weight, bias, inside, "group", 2, 1e-5)

        made = sbnet.sparse_layer_norm2d(x, active, weight, bias, 1e-5)
        like_dense(made, active, [x, weight, bias], layer_norm)
        made = sbnet.sparse_response_norm(x, active, weight, bias, 1e-5)
        like_dense(made, active, [x, weight, bias], response_norm)
        made = sbnet.sparse_group_norm(x, active, 2, weight, bias, 1e-5)
        like_dense(made, active, [x, weight, bias], group_norm)
        for window in ({"kernel_size": 3, "stride": 1, "padding": 1}, {"kernel_size": 2, "stride": 2}):
            size = (19, 30) if window["stride"] == 1 else (9, 15)
            pools = some_active((2, *size), BlockGrid.cover(size, (5, 8)), 0.6, device)
            for op in ("max", "avg"):
                made = getattr(sbnet, f"sparse_{op}_pool2d")(x, pools, **window)
                plain = getattr(torch.nn.functional, f"{op}_pool2d")
                like_dense(made, pools, [x], lambda t, plain=plain, window=window: plain(t.contiguous(), **window))
        for mode, size in (("nearest", (38, 60)), ("bilinear", (38, 60)), ("bicubic", (11, 47)), ("nearest", (7, 9))):
            resized = some_active((2, *size), BlockGrid.cover(size, (5, 8)), 0.6, device)
            made = sbnet.sparse_resize2d(x, resized, size=size, mode=mode)

            def resize(t, mode=mode, size=size):
                return torch.nn.functional.interpolate(t, size, mode=mode)

            like_dense(made, resized, [x], resize)
            rest = "nearest", False, 0.0, 0.0, active.indices, active.count, active.grid.numbers()
            torch.ops.sbnet.sparse_resize2d_grad_(
                made.detach(), resized.block_map, resized.grid.numbers(), *rest, torch.empty_like(x), None, None
            )
        norm = sbnet.nn.SparseBatchNorm2d(channels, device=device).train()
        norm(x, active).square().sum().backward()


def norm_gradients(device: str) -> None:
    """Batch norms with what follows them: several parts of the list, one, none; words of channels and single ones."""
    norm, backward = torch.ops.sbnet.sparse_batch_norm2d_, torch.ops.sbnet.sparse_batch_norm2d_backward_
    for dtype, channels, size, density, channels_last, activation in (
        (torch.bfloat16, 72, (90, 100), 0.9, True, "relu"),
        (torch.bfloat16, 64, (37, 41), 0.5, True, "silu"),
        (torch.float32, 40, (60, 70), 0.5, True, "leaky_relu"),
        (torch.float16, 5, (37, 41), 0.5, False, "relu"),
        (torch.bfloat16, 16, (19, 22), 0.0, True, "none"),
    ):
        grid = BlockGrid.cover(size, 4)
        active = some_active((2, *size), grid, density, device)
        edge = sbnet.fringe(active, active, size, 3, 1, 1)
        lists = (active.indices, active.count, active.block_map, grid.numbers(), 1e-5, activation, 0.1)
        form = torch.channels_last if channels_last else torch.contiguous_format
        x, dy, added, y, dx, of_added = (
            torch.randn(2, channels, *size, device=device).to(dtype).contiguous(memory_format=form) for _ in range(6)
        )
        weight = torch.rand(channels, device=device)
        residual = None if activation == "silu" else added
        statistics = norm(
            x, weight, weight, residual, *lists, y, edge.pixels, edge.count, weight.clone(), weight.clone(), 0.1
        )
        given = y if activation in ("relu", "leaky_relu") else None
        wanted = None if residual is None else of_added
        backward(dy, x, given, weight, weight, statistics, *lists, dx, wanted, edge.pixels, edge.count)
        inside = active.pixel_mask(size)
        want = torch.where(inside, x.float(), 0.0).sum((0, 2, 3)) / inside.sum().clamp(min=1)
        assert (statistics[:channels] - want).abs().max() < 1e-3
        assert torch.isfinite(torch.where(inside, dx, 0.0)).all()


def gradients_of_weights(device: str) -> None:
    """Of several layers in one call, parts of lists that are full, of some blocks and empty."""
    columns: list[list] = [[], [], [], []]
    numbers: list[int] = []
    for k, (channels, filters, taps, s, p, d, groups) in enumerate(CONVS * 2):
        size = conv_output_size((59, 70), (taps, taps), (s, s), (p, p), (d, d))
        active = some_active((2, *size), BlockGrid.cover(size, 8), (1.0, 0.4, 0.0)[k % 3], device)
        x, dy = (torch.randn(2, n, *of, device=device).bfloat16() for n, of in ((channels, (59, 70)), (filters, size)))
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
        for column, value in zip(columns, (x, dy, active.indices, active.count), strict=True):
            column.append(value)
        numbers += [*active.grid.numbers(), taps, taps, s, s, p, p, d, d, groups, 0, 1, k % 4 == 3, k % 5 != 4]
    found = torch.ops.sbnet.sparse_conv2d_weight_grads(*columns, numbers)
    again = torch.ops.sbnet.sparse_conv2d_weight_grads(*columns, numbers)
    assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(found, again, strict=True))


GRADIENTS = (conv_gradients, layer_gradients, norm_gradients, gradients_of_weights)
