"""Runs one node of an ONNX model as ops of PyTorch: by its rule, by the body that ONNX gives it, or, of known numbers,
at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sbnet.graph.onnx_table import RANDOM, has_rule, refused, schema_of

Floats = tuple[torch.dtype, torch.dtype]  # the file's main floating dtype, and what it has become
Rule = Callable[["Arguments"], Any]
OPS: dict[str, Rule] = {}
LOOPS = {"Loop", "Scan", "SequenceMap"}


class Unsupported(ValueError):
    """Something that has no form in PyTorch here; the message names what."""


def op(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as what nodes of these ops give: a tensor, an array of known numbers, or a list of them."""

    def register(function: Rule) -> Rule:
        OPS.update(dict.fromkeys(names, function))
        return function

    return register


class Arguments:
    """Of a node: `a[0]` is its first input as a tensor, `a.number(1)` its second as numbers."""

    def __init__(self, node: Any, opset: int, values: Sequence[Any], numbers: Sequence[Any], floats: Floats) -> None:
        self.node, self.values, self.numbers, self.floats = node, list(values), list(numbers), floats
        self.given, self.schema = attributes_of(node), schema_of(node.op_type, opset)
        self.version = self.schema.since_version
        self.like = next((v for v in values if isinstance(v, Tensor)), None)

    def __len__(self) -> int:
        return len(self.values)

    def has(self, at: int) -> bool:
        """Is an input given?"""
        return at < len(self.values) and self.values[at] is not None

    def __getitem__(self, at: int) -> Any:
        """An input as a tensor; None where it is left out."""
        value = self.values[at] if at < len(self.values) else None
        if isinstance(value, np.ndarray):
            value = as_tensor(value, None if self.like is None else self.like.device)
            return value.to(self.floats[1]) if value.dtype == self.floats[0] else value
        return value

    def all(self) -> list[Tensor]:
        return [self[k] for k in range(len(self))]

    def number(self, at: int, otherwise: Any = None) -> Any:
        """An input that is known, as a list or a number."""
        if not self.has(at):
            return otherwise
        if self.numbers[at] is None:
            raise Unsupported(f"input {self.input_name(at)}: expected a constant, got one computed from values")
        return self.numbers[at].tolist()

    def input_name(self, at: int) -> str:
        names = [given.name for given in self.schema.inputs]
        return names[min(at, len(names) - 1)] if names else str(at)

    def option(self, name: str, otherwise: Any = None) -> Any:
        """An attribute; where it is left out, what the schema of its version says, or `otherwise`."""
        if name in self.given:
            return self.given[name]
        known = self.schema.attributes.get(name)
        if known is None or not known.default_value.name:
            return otherwise
        return plain_attribute(known.default_value)

    def either(self, name: str, at: int, otherwise: Any = None) -> Any:
        """An attribute in old versions, an input in new ones."""
        return self.given[name] if name in self.given else self.number(at, otherwise)

    def expect(self, holds: bool, name: str, expected: str, got: Any) -> None:
        """Refuses by name what does not hold."""
        if not holds:
            raise Unsupported(f"{name}: expected {expected}, got {got}")


def as_tensor(array: np.ndarray, device: Any = None) -> Tensor:
    """An array of ONNX's as a tensor; bfloat16 and float8 are ml_dtypes' there."""
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = torch.from_numpy(np.ascontiguousarray(array).view(np.uint16 if name == "bfloat16" else np.uint8).copy())
        return bits.view(getattr(torch, name)).reshape(array.shape).to(device)
    try:
        return torch.from_numpy(np.array(array)).to(device)
    except TypeError:
        raise Unsupported(f"a tensor of {name}: expected a dtype that PyTorch has") from None


def plain_attribute(attribute: Any) -> Any:
    """An attribute's value in Python's own types."""
    from onnx import helper, numpy_helper

    value = helper.get_attribute_value(attribute)
    if attribute.type == attribute.TENSOR:
        return numpy_helper.to_array(value)
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "extend"):
        return [v.decode() if isinstance(v, bytes) else v for v in value]
    return value


