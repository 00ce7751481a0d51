"""Runs a network of sbnet.nn, lists of active blocks in its own hands, on the active blocks of each frame."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.active import ActiveBlocks
from sbnet.engine.compiled import Compiled, static
from sbnet.engine.lists import Lists
from sbnet.engine.modes import Turns, plainly
from sbnet.graph.constants import Constants
from sbnet.graph.layers import read_layers
from sbnet.graph.passes.bottleneck import fuse_bottlenecks
from sbnet.graph.plan import Plan
from sbnet.ops.common import set_pixels

PlaneSpec = tuple[int, int, int | Sequence[int]]  # height, width, block size


class MaskedRunner:
    """Runs a network under the masked contract (docs/contracts.md), on active blocks only.

    `sbnet.sparsify` for networks that call layers of `sbnet.nn` with active blocks, one list a plane. A call turns a
    pixel mask into the active blocks and fringes of every plane, runs each layer on those, and clears of its outputs
    what the call before wrote and this one does not. No feature map is allocated, copied or cleared after
    construction. On CUDA a call copies frame and mask to where a CUDA graph reads them, unless they are there already,
    and replays it: the host waits for nothing. A CPU keeps a second copy of the weights, packed as its kernels read
    them; a weight that was written is packed anew at the next call, unless PyTorch did not count the write (through
    `.data`, NumPy or a fused optimizer). The same holds for results: one that the caller wrote into is cleared as a
    whole before the next call. A call that raises, or is interrupted, spoils no later one. Calls from several threads
    wait for one another; as each overwrites the result of the one before, threads that share a runner need `copy=True`.

    Args:
        module: holds the layers, parameters where and in the dtype that they are to run; normalisations folded.
        example: [N,C,H,W], a frame's shape, dtype and device.
        planes: (height, width, block size) of every plane that is written.
        call: what to run: a method of `module` that takes x and one ActiveBlocks a plane. Default: the module.
        tail: dense ops on what `call` returns, in the same CUDA graph.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
        mask_source: makes the mask from x, in the CUDA graph; calls then take x alone. Building the graph calls it a
            few times on zeros: one with a memory needs a reset afterwards.

    Attributes:
        frame, mask: where the CUDA graph reads its inputs. `run(run.frame, run.mask)` copies nothing: who makes frames
            on the device writes them there. A call with other tensors copies them there on CUDA alone: a CPU reads
            what it is given.
        active: active blocks of the last call, one list a plane.
        plan: its graph and planes.
        executor: the plan with memory.

    Raises:
        ValueError: the network does something else than call layers of sbnet.nn.
    """

    @plainly("MaskedRunner")
    def __init__(
        self,
        module: nn.Module,
        example: Tensor,
        planes: Sequence[PlaneSpec],
        *,
        call: Callable[..., Any] | None = None,
        tail: Callable[[Any], Any] | None = None,
        allow_tf32: bool = False,
        mask_source: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_example(example)
        self.device, self.planes, self.mask_source = example.device, list(planes), mask_source
        self.plan: Plan = fuse_bottlenecks(read_layers(call or module, module, example, planes), self.device)
        constants = Constants(self.plan.graph, self.device, example.dtype)
        self._compiled = Compiled(
            self.plan,
            constants,
            partial(_mask_of, mask_source),
            mask_source is None,
            allow_tf32,
            finish=partial(_finish, self.plan, tail),
        )
        self.executor = self._compiled.executor
        self.frame, mask = static(example, self.device), None
        if self.device.type == "cuda":
            self.frame, mask = self._compiled.inputs[0], self._compiled.mask  # type: ignore[assignment]
        n, _, h, w = example.shape
        self.mask = mask if mask is not None else torch.zeros(n, h, w, dtype=torch.bool, device=self.device)
        self._lock = Turns(self._begin_anew)

    @property
    def active(self) -> tuple[ActiveBlocks, ...]:
        return self.executor.active

    def _begin_anew(self) -> None:
        """After a call that was cut off in the middle."""
        self.executor.forget()

    @plainly("MaskedRunner")
    def __call__(self, x: Tensor, mask: Tensor | None = None, *, copy: bool = False) -> Any:
        """What the network returns. The next call overwrites it, unless it is a copy.

        Args:
            x: like the example; channels_last for speed.
            mask: [N,H,W] or [N,1,H,W]; bool, or set where greater than 0.5: blocks with a set pixel are active. Left
                out where there is a mask_source.
            copy: return tensors of their own memory, which no later call writes.
        """
        _check("x", x, self.frame)
        if self.mask_source is None:
            if mask is not None and mask is not self.mask:
                mask = set_pixels("MaskedRunner", mask)
            _check("mask", mask, self.mask)
        elif mask is not None:
            raise ValueError("sbnet: mask: expected none beside the runner's mask_source, got one")
        with self._lock:
            result = self._compiled([x], mask)
            return pytree.tree_map_only(Tensor, torch.clone, result) if copy else result

    def lists(self, mask: Tensor) -> Lists:
        """All that depends on the mask."""
        return self.executor.lists_of(mask)

    def layers(self, x: Tensor, lists: Lists) -> Any:
        """Runs the layers on active blocks."""
        return pytree.tree_unflatten(self.executor.layers([x], lists), self.plan.graph.out_spec)


# No methods: what a runner's CUDA graph refers to does not refer to the runner, so that both go when the runner does.
def _mask_of(source: Callable[[Tensor], Tensor] | None, inputs: Sequence[Any], mask: Tensor | None) -> Tensor:
    return mask if source is None else source(inputs[0])  # type: ignore[return-value]


def _finish(plan: Plan, tail: Callable[[Any], Any] | None, outputs: list[Any]) -> Any:
    result = pytree.tree_unflatten(outputs, plan.graph.out_spec)
    return result if tail is None else tail(result)


def check_example(example: Any) -> None:
    """Is it a frame?"""
    if not isinstance(example, Tensor) or example.dim() != 4 or not example.is_floating_point():
        came = type(example).__name__
        if isinstance(example, Tensor):
            came = f"{reprlib.repr(tuple(example.shape))} {example.dtype}"
        raise ValueError(f"sbnet: example: expected a floating tensor [N,C,H,W], got {came}")


def _check(name: str, given: Tensor | None, wanted: Tensor) -> None:
    """Is an argument of a call what the runner was built for?"""
    if given is None:
        raise ValueError(f"sbnet: {name}: expected {tuple(wanted.shape)} {wanted.dtype}, got nothing")
    if given.shape != wanted.shape or given.dtype != wanted.dtype or given.device != wanted.device:
        raise ValueError(
            f"sbnet: {name}: expected {tuple(wanted.shape)} {wanted.dtype} on "
            f"{wanted.device}, got {tuple(given.shape)} {given.dtype} on {given.device}"
        )
