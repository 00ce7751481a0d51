"""Runs a network of sbnet.nn on the active blocks of each frame: planned buffers, one CUDA graph."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.active import ActiveBlocks, Fringe
from sbnet.engine.planner import Plan, Plane, Step, plan
from sbnet.geometry import to_pair
from sbnet.nn.layers import SparseConv2d
from sbnet.ops import fringe, mask_pyramid, pack_conv_weight, sparse_bottleneck2d_, sparse_conv2d_
from sbnet.ops.common import set_pixels
from sbnet.select import bottleneck_in_one_kernel


@dataclass(frozen=True)
class Lists:
    """What a runner makes of a mask: active blocks of each plane, and what each step is to zero beside them."""

    active: tuple[ActiveBlocks, ...]
    clear: list[Fringe | None]


class PackedWeight:
    """A layer's weight as kernels read it: packed at the first call, and again once PyTorch has counted a write."""

    def __init__(self, layer: SparseConv2d) -> None:
        self._layer = layer
        self._of: tuple[Tensor, int, int] | None = None  # the weight, its count of writes, its memory
        self._packed: Tensor | None = None

    def __call__(self) -> Tensor | None:
        weight = self._layer.weight
        if weight.is_inference():  # writes are not counted: each call packs
            return None
        written, at = weight._version, weight.data_ptr()
        if self._of is None or self._of[0] is not weight or self._of[1:] != (written, at):
            self._packed, self._of = pack_conv_weight(weight.detach(), self._layer.groups), (weight, written, at)
        return self._packed


