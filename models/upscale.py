"""Networks that enlarge pictures: SRVGGNetCompact (Real-ESRGAN, arXiv 2107.10833) and waifu2x's upconv_7."""

from __future__ import annotations

import os
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.models.ncnn import read_ncnn

CORE = 4  # the factor that SRVGG computes at; smaller ones are resampled from it, as in realesr-animevideov3


class SRVGG(nn.Module):
    """3x3 convolutions with PReLU on the small plane, and one shuffle of pixels at the end.

    Input [N,3,H,W], 0 to 1. Output [N,3,sH,sW]; with shuffle=False [N,3ss,H,W], which `F.pixel_shuffle(y, s)` makes
    that: all layers are then on one plane. What a factor of 2 or 3 resamples bicubically is one
    convolution.

    Args:
        scale: 2, 3 or 4.
        width, depth: channels and number of the convolutions between the first and the last.
    """

    def __init__(self, scale: int = 4, width: int = 64, depth: int = 16, shuffle: bool = True) -> None:
        super().__init__()
        if scale not in (2, 3, 4):
            raise ValueError(f"sbnet: SRVGG: scale: expected 2, 3 or 4, got {scale}")
        self.scale, self.shuffle = scale, shuffle
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.PReLU(width)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width)]
        self.body = nn.Sequential(*layers)
        self.last = nn.Conv2d(width, 3 * CORE**2, 3, padding=1)
        self.nearest = nn.Conv2d(3, 3 * CORE**2, 1, bias=False)  # each pixel's colour in all that it becomes
        self.nearest.weight.data.copy_(torch.eye(3).repeat_interleave(CORE**2, 0)[:, :, None, None])
        self.resample: nn.Module = nn.Identity()
        if scale != CORE:
            self.resample = nn.Conv2d(3 * CORE**2, 3 * scale**2, 3, padding=1, bias=False)
            self.resample.weight.data.copy_(_bicubic(scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.resample(self.last(self.body(x)) + self.nearest(x))
        return F.pixel_shuffle(y, self.scale) if self.shuffle else y


def _bicubic(scale: int) -> Tensor:
    """[3ss,48,3,3]: shuffle, bicubic resampling and its inverse shuffle as one convolution, read off impulses."""
    channels = 3 * CORE**2
    impulses = torch.zeros(channels, channels, 5, 5)
    impulses[torch.arange(channels), torch.arange(channels), 2, 2] = 1
    large = F.pixel_shuffle(impulses, CORE)
    small = F.interpolate(large, size=(5 * scale, 5 * scale), mode="bicubic", align_corners=False)
    return F.pixel_unshuffle(small, scale)[:, :, 1:4, 1:4].flip(2, 3).transpose(0, 1)


class UpConv7(nn.Module):
    """Six 3x3 convolutions and a transposed one that doubles the plane. Input [N,3,H,W], 0 to 1, output [N,3,2H,2W].

    The original pads nothing and returns 14 pixels less on each side; here every layer keeps its plane, and pixels
    further than 7 from the border are the same.
    """

    reach = 7

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128, 128, 256)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *widths), widths, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.LeakyReLU(0.1)]
        self.body = nn.Sequential(*layers)
        self.last = nn.ConvTranspose2d(widths[-1], 3, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def srvgg(param: str | os.PathLike[str], scale: int, shuffle: bool = True) -> SRVGG:
    """SRVGG with the weights of ncnn's realesr-animevideov3-xN.param and .bin."""
    net = SRVGG(scale, shuffle=shuffle)
    _load([*net.body, net.last], param)
    return net.eval()


def upconv7(param: str | os.PathLike[str]) -> UpConv7:
    """UpConv7 with the weights of ncnn's models-upconv_7_*/scale2.0x_model.param and .bin."""
    net = UpConv7()
    _load([m for m in (*net.body, net.last) if not isinstance(m, nn.LeakyReLU)], param)
    return net.eval()


def _load(modules: list[nn.Module], param: str | os.PathLike[str]) -> None:
    layers = read_ncnn(param)
    kinds = {nn.Conv2d: "Convolution", nn.ConvTranspose2d: "Deconvolution", nn.PReLU: "PReLU"}
    wanted = [(kinds[type(m)], tuple(cast(Tensor, m.weight).shape)) for m in modules]  # type: ignore[index]
    found = [(layer.kind, tuple(layer.weight.shape)) for layer in layers]
    if wanted != found:
        at = next((k for k, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), len(wanted))
        raise ValueError(f"sbnet: {os.fspath(param)}: expected {wanted[at:][:1]} as layer {at}, got {found[at:][:1]}")
    for module, layer in zip(modules, layers, strict=True):
        cast(Tensor, module.weight).data.copy_(layer.weight)
        if layer.bias is not None:
            cast(Tensor, module.bias).data.copy_(layer.bias)
