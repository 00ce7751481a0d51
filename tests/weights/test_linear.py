"""BlockSparseLinear, patching and pruning of models, and blocks that move."""

import copy
import pickle

import pytest
import torch
from torch import nn

from sbnet.nn import BlockSparseLinear
from sbnet.weights import BlockLayout, SparseOptimizer, patch, prune
from sbnet.weights.patch import patchable_layers
from support.helpers import assert_as_accurate_as_torch, assert_bitwise
from support.weight_cases import assert_trains_alike_compiled

SHAPES = [(32, 32, 32), (64, 32, 96), (64, 64, 32), (33, 96, 64), (64 * 128 * 32 // 64, 128, 256), (1, 32, 32)]


def mlp(device="cpu"):
    return nn.Sequential(nn.Linear(50, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)).to(device)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("density", [0.42, 1.0])
def test_equals_the_dense_layer(device, rows, inputs, outputs, density):
    """pytorch_block_sparse's shapes: forward and every gradient, as accurate as the dense layer of the same values."""
    layer = BlockSparseLinear(inputs, outputs, density=density, device=device)
    dense = layer.to_linear()
    x, direction = torch.randn(rows, inputs, device=device), torch.randn(rows, outputs, device=device)
    results = []
    for module, wide in ((layer, False), (dense, False), (copy.deepcopy(dense).double(), True)):
        t = (x.double() if wide else x.clone()).requires_grad_()
        y = module(t)
        dx, dw, db = torch.autograd.grad(y, [t, module.weight, module.bias], direction.to(y.dtype))
        results.append((y, dx, dw if module is layer else layer.layout.from_dense(dw.T), db))
    for got, torchs, exact in zip(*results, strict=True):
        assert_as_accurate_as_torch(got, torchs, exact)


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.42, 1.0])
def test_large(device, density):
    test_equals_the_dense_layer(device, 8192, 1024, 2048, density)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
def test_pytorch_block_sparse_9_features_that_fill_no_block(device, size):
    """pytorch_block_sparse#9: any number of features. Padding never shows, and its gradient is zero."""
    linear = nn.Linear(100, 75).to(device)
    layer = BlockSparseLinear.from_linear(linear, 1.0, size)
    x = torch.randn(9, 100, device=device)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-4, atol=1e-5)
    layer(x).square().sum().backward()
    padding = layer.layout.from_dense(torch.ones(100, 75, device=device)) == 0
    assert (layer.weight.grad[padding] == 0).all()


def test_pytorch_block_sparse_14_first_steps(device):
    """pytorch_block_sparse#14: the first thing that a user tries, a loss and its gradient."""
    model = nn.Sequential(BlockSparseLinear(128, 64)).to(device)
    loss = nn.functional.mse_loss(model(torch.randn(32, 128, device=device)), torch.randn(32, 64, device=device))
    loss.backward()
    assert torch.isfinite(model[0].weight.grad).all()
    assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("size", [64, 128])
def test_pytorch_block_sparse_20_large_blocks(device, size):
    """pytorch_block_sparse#20: blocks of 64 and 128 gave wrong results."""
    layer = BlockSparseLinear(384, 256, density=0.5, block_size=size, device=device)
    x = torch.randn(70, 384, device=device)
    torch.testing.assert_close(layer(x), layer.to_linear()(x), rtol=1e-4, atol=1e-5)


