"""OpenAI blocksparse's BlocksparseMatMul on PyTorch tensors, its names kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.ops import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet.weights.functional import block_reduced_full_dw, l2_normalize


class BlocksparseMatMul:
    """y = x W with W [C, K] of the blocks of a layout; owns no parameters.

    Args:
        layout: [CB, KB] of 0 and 1: rows are input blocks, columns output blocks. C = CB * block_size, K likewise.
        block_size: 8, 16, 32, 64 or 128.
        feature_axis: 1: x [..., C] -> [..., K]; 0: x [C, ...] -> [K, ...].
        z_order: number the blocks along a Morton curve, otherwise row by row.

    Attributes:
        w_shape: (blocks, block_size, block_size), each block [c, k]. g_shape: (blocks,), of gates.
        blocks, bsize, CB, KB, C, K, axis, density: as their names say.
        layout: the `BlockLayout`.

    >>> bsmm = BlocksparseMatMul([[1, 0], [1, 1]], block_size=32)
    >>> y = bsmm(torch.randn(8, 64), torch.randn(bsmm.w_shape))
    """

    def __init__(self, layout: Any, block_size: int = 32, feature_axis: int = 1, z_order: bool = True) -> None:
        made = layout if isinstance(layout, BlockLayout) else BlockLayout(layout, block_size, z_order=z_order)
        if feature_axis not in (0, 1):
            raise ValueError(f"BlocksparseMatMul: feature_axis: expected 0 or 1, got {feature_axis}")
        self.layout = made
        self.axis = feature_axis
        self.bsize, self.blocks = made.block_size, made.blocks
        self.CB, self.KB = made.block_rows, made.block_columns
        self.C, self.K = made.shape
        self.density = made.density
        self.w_shape = made.weight_shape
        self.g_shape = (made.blocks,)

    def i_shape(self, N: int) -> tuple[int, int]:
        """Shape of x for N rows."""
        return (N, self.C) if self.axis else (self.C, N)

    def o_shape(self, N: int) -> tuple[int, int]:
        """Shape of y for N rows."""
        return (N, self.K) if self.axis else (self.K, N)

    def block_coord(self, block: int) -> tuple[int, int]:
        """(input block, output block) of a block id."""
        c, k = self.layout.coords[block].tolist()
        return c, k

    # ---- products
    def __call__(self, x: Tensor, weight: Tensor, gate: Tensor | None = None, **options: Any) -> Tensor:
        """x W; `bias`, `activation`, `allow_tf32` as in `blocksparse_matmul`. Differentiable."""
        return blocksparse_matmul(x, weight, self.layout, gate, feature_axis=self.axis, **options)

    fprop = matmul = __call__

    def bprop(self, dy: Tensor, weight: Tensor, gate: Tensor | None = None, **options: Any) -> Tensor:
        """dy W^T, the gradient of x."""
        return blocksparse_matmul(dy, weight, self.layout, gate, feature_axis=self.axis, transposed=True, **options)

    def updat(self, x: Tensor, dy: Tensor, gate: Tensor | None = None, **options: Any) -> Tensor:
        """x^T dy on the layout, the gradient of the weights (times the gate, where one is given)."""
        return self.group_param_grads([(x, dy)], gate, **options)

    def group_param_grads(
        self, pairs: Sequence[tuple[Tensor, Tensor]], gate: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The sum of the weight gradients of several (x, dy), eight to a launch: a recurrent layer's steps."""
        dw = blocksparse_weight_grad(pairs, self.layout, feature_axis=self.axis, **options)
        return dw if gate is None else (dw * gate[:, None, None]).to(dw.dtype)

    def block_reduced_full_dw(self, x: Tensor, dy: Tensor, norm: str = "max") -> Tensor:
        """[CB, KB]: how large the gradient of every block would be, stored or not; see the function."""
        return block_reduced_full_dw(x, dy, self.layout, norm=norm, feature_axis=self.axis)

    def l2_normalize(self, weight: Tensor, gain: Tensor | None = None, epsilon: float = 1e-12) -> Tensor:
        """Every output feature's weights divided by their norm, times a gain [K]; see the function."""
        return l2_normalize(weight, self.layout, gain, epsilon)

    # ---- initial values
    def ortho_init(self, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        """Weights of which the stored part of each block column is orthogonal, by SVD of a normal matrix."""
        size = self.bsize
        weight = torch.empty(self.w_shape)
        columns = self.layout.coords[:, 1]
        for k in columns.unique().tolist():
            ids = (columns == k).nonzero()[:, 0]
            u, _, vt = torch.linalg.svd(torch.randn(len(ids) * size, size), full_matrices=False)
            weight[ids] = (u @ vt).view(-1, size, size)
        return weight.to(device, dtype)

    def identity_init(self, scale: float = 1.0, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        """`scale` times the identity in every block (c, k) with c = k modulo the shorter side, zeros elsewhere."""
        c, k = self.layout.coords.unbind(1)
        same = c % self.KB == k % self.CB
        return (same[:, None, None] * torch.eye(self.bsize) * scale).to(device, dtype)

    def checker_init(self, device: Any = None) -> Tensor:
        """Gates of a checkerboard: 1 where c + k is even, else 0."""
        return ((self.layout.coords.sum(1) + 1) % 2).float().to(device)

    def prune(self, weight: Tensor, gate: Tensor) -> tuple[Tensor, BlocksparseMatMul]:
        """Drops the blocks whose gate is 0: what is left of the weights, and the object for them."""
        if gate.shape != self.g_shape or weight.shape != self.w_shape:
            raise ValueError(
                f"BlocksparseMatMul.prune: expected weight {self.w_shape} and gate {self.g_shape}, got "
                f"{tuple(weight.shape)} and {tuple(gate.shape)}"
            )
        keep = gate != 0
        layout = BlockLayout.from_coords(
            self.layout.coords[keep.cpu()], (self.CB, self.KB), self.bsize, in_features=self.C, out_features=self.K
        )
        return weight[keep], BlocksparseMatMul(layout, self.bsize, self.axis)

    def __repr__(self) -> str:
        return f"BlocksparseMatMul({self.layout}, feature_axis={self.axis})"


class SparseProj:
    """Reads and writes `nproj` of `nhidden` features (axis 0 of x [nhidden, N]).

    Args:
        nhidden: features of the wide side.
        nproj: a sorted random subset of so many features.
        proj_stride: every proj_stride-th feature, as many as fill whole blocks.
        gather_lut: the features themselves. One of the three is expected.
        block_size: of the layers beside it.

    >>> proj = SparseProj(8192, nproj=1024)
    >>> y = proj.scatter_add(x, proj.gather(x))
    """

    def __init__(
        self,
        nhidden: int,
        nproj: int | None = None,
        proj_stride: int | None = None,
        gather_lut: Any = None,
        block_size: int = 32,
    ) -> None:
        if sum(v is not None for v in (nproj, proj_stride, gather_lut)) != 1:
            raise ValueError("SparseProj: expected one of nproj, proj_stride and gather_lut")
        if gather_lut is not None:
            lut = torch.as_tensor(gather_lut).detach().cpu()
            if lut.is_floating_point() or lut.dtype == torch.bool:
                raise ValueError(
                    f"SparseProj: gather_lut: expected integers, got {str(lut.dtype).removeprefix('torch.')}"
                )
            lut = lut.long()
        elif proj_stride is not None:
            if proj_stride < 1:
                raise ValueError(f"SparseProj: proj_stride: expected 1 or more, got {proj_stride}")
            lut = torch.arange(0, nhidden // proj_stride // block_size * block_size * proj_stride, proj_stride)
        else:
            assert nproj is not None
            if not 0 <= nproj <= nhidden:
                raise ValueError(f"SparseProj: nproj: expected 0 to {nhidden}, got {nproj}")
            lut = torch.randperm(nhidden)[:nproj].sort().values
        if lut.dim() != 1 or (len(lut) and (int(lut.min()) < 0 or int(lut.max()) >= nhidden)):
            raise ValueError(f"SparseProj: gather_lut: expected indices below {nhidden}")
        if len(lut.unique()) != len(lut):
            raise ValueError("SparseProj: gather_lut: expected every feature once")
        self.nhidden, self.nproj, self.gather_lut = nhidden, len(lut), lut
        self._on: dict[torch.device, Tensor] = {}

    def _lut(self, x: Tensor) -> Tensor:
        if x.device not in self._on:
            self._on[x.device] = self.gather_lut.to(x.device)
        return self._on[x.device]

    def _require(self, argument: str, x: Tensor, features: int) -> None:
        if x.dim() == 0 or x.shape[0] != features:
            raise ValueError(f"SparseProj: {argument}: expected [{features}, ...], got {list(x.shape)}")

    def gather(self, x: Tensor) -> Tensor:
        """x [nhidden, ...] -> x[lut]."""
        self._require("x", x, self.nhidden)
        return x.index_select(0, self._lut(x))

    def scatter(self, x: Tensor) -> Tensor:
        """x [nproj, ...] -> zeros [nhidden, ...] with z[lut] = x."""
        self._require("x", x, self.nproj)
        return x.new_zeros(self.nhidden, *x.shape[1:]).index_copy(0, self._lut(x), x)

    def scatter_add(self, x: Tensor, y: Tensor) -> Tensor:
        """x [nhidden, ...] with y [nproj, ...] added at the lut."""
        self._require("x", x, self.nhidden)
        self._require("y", y, self.nproj)
        return x.index_add(0, self._lut(x), y)

    def scatter_mul(self, x: Tensor, y: Tensor) -> Tensor:
        """x [nhidden, ...] with y [nproj, ...] multiplied in at the lut."""
        self._require("x", x, self.nhidden)
        self._require("y", y, self.nproj)
        lut = self._lut(x)
        return x.index_copy(0, lut, x.index_select(0, lut) * y)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on": {}}
