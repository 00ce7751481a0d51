"""AttentionLayout: what each constructor shows, by the formulas of Sparse Transformers; equality, pickling, errors."""

import copy
import pickle

import pytest
import torch

from sbnet import AttentionLayout, block_attention, reference
from support.attention_cases import check, make
from support.refusals import refused


def grid(length):
    return torch.arange(length)[:, None], torch.arange(length)[None]


def strided_mask(length, stride):
    q, k = grid(length)
    return (k <= q) & ((q - k) % stride == 0)


def local_mask(length, width):
    q, k = grid(length)
    return (k <= q) & (q - k < width)


def fixed_mask(
    length,
    l,  # noqa: E741
    bs,
    num_verts,
    vertsize,
    head,
):
    """As written in the reference: V = [s-1 ... 0] in groups of `vertsize` blocks, group head % num_verts."""
    s = l // bs
    order = list(range(s - 1, -1, -1))
    group = order[head % num_verts * vertsize :][:vertsize]
    q, k = grid(length)
    vertical = torch.isin((k % l) // bs, torch.tensor(group))
    return (k <= q) & ((q // l == k // l) | vertical)


OF_THE_REFERENCE = {"cuda": 4, "cpu": 1}  # sequences; on a CPU each takes seconds, and test_attention.py has two


@pytest.mark.parametrize("mode", ["local", "strided"])
def test_modes_of_the_reference(device, mode):
    """B4 T1024 D256, 4 heads, local_attn_ctx 32."""
    layout, mask = {
        "local": (AttentionLayout.local(32), local_mask(1024, 32)),
        "strided": (AttentionLayout.strided(32), strided_mask(1024, 32)),
    }[mode]
    assert torch.equal(layout.visible(4, 1024, 1024)[0], mask)
    for dtype in (torch.float32, torch.float16):
        check(
            *make(device, dtype, batch=OF_THE_REFERENCE[device], heads=4, length=1024, dim=64), layout, mode, mask=mask
        )


def test_fixed_of_the_reference(device):
    """l = 128, blocks of 32, 4 verticals of one block: 192 blocks a head."""
    layout = AttentionLayout.fixed(128, num_verts=4, vertsize=1, block_size=32)
    mask = torch.stack([fixed_mask(1024, 128, 32, 4, 1, h) for h in range(4)])
    assert torch.equal(layout.visible(4, 1024, 1024), mask)
    blocks = layout._resolve(4, 1024, 1024)._blocks
    assert [int(b.sum()) for b in blocks] == [192] * 4
    for dtype in (torch.float32, torch.float16):
        check(
            *make(device, dtype, batch=OF_THE_REFERENCE[device], heads=4, length=1024, dim=64),
            layout,
            "fixed",
            mask=mask,
        )


@pytest.mark.parametrize(
    ("l", "bs", "num_verts", "vertsize", "heads"),
    [(64, 16, 1, 1, 3), (64, 16, 2, 2, 4), (64, 8, 4, 1, 8), (128, 32, 2, 1, 2), (32, 32, 1, 1, 1)],
)
def test_fixed(l, bs, num_verts, vertsize, heads):  # noqa: E741
    layout = AttentionLayout.fixed(l, num_verts, vertsize, bs)
    shown = layout.visible(heads, 256, 256).expand(heads, -1, -1)
    for h in range(heads):
        assert torch.equal(shown[h], fixed_mask(256, l, bs, num_verts, vertsize, h))


def test_merged_head():
    """Local or strided, in either order: a rule, for any length."""
    for parts in ((8, 8), (5, 12)):
        a, b = AttentionLayout.local(parts[0]), AttentionLayout.strided(parts[1])
        merged = AttentionLayout.union(a, b)
        assert merged == AttentionLayout.union(b, a)
        assert not merged.has_blocks
        want = local_mask(70, parts[0]) | strided_mask(70, parts[1])
        assert torch.equal(merged.visible(1, 70, 70)[0], want)


def test_union(device):
    """Of anything: patterns, blocks of each head, rules."""
    parts = (
        AttentionLayout.fixed(64, 2, 1, 16),
        AttentionLayout.local(40),
        AttentionLayout.from_blocks(torch.eye(4).flip(0), 32),
    )
    layout = AttentionLayout.union(*parts)
    mask = torch.stack([p.visible(2, 128, 128).expand(2, -1, -1) for p in parts]).any(0)
    assert torch.equal(layout.visible(2, 128, 128), mask)
    check(*make(device, length=128), layout, "union", mask=mask)
    assert AttentionLayout.union(parts[0]) is parts[0]


def test_from_callback(device):
    """The masks of sparse_attention's tests: a prefix of a = 7 with scale 0.5; each head its own; calls counted."""
    for bs in (8, 16, 32, 64):
        length, calls = 16 * bs, []
        q, k = grid(length)
        want = (k < 7) | (k <= q)

        def mask(head, i, j, bs=bs, calls=calls):
            calls.append((head, i, j))
            q, k = i * bs + torch.arange(bs)[:, None], j * bs + torch.arange(bs)[None]
            return (k < 7) | (k <= q)

        blocks = torch.ones(16, 16).tril()
        layout = AttentionLayout.from_callback(mask, blocks, bs)
        assert sorted(calls) == [(0, *at) for at in blocks.nonzero().tolist()]
        rule = AttentionLayout.from_blocks(blocks, bs, causal=True, prefix=7)
        for a in (layout, rule):
            assert torch.equal(a.visible(2, length, length)[0], want)
        if bs <= 32:
            for heads in (2, 4):
                case = make(device, batch=2, heads=heads, length=length, dim=128 // heads)
                check(*case, layout, "callback", mask=want, scale=0.5)
                check(*case, rule, "rule", mask=want, scale=0.5)


def test_from_mask(device):
    mask = torch.rand(2, 100, 70) < 0.2
    mask[:, 40:80] = False
    for block in (8, 64):
        layout = AttentionLayout.from_mask(mask, block)
        assert torch.equal(layout.visible(2, 100, 70), mask)
        check(*make(device, length=100, k_length=70), layout, "mask", mask=mask)


def test_from_tensor_shows_what_it_was_given(device):
    blocks = torch.rand(2, 3, 5, 40, device=device) < 0.5
    layout = AttentionLayout.from_tensor(blocks, 8, causal=True, diagonal=100, band=50)
    q, k = torch.arange(40)[:, None], torch.arange(320)[None]
    want = blocks.cpu().repeat_interleave(8, -1).repeat_interleave(8, -2) & (k <= q + 100) & (k > q + 50)
    assert torch.equal(layout.visible(3, 40, 320), want)
    assert layout.columns.shape == (2, 3, 40, 1)
    bits = layout.columns.cpu()[..., None] >> torch.arange(5) & 1
    assert torch.equal(bits.bool().flatten(-2), blocks.cpu().transpose(-1, -2))
    parts, spec = torch.utils._pytree.tree_flatten(layout)
    assert len(parts) == 2
    assert torch.utils._pytree.tree_unflatten(parts, spec).rule == layout.rule


def test_equality_hash_pickle():
    tril = torch.ones(4, 4).tril()
    made = [
        lambda: AttentionLayout.dense(),
        lambda: AttentionLayout.causal(prefix=3),
        lambda: AttentionLayout.local(9),
        lambda: AttentionLayout.strided(9),
        lambda: AttentionLayout.fixed(64, 2),
        lambda: AttentionLayout.union(AttentionLayout.fixed(64), AttentionLayout.local(9)),
        lambda: AttentionLayout.from_blocks(tril, 32),
        lambda: AttentionLayout.from_blocks(tril, 64),
        lambda: AttentionLayout.from_blocks(tril, 64, causal=True),
        lambda: AttentionLayout.from_mask(torch.ones(64, 64).tril(), 32),
    ]
    layouts = [f() for f in made]
    assert len(set(layouts)) == len(layouts)
    for layout, again in zip(layouts, made, strict=True):
        assert layout == again()
        assert hash(layout) == hash(again())
        assert pickle.loads(pickle.dumps(layout)) == layout
        assert copy.deepcopy(layout) == layout
        heads, length = 2, 128 if layout.block_size == 32 else 256
        if not layout.has_blocks or layout._pattern:
            q = torch.randn(1, heads, length - length % 9 if layout.rule.phases > 1 else length, 16)
            restored = pickle.loads(pickle.dumps(layout))
            assert torch.equal(block_attention(q, q, q, restored), block_attention(q, q, q, layout))


def test_arguments_that_do_not_fit():
    q = torch.zeros(1, 3, 96, 16)

    def run(layout, x=q):
        return block_attention(x, x, x, layout)

    refused("l: expected a multiple of the block, 32", AttentionLayout.fixed, 100)
    refused("vertsize: expected a divisor", AttentionLayout.fixed, 128, 1, 3)
    refused("num_verts: expected at most", AttentionLayout.fixed, 128, 3, 2)
    refused("num_verts: expected a divisor of 3 heads", run, AttentionLayout.fixed(64, 2))
    refused("multiples of the block", run, AttentionLayout.fixed(64), q[:, :, :90])
    refused("multiples of the stride", run, AttentionLayout.strided(7))
    refused("layout: expected one for 96 queries", run, AttentionLayout.from_blocks(torch.ones(3, 4), 64))
    refused("1 or 3 heads", run, AttentionLayout.from_blocks(torch.ones(2, 3, 3), 32))
    refused("0 and 1", AttentionLayout.from_blocks, torch.full((2, 2), 2), 32)
    refused("0 and 1", AttentionLayout.from_blocks, torch.ones(2), 32)
    refused("block_size", AttentionLayout.from_blocks, torch.ones(2, 2), 24)
    refused("band", AttentionLayout.from_blocks, torch.ones(2, 2), 32, True, band=0)
    refused("causal: expected True", AttentionLayout.from_blocks, torch.ones(2, 2), 32, band=3)
    refused("1 to 2", AttentionLayout.local, 0)
    refused("1 to 2", AttentionLayout.strided, -1)
    refused("expected layouts", AttentionLayout.union)
    refused("expected layouts", AttentionLayout.union, "local")
    refused("mask: expected", AttentionLayout.from_callback, lambda h, i, j: torch.ones(3, 3), torch.ones(1, 1), 8)
    refused("bool tensor", AttentionLayout.from_tensor, torch.ones(1, 1, 2, 2))
    refused("bool tensor", AttentionLayout.from_tensor, torch.ones(2, 2, dtype=torch.bool))
    refused("class methods", AttentionLayout)


def test_reference_of_dropout_is_philox():
    """The known answer of Random123's own test vectors."""
    words = [torch.tensor(w) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    got = reference.attention.philox(0x299F31D0 << 32 | 0xA4093822, *words)
    assert [hex(int(w)) for w in got] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


def test_a_layout_of_another_length_or_number_of_heads_is_named(device):
    q = torch.zeros(1, 2, 256, 16, device=device)
    for layout in (
        AttentionLayout.from_blocks(torch.ones(8, 8), 64),
        AttentionLayout.from_mask(torch.ones(512, 512), 64),
        AttentionLayout.from_tensor(torch.ones(1, 1, 8, 8, dtype=torch.bool, device=device), 64),
    ):
        with pytest.raises(ValueError, match="layout: expected one for") as raised:
            block_attention(q, q, q, layout)
        message = (
            f"sbnet::block_attention: layout: expected one for 256 queries, got {layout!r}, for 449 to 512 queries"
        )
        assert str(raised.value) == message
    wide = AttentionLayout.from_blocks(torch.ones(4, 8), 64)
    with pytest.raises(ValueError, match=r"layout: expected one for 256 keys, got .*, for 449 to 512 keys"):
        block_attention(q, q, q, wide)
    block_attention(q, q.repeat(1, 1, 2, 1), q.repeat(1, 1, 2, 1), wide)
    with pytest.raises(ValueError, match=r"layout: expected one for 1 or 2 heads, got AttentionLayout\(3 x 4 x 4"):
        block_attention(q, q, q, AttentionLayout.from_blocks(torch.ones(3, 4, 4), 64))
