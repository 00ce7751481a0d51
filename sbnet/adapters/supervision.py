"""supervision (pip install 'sbnet[supervision]'): its detections as masks, its callbacks on active slices only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import supervision as sv
import torch
from supervision.detection.tools.inference_slicer import move_detections
from torch import Tensor

from sbnet.adapters.slices import Rectangle, Slices, slices_of
from sbnet.masks import Boxes, open_mask
from sbnet.masks.base import Mask, resized


class Detected(Mask):
    """Where detections are: the pixels of their masks, or their boxes where they have none. `detections` may be set
    anew for every frame.

    >>> mask = Detected(tracker.update_with_detections(found)).dilate(16).hold(5)
    """

    def __init__(self, detections: sv.Detections | None = None) -> None:
        self.detections = sv.Detections.empty() if detections is None else detections

    def __call__(self, x: Tensor) -> Tensor:
        pixels = getattr(self.detections, "mask", None)
        if pixels is None:
            return Boxes(self.detections)(x)
        found = torch.from_numpy(np.asarray(pixels, bool).any(0, keepdims=True)).to(x.device)
        return resized(found, (int(x.shape[2]), int(x.shape[3]))).expand(x.shape[0], -1, -1)

    def reset(self) -> None:
        self.detections = sv.Detections.empty()


def detections_of(records: Sequence[dict[str, Any]]) -> sv.Detections:
    """The records of a `Result` that have a box, for supervision's annotators and trackers."""
    boxed = [record for record in records if "box" in record]
    if not boxed:
        return sv.Detections.empty()
    return sv.Detections(
        xyxy=np.array([record["box"] for record in boxed], np.float32),
        confidence=np.array([record.get("score", 1.0) for record in boxed], np.float32),
        class_id=np.array([record.get("class", 0) for record in boxed], int),
    )


class ActiveSlicer:
    """`sv.InferenceSlicer` on what matters: `slicer(picture)` calls the callback on the slices that hold active blocks,
    and gives the detections of all of them, moved to where they lie in the picture.

    Args:
        callback: a slice [h,w,C] -> sv.Detections in its pixels.
        mask: a Mask of `sbnet.masks`, or what names one. Masks with a memory need the pictures in order.
        slices: their sizes.
        iou_threshold: of two detections that overlap by more the worse one goes.

    >>> slicer = ActiveSlicer(lambda crop: sv.Detections.from_ultralytics(model(crop)[0]), "motion & zones.json")
    >>> detections = slicer(frame)
    """

    def __init__(
        self,
        callback: Callable[[np.ndarray], sv.Detections],
        mask: Any,
        slices: Slices | None = None,
        iou_threshold: float = 0.5,
    ) -> None:
        self.callback, self.mask, self.slices = callback, open_mask(mask), slices or Slices()
        self.iou_threshold = iou_threshold
        self.last: list[Rectangle] = []  # the slices of the last picture

    def __call__(self, image: np.ndarray) -> sv.Detections:
        self.last = slices_of(image, self.mask, self.slices)
        crops = ((r[:2], np.ascontiguousarray(image[r[1] : r[3], r[0] : r[2]])) for r in self.last)
        found = [moved(self.callback(crop), corner, image.shape[:2]) for corner, crop in crops]
        found = [detections for detections in found if len(detections)]
        if not found:
            return sv.Detections.empty()
        merged = sv.Detections.merge(found)
        return merged if merged.confidence is None else merged.with_nms(self.iou_threshold)


POINTS = ("xyxy", "keypoints", "key_points", "keypoint", "landmarks", "points")  # entries of `data` that are places


def moved(detections: sv.Detections, by: tuple[int, int], size: tuple[int, ...]) -> sv.Detections:
    """A copy of what was found in a slice at (x, y), moved to where it lies in the picture (height, width)."""
    found = move_detections(copy.deepcopy(detections), offset=np.array(by), resolution_wh=(size[1], size[0]))
    for name in set(POINTS) & set(found.data):
        if (places := np.asarray(found.data[name])).dtype.kind in "fiu" and places.ndim > 1:
            shifts = [*by, *by][: min(places.shape[-1], 4) // 2 * 2]  # a third number is how sure a point is
            found.data[name] = np.concatenate([places[..., : len(shifts)] + shifts, places[..., len(shifts) :]], -1)
    found.metadata = {}  # of a slice, not of the picture
    return found
