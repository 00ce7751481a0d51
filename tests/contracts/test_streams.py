"""The ops on CUDA: graphs, streams, no host sync, a second device; CPU and CUDA agree."""

import functools
import time

import pytest
import torch
import torch.nn.functional as F

import sbnet
from sbnet import (
    ActiveBlocks,
    BlockGrid,
    fringe,
    reduce_mask,
    sparse_avg_pool2d,
    sparse_avg_pool2d_,
    sparse_bottleneck2d,
    sparse_bottleneck2d_,
    sparse_conv2d,
    sparse_conv2d_,
    sparse_gather,
    sparse_max_pool2d,
    sparse_max_pool2d_,
    sparse_scatter,
    sparse_scatter_,
)
from support.chain import Chain, assert_same_chain, chain_inputs
from support.helpers import FLOATS, assert_bitwise, laid_out, random_active, tensor
from support.op_samples import op_samples


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuda_graph_with_changing_masks(dtype):
    """One capture; masks of every density and new inputs between replays, empty ones too."""
    size = (50, 88)
    model_weights = [tensor((64, 64, 3, 3), dtype, "cuda") / 24 for _ in range(3)]
    depthwise = tensor((64, 1, 3, 3), dtype, "cuda") / 3
    bottleneck = [
        t.contiguous() for t in (model_weights[0][..., :1, :1], model_weights[1], model_weights[2][..., :1, :1])
    ]
    x = laid_out(tensor((2, 64, *size), dtype, "cuda"), "channels_last")
    mask = torch.zeros(2, *size, device="cuda")
    grid = BlockGrid.cover(size, 16)
    first, second, third = (torch.empty_like(x) for _ in range(3))

    def step():
        active = reduce_mask(mask, grid, 0.5)
        edge = fringe(active, active, size, 3, 1, 1)
        sparse_conv2d_(x, model_weights[0], None, active, first, padding=1, activation="relu", fringe=edge)
        sparse_conv2d_(first, depthwise, None, active, second, padding=1, groups=64, fringe=edge)
        sparse_max_pool2d_(second, active, third, 3, 1, 1, fringe=edge)
        sparse_avg_pool2d_(third, active, second, 3, 1, 1, fringe=edge)
        sparse_bottleneck2d_(second, bottleneck, None, active, third, fringe=edge)
        sparse_bottleneck2d_(third, bottleneck, None, active, second)
        sparse_conv2d_(second, model_weights[1], None, active, third, padding=1, residual=x)
        blocks = F.conv2d(sparse_gather(x, active, grid=grid.conv_input(3, 1, 1)), model_weights[2])
        y = sparse_scatter(blocks, active, torch.zeros_like(x))
        z = sparse_scatter(sparse_gather(y, active, True), active, y, add=True)
        return active, sparse_conv2d(z, model_weights[1], None, active, stride=1, padding=1)

    def eager():
        active, y = step()
        return [t.clone() for t in (active.indices, active.count, active.block_map, y)], [
            torch.where(active.pixel_mask(size), t, 0) for t in (first, second, third)
        ]

    eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, out = step()
    for density in (0.0, 0.3, 1.0, 0.001, 0.0, 0.05):
        mask.copy_((torch.rand(mask.shape, device="cuda") < density).float())
        x.copy_(tensor(x.shape, dtype, "cuda"))
        want, want_planes = eager()
        for t in (first, second, third):
            t.fill_(float("nan"))
        graph.replay()
        got = [captured.indices, captured.count, captured.block_map, out]
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b, f"density {density}")
        for a, b in zip((first, second, third), want_planes, strict=True):
            assert_bitwise(torch.where(captured.pixel_mask(size), a, 0), b, f"density {density}")


