"""Random models against ONNX Runtime: python tests/tools/fuzz_ort.py [models] [seed] [cpu or cuda].

Each model is a valid one-node model with a few changes: attributes dropped, absurd or of another type; inputs missing,
of other sizes, ranks and types; lists full of garbage. It must run or be refused by an ONNX Runtime error. Inputs and
outputs lie against pages that may not be touched, so that an access out of bounds ends the process (on CUDA:
compute-sanitizer does that). test_ort_sessions.py runs it in a process of its own.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from sbnet import BlockGrid, conv_transpose_output_size, export
from sbnet.export import schemas
from support.guard_pages import guarded
from support.helpers import random_active
from support.ort_models import Node, is_ort_error, lists, samples, session

INTS = [0, 1, -1, 2, 3, 7, 8, 64, -(1 << 31), (1 << 31) - 1, 1 << 33, 1 << 62, -(1 << 63)]
PAIRS = [[], [1], [0, 0], [1, 1], [2, 3], [4, 4], [5, 4], [-1, 4], [4, 0], [1, 1, 1], [1 << 31, 1], [999, 999]]
VALUES: list[Any] = [0.0, float("nan"), float("inf"), 1e-30, -3.5, "", "relu", "silu", "x" * 300, *INTS, *PAIRS]
NO_BFLOAT16 = ("are not bound by this ONNX Runtime", "bfloat16 outputs need")  # what `export.run` says of older ones
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]


def reshaped(rng: random.Random, t: Tensor) -> Tensor:
    """Another shape of the same dtype: one size changed, a dimension more or fewer."""
    shape = list(t.shape)
    kind = rng.randrange(4)
    if kind == 0 and shape:
        shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 3, 5, 8, 13])
    elif kind == 1:
        shape = shape[1:]
    elif kind == 2:
        shape.append(rng.choice([1, 2]))
    else:
        shape = [rng.choice([0, 1, 2, 4, 9]) for _ in shape]
    return torch.ones(shape).to(t.dtype) if t.is_floating_point() else torch.zeros(shape, dtype=t.dtype)


def garbage(rng: random.Random, t: Tensor) -> Tensor:
    """Indices, counts and maps that name no block."""
    if t.dtype != torch.int32:
        return t
    values = rng.choice([[-1, 0, 1, 2, 3], [1 << 30, -(1 << 31), (1 << 31) - 1, 4, 12], [0, 1, 2, 179, 180, 360]])
    return torch.tensor([rng.choice(values) for _ in range(t.numel())], dtype=torch.int32).view(t.shape)


def transposed(rng: random.Random) -> Node:
    """A transposed convolution of any geometry: output padding, kernels smaller than strides and dilations."""
    kernel, stride, dilation = ([rng.randint(1, 4), rng.randint(1, 4)] for _ in range(3))
    kernel = rng.choice([kernel, stride])
    more = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
    channels, filters, size = rng.choice([3, 8, 16, 20]), rng.choice([3, 16, 24]), (rng.randint(4, 9), 7)
    out = conv_transpose_output_size(size, kernel, stride, 0, more, dilation)
    active = random_active(BlockGrid.cover(out, 12), 1, 1.0)
    numbers = {"stride": stride, "padding": [0, 0], "output_padding": more, "dilation": dilation, "groups": 1}
    x, weight = torch.randn(1, *size, channels), torch.randn(channels, *kernel, filters)
    return Node("sparse_conv_transpose2d", [x, weight, *lists(active)], {"bsize": [12, 12], **numbers})


def changed(rng: random.Random) -> Node:
    if rng.random() < 0.05:
        return transposed(rng)
    node = rng.choice(list(samples().values()))
    floating = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    node.inputs = [
        t.to(floating) if t is not None and t.dtype == torch.float32 and node.op != "reduce_mask" else t
        for t in node.inputs
    ]
    # any subset of the optional inputs; the two of a fringe mostly together
    names = [name for name, _ in schemas.OPS[node.op].inputs]
    if "fringe_pixels?" in names:
        for k, name in enumerate(names):
            if name.endswith("?") and name != "fringe_count?" and rng.random() < 0.5:
                node.inputs[k] = None
        at = names.index("fringe_pixels?")
        if rng.random() < 0.9:
            node.inputs[at + 1] = None if node.inputs[at] is None else node.inputs[at + 1]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at = rng.randrange(len(node.inputs))
        t = node.inputs[at]
        name = rng.choice(list(node.attributes) or ["capacity"])
        match rng.randrange(10):
            case 0:
                node.attributes.pop(name, None)
                node.attributes.setdefault("capacity", 5)
            case 1 | 2:
                node.attributes[name] = rng.choice(VALUES)
            case 3:
                now = node.attributes.get(name)
                node.attributes[name] = rng.choice(PAIRS) if isinstance(now, list) else rng.choice(INTS)
            case 4 if t is not None:
                node.inputs[at] = reshaped(rng, t)
            case 5 if t is not None and rng.random() < 0.3:
                node.inputs[at] = t.to(rng.choice(DTYPES))
            case 6 if rng.random() < 0.3:
                node.inputs[at] = None
            case 7 if node.op in ("reduce_mask", "fringe"):
                node.dropped = rng.randrange(len(node.outputs()))
            case 8 | 9:
                node.inputs = [None if t is None else garbage(rng, t) for t in node.inputs]
    # A list of 2^29 rows is legal and takes gigabytes: not here.
    capacity = node.attributes.get("capacity")
    if isinstance(capacity, int) and 100_000 < capacity <= 1 << 31:
        node.attributes["capacity"] = 1 << 40
    while node.inputs and node.inputs[-1] is None:
        node.inputs.pop()
    return node


def attempt(rng: random.Random, node: Node, device: str) -> str | None:
    """None if the model ran, else the text of ONNX Runtime's error."""
    inputs = [t for t in node.inputs if t is not None]
    if device == "cpu":
        inputs = [guarded(t, rng.random() < 0.5) for t in inputs]
    try:
        s = session(node.model(dynamic=rng.random() < 0.5), device)
        made = export.run(s, inputs)
        if device == "cpu" and sum(t.numel() for t in made) < 1 << 22:
            export.run(s, inputs, [guarded(t, rng.random() < 0.5) for t in made])
    except Exception as e:
        if not is_ort_error(e) and not any(text in str(e) for text in NO_BFLOAT16):
            raise
        return str(e)
    return None


def main() -> None:
    models = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    unclear = set()
    for _ in range(models):
        node = changed(rng)
        if not any(t is not None for t in node.inputs):
            continue
        error = attempt(rng, node, device)
        counts["models"] += 1
        counts["ran" if error is None else "refused"] += 1
        clear = (node.op, "Type Error", "alloc", *NO_BFLOAT16)  # "alloc": an absurd output that no machine holds
        if error is not None and not any(text in error for text in clear):
            unclear.add(error)
    print(json.dumps({**counts, "unclear": sorted(unclear)}))


if __name__ == "__main__":
    main()
