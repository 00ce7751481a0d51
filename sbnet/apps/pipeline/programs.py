"""Programs of `torch.export.save` (.pt2), read without running what a file may carry.

torch.export.load unpickles sample inputs and constants, and evaluates symbolic sizes, guards and names of ops as
Python. So the archive's members are read here, everything in them that is not plain is refused by name, and PyTorch
loads a copy that holds nothing else.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

NAME = re.compile(r"[\w.:$-]{0,500}", re.ASCII)  # of values, parameters, versions
MEMBER = re.compile(
    r"models/model\.json|data/weights/(model_weights_config\.json|weight_\d+)"
    r"|data/constants/(model_constants_config\.json|tensor_\d+)|archive_format|archive_version|byteorder"
    r"|\.data/(version|serialization_id|alignment)"
)
LEFT_OUT = re.compile(r"data/sample_inputs/model\.pt|extra/.*|\.format_version|\.storage_alignment")  # never read
OPERATORS = {
    "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "and_", "or_", "not_", "eq", "ne", "lt",
    "le", "gt", "ge", "getitem"
}  # fmt: skip
SYMBOLIC = {"sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum", "_sym_sqrt"}
MATHS = {"ceil", "floor", "trunc", "sqrt"}
HIGHER = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "cond", "while_loop", "invoke_subgraph"}
REFUSED_OPS = {"aten::from_file"}  # maps, and may create, a file of any name
FUNCTIONS = {
    "Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Pow", "Max", "Min", "Mod", "Abs", "Eq", "Ne",
    "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Piecewise", "FloorDiv", "ModularIndexing", "Where",
    "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "TruncToInt", "RoundToInt", "ToFloat",
    "IntTrueDiv", "FloatTrueDiv", "TruncToFloat", "Identity", "LessThan", "StrictLessThan", "GreaterThan",
    "StrictGreaterThan", "Equality", "Unequality"
}  # fmt: skip
GUARDED = {
    "size", "stride", "storage_offset", "dim", "shape", "ndim", "dtype", "device", "ceil", "floor", "trunc",
    "sqrt"
}  # fmt: skip
GUARDING = {"L", "len", "max", "min", "int", "float", "abs", "math", "Eq", "Ne", "Mod"}
CONSTANTS = {"True", "False", "oo", "int_oo", "nan", "zoo"}
ASSUMPTIONS = {"positive", "integer", "nonnegative", "negative", "real", "evaluate"}
LONGEST = 4000  # characters of an expression
LARGEST_POWER = 16


class Program(nn.Module):
    """A network that `torch.export.save` wrote (.pt2), for frames of the sizes that it was exported for. Its sample
    inputs are not read, and no pickle in it is.

    Raises:
        ValueError: the file is no such program, or holds what is not plain: pickles, compiled code, names of anything
            but ops.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            program = torch.export.load(io.BytesIO(plain_archive(path)))
            program.example_inputs = _examples(program)  # without any, a module does not check its inputs' sizes
            self.program = program.module()
        except _NotPlainError as error:
            raise ValueError(f"not a plain program of torch.export ({error})") from None
        except Exception as error:  # of whatever kind: zip, JSON, a schema of another version
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"not a program of torch.export ({reason})") from None
        self.training = False

    def train(self, mode: bool = True) -> Program:
        """Programs are what they were exported as, and refuse to be asked."""
        return self

    def forward(self, *inputs: Tensor) -> Any:
        return self.program(*inputs)


class _NotPlainError(Exception):
    """What was found in the place of something plain."""


def _examples(program: torch.export.ExportedProgram) -> Any:
    """(args, kwargs) like those that it was exported for, of zeros that take no memory."""
    names = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]

    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        size = [n if isinstance(n, int) else int(n.node.hint) for n in value.shape]
        return torch.zeros((), dtype=value.dtype).expand(size)

    assert program.call_spec.in_spec is not None
    return pytree.tree_unflatten([made(v) for v in values], program.call_spec.in_spec)


