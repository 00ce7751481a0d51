"""Empty is not absent: lists without rows, tensors without elements, batches without images, for every op."""

import pytest
import torch

from sbnet import BlockLayout, blocksparse_matmul, blocksparse_weight_grad
from sbnet.export import schemas
from support.helpers import assert_bitwise
from support.op_samples import op_samples
from support.ort_models import is_ort_error, samples, skip_without

OPS = torch.ops.sbnet
# A fringe of no pixels says as much as none; masks may be none, where mask_index names none; packs are the library's.
MAY_BE_EMPTY = ("fringe_pixels", "fringe_count", "masks", "packed", "x_indices")


def names_of(op: str) -> list[str]:
    return [argument.name for argument in getattr(OPS, op).default._schema.arguments]


def listing() -> list[str]:
    return [op for op in op_samples("cpu") if "indices" in names_of(op)]


def run(op: str, arguments: list) -> list[torch.Tensor]:
    """What an op returns and what it wrote, its arguments left as they were."""
    copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    made = getattr(OPS, op)(*copies)
    written = [copies[k] for k, a in enumerate(getattr(OPS, op).default._schema.arguments) if a.alias_info]
    written = [t for t in written if t is not None]
    return [*([made] if isinstance(made, torch.Tensor) else made or []), *written]


def emptied(names: list[str], arguments: list, capacity: int) -> list:
    """With a list of no blocks that has room for so many."""
    changed = dict(zip(names, arguments, strict=False))
    several = isinstance(changed["indices"], list)  # of several layers
    indices, counts = (changed[name] if several else [changed[name]] for name in ("indices", "count"))
    indices, counts = [t.new_full((capacity, 3), -1) for t in indices], [t.new_zeros(1) for t in counts]
    changed["indices"], changed["count"] = (indices, counts) if several else (indices[0], counts[0])
    if "block_map" in changed:
        changed["block_map"] = torch.full_like(changed["block_map"], -1)
    if "blocks" in changed:
        changed["blocks"] = changed["blocks"][:capacity]
    return list(changed.values())


@pytest.mark.parametrize("op", listing())
def test_a_list_without_rows_is_a_list_of_no_blocks(device, op):
    """It gives the bits of one that has rows and counts none of them."""
    names = names_of(op)
    for arguments in op_samples(device)[op]:
        for got, want in zip(*(run(op, emptied(names, arguments, n)) for n in (0, 4)), strict=True):
            assert_bitwise(got, want[: got.shape[0]] if op == "sparse_gather" else want, op)


def optional(op: str) -> list[str]:
    arguments = getattr(OPS, op).default._schema.arguments
    return [a.name for a in arguments if str(a.type) == "Optional[Tensor]" and a.name not in MAY_BE_EMPTY]


@pytest.mark.parametrize("op", [op for op in op_samples("cpu") if optional(op)])
def test_an_empty_tensor_is_not_a_missing_one(device, op):
    names, tried = names_of(op), 0
    for arguments in op_samples(device)[op]:
        for name in optional(op):
            at = names.index(name)
            if at >= len(arguments) or arguments[at] is None:
                continue
            changed = list(arguments)
            changed[at] = arguments[at].detach()[:0]
            with pytest.raises(RuntimeError, match=f"sbnet::{op}: .*expected"):
                run(op, changed)
            tried += 1
    assert tried


def test_a_residual_of_no_images_is_refused(device):
    x, weight, *rest = op_samples(device)["sparse_conv2d"][1]
    residual = torch.zeros(0, 6, 20, 27, device=device)
    with pytest.raises(RuntimeError, match=r"residual: shape: expected \[2,6,20,27\]"):
        OPS.sparse_conv2d(x, weight, None, residual, *rest[2:])


# ---- no images, no rows

OF_A_BATCH = (
    "x",
    "dy",
    "base",
    "residual",
    "block_map",
    "q",
    "k",
    "v",
    "a",
    "b",
    "c",
    "d",
    "q_lengths",
    "k_lengths",
    "grad",
    "x_map",
)


