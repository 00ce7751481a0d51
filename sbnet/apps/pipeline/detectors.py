"""torchvision's detectors in two parts: backbone and pyramid under masks, heads on all that is kept of them."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.apps.pipeline.boxes import Record, draw
from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.networks import Finished, Network, normalised

LEAST = 0.5  # score of what is reported


def is_detector(model: Any) -> bool:
    """Is it one of torchvision's detectors (Faster, Mask and Keypoint R-CNN, RetinaNet, FCOS, SSD)?"""
    ours = any(kind.__module__.startswith("torchvision.models.detection.") for kind in type(model).__mro__)
    return ours and all(hasattr(model, part) for part in ("transform", "backbone"))


def split_detector(model: nn.Module, least: float = LEAST) -> Network:
    """A Network of one of torchvision's detectors. Its heads branch on what they find, so no mask leads through them:
    the backbone with its pyramid runs under masks, in cached mode, and the heads run on whole feature maps, in float32.

    Frames are taken at their own size (`size=` scales them), the detector's own scaling is left out.

    Args:
        least: score of what is reported: "box", "class" (the detector's number of it), "score".

    >>> sbnet.Pipeline("street.mp4", network=split_detector(torchvision.models.detection.retinanet_resnet50_fpn()))
    """
    if not is_detector(model):
        raise PipelineError(f"network: expected a detector of torchvision, got {type(model).__name__}")
    heads = _Heads(model)
    transform: Any = model.transform

    def finish(features: Any, frame: Frame) -> Finished:
        found = heads(features, frame.size)
        kept = found["scores"] >= least
        boxes, classes, scores = (found[key][kept].cpu() for key in ("boxes", "labels", "scores"))
        records: list[Record] = [
            {"box": [round(v, 1) for v in box], "score": round(score, 4), "class": kind}
            for box, score, kind in zip(boxes.tolist(), scores.tolist(), classes.tolist(), strict=True)
        ]
        return lambda: draw(frame.picture(), records), records

    prepare = functools.partial(normalised, mean=tuple(transform.image_mean), deviation=tuple(transform.image_std))
    backbone: Any = model.backbone
    return Network(
        backbone, type(model).__name__, prepare=prepare, finish=finish, margin=32, multiple=32, mode="cached"
    )


class _Heads:
    """`heads(features, size)`: what a detector finds in the feature maps that its backbone made of a frame of this
    size, {"boxes" [n,4], "labels" [n], "scores" [n]}, best first. The detector itself computes it; in the place of its
    backbone stands what gives these features."""

    def __init__(self, model: nn.Module) -> None:
        self._given = _Given(model.transform)
        whole = copy.copy(model)
        whole._modules = {**model._modules, "backbone": nn.Identity(), "transform": nn.Identity()}
        self._model: Any = copy.deepcopy(whole).eval().float()
        self._model.backbone, self._model.transform = self._given.backbone, self._given

    @torch.no_grad()
    def __call__(self, features: Any, size: tuple[int, int]) -> dict[str, Tensor]:
        maps = pytree.tree_map_only(Tensor, lambda v: v.float().contiguous(), features)
        device = pytree.tree_leaves(maps)[0].device
        self._model.to(device)
        self._given.see(maps, size, device)
        return self._model([torch.empty(3, *size, device=device)])[0]


class _Given(nn.Module):
    """In the place of a detector's transform: the frame was normalised and widened before its backbone."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self._lists = importlib.import_module(type(transform).__module__).ImageList
        self.postprocess = copy.copy(transform).eval().postprocess
        self.backbone = _Features()
        self._images: Any = None

    def see(self, features: Any, size: tuple[int, int], device: torch.device) -> None:
        high, wide = (n + -n % 32 for n in size)
        self._images = self._lists(torch.empty(1, 3, 1, 1, device=device).expand(1, 3, high, wide), [size])
        self.backbone.features = features

    def forward(self, images: Any, targets: Any = None) -> Any:
        return self._images, targets


class _Features(nn.Module):
    features: Any = None

    def forward(self, _: Tensor) -> Any:
        return self.features