def busy_calls(device="cuda"):
    grid = BlockGrid.cover((50, 88), 16)
    active = random_active(grid, 2, 0.5, device)
    halved = random_active(BlockGrid.cover((25, 44), 8), 2, 0.5, device)
    doubled = random_active(BlockGrid.cover((100, 176), 16), 2, 0.5, device)
    odd = random_active(BlockGrid.cover((50, 88), 10), 2, 0.5, device)
    halo = grid.conv_input(3, 1, 1)
    squares = sbnet.ConvLayout.from_mask(torch.tensor([[1, 0, 1, 0], [1, 1, 0, 1]] * 2), 64, 64, 16, (3, 3))
    calls = {}
    for dtype in FLOATS:
        x = laid_out(tensor((2, 64, 50, 88), dtype, device), "channels_last")
        weight = laid_out(tensor((64, 64, 3, 3), dtype, device), "channels_last")
        depthwise, out = tensor((64, 1, 3, 3), dtype, device), torch.empty_like(x)
        bottleneck = [weight[:16, :, :1, :1], weight[:16, :16], weight[:, :16, :1, :1]]
        squeeze = [weight[:16, :, 0, 0].contiguous(), weight[:, :16, 0, 0].contiguous()]
        filters = tensor((squares.weights,), dtype, device)
        mask, blocks = torch.rand(2, 50, 88, device=device), tensor((active.capacity, 64, 16, 16), dtype, device)
        wide, cells = tensor((active.capacity, 64, 18, 18), dtype, device), torch.empty_like(x[:, :, :3, :5])
        edge = fringe(active, active, (50, 88), 3, 1, 1)
        calls |= {
            f"{name} {dtype}": call
            for name, call in {
                "reduce_mask": lambda mask=mask: reduce_mask(mask, grid, 0.9),
                "reduce_mask average": lambda mask=mask: reduce_mask(mask, halo, 0.5, True),
                "fringe": lambda: fringe(active, active, (50, 88), 3, 1, 1),
                "motion_mask": lambda x=x: sbnet.motion_mask(x, x[:, 0].float().contiguous()),
                "mask_pyramid": lambda mask=mask: sbnet.mask_pyramid(
                    mask, [(50, 88, 16), (25, 44, 8)], 0.9, [(0, [(0, 3, 1, 1), (1, 3, 2, 1)])]
                ),
                "gather": lambda x=x: sparse_gather(x, active, grid=halo),
                "gather transpose": lambda x=x: sparse_gather(x, active, True),
                "scatter": lambda x=x, b=blocks: sparse_scatter(b, active, x),
                "scatter_": lambda out=out, b=blocks: sparse_scatter_(b, active, out),
                "scatter add overlap": lambda out=out, b=wide: sparse_scatter_(b, active, out, halo, add=True),
                "scatter add atomic": lambda out=out, b=wide: sparse_scatter_(
                    b, active, out, halo, add=True, atomic=True
                ),
                "conv": lambda x=x, w=weight: sparse_conv2d(x, w, None, active, padding=1),
                "conv_": lambda x=x, w=weight, o=out, e=edge: sparse_conv2d_(
                    x, w, None, active, o, padding=1, fringe=e
                ),
                "conv depthwise": lambda x=x, w=depthwise: sparse_conv2d(x, w, None, active, padding=1, groups=64),
                "conv stride 2": lambda x=x, w=weight, a=halved: sparse_conv2d(x, w, None, a, padding=1, stride=2),
                "conv float8": lambda x=x, w=weight: sbnet.sparse_conv2d_quantized(
                    x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), w[:, 0, 0, 0].float(), None, active, padding=1
                ),
                "conv int8": lambda x=x, w=weight: sbnet.sparse_conv2d_quantized(
                    x.to(torch.int8), w.to(torch.int8), w[:, 0, 0, 0].float(), None, active, padding=1
                ),
                "conv transposed": lambda x=x, w=weight, a=doubled: sbnet.sparse_conv_transpose2d(
                    x, w, None, a, stride=2, padding=1, output_padding=1
                ),
                "conv transposed_ by pixel": lambda x=x, w=weight, o=out, e=edge: sbnet.sparse_conv_transpose2d_(
                    x[:, :, :25, :44],
                    w[:, :, :2, :2],
                    None,
                    active,
                    o,
                    stride=2,
                    dilation=2,
                    padding=1,
                    output_padding=1,
                    fringe=e,
                ),
                "bottleneck": lambda x=x, w=bottleneck: sparse_bottleneck2d(x, w, None, active),
                "bottleneck odd blocks": lambda x=x, w=bottleneck: sparse_bottleneck2d(x, w, None, odd),
                "bottleneck_": lambda x=x, w=bottleneck, o=out, e=edge: sparse_bottleneck2d_(
                    x, w, None, active, o, fringe=e
                ),
                "max pool": lambda x=x, a=halved: sparse_max_pool2d(x, a, 3, 2, 1),
                "max pool_": lambda x=x, o=out, e=edge: sparse_max_pool2d_(x, active, o, 3, 1, 1, fringe=e),
                "average pool": lambda x=x, a=halved: sparse_avg_pool2d(x, a, 2),
                "average pool_": lambda x=x, o=out, e=edge: sparse_avg_pool2d_(x, active, o, 5, 1, 2, fringe=e),
                "global pool": lambda x=x: sbnet.sparse_adaptive_avg_pool2d(x, active),
                "squeeze and excite": lambda x=x, w=squeeze: sbnet.sparse_squeeze_excite2d(
                    x, active, w[0], None, w[1], None
                ),
                "adaptive pool_": lambda x=x, o=cells: sbnet.sparse_adaptive_max_pool2d_(x, active, o),
                "group norm": lambda x=x: sbnet.sparse_group_norm(x, active, 2),
                "group norm_": lambda x=x, o=out, e=edge: sbnet.sparse_group_norm_(x, active, o, 1, fringe=e),
                "layer norm": lambda x=x: sbnet.sparse_layer_norm2d(x, active),
                "softmax_": lambda x=x, o=out, e=edge: sbnet.sparse_softmax2d_(x, active, o, fringe=e),
                "rearrange": lambda x=x, a=doubled: sbnet.sparse_rearrange(x, a, up=2),
                "rearrange_": lambda x=x, o=out, e=edge: sbnet.sparse_rearrange_(
                    x, active, o, groups=2, pad=(1, -1, 0, 0), fringe=e
                ),
                "pointwise": lambda x=x: sbnet.sparse_pointwise(x, active, "save s; sigmoid; mul s"),
                "pointwise_": lambda x=x, o=out, e=edge: sbnet.sparse_pointwise_(
                    x, active, "mul a; clamp 0 1", x, out=o, fringe=e
                ),
                "resize": lambda x=x, a=doubled: sbnet.sparse_resize2d(x, a, scale_factor=2, mode="bilinear"),
                "resize_": lambda x=x, o=out, e=edge: sbnet.sparse_resize2d_(x, active, o, mode="bicubic", fringe=e),
                "blocksparse_conv": lambda x=x, w=filters: sbnet.blocksparse_conv(x, w, squares),
                "blocksparse_conv, active blocks": lambda x=x, w=filters: sparse_conv2d(
                    x, w, None, active, layout=squares, padding=1
                ),
                "conv odd blocks": lambda x=x, w=weight, a=odd: sparse_conv2d(x, w, None, a, padding=1),
            }.items()
        }
    return calls


