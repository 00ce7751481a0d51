"""Ready networks."""

from sbnet.models.contours import contour_net, paint_contours
from sbnet.models.resnet import SparseResNet, resnet18, resnet34, resnet50, sbnet_resnet

__all__ = [
    "SparseResNet",
    "contour_net",
    "paint_contours",
    "resnet18",
    "resnet34",
    "resnet50",
    "sbnet_resnet",
]
