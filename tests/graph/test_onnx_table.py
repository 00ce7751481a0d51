"""The table of what is read of ONNX, held to ONNX's own schemas: ops, versions, attributes, each read or refused."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
from onnx import defs, helper  # noqa: E402

from sbnet.graph import onnx as reader  # noqa: E402
from sbnet.graph.capture import CaptureError  # noqa: E402
from sbnet.graph.onnx import OnnxNetwork  # noqa: E402
from sbnet.graph.onnx_run import OPS, Unsupported, check, run_node  # noqa: E402
from sbnet.graph.onnx_table import RANDOM, has_rule, schema_of, table  # noqa: E402
from support import onnx_models  # noqa: E402

OLDEST = 7  # opsets before broadcasting as NumPy does it
SCHEMAS = defaultdict(dict)
for _schema in defs.get_all_schemas_with_history():
    if _schema.domain == "":
        SCHEMAS[_schema.name][_schema.since_version] = _schema
CONTROL = {"Constant", "If"}  # read beside the table
# What means nothing without values: strings, sequences, loops, and what gives as many results as values ask for.
ELSEWHERE = {"ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"}


def node_of(schema, **attributes):
    """A node with the attributes that it must have, and these."""
    given = {}
    for name, attribute in schema.attributes.items():
        if attribute.required:
            given[name] = {
                attribute.type.INT: 1, attribute.type.FLOAT: 1.0, attribute.type.STRING: "none",
                attribute.type.INTS: [1, 1], attribute.type.FLOATS: [1.0], attribute.type.STRINGS: ["a"],
                attribute.type.GRAPH: helper.make_graph([], "g", [], []),
            }[attribute.type]  # fmt: skip
    inputs = [f"i{k}" for k in range(max(schema.min_input, 1))]
    outputs = [f"o{k}" for k in range(max(schema.min_output, 1))]
    return helper.make_node(schema.name, inputs, outputs, **{**given, **attributes})


def checked_and_run(node, opset):
    check(node, opset)
    run_node(node, opset, [torch.zeros(1)] * len(node.input), [None] * len(node.input), (torch.float32,) * 2)


def in_force(op):
    """(schema, opsets) of each version of an op that a model of opset 7 or later can mean."""
    versions = sorted(SCHEMAS[op])
    for at, version in enumerate(versions):
        end = versions[at + 1] if at + 1 < len(versions) else defs.onnx_opset_version() + 1
        if end > OLDEST:
            yield SCHEMAS[op][version], range(max(version, OLDEST), end)


@pytest.mark.parametrize("op", sorted(table()))
def test_a_row_knows_all_that_the_schemas_know(op):
    """Every version in force has a row, every attribute of it a mark, and no mark is of nothing."""
    row, marked = table()[op], set()
    newest = defs.onnx_opset_version()
    assert {v for v in row.versions if v <= newest} <= set(SCHEMAS[op]), "a version that ONNX does not have"
    for schema, _ in in_force(op):
        if schema.deprecated:
            continue
        assert schema.since_version in row.versions
        assert set(schema.attributes) <= set(row.attributes), f"version {schema.since_version}"
    for version in row.versions & set(SCHEMAS[op]):
        marked |= set(SCHEMAS[op][version].attributes)
    assert set(row.attributes) <= marked | ({"consumed_inputs"} if newest < 28 else set())
    assert op in OPS


def test_every_rule_has_a_row():
    assert set(OPS) == set(table())


@pytest.mark.parametrize("op", sorted(set(SCHEMAS) - RANDOM - CONTROL))
def test_every_version_is_read_or_refused_by_name(op):
    """By a rule, or by the body that ONNX gives it; else an error at that node names op and version."""
    for schema, opsets in in_force(op):
        node, opset = node_of(schema), opsets[-1]
        if schema.deprecated:
            with pytest.raises(Unsupported, match=rf"{op} is no longer an op of ONNX at opset {opset}"):
                check(node, opset)
        elif not has_rule(op, schema) and not (schema.has_function or schema.has_context_dependent_function):
            with pytest.raises(Unsupported, match=rf"{op} of version {schema.since_version}"):
                checked_and_run(node, opset)


@pytest.mark.parametrize("op", sorted(RANDOM))
def test_random_ops_are_refused(op):
    with pytest.raises(Unsupported, match=f"{op}: expected a model that gives the same result each time"):
        check(node_of(SCHEMAS[op][max(SCHEMAS[op])]), defs.onnx_opset_version())


REFUSED = [(op, name) for op, row in sorted(table().items()) for name, mark in row.attributes.items() if mark == "!"]


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(op, name):
    for schema, opsets in in_force(op):
        if name not in schema.attributes:
            continue
        other = {"round_mode": "down"}.get(name, 1 - helper.get_attribute_value(schema.attributes[name].default_value)
                                          if name not in ("round_mode",) else 0)  # fmt: skip
        usual = helper.get_attribute_value(schema.attributes[name].default_value)
        check(node_of(schema, **{name: usual}), opsets[-1])
        with pytest.raises(
            Unsupported, match=f"attribute {name}: expected {usual!r}, got {other!r}".replace("b'", "'")
        ):
            check(node_of(schema, **{name: other}), opsets[-1])


@pytest.mark.parametrize("op", sorted(table()))
def test_an_attribute_of_another_version_is_refused(op):
    schema = schema_of(op, defs.onnx_opset_version())
    if schema.deprecated:
        return
    with pytest.raises(Unsupported, match=f"attribute bogus: {op} of version {schema.since_version} has none"):
        check(node_of(schema, bogus=1), defs.onnx_opset_version())


def test_the_fuzz_draws_every_attribute_that_is_honoured():
    """What the table calls honoured is what random models try (test_onnx_fuzz.py)."""
    rng, drawn = random.Random(0), defaultdict(set)
    for op in onnx_models.names():
        for _, opsets in in_force(op):
            for _ in range(40):
                made = onnx_models.drawn(rng, op, rng.choice(list(opsets)), (2, 4, 6, 8))
                drawn[op] |= set(made.attributes) if made is not None else set()
    never = {
        (op, name)
        for op, row in table().items()
        for name, mark in row.attributes.items()
        if not mark and name not in drawn[op]
    }
    assert set(table()) - set(onnx_models.names()) == set()
    # allowzero, and dtypes written beside zero points, are in tests of their own
    assert never <= {("QuantizeLinear", "output_dtype"), ("DequantizeLinear", "output_dtype")}


@pytest.mark.parametrize(
    ("node", "opset", "says"),
    [
        (("NonMaxSuppression", ["x", "x"], ["y"], {}), 17, "NonMaxSuppression of version 11"),
        (("FusedConv", ["x", "x"], ["y"], {"domain": "com.microsoft"}), 17, "com.microsoft.FusedConv is no op of ONNX"),
        (("MaxPool", ["x"], ["y", "i"], {"kernel_shape": [2, 2]}), 17, "output Indices: expected none"),
        (("BatchNormalization", ["x", *"cccc"], ["y"], {"spatial": 0}), 7, "attribute spatial: expected 1, got 0"),
        (("Add", ["x", "x"], ["y"], {"axis": 1, "broadcast": 1}), 6, "Add of version 6"),
        (("Cast", ["x"], ["y"], {"to": 8}), 17, "attribute to: expected a dtype that is read, got STRING"),
        (("RandomNormalLike", ["x"], ["y"], {}), 17, "a random op"),
        (("Reshape", ["x", "x"], ["y"], {}), 17, "input shape: expected a constant, got one computed from values"),
        (("Concat", ["x", "c"], ["y"], {"axis": 1}), 17, r"inputs: expected what the op takes, got \[1, 4, 6, 8\]"),
    ],
)
def test_messages_name_file_node_and_what_of_it(node, opset, says, tmp_path):
    """And speak of ONNX, not of PyTorch's ops."""
    op, inputs, outputs, attributes = node
    made = helper.make_node(op, inputs, outputs, "its_name", **attributes)
    graph = helper.make_graph(
        [made], "g", [helper.make_tensor_value_info("x", 1, [1, 4, 6, 8])],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(np.ones(4, np.float32), "c")],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    with pytest.raises(CaptureError, match=rf"^sbnet: {path}: node its_name \({op}\): .*{says}") as caught:
        reader.read_onnx(path, [torch.zeros(1, 4, 6, 8)])
    assert "ops of PyTorch" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_branch_of_a_known_condition_is_read(tmp_path):
    """As exporters write `if x.shape[0] == 1`."""
    branches = {}
    for name, op in (("then_branch", "Relu"), ("else_branch", "Neg")):
        out = [helper.make_tensor_value_info("b", 1, None)]
        branches[name] = helper.make_graph([helper.make_node(op, ["x"], ["b"])], name, [], out)
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Equal", ["n", "one"], ["is_one"]),
        helper.make_node("If", ["is_one"], ["y"], **branches),
    ]
    constants = {"zero": np.asarray(0), "one": np.asarray(1)}
    model = onnx_models.made(nodes, (1, 3, 6, 8), constants, ["y"], 17)
    onnx.save(model, tmp_path / "m.onnx")
    x = torch.randn(1, 3, 6, 8)
    assert torch.equal(OnnxNetwork(tmp_path / "m.onnx")(x), x.relu())
    assert torch.equal(OnnxNetwork(tmp_path / "m.onnx")(torch.cat([x, x])), -torch.cat([x, x]))