def attributes_of(node: Any) -> dict[str, Any]:
    return {a.name: plain_attribute(a) for a in node.attribute if a.type != a.GRAPH}


def check(node: Any, opset: int) -> None:
    """Raises Unsupported for an op, a version or an attribute that is not read."""
    name = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    schema = schema_of(node.op_type, opset) if node.domain in ("", "ai.onnx") else None
    if schema is None or schema.deprecated:
        raise Unsupported(f"{name} is no op of ONNX at opset {opset}" if schema is None or not schema.deprecated else
                          f"{name} is no longer an op of ONNX at opset {opset}")  # fmt: skip
    if name in RANDOM:
        raise Unsupported(f"{name}: expected a model that gives the same result each time, got a random op")
    if name in ("Constant", "If"):
        return
    if has_rule(name, schema):
        wrong = refused(name, schema, attributes_of(node))
        if wrong:
            raise Unsupported(wrong)
    elif not (schema.has_function or schema.has_context_dependent_function or foldable(node)):
        raise Unsupported(f"{name} of version {schema.since_version} (opset {opset}) is not read")


def foldable(node: Any) -> bool:
    """May it be run on known numbers, though no rule knows it? Whether they are known shows when it runs."""
    return node.op_type not in RANDOM | LOOPS


def run_node(
    node: Any, opset: int, values: Sequence[Any], numbers: Sequence[Any], floats: Floats, scope: Any = None
) -> list[Any]:
    """What a node gives: a tensor each, or an array where all that it reads is known, or is a shape.

    Args:
        node: a NodeProto that `check` has passed.
        opset: of its domain, where it stands.
        values: its inputs; None where one is left out.
        numbers: those of them that are known, else None.
        floats: the file's main floating dtype, and what it has become.
        scope: (values, known numbers) by name, where the bodies of control flow find what stands around them.

    Raises:
        Unsupported: what of it has no form here.
    """
    if node.op_type == "Constant":
        return [_constant(node)]
    if node.op_type == "If":
        return _branch(node, opset, numbers[0], floats, scope)
    known = all(v is None or n is not None for v, n in zip(values, numbers, strict=True))
    schema = schema_of(node.op_type, opset)
    if has_rule(node.op_type, schema):
        if not known or node.op_type in ("Shape", "Size"):
            return _outputs(node, schema, OPS[node.op_type](Arguments(node, opset, values, numbers, floats)))
        # Real numbers, also while torch.export traces, to which each change of the gradient mode is a graph of its own.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            given, same = [None if n is None else as_tensor(n) for n in numbers], (floats[0], floats[0])
            made = _outputs(node, schema, OPS[node.op_type](Arguments(node, opset, given, numbers, same)))
            return [as_array(v) for v in made]
    if known and foldable(node):
        return _folded(node, opset, numbers)
    if schema.has_function or schema.has_context_dependent_function:
        return _body(node, opset, schema, values, numbers, floats)
    raise Unsupported(f"{node.op_type} of version {schema.since_version} is read only where its inputs are constants")


def as_array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _outputs(node: Any, schema: Any, made: Any) -> list[Any]:
    found = list(made) if isinstance(made, (tuple, list)) else [made]
    for at, name in enumerate(node.output):
        if name and at >= len(found):
            formal = schema.outputs[min(at, len(schema.outputs) - 1)].name
            raise Unsupported(f"output {formal}: expected none, got one, which is not computed")
    return found


def _constant(node: Any) -> np.ndarray:
    (attribute,) = node.attribute
    value = plain_attribute(attribute)
    if attribute.name == "value":
        return value
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name not in kinds:
        raise Unsupported(f"attribute {attribute.name}: expected a tensor or numbers")
    return np.asarray(value, kinds[attribute.name])


