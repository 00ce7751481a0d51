"""torch modules to ONNX files."""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from sbnet.export import memory_format, schemas, translate
from sbnet.export.clean import clean
from sbnet.export.output_names import name_outputs
from sbnet.graph.capture import path_of
from sbnet.graph.exporting import EXPORTING, collected_later
from sbnet.graph.refusal import causes, no_dump, refusal
from sbnet.progress import progress, step

NEWEST_OPSET = 26  # the newest that ONNX Runtime 1.31 runs
NO_FORM = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'\)>")
INLINE_BYTES = 1 << 30  # a protobuf ends at 2 GB


class ExportError(ValueError):
    """A module that cannot become an ONNX model, and why."""


@progress("export")
@collected_later()
def to_onnx(
    module: nn.Module,
    args: Sequence[Any],
    path: str | os.PathLike[str],
    dynamic: Any = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int = 20,
    external_data: bool | None = None,
    fuse_bottlenecks: bool = False,
    facts: Mapping[str, str] | None = None,
    accept: Callable[[Path], object] = lambda path: None,
) -> Path:
    """Writes `module(*args)` as an ONNX model with ops of the domain `sbnet`, and checks it.

    Run it with `sbnet.export.session`, or with ONNX Runtime in any language once `library_path()` is registered.

    Args:
        module: exported in eval mode. Ops that work in place (names that end in _) have no ONNX form.
        args: example inputs, tensors or pytrees of them (ActiveBlocks).
        path: the file.
        dynamic: `dynamic_shapes` of torch.export: for each input, {dimension: torch.export.Dim}. Batch, height and
            width may be dynamic where grids are made by BlockGrid.cover and capacities are left out.
        input_names, output_names: names in the file.
        opset_version: of the standard ops, 18 to 26.
        external_data: weights in a second file, `path`.data; default: past 1 GiB, as a model file cannot exceed 2 GB.
        fuse_bottlenecks: blocks of 1x1, 3x3, 1x1 convolution and shortcut become sparse_bottleneck2d where Hopper GPUs
            have one kernel for it (float16 or bfloat16) and it has up to 96 hidden channels. Elsewhere the op
            is its three convolutions, on a CPU without packed weights.
        facts: written into the file's metadata as sbnet.NAME, beside version, blocks and threshold (say, input range).
        accept: called with the checked model before it takes its place; what it raises leaves `path` as it was.

    Returns:
        path.

    Raises:
        ExportError: what cannot be exported, and what to use instead.
        TypeError: module is none.

    >>> x, mask = torch.rand(1, 3, 400, 704), torch.rand(1, 400, 704) > 0.99
    >>> sbnet.export.to_onnx(net, (x, mask), "net.onnx")
    """
    if not 18 <= opset_version <= NEWEST_OPSET:
        raise ExportError(f"sbnet.export.to_onnx: opset_version: expected 18 to {NEWEST_OPSET}, got {opset_version}")
    if not isinstance(module, nn.Module):
        raise TypeError(f"sbnet.export.to_onnx: module: expected an nn.Module, got {type(module).__name__}")
    path = Path(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        what = "is a folder" if path.is_dir() else "its folder is missing or cannot be written"
        raise ExportError(f"sbnet.export.to_onnx: path: expected a file that can be written, got {path}: {what}")
    was_training, program = module.training, None
    step("capturing the network")
    module.eval()
    try:
        # An example batch of 1 must not make a dynamic batch 1, nor "not one block" a constraint on the plane.
        oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=dynamic is not None)  # type: ignore[attr-defined]
        with EXPORTING, oblivious, no_dump():
            program = torch.export.export(
                _with_flat_outputs(module),
                tuple(args),
                dynamic_shapes=dynamic,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        for graph_module in program.graph_module.modules():
            if isinstance(graph_module, torch.fx.GraphModule):
                _check(graph_module.graph)
        step("translating to ONNX")
        with EXPORTING, _quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                dynamic_shapes=dynamic,
                input_names=input_names,
                output_names=output_names,
                custom_translation_table=translate.table(),
                opset_version=opset_version,
                optimize=False,  # it would fold weights, and name them val_1
                verbose=False,
            )
    except ExportError:
        raise
    except Exception as error:  # what the network's code raises, or PyTorch's exporter
        raise ExportError(f"sbnet.export.to_onnx: {_refused(module, program, error)}") from error
    finally:
        module.train(was_training)
    assert exported is not None
    made = exported.model.graph.opset_imports.get("", opset_version)
    if made != opset_version:  # PyTorch 2.10 goes on with 18 where its converter knows no way
        raise ExportError(
            f"sbnet.export.to_onnx: opset_version: expected one that torch {torch.__version__} converts to, "
            f"got {opset_version}, which it left at {made}"
        )
    step("optimising the model")
    memory_format.fold_constants(exported.model.graph)
    with EXPORTING, _without_search():
        exported.optimize()
    memory_format.optimise(exported.model, fuse_bottlenecks)
    clean(exported.model, facts or {})
    name_outputs(exported.model.graph.outputs, output_names)
    step("writing and checking the file")
    _save(exported.model, path, external_data, accept)
    return path


