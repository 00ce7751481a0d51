"""compile, export, autocast, CUDA graphs and bad input of block_attention."""

import pytest
import torch

from sbnet import AttentionLayout, block_attention
from support.attention_cases import make, random_blocks, random_layout
from support.helpers import FLOATS, assert_bitwise, captured
from support.refusals import OPS, refused, zeros

LAYOUTS = {
    "rule": lambda device: AttentionLayout.local(20),
    "strided": lambda device: AttentionLayout.strided(8),
    "fixed": lambda device: AttentionLayout.fixed(64, 2, 1, 32),
    "blocks": lambda device: random_layout(2, 128, 32, causal=True),
    "masks": lambda device: AttentionLayout.from_mask(torch.rand(2, 128, 128) < 0.3, 32),
    "tensor": lambda device: AttentionLayout.from_tensor(random_blocks(2, 4, 4, batch=2).to(device), 32),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device, kind, dynamic):
    """A layout from outside, and one made of a mask inside; forward and backward."""
    torch._dynamo.reset()
    q, k, v, grad = make(device, length=128)
    if kind == "tensor":
        blocks = random_blocks(2, 4, 4, batch=2).to(device)

        def f(q, k, v, blocks):
            return block_attention(q, k, v, AttentionLayout.from_tensor(blocks, 32), return_lse=True)
    else:
        layout, blocks = LAYOUTS[kind](torch.device(device)), None

        def f(q, k, v, blocks):
            return block_attention(q, k, v, layout, return_lse=True)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for _ in range(2):
        if blocks is not None:
            blocks = ~blocks
        got, want = compiled(q, k, v, blocks), f(q, k, v, blocks)
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b)
        grads = [torch.autograd.grad(y[0], (q, k, v), grad) for y in (got, want)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_a_layout_is_a_pytree_in_a_compiled_function(device):
    torch._dynamo.reset()
    q, k, v, _ = make(device, length=128)
    compiled = torch.compile(lambda q, k, v, a: block_attention(q, k, v, a), fullgraph=True, backend="aot_eager")
    for kind in LAYOUTS:
        layout = LAYOUTS[kind](torch.device(device))
        assert_bitwise(compiled(q, k, v, layout), block_attention(q, k, v, layout))


@pytest.mark.parametrize("kind", ["rule", "strided", "fixed", "tensor"])
def test_export(device, kind):
    class Net(torch.nn.Module):
        def forward(self, q, k, v, blocks):
            layout = AttentionLayout.from_tensor(blocks, 32) if kind == "tensor" else LAYOUTS[kind](q.device)
            return block_attention(q, k, v, layout)

    arguments = *(t.detach() for t in make(device, length=128)[:3]), random_blocks(2, 4, 4, batch=2).to(device)
    program = torch.export.export(Net(), arguments)
    assert_bitwise(program.module()(*arguments), Net()(*arguments))


def test_autocast(device):
    q, k, v, _ = make(device, length=64)
    with torch.autocast(device, torch.bfloat16):
        y = block_attention(q, k, v, AttentionLayout.causal())
    assert y.dtype == torch.bfloat16
    assert_bitwise(y, block_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), AttentionLayout.causal()))
    assert torch.autograd.grad(y.sum(), q)[0].dtype == torch.float32


def test_second_derivative_is_refused(device):
    q, k, v, _ = make(device, length=64)
    (dq,) = torch.autograd.grad(block_attention(q, k, v, AttentionLayout.causal()).sum(), q, create_graph=True)
    refused("one backward pass", torch.autograd.grad, dq.sum(), q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuda_graph_with_masks_that_change(dtype):
    """Forward and backward captured once; every replay takes the mask, lengths and seed of its moment."""
    q, k, v, grad = make("cuda", dtype, length=256, dim=64)
    blocks = random_blocks(2, 4, 4, batch=2).cuda()
    lengths = torch.full((2,), 256, dtype=torch.int32, device="cuda")
    seed = torch.tensor([1, 2], device="cuda")

    def step():
        layout = AttentionLayout.from_tensor(blocks, 64, causal=True)
        options = {"k_lengths": lengths, "dropout_p": 0.1, "seed": seed, "deterministic": True}
        out = block_attention(q, k, v, layout, **options)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    graph, results = captured(step)
    for _ in range(3):
        blocks.copy_(torch.rand(2, 2, 4, 4, device="cuda") < 0.6)
        lengths.copy_(torch.randint(0, 257, (2,)))
        seed.add_(5)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert_bitwise(got, want)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    """A layout made of a mask, forward and backward return while the stream is held."""
    q, k, v, grad = make("cuda", torch.float16, length=256, dim=64)
    blocks = random_blocks(2, 4, 4, batch=2).cuda()
    for _ in range(2):
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)
        done.record()
        out = block_attention(q, k, v, AttentionLayout.from_tensor(blocks, 64, causal=True))
        torch.autograd.grad(out, (q, k, v), grad)
        held = not done.query()
    assert held


