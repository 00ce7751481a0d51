"""SAHI (pip install 'sbnet[sahi]'): detection models that look at the active blocks of a picture only."""

from __future__ import annotations

from typing import Any

import numpy as np
from sahi.models.base import DetectionModel
from sahi.postprocess.combine import GreedyNMMPostprocess
from sahi.prediction import ObjectPrediction

from sbnet.adapters.slices import Rectangle, Slices, slices_of
from sbnet.masks import open_mask


class ActiveBlocks(DetectionModel):
    """Any detection model of SAHI's, called on the slices that hold active blocks in the place of all slices. What it
    finds in slices that overlap is merged as `get_sliced_prediction` does it.

    Args:
        model: a detection model of SAHI's.
        mask: a Mask of `sbnet.masks`, or what names one ("nodata:0", "zones.json"), called on the whole picture.
        slices: their sizes.

    >>> model = AutoDetectionModel.from_pretrained("ultralytics", "yolo11n.pt")
    >>> found = sahi.predict.get_prediction("field.png", ActiveBlocks(model, "nodata:0"))
    """

    def __init__(self, model: DetectionModel, mask: Any, slices: Slices | None = None) -> None:
        self.mask, self.slices = open_mask(mask), slices or Slices()
        self.last: list[Rectangle] = []  # the slices of the last picture
        super().__init__(
            model=model, device=str(model.device), mask_threshold=model.mask_threshold,
            confidence_threshold=model.confidence_threshold, category_mapping=model.category_mapping,
        )  # fmt: skip

    def set_model(self, model: Any, **_: Any) -> None:
        self.model = model

    def perform_inference(self, image: np.ndarray) -> None:
        self.last = slices_of(image, self.mask, self.slices)
        self.model.confidence_threshold = self.confidence_threshold  # get_prediction sets ours for one call
        found: list[ObjectPrediction] = []
        for x0, y0, x1, y1 in self.last:
            self.model.perform_inference(np.ascontiguousarray(image[y0:y1, x0:x1]))
            self.model.convert_original_predictions(shift_amount=[x0, y0], full_shape=list(image.shape[:2]))
            found += [one.get_shifted_object_prediction() for one in self.model.object_prediction_list]
        if len(self.last) > 1 and found:
            found = GreedyNMMPostprocess(match_threshold=0.5, match_metric="IOS")(found)
        self._original_predictions = found

    def _create_object_prediction_list_from_original_predictions(
        self, shift_amount_list: Any = None, full_shape_list: Any = None
    ) -> None:
        """Ours are of the whole picture; that may itself be a slice."""
        shift, full = _first(shift_amount_list) or [0, 0], _first(full_shape_list)
        self._object_prediction_list_per_image = [
            [
                ObjectPrediction(
                    bbox=one.bbox.to_xyxy(),
                    category_id=one.category.id,
                    category_name=one.category.name,
                    score=one.score.value,
                    segmentation=one.mask.segmentation if one.mask is not None else None,
                    shift_amount=shift,
                    full_shape=full,
                )
                for one in self._original_predictions
            ]
        ]


def _first(given: Any) -> Any:
    """Of a list of lists, one a picture, the first; SAHI passes one list as well."""
    return given[0] if given and isinstance(given[0], (list, tuple)) else given
