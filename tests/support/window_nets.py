"""Transformers of windows and of pooled keys, and what they give of active pixels alone, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sbnet.benchmarks.harness.nets import torchvision
from sbnet.graph.oracle import PlaneMasks
from support.tokens import KeysInTurn, Output


def small(name: str, **options: Any) -> nn.Module:
    """One of timm's without a head, none of whose parameters is zero everywhere."""
    torchvision()
    import timm

    torch.manual_seed(0)
    return stirred(timm.create_model(name, num_classes=0, global_pool="", **options))


def hugging_face(kind: str, **options: Any) -> nn.Module:
    torchvision()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    return stirred(Output(getattr(transformers, f"{kind}Model")(config)))


def stirred(net: nn.Module) -> nn.Module:
    for p in net.parameters():
        if p.dim() <= 1 or not p.detach().any():
            nn.init.normal_(p, 0.3 if p.dim() <= 1 else 0.0, 0.1)
    return net.eval()


def swin_v2(window: int) -> nn.Module:
    """Cosines of queries and keys, times a number a head."""
    return small(
        "swinv2_tiny_window8_256", img_size=64, window_size=window, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
    )


def tiny_vit() -> nn.Module:
    """Its windows are padded before the norm, and its heads have q, k and v side by side."""
    return small(
        "tiny_vit_5m_224", embed_dims=(16, 32, 32, 64), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
        window_sizes=(4, 4, 4, 2),
    )  # fmt: skip


def nest() -> nn.Module:
    """Attention within blocks of pixels, to which positions are added."""
    torchvision()
    from timm.models.nest import Nest

    torch.manual_seed(0)
    options = {"embed_dims": (16, 32, 64), "num_heads": (1, 2, 4), "depths": (1, 1, 2)}
    return stirred(Nest(img_size=64, num_classes=0, global_pool="", **options))


class Layer(nn.Sequential):
    """A convolution, its norm and SiLU, as YOLO writes them."""

    def __init__(self, channels: int, filters: int, kernel: int = 1, groups: int = 1, act: bool = True) -> None:
        conv = nn.Conv2d(channels, filters, kernel, 1, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(filters), nn.SiLU() if act else nn.Identity())