def _folded(node: Any, opset: int, numbers: Sequence[Any]) -> list[Any]:
    """What a node without a rule gives whose inputs are known: by ONNX's own evaluator."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    named = {f"v{k}": v for k, v in enumerate(numbers) if v is not None}
    alone = type(node)()
    alone.CopyFrom(node)
    del alone.input[:]
    alone.input.extend(f"v{k}" if v is not None else "" for k, v in enumerate(numbers))
    graph = helper.make_graph(
        [alone], "one", [helper.make_tensor_value_info(n, 1, None) for n in named],
        [helper.make_tensor_value_info(n, 1, None) for n in alone.output if n],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        return [np.asarray(v) for v in ReferenceEvaluator(model).run(None, named)]
    except Exception as error:  # whatever its NumPy raises
        raise Unsupported(f"{node.op_type} of constants: {str(error).splitlines()[0][:120]}") from error


def _body(
    node: Any, opset: int, schema: Any, values: Sequence[Any], numbers: Sequence[Any], floats: Floats
) -> list[Any]:
    """What the function gives that ONNX says a node is."""
    function = _function(node, opset, schema, values)
    within = {entry.domain: entry.version for entry in function.opset_import}.get("", opset)
    given = {a.name: a for a in node.attribute}
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    env = dict(zip(function.input, values, strict=False))
    known = dict(zip(function.input, numbers, strict=False))
    nodes = [_with_attributes(inner, given, defaults) for inner in function.node]
    _run_all(nodes, within, env, known, floats, "its body")
    return [env.get(name) for name in function.output]


def _with_attributes(inner: Any, given: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """A node of a function's body, with the attributes that it takes from the function's own."""
    made = type(inner)()
    made.CopyFrom(inner)
    del made.attribute[:]
    for attribute in inner.attribute:
        if not attribute.ref_attr_name:
            made.attribute.append(attribute)
            continue
        found = given.get(attribute.ref_attr_name, defaults.get(attribute.ref_attr_name))
        if found is not None:
            made.attribute.append(found)
            made.attribute[-1].name = attribute.name
    return made


def _run_all(
    nodes: Sequence[Any], opset: int, env: dict[str, Any], known: dict[str, Any], floats: Floats, where: str
) -> None:
    """Runs nodes in order; what they give goes into `env` and `known`."""
    for node in nodes:
        try:
            check(node, opset)
            values, numbers = [env.get(n) for n in node.input], [known.get(n) for n in node.input]
            results = run_node(node, opset, values, numbers, floats, (env, known))
        except Unsupported as error:
            raise Unsupported(f"{node.op_type} in {where}: {error}") from None
        for name, value in zip(node.output, results, strict=False):
            env[name] = value
            known[name] = value if isinstance(value, np.ndarray) else None


def _branch(node: Any, opset: int, condition: Any, floats: Floats, scope: Any) -> list[Any]:
    """What the branch of an If gives whose condition is known."""
    if condition is None:
        raise Unsupported(
            "input cond: expected a constant, got one computed from values: a branch cannot depend on them"
        )
    name = "then_branch" if bool(condition) else "else_branch"
    (graph,) = (a.g for a in node.attribute if a.name == name)
    from onnx import numpy_helper

    env, known = dict(scope[0]), dict(scope[1])
    for tensor in graph.initializer:
        env[tensor.name] = known[tensor.name] = numpy_helper.to_array(tensor)
    _run_all(graph.node, opset, env, known, floats, f"its {name}")
    return [env[value.name] for value in graph.output]


def _function(node: Any, opset: int, schema: Any, values: Sequence[Any]) -> Any:
    from onnx import FunctionProto, helper

    context = schema.has_context_dependent_function
    versions = schema.context_dependent_function_opset_versions if context else schema.function_opset_versions
    version = max((v for v in versions if v <= opset), default=min(versions))
    if context:
        types = [b"" if v is None else helper.make_tensor_type_proto(_code(v), list(v.shape)).SerializeToString()
                 for v in values]  # fmt: skip
        body = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    else:
        body = schema.get_function_with_opset_version(version)
    function = FunctionProto()
    function.ParseFromString(body)
    return function


def _code(value: Any) -> int:
    """ONNX's number of a dtype."""
    from onnx import helper

    if isinstance(value, np.ndarray):
        return helper.np_dtype_to_tensor_dtype(value.dtype)
    return next(code for code, dtype in TYPES.items() if dtype == value.dtype)


TYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 16: torch.bfloat16,
}  # fmt: skip
