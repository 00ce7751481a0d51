"""`run.export` of exact and cached runs: ONNX Runtime gives what the run gives, frame after frame."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import sbnet
import sbnet.export
from sbnet.graph.oracle import exact_pixels
from support.networks import NETWORKS, lively

SIZE = (40, 56)


def names(quick: str):
    found = [n if n == quick else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]
    return pytest.mark.parametrize("name", found)


def exported(net, x, path, mode):
    run = sbnet.sparsify(net, x, block=4, mode=mode)
    run.export(path)
    return run, sbnet.export.session(path, ["CPUExecutionProvider"])


@names("FPN")
def test_exact(name, tmp_path):
    net, x = lively(NETWORKS[name]()), torch.randn(1, 3, *SIZE)
    _, session = exported(net, x, tmp_path / "exact.onnx", "exact")
    assert [v.name for v in session.get_inputs()] == ["x", "mask"]
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, 20:26, 30:38] = True
    with torch.no_grad():
        dense = tree_leaves(net(x))
    for got, want in zip(sbnet.export.run(session, [x, mask]), dense, strict=True):
        inside = exact_pixels(got, mask).expand_as(got) if got.dim() == 4 else torch.ones_like(got, dtype=torch.bool)
        torch.testing.assert_close(got[inside], want[inside], rtol=1e-3, atol=1e-4)


@names("ResNet")
def test_cached(name, tmp_path):
    net, x = lively(NETWORKS[name]()), torch.randn(1, 3, *SIZE)
    run, session = exported(net, x, tmp_path / "cached.onnx", "cached")
    states = [torch.full(v.shape, 7.0) for v in session.get_inputs()[2:]]  # a full mask reads none of it
    for density in (1.0, 0.01, 0.0, 0.02):
        x, mask = torch.randn(1, 3, *SIZE), torch.rand(1, *SIZE) < density
        want = tree_leaves(run(x, mask))
        got = sbnet.export.run(session, [x, mask, *states])
        states = got[len(want) :]
        for own, run_gave in zip(got, want, strict=False):
            torch.testing.assert_close(own, run_gave, rtol=1e-3, atol=1e-4)
