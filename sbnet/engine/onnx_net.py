"""A chain that `sbnet export` wrote, run by ONNX Runtime as a run of `sparsify` is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sbnet.active import ActiveBlocks, BlockGrid
from sbnet.geometry import to_pair
from sbnet.graph.plan import Plane
from sbnet.masks.grow import grow
from sbnet.ops import reduce_mask
from sbnet.ops.common import set_pixels


class OnnxConvNet:
    """Runs a model of one plane: inputs x and mask, outputs the result and its block map, as `sbnet export` writes.

    Args:
        path: the model.
        size: (H, W) of the frames.
        block: block size that the model was exported with.
        device: CUDA or CPU: which execution provider runs it.

    Raises:
        ValueError: the model has other inputs, sizes or blocks.
    """

    def __init__(
        self,
        path: Path,
        size: Sequence[int],
        block: int | Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        from sbnet import export  # needs onnxruntime, an extra

        self.device = torch.device(device)
        self._size = to_pair(size, "OnnxConvNet: size")
        self.grid = BlockGrid.cover(self._size, block)
        cuda = ["CUDAExecutionProvider"] if self.device.type == "cuda" else []
        self._session = export.session(path, [*cuda, "CPUExecutionProvider"])
        self._run = export.run
        names = [value.name for value in self._session.get_inputs()]
        outputs = self._session.get_outputs()
        if names != ["x", "mask"] or len(outputs) != 2:
            raise ValueError(
                f"{path}: expected a model of `sbnet export` (inputs x and mask, "
                f"outputs y and block_map), got inputs {names} and {len(outputs)} outputs"
            )
        for value, wanted in zip(self._session.get_inputs(), ((1, 3, *size), (1, *size)), strict=True):
            fixed = [(have, want) for have, want in zip(value.shape, wanted, strict=False) if isinstance(have, int)]
            if len(value.shape) != len(wanted) or any(have != want for have, want in fixed):
                raise ValueError(f"{path}: {value.name}: expected {list(wanted)}, got {value.shape}")
        self._block_map = torch.full((1, *self.grid.bcount), -1, dtype=torch.int32)

    @property
    def active(self) -> tuple[ActiveBlocks, ...]:
        """Active blocks of the last call, of its one plane."""
        one = BlockGrid((1, 1), (1, 1), (0, 0), self.grid.bcount)
        return (reduce_mask(self._block_map >= 0, one).with_grid(self.grid),)

    @property
    def planes(self) -> list[Plane]:
        """(height, width, block size) of its plane."""
        return [(*self._size, self.grid.bsize)]

    @torch.no_grad()
    def __call__(self, x: Tensor, mask: Tensor, *, margin: int = 0) -> Tensor:
        """x [1,3,H,W], mask [1,H,W], grown by `margin` pixels -> [1,K,H,W], zeros outside the active blocks."""
        output, block_map = self._run(self._session, [x, grow(set_pixels("OnnxConvNet", mask), margin)])
        if tuple(block_map.shape[1:]) != self.grid.bcount:
            raise ValueError(
                f"block: expected the size that the model was exported with ({tuple(block_map.shape[1:])} "
                f"blocks a frame), got {self.grid.bsize} ({self.grid.bcount} blocks)"
            )
        self._block_map = block_map
        return output