# ---- bad input
def test_bad_arguments(device):
    causal = AttentionLayout.causal()
    q, k = zeros(2, 4, 32, 32, device=device), zeros(2, 2, 40, 32, device=device)
    bad = [
        ("q: list|Tensor", ([1], k, k, causal), {}),
        ("layout: expected", (q, k, k, "causal"), {}),
        ("expected 4 dimensions", (q[0, 0], k, k, causal), {}),
        ("heads: expected", (q[0], k[0], k[0], causal), {}),
        ("heads: expected", (q[0], k[0], k[0], causal), {"heads": 5}),
        ("k: expected", (q, k[:1], k[:1], causal), {}),
        ("k: expected", (q, k[..., :16], k[..., :16], causal), {}),
        ("v: expected", (q, k, k[:, :, :5], causal), {}),
        ("k: expected", (q, k.half(), k.half(), causal), {}),
        ("float32, float16", (q.double(), k.double(), k.double(), causal), {}),
        ("head dimension", (q[..., :8], k[..., :8], k[..., :8], causal), {}),
        ("head dimension", (q[..., :20], k[..., :20], k[..., :20], causal), {}),
        ("number of heads", (q[:, :3], k, k, causal), {}),
        ("scale: expected", (q, k, k, causal, float("nan")), {}),
        ("dropout_p", (q, k, k, causal), {"dropout_p": 1.0}),
        ("seed", (q, k, k, causal), {"dropout_p": 0.5, "seed": zeros(2, device=device)}),
        ("q_lengths", (q, k, k, causal), {"q_lengths": zeros(2, device=device).long()}),
        ("k_lengths", (q, k, k, causal), {"k_lengths": zeros(3, device=device).int()}),
        ("1 or 2 batches", (q, k, k, AttentionLayout.from_tensor(zeros(3, 1, 4, 5, device=device).bool(), 8)), {}),
        (
            "layout: expected one for 32 queries",
            (q, k, k, AttentionLayout.from_tensor(zeros(2, 1, 5, 5, device=device).bool(), 8)),
            {},
        ),
    ]
    for match, arguments, options in bad:
        refused(match, block_attention, *arguments, **options)


def test_raw_layout_numbers(device):
    """Whatever the six numbers are: refused, or computed without a fault."""
    q, grad = torch.ones(1, 1, 70, 16, device=device), torch.ones(1, 1, 70, 16, device=device)
    for at in range(6):
        for value in (-1, 0, 3, 64, 2**29, 2**30, 2**31 - 1, -(2**31), 2**40, -(2**62)):
            numbers = [0, 5, 0, 3, 1, 64]
            numbers[at] = value
            arguments = *[None] * 7, numbers, 0.5, 0.0, True
            try:
                out, lse, sums = OPS.block_attention(q, q, q, *arguments)
            except RuntimeError:
                continue
            OPS.block_attention_backward(grad, None, out, lse, sums, q, q, q, *arguments)
    if device == "cuda":
        torch.cuda.synchronize()


def test_raw_tensors_of_garbage(device):
    """Bits past the last block, indices of no mask: never followed."""
    q = torch.ones(1, 2, 72, 16, device=device)
    rows = torch.full((1, 1, 9, 1), -1, dtype=torch.int32, device=device)
    index = torch.randint(-(2**31), 2**31 - 1, (1, 9, 9), device=device).int()
    masks = torch.zeros(3, 8, 1, dtype=torch.int32, device=device)
    numbers = [1 << 30, 2**31 - 1, 0, 0, 1, 8]
    out, lse, sums = OPS.block_attention(q, q, q, rows, rows, index, masks, None, None, None, numbers, 1.0, 0.0, True)
    torch.testing.assert_close(out, q)
    rest = rows, rows, index, masks, None, None, None, numbers, 1.0, 0.0, True
    OPS.block_attention_backward(q, lse, out, lse, sums, q, q, q, *rest)
    refused("rows", OPS.block_attention, q, q, q, rows[:, :, :8], rows, *[None] * 5, numbers, 1.0, 0.0, True)
    refused("columns", OPS.block_attention, q, q, q, rows, None, *[None] * 5, numbers, 1.0, 0.0, True)
    refused("masks", OPS.block_attention, q, q, q, rows, rows, index, None, *[None] * 3, numbers, 1.0, 0.0, True)
    refused(
        "with any masks", OPS.block_attention, q, q, q, None, None, index, masks, *[None] * 3, numbers, 1.0, 0.0, True
    )
    refused("blocks of 64", OPS.block_attention, q, q, q, *[None] * 7, numbers, 1.0, 0.0, True)


def test_other_devices_are_refused():
    q = zeros(1, 1, 8, 16)
    with pytest.raises(RuntimeError):
        block_attention(q, q.to("meta"), q, AttentionLayout.causal())
