"""pack_conv_weight: the bits of a convolution do not depend on when its weight was packed, and no pack goes stale."""

import threading

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import sbnet
from sbnet import BlockGrid, conv_output_size, pack_conv_weight, reduce_mask, sparse_conv2d_
from sbnet.models import resnet18
from sbnet.nn import SparseConv2d
from support.helpers import FLOATS, assert_bitwise, laid_out, poison, random_active, tensor
from support.ort_models import Node, model, nhwc, session, value_info

CONVS = {  # channels, filters, kernel, options
    "3x3": (64, 72, (3, 3), {"padding": 1}),
    "uneven": (17, 33, (3, 3), {"padding": 1, "stride": 2}),
    "1x1": (96, 130, (1, 1), {}),
    "stem": (3, 20, (7, 7), {"padding": 3, "stride": 2}),
    "more taps than a group has": (5, 6, (11, 9), {"padding": 4, "dilation": 2}),
    "strides beyond the kernel": (40, 24, (2, 1), {"stride": (3, 2)}),
    "groups": (48, 40, (3, 3), {"padding": 1, "groups": 2}),
    "depthwise": (37, 74, (3, 3), {"padding": 1, "groups": 37}),
}


def case(name, dtype, device="cpu", block=8):
    channels, filters, kernel, options = CONVS[name]
    options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    x = laid_out(tensor((2, channels, 37, 45), dtype, device), "channels_last")
    weight = tensor((filters, channels // options["groups"], *kernel), dtype, device)
    pairs = [v if isinstance(v, tuple) else (v, v) for v in list(options.values())[:3]]
    out = conv_output_size((37, 45), kernel, *pairs)
    active = random_active(BlockGrid.cover(out, block), 2, 0.4, device)
    return x, weight, active, (2, filters, *out), options


def both(x, weight, active, shape, options, pack):
    outs = [poison(shape, x.dtype, x.device.type, "channels_last") for _ in range(2)]
    sparse_conv2d_(x, weight, None, active, outs[0], **options)
    sparse_conv2d_(x, weight, None, active, outs[1], **options, packed=pack)
    return outs


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "plane_slice"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_packed_or_not(device, name, dtype, layout):
    """One pack serves any blocks."""
    for block in (8, (3, 5), 64):
        x, weight, active, shape, options = case(name, dtype, device, block)
        weight = laid_out(weight, layout)
        pack = pack_conv_weight(weight, options["groups"])
        assert pack.dtype == torch.uint8
        assert bool(len(pack)) == (device == "cpu")
        plain, packed = both(x, weight, active, shape, options, pack)
        assert_bitwise(packed, plain)


def check_a_pack_of_another_set(tag):
    """tag: how another instruction set's pack of this shape begins. It is refused, or read just as well."""
    x, weight = torch.zeros(1, 40, 8, 8).bfloat16(), torch.zeros(40, 40, 3, 3).bfloat16()
    active = reduce_mask(torch.ones(1, 8, 8), BlockGrid.cover((8, 8), 8))
    foreign = pack_conv_weight(weight)
    own = torch.equal(foreign[:72], tag)
    foreign[:72] = tag
    out = torch.full((1, 40, 8, 8), float("nan")).bfloat16()
    if own:
        sparse_conv2d_(x, weight, None, active, out, padding=1, packed=foreign)
        assert not out.isnan().any()
    else:
        with pytest.raises(
            RuntimeError, match="packed: expected .*got a pack of another shape, dtype, number of groups or processor"
        ):
            sparse_conv2d_(x, weight, None, active, out, padding=1, packed=foreign)
        assert out.isnan().all()


def test_a_pack_of_something_else_is_refused():
    x, weight, active, shape, options = case("groups", torch.float32)
    out = poison(shape, torch.float32, "cpu")
    good = pack_conv_weight(weight, 2)

    def refused(match, packed, error=RuntimeError):
        with pytest.raises(error, match=match):
            sparse_conv2d_(x, weight, None, active, out, **options, packed=packed)
        assert out.isnan().all()

    wanted = r"sparse_conv2d_?: packed: .*pack_conv_weight\(weight, groups\)"
    refused(wanted, pack_conv_weight(weight[:24], 2))
    refused(wanted, pack_conv_weight(weight.half(), 2))
    refused(wanted, pack_conv_weight(weight, 4))
    refused(wanted, pack_conv_weight(weight.transpose(2, 3).reshape(40, 24, 9, 1), 2))  # as many bytes
    refused(wanted, good[:-1])
    refused(wanted, good.int())
    refused(wanted, torch.cat([good, good])[::2])
    refused(wanted, torch.zeros_like(good))
    refused(wanted, good[:0])
    refused("packed", weight)
    refused("packed", 3, (RuntimeError, TypeError))
    sparse_conv2d_(x, weight, None, active, out, **options, packed=good)


def test_weights_that_cannot_be_packed():
    for match, weight, groups in (
        ("weight: dtype", torch.zeros(4, 4, 3, 3, dtype=torch.int32), 1),
        ("weight: dtype", torch.zeros(4, 4, 3, 3, dtype=torch.float64), 1),
        ("weight: expected 4 dimensions, got 3", torch.zeros(4, 4, 3), 1),
        ("weight: expected 1 to 2.48 elements", torch.zeros(4, 0, 3, 3), 1),
        ("weight: expected 1 to 2.48 elements", torch.zeros(1).expand(2**28, 2**28, 2, 2), 1),
        ("groups: expected .*, got 3", torch.zeros(4, 4, 3, 3), 3),
        ("groups: expected .*, got 0", torch.zeros(4, 4, 3, 3), 0),
        ("groups: expected .*, got -1", torch.zeros(4, 4, 3, 3), -1),
    ):
        with pytest.raises(RuntimeError, match=f"pack_conv_weight: {match}"):
            pack_conv_weight(weight, groups)
    with pytest.raises(TypeError, match="pack_conv_weight: weight: expected .*, got NoneType"):
        pack_conv_weight(None)


# ---- runners pack by themselves
WRITES = {
    "in place": lambda conv: conv.weight.mul_(2),
    "a state dict": lambda conv: conv.load_state_dict({k: 2 * v for k, v in conv.state_dict().items()}),
    "through a view": lambda conv: conv.weight[:3].zero_(),
    "an optimizer": lambda conv: torch.optim.SGD([conv.weight], 1.0).step() if grad(conv) else None,
    "another parameter": lambda conv: setattr(conv, "weight", nn.Parameter(2 * conv.weight)),
    "other memory": lambda conv: setattr(conv.weight, "data", 2 * conv.weight.data),
}


def grad(conv):
    conv.weight.grad = torch.ones_like(conv.weight)
    return True


@pytest.mark.parametrize("write", WRITES)
def test_a_runner_sees_new_weights(write):
    conv = SparseConv2d(16, 24, 3, padding=1)
    x, mask = torch.rand(1, 16, 24, 24), torch.ones(1, 24, 24, dtype=torch.bool)
    run = sbnet.sparsify(conv, x, block=8)
    with torch.no_grad():
        before = run(x, mask).clone()
        torch.testing.assert_close(before, conv(x))
        WRITES[write](conv)
        assert not torch.equal(conv(x), before)
        torch.testing.assert_close(run(x, mask), conv(x))
        torch.testing.assert_close(run(x, mask), conv(x))


def test_parameters_of_inference_mode_are_refused():
    """PyTorch does not count what is written to them, and cannot capture them."""
    with torch.inference_mode():
        conv = SparseConv2d(16, 24, 3, padding=1)
    with pytest.raises(ValueError, match="model: expected parameters made outside of torch.inference_mode, got weight"):
        sbnet.sparsify(conv, torch.rand(1, 16, 24, 24), block=8)


def test_a_runner_packs_once(monkeypatch):
    from sbnet.graph.kinds import conv

    packed = []
    monkeypatch.setattr(conv, "pack_conv_weight", lambda w, g: packed.append(w) or pack_conv_weight(w, g))
    net = resnet18(weights=0).eval()
    run = net.capture(torch.zeros(1, 3, 64, 64))
    for density in (0.1, 1.0):
        run(torch.rand(1, 3, 64, 64), torch.rand(1, 64, 64) < density)
    assert len(packed) == 20  # convolutions of a ResNet-18


# ---- ONNX Runtime packs constant weights
def conv_model(node, weight_is):
    """`weight_is`: constant, an input, or both (a default that a run may replace)."""
    proto = node.proto()
    names = list(proto.input)
    weight = onnx.numpy_helper.from_array(node.inputs[1].numpy(), names[1])
    inputs = [
        value_info(n, onnx.helper.np_dtype_to_tensor_dtype(t.numpy().dtype), t.shape)
        for n, t in zip(names, node.inputs, strict=True)
        if n != names[1] or weight_is != "constant"
    ]
    outputs = [value_info(proto.output[0], onnx.TensorProto.FLOAT, None)]
    return model([proto], inputs, outputs, [] if weight_is == "an input" else [weight]), names


@pytest.mark.parametrize("weight_is", ["constant", "an input", "both"])
def test_onnx_runtime(weight_is):
    x, weight, active, shape, options = case("3x3", torch.float32)
    want = torch.zeros(shape).contiguous(memory_format=torch.channels_last)
    sparse_conv2d_(x, weight, None, active, want, **options)
    inputs = [nhwc(x), nhwc(weight).contiguous(), active.indices, active.count, active.block_map]
    node = Node("sparse_conv2d", inputs, {"bsize": [8, 8], "padding": [1, 1], "zero_outside": 1})
    made, names = conv_model(node, weight_is)
    run = session(made)
    feed = {n: t.numpy() for n, t in zip(names, inputs, strict=True) if n != names[1] or weight_is == "an input"}
    results = [None] * 4

    def call(k):
        results[k] = run.run(None, feed)[0]

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]  # the first run packs, for all
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for got in results:
        assert_bitwise(torch.from_numpy(np.moveaxis(got, 3, 1).copy()), want.contiguous())
    if weight_is != "constant":  # what a run is given counts
        (got,) = run.run(None, {**feed, names[1]: 2 * inputs[1].numpy()})
        assert_bitwise(torch.from_numpy(np.moveaxis(got, 3, 1).copy()), 2 * want.contiguous())
