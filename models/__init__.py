"""Ready networks."""

from sbnet.models.centerface import CenterFace, centerface
from sbnet.models.contours import contour_net, paint_contours
from sbnet.models.ncnn import read_ncnn
from sbnet.models.pyramids import FPN, BirdsEyeDetector, UNet
from sbnet.models.resnet import SparseResNet, resnet18, resnet34, resnet50, sbnet_resnet
from sbnet.models.upscale import SRVGG, UpConv7, srvgg, upconv7

# The residual networks by name, for command lines: each takes weights (a seed, a file) and options of SparseResNet.
RESNETS = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50, "sbnet": sbnet_resnet}

__all__ = [
    "FPN",
    "RESNETS",
    "SRVGG",
    "BirdsEyeDetector",
    "CenterFace",
    "SparseResNet",
    "UNet",
    "UpConv7",
    "centerface",
    "contour_net",
    "paint_contours",
    "read_ncnn",
    "resnet18",
    "resnet34",
    "resnet50",
    "sbnet_resnet",
    "srvgg",
    "upconv7",
]
