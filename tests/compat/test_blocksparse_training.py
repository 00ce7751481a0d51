"""blocksparse's optimizers, averages, clipping and pruning by name: against its formulas in float64."""

import copy

import pytest
import torch

from sbnet.compat.blocksparse.optimize import (
    AdafactorOptimizer,
    AdamOptimizer,
    Ema,
    blocksparse_prune,
    clip_by_global_norm,
    global_norm,
)
from support.helpers import assert_bitwise

SHAPES = [(1,), (3,), (127,), (1, 1024), (63, 64), (6, 8, 8)]


def parameter(shape, device, gate=None):
    p = torch.nn.Parameter(torch.rand(shape, device=device) * 2 - 1)
    p.gate = gate
    return p


def opened(gate, t):
    return torch.ones_like(t, dtype=torch.bool) if gate is None else (gate != 0).view(-1, 1, 1).expand_as(t)


def gates(shape, device):
    return torch.tensor([1.0, 0, 0.5, 1, 0, 1], device=device) if len(shape) == 3 else None


@pytest.mark.parametrize("clip_sigmas", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_adam(device, shape, clip_sigmas):
    gate = gates(shape, device)
    p = parameter(shape, device, gate)
    options = {"learning_rate": 0.01, "clip_sigmas": clip_sigmas, "grad_scale": 0.5, "saturate": 1.5, "zero_nans": True}
    optimizer = AdamOptimizer([p], gated=True, **options)
    want, m, v = p.detach().double(), 0.0, 0.0
    is_open = opened(gate, want)
    for t in range(1, 5):
        p.grad = torch.randn(shape, device=device) * 2
        if t == 2:
            p.grad.view(-1)[0] = float("nan")
        scale = torch.rand((), device=device)
        g = p.grad.double().nan_to_num(0.0).clamp(-1.5, 1.5) * 0.5 * scale.double()
        optimizer.step(norm_scale=scale)
        v = 0.999 * v + 0.001 * g * g
        g = g.clamp(-clip_sigmas * v.sqrt(), clip_sigmas * v.sqrt()) if clip_sigmas else g
        m = 0.9 * m + 0.1 * g
        rate = 0.01 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        want = torch.where(is_open, want - rate * m / (v.sqrt() + 1e-8), want)
    torch.testing.assert_close(p.detach().double(), want, rtol=1e-4, atol=1e-5)
    assert not optimizer.state[p]["mean"][~is_open].any()
    again = AdamOptimizer([p], gated=True, **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before, results = p.detach().clone(), []
    for which in (optimizer, again):  # a state that was saved goes on alike
        with torch.no_grad():
            p.copy_(before)
        which.step()
        results.append(p.detach().clone())
    assert_bitwise(*results)


@pytest.mark.parametrize("shape", SHAPES)
def test_adafactor(device, shape):
    gate = gates(shape, device)
    p = parameter(shape, device, gate)
    optimizer = AdafactorOptimizer([p], learning_rate=0.02, clip_thresh=0.7, gated=True)
    want = p.detach().double()
    is_open = opened(gate, want)
    r = c = 0.0
    for t in range(1, 5):
        p.grad = torch.randn(shape, device=device)
        g = p.grad.double()
        if gate is not None:
            p.grad[1] = float("inf")  # a closed block, whatever its gradient holds
        optimizer.step()
        decay = 0.999 * (1 - 0.999**t) / (1 - 0.999 ** (t + 1))
        squares = g * g + 1e-30
        if len(shape) > 1 and shape[-2] > 1:
            r = decay * r + (1 - decay) * squares.mean(-1, keepdim=True)
            c = decay * c + (1 - decay) * squares.mean(-2, keepdim=True)
            x = g / ((r / r.mean(-2, keepdim=True)).sqrt() * c.sqrt())
        else:
            c = decay * c + (1 - decay) * squares
            x = g / c.sqrt()
        rms = x[is_open].square().mean().sqrt()
        want = torch.where(is_open, want - 0.02 * x / (rms / 0.7).clamp(min=1), want)
    torch.testing.assert_close(p.detach().double(), want, rtol=1e-4, atol=1e-5)
    bad = torch.nn.Parameter(torch.ones(1, 1, 1, 1))
    bad.grad = bad.detach()
    with pytest.raises(ValueError, match="1 to 3 dimensions, got 4"):
        AdafactorOptimizer([bad]).step()


def test_closures_and_halves(device):
    p = torch.nn.Parameter(torch.ones(4, device=device, dtype=torch.bfloat16))
    optimizer = AdamOptimizer([p, torch.nn.Parameter(torch.ones(2))], learning_rate=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert optimizer.state[p]["mean"].dtype == torch.float32
    assert p.dtype == torch.bfloat16
    assert bool((p.detach() == 0.5).all())
    with pytest.raises(ValueError, match="learning_rate: expected 0 or more"):
        AdamOptimizer([p], learning_rate=-1)


def test_clip_by_global_norm(device):
    grads = [torch.randn(50, device=device), torch.randn(7, 9, device=device).half(), torch.ones(3, device=device)]
    grads[2] = torch.tensor([float("inf"), float("nan"), 9.0], device=device)
    exact = torch.cat([grads[0].double(), grads[1].flatten().double(), torch.tensor([3.0], device=device).double()])
    norm, scale = clip_by_global_norm(grads, 2.0, 0.5, saturate=3.0, zero_infs=True, zero_nans=True)
    exact = exact.clamp(-3, 3).norm() * 0.5
    torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(scale.double(), 2.0 / exact.clamp(min=2.0), rtol=1e-5, atol=0)
    assert float(clip_by_global_norm(grads[:1], 1e6)[1]) == 1.0
    torch.testing.assert_close(global_norm(grads[:1]), grads[0].norm())
    with pytest.raises(ValueError, match="grads: expected a tensor"):
        clip_by_global_norm([])


def test_ema(device):
    gate = torch.tensor([1.0, 0.0], device=device)
    p, free = parameter((2, 8, 8), device, gate), parameter((5,), device)
    ema = Ema(0.9, gated=True)
    ema.apply([p, free])
    first, want = p.detach().clone(), p.detach().double()
    assert_bitwise(ema.average(p), first)
    for _ in range(3):
        with torch.no_grad():
            p.add_(torch.randn_like(p))
        want = want + 0.1 * (p.detach().double() - want)
        ema.apply([p, free])
    torch.testing.assert_close(ema.average(p)[0].double(), want[0], rtol=1e-5, atol=1e-6)
    assert_bitwise(ema.average(p)[1], first[1])
    assert ema.average(torch.ones(1)) is None
    small = Ema(fp16=True)
    small.apply([p])
    assert small.average(p).dtype == torch.float16


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_prune(device, norm, size):
    """blocksparse's own test: a tenth of 100 blocks of least norm."""
    w, gate = torch.randn(100, size, size, device=device), torch.ones(100, device=device)
    norms = w.flatten(1).abs().amax(1) if norm == "max" else w.double().flatten(1).norm(dim=1)
    assert blocksparse_prune(w, gate, 0, sparsity=0.1, norm=norm) is gate
    assert set((gate == 0).nonzero()[:, 0].tolist()) == set(norms.argsort()[:10].tolist())
    cut = float(norms.median())
    blocksparse_prune(w, gate, 4, threshold=cut, norm=norm, frequency=2)
    assert_bitwise(gate, (norms >= cut).float())
    before = gate.clone()
    assert_bitwise(blocksparse_prune(w, gate, 3, sparsity=1.0, frequency=2), before)
    for options, text in (({}, "one of them"), ({"sparsity": 2.0}, "sparsity: expected 0 to 1")):
        with pytest.raises(ValueError, match=text):
            blocksparse_prune(w, gate, 0, **options)
    with pytest.raises(ValueError, match="gate: expected"):
        blocksparse_prune(w, gate[:5], 0, sparsity=0.5)
