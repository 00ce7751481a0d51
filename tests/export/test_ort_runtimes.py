"""What the ONNX Runtime binding keeps by runtime, shapes of real networks, memory that moved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

import numpy as np
import onnxruntime
import torch

from sbnet import export
from sbnet.graph.passes.storage import store
from sbnet.models import resnet18
from support.ort_models import samples, session

SUPPORT = Path(__file__).parents[1] / "support"


def test_two_runtimes_in_one_process(tmp_path):
    """Python's module and the C library of the same wheel: each has its own api, allocators and domains."""
    if len(list(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))) != 1:
        pytest.skip("this onnxruntime comes without its C library")
    node = samples()["sparse_conv2d"]
    files = [tmp_path / name for name in ("model.onnx", "x.npy", "lists.npz")]
    files[0].write_bytes(node.model(dynamic=True))
    np.save(files[1], node.inputs[0].numpy())
    np.savez(files[2], **{f"x{k}": t.numpy() for k, t in enumerate(node.inputs) if k})
    result = subprocess.run(
        [sys.executable, str(SUPPORT / "two_runtimes.py"), *map(str, files)],
        capture_output=True, text=True, timeout=120, env=os.environ, check=False,
    )  # fmt: skip
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
    assert result.stdout.strip() == "both right"


def network_numbers(size: tuple[int, int]) -> tuple[list[int], list[int], list[int]]:
    """bsizes, sizes and fringes of mask_pyramid for a whole resnet18, as the exporter writes them."""
    run = resnet18(weights=0, classes=0).eval().capture(torch.zeros(1, 3, *size))
    planes = [(h, w, block[0]) for h, w, block in run.planes]
    fringes = store(run.plan).fringes
    numbers = []
    for plane, consumers in fringes:
        numbers += [plane, len(consumers)]
        for at, window in consumers:
            numbers += [at, *window.numbers()]
    return [b for *_, b in planes for b in (b, b)], [v for h, w, _ in planes for v in (h, w)], numbers


def test_shapes_of_a_whole_network_are_inferred():
    bsizes, sizes, fringes = network_numbers((224, 224))
    assert len(fringes) > 64  # more than a buffer of a fixed size held
    node = samples()["mask_pyramid"]
    node.inputs = [torch.rand(1, 224, 224) > 0.99]
    node.attributes |= {"bsizes": bsizes, "sizes": sizes, "fringes": fringes}
    outputs = 4 * len(bsizes) // 2 + 2 * (sum(1 for _ in fringe_heads(fringes)))
    node.outputs = lambda: [6] * outputs
    found = session(node.model()).get_outputs()
    assert len(found) == outputs
    got = node.run()
    infers = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 24)  # with optional inputs left out
    for value, t in zip(found, got, strict=True):
        assert tuple(value.shape) == (tuple(t.shape) if infers else ()), value.name


def fringe_heads(numbers: list[int]):
    at = 0
    while at < len(numbers):
        yield numbers[at]
        at += 2 + 11 * numbers[at + 1]


def test_bound_memory_that_moved_is_noticed():
    node = samples()["sparse_fill"]
    x, block_map = node.inputs
    y = torch.empty_like(x)
    call = export.Bound(session(node.model()), [x, block_map], [y])
    (got,) = call()
    want = got.clone()
    kept = x.data
    for tensor, other in ((x, x.clone()), (y, torch.empty_like(y))):
        before = tensor.data
        tensor.data = other
        with pytest.raises(RuntimeError, match="Bound: expected the memory that was bound"):
            call()
        tensor.data = before
    assert x.data_ptr() == kept.data_ptr()
    y.fill_(float("nan"))
    assert torch.equal(call()[0], want)
