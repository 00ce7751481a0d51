"""Networks as other people write them, one tensor in: torchvision's, timm's, and a few by hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.benchmarks.harness.hybrid import Hybrid
from sbnet.benchmarks.harness.registry import Skip

_library: list[Any] = []


def torchvision() -> Any:
    """torchvision, also beside a PyTorch that it was not built for: two of its ops then need a name.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # torchvision::nms does not exist
        if _library:
            raise
    _library.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        _library[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


def build(name: str) -> nn.Module:
    """A network of NETWORKS with random weights, in eval mode. Its batch norms have the statistics of noise: untrained
    ones let some networks' outputs vanish in float16, and then every result is right.

    Raises:
        Skip: its package is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            net = NETWORKS[name]()
        except ImportError as error:
            raise Skip(str(error)) from None
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = 0.5  # half of the statistics: all of them would make chaos of some networks
        if any(isinstance(norm, nn.BatchNorm2d) for norm in net.modules()):
            with torch.no_grad():
                net.train()(torch.rand(1, 3, *[TOKENS[name]] * 2) if name in TOKENS else torch.rand(4, 3, 96, 96))
    return net.eval()


def _torchvision(name: str) -> nn.Module:
    return torchvision().models.get_model(name, weights=None)


def _segmentation(name: str) -> nn.Module:
    return First(torchvision().models.get_model(name, weights=None, weights_backbone=None))


def _fpn() -> nn.Module:
    torchvision()
    backbones = importlib.import_module("torchvision.models.detection.backbone_utils")
    return backbones.resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=nn.BatchNorm2d)


def _timm(name: str, **options: Any) -> nn.Module:
    torchvision()
    return importlib.import_module("timm").create_model(name, **options)


def _tokens(name: str, **options: Any) -> nn.Module:
    """Without a head, and of weights that leave no layer without an effect."""
    net = _timm(name, num_classes=0, global_pool="", **options)
    for p in net.parameters():
        if p.dim() <= 1 or not p.detach().any():
            nn.init.normal_(p, 1.0 if p.dim() <= 1 and p.detach().all() else 0.0, 0.05)
    return net


class First(nn.Module):
    """The first of a network's outputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return next(iter(self.net(x).values()))


class SRVGG(nn.Module):
    """Super-resolution by 4 with the layers and widths of Real-ESRGAN's network for animated video (Wang et al., 2021):
    16 convolutions of 64 channels and their PReLUs, PixelShuffle, the enlarged input added."""

    def __init__(self, width: int = 64, depth: int = 16, scale: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.PReLU(width)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width)]
        layers += [nn.Conv2d(width, 3 * scale * scale, 3, padding=1), nn.PixelShuffle(scale)]
        self.body, self.scale = nn.Sequential(*layers), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + F.interpolate(x, scale_factor=float(self.scale))


def conv(i: int, o: int, k: int = 3, s: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o), nn.SiLU(inplace=True))


