"""Residual networks that run on the active blocks of an image: ResNet-18, 34, 50 (He et al., arXiv 1512.03385), and the
narrow bottlenecks of SBNet (Ren et al., arXiv 1801.02108). Parameter names are torchvision's."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.active import ActiveBlocks
from sbnet.engine.arguments import check_example
from sbnet.engine.sparsify import SparseRun, sparsify
from sbnet.geometry import conv_output_size
from sbnet.nn import (
    SparseBasicBlock,
    SparseBatchNorm2d,
    SparseBottleneck,
    SparseConv2d,
    SparseMaxPool2d,
)
from sbnet.nn.residual import convolve, rectify
from sbnet.ops import mask_pyramid

# Block sizes of the planes at stride 2, 4, 8, 16, 32: multiples of 8, which Hopper's kernels need, and small where a
# block covers much of the image.
BLOCKS = (16, 16, 8, 8, 8)


class SparseResNet(nn.Module):
    """A residual network, dense or masked: `net(x)` is torchvision's ResNet, `net(x, mask)` computes active blocks.

    Args:
        block: SparseBasicBlock or SparseBottleneck.
        layers: blocks of each stage; each stage but the first halves the plane.
        planes: `planes` of the blocks of each stage.
        stem: channels of the first convolution, 7x7 with stride 2.
        pool: a 3x3 max pool with stride 2 after it?
        classes: of the classifier; 0: none, the network returns the last stage's feature map.
        blocks: block sizes of the planes at stride 2, 4, 8, ...; an int or (height, width) each. One int: of all. Each
            choice has its own masks. Small blocks in the coarse planes pay on a CPU: (16, 8, 4, 4, 4).
        preactivation: of the blocks; the last one is then followed by a normalisation, `norm`, and ReLU.

    State dicts fit torchvision's networks of the same shape, with a classifier or without.

    >>> net = resnet50(weights=0).eval()
    >>> logits = net(frame)  # dense
    >>> logits = net(frame, mask)  # mask [N,H,W] bool: what matters
    >>> run = net.capture(frame)  # planned buffers, one CUDA graph
    >>> logits = run(frame, mask)
    """

    folds = (("conv1", "bn1"),)

    def __init__(
        self,
        block: type[SparseBasicBlock | SparseBottleneck],
        layers: Sequence[int],
        planes: Sequence[int] = (64, 128, 256, 512),
        *,
        stem: int = 64,
        pool: bool = True,
        classes: int = 1000,
        blocks: int | Sequence[Any] = BLOCKS,
        preactivation: bool = False,
    ) -> None:
        super().__init__()
        self.stages = len(layers)
        self.conv1 = SparseConv2d(3, stem, 7, 2, 3, bias=False)
        self.bn1 = SparseBatchNorm2d(stem)
        self.maxpool = SparseMaxPool2d(3, 2, 1) if pool else None
        inputs = stem
        for stage, (count, width) in enumerate(zip(layers, planes, strict=True), 1):
            made = []
            for k in range(count):
                stride = 2 if stage > 1 and k == 0 else 1
                made.append(block(inputs, width, stride, preactivation=preactivation))
                inputs = width * block.expansion
            self.add_module(f"layer{stage}", nn.ModuleList(made))
        self.norm = SparseBatchNorm2d(inputs) if preactivation else None
        self.fc = nn.Linear(inputs, classes) if classes else None
        levels = self.stages + pool
        self.blocks = [blocks] * levels if isinstance(blocks, int) else list(blocks)[:levels]
        if len(self.blocks) != levels:
            raise ValueError(
                f"sbnet: SparseResNet: blocks: expected one size for each of {levels} planes, got {blocks}"
            )
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def planes(self, size: Sequence[int]) -> list[tuple[int, int, Any]]:
        """(height, width, block size) of every plane that the network writes, for an input of `size`."""
        found, plane = [], (size[0], size[1])
        for level, block in enumerate(self.blocks):
            kernel = 3 if level else 7
            plane = conv_output_size(plane, (kernel, kernel), (2, 2), (kernel // 2, kernel // 2), (1, 1))
            found.append((*plane, block))
        return found

    def features(self, x: Tensor, *active: ActiveBlocks | None) -> Tensor:
        """The last stage's feature map; `active` holds one list a plane, or nothing."""
        lists = list(active) or [None] * len(self.blocks)
        x = convolve(self.conv1, self.bn1, x, lists[0], "relu")
        level = 0
        if self.maxpool is not None:
            level = 1
            x = self.maxpool(x, lists[1])
        for stage in range(1, self.stages + 1):
            stage_blocks: Any = self.get_submodule(f"layer{stage}")
            for k, block in enumerate(stage_blocks):
                if stage > 1 and k == 0:
                    x, level = block(x, lists[level], lists[level + 1]), level + 1
                else:
                    x = block(x, lists[level])
        return x if self.norm is None else rectify(self.norm, x, lists[level])

    def head(self, x: Tensor) -> Tensor:
        """Logits [N,classes]: the mean over the whole plane, inactive pixels being zeros, and a linear layer."""
        return x if self.fc is None else self.fc(x.mean((2, 3)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [N,3,H,W]; mask [N,H,W] or [N,1,H,W], bool or set where greater than 0.5, or None for the dense network."""
        if mask is None:
            return self.head(self.features(x))
        return self.head(self.features(x, *mask_pyramid(mask, self.planes(x.shape[2:])).planes))

    def capture(self, example: Tensor, **options: Any) -> SparseRun:
        """`sbnet.sparsify` of a copy in the example's dtype, with this network's block sizes.

        Args:
            example: [N,3,H,W] on the network's device, float32, float16 or bfloat16.
            options: of `sparsify`.
        """
        check_example((example,), "capture: example")
        own = copy.deepcopy(self).eval().requires_grad_(False).to(example.device, example.dtype)
        blocks = {(height, width): block for height, width, block in self.planes(example.shape[2:])}
        return sparsify(own, example, **{"block": blocks, **options})


Weights = int | str | os.PathLike[str] | Mapping[str, Tensor] | None


def _with_weights(net: SparseResNet, seed_or_file: Weights) -> SparseResNet:
    if seed_or_file is None or isinstance(seed_or_file, int):
        return net
    found, name = seed_or_file, "weights"
    if not isinstance(found, Mapping):
        name = os.fspath(found)
        try:
            found = torch.load(name, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, AttributeError):
            # whatever torch.load makes of bytes that are something else
            raise ValueError(f"{name}: expected a state dict that torch.load reads, got something else") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}: expected a state dict, got {type(found).__name__}")
    odd = [type(k).__name__ for k in found if not isinstance(k, str)]
    if odd:
        raise ValueError(f"{name}: expected a state dict with names as keys, got a key of type {odd[0]}")
    state = {k: v for k, v in found.items() if net.fc is not None or not k.startswith("fc.")}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:  # a line for each tensor that does not fit
        first, *others = [line.strip() for line in str(error).splitlines()]
        raise ValueError(f"{name}: {' '.join([first, *others])[:240]}") from None
    return net


def _build(weights: Weights, *args: Any, **options: Any) -> SparseResNet:
    if not isinstance(weights, int):
        return _with_weights(SparseResNet(*args, **options), weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(weights)
        return SparseResNet(*args, **options)


def resnet18(weights: Weights = None, **options: Any) -> SparseResNet:
    """ResNet-18. weights: a seed, a file of a state dict (torchvision's fit), or a state dict; options: of
    `SparseResNet`."""
    return _build(weights, SparseBasicBlock, (2, 2, 2, 2), **options)


def resnet34(weights: Weights = None, **options: Any) -> SparseResNet:
    """ResNet-34; arguments as for `resnet18`."""
    return _build(weights, SparseBasicBlock, (3, 4, 6, 3), **options)


def resnet50(weights: Weights = None, **options: Any) -> SparseResNet:
    """ResNet-50 (stride in the 3x3 convolutions, as in torchvision); arguments as for `resnet18`."""
    return _build(weights, SparseBottleneck, (3, 4, 6, 3), **options)


def sbnet_resnet(weights: Weights = None, **options: Any) -> SparseResNet:
    """Bottlenecks of 96, 192, 256 and 384 channels at stride 2, 4, 8 and 16, the sizes that SBNet was measured on; four
    stages of 3, 6, 6 and 3. Arguments as for `resnet18`."""
    given = {"stem": 32, "pool": False, "classes": 0, **options}
    return _build(weights, SparseBottleneck, (3, 6, 6, 3), (24, 48, 64, 96), **given)
