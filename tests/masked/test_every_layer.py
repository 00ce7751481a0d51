"""What every layer on active blocks keeps to, whatever it computes: its form in place, the fringe, lists, errors."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_map_only

import sbnet
from sbnet import BlockGrid, fringe
from support.helpers import FLOATS, assert_bitwise, laid_out, poison, random_active, tensor
from support.plain_layers import PLAIN

PLANE = (12, 18)


class Layer(NamedTuple):
    """op(*before, active, *after, **more), and op_ with out behind active (`out_last`: by name), fringe by name."""

    op: str
    before: Callable[[str], tuple]  # x and the other tensors ahead of active
    size: tuple[int, int] = PLANE  # of y
    channels: int = 8
    after: tuple = ()
    more: Mapping[str, Any] = MappingProxyType({})
    raw: str = ""  # what errors call the op where the wrapper's name is another
    out_last: bool = False


def x_of(device):
    return laid_out(tensor((2, 8, *PLANE), torch.float32, device), "channels_last")


def and_weight(*shape, scale=1):
    return lambda device: (x_of(device), tensor(shape, torch.float32, device) / scale, None)


def bytes_of(device):
    x, weight = ((8 * t).to(torch.int8) for t in and_weight(8, 8, 3, 3)(device)[:2])
    return x, weight, torch.rand(8, device=device) / 10, None


def bottleneck_of(device):
    shapes = (4, 8, 1, 1), (4, 4, 3, 3), (8, 4, 1, 1)
    return x_of(device), [tensor(s, torch.float32, device) / 4 for s in shapes], None


def alone(device):
    return (x_of(device),)


def and_further(plain, device):
    x = x_of(device)
    return x, *plain.further(x)


LAYERS = {
    "conv": Layer("sparse_conv2d", and_weight(8, 8, 3, 3), more={"padding": 1, "activation": "silu"}),
    "conv, stride 2": Layer("sparse_conv2d", and_weight(8, 8, 3, 3), (6, 9), more={"padding": 1, "stride": 2}),
    "conv 1x1": Layer("sparse_conv2d", and_weight(16, 8, 1, 1), channels=16),
    "depthwise": Layer("sparse_conv2d", and_weight(8, 1, 3, 3), more={"padding": 1, "groups": 8}),
    "transposed": Layer("sparse_conv_transpose2d", and_weight(8, 8, 2, 2), (24, 36), more={"stride": 2}),
    "int8": Layer("sparse_conv2d_quantized", bytes_of, more={"padding": 1, "out_scale": 0.5}),
    "bottleneck": Layer("sparse_bottleneck2d", bottleneck_of),
    "nearest": Layer("sparse_resize2d", alone, (24, 36), more={"scale_factor": 2}),
    "bicubic": Layer("sparse_resize2d", alone, (24, 36), more={"scale_factor": 2, "mode": "bicubic"}),
    "group norm": Layer("sparse_group_norm", alone, after=(4,), raw="sparse_norm2d"),
    "response norm": Layer("sparse_response_norm", alone, raw="sparse_norm2d"),
    "layer norm": Layer("sparse_layer_norm2d", alone, raw="sparse_norm2d"),
    "softmax": Layer("sparse_softmax2d", alone, raw="sparse_norm2d"),
    "program": Layer("sparse_pointwise", alone, after=("mul 2; relu",), out_last=True),
    **{
        f"{op} {k}": Layer(
            op, partial(and_further, plain), tuple(y.shape[2:]), y.shape[1],
            after=tuple(numbers.values()) if "pool" in op else (), more={} if "pool" in op else numbers,
        )
        for op, plain in PLAIN.items()
        for k, numbers in enumerate(plain.numbers)
        for y in (plain.whole(*[torch.zeros(2, 8, *PLANE)] * (1 + plain.others), **numbers),)
    },
}  # fmt: skip


def run(layer, tensors, active, **more):
    return getattr(sbnet, layer.op)(*tensors, active, *layer.after, **layer.more, **more)


def run_(layer, tensors, active, out, **more):
    op = getattr(sbnet, f"{layer.op}_")
    if layer.out_last:
        return op(*tensors, active, *layer.after, out=out, **layer.more, **more)
    return op(*tensors, active, out, *layer.after, **layer.more, **more)


def blocks(layer, device, density, block=4):
    return random_active(BlockGrid.cover(layer.size, block), 2, density, device)


every = pytest.mark.parametrize("name", LAYERS)


@every
@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "odd_channel_slice"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_the_form_in_place_writes_active_blocks_zeroes_the_fringe_and_leaves_the_rest(
    device, name, density, dtype, layout
):
    layer = LAYERS[name]
    if name == "int8":
        tensors = layer.before(device)
    else:
        tensors = tree_map_only(torch.Tensor, lambda t: t.to(dtype), layer.before(device))
    tensors, active = (laid_out(tensors[0], layout), *tensors[1:]), blocks(layer, device, density)
    got = run(layer, tensors, active)
    assert got.shape == (2, layer.channels, *layer.size)
    inside = active.pixel_mask(layer.size).expand_as(got)
    assert not bool(got[~inside].any())
    edge = fringe(active, random_active(BlockGrid.cover(layer.size, 4), 2, 0.3, device), layer.size, 3, 1, 1)
    into = laid_out(torch.full_like(got, 7), layout)
    assert run_(layer, tensors, active, into, fringe=edge) is None
    want = torch.full_like(got, 7).permute(0, 2, 3, 1).reshape(-1, layer.channels)
    want[edge.pixels[: int(edge.count)].long()] = 0
    want = want.view(2, *layer.size, -1).permute(0, 3, 1, 2)
    assert_bitwise(into, torch.where(inside, got, want))
    if got.is_floating_point():  # what out holds is not read
        into = poison(got.shape, got.dtype, device, layout)
        run_(layer, tensors, active, into)
        assert_bitwise(into[inside], got[inside])


@every
def test_rows_of_lists_that_name_no_block_are_skipped(device, name):
    if name == "bottleneck":
        pytest.skip("its neighbours read what the block map says: tests/masked/test_bottleneck.py")
    layer = LAYERS[name]
    tensors, active = layer.before(device), blocks(layer, device, 1.0)
    want = run(layer, tensors, active)
    active.indices[0] = torch.tensor([5, 0, 0], dtype=torch.int32)
    active.indices[1] = torch.tensor([0, -1, 99], dtype=torch.int32)
    active.count.fill_(2**30)
    want[0, :, :4, :8] = 0
    assert_bitwise(run(layer, tensors, active), want)


@every
def test_errors_name_the_op_that_was_called(device, name):
    layer = LAYERS[name]
    (x, *others), active = layer.before(device), blocks(layer, device, 0.5)
    called = f"({layer.op}|{layer.raw or layer.op})"
    out = torch.zeros_like(run(layer, (x, *others), active))
    bad = [
        ((None, *others), active, "x: expected .*, got NoneType"),
        ((x[0], *others), active, "x: expected 4 dimensions, got 3"),
        ((x, *others), 3, "active: expected .*, got int"),
        ((x.double(), *others), active, "x: dtype: expected"),
        ((x[:1], *others), active, "active: expected the images of x"),
        ((x, *others), random_active(BlockGrid.cover((99, 99), 4), 2, 0.5, device), "active"),
    ]
    for tensors, listed, pattern in bad:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=f"sbnet::{called}: {pattern}"):
            run(layer, tensors, listed)
        with pytest.raises((RuntimeError, ValueError, TypeError), match=f"sbnet::{called}_: {pattern}"):
            run_(layer, tensors, listed, out)
    bad_outs = [
        (None, "out: expected .*, got NoneType"),
        (out[0], "out: expected (4 dimensions, got 3|a plane of)"),
        (out.to(torch.float64), "out: dtype: expected .*, got float64"),
        (out[:, :, 1:], "out: (shape: )?expected"),
        (out[:, :1].expand(out.shape), "out: .*(expanded|of its own memory)"),
    ]
    for into, pattern in bad_outs:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=f"sbnet::{called}_: {pattern}"):
            run_(layer, (x, *others), active, into)
    for fringe_ in (3, (out, out)):
        with pytest.raises(TypeError, match=f"sbnet::{called}_: fringe: expected .*, got"):
            run_(layer, (x, *others), active, out, fringe=fringe_)
    if x.is_floating_point():
        with pytest.raises(RuntimeError, match=f"sbnet::{called}_: works in place and has no gradient"):
            run_(layer, (x.detach().requires_grad_(), *others), active, out)
        memory = torch.empty(max(x.numel(), out.numel()), device=device)
        shared = memory[: x.numel()].view(x.shape), memory[: out.numel()].view(out.shape)
        with pytest.raises(RuntimeError, match=f"sbnet::{called}_: out: expected memory of its own, got that of x"):
            run_(layer, (shared[0], *others), active, shared[1])
