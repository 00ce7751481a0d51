"""One convolution layer with its dense forms and its exact result: what convolution benchmarks share."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from sbnet.benchmarks.harness import dense
from sbnet.benchmarks.harness.registry import Setting, Side, WrongResult, close, short
from sbnet.geometry import to_pair

Shape = tuple[int, int, int, int]


class Layer:
    """A layer with bias and ReLU. shape: (N, H, W, C) of its input; filters: its output channels, C if not given.

    It is padded by half its kernel's reach. `size` is (N, H, W) of its output. tf32: float32 by products of tf32, in
    every form.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, setting: Setting, filters: int = 0, kernel: int | tuple[int, int] = 3,
        stride: int = 1, dilation: int = 1, groups: int = 1, tf32: bool = False,
    ):  # fmt: skip
        n, h, w, c = shape
        device, last = setting.device, torch.channels_last
        self.kernel = to_pair(kernel, "Layer: kernel")
        self.padding = (self.kernel[0] // 2 * dilation, self.kernel[1] // 2 * dilation)
        self.dtype, self.stride, self.dilation, self.groups = dtype, stride, dilation, groups
        self.tf32 = tf32
        self._others = setting.level == "full"  # dense forms whose export takes longer than a small case
        filters, fan_in = filters or c, c // groups * self.kernel[0] * self.kernel[1]
        self.x = torch.randn(n, c, h, w, device=device, dtype=dtype).contiguous(memory_format=last)
        weight = torch.randn(filters, c // groups, *self.kernel, device=device) / fan_in**0.5
        self.weight = weight.to(dtype).contiguous(memory_format=last)
        self.bias = torch.randn(filters, device=device, dtype=dtype)
        ho, wo = sbnet.conv_output_size((h, w), self.kernel, (stride, stride), self.padding, (dilation, dilation))
        self.size = (n, ho, wo)
        self.residual = torch.randn(n, filters, ho, wo, device=device, dtype=dtype).contiguous(memory_format=last)
        self.out = torch.empty_like(self.residual)
        self._compiled = (
            torch.compile(self.plain, mode="max-autotune-no-cudagraphs") if self._compiles(setting) else None
        )

    @staticmethod
    def _compiles(setting: Setting) -> bool:
        return setting.cuda and setting.compiled and setting.level == "full"

    @property
    def geometry(self) -> tuple[int, tuple[int, int], int, int]:
        return self.stride, self.padding, self.dilation, self.groups

    def _allowed(self) -> AbstractContextManager[None]:
        """cuDNN as a dense form runs: it tries its ways, and may use tf32 where the layer does."""
        cudnn = torch.backends.cudnn
        return cudnn.flags(enabled=True, benchmark=cudnn.benchmark, allow_tf32=True) if self.tf32 else nullcontext()

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        with self._allowed():
            y = F.conv2d(x, weight, bias, *self.geometry)
        return (y if residual is None else y.add_(residual)).relu_()

    @functools.cached_property
    def _forms(self) -> dict[str, dense.Form]:
        """Of a CPU, beside F.conv2d."""
        filters, channels, *_ = self.weight.shape
        conv = torch.nn.Conv2d(
            channels * self.groups, filters, self.kernel, self.stride, self.padding, self.dilation, self.groups,
            dtype=self.dtype,
        ).eval()  # fmt: skip
        conv.weight.data, conv.bias.data = self.weight, self.bias  # type: ignore[union-attr]
        found = dense.forms(torch.nn.Sequential(conv, torch.nn.ReLU(inplace=True)).requires_grad_(False), self.x)
        return {name: form for name, form in found.items() if name not in (dense.PLAIN, dense.of_dtype(self.dtype))}

    @functools.cached_property
    def exact(self) -> Tensor:
        """Before residual and ReLU; float64 for float32, float32 for the halves."""
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):  # runs once: not tuned
            return F.conv2d(self.x.to(wide), self.weight.to(wide), self.bias.to(wide), *self.geometry)

    @functools.cached_property
    def torchs(self) -> Tensor:
        with self._allowed():
            return F.conv2d(self.x, self.weight, self.bias, *self.geometry)

    def _fused(self, added: Tensor | None) -> Tensor:
        geometry = [self.stride] * 2, self.padding, [self.dilation] * 2, self.groups
        with self._allowed():
            if added is None:
                return torch.cudnn_convolution_relu(self.x, self.weight, self.bias, *geometry)
            return torch.cudnn_convolution_add_relu(self.x, self.weight, added, 1.0, self.bias, *geometry)

    def dense(self, residual: bool = False) -> dict[str, Side]:
        """Every dense form of the layer: the fastest is the baseline."""
        x, weight, bias, added = self.x, self.weight, self.bias, self.residual if residual else None
        plain = "F.conv2d, oneDNN" if x.device.type == "cpu" else "F.conv2d"
        forms = {plain: Side(lambda: self.plain(x, weight, bias, added))}
        if not x.is_cuda and added is None and self._others:
            forms |= {name: Side(functools.partial(f.run, f.prepare(x))) for name, f in self._forms.items()}
        if x.is_cuda:
            forms["fused cuDNN"] = Side(functools.partial(self._fused, added))
            if (compiled := self._compiled) is not None:
                forms["torch.compile"] = Side(lambda: compiled(x, weight, bias, added))
        return forms

    def sparse(self, active: sbnet.ActiveBlocks, fringe: sbnet.Fringe | None, residual: bool = False) -> Tensor:
        added = self.residual if residual else None
        sbnet.sparse_conv2d_(
            self.x, self.weight, self.bias, active, self.out,
            stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups, activation="relu",
            fringe=fringe, residual=added, allow_tf32=self.tf32,
        )  # fmt: skip
        return self.out

    def gather_conv_scatter(self, active: sbnet.ActiveBlocks, out: Tensor) -> Tensor:
        """The paper's way: haloed blocks as a batch, a dense convolution of them, blocks back."""
        haloed = active.with_grid(active.grid.conv_input(self.kernel, self.stride, self.padding))
        stack = sbnet.sparse_gather(self.x, haloed, tail="undefined")
        if stack.is_cuda:
            done = torch.cudnn_convolution_relu(stack, self.weight, self.bias, [self.stride] * 2, [0, 0], [1, 1], 1)
        else:
            done = F.conv2d(stack, self.weight, self.bias, self.stride).relu_()
        sbnet.sparse_scatter_(done, active, out)
        return out

    def check(
        self, got: Tensor, inside: Tensor | None = None, zero: Tensor | None = None, residual: bool = False
    ) -> float:
        """got against the exact layer on the pixels `inside` (all); 0 on `zero`; NaN (untouched) elsewhere."""
        added = (lambda y: y + self.residual.to(y.dtype)) if residual else lambda y: y
        error = close(got, added(self.torchs).relu(), added(self.exact).relu(), inside)
        if zero is not None and inside is not None:
            if not bool((torch.where(zero, got, 0) == 0).all()):
                raise WrongResult("the fringe is not zero")
            if not bool((got.isnan() | inside | zero).all()):
                raise WrongResult("pixels outside of the active blocks and the fringe were written")
        return error

    def flops(self, pixels: float) -> float:
        return 2 * self.weight.numel() * pixels

    def bytes(self, active: sbnet.ActiveBlocks, residual: bool = False) -> float:
        """Input of the blocks with its halo read, blocks written (and the residual read), the weight once."""
        grid = active.grid.conv_input(self.kernel, self.stride, self.padding, self.dilation)
        blocks, (bh, bw), (ih, iw) = int(active.count), active.grid.bsize, grid.bsize
        # neighbours share halos: no more is read than the plane holds; a kernel narrower than its stride skips pixels
        read_share = min(self.kernel[0] / self.stride, 1) * min(self.kernel[1] / self.stride, 1)
        read = min(blocks * ih * iw, self.x[:, 0].numel()) * read_share * self.x.shape[1]
        written = blocks * bh * bw * (2 if residual else 1) * self.out.shape[1]
        return (read + written + self.weight.numel()) * self.x.element_size()


def fringe_mask(fringe: sbnet.Fringe, like: Tensor) -> Tensor:
    """[N,1,H,W] bool: the pixels of a fringe."""
    flags = torch.zeros_like(like).flatten()
    flags[fringe.pixels[: int(fringe.count)].long()] = True
    return flags.view_as(like)


def facts(shape: Shape, dtype: torch.dtype, mask: str, block: Any, **more: Any) -> dict[str, Any]:
    sides = list(block) if isinstance(block, tuple) else [block, block]
    return {"size": list(shape[:3]), "channels": shape[3], "dtype": short(dtype), "mask": mask, "block": sides, **more}
