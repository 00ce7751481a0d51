"""Runs a planned graph on the active blocks of each frame, in buffers planned once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet import _library
from sbnet.active import ActiveBlocks, Fringe
from sbnet.engine.lists import Lists
from sbnet.engine.pooled import PooledNodes, product
from sbnet.engine.replay import RecordedLists, RecordedNodes
from sbnet.engine.streams import Streams
from sbnet.geometry import Pair, Window
from sbnet.graph.axes import Axes, op_name
from sbnet.graph.constants import Constants
from sbnet.graph.ir import Node, Value
from sbnet.graph.kinds import Context, Given, Target, kind_of
from sbnet.graph.kinds.channels import copy
from sbnet.graph.kinds.kind import Get
from sbnet.graph.lists import all_pixels, lists_of
from sbnet.graph.passes.chains import chains
from sbnet.graph.passes.gates import gates_that_scale
from sbnet.graph.passes.pooled import is_product
from sbnet.graph.passes.rows import view_of
from sbnet.graph.passes.storage import store
from sbnet.graph.plan import Plan
from sbnet.ops import sparse_fill_
from sbnet.ops.common import mask_planes


def without_grad(method: Callable[..., Any]) -> Callable[..., Any]:
    """torch.no_grad() around a method, for less where a caller has it already."""
    guarded = torch.no_grad()(method)

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else method)(*args)

    return run


@dataclass(frozen=True)
class _Spot:
    """Where a node writes.

    Attributes:
        out: what it gives.
        blocks: index of its list.
        stale: the plane of a kept tensor, whose pixels of the call before it clears.
        fringe: index of the fringe that it clears.
        start: the channel of its root where `out` begins.
    """

    out: Tensor
    blocks: int
    stale: int | None
    fringe: int | None
    start: int


class Executor:
    """A plan with memory: `__call__(inputs, mask, margin)` gives the flat list of outputs, which the next call
    overwrites; margin: pixels by which the mask is grown.

    No feature map of a planned node is allocated, copied or cleared after construction.

    Args:
        plan: for tensors of these shapes.
        constants: of its graph.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.

    Attributes:
        active: lists of the last call: one a plane, or, exact, one a demand.
        chains: convolutions that a CPU may run tile by tile: of the last one, how many there are.
        whole_frame: the next call computes all pixels (the cached contract's first frame).
    """

    def __init__(self, plan: Plan, constants: Constants, allow_tf32: bool = False) -> None:
        self.plan, self.device, self.nodes = plan, constants.device, plan.graph.nodes
        self.context = Context(constants, {}, allow_tf32, plan.mode == "cached", plan.mode != "masked")
        self.chains = chains(plan) if self.device.type == "cpu" else {}
        self.storage = store(plan, self.chains, side_by_side=self.device.type == "cuda")
        self.lists = lists_of(plan, self.storage)
        self._made = constants.made
        if self.device.type == "cpu":
            self.context.pack(self.nodes)
        self.buffers = [torch.zeros(n, dtype=dtype, device=self.device) for dtype, n in self.storage.buffers]
        self.tensors = {value: self._part(value) for value in self.storage.place}
        self._joined = {
            node: self.buffers[next(iter(rows.roots)).buffer].as_strided(node.output.shape, rows.strides)
            for node, rows in self.storage.rows.items()
        }
        self._pooled = PooledNodes(plan, constants)
        self.tensors |= self._pooled.tensors
        self._spots = {node: self._spot(node) for node in self.nodes if node.output in self.storage.place}
        self._scaling = gates_that_scale(plan, self.storage) if self.device.type == "cuda" else {}
        self._scaled = set(self._scaling.values())
        self.shape = next(v.shape for v in plan.graph.inputs if v is not None)
        empty = torch.zeros(self.shape[0], *self.shape[2:], dtype=torch.bool, device=self.device)
        self.active, _ = self.lists(empty)
        kept = sorted({r.plane for r in self.storage.roots if r.kept}) if plan.mode == "masked" else []
        self.previous = {p: self.active[p] for p in kept}
        self._same = {p: _same_pixels(self.active[p], plan.planes[p][:2]) for p in kept}
        self.whole_frame = plan.mode == "cached"
        self._kept = [self.buffers[k] for k in sorted({r.buffer for r in self.storage.roots if r.kept})]
        self._counted = [buffer for buffer in self._kept if not buffer.is_inference()]
        self._vectors = [t for t in self._pooled.tensors.values() if not t.is_inference()]
        self._written = self._writes()
        self._wait = {self.nodes[at] for root in self.storage.roots if root.kept for at in root.writers}
        cuda = self.device.type == "cuda" and bool(self.previous)
        self._aside = torch.cuda.Stream(self.device) if cuda else None
        beside = self.storage.lanes
        self._streams = None if beside is None else Streams(beside, self.nodes, self.device)
        # Cached: what dense nodes gave for the frame before. A CUDA graph writes there: it stays as long as this does.
        self.kept_dense: dict[Value, Tensor] = {}
        # On a CPU calls repeat what one has noted; not with SBNET_DEBUG=1, whose checks are the ops'.
        self._records = self.device.type == "cpu" and not _library.DEBUG
        self._lasting = self._lasting_nodes()
        self._noted_lists: RecordedLists | None = None
        self._noted_nodes: RecordedNodes | None = None

    def _lasting_nodes(self) -> set[Node]:
        return {node for node in self.nodes if self._lasts(node)} if self._records else set()

    def _lasts(self, node: Node) -> bool:
        """Does a node read and write tensors that stay where they are, by ops that recordings note?"""
        repeats = node in self._spots and kind_of(node).lasts(node, self.context)
        if not repeats and node not in self._pooled.forms:
            return False
        read = [v for v, _ in self.storage.copies[node]] if node.kind == "cat" else node.inputs()
        return all(v in self.tensors or (v.constant and not _uncounted(v)) for v in read)

    def _part(self, value: Value) -> Tensor:
        root, start = self.storage.place[value]
        found = view_of(self.buffers[root.buffer], root, root.start, root.apart)
        return found[:, start : start + value.shape[1]]

    def _spot(self, node: Node) -> _Spot:
        root, start = self.storage.place[node.output]
        stale = root.plane if root.kept else None
        listed = kind_of(node).listed(node, self.plan.mode) or node.output
        return _Spot(self.tensors[node.output], self.lists.of(listed), stale, root.fringe, start)

    def refresh(self) -> None:
        """Takes parameters as they are now, which other executors of the same constants may have met first."""
        constants = self.context.constants
        if constants.stale():
            constants.refresh()
        if self._made == constants.made:
            return
        self._made = constants.made
        self.context.bound.clear()
        self._lasting, self._noted_nodes = self._lasting_nodes(), None
        if self.device.type == "cpu":
            self.context.pack(self.nodes)
        self._pooled.refresh()

    def forget(self) -> None:
        """Nothing that a call before left, ended or not, is taken for clean."""
        for buffer in self.buffers:
            buffer.zero_()
        for old in self.previous.values():
            old.block_map.fill_(-1)
        self.whole_frame = self.plan.mode == "cached"  # which writes all of kept_dense
        self._written = self._writes()

    def held(self) -> list[Tensor]:
        """Copies of all that a cached call leaves to the next one, in the order in which `resume` takes them."""
        return [tensor.clone() for tensor in (*self.buffers, *self.kept_dense.values())]

    def resume(self, held: Sequence[Tensor]) -> None:
        """Goes on as if nothing had run since `held` was made."""
        for tensor, before in zip((*self.buffers, *self.kept_dense.values()), held, strict=True):
            tensor.copy_(before)
        self.whole_frame, self._written = False, self._writes()

    @without_grad
    def __call__(self, inputs: Sequence[Any], mask: Tensor, margin: int = 0) -> list[Any]:
        try:
            mask = all_pixels(mask) if self.whole_frame else mask
            if self._aside is None:
                lists = self._listed(mask, margin)
            else:  # a branch of the CUDA graph beside the nodes: only those that write kept tensors wait for it
                lists = self._fresh(mask, margin, stale=False)
                self._aside.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self._aside):
                    self._stale(lists)
                    self._remember(lists)
            outputs = self.layers(inputs, lists, self._aside)
            self.whole_frame = False
            return outputs
        except BaseException:
            self._noted_lists = self._noted_nodes = None
            self.forget()
            raise

    def _listed(self, mask: Tensor, margin: int) -> Lists:
        """All that depends on the mask, where calls repeat in the memory of the call before; remembered."""
        if not self._records or self.plan.mode == "exact" or self.plan.tokens:  # whose lists are PyTorch's ops
            lists = self._fresh(mask, margin)
        else:
            mask, noted = mask_planes("run", mask), self._noted_lists
            if noted is not None and noted.fits(mask, margin):
                lists = noted(mask)
            else:
                self._noted_lists = noted = RecordedLists(
                    functools.partial(self._fresh, margin=margin, lasting=True), mask, margin
                )
                lists = noted.lists
        self.active = lists.active
        self._remember(lists)
        return lists

    def _fresh(self, mask: Tensor, margin: int, stale: bool = True, lasting: bool = False) -> Lists:
        """All that depends on the mask."""
        self.active, fringes = self.lists(mask, margin)
        lists = Lists(self.active, fringes, {}, lasting)
        if stale:
            self._stale(lists)
        return lists

    def _stale(self, lists: Lists) -> None:
        """Adds what kept tensors hold of the call before and this one does not write."""
        for plane, old in self.previous.items():
            found = torch.ops.sbnet.fringe(lists.active[plane].block_map, old.block_map, *self._same[plane])
            lists.stale[plane] = Fringe(*found)

    def _remember(self, lists: Lists) -> None:
        """Kept tensors will hold what these lists say."""
        for plane, old in self.previous.items():
            old.block_map.copy_(lists.active[plane].block_map)

    @torch.no_grad()
    def lists_of(self, mask: Tensor, margin: int = 0) -> Lists:
        """All that depends on the mask; `layers` may run on it, more than once, until the next call."""
        return self._fresh(mask, margin, lasting=True)

    @without_grad
    def layers(self, inputs: Sequence[Any], lists: Lists, aside: torch.cuda.Stream | None = None) -> list[Any]:
        """Runs the nodes. Those that write kept tensors wait for `aside`, if given."""
        constants, outputs = self.context.constants, self.plan.graph.outputs
        env: dict[Value, Any] = {v: x for v, x in zip(self.plan.graph.inputs, inputs, strict=True) if v is not None}
        env.update(self.tensors)

        def get(value: Value) -> Tensor:
            return constants[value] if value.constant else env[value]

        def step(node: Node) -> None:
            self.step(node, env, get, lists)

        if self._lasting and lists.lasting and "step" not in self.__dict__:  # else single nodes are profiled
            self._repeat(step, lists)
        else:
            self._each(step, aside)
        torch.autograd.graph.increment_version([*self._counted, *self._vectors])  # ops do so; steps do not
        self._written = self._writes()
        return [get(v) if isinstance(v, Value) else v for v in outputs]

    def _each(self, step: Callable[[Node], None], aside: torch.cuda.Stream | None) -> None:
        if self._streams is not None:
            self._streams(step, aside, self._wait)
            return
        for node in self.nodes:
            step(node)

    def _repeat(self, step: Callable[[Node], None], lists: Lists) -> None:
        """As a call before did on these lists, which may hold others now."""
        if self._noted_nodes is not None and self._noted_nodes.fits(lists):
            self._noted_nodes(step)
        else:
            self._noted_nodes = None
            self._noted_nodes = RecordedNodes(self.nodes, step, self._lasting, lists, self.chains)

    def step(self, node: Node, env: dict[Value, Any], get: Get, lists: Lists) -> None:
        """Runs one node."""
        spot = self._spots.get(node)
        if node in self._scaled:
            return
        if node in self._scaling:
            out = self._spots[self._scaling[node]]
            kind_of(node).step(node, get, Target(out.out, lists.active[out.blocks], None), self.context)
        elif spot is None and node.kind == "slice":
            start = node.options["start"]
            env[node.output] = get(node.args[0])[:, start : start + node.output.shape[1]]
        elif node in self._pooled.forms:
            listed = kind_of(node).listed(node, self.plan.mode)
            self._pooled(node, get, None if listed is None else lists.active[self.lists.of(listed)])
        elif spot is None:
            self._dense(node, env, get, lists.active)
        elif node.kind != "slice":
            clear = None if spot.fringe is None else lists.fringes[spot.fringe]
            if spot.stale is not None:
                clear = lists.stale.get(spot.stale)
            blocks = lists.active[spot.blocks]
            if node.kind != "cat":
                kind_of(node).step(node, get, Target(spot.out, blocks, clear), self.context)
                return
            for value, start in self.storage.copies[node]:
                base = start - spot.start
                copy(get(value), spot.out[:, base : base + value.shape[1]], blocks, clear)

    def inspect(self) -> None:
        """A result that the caller wrote into, as PyTorch counts, is not taken for clean."""
        if self._written != self._writes():
            self.forget()

    def _writes(self) -> list[int]:
        return [buffer._version for buffer in self._counted]

    def _dense(self, node: Node, env: dict[Value, Any], get: Get, active: Sequence[ActiveBlocks]) -> None:
        """An op of PyTorch on whole tensors; what it gives is masked."""
        if node in self._joined:
            env[node.output] = self._joined[node]
            return

        def value(v: Any) -> Any:
            return get(v) if isinstance(v, Value) else v

        args, kwargs = pytree.tree_map(value, (node.args, node.kwargs))
        params = {name: get(v) for name, v in node.params.items()}
        if node.kind != "aten":
            listed = kind_of(node).listed(node, self.plan.mode)
            blocks = None if listed is None else active[self.lists.of(listed)]
            found: Any = kind_of(node).apply(node, Given(args, kwargs, params, blocks, self.context.everywhere))
        elif self.device.type == "cuda" and is_product(node):
            found = product(*args[:3])
        else:
            found = (concatenate if op_name(node.target) == "cat" else node.target)(*args, **kwargs)
        for v, tensor in zip(node.outputs, found if node.options.get("many") else [found], strict=True):
            spatial = v.size is not None and v.dtype.is_floating_point and not node.moves
            if spatial and self.plan.mode == "masked":
                shared = any(_share(tensor, get(given)) for given in node.inputs())  # a view, or an argument itself
                tensor = masked(tensor, v.axes, active[self.lists.of(v)], not shared)  # type: ignore[arg-type]
            elif spatial and self.plan.mode == "cached":
                tensor = self._cached(v, tensor, active[self.lists.of(v)])
            env[v] = tensor

    def _cached(self, value: Value, tensor: Tensor, active: ActiveBlocks) -> Tensor:
        old = self.kept_dense.get(value)
        if old is None:
            self.kept_dense[value] = old = tensor.clone()
        assert value.axes is not None
        assert value.axes.size is not None
        return old.copy_(torch.where(value.axes.arrange(active.pixel_mask(value.axes.size)), tensor, old))


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat in the order in which all operands lie in memory: PyTorch's own transposes what is channels_last."""
    rank = tensors[0].dim()
    order = sorted(range(rank), key=tensors[0].stride, reverse=True)
    if order == list(range(rank)) or not all(t.dim() == rank and t.permute(order).is_contiguous() for t in tensors):
        return torch.cat(tuple(tensors), dim)
    made = torch.cat([t.permute(order) for t in tensors], order.index(dim % rank))
    return made.permute([order.index(k) for k in range(rank)])


def _uncounted(value: Value) -> bool:
    """Is it a tensor of which PyTorch counts no writes? Then ops read it as it is, at each call."""
    return value.tensor is not None and value.tensor.is_inference()


def _same_pixels(active: ActiveBlocks, size: Pair) -> list[Any]:
    """What the op `fringe` takes beside two lists of one plane, for those pixels of one that are not of the other."""
    grid = active.grid.numbers()
    return [list(size), grid, list(size), grid, Window.conv(1).numbers(), active.batch * size[0] * size[1]]


def _share(x: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and x.untyped_storage()._cdata == other.untyped_storage()._cdata


def masked(x: Tensor, axes: Axes, active: ActiveBlocks, own: bool) -> Tensor:
    """x where its pixels are active, else 0: in place where its memory is its `own` and packed as feature maps are."""
    if own and axes.is_planes and x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        packed = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        return sparse_fill_(x if packed else x.contiguous(), active)
    assert axes.size is not None
    return torch.where(axes.arrange(active.pixel_mask(axes.size)), x, torch.zeros_like(x))
