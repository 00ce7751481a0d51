"""Random ONNX models, read and run here and by ONNX Runtime: python tests/tools/fuzz_onnx.py [models] [seed] [ops ...].

With names of ops, or "all", models of one op each; without, graphs of a few nodes. Prints a line for each result that
differs, and for each model that ONNX Runtime runs and that is refused here; then the counts as JSON. test_onnx_fuzz.py
holds the counts to what is promised.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import defs
from onnx.reference import ReferenceEvaluator

import sbnet
from support import onnx_models

ort.set_default_logger_severity(4)
OLDEST = 7


def newest() -> int:
    """The newest opset that both ONNX and ONNX Runtime know."""
    for opset in range(defs.onnx_opset_version(), OLDEST, -1):
        made = onnx_models.one_op(random.Random(0), "Relu", opset)
        if made is not None and theirs(made[0], made[1]) is not None:
            return opset
    raise RuntimeError("ONNX Runtime runs no opset that ONNX knows")


def theirs(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray] | None:
    """What ONNX Runtime gives, in the order and precision of the file; None where it does not run the model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {"x": x})
    except Exception as error:
        if "onnxruntime" not in type(error).__module__:
            raise
        return None


def ours(path: Path, x: np.ndarray) -> list[np.ndarray]:
    """What a run of `sparsify` gives at a full mask."""
    frame = torch.from_numpy(x)
    run = sbnet.sparsify(path, frame, block=4)
    found = run(frame, torch.ones(len(x), *x.shape[2:], dtype=torch.bool))
    return [v.numpy() for v in (found if isinstance(found, tuple) else (found,))]


def differs(got: list[np.ndarray], want: list[np.ndarray]) -> str:
    """How results differ beyond rounding; else nothing."""
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {k}: {a.dtype} {a.shape} for {b.dtype} {b.shape}"
        if a.dtype.kind != "f":
            if not a.size:
                continue
            off = np.abs(a.astype(np.float64) - b.astype(np.float64))
            if (off > 1).any() or (off > 0).mean() > 0.02:  # another side of a step, where rounding decides
                return f"output {k}: {(off > 0).mean():.1%} of integers differ, by up to {off.max():.0f}"
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        scale = max(float(np.sqrt(np.mean(np.square(np.where(np.isfinite(b), b, 0))))), 1e-6) if b.size else 1.0
        close = np.abs(a - b) <= 1e-4 * scale + 1e-3 * np.abs(b)
        if not (same | close).all():
            with np.errstate(invalid="ignore"):
                return f"output {k}: off by {np.nanmax(np.where(same, 0, np.abs(a - b))):.3g} of {scale:.3g}"
    return ""


def in_double(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray] | None:
    """What ONNX's reference evaluator gives in float64; None where it has no such form."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for value in wide.graph.initializer:
        if value.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(value).astype(np.float64)
            value.CopyFrom(onnx.numpy_helper.from_array(array, value.name))
    try:
        return ReferenceEvaluator(wide).run(None, {"x": x.astype(np.float64)})
    except Exception:  # whatever numpy says to a mixture of types
        return None


def rounding_decides(model: onnx.ModelProto, x: np.ndarray, got: list[np.ndarray], want: list[np.ndarray]) -> bool:
    """Whether results that differ are both what float32 gives: a normalisation of a plane of next to no variance and a
    remainder near a whole multiple enlarge the last bit. So it is where ONNX Runtime's own result moves half as far
    when x moves by a bit or four, or is further from the result in float64 than ours."""

    def off(a: list[np.ndarray], b: list[np.ndarray]) -> float:
        return max(float(np.abs(u.astype(np.float64) - v).max(initial=0)) for u, v in zip(a, b, strict=True))

    apart, rng = off(got, want), np.random.default_rng(0)
    for bits in (2.0**-24, 2.0**-23, 2.0**-22) * 4:
        moved = theirs(model, (x * (1 + bits * rng.choice([-1, 1], x.shape))).astype(x.dtype))
        if moved is not None and 2 * off(moved, want) >= apart:
            return True
    exact = in_double(model, x)
    return exact is not None and 2 * off(got, exact) <= off(want, exact)


def judged(model: onnx.ModelProto, x: np.ndarray, folder: Path) -> tuple[str, str]:
    """(equal, wrong, rounding, refused, or skipped where ONNX Runtime does not run it; why)."""
    want = theirs(model, x)
    if want is None:
        return "skipped", ""
    path = folder / "model.onnx"
    onnx.save(model, path)
    try:
        got = ours(path, x)
    except (ValueError, NotImplementedError) as error:
        return "refused", str(error).removeprefix(f"sbnet: {path}: ")
    except Exception as error:  # a crash is as bad as a wrong result
        return "wrong", f"{type(error).__name__}: {error}"
    wrong = differs(got, want)
    if not wrong:
        return "equal", ""
    same_kind = all(a.shape == b.shape and a.dtype == b.dtype == x.dtype for a, b in zip(got, want, strict=True))
    return "rounding" if same_kind and rounding_decides(model, x, got, want) else "wrong", wrong


def single_ops(models: int, seed: int, ops: list[str], report: Any = print) -> Counter[str]:
    """Counts over models of one op each, attributes and opsets drawn; ops in turn."""
    counts: Counter[str] = Counter()
    rng, latest = random.Random(seed), newest()
    with tempfile.TemporaryDirectory() as folder:
        at = 0
        while sum(counts[k] for k in ("equal", "wrong", "rounding", "refused")) < models:
            op, opset = ops[at % len(ops)], rng.randint(OLDEST, latest)
            at += 1
            made = onnx_models.one_op(rng, op, opset)
            if made is None:
                continue
            model, x, d = made
            verdict, why = judged(model, x, Path(folder))
            counts[verdict] += 1
            if verdict in ("wrong", "rounding", "refused"):
                constants = {k: v.tolist() if v.size < 9 else v.shape for k, v in d.constants.items()}
                report(f"{verdict}: {op} opset {opset} {d.attributes} {d.inputs} {constants} of {x.shape}: {why}")
    return counts


def graphs(models: int, seed: int, report: Any = print) -> Counter[str]:
    """Counts over graphs of a few nodes, opsets drawn."""
    counts: Counter[str] = Counter()
    rng, latest = random.Random(seed), newest()
    with tempfile.TemporaryDirectory() as folder:
        for at in range(models):
            chain = onnx_models.Chain(rng, rng.randint(OLDEST, latest), theirs)
            for _ in range(rng.randint(2, 8)):
                chain.grow()
            verdict, why = judged(chain.model(), chain.x, Path(folder))
            counts[verdict] += 1
            if verdict in ("wrong", "rounding", "refused"):
                ops = " ".join(f"{n.op_type}({','.join(n.input)})" for n in chain.nodes)
                report(f"{verdict}: seed {seed}, model {at}, opset {chain.opset}: {why}: {ops}")
    return counts


def main() -> None:
    models = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    ops = sys.argv[3:]
    counts = (
        graphs(models, seed) if not ops else single_ops(models, seed, onnx_models.names() if ops == ["all"] else ops)
    )
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
