"""Cases of block_attention: how its test files make one and check it, forward and backward."""

import torch

from sbnet import AttentionLayout, BlockGrid, block_attention, reference
from support.helpers import assert_as_accurate_as_torch, assert_bitwise, poison, random_active

BLOCK_SIZES = (8, 16, 32, 64, 128)


def make(device, dtype=torch.float32, batch=2, heads=2, kv_heads=None, length=96, k_length=None, dim=32, order="bhtd"):
    """q, k, v and the gradient of the output, leaves."""
    k_length = length if k_length is None else k_length
    shapes = [(heads, length), (kv_heads or heads, k_length), (kv_heads or heads, k_length), (heads, length)]
    tensors = []
    for h, t in shapes:
        if order == "bthd":
            x = torch.randn(batch, t, h, dim, device=device).to(dtype).transpose(1, 2)
        elif order == "slice":  # of a wider tensor, NaN around it
            x = poison((batch, t, h, dim + 16), dtype, device)[..., 8 : 8 + dim].transpose(1, 2)
            x.copy_(torch.randn(batch, h, t, dim, device=device))
        else:
            x = torch.randn(batch, h, t, dim, device=device).to(dtype)
        tensors.append(x)
    return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]


def expected(q, k, v, grad, layout, dtype, grad_lse=None, **options):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    out, lse = reference.block_attention(*leaves, layout, return_lse=True, **options)
    loss = (out * grad.to(dtype)).sum()
    if grad_lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(grad_lse.to(dtype)).sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


def check(q, k, v, grad, layout, what="", mask=None, grad_lse=None, deterministic=None, **options):
    """Output, lse and the three gradients by the project's measure. `mask`: what the layout shows, if said apart."""
    out, lse = block_attention(q, k, v, layout, return_lse=True, deterministic=deterministic, **options)
    wanted = layout if mask is None else mask
    exact = expected(q, k, v, grad, wanted, torch.float64, grad_lse, **options)
    torchs = expected(q, k, v, grad, wanted, q.dtype, grad_lse, **options)
    assert_as_accurate_as_torch(out, torchs[0], exact[0], f"{what} out")
    none = exact[1] == -torch.inf
    assert_bitwise(lse == -torch.inf, none, f"{what} rows without keys")
    torch.testing.assert_close(lse.double()[~none], exact[1][~none], rtol=1e-5, atol=1e-4, msg=f"{what} lse")
    loss = (out.double() * grad.double()).sum()
    if grad_lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(grad_lse).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    for name, got, theirs, right in zip(("dq", "dk", "dv"), grads, torchs[2:], exact[2:], strict=True):
        if name != "dv" and not theirs.any() and not right.any():
            queries = 1 if name == "dq" else q.shape[2] * q.shape[1] // k.shape[1]
            limit = queries * _cancelled(q, k if name == "dq" else q, v, grad, options)
            assert float(got.abs().max()) <= limit, f"{what} {name}: {float(got.abs().max()):.3g}, limit {limit:.3g}"
        else:
            assert_as_accurate_as_torch(got, theirs, right, f"{what} {name}")
    return out, lse, *grads


def _cancelled(q, other, v, grad, options):
    """Of a query's only key the gradient is scale (grad.v - grad.out) other, where out is v: 0 in PyTorch, which forms
    no such difference; here what the rounding of sums in float32 leaves, or of an output that dropout scaled."""
    dropout, dim = options.get("dropout_p") or 0.0, q.shape[-1]
    eps = torch.finfo(q.dtype if dropout else torch.float32).eps
    difference = eps * dim * float(grad.abs().max()) * float(v.detach().abs().max()) / (1 - dropout)
    return difference * (options.get("scale") or dim**-0.5) * float(other.detach().abs().max())


def random_blocks(heads, rows, columns, density=0.5, batch=None):
    """Some rows and columns of it empty; in another number than density's own, where there are many."""
    shape = (heads, rows, columns) if batch is None else (batch, heads, rows, columns)
    blocks = torch.rand(shape) < density
    blocks[..., rows // 2, :] = False
    blocks[..., :, columns // 3] = False
    return blocks


def random_layout(heads, length, block, density=0.5, k_length=None, **rule):
    k_length = length if k_length is None else k_length
    blocks = random_blocks(heads, -(-length // block), -(-k_length // block), density)
    return AttentionLayout.from_blocks(blocks, block, **rule)


def attention_samples(device):
    """op name -> list of arguments, for opcheck."""
    torch.manual_seed(0)
    lengths = torch.tensor([100, 128], dtype=torch.int32, device=device)
    seed = torch.tensor([3, 4], device=device)
    layouts = [
        (AttentionLayout.local(20), torch.float16),
        (AttentionLayout.strided(8), torch.float32),
        (AttentionLayout.fixed(64, 2, 1, 32), torch.bfloat16),
        (AttentionLayout.from_mask(torch.rand(2, 128, 128) < 0.3, 32), torch.float32),
        (AttentionLayout.from_tensor(random_blocks(2, 4, 4, batch=2).to(device), 32), torch.float16),
    ]
    forward, backward = [], []
    for i, (layout, dtype) in enumerate(layouts):
        q, k, v, grad = make(device, dtype, length=128, order=("bhtd", "bthd")[i % 2])
        tensors = layout.tensors(q.device, 2, 128, 128)
        for rest, dropout in (((None, None, None), 0.0), ((lengths, lengths, seed), 0.2)):
            arguments = *tensors, *rest, layout.numbers, 0.2, dropout, True
            forward += [(q, k, v, *arguments), (q.detach(), k.detach(), v.detach(), *arguments)]
            out, lse, sums = torch.ops.sbnet.block_attention(*forward[-1])
            backward.append((grad, lse if i % 2 else None, out, lse, sums, *forward[-1]))
    half = torch.randn(2, 3 * 32, 8, 16, device=device).half().contiguous(memory_format=torch.channels_last)
    active = random_active(BlockGrid.cover((8, 16), 4), 2, 0.5, device)
    windows = torch.arange(1, 129, device=device).view(2, 64)
    keys = torch.rand(2, 128, device=device) > 0.5
    bias, tables = torch.randn(1, 2, 64, 64, device=device).half(), torch.randn(8, 8, 16, device=device).half()
    out = half[:, :32].contiguous(memory_format=torch.channels_last)
    numbers, last = (active.grid.numbers(), [0, 32, 64], 2, 16, 16, 0.25), (0.0, out)
    a, none, into = active.block_map, (None,) * 3, torch.zeros(2, 2, 128, 32, device=device).half()
    return {
        "block_attention_": [
            (*(t.detach() for t in forward[1][:3]), *forward[1][3:7], lengths, lengths, *forward[1][10:12], into)
        ],
        "window_attention": [
            (half, half, half, windows, windows, a, None, bias, None, None, *none, *numbers, 0.0),
            (half, half, half, windows, windows, a, keys, None, tables, tables, *none, *numbers, 1e-5),
        ],
        "window_attention_": [
            (half, half, half, windows, windows, a, None, bias, None, None, *none, *4 * [None], *numbers, *last),
            (half, half, half, windows, windows, a, keys, None, tables, tables, *none, *4 * [None], *numbers, *last),
        ],
        "pack_attention_blocks": [(random_blocks(2, 3, 40, batch=2).to(device),)],
        "block_attention": forward,
        "block_attention_backward": backward,
    }