def test_from_linear_keeps_values(device):
    linear = nn.Linear(64, 96).to(device)
    with torch.no_grad():
        linear.weight[:32, :32] *= 10  # outputs 0-31 of inputs 0-31
    layer = BlockSparseLinear.from_linear(linear, density=1 / 6)
    assert layer.layout.coords.tolist() == [[0, 0]]
    assert_bitwise(layer.to_linear().weight[:32, :32], linear.weight[:32, :32])
    assert_bitwise(layer.bias, linear.bias)
    random = BlockSparseLinear.from_linear(linear, 0.5, 16, by="random")
    assert random.layout.blocks == 12
    mask = BlockSparseLinear.from_linear(linear, layout=[[0, 1, 0], [1, 0, 0]])
    assert mask.layout.coords.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="by"):
        BlockSparseLinear.from_linear(linear, by="luck")
    with pytest.raises(ValueError, match="layout"):
        BlockSparseLinear(64, 96, layout=BlockLayout([[1]], 32))
    for size in (0, 12):
        for make in (
            lambda s: BlockSparseLinear(64, 96, block_size=s),
            lambda s: BlockSparseLinear.from_linear(linear, 0.5, s),
        ):
            with pytest.raises(ValueError, match="block_size: expected 8, 16, 32, 64 or 128, got"):
                make(size)


def test_state_of_another_pattern(device):
    """A state with fewer blocks, of another size, loads and brings its pattern."""
    source, x = (
        BlockSparseLinear(100, 60, density=0.3, block_size=16, device=device),
        torch.randn(4, 100, device=device),
    )
    for other in (BlockSparseLinear(100, 60, density=0.8), BlockSparseLinear(100, 60, density=0.3, block_size=16)):
        other.to(device).load_state_dict(source.state_dict())
        assert other.layout == source.layout
        assert_bitwise(other.coords, source.coords)
        assert_bitwise(other(x), source(x))
        other(x).sum().backward()
    assert set(source.state_dict()) == {"weight", "bias", "coords"}
    with pytest.raises(RuntimeError, match="weight"):
        BlockSparseLinear(64, 60).load_state_dict(nn.Linear(64, 60).state_dict())


