"""blocksparse.matmul.SparseProj: a narrow layer that reads and writes some of the features of a wide one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbnet.compat.blocksparse.constants import Constants


class SparseProj:
    """Reads and writes `nproj` of `nhidden` features (axis 0 of x [nhidden, N]).

    Args:
        nhidden: features of the wide side.
        nproj: a sorted random subset of so many features; beside gather_lut, how many that has.
        proj_stride: every proj_stride-th feature, as many as fill whole blocks; not looked at beside nproj.
        block_size: of the layers beside it.
        gather_lut: the features themselves. It, nproj or proj_stride is expected.

    >>> proj = SparseProj(8192, nproj=1024)
    >>> y = proj.scatter_add(x, proj.gather(x))
    """

    def __init__(
        self,
        nhidden: int,
        nproj: int | None = None,
        proj_stride: int | None = None,
        block_size: int = 32,
        gather_lut: Any = None,
        name: str | None = None,
    ) -> None:
        if nproj is None and proj_stride is None and gather_lut is None:
            raise ValueError("SparseProj: expected nproj, proj_stride or gather_lut, got none of them")
        if gather_lut is not None:
            lut = torch.as_tensor(gather_lut).detach().cpu()
            if lut.is_floating_point() or lut.dtype == torch.bool:
                raise ValueError(
                    f"SparseProj: gather_lut: expected integers, got {str(lut.dtype).removeprefix('torch.')}"
                )
            lut = lut.long()
            if nproj is not None and nproj != lut.numel():
                raise ValueError(f"SparseProj: nproj: expected {lut.numel()} as gather_lut has, got {nproj}")
        elif nproj is not None:
            if not 0 <= nproj <= nhidden:
                raise ValueError(f"SparseProj: nproj: expected 0 to {nhidden}, got {nproj}")
            lut = torch.randperm(nhidden)[:nproj].sort().values
        else:
            assert proj_stride is not None
            if proj_stride < 1:
                raise ValueError(f"SparseProj: proj_stride: expected 1 or more, got {proj_stride}")
            lut = torch.arange(0, nhidden // proj_stride // block_size * block_size * proj_stride, proj_stride)
        if lut.dim() != 1 or (len(lut) and (int(lut.min()) < 0 or int(lut.max()) >= nhidden)):
            raise ValueError(f"SparseProj: gather_lut: expected indices below {nhidden}")
        if len(lut.unique()) != len(lut):
            raise ValueError("SparseProj: gather_lut: expected every feature once")
        self.nhidden, self.nproj, self.gather_lut = nhidden, len(lut), lut
        self._constants = Constants(lut)

    def _lut(self, x: Tensor) -> Tensor:
        return self._constants.on(x.device)[0]

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
