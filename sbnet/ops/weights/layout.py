"""Which blocks of a weight matrix are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from sbnet import _library  # noqa: F401  (registers torch.ops.sbnet)
from sbnet.ops.common import constant_in_traces

BLOCK_SIZES = (8, 16, 32, 64, 128)


class BlockLayout:
    """The stored blocks of a matrix W [C, K] that is cut into block_size x block_size blocks.

    Weights of a layout are one tensor [blocks, block_size, block_size], each block [c, k], in the order of `coords`.
    Immutable and hashable; picklable; a constant for torch.compile and torch.export. Tables for kernels are made once,
    and copied once to each device that needs them.

    Args:
        layout: [CB, KB] of 0 and 1 (anything torch.as_tensor takes): block rows along C, block columns along K.
        block_size: 8, 16, 32, 64 or 128.
        in_features, out_features: C and K, where the last block row or column reaches beyond them; by default
            CB * block_size and KB * block_size.
        z_order: number the blocks along a Morton curve (row in the even bits, column in the odd ones), as blocksparse
            does; otherwise row by row.

    Raises:
        ValueError: not a matrix of 0 and 1, an unknown block size, features that do not fill the blocks.

    >>> layout = sbnet.BlockLayout([[1, 0], [1, 1]], block_size=32)
    >>> layout.coords.tolist()
    [[0, 0], [1, 0], [1, 1]]
    """

    coords: Tensor  # [blocks, 2] int32 on the CPU: (block row, block column)

    def __init__(
        self,
        layout: Any,
        block_size: int,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        z_order: bool = False,
    ) -> None:
        mask = torch.as_tensor(layout).detach().cpu()
        if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"BlockLayout: layout: expected a matrix of 0 and 1, got shape {tuple(mask.shape)}")
        coords = mask.nonzero().int()
        if z_order and len(coords):
            coords = coords[torch.argsort(_morton(coords))]
        self._set(coords, (mask.shape[0], mask.shape[1]), block_size, in_features, out_features)

    @classmethod
    def from_coords(
        cls,
        coords: Any,
        shape: Sequence[int],
        block_size: int,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
    ) -> BlockLayout:
        """From (block row, block column) of every block, [blocks, 2], in the order of the weights; shape (CB, KB)."""
        self = cls.__new__(cls)
        coords = torch.as_tensor(coords, dtype=torch.int32).detach().cpu().reshape(-1, 2).clone()
        self._set(coords, (int(shape[0]), int(shape[1])), block_size, in_features, out_features)
        return self

    @classmethod
    def from_magnitude(
        cls, weight: Tensor, block_size: int, density: float | None = None, *, z_order: bool = False
    ) -> BlockLayout:
        """The blocks of W [C, K] of largest norm, a share `density` of all (rounded up); None: all that are not zero.

        Features that are no multiple of the block are padded. Ties go to the earlier block.
        """
        norms = block_norms(weight, block_size)
        if density is None:
            keep = norms > 0
        else:
            if not 0 <= density <= 1:
                raise ValueError(f"BlockLayout.from_magnitude: density: expected 0 to 1, got {density}")
            count = min(norms.numel(), -int(-density * norms.numel() // 1))
            keep = torch.zeros(norms.numel(), dtype=torch.bool)
            keep[norms.flatten().argsort(descending=True, stable=True)[:count]] = True
            keep = keep.view(norms.shape)
        return cls(keep, block_size, in_features=weight.shape[0], out_features=weight.shape[1], z_order=z_order)

    @classmethod
    def from_bsr(cls, matrix: Tensor) -> tuple[BlockLayout, Tensor]:
        """A torch.sparse_bsr matrix [C, K] of square blocks -> its layout and weights (the matrix's own memory)."""
        if matrix.layout != torch.sparse_bsr or matrix.dim() != 2:
            raise ValueError(f"BlockLayout.from_bsr: expected a sparse_bsr matrix, got {matrix.layout}")
        values, crow = matrix.values(), matrix.crow_indices().cpu()
        size = values.shape[1]
        if values.shape[2] != size:
            raise ValueError(f"BlockLayout.from_bsr: expected square blocks, got {tuple(values.shape[1:])}")
        rows = torch.repeat_interleave(torch.arange(len(crow) - 1), crow.diff())
        coords = torch.stack([rows, matrix.col_indices().cpu()], 1)
        shape = matrix.shape[0] // size, matrix.shape[1] // size
        return cls.from_coords(coords, shape, size), values

    def _set(
        self, coords: Tensor, shape: tuple[int, int], block_size: int, in_features: int | None, out_features: int | None
    ) -> None:
        require_block_size(block_size)
        self.coords = coords.contiguous()
        self.block_size = int(block_size)
        self.block_rows, self.block_columns = shape
        self.blocks = len(coords)
        self.in_features = shape[0] * block_size if in_features is None else int(in_features)
        self.out_features = shape[1] * block_size if out_features is None else int(out_features)
        self._shape = [*shape, self.blocks, self.in_features, self.out_features, self.block_size]
        self._hash: int | None = None
        with _disable_current_modes():  # a layout may be made while a program is being traced
            try:
                self._tables = torch.ops.sbnet.block_layout_tables(self.coords, self._shape)
            except RuntimeError as error:
                raise ValueError(str(error)) from None
        self._on: dict[str, tuple[Tensor, list[int]]] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """(C, K)."""
        return self.in_features, self.out_features

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        return self.blocks, self.block_size, self.block_size

    @property
    def density(self) -> float:
        """Stored share of the blocks."""
        return self.blocks / (self.block_rows * self.block_columns)

    def mask(self) -> Tensor:
        """[CB, KB] bool on the CPU."""
        mask = torch.zeros(self.block_rows, self.block_columns, dtype=torch.bool)
        mask[tuple(self.coords.long().unbind(1))] = True
        return mask

    def on(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """The tables and plans on a device, int32, and the numbers that ops take with them."""
        # As a constant: tracing looks neither into the tables nor into which devices have them.
        return self._copy_to(str(device))

    @constant_in_traces
    def _copy_to(self, device: str) -> tuple[Tensor, list[int]]:
        if device not in self._on:
            with _disable_current_modes():
                plans = []
                if device != "cpu":
                    plans = [torch.ops.sbnet.blocksparse_plan(self._tables, self._shape, p) for p in range(3)]
                numbers = [*self._shape, *([len(p) for p in plans] or [0, 0, 0])]
                self._on[device] = torch.cat([self._tables, *plans]).to(device), numbers
        return self._on[device]

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block row and block column of every block, [blocks] int32 each, on a device."""
        coords = self.on(device)[0][: 2 * self.blocks].view(-1, 2)
        return coords[:, 0], coords[:, 1]

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`index` in int64, the only integers that ONNX scatters and gathers by."""
        rows, columns = self.index(device)
        return rows.long(), columns.long()

    def to_dense(self, weight: Tensor) -> Tensor:
        """Weights [blocks, bs, bs] -> W [C, K], zeros where no block is. Differentiable."""
        size = self.block_size
        dense = weight.new_zeros(self.block_rows, self.block_columns, size, size)
        dense = dense.index_put(self._places(weight.device), weight)
        dense = dense.transpose(1, 2).reshape(self.block_rows * size, self.block_columns * size)
        return dense[: self.in_features, : self.out_features]

    def from_dense(self, dense: Tensor) -> Tensor:
        """W [C, K] -> the weights [blocks, bs, bs] of the stored blocks; padding is zero. Differentiable."""
        if dense.shape != self.shape:
            raise ValueError(f"BlockLayout.from_dense: expected {self.shape}, got {tuple(dense.shape)}")
        return split_blocks(dense, self.block_size)[self._places(dense.device)]

    def to_bsr(self, weight: Tensor) -> Tensor:
        """Weights -> a torch.sparse_bsr matrix [C, K]. Features must be multiples of the block."""
        if self.shape != (self.block_rows * self.block_size, self.block_columns * self.block_size):
            raise ValueError(f"BlockLayout.to_bsr: expected whole blocks, got features {self.shape}")
        rows, columns = self.coords.long().unbind(1)
        order = torch.argsort(rows * self.block_columns + columns)
        crow = torch.zeros(self.block_rows + 1, dtype=torch.int64)
        crow[1:] = torch.bincount(rows, minlength=self.block_rows).cumsum(0)
        device = weight.device
        return torch.sparse_bsr_tensor(
            crow.to(device), columns[order].to(device), weight[order.to(device)], self.shape, dtype=weight.dtype
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        return self is other or (self._shape == other._shape and bool((self.coords == other.coords).all()))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((*self._shape, self.coords.numpy().tobytes()))
        return self._hash

    def __repr__(self) -> str:
        return (
            f"BlockLayout({self.in_features} x {self.out_features}, {self.blocks} blocks of {self.block_size}, "
            f"density {self.density:.3g})"
        )

    def __reduce__(self) -> tuple:
        shape = self.block_rows, self.block_columns
        features = self.in_features, self.out_features
        return _restore, (self.coords.numpy(), shape, self.block_size, features)

    def __deepcopy__(self, memo: dict) -> BlockLayout:
        return self


def _restore(coords: Any, shape: tuple, block_size: int, features: tuple) -> BlockLayout:
    return BlockLayout.from_coords(coords, shape, block_size, in_features=features[0], out_features=features[1])


_pytree.register_constant(BlockLayout)


def _morton(coords: Tensor) -> Tensor:
    """Row bits in the even places, column bits in the odd ones."""
    rows, columns = coords.long().unbind(1)
    key = torch.zeros_like(rows)
    for bit in range(24):
        key |= ((rows >> bit & 1) << 2 * bit) | ((columns >> bit & 1) << 2 * bit + 1)
    return key


def require_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"BlockLayout: block_size: expected 8, 16, 32, 64 or 128, got {block_size}")


def split_blocks(dense: Tensor, block_size: int) -> Tensor:
    """W [C, K] -> [CB, KB, bs, bs], padded with zeros."""
    rows, columns = (-(-n // block_size) for n in dense.shape)
    padding = (0, columns * block_size - dense.shape[1], 0, rows * block_size - dense.shape[0])
    padded = torch.nn.functional.pad(dense, padding) if any(padding) else dense
    return padded.reshape(rows, block_size, columns, block_size).transpose(1, 2)


def block_norms(dense: Tensor, block_size: int) -> Tensor:
    """The Frobenius norm of every block, [CB, KB] float32 on the CPU."""
    require_block_size(block_size)
    return split_blocks(dense.detach().float(), block_size).square().sum((2, 3)).sqrt().cpu()


@torch.library.register_fake("sbnet::block_layout_tables")
def _block_layout_tables_fake(coords: Tensor, shape: list[int]) -> Tensor:
    return coords.new_empty(6 * shape[2] + shape[0] + shape[1] + 2)  # block_layout_words()


@torch.library.register_fake("sbnet::blocksparse_plan")
def _blocksparse_plan_fake(tables: Tensor, shape: list[int], purpose: int) -> Tensor:
    return tables.new_empty(torch.library.get_ctx().new_dynamic_size())
