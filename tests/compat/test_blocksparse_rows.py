"""blocksparse's ops on rows and its number formats by name: against plain formulas in float64, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from sbnet.compat.blocksparse import embed, ewops
from sbnet.compat.blocksparse import transformer as rows
from sbnet.compat.blocksparse.quantize import QuantizeSpec, log_stats, quantize
from support.formulas import check
from support.helpers import assert_as_accurate_as_torch, assert_bitwise


@pytest.mark.parametrize("k", [1, 5, 33])
def test_top_k(device, k):
    x = torch.randn(4, 3, 33, device=device)
    order = x.argsort(-1, descending=True)[..., :k]
    values, indices = rows.top_k(x, k)
    assert_bitwise(indices, order)
    check(lambda x: rows.top_k(x, k)[0], lambda x: x.gather(-1, order), x)
    base = values[..., -1:].clamp(min=0)
    kept = torch.zeros_like(x).scatter(-1, order, 1.0)
    check(lambda x: rows.rectified_top_k(x, k), lambda x: torch.relu(x - base) * kept, x)
    check(lambda x: rows.rectified_top_k(x, k, rebase=False), lambda x: torch.relu(x) * kept, x)
    for wrong in (0, 34):
        with pytest.raises(ValueError, match="top_k: k: expected 1 to 33"):
            rows.top_k(x, wrong)


@pytest.mark.parametrize("shape", [(1, 1, 7, 40), (3, 2, 7, 40), (1, 1, 1, 40)])
def test_softmax_with_masks(device, shape):
    """blocksparse's masks scale what they let through."""
    x = torch.randn(3, 2, 7, 40, device=device)
    mask = torch.randint(0, 3, shape, device=device).float()
    mask[..., 0] = 1

    def plain(x, k=None):
        scores = (x * mask * 0.3).masked_fill(mask == 0, -torch.inf)
        if k is not None:
            least = scores.detach().topk(k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        e = (scores - scores.detach().amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)

    check(lambda x: rows.masked_softmax(x, mask, 0.3), plain, x)
    check(lambda x: rows.masked_top_k_softmax(x, 6, mask, 0.3), lambda x: plain(x, 6), x)
    check(lambda x: rows.softmax(x, 0.3), lambda x: (x * 0.3).softmax(-1), x)
    check(lambda x: rows.masked_top_k_softmax(x, 40, None, 0.3), lambda x: (x * 0.3).softmax(-1), x)
    half = rows.masked_softmax(x.half(), mask, 0.3)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), plain(x), rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="mask: expected 1 or the size"):
        rows.masked_softmax(x, mask[0])