class _NoTorchvision(logging.Filter):
    """Drops that ops of torchvision are skipped where it is not installed: nothing that is exported uses them then."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("torchvision is not installed")


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx's exporter without what it says of itself on every call: see _NoTorchvision, and a class of PyTorch's
    that PyTorch's own copies still use."""
    log, drop = logging.getLogger("torch.onnx._internal.exporter._registration"), _NoTorchvision()
    log.addFilter(drop)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        log.removeFilter(drop)


@contextmanager
def _without_search() -> Iterator[None]:
    """onnxscript's rewriting without its rule that looks at every pair of nodes, though most models have no two slices
    that it could join: on 1,600 nodes it took 2 s of 11. Where onnxscript keeps its rules elsewhere, all of them run.
    """
    from onnxscript import rewriter

    rules = getattr(rewriter, "_DEFAULT_REWRITE_RULES", None)
    if not isinstance(rules, tuple):
        yield
        return
    rewriter._DEFAULT_REWRITE_RULES = tuple(r for r in rules if getattr(r, "name", "") != "SlicesSplit")
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


def _refused(module: nn.Module, program: Any, error: BaseException) -> str:
    """Why the module cannot be exported, in one line."""
    missing = next(filter(None, (NO_FORM.search(str(caught)) for caught in causes(error))), None)
    if missing is not None and program is not None:
        op = ".".join(missing.groups())
        nodes = (node for node in program.graph.nodes if _name(str(node.target)) == _name(op))
        where = next(map(path_of, nodes), "") or type(module).__name__
        return f"{where}: expected an op with an ONNX form, got {op}"
    return refusal(module, error)


def _name(target: str) -> str:
    """Of an op, or of what the exporter made of it: aten.linalg_svd.default, aten._linalg_svd.default."""
    return target.replace("::", ".").split(".")[1].strip("_") if "." in target else target


def _with_flat_outputs(module: nn.Module) -> nn.Module:
    """The module, returning its tensors alone: a grid of dynamic sizes, as an ActiveBlocks holds one, cannot be part of
    an exported program's output."""
    flat = copy.copy(module)  # parameters are shared, names stay

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(pytree.tree_leaves(module.forward(*args, **kwargs)))

    flat.forward = forward  # type: ignore[method-assign]
    return flat


def check(path: str | os.PathLike[str]) -> None:
    """onnx.checker with sbnet's schemas, and strict shape inference. Raises what they raise, and ExportError where a
    model is of a newer sbnet than this one, or a node has an attribute that its op does not know."""
    import onnx

    schemas.register()
    model = onnx.load(os.fspath(path), load_external_data=False)
    for opset in model.opset_import:
        if opset.domain == schemas.DOMAIN and opset.version > schemas.VERSION:
            raise ExportError(f"{path}: opset sbnet: expected at most {schemas.VERSION}, got {opset.version}")
    for node in model.graph.node:
        if node.domain == schemas.DOMAIN and node.op_type in schemas.OPS:
            _check_attributes(node, f"{path}: {node.name or node.op_type}")
    onnx.checker.check_model(os.fspath(path), full_check=True, check_custom_domain=True)


