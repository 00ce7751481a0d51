"""Networks that cannot be captured or exported: one line says which module, and what to do."""

from __future__ import annotations

import re
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


class Proposals(nn.Module):
    """Keeps as many places as score well: how many, the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv2d(8, 1, 1)

    def forward(self, features: Tensor) -> Tensor:
        found = self.scores(features).flatten()
        kept = found[found > 0]
        return kept[:4] if kept.numel() > 4 else kept


class Detector(nn.Module):
    """As torchvision's: the convolutions in one part, in the others what asks for values."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.rpn, self.inside = Proposals(), inside

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)
        if self.inside:
            return self.rpn(features)
        return features * 2 if features.sum() > 0 else features


@pytest.mark.parametrize("inside", [True, False])
def test_of_a_detector_the_message_says_what_to_sparsify_instead(inside):
    net, x = Detector(inside).eval(), torch.randn(1, 3, 16, 16)
    with pytest.raises(ValueError, match="may not depend on values") as error:
        sbnet.sparsify(net, x)
    said = str(error.value)
    assert re.match(rf"sbnet: {'rpn' if inside else 'Detector'} \(test_refusals\.py:\d+\): ", said)
    assert "sparsify model.backbone, which has most of the convolutions, and run the rest as it is" in said
    assert "u0" not in said
    assert len(said) < 200
    sbnet.sparsify(net.backbone, x)(x, torch.ones(1, 16, 16))


@pytest.mark.slow
def test_a_detector_of_torchvision():
    from support import zoo

    if not zoo.available():
        pytest.skip("torchvision and timm are not installed")
    zoo.build("torchvision resnet18")  # makes torchvision importable
    from torchvision.models import detection

    net = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).eval()
    with pytest.raises(ValueError, match=r"^sbnet: rpn \(rpn\.py:\d+\): .*sparsify model\.backbone"):
        sbnet.sparsify(net, torch.rand(1, 3, 128, 160))
