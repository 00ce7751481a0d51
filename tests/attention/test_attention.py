"""block_attention, forward and backward, against float64: head sizes, blocks, layouts, lengths, dropout."""

import pytest
import torch

from sbnet import AttentionLayout, block_attention, reference
from sbnet.ops.attention.attention import block_attention_
from support.attention_cases import BLOCK_SIZES, check, make, random_blocks, random_layout
from support.helpers import FLOATS, assert_bitwise

FEW_DIMS = 16, 24, 40, 64, 80, 128, 136, 192, 256
DIMS = [d if d in FEW_DIMS else pytest.param(d, marks=pytest.mark.slow) for d in range(16, 257, 8)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_head_dimension(device, dim, dtype):
    """flash-attention #2623: the gradients at each head size, causal, and of random blocks of 64."""
    for layout in (AttentionLayout.causal(), random_layout(2, 150, 64, 0.7)):
        check(*make(device, dtype, length=150, dim=dim), layout, f"{dim} {layout}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_block_size(device, block, dtype):
    """Lengths that fill blocks and lengths that do not; bitmaps of each head, and shared; causal inside or not."""
    for length, heads, rule in ((256, 2, {}), (200, 1, {"causal": True}), (257, 2, {"causal": True, "prefix": 7})):
        layout = random_layout(heads, length, block, **rule)
        check(*make(device, dtype, length=length), layout, f"{block} {length}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        AttentionLayout.dense(),
        AttentionLayout.causal(),
        AttentionLayout.causal(diagonal=5, prefix=9),
        AttentionLayout.causal(diagonal=-40),
        AttentionLayout.local(7),
        AttentionLayout.local(100),
        AttentionLayout.union(AttentionLayout.local(8), AttentionLayout.strided(8)),
        AttentionLayout.union(AttentionLayout.local(3), AttentionLayout.strided(70)),
    ],
    ids=repr,
)
def test_rule(device, layout, dtype):
    """Rules, with as many keys as queries, more, fewer."""
    for length, k_length in ((140, 140), (33, 200), (200, 70), (2, 65)):
        check(*make(device, dtype, length=length, k_length=k_length), layout, f"{length} {k_length}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided(device, dtype):
    for length, stride in ((128, 1), (96, 8), (130, 13), (640, 5)):
        check(*make(device, dtype, length=length), AttentionLayout.strided(stride), f"{length} {stride}")
    check(*make(device, dtype, length=60, k_length=90), AttentionLayout.strided(3), "non-square")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [8, 32, 128])
def test_element_masks(device, block, dtype):
    """Bits from a callback, with empty blocks and full ones among them, alone and under a causal rule."""
    generator = torch.Generator().manual_seed(3)

    def mask(head, i, j):
        if (i + j) % 5 == 4:
            return torch.full((block, block), j % 2 == 0)
        return torch.rand(block, block, generator=generator) < 0.4

    length = 2 * block + 129 if block < 128 else 300
    for rule in ({}, {"causal": True}):
        blocks = random_blocks(2, -(-length // block), -(-length // block), 0.8)
        layout = AttentionLayout.from_callback(mask, blocks, block, **rule)
        check(*make(device, dtype, length=length), layout, str(rule))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grouped_heads(device, dtype):
    for heads, kv_heads in ((4, 2), (6, 1)):
        layout = random_layout(heads, 150, 32, causal=True)
        check(*make(device, dtype, heads=heads, kv_heads=kv_heads, length=150), layout, f"{heads} {kv_heads}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", ["bthd", "slice"])
def test_memory_orders(device, order, dtype):
    """Heads inside of positions, and slices: read in place, and answered in the order of q."""
    tensors = make(device, dtype, length=130, dim=64, order=order)
    out, _, *grads = check(*tensors, AttentionLayout.local(50), order)
    for got in (out, grads[0]):
        assert got.transpose(1, 2).is_contiguous()
    packed = [t.detach().contiguous() for t in tensors[:3]]
    assert_bitwise(block_attention(*packed, AttentionLayout.local(50)), out.contiguous(), order)


def test_elements_that_are_apart_or_unaligned(device):
    """Copied, not refused."""
    q, k, v, _ = (t.detach() for t in make(device, torch.float16, dim=64))
    want = block_attention(q, k, v, AttentionLayout.causal())
    apart = torch.empty(*q.shape, 2, dtype=q.dtype, device=device)[..., 0].copy_(q)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape).copy_(k)
    assert_bitwise(block_attention(apart, odd, v, AttentionLayout.causal()), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_heads_in_the_last_dimension(device, dtype):
    """The reference's layout, (B, T, heads * D), with fewer key heads too."""
    q, k, v = (torch.randn(2, t, f, device=device).to(dtype) for t, f in ((50, 128), (70, 64), (70, 64)))
    got, lse = block_attention(q, k, v, AttentionLayout.causal(20), heads=4, return_lse=True)
    apart = [t.view(2, t.shape[1], -1, 32).transpose(1, 2) for t in (q, k, v)]
    want, same = block_attention(*apart, AttentionLayout.causal(20), return_lse=True)
    assert_bitwise(got, want.transpose(1, 2).reshape(2, 50, 128))
    assert_bitwise(lse, same)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", [AttentionLayout.causal(), AttentionLayout.dense(), AttentionLayout.strided(5)])
def test_lengths(device, layout, dtype):
    """Padded batches: what lies past the lengths may hold NaN, and gets zeros."""
    q, k, v, grad = make(device, dtype, batch=4, length=150)
    q_lengths = torch.tensor([150, 0, 77, -5], dtype=torch.int32, device=device)
    k_lengths = torch.tensor([64, 150, 200, 9], dtype=torch.int32, device=device)
    options = {"q_lengths": q_lengths, "k_lengths": k_lengths}
    want = check(q, k, v, grad, layout, "lengths", **options)
    dirty = [t.detach().clone() for t in (q, k, v)]
    for n in range(4):
        dirty[0][n, :, max(int(q_lengths[n]), 0) :] = torch.nan
        for t in dirty[1:]:
            t[n, :, max(int(k_lengths[n]), 0) :] = torch.nan
    leaves = [t.requires_grad_() for t in dirty]
    out, lse = block_attention(*leaves, layout, return_lse=True, **options)
    for got, clean in zip((out, lse, *torch.autograd.grad(out, leaves, grad)), want, strict=True):
        assert not got.isnan().any()
        torch.testing.assert_close(got, clean, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_without_keys(device, dtype):
    """Zeros, minus infinity, zero gradients: no NaN."""
    layout = AttentionLayout.from_blocks([[1, 0, 1], [0, 0, 0], [0, 1, 0]], 32, causal=True)
    out, lse, dq, dk, dv = check(*make(device, dtype, length=96), layout)
    assert_bitwise(out[:, :, 32:64], torch.zeros_like(out[:, :, 32:64]))
    assert bool((lse[:, :, 32:64] == -torch.inf).all())
    assert_bitwise(dq[:, :, 32:64], torch.zeros_like(out[:, :, 32:64]))
    for grad in (dk, dv):
        assert_bitwise(grad[:, :, 64:], torch.zeros_like(grad[:, :, 64:]))
    nothing = AttentionLayout.from_blocks(torch.zeros(3, 3), 32)
    for got in check(*make(device, dtype, length=96), nothing):
        assert bool(((got == 0) | (got == -torch.inf)).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", [AttentionLayout.causal(), AttentionLayout.strided(3)], ids=repr)
def test_dropout(device, layout, dtype):
    """The very weights that Philox drops; a share p of them; none at p = 0."""
    tensors = make(device, dtype, heads=3, length=120)
    seed = torch.tensor([2**62 + 12345, -(2**40) - 7], device=device)
    check(*tensors, layout, "dropout", dropout_p=0.3, seed=seed)
    q, k, v = (t.detach() for t in tensors[:3])
    assert_bitwise(block_attention(q, k, v, layout, seed=seed), block_attention(q, k, v, layout))
    kept = reference.dropout_kept(seed, 0.3, 2, 3, 512, 512)
    assert abs(float(kept.float().mean()) - 0.7) < 0.002
    torch.manual_seed(1)
    a, b = (block_attention(q, k, v, layout, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert_bitwise(block_attention(q, k, v, layout, dropout_p=0.5), a)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_from_tensor(device, dtype):
    """A mask on the device, of each sequence and head, or shared between them; rules inside."""
    for batch, heads, block, rule in ((2, 3, 64, {}), (1, 3, 16, {"causal": True}), (2, 1, 128, {}), (1, 1, 8, {})):
        n = -(-190 // block)
        blocks = random_blocks(heads, n, n, 0.6, batch=batch).to(device)
        layout = AttentionLayout.from_tensor(blocks, block, **rule)
        tiles = blocks.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :190, :190]
        mask = tiles.expand(2, 3, -1, -1)
        if rule:
            mask = mask & torch.ones(190, 190, dtype=torch.bool, device=device).tril()
        check(*make(device, dtype, heads=3, length=190), layout, f"{batch} {heads}", mask=mask)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_through_lse(device, dtype):
    tensors = make(device, dtype, length=100)
    grad_lse = torch.randn(2, 2, 100, device=device)
    check(*tensors, AttentionLayout.local(30), "lse", grad_lse=grad_lse)
    q, k, v = tensors[:3]
    _, lse = block_attention(q, k, v, AttentionLayout.causal(), return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert_bitwise(dv, torch.zeros_like(dv))
    assert bool(dq.abs().sum() > 0)
    assert bool(dk.abs().sum() > 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_and_large_scores(device, dtype):
    """A scale of 0.5 with large values: weights of one key each, no overflow."""
    q, k, v, grad = make(device, dtype, length=100, dim=64)
    check(q, k, v, grad, AttentionLayout.causal(), "0.5", scale=0.5)
    with torch.no_grad():
        q.mul_(30)
    out = block_attention(q, k, v, AttentionLayout.causal(), scale=2.0)
    want = reference.block_attention(q.double(), k.double(), v.double(), AttentionLayout.causal(), 2.0)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)
    assert bool(out.isfinite().all())


def test_not_a_number_passes(device):
    """NaN in a query reaches its own output alone."""
    for dtype in FLOATS:
        q, k, v, _ = (t.detach().clone() for t in make(device, dtype, length=70))
        q[0, 1, 5, 3] = torch.nan
        out, lse = block_attention(q, k, v, AttentionLayout.local(10), return_lse=True)
        want = torch.zeros(2, 2, 70, dtype=torch.bool, device=device)
        want[0, 1, 5] = True
        assert_bitwise(out.isnan().all(-1), want)
        assert_bitwise(out.isnan().any(-1), want)
        assert_bitwise(lse.isnan(), want)


def test_empty(device):
    for shape in ((0, 2, 8, 16), (2, 2, 0, 16)):
        q = torch.zeros(shape, device=device, requires_grad=True)
        out = block_attention(q, q, q, AttentionLayout.causal())
        assert out.shape == shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == shape
    q, none = torch.ones(1, 1, 5, 16, device=device), torch.ones(1, 1, 0, 16, device=device)
    assert_bitwise(block_attention(q, none, none, AttentionLayout.dense()), torch.zeros_like(q))


def test_one_key(device):
    """The gradients of a query and its only key are 0: in float32 exactly, as PyTorch has it."""
    for dtype in FLOATS:
        q, k, v, grad = make(device, dtype, length=70, dim=64)
        out = block_attention(q, k, v, AttentionLayout.local(1))
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        assert_bitwise(out, v.detach())
        assert_bitwise(dv, grad)
        for got in (dq, dk):
            assert float(got.abs().max()) <= (0 if dtype == torch.float32 else 1e-4)


def test_same_call_same_bits(device):
    """Both directions, by the deterministic form."""
    layout = random_layout(2, 400, 32, causal=True)
    for dtype in FLOATS:
        q, k, v, grad = make(device, dtype, length=400, dim=64)
        results = []
        for _ in range(2):
            out = block_attention(q, k, v, layout, deterministic=True)
            results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
        for a, b in zip(*results, strict=True):
            assert_bitwise(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_in_place_gives_the_same_bits(device, dtype):
    x = torch.randn(2, 70, 3 * 64, device=device).to(dtype)
    q, k, v = x.split(64, 2)
    lengths = torch.tensor([33, 70], dtype=torch.int32, device=device)
    layout = AttentionLayout.dense()
    want = block_attention(q, k, v, layout, 0.2, heads=2, q_lengths=lengths, k_lengths=lengths)
    out = torch.full((2, 70, 64), torch.nan, dtype=dtype, device=device)
    assert block_attention_(q, k, v, layout, 0.2, (lengths, lengths), 2, out) is out
    assert_bitwise(out, want)