class MaskedRunner:
    """Runs a network under the masked contract (docs/contracts.md), on active blocks only.

    A call turns a pixel mask into the active blocks and fringes of every plane, runs each layer on those, and clears of
    its outputs what the call before wrote and this one does not. No feature map is allocated, copied or cleared after
    construction. On CUDA a call copies frame and mask to where a CUDA graph reads them, unless they are there already,
    and replays it: the host waits for nothing. A CPU keeps a second copy of the weights, packed as its kernels read
    them; a weight that was written is packed anew at the next call, unless PyTorch did not count the write (through
    `.data` or NumPy). The same holds for results: one that the caller wrote into is cleared as a whole before the next
    call. A call that raises, or is interrupted, spoils no later one. Calls from several threads wait for one another;
    as each overwrites the result of the one before, threads that share a runner want `copy=True`.

    Args:
        module: holds the layers, parameters where and in the dtype that they are to run; normalisations folded.
        example: [N,C,H,W], a frame's shape, dtype and device.
        planes: (height, width, block size) of every plane that is written.
        call: what to run: a method of `module` that takes x and one ActiveBlocks a plane. Default: the module.
        tail: dense ops on what `call` returns, in the same CUDA graph.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.
        mask_source: makes the mask from x, in the CUDA graph; calls then take x alone. Building the graph calls it a
            few times on zeros: one with a memory wants a reset afterwards.

    Attributes:
        frame, mask: where the CUDA graph reads its inputs. `run(run.frame, run.mask)` copies nothing: who makes frames
            on the device writes them there. A call with other tensors copies them there on CUDA alone: a CPU reads
            what it is given.
        active: active blocks of the last call, one list a plane.
        plan: its steps, fringes and buffers.

    Raises:
        ValueError: the network does something else than call layers of sbnet.nn.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Tensor,
        planes: Sequence[Plane],
        *,
        call: Callable[..., Any] | None = None,
        tail: Callable[[Any], Any] | None = None,
        allow_tf32: bool = False,
        mask_source: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_example(example)
        n, c, h, w = example.shape
        self.device, self.planes, self.allow_tf32 = example.device, list(planes), allow_tf32
        self.mask_source, self.tail = mask_source, tail
        fuse = partial(one_kernel, example)
        self.plan: Plan = plan(call or module, module, (n, c, h, w), self.planes, fuse)
        self._packed = [PackedWeight(s.layer) if isinstance(s.layer, SparseConv2d) else None for s in self.plan.steps]
        flat = [torch.zeros(size, dtype=example.dtype, device=self.device) for size in self.plan.buffers]
        placed = zip(self.plan.buffer_of, self.plan.steps, strict=True)
        self._tensors = [example[:0] if b is None else _view(flat[b], s.shape) for b, s in placed]
        self.frame = _view(torch.zeros_like(example).flatten(), (n, c, h, w))
        self.mask = torch.zeros(n, h, w, dtype=torch.bool, device=self.device)
        # Of each output: what the call before wrote. The lists stay where they are, only their block maps follow.
        self.active: tuple[ActiveBlocks, ...] = mask_pyramid(self.mask, self.planes).planes
        self._previous = {p: self.active[p] for p in {self.plan.steps[t - 1].plane for t in self.plan.outputs}}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._aside: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        if self.device.type == "cuda":
            self._aside = torch.cuda.Stream(self.device)
            self._graph, self._out = capture(lambda: self._run(self.frame, self.mask), self.device)
        self._written = self._writes()

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
            raise ValueError("sbnet: mask: given, but the runner has a mask_source; one of them is wanted")
        with self._lock:
            result = self._call(x, mask)
            return pytree.tree_map_only(Tensor, torch.clone, result) if copy else result

    def _call(self, x: Tensor, mask: Tensor | None) -> Any:
        if self._writes() != self._written:  # by the caller, anywhere
            for output in self.plan.outputs:
                self._tensors[output - 1].zero_()
        try:
            return self._run(x, mask) if self._graph is None else self._replay(x, mask)
        finally:
            self._written = self._writes()

    def _writes(self) -> list[int]:
        """How often each output was written, as far as PyTorch counts it."""
        outputs = [self._tensors[output - 1] for output in self.plan.outputs]
        return [0 if t.is_inference() else t._version for t in outputs]

    def _replay(self, x: Tensor, mask: Tensor | None) -> Any:
        assert self._graph is not None
        # Each goes to the tensors' device by itself and records nothing: guards would only cost the host time.
        if x is not self.frame:
            self.frame.copy_(x.detach())
        if mask is not None and mask is not self.mask:
            self.mask.copy_(mask)
        self._graph.replay()
        return self._out

    @torch.no_grad()
    def _run(self, x: Tensor, mask: Tensor | None) -> Any:
        if self.mask_source is not None:
            mask = self.mask_source(x)  # what it gave is mask_pyramid's to judge
        lists = self._fresh(mask)  # type: ignore[arg-type]
        self.active = lists.active
        if self._aside is None:
            self._stale(lists)
            result = self.layers(x, lists)
            self._remember(lists)
        else:  # a branch of the graph beside the layers: only those that write outputs wait for it
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                self._stale(lists)
                self._remember(lists)  # a replayed graph comes to its end
            result = self.layers(x, lists, self._aside)
        return result if self.tail is None else self.tail(result)

    def lists(self, mask: Tensor) -> Lists:
        """All that depends on the mask."""
        lists = self._fresh(mask)
        self._stale(lists)
        return lists

    def _fresh(self, mask: Tensor) -> Lists:
        """What this call's mask says alone."""
        made = mask_pyramid(mask, self.planes, fringes=self.plan.fringes)
        return Lists(made.planes, [None if s.fringe is None else made.fringes[s.fringe] for s in self.plan.steps])

    def _stale(self, lists: Lists) -> None:
        """Adds what outputs hold of the call before. Until `_remember`, they may hold blocks of both."""
        for plane, old in self._previous.items():
            stale = fringe(lists.active[plane], old, self.planes[plane][:2], 1)
            for output in self.plan.outputs:
                if self.plan.steps[output - 1].plane == plane:
                    lists.clear[output - 1] = stale
            torch.maximum(old.block_map, lists.active[plane].block_map, out=old.block_map)

    def _remember(self, lists: Lists) -> None:
        """The layers ran: outputs hold the blocks of this call alone."""
        for plane, old in self._previous.items():
            old.block_map.copy_(lists.active[plane].block_map)

    def layers(self, x: Tensor, lists: Lists, aside: torch.cuda.Stream | None = None) -> Any:
        """Runs the layers on active blocks. Those that write outputs wait for `aside`, if given."""
        tensors = [x, *self._tensors]
        steps = zip(self.plan.steps, self._tensors, lists.clear, self._packed, strict=True)
        for at, (step, out, pixels, packed) in enumerate(steps, 1):
            if at in self.plan.bottlenecks or at - 1 in self.plan.bottlenecks:
                continue  # run with the last step of the block
            if aside is not None and at in self.plan.outputs:
                torch.cuda.current_stream().wait_stream(aside)
            active = lists.active[step.plane]
            if at - 2 in self.plan.bottlenecks:
                run_bottleneck(self.plan.steps[at - 3 : at], tensors, out, active, pixels, self.allow_tf32)
                continue
            weight = None if packed is None else packed()
            run_step(step, tensors, out, active, pixels, self.allow_tf32, weight)
        found = [tensors[t] for t in self.plan.outputs]
        return tuple(found) if self.plan.many else found[0]


