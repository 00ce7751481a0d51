"""nn.Module -> Graph, by torch.export without decompositions: each ATen op meets its rule, or stays a dense node."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from sbnet.graph import norms, pixelwise, rules
from sbnet.graph.axes import op_name
from sbnet.graph.builder import Builder
from sbnet.graph.dense_attention import HIDES, KEYED, PRODUCTS
from sbnet.graph.exporting import exporting
from sbnet.graph.ir import Graph, Value
from sbnet.graph.refusal import no_dump, no_values, refusal
from sbnet.graph.token_rules import TokenRules
from sbnet.graph.tokens import settle
from sbnet.progress import step

# They return their argument, in eval mode or as far as values go.
DROPS = {"dropout", "feature_dropout", "alpha_dropout"}
SAME = DROPS | {"alias", "detach", "contiguous", "lift_fresh", "positive"}
COPIES = {"clone", "lift_fresh_copy"}
CHECKS = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"}


ATTENDS = {"scaled_dot_product_attention", "softmax", "_softmax"}


class CaptureError(ValueError):
    """A network that cannot be captured, and why: one line."""


class _WritesAView(Exception):
    """Something is written in place of which another arrangement is read later."""


def capture(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None, tokens: bool = False
) -> Graph:
    """The graph of `module(*args, **kwargs)` in eval mode; parameters are shared with it.

    tokens: attention sees active tokens alone, packed, where it is recognised (the masked contract).

    Raises:
        CaptureError: torch.export cannot follow the network.
    """
    step("capturing the network")
    with exporting():
        program = _program(module, args, kwargs or {})
        names = {op_name(node.target) for node in program.graph.nodes}
        if tokens and (names & ATTENDS or (names & KEYED and names & PRODUCTS)):
            best = _read(program, module)
            most = (0, 0, -_dense(best))
            for pack in (True, False):
                rules = TokenRules(pack)
                rules.fixed = getattr(module, "fixed", False)
                found = _read(program, module, rules)
                score = (rules.met, rules.attentions, -_dense(found))
                if score >= most and not rules.windows.spoilt:
                    best, most = found, score
            return settle(best)
        return _read(program, module)


def _dense(graph: Graph) -> int:
    """How many ops run dense, beside those that only say which keys are active."""
    return sum(node.kind == "aten" and not node.moves and node.target not in HIDES for node in graph.nodes)


def _read(program: Any, module: nn.Module, tokens: TokenRules | None = None) -> Graph:
    try:
        return _Reader(program, module, tokens).graph.link()
    except _WritesAView:
        program = _without_writes(program)
    try:
        return _Reader(program, module, tokens).graph.link()
    except _WritesAView:
        raise CaptureError("sbnet: the network: expected writes in place that can be followed, got others") from None


def _without_writes(program: Any) -> Any:
    """The program with ops that write nothing, by PyTorch's decompositions."""
    for node in program.graph.nodes:
        name = op_name(node.target)
        if name in DROPS and not _is_random(node, node.args, node.kwargs):  # decomposed, a copy
            node.target, node.args, node.kwargs = torch.ops.aten.alias.default, node.args[:1], {}
        elif name == "einsum" and any(_storage(n) == _storage(node) for n in node.all_input_nodes):
            raise CaptureError(  # of letters in another order; decomposed, a copy
                f"sbnet: {path_of(node) or 'the network'}: expected writes in place that can be followed, got some in "
                "a network with an einsum that is a view: write permute"
            )
    return program.run_decompositions({})


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, for a while."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _program(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        with evaluating(module), no_dump():
            return torch.export.export(module, tuple(args), kwargs, strict=False)
    except CaptureError:  # of a module that knows better what went wrong: a node of an ONNX file
        raise
    except Exception as error:  # torch.export raises what it meets, in the network's code or its own
        raise CaptureError(f"sbnet: {refusal(module, error)}") from error


