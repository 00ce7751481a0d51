"""Gradients of every op of active blocks: of lists without a block, of batches without an image, of a gradient that is
NaN where nothing is active. What they are is held against float64 beside each op's own tests."""

import pytest
import torch

from sbnet.ops.common import pixels_of
from support.helpers import assert_bitwise
from support.op_samples import sampled_ops, samples_of

OPS = torch.ops.sbnet
# Their results are no planes that are 0 outside of the blocks.
NO_PLANE = (
    "sparse_gather", "sparse_scatter", "sparse_adaptive_pool2d", "sparse_conv2d_weight_grad", "sparse_pool2d_grad",
    "sparse_resize2d_grad", "sparse_squeeze_excite2d",
)  # fmt: skip
# Of no blocks they give something all the same: their base, their biases.
NOT_NOTHING = "sparse_scatter", "sparse_squeeze_excite2d"


def names_of(op):
    return [argument.name for argument in getattr(OPS, op).default._schema.arguments]


def differentiable():
    """Ops of active blocks that return something and have a gradient."""
    found = []
    for op in sampled_ops():
        schema = getattr(OPS, op).default._schema
        writes = any(a.alias_info for a in schema.arguments)
        lists = {"block_map", "indices"} & set(names_of(op))
        has = torch._C._dispatch_has_kernel_for_dispatch_key(f"sbnet::{op}", "Autograd")
        if lists and not writes and has and op.startswith("sparse_"):
            found.append(op)
    return found


def leaves_of(op, arguments):
    """Arguments by name, and those whose gradient is wanted: all floats."""
    given = dict(zip(names_of(op), arguments, strict=False))
    wanted = {}
    for name, value in given.items():
        floats = isinstance(value, torch.Tensor) and value.is_floating_point() and name not in ("packed", "statistics")
        if floats:
            given[name] = wanted[name] = value.detach().clone().requires_grad_()
    return given, wanted


def gradients(op, given, wanted, upstream):
    y = getattr(OPS, op)(*given.values())
    y = y if isinstance(y, torch.Tensor) else y[0]
    if not y.requires_grad:
        pytest.fail(f"{op}: its result has no gradient")
    found = torch.autograd.grad(y, list(wanted.values()), upstream(y), allow_unused=True)
    return [t for t in found if t is not None]


@pytest.mark.parametrize("op", differentiable())
def test_of_no_blocks_they_are_zero(device, op):
    for arguments in samples_of(op, device):
        given, wanted = leaves_of(op, arguments)
        if "indices" in given:
            given["indices"], given["count"] = torch.full_like(given["indices"], -1), torch.zeros_like(given["count"])
        if "block_map" in given:
            given["block_map"] = torch.full_like(given["block_map"], -1)
        found = gradients(op, given, wanted, torch.ones_like)
        assert found
        assert all(torch.isfinite(t).all() for t in found), op
        if op not in NOT_NOTHING:
            assert not any(t.any() for t in found), op


@pytest.mark.parametrize("op", differentiable())
def test_of_no_images(device, op):
    tried = 0
    for arguments in samples_of(op, device):
        given, wanted = leaves_of(op, arguments)
        batch = given["x"].shape[0] if "x" in given else 2
        for name, value in given.items():
            of_images = isinstance(value, torch.Tensor) and value.dim() in (3, 4) and value.shape[0] == batch
            if of_images and name not in ("weight", "blocks", "indices", "x_indices"):
                given[name] = value.detach()[:0].requires_grad_(name in wanted)
                if name in wanted:
                    wanted[name] = given[name]
        for name in ("indices", "x_indices"):
            if given.get(name) is not None:
                given[name] = torch.full_like(given[name], -1)
        for name in ("count", "x_count"):
            if given.get(name) is not None:
                given[name] = torch.zeros_like(given[name])
        for t in gradients(op, given, wanted, torch.ones_like):
            assert not t.any(), op
        tried += 1
    assert tried


@pytest.mark.parametrize("op", [op for op in differentiable() if op not in NO_PLANE and "backward" not in op])
def test_what_is_not_active_is_of_no_account(device, op):
    for arguments in samples_of(op, device):
        given, wanted = leaves_of(op, arguments)
        if "block_map" not in given:
            continue

        def poisoned(y, value, given=given):
            inside = pixels_of(given["block_map"], given["grid"], y.shape[2:])
            generator = torch.Generator().manual_seed(0)
            return torch.where(inside, torch.randn(y.shape, generator=generator).to(y), value)

        clean, nan = (
            gradients(op, given, wanted, lambda y, value=value: poisoned(y, value)) for value in (0.0, torch.nan)
        )
        for a, b in zip(clean, nan, strict=True):
            assert torch.isfinite(a).all(), op
            assert_bitwise(a, b, op)