def one_kernel(example: Tensor, first: Step, last: Step, plane: Plane) -> bool:
    """Has this device one kernel for such a bottleneck block, and is it the faster way?

    With more than 96 hidden channels what it computes twice outweighs the launches that it saves, where tiles may be
    many: such blocks are run as layers above 16 cells of 8x8 a multiprocessor (docs/kernels/bottleneck.md).
    """
    (height, width, of), hidden, channels = plane, first.shape[1], last.shape[1]
    block, device = to_pair(of, "plan: block size"), example.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if example.dtype not in (torch.float16, torch.bfloat16) or not bottleneck_in_one_kernel(channels, hidden, block):
        return False
    cells = example.shape[0] * -(-height // 8) * -(-width // 8)
    return hidden <= 96 or cells <= 16 * torch.cuda.get_device_properties(device).multi_processor_count


def run_bottleneck(
    steps: Sequence[Step], tensors: list[Tensor], out: Tensor, active: ActiveBlocks, clear: Fringe | None, tf32: bool
) -> None:
    """run_step of three steps at once."""
    layers: list[Any] = [s.layer for s in steps]
    sparse_bottleneck2d_(
        tensors[steps[0].source], [m.weight for m in layers], [m.bias for m in layers], active, out,
        fringe=clear, allow_tf32=tf32, **steps[0].options,
    )  # fmt: skip


def run_step(
    step: Step,
    tensors: list[Tensor],
    out: Tensor,
    active: ActiveBlocks,
    clear: Fringe | None,
    allow_tf32: bool,
    packed: Tensor | None = None,
) -> None:
    """Writes the active blocks of `out` and zeroes the pixels of `clear`."""
    layer: Any = step.layer
    x = tensors[step.source]
    if isinstance(layer, SparseConv2d):
        residual = None if step.residual is None else tensors[step.residual]
        sparse_conv2d_(
            x, layer.weight, layer.bias, active, out,
            residual=residual, fringe=clear, allow_tf32=allow_tf32, packed=packed, **layer.geometry(), **step.options,
        )  # fmt: skip
    else:
        layer.run_(x, active, out, clear)


def _view(flat: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The first elements of a buffer as an NCHW-shaped channels_last tensor."""
    n, c, h, w = shape
    return flat[: n * c * h * w].view(n, h, w, c).permute(0, 3, 1, 2)


def capture(run: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `run`, and what each replay writes."""
    with torch.cuda.device(device), torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside the capture
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    return graph, out


def check_example(example: Any) -> None:
    """Is it a frame?"""
    if not isinstance(example, Tensor) or example.dim() != 4 or not example.is_floating_point():
        came = type(example).__name__
        if isinstance(example, Tensor):
            came = f"{reprlib.repr(tuple(example.shape))} {example.dtype}"
        raise ValueError(f"sbnet: example: {came}; a floating tensor [N,C,H,W] is wanted")


def _check(name: str, given: Tensor | None, wanted: Tensor) -> None:
    """Is an argument of a call what the runner was built for?"""
    if given is None:
        raise ValueError(f"sbnet: {name}: missing; {tuple(wanted.shape)} {wanted.dtype} is wanted")
    if given.shape != wanted.shape or given.dtype != wanted.dtype or given.device != wanted.device:
        raise ValueError(
            f"sbnet: {name}: {tuple(given.shape)} {given.dtype} on {given.device}; {tuple(wanted.shape)} "
            f"{wanted.dtype} on {wanted.device} is wanted"
        )
