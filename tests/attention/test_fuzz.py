"""block_attention on shapes, head sizes, layouts, lengths and options drawn at random, against float64."""

import random

import pytest
import torch

from sbnet import AttentionLayout
from support.attention_cases import BLOCK_SIZES, check, make, random_blocks, random_layout
from support.helpers import FLOATS

FEWEST = 64  # queries of a problem
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 240))]


def draw_layout(draw, heads, q_length, k_length, device):
    """A layout for these lengths, and its mask where it does not give one itself."""
    kind = draw.choice(["rule", "strided", "fixed", "blocks", "elements", "tensor", "merged"])
    block, rule = draw.choice(BLOCK_SIZES), {}
    if draw.random() < 0.5:
        rule = {"causal": True, "diagonal": draw.randint(-20, 20)}
        rule |= draw.choice([{}, {"band": draw.randint(1, 90)}, {"prefix": draw.randint(1, 40)}])
    if kind == "strided":
        fits = [n for n in range(1, 20) if q_length % n == 0 and k_length % n == 0]
        return AttentionLayout.strided(draw.choice(fits)), None
    if kind == "fixed" and q_length % 8 == 0 and k_length % 8 == 0:
        wide = draw.choice([2, 4, 8])
        return AttentionLayout.fixed(8 * wide, draw.choice([1, heads if heads <= wide else 1]), 1, 8), None
    if kind == "merged":
        return AttentionLayout.union(
            AttentionLayout.local(draw.randint(1, 40)), AttentionLayout.strided(draw.randint(1, 40))
        ), None
    if kind in ("blocks", "elements", "tensor"):
        shared = draw.choice([1, heads])
        sizes = -(-q_length // block), -(-k_length // block)
        if kind == "blocks":
            return random_layout(shared, q_length, block, draw.random(), k_length, **rule), None
        blocks = random_blocks(shared, *sizes, draw.random())
        if kind == "elements":
            bits = lambda h, i, j: torch.rand(block, block) < 0.3 + 0.1 * (i + j) % 0.7  # noqa: E731
            return AttentionLayout.from_callback(bits, blocks, block, **rule), None
        layout = AttentionLayout.from_tensor(blocks[None].to(device), block, **rule)
        return layout, layout.visible(heads, q_length, k_length).to(device).expand(1, heads, -1, -1)
    return draw.choice(
        [
            AttentionLayout.dense(),
            AttentionLayout.causal(draw.randint(-9, 9)),
            AttentionLayout.causal(0, draw.randint(1, 99)),
            AttentionLayout.local(draw.randint(1, 150)),
        ]
    ), None


@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems(device, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, group = draw.randint(1, 3), draw.randint(1, 3)
    q_length = draw.choice([1, 2, 31, 64, 65, 96, 120, 128, 130, 192, 257])
    k_length = draw.choice([q_length, q_length, 1, 63, 80, 128, 200])
    batch, heads, dim = draw.randint(1, 3), kv_heads * group, 8 * draw.randint(2, 32)
    # An error of a handful of queries is a single draw, and PyTorch's another: their ratio says nothing.
    batch = max(batch, -(-FEWEST // (heads * q_length)))
    dtype, order = draw.choice(FLOATS), draw.choice(["bhtd", "bthd", "slice"])
    layout, mask = draw_layout(draw, heads, q_length, k_length, device)
    options = {}
    if draw.random() < 0.4:
        for name, length in (("q_lengths", q_length), ("k_lengths", k_length)):
            values = [draw.randint(-1, length + 1) for _ in range(batch)]
            options[name] = torch.tensor(values, dtype=torch.int32, device=device)
    # Of a query's only key the gradient is 0 in PyTorch; here the rounding of an output that dropout scaled.
    if draw.random() < 0.3 and k_length > 1:
        options |= {"dropout_p": draw.choice([0.1, 0.5]), "seed": torch.randint(2**62, (2,), device=device)}
    tensors = make(device, dtype, batch, heads, kv_heads, q_length, k_length, dim, order)
    options |= {"scale": draw.choice([None, 0.05, 2 * dim**-0.5]), "deterministic": draw.choice([None, True, False])}
    what = f"{seed}: {batch} {heads}/{kv_heads} {q_length} {k_length} {dim} {dtype} {order} {layout} {options}"
    check(*tensors, layout, what, mask, **options)