def plain_archive(path: Path) -> bytes:
    """A .pt2 of the same network that holds plain data alone: no sample inputs, no traces of stacks.

    Raises:
        Exception: the file is no archive, or holds anything else.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as plain:
        seen = set()
        for entry in archive.infolist():
            _, _, member = entry.filename.partition("/")
            if LEFT_OUT.fullmatch(member):
                continue
            if not MEMBER.fullmatch(member):
                raise _NotPlainError(f"member {entry.filename!r}: expected a network's graph and tensors alone")
            if member in seen or entry.compress_type != zipfile.ZIP_STORED:
                raise _NotPlainError(f"member {entry.filename!r}: expected once, as torch.export.save stores it")
            seen.add(member)
            data = archive.read(entry)
            if member == "models/model.json":
                data = json.dumps(_plain_model(_parsed(member, data))).encode()
            elif member.endswith("_config.json"):
                _check_tensors(member, _parsed(member, data))
            plain.writestr(f"net/{member}", data)
        if "models/model.json" not in seen:
            raise _NotPlainError("expected models/model.json, got none")
        plain.writestr("net/data/sample_inputs/model.pt", b"")
    return made.getvalue()


def _parsed(member: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _NotPlainError(f"{member}: expected JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise _NotPlainError(f"{member}: expected a JSON object, got {type(found).__name__}")
    return found


def _check_tensors(member: str, config: dict[str, Any]) -> None:
    """Raises unless every entry of a config of weights or constants is a tensor of its bytes."""
    kind = "weight" if "weights" in member else "tensor"
    for name, entry in config.get("config", {}).items():
        if entry.get("use_pickle") is not False or not re.fullmatch(rf"{kind}_\d+", str(entry.get("path_name"))):
            raise _NotPlainError(f"{member}: {name}: expected a tensor, got {'a pickle' if entry else 'nothing'}")
    for key, value in _entries(config):
        if key == "expr_str":
            _check_expression(value)
        elif isinstance(value, str):
            _check_name(member, value)


def _plain_model(model: dict[str, Any]) -> dict[str, Any]:
    """The model, checked, without what is there for people: traces of stacks."""
    for guard in model.get("guards_code") or []:
        _check_guard(guard)
    rest = {k: v for k, v in model.items() if k not in ("guards_code", "torch_version")}
    _strip(rest)
    for key, value in _entries(rest):
        if key in ("target", "as_operator") and isinstance(value, str):
            _check_op(value)
        elif key == "expr_str":
            _check_expression(value)
        elif key in ("in_spec", "out_spec"):
            _check_tree(value)
        elif key in ("as_custom_obj", "custom_obj"):
            raise _NotPlainError("models/model.json: expected tensors and numbers, got an object of a class")
        elif key == "nn_module_stack" or (key or "").startswith("as_string"):
            continue  # cut at its commas; quoted wherever it is used
        elif isinstance(value, str):
            _check_name("models/model.json", value)
    return {**rest, **{k: model[k] for k in ("guards_code", "torch_version") if k in model}}


def _strip(value: Any) -> None:
    """Leaves of every node's metadata the names of the modules alone."""
    for key, found in list(_entries(value)):
        if key == "metadata" and isinstance(found, dict):
            kept = {k: v for k, v in found.items() if k == "nn_module_stack" and isinstance(v, str)}
            found.clear()
            found.update(kept)


def _entries(value: Any) -> Iterator[tuple[str | None, Any]]:
    """(key, value) of everything in a JSON value; keys themselves as (None, key), items of a list under its key."""
    todo: list[tuple[str | None, Any]] = [(None, value)]
    while todo:
        key, found = todo.pop()
        yield key, found
        if isinstance(found, dict):
            for k, v in found.items():
                if k not in ("in_spec", "out_spec"):
                    yield None, k
                todo.append((k, v))
        elif isinstance(found, list):
            todo += [(key, v) for v in found]


def _check_name(where: str, text: str) -> None:
    if not NAME.fullmatch(text):
        raise _NotPlainError(f"{where}: expected a name, got {text[:60]!r}")


def _check_op(text: str) -> None:
    """Raises unless it names an op: what is called when the program is loaded, or run."""
    head, _, name = text.partition(".")
    if head in ("_operator", "math", "torch") and name in {
        "_operator": OPERATORS, "math": MATHS, "torch": SYMBOLIC
    }[head]:  # fmt: skip
        return
    parts = text.split(".")
    found: Any = None
    if parts[:2] == ["torch", "ops"] and len(parts) == 4 and parts[2] == "higher_order" and parts[3] in HIGHER:
        return
    if parts[:2] == ["torch", "ops"] and len(parts) == 5 and all(re.fullmatch(r"\w+", p, re.ASCII) for p in parts):
        found = getattr(getattr(getattr(torch.ops, parts[2]), parts[3], None), parts[4], None)
    if not isinstance(found, torch._ops.OpOverload) or f"{parts[2]}::{parts[3]}" in REFUSED_OPS:
        raise _NotPlainError(f"expected an op of PyTorch, got {text[:80]!r}")
    key = f"{parts[2]}::{parts[3]}" + ("" if parts[4] == "default" else f".{parts[4]}")
    if not torch._C._dispatch_has_kernel(key):  # TorchScript's own, which open files
        raise _NotPlainError(f"expected an op on tensors, got {text[:80]!r}")


