"""Networks that nobody can capture or export: one line says which module, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sbnet
from sbnet import export

MOST = 400  # characters


class Part(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


def halved(x: Tensor) -> Tensor:
    while x.mean() > 1:
        x = x / 2
    return x


VALUES = "may not depend on values"
# name -> (what is wrong with a network, what its message says)
BAD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch on a value": (lambda: Part(lambda x: x * 2 if x.sum() > 0 else x), VALUES),
    "a loop on a value": (lambda: Part(halved), VALUES),
    "a size from a value": (lambda: Part(lambda x: x[:, : int(x.max().item())]), VALUES),
    "other channels": (lambda: nn.Conv2d(4, 4, 1), "to have 4 channels.*must take the example"),
    "NumPy": (lambda: Part(lambda x: torch.from_numpy(x.numpy() * 2)), "ops of PyTorch alone"),
}
CAPTURED = {
    "as many as are set": (lambda: Part(lambda x: x[x > 0]), VALUES),
    "random": (lambda: Part(lambda x: x + torch.rand_like(x)), "expected a network in eval mode, got rand"),
    "a memory": (Counting, "expected a network without a memory, got one that writes"),
}
EXPORTED = {
    "an op without an ONNX form": (
        lambda: Part(lambda x: torch.linalg.svd(x)[1]),
        "expected an op with an ONNX form, got",
    )
}


def deep(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.ReLU(), part)).eval()


def holds(message: str) -> None:
    assert len(message) < MOST
    assert "\n" not in message
    assert "1.1" in message


@pytest.mark.parametrize("name", [*BAD, *CAPTURED])
def test_capture_names_the_module(name, capfd):
    make, says = {**BAD, **CAPTURED}[name]
    with pytest.raises(ValueError, match=says) as error:
        sbnet.sparsify(deep(make()), torch.randn(1, 3, 16, 16))
    holds(str(error.value))
    assert "def forward" not in capfd.readouterr().err  # no dump of the graph beside it


@pytest.mark.parametrize("name", [*BAD, *EXPORTED])
def test_export_names_the_module(name, tmp_path, capfd):
    pytest.importorskip("onnxscript")
    make, says = {**BAD, **EXPORTED}[name]
    with pytest.raises(export.ExportError, match=says) as error:
        export.to_onnx(deep(make()), (torch.randn(1, 3, 16, 16),), tmp_path / "bad.onnx")
    holds(str(error.value))
    assert "def forward" not in capfd.readouterr().err


def test_the_line_is_the_networks_own():
    with pytest.raises(ValueError, match=r"sbnet: 1\.1 \(test_refusals\.py:\d+\): "):
        sbnet.sparsify(deep(Part(lambda x: x if x.sum() > 0 else -x)), torch.randn(1, 3, 16, 16))
