"""A small BERT and a small GPT of `transformers`, pruned, trained for a step, exported: ONNX Runtime's results."""

import copy
import sys

import pytest
import torch

from sbnet import export
from sbnet.nn import BlockSparseLinear
from sbnet.weights import patch, prune
from support.helpers import assert_as_accurate_as_torch

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


class Bert(torch.nn.Module):
    def __init__(self, transformers):
        super().__init__()
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=136, vocab_size=100,
            max_position_embeddings=32,
        )  # fmt: skip
        self.body = transformers.BertModel(config)

    def forward(self, ids, mask):
        return self.body(input_ids=ids, attention_mask=mask).last_hidden_state


class Gpt(torch.nn.Module):
    def __init__(self, transformers):
        super().__init__()
        config = transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        self.body = transformers.GPT2LMHeadModel(config)

    def forward(self, ids, mask):
        return self.body(input_ids=ids, attention_mask=mask, use_cache=False).logits


def made(name, monkeypatch):
    """The model, every second block of its linear layers gone, and its inputs."""
    # transformers imports torchvision where it is installed, of whichever version; these models need none.
    monkeypatch.setitem(sys.modules, "torchvision", None)
    transformers = pytest.importorskip("transformers")
    model = {"bert": Bert, "gpt": Gpt}[name](transformers).eval()
    ids, mask = torch.randint(100, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    if name == "bert":
        patch(model, {r".*\.(query|key|value)": {"density": 0.5, "block_size": 16}, r".*\.dense": {"block_size": 8}})
    else:
        prune(model, 0.5, 16, exclude=r".*lm_head")
    return model, ids, mask


def dense_twin(model):
    """The model with a dense layer of the same values for every block-sparse one."""
    twin = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear):
            twin.set_submodule(name, module.to_linear())
    return twin


@pytest.mark.parametrize("name", ["bert", "gpt"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_pruned_exported_and_run(name, monkeypatch, tmp_path):
    model, ids, mask = made(name, monkeypatch)
    sparse = [m for m in model.modules() if isinstance(m, BlockSparseLinear)]
    assert len(sparse) == {"bert": 13, "gpt": 8}[name]
    assert all(m.density <= 0.52 for m in sparse)

    twin = dense_twin(model)
    got = model(ids, mask)
    assert_as_accurate_as_torch(got, twin(ids, mask), copy.deepcopy(twin).double()(ids, mask))

    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) * 2
    path = export.to_onnx(model, (ids, mask), tmp_path / "model.onnx", dynamic=dynamic)
    session = export.session(path, ["CPUExecutionProvider"])
    for batch, tokens in ((2, 9), (1, 1), (3, 17)):
        ids, mask = torch.randint(100, (batch, tokens)), torch.ones(batch, tokens, dtype=torch.long)
        with torch.no_grad():
            (got,), want = export.run(session, [ids, mask]), model(ids, mask)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_a_step_of_training(name, monkeypatch):
    """The gradients of all parameters are those of the dense twin, on the blocks there are."""
    model, ids, mask = made(name, monkeypatch)
    twin = dense_twin(model)
    for m in (model, twin):
        m(ids, mask).square().mean().backward()
    dense = dict(twin.named_modules())
    for at, module in model.named_modules():
        if isinstance(module, BlockSparseLinear) and "pooler" not in at:  # whose result is not used
            want = module.layout.from_dense(dense[at].weight.grad.t())
            torch.testing.assert_close(module.weight.grad, want, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(module.bias.grad, dense[at].bias.grad, rtol=1e-3, atol=1e-6)
