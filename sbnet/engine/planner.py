"""What a masked network's layers read and write, found once: the order of its ops, its fringes, its buffers.

A network is traced down to the layers of `sbnet.nn`; each becomes a `Step`. A tensor keeps its buffer from the step
that writes it to the last one that reads it; then others may have it. What a tensor's consumers read beside its active
blocks is its fringe, which the step that writes it clears in the same launch: a buffer may hold anything before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import fx, nn

from sbnet.geometry import Pair, Window, conv_output_size, to_pair
from sbnet.nn.layers import SparseAvgPool2d, SparseConv2d, SparseMaxPool2d

Layer = SparseConv2d | SparseMaxPool2d | SparseAvgPool2d
Plane = tuple[int, int, int | Sequence[int]]  # height, width, block size
Shape = tuple[int, int, int, int]  # N, C, H, W
Consumer = tuple[int, Window]  # plane that it writes, what it reads

POINTWISE = ((1, 1), (1, 1), (0, 0), (1, 1))  # the geometry of a layer that reads the pixels it writes
INPUT = 0  # the network's input is tensor 0; it has no plane, and the caller's buffer


@dataclass
class Step:
    """One layer on active blocks. Tensors are numbers: 0 is the network's input, k what step k - 1 writes.

    Attributes:
        plane: index of the plane it writes.
        fringe: index into `Plan.fringes`, or None where nobody reads beside the active blocks.
        options: activation and negative_slope of a convolution.
    """

    layer: Layer
    source: int
    plane: int
    shape: Shape
    residual: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    fringe: int | None = None


@dataclass
class Plan:
    """A network ready to run.

    Attributes:
        shape: of the input.
        steps: in order.
        outputs: tensors that the network returns; zero everywhere outside their active blocks.
        many: does it return a tuple (or one tensor)?
        fringes: (plane, its consumers), each wanted by at least one step.
        buffers: elements of each buffer.
        buffer_of: of each step; None where a step's tensor is never written.
        bottlenecks: numbers (from 1) of steps that, with the two after them, are a bottleneck block run as one.
    """

    shape: Shape
    steps: list[Step]
    outputs: list[int]
    many: bool
    fringes: list[tuple[int, tuple[Consumer, ...]]]
    buffers: list[int]
    buffer_of: list[int | None]
    bottlenecks: list[int]


def plan(
    call: Callable[..., Any],
    module: nn.Module,
    shape: Shape,
    planes: Sequence[Plane],
    one_kernel: Callable[[Step, Step, Plane], bool] = lambda *_: False,
) -> Plan:
    """Plans `call(x, *active)`, a method of `module` (or the module), for x of this shape and one list a plane.

    one_kernel: for the first and the last step of a bottleneck block and its plane, should the block be run as one?

    Raises:
        ValueError: it does something else than call layers of sbnet.nn on active blocks.
    """
    steps, outputs, many = _trace(call, module, shape, planes)
    found = [at for at in range(1, len(steps) - 1) if _is_bottleneck(at, steps, outputs, shape)]
    bottlenecks = [at for at in found if one_kernel(steps[at - 1], steps[at + 1], planes[steps[at].plane])]
    inner = {number for at in bottlenecks for number in (at, at + 1)}
    fringes = _fringes(steps, outputs, inner)
    return Plan(shape, steps, outputs, many, fringes, *_buffers(steps, outputs, inner), bottlenecks)


# ---- tracing


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*get_args(Layer), nn.BatchNorm2d))


class _Root(nn.Module):
    def __init__(self, call: Callable[..., Any], module: nn.Module, planes: int) -> None:
        super().__init__()
        self.module, self.call, self.planes = module, call, planes

    def forward(self, x: Any, active: Any) -> Any:
        return self.call(x, *(active[plane] for plane in range(self.planes)))


def _trace(
    call: Callable[..., Any], module: nn.Module, shape: Shape, planes: Sequence[Plane]
) -> tuple[list[Step], list[int], bool]:
    root = _Root(call, module, len(planes))
    try:
        graph = _Tracer().trace(root)
    except (TypeError, fx.proxy.TraceError) as e:
        norms = any(isinstance(m, nn.BatchNorm2d) for m in module.modules())
        wanted = "normalisations folded (fold_batch_norm)" if norms else "nothing but calls of layers of sbnet.nn"
        raise ValueError(f"sbnet: plan: {type(module).__name__}: expected {wanted}: {e}") from e
    steps: list[Step] = []
    tensors: dict[Any, int] = {}  # nodes that are feature maps
    lists: dict[Any, int] = {}  # nodes that are a plane's active blocks
    for node in graph.nodes:
        if node.op == "placeholder":
            if not tensors:
                tensors[node] = INPUT
        elif node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], int):
            lists[node] = node.args[1]
        elif node.op == "call_module" and isinstance(root.get_submodule(node.target), nn.BatchNorm2d):
            name, norm = node.target.removeprefix("module."), root.get_submodule(node.target)
            raise ValueError(f"sbnet: plan: {name}: {norm}; normalisations are wanted folded (fold_batch_norm)")
        elif node.op == "call_module":
            step = _step(node, root.get_submodule(node.target), tensors, lists, [shape, *(s.shape for s in steps)])
            height, width = planes[step.plane][:2]
            if step.shape[2:] != (height, width):
                raise ValueError(
                    f"sbnet: plan: {node.target.removeprefix('module.')}: writes a plane of {step.shape[2:]}; the "
                    f"active blocks that it is given are of {(height, width)}"
                )
            steps.append(step)
            tensors[node] = len(steps)
        elif node.op == "output":
            many = isinstance(node.args[0], (tuple, list))
            found = [tensors.get(v, INPUT) for v in (node.args[0] if many else [node.args[0]])]
            if INPUT in found:
                raise ValueError("sbnet: plan: the network returns something that no layer of sbnet.nn wrote")
            return steps, found, many
        else:
            raise ValueError(
                f"sbnet: plan: {node.format_node()}: has no form on active blocks; layers of sbnet.nn are wanted"
            )
    raise AssertionError("a graph without output")


def _step(node: fx.Node, layer: Any, tensors: dict[Any, int], lists: dict[Any, int], shapes: list[Shape]) -> Step:
    given = dict(zip(("x", "active"), node.args, strict=False)) | dict(node.kwargs)
    if given["x"] not in tensors or given.get("active") not in lists:
        raise ValueError(f"sbnet: plan: {node.target}: reads {given['x']} on {given.get('active')}; active blocks of a "
                         "plane are wanted")  # fmt: skip
    source, residual = tensors[given["x"]], given.get("residual")
    n, _, height, width = shapes[source]
    kernel, stride, padding, dilation = geometry(layer)
    if isinstance(layer, SparseConv2d):
        shape = n, layer.out_channels, *conv_output_size((height, width), kernel, stride, padding, dilation)
    else:
        meta = torch.empty(shapes[source], device="meta")
        shape = tuple(layer(meta, None).shape)  # type: ignore[assignment]
    options = {k: v for k, v in given.items() if k not in ("x", "active", "residual")}
    return Step(layer, source, lists[given["active"]], shape, None if residual is None else tensors[residual], options)


def geometry(layer: Layer) -> tuple[Pair, Pair, Pair, Pair]:
    """Kernel size, stride, padding, dilation: what decides which pixels a layer reads."""
    stride = layer.stride if layer.stride is not None else layer.kernel_size
    values = (layer.kernel_size, stride, layer.padding, getattr(layer, "dilation", 1))
    kernel, stride, padding, dilation = (to_pair(v, "plan: geometry") for v in values)  # type: ignore[arg-type]
    return kernel, stride, padding, dilation


def _is_bottleneck(at: int, steps: list[Step], outputs: list[int], shape: Shape) -> bool:
    """Are step `at` (from 1) and the next two 1x1, 3x3, 1x1 + shortcut, which nobody looks into?"""
    first, middle, last = steps[at - 1 : at + 2]
    kinds = [POINTWISE, ((3, 3), (1, 1), (1, 1), (1, 1)), POINTWISE]
    block = (first, middle, last)
    return (
        all(isinstance(s.layer, SparseConv2d) and s.layer.groups == 1 for s in block)
        and [geometry(s.layer) for s in block] == kinds
        and first.plane == middle.plane == last.plane
        and first.options == middle.options == last.options
        and [s.residual for s in block] == [None, None, first.source]
        and [middle.source, last.source] == [at, at + 1]
        and [shape, *(s.shape for s in steps)][first.source] == last.shape
        and all([s.source for s in steps].count(n) == 1 for n in (at, at + 1))
        and not any(n in outputs or n in [s.residual for s in steps] for n in (at, at + 1))
    )


# ---- fringes


def _fringes(steps: list[Step], outputs: list[int], inner: set[int]) -> list[tuple[int, tuple[Consumer, ...]]]:
    """Gives each step its fringe; steps whose tensors have a plane and readers in common share one."""
    found: dict[tuple[int, tuple[Consumer, ...]], int] = {}
    for at, step in enumerate(steps, 1):
        if at in outputs or at in inner:
            continue  # zero everywhere already, or nowhere
        consumers = {(s.plane, Window.conv(*geometry(s.layer))) for s in steps if s.source == at}
        # a residual is read at the pixels that are written: others than its own, where blocks are of another size
        consumers |= {(s.plane, Window.conv(*POINTWISE)) for s in steps if s.residual == at}
        consumers.discard((step.plane, Window.conv(*POINTWISE)))
        if consumers:
            step.fringe = found.setdefault((step.plane, tuple(sorted(consumers))), len(found))
    return list(found)


# ---- buffers


def _buffers(steps: list[Step], outputs: list[int], inner: set[int]) -> tuple[list[int], list[int | None]]:
    """(elements of each buffer, buffer of each step)."""
    last = {at: at for at in range(len(steps) + 1)}  # step number (from 1) that reads a tensor last
    for at, step in enumerate(steps, 1):
        last[step.source] = at
        if step.residual is not None:
            last[step.residual] = at
    for output in outputs:
        last[output] = len(steps) + 1
    sizes: list[int] = []
    chosen: list[int | None] = []
    busy: dict[int, int] = {}  # buffer: the tensor in it
    for at, step in enumerate(steps, 1):
        if at in inner:
            chosen.append(None)
            continue
        wanted = step.shape[0] * step.shape[1] * step.shape[2] * step.shape[3]
        for buffer in [b for b, tensor in busy.items() if last[tensor] < at]:
            del busy[buffer]
        free = sorted((b for b in range(len(sizes)) if b not in busy), key=sizes.__getitem__)
        fitting = [b for b in free if sizes[b] >= wanted]
        # a block run as one reads around the pixels that it writes
        in_place = [] if at - 1 in inner else _in_place(step, at, steps, last, chosen)
        candidates = [*in_place, *fitting, *free[::-1], len(sizes)]
        # An output's buffer holds what the call before left: nobody else writes it.
        buffer = len(sizes) if last[at] > len(steps) else candidates[0]
        if buffer == len(sizes):
            sizes.append(0)
        sizes[buffer] = max(sizes[buffer], wanted)
        chosen.append(buffer)
        busy[buffer] = at
    return sizes, chosen


def _in_place(step: Step, at: int, steps: list[Step], last: dict[int, int], chosen: list[int | None]) -> list[int]:
    """The residual's buffer, where this step is the last to read it: the sum may take its place, pixel by pixel."""
    residual = step.residual
    if not residual or residual == step.source or last[residual] != at or steps[residual - 1].shape != step.shape:
        return []
    buffer = chosen[residual - 1]
    return [] if buffer is None else [buffer]