class UNet(nn.Module):
    """Ronneberger et al., 2015, with padding and a width of 32: two 3x3 a level; up by transposed convolutions, or an
    interpolation and a 1x1."""

    def __init__(self, width: int = 32, levels: int = 4, up: str | None = None) -> None:
        super().__init__()
        sizes = [width << k for k in range(levels + 1)]
        self.down = nn.ModuleList(_pair(i, o) for i, o in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * c, c, 2, 2)
            if up is None
            else nn.Sequential(nn.Upsample(scale_factor=2, mode=up), nn.Conv2d(2 * c, c, 1))
            for c in sizes[-2::-1]
        )
        self.join = nn.ModuleList(_pair(2 * c, c) for c in sizes[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for k, stage in enumerate(self.down):
            x = stage(x if k == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


def _pair(i: int, o: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for c in (i, o):
        layers += [nn.Conv2d(c, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class C2f(nn.Module):
    """Half of the channels through bottlenecks, every intermediate result kept."""

    def __init__(self, i: int, o: int, n: int, shortcut: bool) -> None:
        super().__init__()
        self.first, self.last, self.shortcut = conv(i, o, 1), conv((2 + n) * o // 2, o, 1), shortcut
        self.blocks = nn.ModuleList(nn.Sequential(conv(o // 2, o // 2), conv(o // 2, o // 2)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.shortcut else y)
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """A detector with the layers and widths of YOLOv8, by default the smallest: C2f stages, pooling pyramid, a path up
    and one down, three heads for boxes and classes. Written for this benchmark."""

    def __init__(self, classes: int = 80, width: int = 16) -> None:
        super().__init__()
        c = tuple(width << k for k in range(5))
        wide = max(c[2], min(classes, 100))
        self.stem, self.one = conv(3, c[0], 3, 2), nn.Sequential(conv(c[0], c[1], 3, 2), C2f(c[1], c[1], 1, True))
        self.two = nn.Sequential(conv(c[1], c[2], 3, 2), C2f(c[2], c[2], 2, True))
        self.three = nn.Sequential(conv(c[2], c[3], 3, 2), C2f(c[3], c[3], 2, True))
        self.four = nn.Sequential(conv(c[3], c[4], 3, 2), C2f(c[4], c[4], 1, True))
        self.squeeze, self.spread, self.pool = conv(c[4], c[3], 1), conv(4 * c[3], c[4], 1), nn.MaxPool2d(5, 1, 2)
        self.up4, self.up3 = C2f(c[4] + c[3], c[3], 1, False), C2f(c[3] + c[2], c[2], 1, False)
        self.down3, self.mix4 = conv(c[2], c[2], 3, 2), C2f(c[2] + c[3], c[3], 1, False)
        self.down4, self.mix5 = conv(c[3], c[3], 3, 2), C2f(c[3] + c[4], c[4], 1, False)
        self.boxes, self.scores = nn.ModuleList(), nn.ModuleList()
        for i in c[2:]:
            self.boxes.append(nn.Sequential(conv(i, 64), conv(64, 64), nn.Conv2d(64, 64, 1)))
            self.scores.append(nn.Sequential(conv(i, wide), conv(wide, wide), nn.Conv2d(wide, classes, 1)))

    def forward(self, x: Tensor) -> Tensor:
        three = self.two(self.one(self.stem(x)))
        four = self.three(three)
        pools = [self.squeeze(self.four(four))]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        five = self.spread(torch.cat(pools, 1))
        mid = self.up4(torch.cat([F.interpolate(five, scale_factor=2.0), four], 1))
        p3 = self.up3(torch.cat([F.interpolate(mid, scale_factor=2.0), three], 1))
        p4 = self.mix4(torch.cat([self.down3(p3), mid], 1))
        p5 = self.mix5(torch.cat([self.down4(p4), five], 1))
        heads = zip((p3, p4, p5), self.boxes, self.scores, strict=True)
        return torch.cat([torch.cat([box(p), score(p)], 1).flatten(2) for p, box, score in heads], 2)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
    "vgg16_bn": lambda: _torchvision("vgg16_bn"),
    "fcn_resnet50": lambda: _segmentation("fcn_resnet50"),
    "U-Net": UNet,
    "U-Net, bilinear": lambda: UNet(up="bilinear"),
    "repvgg_a0": lambda: _timm("repvgg_a0"),
    "YOLOv8n-like": Yolo,
    "YOLOv8s-like": lambda: Yolo(width=32),
    "resnet50": lambda: _torchvision("resnet50"),
    "convnext_tiny": lambda: _torchvision("convnext_tiny"),
    "efficientnet_v2_s": lambda: _torchvision("efficientnet_v2_s"),
    "regnet_y_3_2gf": lambda: _torchvision("regnet_y_3_2gf"),
    "densenet121": lambda: _torchvision("densenet121"),
    "hrnet_w18": lambda: _timm("hrnet_w18"),
    "repvit_m1_1": lambda: _timm("repvit_m1_1"),
    "FPN-ResNet-50": _fpn,
    "deeplabv3_resnet50": lambda: _segmentation("deeplabv3_resnet50"),
    "mobilenet_v3_large": lambda: _torchvision("mobilenet_v3_large"),
    "SRVGG": SRVGG,
}
# Of tokens: name, and the side of its images.
TOKENS = {"ViT-B/16": 1024, "Swin-T": 1024, "SAM ViT-B": 1024, "PVTv2-B2": 1024, "RT-DETR encoder": 1024}
NETWORKS |= {
    "ViT-B/16": lambda: _tokens("vit_base_patch16_224", img_size=TOKENS["ViT-B/16"]),
    "SAM ViT-B": lambda: _tokens("samvit_base_patch16"),
    "Swin-T": lambda: _tokens("swin_tiny_patch4_window7_224", img_size=TOKENS["Swin-T"]),
    "PVTv2-B2": lambda: _tokens("pvt_v2_b2"),
    "RT-DETR encoder": lambda: Hybrid(_torchvision("resnet50"), TOKENS["RT-DETR encoder"]),
}
ON_CPU = "mobilenet_v2", "vgg16_bn", "fcn_resnet50", "U-Net", "repvgg_a0", "YOLOv8n-like"
ON_CUDA = "U-Net", "YOLOv8n-like", "FPN-ResNet-50", "mobilenet_v3_large", "SRVGG", "deeplabv3_resnet50"
WHOLE = "YOLOv8s-like", "mobilenet_v3_large", "convnext_tiny", "resnet50"  # of the group "networks"
# None is tuned for.
HELD_OUT = (
    "efficientnet_v2_s", "regnet_y_3_2gf", "densenet121", "hrnet_w18", "repvit_m1_1", "FPN-ResNet-50", "U-Net",
    "deeplabv3_resnet50",
)  # fmt: skip