def _check_attributes(node: Any, where: str) -> None:
    known = {*schemas.OPS[node.op_type].attributes, "format"}
    unknown = [a.name for a in node.attribute if a.name not in known]
    if unknown:
        raise ExportError(f"{where}: attributes: expected those of sbnet::{node.op_type}, got {', '.join(unknown)}")
    for attribute in node.attribute:
        if attribute.name == "format" and not 1 <= attribute.i <= schemas.FORMAT:
            raise ExportError(f"{where}: format: expected 1 to {schemas.FORMAT}, got {attribute.i}: of a newer sbnet")


def _save(model: Any, path: Path, external_data: bool | None, accept: Callable[[Path], object]) -> None:
    """Writes and checks the model in a folder beside its place, then moves it there: a file is whole or not there."""
    import onnx_ir as ir

    if external_data is None:
        weights = (v.const_value for v in model.graph.initializers.values())
        external_data = sum(w.nbytes for w in weights if w is not None) > INLINE_BYTES
    data = path.with_name(path.name + ".data")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        part = Path(folder) / path.name
        ir.save(model, part, external_data=data.name if external_data else None)
        check(part)
        accept(part)
        if external_data:
            part.with_name(data.name).replace(data)
        part.replace(path)
    if not external_data:
        data.unlink(missing_ok=True)  # of a model that stood here before


# ---- what has no ONNX form


def _check(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "sbnet":
            continue
        name = target._schema.name.split("::")[1]
        if target._schema.is_mutable:
            raise ExportError(
                f"sbnet.export.to_onnx: {name} works in place and has no ONNX form; use {name.rstrip('_')} "
                f"(ONNX Runtime reuses memory by itself).{_where(node)}"
            )
        arguments = {a.name: v for a, v in zip(target._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        if name in ("reduce_mask", "mask_pyramid") and _value(arguments["mask"]).dtype == torch.float64:
            raise ExportError(
                f"sbnet.export.to_onnx: {name}: mask: expected bool, uint8, "
                f"float16, bfloat16 or float32, got torch.float64.{_where(node)}"
            )
        if name == "reduce_mask":
            _check_reduce_mask(node, arguments)


def _value(v: Any) -> Any:
    return v.meta["val"] if isinstance(v, torch.fx.Node) else v


def _check_reduce_mask(node: torch.fx.Node, arguments: dict[str, Any]) -> None:
    """Attributes are numbers: a dynamic block count or capacity must be the one that the op derives by itself."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    mask, grid, capacity = (
        _value(arguments["mask"]),
        [_value(v) for v in arguments["grid"]],
        _value(arguments["capacity"]),
    )
    for d in range(2):
        size, count = grid[d], grid[6 + d]
        if not isinstance(count, int) and not statically_known_true(count == -(-mask.shape[1 + d] // size)):
            raise ExportError(
                f"sbnet.export.to_onnx: reduce_mask: grid: expected "
                f"BlockGrid.cover of the mask's own height and width, got a block count "
                f"{count} that depends on a dynamic dimension.{_where(node)}"
            )
    if not isinstance(capacity, int) and not statically_known_true(capacity == mask.shape[0] * grid[6] * grid[7]):
        raise ExportError(
            f"sbnet.export.to_onnx: reduce_mask: capacity: expected a number, or None for "
            f"all blocks, got {capacity}, which depends on a dynamic dimension.{_where(node)}"
        )


def _where(node: torch.fx.Node) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return " Called at:\n" + "\n".join(lines[-4:]) if lines else ""
