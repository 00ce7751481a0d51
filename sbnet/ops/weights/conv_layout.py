"""Which channels the blocks of a block-sparse convolution connect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from sbnet import _library  # noqa: F401  (registers torch.ops.sbnet)
from sbnet.ops.common import constant_in_traces

HEADER = 13  # kConvLayoutNumbers


class ConvLayout:
    """Blocks (input channels, output channels) of a convolution, and the kernel size that all of them have.

    Lists may be of any sizes and overlap between blocks: contributions add up. Together they name every channel from 0
    on. Immutable and hashable; picklable; a constant for torch.compile and torch.export.

    Args:
        BCK: of each block a list of input channels and a list of output channels.
        kernel_size: one to three numbers, or an int for one axis.

    Attributes:
        filter_shape: [blocks, outputs, inputs, *kernel_size] if all blocks are of one size, else [weights]: the filters
            one after the other. Ops take either.
        block_size: where blocks are squares of a grid, 16 to 128 channels to a side, each there once: that; else 0.

    Raises:
        ValueError: a channel that no block has, one twice in a list, an empty list.

    >>> layout = sbnet.ConvLayout([[range(0, 16), range(0, 32)], [range(8, 24), range(32, 64)]], (3, 3))
    >>> layout.filter_shape
    (2, 32, 16, 3, 3)
    """

    def __init__(self, BCK: Iterable[Sequence[Iterable[int]]], kernel_size: int | Sequence[int]) -> None:
        blocks = []
        for block in BCK:
            pair = tuple(tuple(int(v) for v in channels) for channels in block)
            if len(pair) != 2:
                raise ValueError(f"ConvLayout: BCK: expected inputs and outputs of a block, got {len(pair)} lists")
            blocks.append(pair)
        self.BCK = tuple(blocks)
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(int(k) for k in kernel_size)
        if not 1 <= len(self.kernel_size) <= 3 or min(self.kernel_size) < 1:
            raise ValueError(f"ConvLayout: kernel_size: expected one to three numbers from 1 on, got {kernel_size}")
        if not blocks or any(not channels for block in blocks for channels in block):
            raise ValueError("ConvLayout: BCK: expected channels on both sides of every block, got none")
        self.blocks = len(blocks)
        self.in_channels, self.out_channels = (1 + max(max(block[side]) for block in blocks) for side in (0, 1))
        self.sizes = tuple((len(outputs), len(inputs)) for inputs, outputs in blocks)
        taps = math.prod(self.kernel_size)
        self.weights = sum(outputs * inputs for outputs, inputs in self.sizes) * taps
        self.filter_shape: tuple[int, ...] = (self.weights,)
        if len(set(self.sizes)) == 1:
            self.filter_shape = (self.blocks, *self.sizes[0], *self.kernel_size)
        words = [v for inputs, outputs in blocks for v in (len(inputs), len(outputs), *inputs, *outputs)]
        with _disable_current_modes():  # a layout may be made while a program is being traced
            self.lists = torch.tensor(words, dtype=torch.int32)  # on the CPU: what kernels make their tables of
            try:
                self._tables = torch.ops.sbnet.blocksparse_conv_tables(
                    self.lists, self.in_channels, self.out_channels, taps
                )
            except RuntimeError as error:
                raise ValueError(str(error)) from None
            self._numbers: list[int] = self._tables[:HEADER].tolist()
        self.block_size = self._numbers[10]
        self._on: dict[str, Tensor] = {}
        self._back: ConvLayout | None = None
        self.by_product: Any = None  # kept by conv_product: a BlockLayout, or False

    @classmethod
    def from_lists(cls, lists: Tensor, kernel_size: int | Sequence[int]) -> ConvLayout:
        """From `lists` of another: numbers of inputs and outputs, inputs, outputs of each block."""
        words, blocks = lists.tolist(), []
        while words:
            inputs, outputs = words[:2]
            blocks.append((words[2 : 2 + inputs], words[2 + inputs : 2 + inputs + outputs]))
            words = words[2 + inputs + outputs :]
        return cls(blocks, kernel_size)

    @classmethod
    def from_mask(
        cls, mask: Any, in_channels: int, out_channels: int, block_size: int, kernel_size: int | Sequence[int]
    ) -> ConvLayout:
        """From a matrix [CB, KB] of 0 and 1 over square blocks of channels; the last of a side may be smaller."""
        blocks = []
        for c, k in torch.as_tensor(mask).nonzero().tolist():
            inputs = range(c * block_size, min(in_channels, (c + 1) * block_size))
            outputs = range(k * block_size, min(out_channels, (k + 1) * block_size))
            blocks.append((inputs, outputs))
        return cls(blocks, kernel_size)

    @classmethod
    def from_magnitude(cls, dense: Tensor, block_size: int, density: float) -> ConvLayout:
        """The square blocks of a dense [K, C, *kernel_size] of largest norm, a share `density` of all (rounded up).

        Every input and every output block keeps its largest at least, so that no channel is without weights.
        """
        norms = dense.detach().float().square().flatten(2).sum(2).t()
        for side in (0, 1):  # sums over blocks of channels, inputs first
            starts = torch.arange(norms.shape[side], device=norms.device) // block_size
            shape = list(norms.shape)
            shape[side] = -(-shape[side] // block_size)
            norms = norms.new_zeros(shape).index_add(side, starts, norms)
        mask = covering_mask(norms.cpu(), density)
        return cls.from_mask(mask, dense.shape[1], dense.shape[0], block_size, tuple(dense.shape[2:]))

    @property
    def density(self) -> float:
        """Weights, as a share of those of a dense convolution; more than 1 where blocks overlap much."""
        return self.weights / (self.in_channels * self.out_channels * math.prod(self.kernel_size))

    def swapped(self) -> ConvLayout:
        """Inputs as outputs and outputs as inputs."""
        if self._back is None:
            self._back = ConvLayout([(outputs, inputs) for inputs, outputs in self.BCK], self.kernel_size)
            self._back._back = self
        return self._back

    def on(self, device: torch.device, swapped: bool = False) -> tuple[Tensor, list[int]]:
        """The tables on a device, int32, and the numbers that ops take with them; or those of the swapped layout."""
        # As a constant: tracing looks neither into the tables nor into which devices have them.
        return self._copy_to(str(device), swapped)

    @constant_in_traces
    def _copy_to(self, device: str, swapped: bool) -> tuple[Tensor, list[int]]:
        if swapped:
            return self.swapped()._copy_to(device, False)
        if device not in self._on:
            with _disable_current_modes():
                self._on[device] = self._tables.to(device)
        return self._on[device], self._numbers

    def split(self, filters: Tensor) -> list[Tensor]:
        """Filters of either shape -> one [outputs, inputs, *kernel_size] a block; views."""
        taps = math.prod(self.kernel_size)
        parts = filters.reshape(-1).split([outputs * inputs * taps for outputs, inputs in self.sizes])
        return [part.view(*size, *self.kernel_size) for part, size in zip(parts, self.sizes, strict=True)]

    def collapse(self, filters: Sequence[Tensor]) -> Tensor:
        """One filter a block -> filters of `filter_shape`."""
        return torch.cat([f.reshape(-1) for f in filters]).view(self.filter_shape)

    def to_dense(self, filters: Tensor) -> Tensor:
        """Filters -> a dense [K, C, *kernel_size], overlapping blocks summed. Differentiable."""
        dense = filters.new_zeros(self.out_channels, self.in_channels, *self.kernel_size)
        for (inputs, outputs), part in zip(self.BCK, self.split(filters), strict=True):
            rows, columns = torch.tensor(outputs)[:, None], torch.tensor(inputs)[None]
            dense = dense.index_put((rows.to(dense.device), columns.to(dense.device)), part, accumulate=True)
        return dense

    def from_dense(self, dense: Tensor) -> Tensor:
        """A dense [K, C, *kernel_size] -> the filters of the blocks, a weight in each that has it. Differentiable."""
        if dense.shape != (self.out_channels, self.in_channels, *self.kernel_size):
            raise ValueError(
                f"ConvLayout.from_dense: expected {(self.out_channels, self.in_channels, *self.kernel_size)}, got "
                f"{tuple(dense.shape)}"
            )
        return self.collapse([dense[list(outputs)][:, list(inputs)] for inputs, outputs in self.BCK])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConvLayout):
            return NotImplemented
        return self is other or (self.BCK == other.BCK and self.kernel_size == other.kernel_size)

    def __hash__(self) -> int:
        return hash((self.BCK, self.kernel_size))

    def __repr__(self) -> str:
        return f"ConvLayout({self.in_channels} -> {self.out_channels}, {self.blocks} blocks, {self.kernel_size})"

    def __reduce__(self) -> tuple:
        return ConvLayout, (self.BCK, self.kernel_size)

    def __deepcopy__(self, memo: dict) -> ConvLayout:
        return self


_pytree.register_constant(ConvLayout)


def covering_mask(scores: Tensor, density: float) -> Tensor:
    """[CB, KB] bool: the share `density` of largest score (rounded up), with the largest of each row and column."""
    if not 0 <= density <= 1:
        raise ValueError(f"ConvLayout: density: expected 0 to 1, got {density}")
    needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argmax(1, keepdim=True), True)
    best = torch.zeros_like(needed).scatter_(0, scores.argmax(0, keepdim=True), True)
    needed |= best & ~needed.any(0)  # columns that no row's largest stands in
    count = max(int(needed.sum()), -int(-density * scores.numel() // 1))
    ranked = scores.flatten().argsort(descending=True, stable=True)
    order = ranked[needed.flatten()[ranked].int().argsort(descending=True, stable=True)]
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return mask.view(scores.shape)


@torch.library.register_fake("sbnet::blocksparse_conv_tables")
def _tables_fake(lists: Tensor, inputs: int, outputs: int, taps: int) -> Tensor:
    return lists.new_empty(torch.library.get_ctx().new_dynamic_size())


@lru_cache(maxsize=256)
def _made(BCK: tuple, kernel_size: tuple[int, ...]) -> ConvLayout:
    return ConvLayout(BCK, kernel_size)


@constant_in_traces
def _tables(BCK: tuple, kernel_size: tuple[int, ...], device: str, swapped: bool) -> tuple[Tensor, list[int]]:
    return _made(BCK, kernel_size).on(torch.device(device), swapped)


class _TracedLists:
    """What ops read of a ConvLayout, from lists, while a program is traced: tracing cannot make the object itself."""

    def __init__(self, BCK: tuple, kernel_size: tuple[int, ...]) -> None:
        self.BCK, self.kernel_size, self.blocks = BCK, kernel_size, len(BCK)
        self.sizes = tuple((len(outputs), len(inputs)) for inputs, outputs in BCK)
        self.weights = sum(outputs * inputs for outputs, inputs in self.sizes) * math.prod(kernel_size)
        even = all(size == self.sizes[0] for size in self.sizes)
        self.filter_shape = (self.blocks, *self.sizes[0], *kernel_size) if even else (self.weights,)

    def on(self, device: torch.device, swapped: bool = False) -> tuple[Tensor, list[int]]:
        return _tables(self.BCK, self.kernel_size, str(device), swapped)


def layout_of_lists(BCK: tuple, kernel_size: tuple[int, ...]) -> Any:
    """The ConvLayout of these lists, made once; while a program is traced, what stands for it."""
    return _TracedLists(BCK, kernel_size) if torch.compiler.is_dynamo_compiling() else _made(BCK, kernel_size)
