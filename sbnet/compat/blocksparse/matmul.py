"""blocksparse.matmul: products with block-sparse weights on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbnet.compat.blocksparse.proj import SparseProj as SparseProj
from sbnet.ops import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet.ops.weights.matmul import MAX_PAIRS
from sbnet.weights import functional


class BlocksparseMatMul:
    """y = x W with W [C, K] of the blocks of a layout; owns no parameters.

    Args:
        layout: [CB, KB] of 0 and 1: rows are input blocks, columns output blocks. C = CB * block_size, K likewise.
        block_size: 8, 16, 32, 64 or 128.
        feature_axis: 1: x [..., C] -> [..., K]; 0: x [C, ...] -> [K, ...].
        z_order: number the blocks along a Morton curve, otherwise row by row.

    Attributes:
        w_shape: (blocks, block_size, block_size), each block [c, k]. g_shape: (blocks,), of gates.
        blocks, bsize, CB, KB, C, K, axis, density: as their names say. sparsity: the reference's name of density.
        layout: the `BlockLayout`.

    >>> bsmm = BlocksparseMatMul([[1, 0], [1, 1]], block_size=32)
    >>> y = bsmm(torch.randn(8, 64), torch.randn(bsmm.w_shape))
    """

    def __init__(
        self, layout: Any, block_size: int = 32, feature_axis: int = 1, z_order: bool = True, name: str | None = None
    ) -> None:
        made = layout if isinstance(layout, BlockLayout) else BlockLayout(layout, block_size, z_order=z_order)
        if feature_axis not in (0, 1):
            raise ValueError(f"BlocksparseMatMul: feature_axis: expected 0 or 1, got {feature_axis}")
        self.layout = made
        self.axis = feature_axis
        self.bsize, self.blocks = made.block_size, made.blocks
        self.CB, self.KB = made.block_rows, made.block_columns
        self.C, self.K = made.shape
        self.density = made.density
        self.sparsity = round(made.density, 3)  # the reference's word for the share of blocks there are
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
    def __call__(
        self,
        I: Tensor,  # noqa: E741
        W: Tensor,
        gate: Tensor | None = None,
        gate_grad: bool | None = None,
        dw_gated: bool = False,
        dw_dtype: torch.dtype | None = None,
        name: str | None = None,
        bench: int = 0,
        **options: Any,
    ) -> Tensor:
        """I W; `bias`, `activation`, `allow_tf32` as in `blocksparse_matmul`. Differentiable.

        Args:
            gate: [blocks] scales each block; blocks with gate 0 are skipped.
            gate_grad: True: the gate has a gradient, and that of W is multiplied by the gate (the true derivatives).
                False: the gate has none, and W's is multiplied by it only where dw_gated; as it is otherwise, so that
                a closed block may learn. None: True where the gate requires a gradient.
            dw_dtype: float32 for weights in float32 beside I in halves: W is rounded to halves for the product, and its
                gradient is the sum in float32, not rounded.
        """
        if dw_dtype is not None and dw_dtype != W.dtype:
            raise ValueError(
                f"BlocksparseMatMul: dw_dtype: expected W's own {W.dtype}, the dtype of its gradient, got {dw_dtype}"
            )
        if gate is not None and gate_grad is None:
            gate_grad = gate.requires_grad
        rounded = W.dtype != I.dtype and dw_dtype is not None
        if not rounded and (gate is None or gate_grad or dw_gated):
            gate = gate if gate is None or gate_grad else gate.detach()
            return blocksparse_matmul(I, W, self.layout, gate, feature_axis=self.axis, **options)
        if gate is not None and gate_grad:
            raise ValueError("BlocksparseMatMul: gate_grad: expected False beside a dw_dtype that is not I's, got True")
        if options.get("bias") is not None or options.get("activation") is not None:
            raise ValueError("BlocksparseMatMul: expected no bias or activation beside gates without a gradient")
        tf32 = bool(options.get("allow_tf32", False))
        return _Product.apply(I, W, None if gate is None else gate.detach(), self, dw_gated, tf32)

    fprop = matmul = __call__

    def bprop(self, dy: Tensor, weight: Tensor, gate: Tensor | None = None, **options: Any) -> Tensor:
        """dy W^T, the gradient of x."""
        return blocksparse_matmul(dy, weight, self.layout, gate, feature_axis=self.axis, transposed=True, **options)

    def updat(
        self, x: Tensor, dy: Tensor, gate: Tensor | None = None, dw_dtype: torch.dtype | None = None, **options: Any
    ) -> Tensor:
        """x^T dy on the layout, the gradient of the weights (times the gate, where one is given)."""
        return self.group_param_grads([(x, dy)], gate=gate, dw_dtype=dw_dtype, **options)

    def group_param_grads(
        self,
        grads: Sequence[tuple[Tensor, Tensor]],
        group_size: int = MAX_PAIRS,
        cast32: bool = False,
        gate: Tensor | None = None,
        dw_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Tensor:
        """The sum of the weight gradients of several (x, dy): a recurrent layer's steps.

        Summed in float32 over all pairs and rounded once. cast32, or dw_dtype=torch.float32: not rounded at all.
        group_size, 1 to 8, was the number of pairs of a launch; the result does not depend on it.
        """
        return group_param_grads(grads, group_size, cast32, self, gate=gate, dw_dtype=dw_dtype, **options)

    def block_reduced_full_dw(self, x: Tensor, dy: Tensor, norm: str = "max") -> Tensor:
        """[CB, KB]: how large the gradient of every block would be, stored or not; see the function."""
        return functional.block_reduced_full_dw(x, dy, self.layout, norm=norm, feature_axis=self.axis)

    def l2_normalize(
        self, W: Tensor, gain: Tensor | None = None, epsilon: float = 1e-12, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Every output feature's weights divided by their norm, times a gain [K]; in `dtype`, by default W's."""
        wide = W if dtype is None else W.to(torch.promote_types(W.dtype, dtype))
        return functional.l2_normalize(wide, self.layout, gain, epsilon).to(dtype or W.dtype)

    # ---- initial values
    def ortho_init(self, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        """Orthogonal weights, by SVD of a normal matrix: the whole of W where all blocks are there (its columns, or its
        rows where those are fewer), else the stored part of each block column by itself, as in the reference."""
        size = self.bsize
        weight = torch.empty(self.w_shape)
        if self.blocks == self.CB * self.KB and self.blocks:
            u, _, vt = torch.linalg.svd(torch.randn(self.C, self.K), full_matrices=False)
            return self.layout.from_dense(u @ vt).to(device, dtype)
        columns = self.layout.coords[:, 1]
        for k in columns.unique().tolist():
            ids = (columns == k).nonzero()[:, 0]
            u, _, vt = torch.linalg.svd(torch.randn(len(ids) * size, size), full_matrices=False)
            weight[ids] = (u @ vt).view(-1, size, size)
        return weight.to(device, dtype)

    def identity_init(
        self,
        scale: float | bool = 1.0,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        gpu: bool | None = None,
    ) -> Tensor:
        """`scale` times the identity in every block (c, k) with c = k modulo the shorter side, zeros elsewhere.

        The first release had one argument, `gpu`, where the values are made; a bool is taken for it.
        """
        factor = 1.0 if isinstance(scale, bool) else scale
        c, k = self.layout.coords.unbind(1)
        same = c % self.KB == k % self.CB
        return (same[:, None, None] * torch.eye(self.bsize) * factor).to(device, dtype)

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


class _Product(torch.autograd.Function):
    """A product whose weights' gradient is in their own dtype, and times the gate on request alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, gate: Tensor | None, bsmm: BlocksparseMatMul, gated: bool, tf32: bool
    ) -> Tensor:
        ctx.save_for_backward(x, w, gate)
        ctx.bsmm, ctx.gated, ctx.tf32 = bsmm, gated, tf32
        return blocksparse_matmul(x, w.to(x.dtype), bsmm.layout, gate, feature_axis=bsmm.axis, allow_tf32=tf32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, w, gate = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.bsmm.bprop(dy, w.to(x.dtype), gate, allow_tf32=ctx.tf32)
        if ctx.needs_input_grad[1]:
            factor = gate if ctx.gated else None
            dw = ctx.bsmm.updat(x, dy, factor, dw_dtype=w.dtype, allow_tf32=ctx.tf32)
        return dx, dw, None, None, None, None


def group_param_grads(
    param_grad: Any,
    group_size: int = MAX_PAIRS,
    cast32: bool = False,
    bsmm: BlocksparseMatMul | None = None,
    *,
    gate: Tensor | None = None,
    dw_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """The gradient of one weight that several products share, summed in float32 and rounded once.

    Args:
        param_grad: what autograd has summed already, a tensor, which is returned as it is; a sequence of tensors, one a
            step; or, with `bsmm`, a sequence of (x, dy).
        group_size: 1 to 8; the reference's number of products in one launch. The result does not depend on it.
        cast32: the result stays in float32.
        dw_dtype: the result's dtype instead: float32, or that of the gradients.
    """
    if not 1 <= group_size <= MAX_PAIRS:
        raise ValueError(f"group_param_grads: group_size: expected 1 to {MAX_PAIRS}, got {group_size}")
    if isinstance(param_grad, Tensor):
        return param_grad.float() if cast32 else param_grad
    if not len(param_grad):
        raise ValueError("group_param_grads: param_grad: expected at least one gradient, got none")
    dtype = torch.float32 if cast32 else dw_dtype
    if isinstance(param_grad[0], Tensor):
        total = param_grad[0].float()
        for part in param_grad[1:]:
            total = total + part.float()
        dw = total.to(dtype or param_grad[0].dtype)
    else:
        if bsmm is None:
            raise ValueError("group_param_grads: bsmm: expected the BlocksparseMatMul of the pairs (x, dy), got None")
        dw = blocksparse_weight_grad(param_grad, bsmm.layout, feature_axis=bsmm.axis, dtype=dtype, **options)
    return dw if gate is None else (dw * gate[:, None, None]).to(dw.dtype)


def block_reduced_full_dw(
    param_grad: Sequence[tuple[Tensor, Tensor]],
    scale: float = 1.0,
    norm: str = "max",
    group_size: int = MAX_PAIRS,
    *,
    bsmm: BlocksparseMatMul,
) -> Tensor:
    """[CB, KB] float32: the sum over pairs (x, dy) of `scale` times the norm of every block of x^T dy, stored or not.

    The reference finds the pairs in TensorFlow's graph; here they are given, with the `bsmm` that they belong to.
    """
    total = sum(bsmm.block_reduced_full_dw(x, dy, norm.lower()) for x, dy in param_grad)
    return torch.as_tensor(total * scale)