def test_copies(device):
    layer, x = BlockSparseLinear(64, 96, device=device), torch.randn(4, 64, device=device)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_bitwise(other(x), layer(x))
        with torch.no_grad():
            other.weight.zero_()
        assert other(x).std() < layer(x).std()
    half = copy.deepcopy(layer).half()
    assert half(x.half()).dtype == torch.float16
    assert half.coords.dtype == torch.int32
    with torch.autocast(device, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer, other = BlockSparseLinear(64, 96, density=0.3), BlockSparseLinear(64, 96, density=0.9)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    x = torch.randn(3, 64)
    assert_bitwise(other(x), layer(x))


def test_compile_and_train(device):
    torch.manual_seed(1)
    model = prune(mlp(device), 0.5, 16)
    assert_trains_alike_compiled(model, torch.randn(64, 50, device=device))


# ---- patching
def test_patch_by_name():
    model = mlp()
    first, last = model[0], model[4]
    patched = patch(model, {"0": {"density": 0.5, "block_size": 16}, "[024]": {"density": 0.25}})
    assert patched is model
    assert (model[0].block_size, model[2].block_size, model[4].block_size) == (16, 32, 32)
    assert model[0].density == 0.5
    assert model[2].density == 1 / 3  # of nine blocks, rounded up
    assert_bitwise(model[0].bias, first.bias)
    kept = model[4].layout.to_dense(model[4].weight)
    assert_bitwise(kept[kept != 0], last.weight.T[kept != 0])
    assert model(torch.randn(2, 50)).shape == (2, 10)


def test_patch_refuses():
    assert patchable_layers(mlp()) == ["0", "2", "4"]
    with pytest.raises(ValueError, match="options"):
        patch(mlp(), {"0": {"sparsity": 0.5}})
    for pattern, match in (("7", "no match"), ("1", "ReLU"), (".*", "ReLU")):
        with pytest.raises(ValueError, match=match):
            patch(mlp(), {pattern: {"density": 0.5}})


def test_shared_layers_stay_shared():
    linear = nn.Linear(32, 32)
    for change in (lambda m: prune(m, 1.0), lambda m: patch(m, {"[ab]": {"density": 1.0}})):
        model = change(nn.ModuleDict({"a": linear, "b": linear}))
        assert isinstance(model["a"], BlockSparseLinear)
        assert model["a"] is model["b"]


def test_prune():
    model = prune(mlp(), 0.25, 16, exclude="4")
    assert [type(m).__name__ for m in model] == ["BlockSparseLinear", "ReLU", "BlockSparseLinear", "ReLU", "Linear"]
    assert model[2].density == 0.25
    with pytest.raises(ValueError, match="prune"):
        prune(nn.Sequential(nn.ReLU()), 0.5)


# ---- moving blocks
def test_sparse_optimizer(device):
    model = nn.Sequential(BlockSparseLinear(96, 96, density=0.5, block_size=16)).to(device)
    layer = model[0]
    adam = torch.optim.Adam(model.parameters())
    sparse = SparseOptimizer(model, lr=0.3)
    sparse.attach_optimizer(adam)
    x = torch.randn(20, 96, device=device)
    model(x).square().sum().backward()
    adam.step()
    with torch.no_grad():
        layer.weight[3] *= 1e-3
    before, values, mask = layer.layout, layer.weight.detach().clone(), layer.layout.mask()
    moments = adam.state[layer.weight]["exp_avg"].clone()
    assert sparse.step() == 5  # of eighteen blocks
    after = layer.layout
    assert after.blocks == before.blocks
    changed = (after.coords != before.coords).any(1)
    assert changed.sum() == 5
    assert changed[3]
    assert not (mask & (after.mask() & ~mask)).any()
    assert_bitwise(layer.weight[~changed], values[~changed])
    assert_bitwise(adam.state[layer.weight]["exp_avg"][~changed], moments[~changed])
    assert layer.weight[changed].abs().sum() == 0
    assert adam.state[layer.weight]["exp_avg"][changed].abs().sum() == 0
    norms = values.square().sum((1, 2))
    assert norms[changed.to(device)].max() <= norms[~changed.to(device)].min()
    torch.testing.assert_close(model(x), layer.to_linear()(x), rtol=1e-4, atol=1e-5)
    assert_bitwise(layer.coords.cpu(), after.coords)


def test_sparse_optimizer_grows_where_told():
    layer = BlockSparseLinear(64, 64, layout=torch.eye(4), block_size=16)
    score = torch.zeros(4, 4)
    score[0, 0], score[1, 3], score[2, 0] = 9, 5, 7
    assert SparseOptimizer([layer], lr=0.5, grow=lambda _: score).step() == 2
    assert {(1, 3), (2, 0)} <= {tuple(c) for c in layer.layout.coords.tolist()}
    full = BlockSparseLinear(64, 64, density=1.0)
    assert SparseOptimizer([full], lr=0.5).step() == 0
    for options in ({"lr": 2}, {"grow": "best"}):
        with pytest.raises(ValueError, match="SparseOptimizer"):
            SparseOptimizer([layer], **options)
    with pytest.raises(ValueError, match="expected a BlockSparseLinear"):
        SparseOptimizer(nn.Linear(3, 3))


def test_an_optimizer_of_what_was_there_before_is_refused():
    """Made before the model was patched, it holds the dense layers' weights and would go on training those."""
    model = mlp()
    stale = torch.optim.Adam(model.parameters())
    sparse = SparseOptimizer(prune(model, 0.5))
    with pytest.raises(ValueError, match="SparseOptimizer: optimizer: expected one of the layers' weights"):
        sparse.attach_optimizer(stale)
    with pytest.raises(TypeError, match="SparseOptimizer: optimizer: expected a torch optimizer, got list"):
        sparse.attach_optimizer([])
    sparse.attach_optimizer(torch.optim.Adam(model.parameters()))


def test_compiled_models_follow_blocks_that_move(device):
    torch._dynamo.reset()
    model = nn.Sequential(BlockSparseLinear(64, 64, density=0.5, block_size=16)).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    sparse, x = SparseOptimizer(model, lr=0.5), torch.randn(5, 64, device=device)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model[0].to_linear()(x), rtol=1e-4, atol=1e-5)
        sparse.step()
        with torch.no_grad():
            model[0].weight.normal_()
    torch.testing.assert_close(compiled(x), model[0].to_linear()(x), rtol=1e-4, atol=1e-5)
