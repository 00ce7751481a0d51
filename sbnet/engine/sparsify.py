"""`sbnet.sparsify`: any convolutional network on active blocks, in one call."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.active import ActiveBlocks
from sbnet.engine import arguments
from sbnet.engine.arguments import block_sizes, check_counted, check_example, counters, mask_of, planes_of, tapped
from sbnet.engine.compiled import Compiled
from sbnet.engine.executor import Executor
from sbnet.engine.lists import Lists
from sbnet.engine.modes import Turns, plainly
from sbnet.geometry import Pair
from sbnet.graph.capture import capture
from sbnet.graph.constants import Constants
from sbnet.graph.functional import PlannedModule
from sbnet.graph.ir import Graph
from sbnet.graph.kinds import kind_of
from sbnet.graph.passes import optimise
from sbnet.graph.plan import Plan, Plane, plan
from sbnet.graph.watch import Watch
from sbnet.progress import progress

MODES = ("masked", "exact", "cached")
MOST_SHAPES = 8  # plans that a run keeps, with their memory, one a shape of inputs
FLAT = (list, tuple, dict, OrderedDict)  # results whose items say all


def sparsify(
    model: nn.Module | str | os.PathLike[str],
    example: Any,
    *,
    mode: str = "masked",
    block: Any = "auto",
    margin: int = 0,
    masks: Sequence[Tensor] = (),
    out: Sequence[str] = (),
    mask_source: Callable[[Tensor], Tensor] | None = None,
    allow_tf32: bool = False,
) -> SparseRun:
    """A callable `run(x, mask)` that computes `model(x)` on the active blocks of a mask only.

    The network is captured by torch.export and planned: normalisations are folded, activations and sums fused, feature
    maps lie in buffers that are never cleared. What has no sparse form runs dense, on whole planes (`sbnet.explain`).
    Parameters are shared with the model: one that is written in place is seen at the next call, if PyTorch counts the
    write (it counts none through `.data`, NumPy or a fused optimizer). Where a parameter, a buffer or a part is another
    one at the next call (`load_state_dict(assign=True)`, `net.layer = ...`), or a number has another value
    (`norm.eps`), the network is captured and planned anew. Runs compute in the dtype of their example, under autocast,
    too. On CUDA a call is one CUDA graph and waits for nothing.

    Args:
        model: an nn.Module, run in eval mode, or an ONNX file.
        example: its input, a tensor [N,C,H,W] or a tuple of inputs the first of which the mask is of; float32, float16
            or bfloat16, on the device and in the dtype of the model.
        mode: "masked": what is not active is 0 for every layer (networks trained so); "exact": the dense result on the
            mask, the halo computed as well; "cached": outside the mask the frame before (docs/contracts.md).
        block: block size of every plane, {(height, width): block size}, what `sbnet.tune` gave or the file that it was
            written to, or "auto": by the plane's share of the image, or predicted from `masks` and layers.
        margin: pixels by which masks are grown.
        masks: examples of masks [N,H,W], for block="auto".
        out: names of submodules: what they return is returned, {name: result}, instead of the model's result.
        mask_source: makes the mask from x; calls then take no mask.
        allow_tf32: float32 on CUDA may use tf32 tensor cores.

    Raises:
        ValueError: the network cannot be captured; one line says where and why.

    >>> run = sbnet.sparsify(torchvision.models.resnet18(weights="DEFAULT"), torch.rand(1, 3, 384, 640))
    >>> logits = run(frame, mask)  # mask [N,384,640], any dtype
    """
    run = SparseRun(
        model, example, mode=mode, block=block, margin=margin, masks=masks, out=out, mask_source=mask_source,
        allow_tf32=allow_tf32,
    )  # fmt: skip
    run.prepare(*run.example)
    return run


class SparseRun:
    """What `sparsify` returns. One thread at a time runs it, others wait; `clone()` is for a thread of its own.

    Attributes:
        planes: (height, width, block size) of every plane of the last inputs' shape.
        active: active blocks of the last call, one list a plane.
        density: the share of active blocks in the finest plane of the last call. Reading it waits for the device.
    """

    @plainly("sparsify")
    def __init__(self, model: Any, example: Any, **options: Any) -> None:
        if options["mode"] not in MODES:
            raise ValueError(f"sbnet: sparsify: mode: expected one of {', '.join(MODES)}, got {options['mode']!r}")
        self.model, self.options = model, options
        self.example = tuple(example) if isinstance(example, (tuple, list)) else (example,)
        check_example(self.example)
        self.margin, self.mask_source = arguments.margin_of(options["margin"], "sparsify"), options["mask_source"]
        self._module = tapped(model, options["out"])
        self._lock = Turns(self._begin_anew)
        self._watch: Watch | None = None
        self._shapes: OrderedDict[Any, tuple[Graph, Plan, Constants]] = OrderedDict()
        self._compiled: OrderedDict[Any, Compiled] = OrderedDict()
        self._last = self._for(self.example)

    # ---- calls

    @plainly("run")
    def __call__(
        self,
        *args: Any,
        mask: Tensor | None = None,
        margin: int | None = None,
        copy: bool = False,
        keyframe: bool = False,
    ) -> Any:
        """What the network returns, outside the mask as the mode's contract says. The next call overwrites it. Write
        to a copy where PyTorch does not count writes (`.data`, NumPy): later calls would show them.

        Args:
            args: the network's inputs and then, unless it is given by name or made by a mask_source, the mask [N,H,W]
                or [N,1,H,W] of any dtype: set where it is true, not 0, or a float greater than 0.5.
            margin: pixels by which this mask is grown, instead of the run's own.
            copy: return tensors that later calls leave alone.
            keyframe: cached mode: compute the whole frame, as after a cut in a video.
        """
        given, wanted = len(args) + (mask is not None), len(self.example) + (self.mask_source is None)
        if given != wanted or (mask is not None and self.mask_source is not None):
            which = "a mask" if self.mask_source is None else "no mask, as there is a mask_source"
            raise ValueError(f"sbnet: run: expected {len(self.example)} inputs and {which}, got {given} arguments")
        if mask is None and self.mask_source is None:
            *args, mask = args  # type: ignore[assignment]
            if mask is None:
                raise ValueError("sbnet: run: mask: expected a tensor, got None")
        with self._lock:
            compiled = self._for(args)
            if compiled is not self._last and self.options["mode"] == "cached":
                compiled.executor.forget()  # what it holds is older than the frame before
            self._last = compiled
            if keyframe:
                compiled.executor.whole_frame = self.options["mode"] == "cached"
            flat = compiled(args, None if mask is None else planes_of(mask, args[0]), self._margin(margin))
            if copy:
                flat = [v.clone() if isinstance(v, Tensor) else v for v in flat]
            return self._shaped(flat)

    def _shaped(self, flat: list[Any]) -> Any:
        """Outputs of the last inputs' network as it returns them."""
        spec = self._spec
        if spec.is_leaf():
            return flat[0]
        if spec.type in FLAT and spec.num_nodes == 1 + len(flat):  # tree_unflatten would take as long as the rest
            return spec.type(flat if spec.context is None else zip(spec.context, flat, strict=True))
        return pytree.tree_unflatten(flat, spec)

    def _margin(self, margin: int | None) -> int:
        return self.margin if margin is None else arguments.margin_of(margin, "run")

    def _for(self, inputs: Sequence[Any]) -> Compiled:
        """The network planned for inputs of these shapes."""
        key = arguments.key_of(inputs)
        if self._watch is not None and self._watch.changed():
            self._shapes.clear()
            self._compiled.clear()
        compiled = self._compiled.get(key)
        if compiled is not None:
            if compiled is not self._last:
                self._compiled.move_to_end(key)  # the last to go
            self._spec = compiled.plan.graph.out_spec
            return compiled
        if key not in self._shapes:
            check_example(inputs, "run: x")
            self._shapes[key] = self._planned(inputs)
            while len(self._shapes) > MOST_SHAPES:
                old, _ = self._shapes.popitem(last=False)
                self._compiled.pop(old, None)
        (graph, planned, constants), allow_tf32 = self._shapes[key], self.options["allow_tf32"]
        make_mask = partial(mask_of, self.mask_source)
        made = self._compiled[key] = Compiled(planned, constants, make_mask, self.mask_source is None, allow_tf32)
        self._spec = graph.out_spec
        return made

    def _graph(self, inputs: Sequence[Any]) -> Graph:
        tokens = self.options["mode"] != "exact"
        if isinstance(self._module, nn.Module):
            captured = capture(check_counted(self._module), inputs, None, tokens)
            if not self._shapes:  # those that are there may be of another state
                self._watch = Watch(self._module)
            return optimise(captured)
        from sbnet.graph.onnx import read_onnx

        return optimise(read_onnx(self._module, inputs, tokens))

    @progress("sparsify")
    def _planned(self, inputs: Sequence[Any]) -> tuple[Graph, Plan, Constants]:
        graph, x = self._graph(inputs), inputs[0]
        blocks = block_sizes(graph, x.device, self.options, self.margin)
        planned = plan(graph, blocks, self.options["mode"], x.device)
        return graph, planned, Constants(graph, x.device, x.dtype, counters(self._module))

    # ---- a call in parts, for what holds more than a call: CUDA graphs of others, measurements

    @plainly("prepare")
    def prepare(self, *inputs: Any, margin: int | None = None) -> None:
        """Plans the network for inputs of these shapes, and on CUDA captures the graph of calls with this margin: then
        no call does. Capturing calls a mask_source a few times, on the last x or zeros: one with a memory needs a reset
        afterwards. A call with a margin that is new captures, too."""
        with self._lock:
            self._last = self._for(inputs)
            self._last.prepare(self._margin(margin))

    @plainly("body")
    def body(self, *inputs: Any, mask: Tensor | None = None, margin: int | None = None) -> Any:
        """What a call computes, without a CUDA graph of its own: the host waits for nothing, and a graph of the caller
        may hold it. Inputs of one shape share their memory with calls, and the next of either overwrites the result."""
        with self._lock:
            self._last = self._for(inputs)
            return self._shaped(self._last.run(inputs, mask, self._margin(margin)))

    def lists(self, mask: Tensor, margin: int | None = None) -> Lists:
        """All that a call with the last inputs' shape makes of its mask [N,H,W]; `layers` may run on it until the next
        call."""
        with self._lock:
            return self.executor.lists_of(mask, self._margin(margin))

    @plainly("layers")
    def layers(self, *inputs: Any, lists: Lists) -> Any:
        """The network on lists, for inputs of the last shape."""
        with self._lock:
            return self._shaped(self.executor.layers(inputs, lists))

    # ---- what a run tells

    @property
    def compiled(self) -> Compiled:
        """The network as it is planned for the last inputs' shape: plan, weights, memory, CUDA graphs."""
        return self._last

    @property
    def executor(self) -> Executor:
        """The plan of the last inputs' shape, with its memory."""
        return self._last.executor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the last x."""
        return tuple(self._last.executor.shape)

    @property
    def frame(self) -> Tensor:
        """Where CUDA graphs read x: who makes frames on the device writes them there, and `run(run.frame, ...)` copies
        nothing."""
        if (found := self._last.inputs[0]) is None:
            raise ValueError("sbnet: run: frame: expected a network that reads x, got one that does not")
        return found

    @property
    def mask(self) -> Tensor:
        """Where CUDA graphs read the mask, [N,H,W] bool."""
        found = self._last.mask
        if found is None:
            raise ValueError("sbnet: run: mask: expected calls with a mask, got a run with a mask_source")
        return found

    @property
    def whole_frame(self) -> bool:
        """Cached mode: does the next call compute the whole frame?"""
        return self._last.executor.whole_frame

    def active_of(self, size: Pair) -> ActiveBlocks:
        """Active blocks of the last call of the first tensor that is so high and wide."""
        value = next((v for node in self.plan.graph.nodes for v in node.outputs if v.size == size), None)
        if value is None:
            raise ValueError(f"sbnet: active_of: size: expected that of a feature map, got {size}")
        return self.active[self.executor.lists.of(value)]

    @property
    def plan(self) -> Plan:
        """The plan of the last inputs' shape."""
        return self._last.plan

    @property
    def planes(self) -> list[Plane]:
        return self._last.plan.planes

    @property
    def active(self) -> tuple[ActiveBlocks, ...]:
        return self._last.executor.active

    @property
    def density(self) -> float:
        finest = self.active[0]
        return float((finest.block_map >= 0).float().mean())

    def __repr__(self) -> str:
        name = type(self.model).__name__ if isinstance(self.model, nn.Module) else str(self.model)
        nodes = self.plan.graph.nodes
        dense = sum(not kind_of(node).planned and not node.moves for node in nodes)
        shape = "x".join(map(str, self._last.executor.shape))
        counts = f"{len(nodes)} nodes, {dense} dense, {len(self.planes)} planes"
        return f"<sbnet.{self.options['mode']} {name} on {shape}: {counts}>"

    @plainly("profile")
    def profile(self, *args: Any, calls: int = 5, fused: bool = False) -> list[Any]:
        """(module path, kind, ms) of each node, the median of some calls; node by node, so that the sum is more than a
        call takes. Arguments as for a call; a mask may be given in the place of that of a mask_source, too.
        fused: on CUDA, `Launches` of frame, lists and nodes instead: kernels, their time and the least they could take.
        """
        from sbnet.engine.launches import launches
        from sbnet.engine.profile import profile

        count = len(self.example)
        if len(args) not in (count + 1, count + (self.mask_source is None)):
            raise ValueError(f"sbnet: profile: expected {count} inputs and a mask, got {len(args)} arguments")
        inputs, given = args[:count], args[count:]
        with self._lock:
            wanted = mask_of(self.mask_source, inputs, planes_of(given[0], inputs[0]) if given else None)
            return (launches if fused else profile)(self._for(inputs), inputs, wanted, self.margin, calls)

    def _inputs_of(self, frame: Any, of: str) -> tuple[Any, ...]:
        """A frame, a tensor or a tuple, as the inputs of a call."""
        inputs = tuple(frame) if isinstance(frame, (tuple, list)) else (frame,)
        if len(inputs) != len(self.example):
            raise ValueError(f"sbnet: {of}: expected {len(self.example)} inputs each, got {len(inputs)}")
        return inputs

    @plainly("clone")
    def clone(self) -> SparseRun:
        """Another run of the same plans and weights, with buffers of its own: for another thread or stream."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._lock, other._compiled = Turns(other._begin_anew), OrderedDict()
        with self._lock:
            other._shapes = OrderedDict(self._shapes)
        other._last = other._for(self.example)
        return other

    def _begin_anew(self) -> None:
        """After a call that was cut off in the middle."""
        self._compiled.clear()

    def reset(self) -> None:
        """Cached mode: the next frame is computed whole."""
        with self._lock:
            for compiled in self._compiled.values():
                compiled.executor.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "example": self.example, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], state["example"], **state["options"])  # type: ignore[misc]

    @plainly("as_module")
    def as_module(self, **options: bool) -> PlannedModule:
        """This graph and plan as an nn.Module of functional ops that takes inputs and mask; weights are copies. Options
        are `dynamic` and `block_maps`, as for `export`."""
        with self._lock:
            compiled = self._for(self.example)
        return PlannedModule(compiled.plan, compiled.constants, self.margin, **options).eval()

    @progress("export")
    def export(
        self, path: str | os.PathLike[str], *, dynamic: bool = False, block_maps: bool = False, **options: Any
    ) -> Any:
        """Writes this graph and plan as an ONNX model of inputs and mask; options are those of `export.to_onnx`.

        Args:
            dynamic: batch, height and width are those of each call: of masked networks whose layers all keep the
                input's height and width.
            block_maps: the block map of every plane is an output, too, after all others: block_map0, block_map1, ...

        Outputs of a network that returns a dict have its keys' names ("out"; "parts.0" of a list under a key).
        Of a cached run the states follow the inputs as state0, state1, ... and the outputs as next0, next1, ...: a call
        takes those that the one before gave. With a full mask, as on the first frame, they may hold anything.

        Raises:
            ValueError: dynamic, of a network whose planned layers are of one size.
        """
        from sbnet.export.convert import to_onnx
        from sbnet.export.output_names import output_names

        module = self.as_module(dynamic=dynamic, block_maps=block_maps)
        x = self.example[0]
        mask = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.bool, device=x.device)
        states = [x.new_zeros(value.shape, dtype=value.dtype) for value in module.states]
        more = [f"x{k}" for k in range(1, len(self.example))]
        options = {"input_names": ["x", *more, "mask", *(f"state{k}" for k in range(len(states)))], **options}
        options = {"output_names": output_names(module, options["input_names"]), **options}
        if dynamic:
            n, h, w = (torch.export.Dim(name) for name in ("batch", "height", "width"))
            fixed: list[Any] = [None] * (len(self.example) - 1)
            options = {"dynamic": {"args": ({0: n, 2: h, 3: w}, *fixed, {0: n, 1: h, 2: w})}, **options}
        return to_onnx(module, (*self.example, mask, *states), path, **options)
