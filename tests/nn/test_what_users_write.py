"""Networks and calls as users write them: stock layers, modules of their own, arguments left out."""

import copy
import warnings

import pytest
import torch
from torch import nn

import sbnet
from sbnet import BlockGrid
from sbnet.nn import SparseAvgPool2d, SparseBatchNorm2d, SparseConv2d, SparseMaxPool2d, fold_batch_norm
from sbnet.nn.layers import _say_dense
from support.helpers import random_active, run_python

SIZE = (24, 32)


def with_statistics(net: nn.Module) -> nn.Module:
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.2, 2)
            nn.init.normal_(m.weight)
            nn.init.normal_(m.bias)
    return net.eval()


class Stock(nn.Module):
    """PyTorch's own layers: a pair, a normalisation of a sum, a convolution that is called twice, one that two read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.twice, self.after_twice = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.shared, self.of_shared, self.of_sum = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.body(x)
        x = self.after_twice(self.twice(self.twice(x)))
        y = self.shared(x)
        return self.of_sum(self.of_shared(y) + y)


class Branching(nn.Module):
    """What no trace follows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)) if float(x.sum()) > -1e9 else x


@pytest.mark.parametrize("make", [Stock, Branching, lambda: nn.BatchNorm2d(3)], ids=["stock", "branching", "bare"])
def test_no_normalisation_of_a_stock_network_stays(make):
    net, x = with_statistics(make()), torch.randn(2, 3, *SIZE)
    before = copy.deepcopy(net.state_dict())
    folded = fold_batch_norm(net)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_pairs_become_one_layer_and_the_rest_depthwise():
    folded = fold_batch_norm(with_statistics(Stock()))
    assert isinstance(folded.body[1], nn.Identity)
    for name in ("after_twice", "of_shared", "of_sum"):  # a fold would change what others read
        layer = folded.get_submodule(name)
        assert type(layer) is nn.Conv2d
        assert layer.groups == 8


@pytest.mark.slow
def test_a_network_of_torchvision():
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as e:  # RuntimeError: built for another torch
        pytest.skip(f"torchvision: {e}")
    net, x = with_statistics(models.resnet18(weights=None)), torch.randn(1, 3, 64, 64)
    folded = fold_batch_norm(net)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    assert isinstance(folded.layer1[0].bn2, nn.Identity)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-3, atol=1e-3)


class Own(nn.Module):
    """A module that goes on calling its normalisation with active blocks, and keeps one that it never calls."""

    folds = (("c", "n"),)

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n, self.unused = SparseConv2d(3, 4, 3, padding=1), SparseBatchNorm2d(4), SparseBatchNorm2d(4)

    def forward(self, x, active):
        return self.n(self.c(x, active), active)


def test_a_folded_normalisation_still_takes_active_blocks():
    net, x = with_statistics(Own()), torch.randn(1, 3, *SIZE)
    active = random_active(BlockGrid.cover(SIZE, 8), 1, 0.5)
    folded = fold_batch_norm(net)
    torch.testing.assert_close(folded(x, active), net(x, active), rtol=1e-4, atol=1e-4)
    assert torch.equal(folded.n(x, active=active), x)


@pytest.mark.parametrize("layer", [
    SparseConv2d(4, 4, 1), SparseBatchNorm2d(4), SparseMaxPool2d(2), SparseAvgPool2d(2),
], ids=lambda layer: type(layer).__name__)  # fmt: skip
def test_forgotten_active_blocks_are_pointed_out_once(layer):
    x, name = torch.randn(1, 4, 8, 8), type(layer).__name__
    _say_dense.cache_clear()
    with pytest.warns(UserWarning, match=f"sbnet.nn.{name}: called without active blocks") as caught:
        [layer(x) for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__  # it points at the call
    _say_dense.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, None)  # dense is meant
        layer(x, active=None)
        sbnet.models.resnet18(weights=0, classes=0).eval()(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1, 2], "expected a state dict, got list"),
        ({1: torch.zeros(1)}, "got a key of type int"),
        ({0: torch.zeros(1), "fc.bias": 1}, "got a key of type int"),
        ({"conv1.weight": torch.zeros(3)}, "Error.s. in loading state_dict"),
        (b"", "torch.load reads"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "torch.load reads"),
        (b"PK\x03\x04 no archive", "torch.load reads"),
        (bytes(range(256)), "torch.load reads"),
    ],
    ids=["list", "int key", "two keys", "other network", "empty", "passwd", "archive", "bytes"],
)
def test_weights_that_are_something_else(held, message, tmp_path):
    """One line that names the file, whatever it holds."""
    path = tmp_path / "weights.pt"
    path.write_bytes(held) if isinstance(held, bytes) else torch.save(held, path)
    with pytest.raises(ValueError, match=message) as caught:
        sbnet.models.resnet18(weights=path, classes=0)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert len(text) < len(str(path)) + 300


def test_errors_are_short_whatever_was_given():
    x = torch.randn(1, 4, 16, 16)
    active = random_active(BlockGrid.cover((16, 16), 8))
    calls = [
        lambda: sbnet.sparse_conv2d(x, x[:, :, :1, :1], None, active, activation="x" * 100_000),
        lambda: sbnet.sparse_max_pool2d(x, active, list(range(10_000))),
        lambda: sbnet.sparse_max_pool2d(x, active, "3" * 10_000),
        lambda: sbnet.sparse_gather(x, active, tail="zero" * 10_000),
        lambda: sbnet.sparsify(nn.Identity(), torch.zeros([1] * 60)),
        lambda: sbnet.models.resnet18(weights={f"layer{k}": x for k in range(5000)}),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert len(str(caught.value)) < 400


def test_the_module_is_the_command():
    result = run_python(
        "import runpy, sys; sys.argv = ['sbnet', '--help']; runpy.run_module('sbnet', run_name='__main__')"
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Usage: sbnet" in result.stdout
