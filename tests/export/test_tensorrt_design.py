"""docs/tensorrt.md is a design, of which nothing can be run here: its tables are held to the ops that there are."""

import re
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx

from sbnet.export import schemas
from support.ort_models import samples

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tensorrt.md"
if not PAGE.is_file():
    pytest.skip("no source tree", allow_module_level=True)
TEXT = PAGE.read_text()

SHORT = {
    "lists": ["indices i32", "count i32", "block_map i32"],
    "grid": ["bsize", "bstride", "boffset", "bcount"],
}
TYPES = {"tensor(int32)": "i32", "tensor(int64)": "i64", "tensor(float)": "f32", "tensor(bool)": "bool"}


def rows(heading: str) -> dict[str, list[str]]:
    """{op: cells} of the table whose first line begins so."""
    lines = TEXT[TEXT.index(heading) :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {row[0].strip("`"): row[1:] for row in cells}
    assert len(found) == len(cells)
    return found


SIGNATURES, WORK = rows("| op | inputs"), rows("| op | shapes")


def expanded(cell: str, own: str) -> list[str]:
    fringe = ["fringe_pixels? i32", "fringe_count? i32", f"base? {own}"]
    names = [name for name in cell.split(", ") if name]
    return [one for name in names for one in {**SHORT, "fringe": fringe}.get(name, [name])]


def row_of(name: str) -> tuple[str, str, str]:
    """Inputs, outputs and fields as the table says them, or as the page says of ops without a row."""
    own = [a for a in schemas.OPS[name].attributes if a not in (*SHORT["grid"], "zero_outside")]
    return SIGNATURES.get(name) or ("x T, lists, fringe", "y T", ", ".join(["grid", *own, "zero_outside"]))


def work_of(name: str) -> tuple[str, str, str, str]:
    """Shapes, parameters, workspace and launcher, likewise."""
    launcher = f"sbnet_{name}_cuda"
    params = re.search(rf"{launcher}\(const sbnet::(\w+)\*", HEADERS)
    return WORK.get(name) or ("`x,`", params[1], "none", launcher)


HEADERS = "".join(path.read_text() for path in (ROOT / "csrc" / "core").rglob("*.h"))
DECLARED = r"^SBNET_DECLARE(_WITH_WORKSPACE(?:_OF_DEVICE)?)?\((\w+), (\w+)\)"
for more, op, params in re.findall(DECLARED, HEADERS, re.M):
    p, scratch = f"const sbnet::{params}* p", "void* workspace, " if more else ""
    device = "_cuda" if more.endswith("_OF_DEVICE") else ""
    HEADERS += f"Status sbnet_{op}_cuda({p}, {scratch}void* stream); "
    HEADERS += f"int64_t sbnet_{op}_workspace_bytes{device}({p}); " if more else ""


def test_every_row_is_of_an_op():
    assert {*SIGNATURES, *WORK} <= set(schemas.OPS)


@pytest.mark.parametrize("name", schemas.OPS)
def test_inputs_outputs_and_fields_are_the_schemas(name):
    op, (inputs, outputs, fields) = schemas.OPS[name], row_of(name)
    own = op.outputs[0][1]
    for cell, wanted in ((inputs, op.inputs), (outputs, op.outputs)):
        assert expanded(cell, own) == [f"{argument} {TYPES.get(kind, kind)}" for argument, kind in wanted]
    assert sorted(expanded(fields, own)) == sorted(op.attributes)


@pytest.mark.parametrize("name", schemas.OPS)
def test_functions_are_those_that_onnx_runtime_is_served_by(name):
    _, params, workspace, launcher = work_of(name)
    binding = "".join(path.read_text() for path in (ROOT / "csrc" / "ort_binding").rglob("*.cpp"))
    assert re.search(rf"^struct {params}\b", HEADERS, re.M)
    assert f"Status validate(const {params}& p)" in HEADERS
    arguments = "const sbnet::" + params
    declared = re.search(rf"Status {launcher.strip('`')}\(([^)]*)\)", HEADERS)[1]
    assert declared.startswith(arguments)
    assert ("void* workspace" in declared) == (workspace != "none")
    for function in {launcher, workspace} - {"none"}:
        called = function.strip("`")
        kernels = f"SBNET_KERNELS({called.removeprefix('sbnet_').removesuffix('_cuda')})"
        plain = f"workspace = {called};"  # of plain_layers.h
        assert any(form in HEADERS + binding for form in (kernels, plain)) or re.search(rf"\b{called}\(&", binding)
    if workspace != "none":
        assert re.search(rf"int64_t {workspace.strip('`')}\({arguments}\* p\)", HEADERS)


def evaluated(name: str, given: dict) -> list[list[int]]:
    helpers: dict = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.S)[1], helpers)
    cell = work_of("sparse_conv2d" if "quantized" in name else name)[0]
    if name != "mask_pyramid":
        return [list(shape) for shape in eval(cell.strip("`"), helpers | given)]
    plane, fringe = re.findall(r"`([^`]*)`", cell)
    made, sizes, bsizes = [], given["sizes"], given["bsizes"]
    for k in range(0, len(sizes), 2):
        blocks = {"rows": -(-sizes[k] // bsizes[k]), "columns": -(-sizes[k + 1] // bsizes[k + 1])}
        made += eval(plane, helpers | given | blocks)
    made += eval(fringe, helpers | given | {"height": sizes[0], "width": sizes[1]})  # the sample has one fringe
    return made


LEFT_OUT = {"dilation": [1, 1], "padding": [0, 0], "output_padding": [0, 0], "pad": [0, 0, 0, 0], "size": []}
OTHERS = {
    "reduce_mask": [{"capacity": -1}],
    "fringe": [{"capacity": -1}],
    "sparse_gather": [{"transpose": 0}],
    "sparse_conv2d": [{"stride": [2, 1], "dilation": [1, 2]}, {"padding": [3, 0]}],
    "sparse_conv_transpose2d": [{"stride": [2, 3], "output_padding": [1, 2], "dilation": [1, 2]}],
    "sparse_max_pool2d": [{"stride": [2, 4], "ceil_mode": 1}, {"stride": [3, 2], "dilation": [2, 1]}],
    "sparse_avg_pool2d": [{"stride": [4, 2], "ceil_mode": 1}],
    "sparse_rearrange": [{"up": 1, "down": 2, "pad": [0, 1, 2, 3]}],
    "blocksparse_conv": [{"size": []}],
}


@pytest.mark.parametrize(
    ("name", "changed"), [(name, more) for name in schemas.OPS for more in ({}, *OTHERS.get(name, []))]
)
def test_shapes_are_those_that_are_inferred(name, changed):
    """Without `base` and `residual`, whose shapes would say it."""
    schemas.register()
    node, op = samples()[name], schemas.OPS[name]
    node.attributes.update(changed)
    names = [argument for argument, _ in op.inputs]
    for at, argument in enumerate(names):
        if argument in ("base?", "residual?"):
            node.inputs[at] = None
    given = {k: default for k, (_, default) in op.attributes.items() if isinstance(default, (int, float, str))}
    given |= {k: v for k, v in LEFT_OUT.items() if k in op.attributes} | node.attributes
    given |= {n.rstrip("?"): list(t.shape) for n, t in zip(names, node.inputs, strict=False) if t is not None}
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(node.model()), strict_mode=True).graph
    wanted = [[d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.output]
    assert evaluated(name, given) == wanted
