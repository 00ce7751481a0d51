"""The README example of each reference, translated in its imports and its TensorFlow variables alone."""

import sys

import numpy as np
import pytest
import torch

from support.helpers import assert_bitwise
from support.refusals import refused


def test_blocksparse(device):
    """examples/simple.py, at an eighth of its size."""
    from sbnet.compat.blocksparse.matmul import BlocksparseMatMul

    hidden_size = 512
    block_size = 32
    minibatch_size = 64

    # Create a (random) sparsity pattern
    sparsity = np.random.randint(2, size=(hidden_size // block_size, hidden_size // block_size))  # noqa: NPY002

    # Initialize the sparse matrix multiplication object
    bsmm = BlocksparseMatMul(sparsity, block_size=block_size)

    # Input to graph
    x = torch.ones(minibatch_size, hidden_size, device=device)

    # Initialize block-sparse weights
    w = torch.nn.Parameter(torch.randn(bsmm.w_shape, device=device))

    # Block-sparse matrix multiplication
    y = bsmm(x, w)

    dense = np.zeros((hidden_size, hidden_size))
    for block in range(bsmm.blocks):
        c, k = bsmm.block_coord(block)
        dense[c * 32 : c * 32 + 32, k * 32 : k * 32 + 32] = w[block].detach().cpu().numpy()
    np.testing.assert_allclose(y.detach().cpu().numpy(), np.ones((64, 512)) @ dense, rtol=1e-4, atol=1e-3)


def test_pytorch_block_sparse_layer():
    from sbnet.compat.pytorch_block_sparse import BlockSparseLinear

    fc = BlockSparseLinear(1024, 256, density=0.1)
    assert fc.block_count == int(0.1 * (1024 * 256 / (32 * 32))) == 25
    assert fc(torch.randn(3, 1024)).shape == (3, 256)


def test_pytorch_block_sparse_patcher(monkeypatch):
    """Roberta of the notebook: 68 million parameters instead of 84 million."""
    monkeypatch.setitem(sys.modules, "torchvision", None)  # which transformers imports where it is installed
    pytest.importorskip("transformers")
    from transformers import RobertaConfig, RobertaForMaskedLM

    from sbnet.compat.pytorch_block_sparse import BlockSparseModelPatcher

    config = RobertaConfig(
        vocab_size=52_000, max_position_embeddings=514, num_attention_heads=12, num_hidden_layers=6, type_vocab_size=1
    )
    model = RobertaForMaskedLM(config)
    assert model.num_parameters() == 83_504_416

    # Create a model patcher
    mp = BlockSparseModelPatcher()

    # Match layers using regexp. We setup a density of 0.5 on these layers.
    mp.add_pattern(r"roberta\.encoder\.layer\.[0-9]+\.intermediate\.dense", {"density": 0.5})
    mp.add_pattern(r"roberta\.encoder\.layer\.[0-9]+\.output\.dense", {"density": 0.5})
    mp.add_pattern(r"roberta\.encoder\.layer\.[0-9]+\.attention\.output\.dense", {"density": 0.5})
    mp.patch_model(model)

    assert model.num_parameters() == 67_579_168


def test_sbnet(device):
    """The three snippets of the README, and sample.py's convolution between them."""
    import sbnet.compat.sbnet as sbnet_module

    mask = torch.zeros(2, 48, 40, 1, device=device)
    mask[0, 20, 3] = mask[1, 2, 30] = mask[1, 47, 39] = 1
    x, w = torch.randn(2, 48, 40, 8, device=device), torch.randn(8, 8, 3, 3, device=device)
    bsize, boffset, bstride = [16, 16], [0, 0], [14, 14]
    do_transpose, do_add = True, False

    indices = sbnet_module.reduce_mask(
        mask, torch.tensor([4, 3], dtype=torch.int32),
        bsize=bsize,
        boffset=boffset,
        bstride=bstride,
        tol=0.5, # pooling threshold to consider a block as active
        avgpool=False)  # max pooling by default  # fmt: skip

    blockStack = sbnet_module.sparse_gather(
        x,
        indices.bin_counts,
        indices.active_block_indices,
        bsize=bsize, # block size
        boffset=boffset, # block offset
        bstride=bstride, # block stride
        transpose=do_transpose)  # fmt: skip

    convBlocks = torch.nn.functional.conv2d(blockStack, w)

    base = x[:, 1:-1, 1:-1]
    y = sbnet_module.sparse_scatter(
        convBlocks,
        indices.bin_counts,
        indices.active_block_indices,
        base, # base tensor to copy to output and overwrite on top of
        bsize=[14, 14],
        boffset=boffset,
        bstride=bstride,
        add=do_add,
        atomic=False, # use atomic or regular adds
        transpose=do_transpose)  # fmt: skip

    count = int(indices.bin_counts)
    want = base.cpu().numpy().copy()
    padded = np.pad(x.cpu().numpy(), ((0, 0), (0, 16), (0, 16), (0, 0)))
    active = [
        (n, i, j) for n in range(2) for i in range(4) for j in range(3)
        if mask[n, 14 * i : 14 * i + 16, 14 * j : 14 * j + 16].any()
    ]  # fmt: skip
    assert [tuple(row) for row in indices.active_block_indices[:count].tolist()] == active
    for n, i, j in active:
        block = torch.from_numpy(padded[n, 14 * i : 14 * i + 16, 14 * j : 14 * j + 16]).permute(2, 0, 1)
        out = torch.nn.functional.conv2d(block[None], w.cpu())[0].permute(1, 2, 0).numpy()
        target = want[n, 14 * i : 14 * i + 14, 14 * j : 14 * j + 14]
        target[:] = out[: target.shape[0], : target.shape[1]]
    np.testing.assert_allclose(y.cpu().numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("size", "bsize", "bstride", "boffset"), [
    ((2, 3, 2), (2, 3), (3, 4), (-1, -2)), ((5, 5, 1), (3, 3), (1, 1), (-1, -2)), ((13, 12, 1), (2, 3), (1, 2), (0, 0)),
    ((20, 30, 3), (3, 4), (2, 3), (-1, -2)),
])  # fmt: skip
def test_sbnets_own_test_overwrites(device, size, bsize, bstride, boffset, transpose):
    """Its test scatters blocks that overlap without adding: the last one of the list stands. Gradients follow it."""
    import sbnet.compat.sbnet as sbnet_module

    mask = torch.randn(2, *size[:2], 1, device=device)
    count = [1 + (s - o - 1) // v for s, o, v in zip(size, boffset, bstride, strict=False)]
    grid = {"dynamic_bsize": bsize, "dynamic_bstride": bstride, "dynamic_boffset": boffset}
    found = sbnet_module.reduce_mask(mask, count, **grid, tol=0.5, avgpool=False)
    x = torch.randn(2, *size, device=device)
    stack = sbnet_module.sparse_gather(x, *found, **grid, transpose=transpose)
    blocks = torch.randn_like(stack).requires_grad_()
    base = torch.full_like(x, 10.0).requires_grad_()
    y = sbnet_module.sparse_scatter(blocks, *found, base, **grid, transpose=transpose)
    want = base.detach().cpu().clone()
    gathered = torch.zeros(len(stack), *bsize, size[2])
    winner = {}
    rows = found.active_block_indices[: int(found.bin_counts)].tolist()
    turned = blocks.detach().cpu().permute(0, 2, 3, 1) if transpose else blocks.detach().cpu()
    for row, (n, i, j) in enumerate(rows):
        for a in range(bsize[0]):
            for b in range(bsize[1]):
                at = boffset[0] + bstride[0] * i + a, boffset[1] + bstride[1] * j + b
                if 0 <= at[0] < size[0] and 0 <= at[1] < size[1]:
                    want[n, at[0], at[1]] = turned[row, a, b]
                    gathered[row, a, b] = x.cpu()[n, at[0], at[1]]
                    winner[(n, *at)] = row, a, b
    assert_bitwise(y.detach().cpu(), want)
    assert_bitwise((stack.permute(0, 2, 3, 1) if transpose else stack).cpu(), gathered)
    dy = torch.randn_like(y)
    dblocks, dbase = torch.autograd.grad(y, (blocks, base), dy)
    expected, left = torch.zeros_like(turned), dy.cpu().clone()
    for (n, r, c), (row, a, b) in winner.items():
        expected[row, a, b] = dy[n, r, c]
        left[n, r, c] = 0
    assert_bitwise((dblocks.permute(0, 2, 3, 1) if transpose else dblocks).cpu(), expected)
    assert_bitwise(dbase.cpu(), left)
    variable = base.detach().clone()
    assert sbnet_module.sparse_scatter_var(blocks, *found, variable, **grid, transpose=transpose) is variable
    assert_bitwise(variable, y.detach())


def test_sbnet_refuses():
    import sbnet.compat.sbnet as sbnet_module

    mask = torch.zeros(1, 8, 8, 1)
    refused(r"mask: expected a tensor \[N, H, W, 1\]", sbnet_module.reduce_mask, torch.zeros(1, 8, 8), [2, 2])
    refused("bsize: expected two numbers, got None", sbnet_module.reduce_mask, mask, [2, 2])
    found = sbnet_module.reduce_mask(mask, [2, 2], [4, 4], [4, 4], [0, 0])
    assert int(found.bin_counts) == 0
    assert not sbnet_module.sparse_gather(torch.ones(1, 8, 8, 3), *found, [4, 4], [4, 4], [0, 0]).any()


def test_sparse_attention(device):
    """The calls at the end of its attention.py."""
    from sbnet.compat.sparse_attention import attention_impl, blocksparse_attention_impl

    q, k, v = torch.randn(3, 4, 1024, 256, device=device).unbind(0)
    full_attn_tf = attention_impl(q, k, v, heads=4, attn_mode="all", recompute=True)
    full_attn_bs = blocksparse_attention_impl(q, k, v, heads=4, attn_mode="all", recompute=True)

    # first step of strided attention
    local_attn_bs = blocksparse_attention_impl(q, k, v, heads=4, attn_mode="local", local_attn_ctx=32, recompute=True)
    local_attn_tf = attention_impl(q, k, v, heads=4, attn_mode="local", local_attn_ctx=32, recompute=True)

    # second step of strided attention
    strided_attn_bs = blocksparse_attention_impl(
        q, k, v, heads=4, attn_mode="strided", local_attn_ctx=32, recompute=True
    )
    strided_attn_tf = attention_impl(q, k, v, heads=4, attn_mode="strided", local_attn_ctx=32, recompute=True)

    # the 'fixed' attention pattern
    fixed = blocksparse_attention_impl(q, k, v, heads=4, attn_mode="fixed", local_attn_ctx=128, num_verts=4, vertsize=1, recompute=True)  # noqa: E501  # fmt: skip

    at = torch.arange(1024, device=device)
    distance = at[:, None] - at
    blocks = (3 - torch.arange(4, device=device))[:, None, None]  # of head h: the h-th from a chunk's end
    seen = {
        "all": distance >= 0,
        "local": (distance >= 0) & (distance < 32),
        "strided": (distance >= 0) & (distance % 32 == 0),
        "fixed": (distance >= 0) & ((at[:, None] // 128 == at // 128) | (at % 128 // 32 == blocks)),
    }
    heads = [t.unflatten(-1, (4, 64)).transpose(1, 2) for t in (q, k, v)]
    for mode, results in (
        ("all", (full_attn_tf, full_attn_bs)),
        ("local", (local_attn_bs, local_attn_tf)),
        ("strided", (strided_attn_bs, strided_attn_tf)),
        ("fixed", (fixed,)),
    ):
        want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen[mode]).transpose(1, 2).flatten(2)
        for got in results:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