def _check_tree(text: Any) -> None:
    """Raises unless it tells how tensors lie in tuples, lists and dicts."""
    if text is None or text == "":
        return
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise _NotPlainError(f"expected how inputs are nested, got {str(text)[:60]!r}") from None
    plain = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
    for key, value in _entries(found):
        if key == "type" and value not in plain:
            raise _NotPlainError(f"expected tensors in tuples, lists and dicts, got {str(value)[:60]!r}")
        if isinstance(value, str) and not re.fullmatch(r'[\w.:$\[\]", -]*', value, re.ASCII):
            raise _NotPlainError(f"expected how inputs are nested, got {value[:60]!r}")


def _parsed_python(text: Any) -> ast.expr:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise _NotPlainError(f"expected an expression of at most {LONGEST} characters, got {str(text)[:60]!r}")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _NotPlainError(f"expected an expression of sizes, got {text[:60]!r}") from None


def _check_expression(text: Any) -> None:
    """Raises unless it is arithmetic of sizes: sympy evaluates it."""
    tree = _parsed_python(text)
    for node in ast.walk(tree):
        if not _is_arithmetic(node):
            raise _NotPlainError(f"expected an expression of sizes, got {text[:60]!r}")


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        if named and node.func.id == "Pow":  # type: ignore[attr-defined]
            return len(node.args) == 2 and _is_power(*node.args)
        return named and all(k.arg in ASSUMPTIONS and isinstance(k.value, ast.Constant) for k in node.keywords)
    if isinstance(node, ast.BinOp):
        return not isinstance(node.op, (ast.LShift, ast.MatMult)) and (
            not isinstance(node.op, ast.Pow) or _is_power(node.left, node.right)
        )
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):  # Symbol('s16'), Float('0.5', precision=53)
            return re.fullmatch(r"\w{1,64}|-?\d+\.\d*(e[+-]?\d+)?", node.value, re.ASCII) is not None
        return isinstance(node.value, (bool, int, float)) and (
            isinstance(node.value, float) or abs(node.value) < 1 << 64
        )
    if isinstance(node, ast.Name):
        return node.id in FUNCTIONS | CONSTANTS or re.fullmatch(r"[a-z]{1,4}\d+", node.id, re.ASCII) is not None
    plain = (ast.UnaryOp, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
             ast.keyword)  # fmt: skip
    return isinstance(node, plain)


def _is_power(base: ast.expr, exponent: ast.expr) -> bool:
    """A power that stays small: of no other power, and by a small number."""
    if any((isinstance(v, ast.Name) and v.id == "Pow") or isinstance(v, ast.Pow) for v in ast.walk(base)):
        return False
    values = [v.value for v in ast.walk(exponent) if isinstance(v, ast.Constant)]
    plain = all(isinstance(v, (ast.Constant, ast.UnaryOp, ast.USub, ast.Call, ast.Name, ast.Load))
                for v in ast.walk(exponent))  # fmt: skip
    return plain and len(values) == 1 and isinstance(values[0], (int, float)) and abs(values[0]) <= LARGEST_POWER


def _check_guard(text: Any) -> None:
    """Raises unless it compares sizes of inputs: PyTorch compiles it."""
    for node in ast.walk(_parsed_python(text)):
        if isinstance(node, ast.Attribute):
            good = node.attr in GUARDED
        elif isinstance(node, ast.Call):
            sized = isinstance(node.func, ast.Attribute) and not node.keywords
            good = sized or (isinstance(node.func, ast.Name) and node.func.id in GUARDING)
        elif isinstance(node, ast.Name):
            good = node.id in GUARDING or re.fullmatch(r"[a-z]{1,4}\d+", node.id, re.ASCII) is not None
        elif isinstance(node, ast.Constant):
            value = node.value
            named = isinstance(value, str) and NAME.fullmatch(value) is not None
            good = named or value is None or (isinstance(value, (bool, int, float)) and abs(value) < math.inf)
        elif isinstance(node, ast.Subscript):
            good = True
        else:
            good = _is_arithmetic(node)
        if not good:
            raise _NotPlainError(f"guards_code: expected a comparison of sizes, got {text[:60]!r}")