def without_images(op: str, arguments: list) -> dict:
    changed = dict(zip(names_of(op), arguments, strict=False))
    batch = changed["x"].shape[0] if "x" in changed else None
    for name, value in changed.items():
        if isinstance(value, torch.Tensor):
            cut = (name in OF_A_BATCH and batch in (None, value.shape[0])) or name in ("blocks", "indices", "x_indices")
            changed[name] = (value.detach()[:0] if cut else value.detach()).requires_grad_(value.requires_grad)
    return changed


def gradients_of(op: str) -> bool:
    takes = ("x" in names_of(op) or "q" in names_of(op)) and not op.endswith("_")
    return takes and any(
        isinstance(a, torch.Tensor) and a.requires_grad for arguments in op_samples("cpu")[op] for a in arguments
    )


@pytest.mark.parametrize("op", [op for op in op_samples("cpu") if gradients_of(op)])
def test_gradients_of_a_batch_without_images(device, op):
    """Zeros of every weight, and of x as many as it has. The sum's gradient is an expanded tensor."""
    for arguments in op_samples(device)[op]:
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            continue
        changed = without_images(op, arguments)
        rows = changed.get("rows")
        if rows is not None and rows.shape[0] > 1:
            continue  # a layout for each sequence
        made = getattr(OPS, op)(*changed.values())
        (made if isinstance(made, torch.Tensor) else made[0]).sum().backward()
        for name, t in changed.items():
            if isinstance(t, torch.Tensor) and t.requires_grad:
                assert t.grad is not None, name
                assert_bitwise(t.grad, torch.zeros_like(t), name)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64, 0), (64, 3, 0)])
def test_products_with_no_rows_have_gradients(device, shape):
    layout = BlockLayout(torch.ones(2, 3), 32)
    weight = torch.randn(layout.weight_shape, device=device, requires_grad=True)
    x = torch.randn(shape, device=device, requires_grad=True)
    axis = int(shape[-1] == 64)
    y = blocksparse_matmul(x, weight, layout, feature_axis=axis)
    y.sum().backward()
    assert_bitwise(x.grad, torch.zeros_like(x))
    assert_bitwise(weight.grad, torch.zeros_like(weight))
    grad = blocksparse_weight_grad([(x, y)], layout, feature_axis=axis)
    assert not bool(grad.any())


# ---- in ONNX Runtime

NODES = samples()


@pytest.fixture
def ort_device(device: str) -> str:
    skip_without(device)
    return device


def inputs_of(op: str) -> list[str]:
    return [name.rstrip("?") for name, _ in schemas.OPS[op].inputs]


@pytest.mark.parametrize("op", [op for op in NODES if "indices" in inputs_of(op)])
def test_a_list_without_rows_is_a_list_of_no_blocks_in_onnx_runtime(ort_device, op):
    node, results = samples(ort_device)[op], []
    given = node.inputs
    for capacity in (0, 4):
        node.inputs = emptied(inputs_of(op), given, capacity)
        results.append(node.run(ort_device))
    for got, want in zip(*results, strict=True):
        assert_bitwise(got, want[: got.shape[0]] if op == "sparse_gather" else want, op)


def given_optional(op: str) -> list[int]:
    """Places of a sample's inputs that may be left out."""
    names = [name for name, _ in schemas.OPS[op].inputs]
    given = [k for k, t in enumerate(NODES[op].inputs) if t is not None and names[k].endswith("?")]
    return [k for k in given if names[k].rstrip("?") not in MAY_BE_EMPTY]


@pytest.mark.parametrize("op", [op for op in NODES if given_optional(op)])
def test_an_empty_tensor_is_not_a_missing_one_in_onnx_runtime(ort_device, op):
    for at in given_optional(op):
        node = samples(ort_device)[op]
        node.inputs[at] = node.inputs[at][:0]
        with pytest.raises(Exception, match="expected") as raised:
            node.run(ort_device, dynamic=True)
        assert is_ort_error(raised.value)
