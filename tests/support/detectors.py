"""Small transformers with heads or parts that run dense: detectors' decoders, class tokens, scores that heads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sbnet.benchmarks.harness.nets import torchvision
from support.window_nets import hugging_face, small, stirred

WIDTHS = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4, "layer_type": "basic"}


def lively(net: nn.Module) -> nn.Module:
    """Random weights as large as training's, so that what a network returns depends on the frame."""
    torch.manual_seed(1)
    for name, p in net.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, 0.0, p[0].numel() ** -0.5 if len(p) > 1 else 0.5)
        else:
            nn.init.normal_(p, float(name.endswith(("weight", "gamma", "lambda1"))), 0.1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # many in a row
            nn.init.normal_(module.weight, 0.9, 0.1)
    return net.eval()


class Boxes(nn.Module):
    """A detector of the transformers library: what it says of classes and of boxes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> list[Tensor]:
        found = self.net(pixel_values=x)
        return [found.logits, found.pred_boxes]


class Encoder(nn.Module):
    """Backbone and hybrid encoder of RT-DETR."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> list[Tensor]:
        planes = self.net.backbone(x, torch.ones(len(x), *x.shape[2:], dtype=torch.bool))
        given = [project(t) for project, (t, _) in zip(self.net.encoder_input_proj, planes, strict=True)]
        return list(self.net.encoder(given).last_hidden_state)


def rt_detr(part: str, heads: int = 4) -> nn.Module:
    torchvision()
    import transformers

    backbone = transformers.RTDetrResNetConfig(**WIDTHS, out_features=["stage2", "stage3", "stage4"])
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[32, 48, 64],
        encoder_attention_heads=heads, encoder_ffn_dim=64, d_model=32, decoder_in_channels=[32] * 3,
        decoder_ffn_dim=64, num_queries=10, decoder_layers=2, decoder_attention_heads=4, eval_size=None,
        anchor_image_size=None,
    )  # fmt: skip
    torch.manual_seed(0)
    if part == "encoder":
        return stirred(Encoder(transformers.RTDetrModel(config)))
    return stirred(Boxes(transformers.RTDetrForObjectDetection(config)))


RF_DETR_WINDOWS = 2  # rows and columns of windows


class Maps(nn.Module):
    """A backbone of the transformers library: its feature maps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.net(pixel_values=x).feature_maps)


def rf_detr(part: str = "all") -> nn.Module:
    """DINOv2 in windows, each with a class token, between layers of all tokens; part: "backbone" or "all"."""
    torchvision()
    import transformers

    backbone = transformers.RfDetrDinov2Config(
        image_size=112, patch_size=14, hidden_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_windows=RF_DETR_WINDOWS, out_features=["stage2", "stage4"],
    )  # fmt: skip
    torch.manual_seed(0)
    if part == "backbone":
        return lively(Maps(transformers.AutoBackbone.from_config(backbone)))
    config = transformers.RfDetrConfig(
        backbone_config=backbone, d_model=32, decoder_ffn_dim=64, decoder_layers=2, decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4, num_queries=10, group_detr=1,
    )  # fmt: skip
    return lively(Boxes(transformers.RfDetrForObjectDetection(config)))


class WindowKeys(TorchFunctionMode):
    """Attention of RF-DETR's backbone sees class tokens and active patches alone; `keep`: of each window [N*windows,
    1+patches]. mask: [N,H,W]."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        active = F.max_pool2d(mask[:, None], 14)[:, 0] > 0
        parted = active.unflatten(2, (RF_DETR_WINDOWS, -1)).unflatten(1, (RF_DETR_WINDOWS, -1)).transpose(2, 3)
        self.keep = F.pad(parted.reshape(len(mask) * RF_DETR_WINDOWS**2, -1), (1, 0), value=True)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        each = self.keep.shape[1]
        if func is F.scaled_dot_product_attention and args[1].shape[-2] in (each, each * RF_DETR_WINDOWS**2):
            self.calls += 1
            return func(*args[:3], self.keep.view(len(args[1]), 1, 1, -1), scale=kwargs.get("scale"))
        return func(*args, **kwargs)


def detr() -> nn.Module:
    torchvision()
    import transformers

    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32, encoder_layers=2,
        backbone_config=transformers.ResNetConfig(**WIDTHS, out_features=["stage4"]), decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=10,
    )  # fmt: skip
    torch.manual_seed(0)
    return stirred(Boxes(transformers.DetrForObjectDetection(config)))


class Depth(nn.Module):
    """A depth estimator of the transformers library."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(pixel_values=x).predicted_depth


NECK = {"neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16}
TRUNK = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}


def depth_anything() -> nn.Module:
    """DINOv2, of which four layers' tokens become planes, and DPT's head."""
    torchvision()
    import transformers

    stages = [f"stage{k}" for k in range(1, 5)]
    backbone = transformers.Dinov2Config(
        image_size=98, patch_size=14, out_features=stages, reshape_hidden_states=False, apply_layernorm=True, **TRUNK
    )
    sizes = {"patch_size": 14, "reassemble_hidden_size": 32, "head_hidden_size": 8}
    torch.manual_seed(0)
    config = transformers.DepthAnythingConfig(backbone_config=backbone, **sizes, **NECK)
    return stirred(Depth(transformers.DepthAnythingForDepthEstimation(config)))


def dpt() -> nn.Module:
    """A ViT whose class token is joined to each of its pixels."""
    torchvision()
    import transformers

    config = transformers.DPTConfig(
        image_size=96, intermediate_size=64, backbone_out_indices=[0, 1, 2, 3], readout_type="project", **TRUNK, **NECK
    )
    torch.manual_seed(0)
    return stirred(Depth(transformers.DPTForDepthEstimation(config)))


CVT = {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3], "patch_sizes": [7, 3, 3]}
LEVIT = {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1] * 3, "key_dim": [8] * 3}
# Name: what makes it, the side of its images, and ops that run dense on whole planes or lists of queries.
NETS: dict[str, tuple[Callable[[], nn.Module], int, set[str]]] = {
    "RT-DETR's encoder": (lambda: rt_detr("encoder"), 128, set()),
    "RT-DETR": (lambda: rt_detr("all"), 128, {"grid_sampler", "topk", "scaled_dot_product_attention"}),
    "RF-DETR": (rf_detr, 112, {"grid_sampler", "topk", "scaled_dot_product_attention"}),
    "RF-DETR's backbone": (lambda: rf_detr("backbone"), 112, {"repeat"}),
    "DETR": (detr, 128, {"shown", "scaled_dot_product_attention"}),
    "CaiT": (lambda: small("cait_xxs24_224", img_size=96, depth=2), 96, {"hide", "softmax", "matmul"}),
    "XCiT": (lambda: small("xcit_nano_12_p16_224", img_size=96, depth=2), 96, {"linalg_vector_norm", "softmax"}),
    "Depth Anything": (depth_anything, 98, set()),
    "DPT": (dpt, 96, set()),
    "CvT": (lambda: hugging_face("Cvt", **CVT), 128, {"softmax", "matmul"}),
    "EfficientViT of cascades": (lambda: small("efficientvit_m0"), 128, {"hide", "softmax", "matmul"}),
    "MobileNetV4 with attention": (
        lambda: small("mobilenetv4_hybrid_medium"), 128, {"shown", "scaled_dot_product_attention"}
    ),
}  # fmt: skip


def levit(layers: str) -> nn.Module:
    """layers: of "levit" linear ones, of "levit_conv" the same as convolutions."""
    return small(f"{layers}_128s", img_size=128)
