"""torchvision.transforms.v2: the mask travels with its picture, cropped, flipped and scaled as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from sbnet.engine.sparsify import SparseRun
from sbnet.masks import open_mask


class WithMask(v2.Transform):
    """Puts a mask, a `tv_tensors.Mask` [1,H,W] or [N,1,H,W] of 0 and 1, behind the picture of a sample:
    (picture, ...) becomes (picture, mask, ...). The transforms after it treat both alike.

    Args:
        mask: a Mask of `sbnet.masks`, or what names one.

    >>> ready = v2.Compose([v2.ToImage(), WithMask("zones.json"), v2.RandomResizedCrop(224), v2.ToDtype(torch.float32,
    ...                     scale=True), Sparse(run)])
    """

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = open_mask(mask)

    def forward(self, *inputs: Any) -> Any:
        picture, *rest = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)) else inputs
        pixels = functional.to_image(picture) if not isinstance(picture, Tensor) else picture
        if pixels.dim() not in (3, 4):
            raise ValueError(f"sbnet: WithMask: picture: expected [C,H,W] or [N,C,H,W], got {tuple(pixels.shape)}")
        x = functional.to_dtype(pixels.as_subclass(Tensor), torch.float32, scale=True)
        found = self.mask(x if x.dim() == 4 else x[None]).to(torch.uint8)
        return (picture, tv_tensors.Mask(found[:, None] if x.dim() == 4 else found), *rest)


class Sparse(v2.Transform):
    """Runs what `sbnet.sparsify` gave on a picture and the mask behind it: (picture, mask, ...) becomes
    (result, ...). For one picture [C,H,W] results are those of a batch of one.

    Args:
        run: a SparseRun.
        margin: pixels by which masks are grown, instead of the run's own; transforms that make pictures smaller may
            leave out what is a pixel wide.
    """

    def __init__(self, run: SparseRun, margin: int | None = None) -> None:
        super().__init__()
        self.run, self.margin = run, margin

    def forward(self, *inputs: Any) -> Any:
        sample = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)) else inputs
        if len(sample) < 2 or not isinstance(sample[1], tv_tensors.Mask):
            raise ValueError("sbnet: Sparse: sample: expected a picture and a tv_tensors.Mask behind it (WithMask)")
        picture, mask, *rest = sample
        x, pixels = (v.as_subclass(Tensor) for v in (picture, mask))
        if x.dim() == 3:
            x, pixels = x[None], pixels[None]
        result = self.run(x.contiguous(memory_format=torch.channels_last), pixels, margin=self.margin, copy=True)
        return (result, *rest) if rest else result