def sample_calls(device="cuda"):
    """The sample calls of every op."""
    return {
        f"{name}, sample {n}": functools.partial(getattr(torch.ops.sbnet, name), *arguments)
        for name, calls in op_samples(device).items()
        for n, arguments in enumerate(calls)
    }


@pytest.mark.gpu
def test_no_op_syncs_the_host():
    """Every call returns while the stream is held busy, and none trips PyTorch's sync detector."""
    calls = busy_calls() | sample_calls()
    for call in calls.values():  # first calls load modules and fill the allocator's cache
        call()
        call()
    torch.cuda.synchronize()
    slow = {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, call in calls.items():
            torch.cuda._sleep(int(1e9))  # about half a second
            marker = torch.cuda.Event()
            marker.record()
            start = time.perf_counter()
            result = call()
            if marker.query():
                slow[name] = time.perf_counter() - start
            del result
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not slow, f"waited for the stream: {slow}"


@pytest.mark.gpu
def test_ops_run_on_the_current_stream():
    """Behind a busy side stream the result is not there yet; the default stream is never used."""
    x = laid_out(tensor((1, 64, 64, 64), torch.float16, "cuda"), "channels_last")
    weight = tensor((64, 64, 3, 3), torch.float16, "cuda") / 24
    active = random_active(BlockGrid.cover((64, 64), 16), 1, 1.0, "cuda")
    want = sparse_conv2d(x, weight, None, active, padding=1)
    outs = [torch.full_like(x, 7.0) for _ in range(3)]

    def chain() -> ActiveBlocks:
        sparse_conv2d_(x, weight, None, active, outs[0], padding=1)
        sparse_scatter_(sparse_gather(outs[0], active), active, outs[1])
        return reduce_mask(outs[1][:, 0].isfinite(), active.grid)

    chain()  # a kernel's first launch loads it, which may wait for the device
    for out in outs:
        out.fill_(7.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(1e9))
        again = chain()
    assert not side.query()
    copy = outs[0].clone()  # the current stream does not wait for the side stream
    torch.cuda.current_stream().synchronize()
    assert not side.query()
    assert bool((copy == 7).all())
    side.synchronize()
    assert_bitwise(outs[0], want)
    assert_bitwise(outs[1], want)
    assert int(again.count) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_two_streams_ten_thousand_launches_each(dtype):
    """CTAs that wait for one another must not starve when two launches share the device."""
    sides = [torch.cuda.Stream() for _ in range(2)]
    weight = laid_out(tensor((64, 64, 3, 3), dtype, "cuda") / 24, "channels_last")
    cases = []
    for seed in range(2):
        x = laid_out(tensor((1, 64, 208, 208), dtype, "cuda"), "channels_last")
        active = random_active(BlockGrid.cover((208, 208), 16), 1, (0.3, 1.0)[seed], "cuda")
        edge = fringe(active, active, (208, 208), 3, 1, 1)
        out, want = torch.zeros_like(x), torch.zeros_like(x)
        sparse_conv2d_(x, weight, None, active, want, padding=1, activation="relu", fringe=edge)
        cases.append((x, active, out, edge, want))
    torch.cuda.synchronize()
    for n in range(10_000):
        for side, (x, active, out, edge, _) in zip(sides, cases, strict=True):
            with torch.cuda.stream(side):
                sparse_conv2d_(x, weight, None, active, out, padding=1, activation="relu", fringe=edge)
        if n % 1000 == 999:  # a deadlock shows as a timeout, not as a test that never ends
            deadline = time.monotonic() + 60
            while not all(s.query() for s in sides):
                assert time.monotonic() < deadline, f"hangs after {n} launches"
                time.sleep(0.001)
    for _, _, out, _, want in cases:
        assert_bitwise(out, want)


@pytest.mark.gpu
def test_two_graphs_on_two_streams():
    weight = laid_out(tensor((64, 64, 3, 3), torch.float16, "cuda") / 24, "channels_last")
    sides, graphs, outs, wants = [torch.cuda.Stream() for _ in range(2)], [], [], []
    inputs = []  # a graph does not keep what it reads alive
    for seed in range(2):
        x = laid_out(tensor((1, 64, 208, 208), torch.float16, "cuda"), "channels_last")
        active = random_active(BlockGrid.cover((208, 208), 16), 1, (0.3, 1.0)[seed], "cuda")
        a, b = torch.zeros_like(x), torch.zeros_like(x)
        inputs.append((x, active, a))
        graph = torch.cuda.CUDAGraph()

        def step(x=x, a=a, b=b, active=active):
            for _ in range(20):
                sparse_conv2d_(x, weight, None, active, a, padding=1, activation="relu")
                sparse_conv2d_(a, weight, None, active, b, padding=1, activation="relu")

        step()
        torch.cuda.synchronize()
        wants.append(b.clone())
        with torch.cuda.graph(graph):
            step()
        graphs.append(graph)
        outs.append(b)
    for _ in range(50):
        for side, graph in zip(sides, graphs, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    for out, want in zip(outs, wants, strict=True):
        assert_bitwise(out, want)


@pytest.mark.gpu
def test_cpu_and_cuda_agree():
    """The same lists and copies bitwise, convolutions within rounding."""
    x, mask = chain_inputs("cpu")
    grid = BlockGrid.cover((20, 27), 8)
    halo = grid.conv_input(3, 1, 1)
    cpu, cuda = reduce_mask(mask, grid, 0.9), reduce_mask(mask.cuda(), grid, 0.9)
    for name in ("indices", "count", "total", "block_map"):
        assert_bitwise(getattr(cuda, name).cpu(), getattr(cpu, name))
    blocks = [sparse_gather(x, cpu, grid=halo), sparse_gather(x.cuda(), cuda, grid=halo)]
    assert_bitwise(blocks[1].cpu(), blocks[0])
    for add_dtype in FLOATS:
        sums = [
            sparse_scatter(b.to(add_dtype), a, t.to(add_dtype), halo, add=True)
            for b, a, t in zip(blocks, (cpu, cuda), (x, x.cuda()), strict=True)
        ]
        assert_bitwise(sums[1].cpu(), sums[0], f"overlapping add {add_dtype}")
    model = Chain()
    with torch.no_grad():
        torch.testing.assert_close(
            model.cuda()(x.cuda(), mask.cuda())[0].cpu(), Chain()(x, mask)[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.gpu
def test_the_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, mask = chain_inputs("cuda:1")
    model = Chain().to("cuda:1")
    got = model(x, mask)
    assert got[0].device == x.device
    assert_same_chain(got, Chain().to("cuda:1")(x, mask))