class _Reader:
    """Reads an exported program into a graph."""

    def __init__(self, program: Any, module: nn.Module, tokens: TokenRules | None = None) -> None:
        self.program, self.module = program, module
        self.values: dict[fx.Node, Any] = {}  # what each fx node stands for now
        self.memory: dict[fx.Node, int] = {}  # fx nodes that share memory have one number
        self.dropped: dict[int, int] = {}  # the number of a dropout's argument by that of its result
        self.builder = Builder(tokens)
        self.order = {node: k for k, node in enumerate(program.graph.nodes)}
        signature = program.graph_signature
        stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        stored |= signature.inputs_to_lifted_tensor_constants
        inputs: list[Value | None] = []
        for node in program.graph.nodes:
            if node.op == "placeholder":
                value = self._placeholder(node, stored)
                if node.name not in stored and not (isinstance(value, Value) and value.constant):
                    inputs.append(value if isinstance(value, Value) else None)
                self.values[node], self.memory[node] = value, self._memory_of(node)
            elif node.op == "get_attr":
                self.values[node] = getattr(program.graph_module, str(node.target))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                flat = list(pytree.tree_leaves(self._resolved(node.args[0])))
        if tokens is not None:
            for v in flat:
                tokens.windows.leaves(v)
            flat = [tokens.dense(self.builder, v) if isinstance(v, Value) else v for v in flat]
        mutated = len(signature.output_specs) - len(signature.user_outputs)
        spec = program.call_spec.out_spec
        self.graph = Graph(inputs, flat[mutated:], spec, self.builder.nodes)

    def _placeholder(self, node: fx.Node, stored: dict[str, str]) -> Any:
        if node.name in stored:
            tensor = self.program.state_dict.get(stored[node.name])
            if tensor is None:
                tensor = self.program.constants[stored[node.name]]
            return Value(stored[node.name], tuple(tensor.shape), tensor.dtype, tensor=tensor, constant=True)
        made = node.meta.get("val")
        if not isinstance(made, Tensor):
            return made
        return self.builder.input(node.name, made)

    def _resolved(self, tree: Any) -> Any:
        return fx.node.map_arg(tree, lambda n: self.values[n])

    def _call(self, node: fx.Node) -> None:
        name = op_name(node.target)
        if name in CHECKS:
            self.values[node] = None
            return
        if name == "_has_compatible_shallow_copy_type":  # all that torch.export notes of it
            raise CaptureError(f"sbnet: {path_of(node) or 'the network'}: expected no assignment to .data, got one")
        args, kwargs = self._resolved(node.args), self._resolved(dict(node.kwargs))
        if node.target is operator.getitem and not isinstance(args[0], Value):
            self.values[node] = args[0][args[1]]
            self.memory[node] = self._memory_of(node)
            return
        if name == "as_strided" and not args[0].constant:
            raise CaptureError(
                f"sbnet: {path_of(node) or 'the network'}: as_strided: expected views that do not hang on how a tensor "
                "lies in memory, which a run decides"
            )
        schema = getattr(node.target, "_schema", None)
        if _is_random(node, args, kwargs):
            raise CaptureError(
                f"sbnet: {path_of(node) or 'the network'}: expected a network in eval mode, got {name}, which is random"
            )
        if schema is not None and schema.is_mutable and any(a.is_out for a in schema.arguments):
            raise _WritesAView  # which leaves such ops in no program
        if (name in SAME and isinstance(args[0], Value)) or name in COPIES:
            self.values[node], self.memory[node] = args[0], self._memory_of(node)
            return
        made = node.meta.get("val")
        found = [v for v in pytree.tree_leaves(made) if isinstance(v, Tensor)]
        if not all(isinstance(n, int) for v in found for n in v.shape):
            path = path_of(node)
            raise CaptureError(f"sbnet: {path or 'the network'}: {name}: {no_values(self.module, path)}")
        outputs = self.builder.read(node.target, args, kwargs, made, node.name, path_of(node), _line(node))
        self.values[node] = outputs
        self.memory[node] = self._memory_of(node)
        if schema is not None and schema.is_mutable:
            self._written(node, schema, outputs)

    def _memory_of(self, node: fx.Node) -> int:
        """What torch.export traced with knows which results are views of what, in the example's memory format: a
        reshape or a cast may be one, or a copy. Only a dropout is a copy there that returns its argument here."""
        number = _storage(node) or -self.order[node]
        if op_name(node.target) in DROPS:
            self.dropped[number] = self.memory[node.args[0]]  # type: ignore[index]
        return self.dropped.get(number, number)

    def _written(self, node: fx.Node, schema: Any, new: Any) -> None:
        """After an op in place, the name of its argument stands for its result."""
        given_of = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
        for argument in schema.arguments:
            given = given_of.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if isinstance(given, (tuple, list)):  # as torch._foreach has
                raise _WritesAView
            if not isinstance(given, fx.Node):
                continue
            old = self.values[given]
            if isinstance(old, Value) and old.tensor is not None:
                raise CaptureError(
                    f"sbnet: {path_of(node)}: expected a network without a memory, got one that writes {old.name}"
                )
            for other, number in self.memory.items():
                if number != self.memory[given] or other is node:
                    continue
                later = any(self.order[user] > self.order[node] for user in other.users)
                if self.values[other] is old:
                    self.values[other] = new
                elif later:
                    raise _WritesAView
            self.memory[node] = self.memory[given]


def _storage(node: fx.Node) -> int:
    """The address of what holds the first tensor of a traced result; 0 where there is none."""
    made = next((v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)), None)
    if made is not None and torch._C._functorch.is_functorch_wrapped_tensor(made):
        raise CaptureError(
            f"sbnet: {path_of(node) or 'the network'}: expected no vmap and no torch.func, got one of them"
        )
    return 0 if made is None else made.untyped_storage()._cdata


def path_of(node: fx.Node) -> str:
    """Of the module that called an op of an exported program."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _is_random(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Would another call give other numbers? By PyTorch's own tag; of dropout and attention only where they drop."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    return all(bool(given[switch]) for switch in ("train", "training", "dropout_p", "p") if switch in given)


def _line(node: fx.Node) -> str:
    frames = [f for f in (node.meta.get("stack_trace") or "").splitlines() if f.strip().startswith("File")]
    own = [f for f in frames if "/torch/nn/" not in f] or frames
    return (
        own[-1].strip().removeprefix("File ").replace('"', "").replace(", line ", ":").split(", in")[0] if own else ""
    )


RULES = norms, pixelwise, rules  # imported for what they register
