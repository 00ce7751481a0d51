"""Detectors as files hold them: what their outputs mean, by name. Boxes, labels and scores of frames.

On the device a decoder keeps the best candidates, a fixed number of them, and a GPU settles what overlaps: one small
copy comes to the host, behind the frame, and a CUDA graph holds it all. Where the GPU is not certain, the host settles
it (`sbnet.apps.pipeline.boxes.uncovered`).
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from sbnet.apps.pipeline.boxes import (
    MOST,
    Record,
    best_scores,
    drawing,
    of_images,
    stay,
    staying,
    uncovered,
    within,
)
from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.networks import Network, imagenet, one_of

OVERLAP = 0.7  # intersection over union from which on the worse of two boxes of a class goes; YOLO's default


def decoded(network: Network, decode: str) -> Network:
    """The network with a decoder for its outputs, "yolo", "detr", "rtdetr" or "classes", after a colon the least score
    of what is reported: "yolo:0.4". Results outside the mask are those of earlier frames (cached mode) unless the
    pipeline says otherwise.

    | decoder | outputs | frames |
    |---|---|---|
    | yolo | [1,4+K,A] centre, size and scores of each class; [1,A,5+K] with objectness before them; [1,A,6] corners, score and class, overlaps settled | 0 to 1 |
    | detr | logits [1,Q,K+1], the last of them for nothing, and boxes [1,Q,4], centre and size as shares of the frame | normalised as ImageNet |
    | rtdetr | logits [1,Q,K], a sigmoid each, and boxes [1,Q,4] | 0 to 1 |
    | classes | logits or probabilities [1,K] | as `prepare` has them |

    Labels are those of the entry `names` in an ONNX file's metadata, a Python or JSON dict or list, where it has one.

    Raises:
        PipelineError: there is no such decoder, or the network has a `finish` of its own.
    """  # noqa: E501
    name, _, rest = decode.partition(":")
    if name not in DECODERS:
        raise PipelineError(f"decode: expected one of {', '.join(DECODERS)}, got {decode!r}")
    try:
        least = float(rest) if rest else 0.25
    except ValueError:
        raise PipelineError(f"decode: expected a score after the colon, got {decode!r}") from None
    if not 0 <= least <= 1:
        raise PipelineError(f"decode: expected a score of 0 to 1, got {least:g}")
    if network.finish is not None or network.landing is not None:
        raise PipelineError(f"decode: expected a network without a decoder, {network.name} has its own")
    labels = names_of(network.model)
    if name == "classes":
        landing: Callable[[Any, tuple[int, int]], Any] = _vector
        finish_all = located = None
        finish: Any = partial(_top_class, labels, least)
    else:
        landing = partial(_landing, partial(_yolo, classes=len(labels)) if name == "yolo" else DECODERS[name], least)
        finish_all = partial(_boxes, labels, least, name == "yolo", network.notes)
        finish = one_of(finish_all)
        located = partial(_located, least, name == "yolo")
    prepare = network.prepare or (imagenet if name == "detr" else None)
    rest_of = {} if name == "classes" else {"margin": 32, "multiple": 32}
    return dataclasses.replace(
        network, landing=landing, located=located, finish=finish, finish_all=finish_all, prepare=prepare,
        mode="cached", **rest_of,  # type: ignore[arg-type]
    )  # fmt: skip


def names_of(model: Any) -> dict[int, str]:
    """Labels of classes out of an ONNX file's metadata; else none."""
    if not isinstance(model, (str, os.PathLike)) or Path(model).suffix.lower() != ".onnx":
        return {}
    import onnx

    found = {entry.key: entry.value for entry in onnx.load(str(model), load_external_data=False).metadata_props}
    try:
        names = ast.literal_eval(found.get("names", "{}"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise PipelineError(f"{model}: metadata names: expected a dict or a list of labels") from None
    pairs = names.items() if isinstance(names, dict) else enumerate(names) if isinstance(names, (list, tuple)) else ()
    return {int(k): str(v) for k, v in pairs if str(k).isdecimal()}


# ---- on the device: [7,candidates] of an output: centre, size, score, class, and whether overlaps are settled


def _landing(
    decode: Callable[[Any], Tensor], least: float, output: Any, size: tuple[int, int]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Candidates, and on a GPU what `uncovered` gives, where there are overlaps to settle."""
    found = decode(output)
    if not found.is_cuda or decode in (_detr, _rtdetr):
        return found, None, None
    valid = found[4] >= least
    return found, *uncovered(_apart(_corners(found), found[5], valid), valid, OVERLAP)


def _located(least: float, pixels: bool, landed: Any, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`Network.located`. pixels: as of `_boxes`."""
    found, kept, certain = landed
    corners = _corners(found)
    if not pixels:
        corners = torch.stack([v * (n + -n % 32) for v, n in zip(corners.unbind(1), size[::-1] * 2, strict=True)], 1)
    kept = None if kept is None else kept | (found[6, : len(kept)] > 0)
    return within(corners, size), staying(found[4] >= least, kept, certain)


def _corners(found: Tensor) -> Tensor:
    """[candidates,4]"""
    low, high = found[:2] - found[2:4] / 2, found[:2] + found[2:4] / 2
    return torch.cat([low, high]).t()


def _apart(corners: Tensor, kinds: Tensor, valid: Tensor) -> Tensor:
    """Corners of which each class has a place of its own: boxes of different classes do not compete."""
    most = corners.abs().masked_fill(~valid[:, None], 0).amax() if len(corners) else corners.new_zeros(())
    return corners + (kinds * (2 * most + 1))[:, None]


def _all_apart(corners: np.ndarray, kinds: np.ndarray) -> Tensor:
    """The same on the host, of boxes that all count."""
    return _apart(torch.from_numpy(corners), torch.from_numpy(kinds), torch.ones(len(kinds), dtype=torch.bool))


def _yolo(output: Any, classes: int = 0) -> Tensor:
    """classes: how many labels the file has, or 0. What stands behind boxes and scores (masks, key points, angles)
    would be taken for more of them: it is refused here by their number, and by `_boxes` where scores are none."""
    found = _tensors(output)
    found = [v for v in found if v.dim() == 3 and v.shape[0] == 1 and min(v.shape[1:]) >= 5]
    if not found:
        raise PipelineError(
            f"decode yolo: expected [1,4+classes,anchors] or [1,anchors,5+classes], got {_shapes(output)}"
        )
    y = found[0][0].float()
    if y.shape[1] == 6 and y.shape[0] <= 1000:  # corners, score, class: overlaps are settled
        corners = y.t()[:4]
        centre, size = (corners[:2] + corners[2:]) / 2, corners[2:] - corners[:2]
        return torch.cat([centre, size, y.t()[4:], torch.ones_like(y[None, :, 0])])
    found_classes = y.shape[0] - 4 if y.shape[0] < y.shape[1] else y.shape[1] - 5
    if classes and found_classes != classes:
        raise PipelineError(f"decode yolo: expected boxes and scores of {classes} classes, got {_shapes(output)}")
    if y.shape[0] < y.shape[1]:
        boxes, scores = y[:4], y[4:].t()
    else:
        boxes, scores = y[:, :4].t(), y[:, 5:] * y[:, 4:5]
    return _candidates(boxes, scores, False)


def _detr(output: Any) -> Tensor:
    logits, boxes = _queries(output, "detr")
    return _candidates(boxes.t(), logits.softmax(1)[:, :-1], True)


def _rtdetr(output: Any) -> Tensor:
    logits, boxes = _queries(output, "rtdetr")
    return _candidates(boxes.t(), logits.sigmoid(), True)


def _queries(output: Any, name: str) -> tuple[Tensor, Tensor]:
    found = [v for v in _tensors(output) if v.dim() == 3 and v.shape[0] == 1]
    fours = [v for v in found if v.shape[2] == 4]
    # Logits of four classes look like boxes; they come first.
    boxes = fours[len(fours) > 1 and fours[0] is found[0]] if fours else None
    logits = next((v for v in found if v is not boxes and boxes is not None and v.shape[1] == boxes.shape[1]), None)
    if boxes is None or logits is None:
        raise PipelineError(f"decode {name}: expected logits [1,Q,classes] and boxes [1,Q,4], got {_shapes(output)}")
    return logits[0].float(), boxes[0].float()


def _candidates(boxes: Tensor, scores: Tensor, settled: bool) -> Tensor:
    """[7,candidates] of boxes [4,n] and scores [n,classes]: of each box its best class, the best boxes first."""
    score, kind = scores.max(1)
    score, at = best_scores(score)
    return torch.cat([boxes[:, at], score[None], kind[None, at].float(), torch.full_like(score[None], settled)])


def _vector(output: Any, size: tuple[int, int]) -> Tensor:
    found = next((v for v in _tensors(output) if v.dim() == 2 and v.shape[0] == 1), None)
    if found is None:
        raise PipelineError(f"decode classes: expected [1,classes], got {_shapes(output)}")
    return found.float()


def _tensors(output: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor)]


def _shapes(output: Any) -> str:
    return ", ".join(str(list(v.shape)) for v in _tensors(output)) or "no tensor"


DECODERS: dict[str, Any] = {"yolo": _yolo, "detr": _detr, "rtdetr": _rtdetr, "classes": _vector}


# ---- on the host


def _boxes(
    labels: dict[int, str], least: float, pixels: bool, notes: list[str], landed: Any, frames: Sequence[Frame]
) -> list[tuple[Any, list[Record]]]:
    """Of each frame what draws the picture, and records. pixels: boxes are in pixels, not shares of what the network
    was given."""
    found, kept, certain = landed
    every = found.numpy()  # of small tensors NumPy is several times as fast
    counts = every[:, 4] >= least
    image, at = np.nonzero(counts)
    above = every[image, :, at]
    if (np.count_nonzero(counts, 1) == MOST).any():
        notes.append(f"a frame had {MOST} candidates or more: those of the lowest scores were left out")
    if not ((every[:, 4] <= 1.001).all() and (above[:, 5] == np.rint(above[:, 5])).all()):
        raise PipelineError("decode: expected scores of 0 to 1 and whole numbers of classes, got others: is it another "
                            "kind of output (key points, masks, scores before a sigmoid)?")  # fmt: skip
    sizes = np.array([frame.size[::-1] * 2 for frame in frames])[image]  # width and height, twice
    if not pixels:
        above = np.concatenate([above[:, :4] * (sizes + -sizes % 32).astype(np.float32), above[:, 4:]], 1)
    corners = np.concatenate([above[:, :2] - above[:, 2:4] / 2, above[:, :2] + above[:, 2:4] / 2], 1)
    if not above[:, 6].any():
        chosen = stay(counts, lambda own: _all_apart(corners[own], above[own, 5]), above[:, 4], OVERLAP, kept, certain)
        corners, above, image, sizes = corners[chosen], above[chosen], image[chosen], sizes[chosen]
    shown = np.minimum(corners.clip(0), sizes)
    found_of = zip(shown.astype(float).round(1).tolist(), above[:, 4].astype(float).round(4).tolist(),
                   above[:, 5].astype(int).tolist(), strict=True)  # fmt: skip
    records: list[Record] = [{"box": box, "score": score, "class": kind} for box, score, kind in found_of]
    for record in records if labels else ():
        if record["class"] in labels:
            record["label"] = labels[record["class"]]
    own = of_images(records, image, len(frames))
    return [(drawing(frame, those), those) for frame, those in zip(frames, own, strict=True)]


def _top_class(labels: dict[int, str], least: float, found: Tensor, frame: Frame) -> tuple[Any, list[Record]]:
    scores = found[0]
    shares = scores if bool((scores >= 0).all()) and abs(float(scores.sum()) - 1) < 1e-2 else scores.softmax(0)
    score, kind = shares.max(0)
    if float(score) < least:
        return None, []
    return None, [{**_named(int(kind), labels), "score": round(float(score), 6)}]


def _named(kind: int, labels: dict[int, str]) -> Record:
    label = labels.get(kind)
    return {"class": kind, **({} if label is None else {"label": label})}
