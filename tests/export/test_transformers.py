"""`run.export` of transformers: tokens and windows are ops of their own, and ONNX Runtime keeps the masked contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import sbnet
from sbnet import export
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from support import tokens
from support.contract import assert_holds
from support.detectors import rt_detr
from support.export_cases import ops_of
from support.tokens import FAMILIES, kept, masks, on_kept, swin, swin_on
from support.transformers import ViT, Windows

libraries = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")
TOKENS = {"pack_tokens", "move_rows", "pack_patches", "block_attention"}
WINDOWS = {"window_attention", "merge_pixels"}
# What would compute all tokens or windows in the place of those ops.
DENSE = {"MatMul", "Gemm", "Conv", "Softmax", "Attention", "GatherND", "GatherElements", "ScatterND", "Einsum", "Where"}
Oracle = Callable[[nn.Module, Tensor, Tensor], Any]


def holds(net: nn.Module, side: int, folder, ops: set[str], oracle: Oracle, block: Any = None) -> None:
    """ONNX Runtime on a CPU against the transformer on active tokens in float64, by the measure of convolutions."""
    x = torch.randn(2, 3, side, side)
    options = {} if block is None else {"block": block}
    sbnet.sparsify(net, x, **options).export(folder / "net.onnx")
    assert ops <= set(ops_of(folder / "net.onnx"))
    assert not DENSE & set(ops_of(folder / "net.onnx"))
    session, exact = export.session(folder / "net.onnx", ["CPUExecutionProvider"]), copy.deepcopy(net).double()
    for mask in (masks(side), torch.ones(2, side, side), torch.zeros(2, side, side)):
        got = export.run(session, [x, mask > 0])
        torchs, want = oracle(net, x, mask), oracle(exact, x.double(), mask)
        torchs, want = ([t] if isinstance(t, Tensor) else list(t) for t in (torchs, want))
        assert_holds(list(got), torchs, want)


def of_tokens(patch: int, prefix: int) -> Oracle:
    return lambda net, x, mask: on_kept(net, x, kept(mask, patch, prefix))


def alone(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        every = net.tokens(x)
        found = torch.zeros_like(every)
        for n, some in enumerate(kept(mask, 16, 1)):
            found[n, some] = net.layers(every[n : n + 1, some])[0]
    return found


def test_tokens(tmp_path):
    torch.manual_seed(0)
    holds(ViT(96).eval(), 96, tmp_path, TOKENS, alone)


def test_windows(tmp_path):
    torch.manual_seed(0)
    by_planes: Oracle = lambda net, x, mask: masked_oracle(net, [x], PlaneMasks(mask, 4))  # noqa: E731
    holds(Windows().eval(), 112, tmp_path, {"window_attention"}, by_planes, 4)


@libraries
@pytest.mark.parametrize("name", ["ViT", "DINOv2, registers"])
def test_vision_transformers(name, tmp_path):
    make, side, patch, prefix, _ = FAMILIES[name]
    holds(make(), side, tmp_path, TOKENS, of_tokens(patch, prefix))


@libraries
def test_swin(tmp_path):
    net = swin(112, 7, 32)
    holds(net, 112, tmp_path, WINDOWS, lambda net, x, mask: swin_on(net, x, mask, 4), 4)


@libraries
def test_the_encoder_of_rt_detr(tmp_path):
    by_planes: Oracle = lambda net, x, mask: masked_oracle(net, [x], PlaneMasks(mask, 1))  # noqa: E731
    holds(rt_detr("encoder", heads=2), 128, tmp_path, TOKENS - {"pack_patches"}, by_planes, 1)
