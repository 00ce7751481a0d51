"""Ready networks."""

from sbnet.models.contours import contour_net, paint_contours
from sbnet.models.resnet import SparseResNet, resnet18, resnet34, resnet50, sbnet_resnet

# The residual networks by name, for command lines: each takes weights (a seed, a file) and options of SparseResNet.
RESNETS = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50, "sbnet": sbnet_resnet}

__all__ = [
    "RESNETS",
    "SparseResNet",
    "contour_net",
    "paint_contours",
    "resnet18",
    "resnet34",
    "resnet50",
    "sbnet_resnet",
]