class YoloAttention(nn.Module):
    """Heads with q, k and v side by side, v times the turned weights, and a depthwise layer on v: YOLO11's attention
    over all pixels; with `areas` YOLO12's within bands of rows."""

    def __init__(self, areas: int = 1) -> None:
        super().__init__()
        self.areas, self.heads, self.wide, self.deep = areas, 2, 8, 16
        self.stem, self.qkv = nn.Conv2d(3, 32, 3, 8, 1), Layer(32, 2 * (8 + 8 + 16), act=False)
        self.proj, self.position = Layer(32, 32, act=False), Layer(32, 32, 3, 32, act=False)
        self.mlp = nn.Sequential(Layer(32, 64), Layer(64, 32, act=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.attention(x)
        return x + self.mlp(x)

    def attention(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        each, sizes = self.wide * 2 + self.deep, [self.wide, self.wide, self.deep]
        if self.areas == 1:
            q, k, v = self.qkv(x).view(n, self.heads, each, h * w).split(sizes, 2)
        else:
            rows = self.qkv(x).flatten(2).transpose(1, 2).reshape(n * self.areas, h * w // self.areas, -1)
            q, k, v = rows.view(*rows.shape[:2], self.heads, each).permute(0, 2, 3, 1).split(sizes, 2)
        weights = (q.transpose(-2, -1) @ k * self.wide**-0.5).softmax(-1)
        y = v @ weights.transpose(-2, -1)
        if self.areas == 1:
            y, v = y.view(n, c, h, w), v.reshape(n, c, h, w)
        else:
            y, v = (t.permute(0, 3, 1, 2).reshape(n, h * w, c).reshape(n, h, w, c).permute(0, 3, 1, 2) for t in (y, v))
        return self.proj(y + self.position(v))


def yolo(areas: int) -> nn.Module:
    torch.manual_seed(0)
    return stirred(YoloAttention(areas))


SEGFORMER = {
    "hidden_sizes": [16, 32, 40, 64], "depths": [1] * 4, "num_attention_heads": [1, 2, 4, 4], "sr_ratios": [4, 2, 2, 1]
}  # fmt: skip


def masked_by(planes: PlaneMasks, t: Tensor) -> Tensor:
    """[N,H,W,C] or [N,C,H,W] (whichever has a mask of its size: here all are square): inactive pixels are 0."""
    last = t.shape[1] == t.shape[2]
    mask = planes((t.shape[1], t.shape[2]) if last else (t.shape[2], t.shape[3]))
    return torch.where(mask.permute(0, 2, 3, 1) if last else mask, t, 0)


def keys_of(planes: PlaneMasks, size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """[windows,rows] bool: pixels that are active, and all padding."""
    (h, w), (high, wide) = size, window
    keys = planes(size)[0, 0].roll((-shift[0], -shift[1]), (0, 1))
    keys = F.pad(keys, (0, -w % wide, 0, -h % high), value=True)
    rows, columns = keys.shape[0] // high, keys.shape[1] // wide
    return keys.view(rows, high, columns, wide).transpose(1, 2).flatten(2).flatten(0, 1)


def swin_v2_on(net: Any, x: Tensor, planes: PlaneMasks) -> Tensor:
    """Of one image: inactive pixels are no keys, and 0 after every layer."""

    def masked(t: Tensor) -> Tensor:
        return masked_by(planes, t)

    def attention(one: Any, t: Tensor) -> Tensor:
        (_, h, w, c), (high, wide), shift = t.shape, one.window_size, one.shift_size
        keys = keys_of(planes, (h, w), (high, wide), shift)
        t = F.pad(t.roll((-shift[0], -shift[1]), (1, 2)), (0, 0, 0, -w % wide, 0, -h % high))
        rows, columns = t.shape[1] // high, t.shape[2] // wide
        parts = t.view(rows, high, columns, wide, c).transpose(1, 2).reshape(rows * columns, high * wide, c)
        seen = torch.zeros(len(keys), keys.shape[1], keys.shape[1], dtype=t.dtype)
        seen = seen if one.attn_mask is None else one.attn_mask + seen
        seen = torch.where(keys[:, None] | ~keys.any(1)[:, None, None], seen, -torch.inf)
        made = one.attn(parts, mask=seen).view(rows, columns, high, wide, c).transpose(1, 2)
        made = made.reshape(1, rows * high, columns * wide, c)[:, :h, :w]
        return masked(made.roll(tuple(shift), (1, 2)))

    t = masked(net.patch_embed(x))
    for layer in net.layers:
        t = masked(layer.downsample(t))
        for one in layer.blocks:
            t = masked(t + one.norm1(attention(one, t)))
            t = masked(t + one.norm2(one.mlp(t)))
    return masked(net.norm(t))


def tiny_vit_on(net: Any, x: Tensor, planes: PlaneMasks) -> Tensor:
    """Of one image, as above."""

    def masked(t: Tensor) -> Tensor:
        return masked_by(planes, t)

    def layers(t: Tensor, *modules: Any) -> Tensor:
        for module in modules:
            t = masked(module.bn(masked(module.conv(t)))) if hasattr(module, "bn") else masked(module(t))
        return t

    def block(one: Any, t: Tensor) -> Tensor:  # [1,H,W,C]
        (_, h, w, c), size = t.shape, one.window_size
        rows, columns = -(-h // size), -(-w // size)
        parts = F.pad(t, (0, 0, 0, -w % size, 0, -h % size)).view(rows, size, columns, size, c).transpose(1, 2)
        keys = keys_of(planes, (h, w), (size, size), (0, 0))
        with KeysInTurn([keys | ~keys.any(1, keepdim=True)]):
            made = one.attn(parts.reshape(rows * columns, size * size, c))
        made = made.view(rows, columns, size, size, c).transpose(1, 2).reshape(1, rows * size, columns * size, c)
        t = masked(t + masked(made[:, :h, :w]))
        t = layers(t.permute(0, 3, 1, 2), one.local_conv).permute(0, 2, 3, 1)
        return masked(t + one.mlp(t))

    embed = net.patch_embed
    t = layers(x, embed.conv1, embed.act, embed.conv2)
    for stage in net.stages:
        if hasattr(stage, "downsample"):
            down = stage.downsample
            t = layers(t, down.conv1, down.act1, down.conv2, down.act2, down.conv3)
        for one in stage.blocks:
            if hasattr(one, "attn"):
                t = block(one, t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            else:
                made = layers(t, one.conv1, one.act1, one.conv2, one.act2, one.conv3)
                t = masked(one.act3(masked(made + t)))
    return masked(net.head(t))


def hiera() -> nn.Module:
    """Queries are maxima of four pixels, in windows whose pixels are listed one window after another."""
    return small("hiera_tiny_224", img_size=(128, 128), embed_dim=32, stages=(1, 2, 1, 1))


def hiera_on(net: Any, x: Tensor, units: Tensor) -> Tensor:
    """Of one image, of some of its units of 32x32 pixels [rows of them]: its own way of leaving out the others."""
    with torch.no_grad():
        return net.forward_head(net.forward_features(x, mask=units[None]))[0]


def sam2() -> nn.Module:
    """Queries are maxima of four pixels, in padded windows."""
    torchvision()
    import transformers

    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=32, num_attention_heads=1, image_size=[128, 128], blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[32, 64, 96, 128], num_attention_heads_per_stage=[1, 2, 2, 4],
        window_size_per_stage=[4, 4, 6, 2], global_attention_blocks=[3],
    )  # fmt: skip
    return hugging_face(
        "Sam2Vision", backbone_config=backbone, backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
        backbone_channel_list=[128, 96, 64, 32], fpn_hidden_size=32,
    )  # fmt: skip


class _Sam2Keys(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            assert self.keys is not None
            seen = self.keys | ~self.keys.any(1, keepdim=True)
            return func(*args[:3], attn_mask=seen[:, None, None], scale=kwargs.get("scale"))
        return func(*args, **kwargs)


def sam2_on(net: Any, x: Tensor, planes: PlaneMasks) -> Tensor:
    """Of one image: what its layers give is masked before others than the same pixel read it."""
    mode, hooks = _Sam2Keys(), []

    def plane(_module: Any, _args: Any, out: Tensor) -> Tensor:  # [1,H,W,C]
        return masked_by(planes, out)

    def windows(block: Any) -> Callable[..., Any]:
        def hook(module: Any, args: Any, out: Tensor) -> Tensor:  # [windows,high,wide,3C]
            mode.keys = keys_of(planes, block.size, tuple(out.shape[1:3]), (0, 0))
            return torch.where(mode.keys.view(*out.shape[:3], 1), out, 0)

        return hook

    def enter(block: Any) -> Callable[..., Any]:
        def hook(module: Any, args: Any) -> Any:
            block.size = tuple(args[0].shape[1:3])
            return (masked_by(planes, args[0]), *args[1:])

        return hook

    for block in net.net.backbone.blocks:
        hooks += [block.register_forward_pre_hook(enter(block)), block.attn.qkv.register_forward_hook(windows(block))]
        if hasattr(block, "proj"):
            hooks.append(block.proj.register_forward_hook(plane))
    try:
        with torch.no_grad(), mode:
            return masked_by(planes, net(x))
    finally:
        for hook in hooks:
            hook.remove()


NETS: dict[str, Callable[[], nn.Module]] = {
    "Swin v2": lambda: swin_v2(4),
    "Swin v2, padded": lambda: swin_v2(5),
    "TinyViT": tiny_vit,
    "PVT v2": lambda: small("pvt_v2_b0", embed_dims=(16, 32, 40, 64), depths=(1, 1, 1, 1)),
    "PVT v2, linear": lambda: small("pvt_v2_b2_li", depths=(1, 1, 1, 1)),
    "SegFormer": lambda: hugging_face("Segformer", **SEGFORMER),
    "GLPN": lambda: hugging_face("GLPN", **SEGFORMER),
    "MaxViT": lambda: small("maxvit_nano_rw_256", img_size=64),
    "SAM2": sam2,
    "YOLO11": lambda: yolo(1),
    "YOLO12": lambda: yolo(4),
    "CoAtNet": lambda: small("coatnet_nano_rw_224", img_size=64),
    "Twins": lambda: small(
        "twins_svt_small", img_size=64, embed_dims=(16, 32, 32, 64), num_heads=(1, 2, 2, 4), depths=(2, 2, 2, 2),
        wss=(4, 4, 2, 2),
    ),
    "Twins, pooled keys": lambda: small(
        "twins_pcpvt_small", img_size=64, embed_dims=(16, 32, 32, 64), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1)
    ),
}  # fmt: skip
SIDES = {"TinyViT": 96, "SAM2": 128}  # of others 64
BY_HAND = {"Swin v2": swin_v2_on, "Swin v2, padded": swin_v2_on, "TinyViT": tiny_vit_on, "SAM2": sam2_on}