def test_a_row_without_any_is_zeros(device):
    x, mask = torch.randn(2, 5, device=device, requires_grad=True), torch.ones(2, 5, device=device)
    mask[1] = 0
    for f in (lambda: rows.masked_softmax(x, mask), lambda: rows.masked_top_k_softmax(x, 2, mask)):
        y = f()
        assert not y[1].any()
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.isfinite(dx).all()
        assert not dx[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_softmax_cross_entropy(device, dtype):
    """From halves as accurate as from float32: nothing is rounded on the way."""
    logits = (torch.randn(3, 4, 500, device=device) * 6).to(dtype).requires_grad_()
    labels = torch.randint(500, (3, 4), device=device)
    weights = torch.rand(3, 4, device=device)
    loss = rows.softmax_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    (got,) = torch.autograd.grad((loss * weights).sum(), logits)

    def plain(t):
        own = F.cross_entropy(t.flatten(0, 1), labels.flatten(), reduction="none").view(3, 4)
        return own.detach(), torch.autograd.grad((own * weights).sum(), t)[0]

    wide = logits.detach().float().requires_grad_()
    exact = plain(logits.detach().double().requires_grad_())
    assert_as_accurate_as_torch(loss, plain(wide)[0], exact[0])
    assert got.dtype == dtype
    assert_as_accurate_as_torch(got, plain(wide)[1].to(dtype), exact[1])
    with pytest.raises(ValueError, match="labels: expected"):
        rows.softmax_cross_entropy(logits, labels[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_lookup(device, dtype):
    """Thousands of equal indices: the gradient is summed in float32 and is the same every time."""
    emb = torch.randn(11, 24, device=device).to(dtype).requires_grad_()
    idx = torch.randint(11, (40, 100), device=device)
    y = embed.embedding_lookup(emb, idx)
    assert_bitwise(y, emb[idx])
    dy = torch.randn(y.shape, device=device).to(dtype)
    grads = [torch.autograd.grad(embed.embedding_lookup(emb, idx), emb, dy)[0] for _ in range(3)]
    for other in grads[1:]:
        assert_bitwise(other, grads[0])
    sums = torch.zeros(11, 24, dtype=torch.float64, device=device)
    exact = sums.index_add(0, idx.flatten(), dy.flatten(0, 1).double())
    wide = sums.float().index_add(0, idx.flatten(), dy.flatten(0, 1).float()).to(dtype)
    assert_as_accurate_as_torch(grads[0], wide, exact)


def test_gathers(device):
    x, idx = torch.randn(3, 4, 6, 5, device=device), torch.randint(-1, 6, (3, 4), device=device)
    i, j = torch.meshgrid(torch.arange(3, device=device), torch.arange(4, device=device), indexing="ij")
    check(lambda x: ewops.fancy_gather(x, idx), lambda x: x[i, j, idx.clamp(min=0)], x)
    flat = torch.randint(6, (3,), device=device)
    check(lambda x: ewops.fancy_gather(x, flat), lambda x: x[torch.arange(3, device=device), flat], x[:, 0, :, 0])
    check(lambda x: ewops.reduce_max(x, 1), lambda x: x.amax(1), x)
    check(lambda x: ewops.reduce_max(x, -2, keepdims=True), lambda x: x.amax(2, keepdim=True), x)
    assert_bitwise(rows.transpose_2d(x[0, 0]), x[0, 0].t().contiguous())
    assert rows.transpose_0213(x).is_contiguous()
    check(rows.transpose_0213, lambda x: x.permute(0, 2, 1, 3), x)
    with pytest.raises(ValueError, match="fancy_gather: idx: expected"):
        ewops.fancy_gather(x, idx.t())


def numbers(spec):
    """Every non-negative number of a format."""
    found = [0.0]
    for e in range(spec.emin, spec.emax + 1):
        found += [(1 + f / 2**spec.fbits) * 2.0**e for f in range(2**spec.fbits)]
    if spec.denorm:
        found += [f / 2**spec.fbits * 2.0**spec.emin for f in range(1, 2**spec.fbits)]
    return torch.tensor(sorted(found), dtype=torch.float64)


@pytest.mark.parametrize("denorm", [True, False])
@pytest.mark.parametrize(("ebits", "fbits", "emax"), [(4, 3, None), (5, 2, 15), (2, 0, 3), (3, 5, -2)])
def test_quantize(device, denorm, ebits, fbits, emax):
    """The nearest number of the format, by trying all of them."""
    spec = QuantizeSpec(ebits, fbits, emax, denorm=denorm)
    format = numbers(spec).to(device)
    x = torch.randn(4000, device=device) * format[-1].float() / 4
    x[:1000] *= 2.0 ** -torch.randint(0, 2**ebits + fbits, (1000,), device=device)
    at = (x.double().abs()[:, None] - format).abs().argmin(1)
    got = quantize(x, spec)
    if not denorm:  # below the least normal number all is zero, once rounded
        judged = x.abs().double() >= format[1]
        assert not got[x.abs().double() < format[1] * (1 - 2.0 ** -(fbits + 1))].any()
        x, got, at = x[judged], got[judged], at[judged]
    distance = (got.double().abs() - x.double().abs()).abs()
    assert bool(torch.isin(got.double().abs(), format).all())
    assert bool((distance == (format[at] - x.double().abs()).abs()).all())
    assert bool((got * x >= 0).all())
    assert_bitwise(quantize(got, spec), got)


def test_quantize_more(device):
    spec = QuantizeSpec()
    big = torch.tensor([float("inf"), -1e30, float("nan"), 0.0], device=device)
    got = quantize(big, spec)
    assert got[:2].tolist() == [spec.largest, -spec.largest]
    assert (bool(got[2].isnan()), float(got[3])) == (True, 0.0)
    x = torch.full((40000,), 1.0 + 0.3 / 8, device=device)
    drawn = quantize(x, QuantizeSpec(stochastic=True))
    assert set(drawn.tolist()) == {1.0, 1.125}
    assert float((drawn > 1).float().mean()) == pytest.approx(0.3, abs=0.02)
    x = torch.randn(100, device=device, requires_grad=True)
    dy = torch.randn(100, device=device)
    (dx,) = torch.autograd.grad(quantize(x, spec, QuantizeSpec(5, 2)), x, dy)
    assert_bitwise(dx, quantize(dy, QuantizeSpec(5, 2)))
    fitted = spec.fit(torch.tensor([3.0, -700.0], device=device))
    assert fitted.emax == 9 + 2
    assert QuantizeSpec(bias_pad=0, mode=1, stdv_mul=0.0).fit(torch.full((8,), 40.0, device=device)).emax == 5
    assert spec.fit(torch.zeros(3, device=device)) is spec
    assert quantize(x.detach().bfloat16(), QuantizeSpec(8, 7)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="fbits: expected at most 7"):
        quantize(x.bfloat16(), QuantizeSpec(5, 10))
    with pytest.raises(ValueError, match="QuantizeSpec: expected"):
        QuantizeSpec(9)
    stats = log_stats(torch.tensor([0.0, 1.0, -70000.0, 1e-9], device=device))
    assert (stats["sat_pct"], stats["ftz_pct"], stats["max"]) == (25.0, 25.0, 70000.0)


def test_compile(device):
    """Rows, losses and lookups in one graph, forward and backward."""
    torch._dynamo.reset()
    emb, idx = torch.randn(20, 30, device=device, requires_grad=True), torch.randint(20, (6, 7), device=device)

    def loss(emb):
        y = rows.rectified_top_k(embed.embedding_lookup(emb, idx), 9)
        y = quantize(rows.masked_softmax(y, (y.detach() > 0).float(), 2.0), QuantizeSpec(5, 3))
        return rows.softmax_cross_entropy(y, idx).mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(emb), loss(emb))
    torch.testing.assert_close(torch.autograd.grad(compiled(emb), emb), torch.autograd.grad(loss(emb), emb))
