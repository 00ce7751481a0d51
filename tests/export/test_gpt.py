"""Small transformers over bytes, of docs/examples/sparse_transformer.py, in ONNX Runtime: fixed, strided, any mask."""

import copy
import runpy
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx
import torch
from torch import nn

import sbnet
from sbnet import export, reference
from support.export_cases import PROVIDER
from support.helpers import assert_as_accurate_as_torch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs/examples/sparse_transformer.py"))


def gpt(kind, length=64):
    model = EXAMPLE["Transformer"](kind, length, width=64, heads=4, layers=2, chunk=32)
    for weight in model.parameters():  # trained ones are not this small
        nn.init.normal_(weight, std=0.2)
    return model.eval()


def parity(path, model, inputs, device, monkeypatch):
    """ONNX Runtime's error against float64 is at most twice that of PyTorch without this library."""
    (got,) = export.run(export.session(path, [PROVIDER[device]]), list(inputs))
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(sbnet, "block_attention", reference.block_attention)
        torchs, exact = model(*inputs), copy.deepcopy(model).double()(*inputs)
    assert_as_accurate_as_torch(got, torchs, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["fixed", "strided"])
def test_gpt(device, kind, dtype, tmp_path, monkeypatch):
    model = gpt(kind).to(device, dtype)
    tokens = torch.randint(256, (2, 64), device=device)
    path = export.to_onnx(model, (tokens,), tmp_path / "gpt.onnx")
    ops = [node.op_type for node in onnx.load(path).graph.node]
    assert ops.count("block_attention") == 2
    parity(path, model, (tokens,), device, monkeypatch)


class MaskedGpt(nn.Module):
    """Which blocks a head sees is an input, another one at every call."""

    def __init__(self):
        super().__init__()
        self.body = gpt("fixed")

    def forward(self, tokens, blocks):
        layout = sbnet.AttentionLayout.from_tensor(blocks, 16, causal=True)
        for block in self.body.blocks:
            block.layout = layout
        return self.body(tokens)


def test_gpt_with_a_mask_as_input(device, tmp_path, monkeypatch):
    model = MaskedGpt().eval().to(device)
    tokens, blocks = torch.randint(256, (2, 64), device=device), torch.rand(2, 4, 4, 4, device=device) < 0.5
    path = export.to_onnx(model, (tokens, blocks), tmp_path / "gpt.onnx")
    for density in (0.3, 0.8):
        given = tokens, (torch.rand(2, 4, 4, 4, device=device) < density)
        parity(path, model, given, device, monkeypatch)
