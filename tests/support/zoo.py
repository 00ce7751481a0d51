"""One network of every convolutional family of torchvision and timm, random weights: what `sparsify` is held to."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from sbnet.benchmarks.harness.nets import torchvision
from support.networks import lively

TORCHVISION = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "regnet_x_400mf", "regnet_y_400mf",
    "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "shufflenet_v2_x0_5", "squeezenet1_0",
    "squeezenet1_1", "vgg11", "vgg11_bn", "vgg16_bn",
)  # fmt: skip
SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
# Backbones with their pyramids; what follows them picks boxes, whose number depends on values.
DETECTION = (
    "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "fasterrcnn_mobilenet_v3_large_fpn",
    "retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large",
)  # fmt: skip
TIMM = (
    "convmixer_768_32", "convnext_atto", "convnext_atto_rms", "convnextv2_atto", "cspresnet50", "cspdarknet53",
    "cspnext_tiny", "densenet121", "dla34", "dpn48b", "efficientnet_lite0", "efficientnet_b0", "mixnet_s",
    "tf_efficientnet_b0", "tf_efficientnetv2_b0", "fbnetc_100", "spnasnet_100", "mobilenetv4_conv_small", "tinynet_e",
    "fasternet_t0", "focalnet_tiny_srf", "ghostnet_050", "ghostnetv2_100", "ghostnetv3_050", "hardcorenas_a",
    "hgnet_tiny", "hgnetv2_b0", "hrnet_w18_small", "inception_next_atto", "inception_resnet_v2", "inception_v3",
    "inception_v4", "lcnet_035", "lcnetv2_base", "mambaout_femto", "poolformer_s12", "poolformerv2_s12",
    "mobilenetv3_small_050", "nasnetalarge", "dm_nfnet_f0", "nf_resnet50", "pnasnet5large", "rdnet_tiny",
    "regnetx_002", "regnety_002", "regnetz_b16", "repghostnet_050", "res2net50_14w_8s", "resnest14d", "resnet10t",
    "resnet18d", "seresnet50", "ecaresnet50t", "resnetaa50", "resnetblur50", "resnetv2_50", "resnetv2_50x1_bit",
    "rexnet_100", "selecsls42", "legacy_seresnet18", "legacy_senet154", "skresnet18", "starnet_s1", "tresnet_m",
    "vgg11", "vovnet39a", "ese_vovnet19b_dw", "xception41", "legacy_xception", "xception65p", "repvgg_a0",
    "mobileone_s0", "gernet_s", "cs3darknet_s", "darknet53",
)  # fmt: skip
# With attention over the plane beside their convolutions.
HYBRID = ("repvit_m0_9", "edgenext_xx_small", "fastvit_t8", "mobilevit_xxs", "visformer_tiny", "nextvit_small")

NAMES = (
    *(f"torchvision {name}" for name in (*TORCHVISION, *SEGMENTATION, *DETECTION)),
    *(f"timm {name}" for name in (*TIMM, *HYBRID)),
)
# In the normal run: seconds each.
QUICK = (
    "torchvision resnet18", "torchvision mobilenet_v3_small", "torchvision shufflenet_v2_x0_5",
    "torchvision squeezenet1_1", "timm repvgg_a0", "timm convnext_atto",
)  # fmt: skip


def available() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torchvision", "timm"))


def build(name: str) -> nn.Module:
    """A network of NAMES in eval mode."""
    torch.manual_seed(0)
    house, model = name.split()
    vision = torchvision()
    if house == "timm":
        import timm

        net = timm.create_model(model)
        return net.eval() if model in HYBRID else lively(net)  # large numbers would make every softmax a maximum
    given: dict[str, Any] = {"weights": None}
    if model in (*SEGMENTATION, *DETECTION):
        given["weights_backbone"] = None
    if model in ("googlenet", "inception_v3"):
        given["init_weights"] = False
    net = vision.models.get_model(model, **given)
    return lively(net.backbone if model in DETECTION else net)


def example(name: str) -> torch.Tensor:
    """An input, large enough for all of a network's planes and no larger: [1,3,H,W]."""
    large = ("inception", "nasnet", "xception")
    side = 320 if "ssd" in name else 160 if any(word in name for word in large) else 64
    height, width = (224, 224) if "visformer" in name else (side, side + 32)
    return torch.randn(1, 3, height, width).contiguous(memory_format=torch.channels_last)
