"""Transformers on the active tokens of an image, in plain PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sbnet.benchmarks.harness.nets import torchvision


def available() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torchvision", "timm", "transformers"))


def masks(side: int) -> torch.Tensor:
    """Two images, of unlike numbers of tokens."""
    mask = torch.zeros(2, side, side)
    mask[0, 10:40, 20:60] = 1
    mask[1, 50:60, 3:9] = 1
    return mask


def assert_every_form_gives_the_same(net: nn.Module, side: int, folder: Path) -> None:
    """A run, its functional module and ONNX Runtime of what it exports, under masks of two images."""
    import sbnet
    from sbnet.export import session

    x = torch.randn(2, 3, side, side)
    run = sbnet.sparsify(net, x, block=4)
    run.export(folder / "net.onnx")
    exported, module = session(folder / "net.onnx"), run.as_module()
    for mask in (masks(side), torch.ones(2, side, side)):
        want = run(x, mask, copy=True)
        assert torch.allclose(module(x, mask), want, atol=1e-4, rtol=1e-4)
        got = exported.run(None, {"x": x.numpy(), "mask": (mask > 0).numpy()})[0]
        assert torch.allclose(torch.from_numpy(got), want, atol=1e-4, rtol=1e-4)


def kept(mask: Tensor, patch: int, prefix: int, suffix: int = 0) -> Tensor:
    """[N,tokens] bool: those whose patch the mask touches, and all that stand for no patch."""
    tokens = F.max_pool2d(mask[:, None].float(), patch).flatten(1) > 0
    return F.pad(tokens, (prefix, suffix), value=True)


class ActiveKeys(TorchFunctionMode):
    """Attention over all tokens sees those that are kept: what a kept token gets is what it gets of them alone."""

    def __init__(self, keep: Tensor) -> None:
        super().__init__()
        self.keep, self.calls = keep, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and args[1].shape[-2] == self.keep.shape[1]:
            self.calls += 1
            seen = self.keep[:, None, None, :]
            bias = args[3] if len(args) > 3 else kwargs.pop("attn_mask", None)
            if bias is not None and bias.dtype != torch.bool:
                seen = torch.where(seen, bias.expand(len(seen), -1, -1, -1), -torch.inf)
            return func(*args[:3], seen, scale=kwargs.get("scale"))
        return func(*args, **kwargs)


def on_kept(net: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """What a network of whole-image attention gives, of [N,tokens,C] those that are kept."""
    with torch.no_grad(), ActiveKeys(keep) as mode:
        y = net(x)
    assert mode.calls
    return torch.where(keep[:, :, None], y, 0) if y.dim() == 3 and y.shape[1] == keep.shape[1] else y


def alone(net: Any, x: Tensor, keep: Tensor) -> Tensor:
    """timm's VisionTransformer, image by image, run on the tokens that are kept and on no other."""
    found = []
    with torch.no_grad():
        for image, tokens in zip(x.split(1), keep, strict=True):
            t = net.norm_pre(net._pos_embed(net.patch_embed(image))[:, tokens])
            for block in net.blocks:
                t = block(t)
            found.append(net.forward_head(net.norm(t)))
    return torch.cat(found)


class Output(nn.Module):
    """A network of the transformers library, of which one tensor is taken."""

    def __init__(self, net: nn.Module, name: str = "last_hidden_state") -> None:
        super().__init__()
        self.net, self.name = net, name

    def forward(self, x: Tensor) -> Tensor:
        return self.net(pixel_values=x)[self.name]


def timm_net(name: str, side: int, **options: Any) -> nn.Module:
    """One of timm's with random weights; without a head by default: all tokens."""
    torchvision()
    import timm

    torch.manual_seed(0)
    options = {"num_classes": 0, "global_pool": "", "depth": 2, **options}
    options = {name: value for name, value in options.items() if value is not None}
    return timm.create_model(name, img_size=side, **options).eval()


SMALL = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "patch_size": 16,
}  # fmt: skip


def hugging_face(kind: str, **options: Any) -> nn.Module:
    """A small one of the transformers library with random weights."""
    torchvision()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, "image_size": 96, **options})
    pooled = "add_pooling_layer" in getattr(transformers, f"{kind}Model").__init__.__code__.co_varnames
    net = getattr(transformers, f"{kind}Model")(config, **({"add_pooling_layer": False} if pooled else {}))
    return Output(net).eval()


# Name: what makes it, side of its images, patch, prefix and suffix rows.
Family = tuple[Callable[[], nn.Module], int, int, int, int]
FAMILIES: dict[str, Family] = {
    "ViT": (lambda: timm_net("vit_tiny_patch16_224", 96), 96, 16, 1, 0),
    "ViT without a class token": (lambda: timm_net("vit_base_patch16_siglip_224", 96), 96, 16, 0, 0),
    "DeiT, distilled": (lambda: timm_net("deit_tiny_distilled_patch16_224", 96, global_pool="token"), 96, 16, 2, 0),
    "DeiT3, layer scale": (lambda: timm_net("deit3_small_patch16_224", 96), 96, 16, 1, 0),
    "DINOv2, registers": (lambda: timm_net("vit_small_patch14_reg4_dinov2", 98), 98, 14, 5, 0),
    "DINOv3, rotary": (lambda: timm_net("vit_small_patch16_dinov3", 96), 96, 16, 5, 0),
    "BEiT, relative positions": (lambda: timm_net("beit_base_patch16_224", 96, depth=1), 96, 16, 1, 0),
    "EVA02, rotary, SwiGLU": (lambda: timm_net("eva02_tiny_patch14_224", 98), 98, 14, 1, 0),
    "Perception encoder": (lambda: timm_net("vit_pe_core_tiny_patch16_384", 96), 96, 16, 1, 0),
    "AIMv2, RMSNorm": (lambda: timm_net("aimv2_large_patch14_224", 98, depth=1), 98, 14, 0, 0),
    "transformers ViT": (lambda: hugging_face("ViT"), 96, 16, 1, 0),
    "transformers DINOv2": (lambda: hugging_face("Dinov2"), 96, 16, 1, 0),
    "transformers DINOv2, registers": (lambda: hugging_face("Dinov2WithRegisters"), 96, 16, 5, 0),
    "transformers DINOv3": (lambda: hugging_face("DINOv3ViT", num_register_tokens=4), 96, 16, 5, 0),
    "transformers I-JEPA": (lambda: hugging_face("IJepa"), 96, 16, 0, 0),
    "transformers CLIP": (lambda: hugging_face("CLIPVision"), 96, 16, 1, 0),
    "transformers SigLIP": (lambda: hugging_face("SiglipVision"), 96, 16, 0, 0),
    "transformers YOLOS": (
        lambda: hugging_face("Yolos", image_size=[96, 96], num_detection_tokens=5), 96, 16, 1, 5
    ),
}  # fmt: skip


def swin(side: int, window: int, channels: int = 24) -> nn.Module:
    """A small one of timm's Swin transformers, all of whose pixels are returned."""
    return timm_net(
        "swin_tiny_patch4_window7_224", side, window_size=window, depths=(2, 2), num_heads=(2, 4),
        embed_dim=channels, depth=None,
    )  # fmt: skip


def swin_on(net: Any, x: Tensor, mask: Tensor, block: Any = 1) -> Tensor:
    """timm's Swin transformer, image by image: inactive pixels are no keys, and 0 after every layer."""
    from timm.models.swin_transformer import window_partition, window_reverse

    from sbnet.graph.oracle import PlaneMasks

    found = []
    for n in range(len(x)):
        planes = PlaneMasks(mask[n : n + 1], block)

        def masked(t: Tensor, planes: PlaneMasks = planes) -> Tensor:
            return torch.where(planes((t.shape[1], t.shape[2])).permute(0, 2, 3, 1), t, 0)

        def attention(block: Any, t: Tensor, planes: PlaneMasks = planes) -> Tensor:
            (_, h, w, _c), (high, wide), shift = t.shape, block.window_size, block.shift_size
            pads = (0, -w % wide, 0, -h % high)
            keys = planes((h, w))[0].roll((-shift[0], -shift[1]), (1, 2))
            keys = window_partition(F.pad(keys, pads, value=True)[..., None], block.window_size).flatten(1)
            t = F.pad(t.roll((-shift[0], -shift[1]), (1, 2)), (0, 0, *pads))
            windows = window_partition(t, block.window_size).flatten(1, 2)
            seen = torch.zeros(len(keys), keys.shape[1], keys.shape[1], dtype=t.dtype)
            seen = (seen if block.attn_mask is None else block.attn_mask + seen).masked_fill(~keys[:, None], -torch.inf)
            made = block.attn(windows, mask=seen).unflatten(1, block.window_size)
            made = window_reverse(made, block.window_size, t.shape[1], t.shape[2])[:, :h, :w]
            return masked(made.roll(tuple(shift), (1, 2)))

        with torch.no_grad():
            t = masked(net.patch_embed(x[n : n + 1]))
            for layer in net.layers:
                t = masked(layer.downsample(t))
                for one in layer.blocks:
                    t = masked(t + attention(one, masked(one.norm1(t))))
                    t = masked(t + one.mlp(one.norm2(t)))
            found.append(masked(net.norm(t)))
    return torch.cat(found)


def sam(side: int, **options: Any) -> nn.Module:
    """A small one of timm's SAM encoders: a block of windows and one of all tokens."""
    return timm_net(
        "samvit_base_patch16", side, embed_dim=48, num_heads=3, window_size=3, global_attn_indexes=(1,), neck_chans=16,
        **options,
    )  # fmt: skip


class KeysInTurn(TorchFunctionMode):
    """Attention calls see, one after another, the keys of a list of [windows,tokens] bool."""

    def __init__(self, keys: list[Tensor]) -> None:
        super().__init__()
        self.keys = keys

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            keys, bias = self.keys.pop(0), kwargs.pop("attn_mask")
            if bias.dim() < args[0].dim():
                bias = bias[None]
            keys = keys.repeat_interleave(len(bias) // len(keys), 0) if bias.dim() == 3 else keys[:, None]
            return func(*args, attn_mask=torch.where(keys[..., None, :], bias, -torch.inf), **kwargs)
        return func(*args, **kwargs)


def sam_on(net: Any, x: Tensor, mask: Tensor, block: Any = 1) -> Tensor:
    """timm's SAM encoder, image by image: inactive pixels are no keys, and 0 after every layer."""
    from timm.models.vision_transformer_sam import window_partition

    from sbnet.graph.oracle import PlaneMasks

    found = []
    for n in range(len(x)):
        planes = PlaneMasks(mask[n : n + 1], block)
        with torch.no_grad():
            t = net.patch_embed(x[n : n + 1]) + net.pos_embed
            active = planes((t.shape[1], t.shape[2]))
            keys = []
            for one in net.blocks:
                size = one.window_size
                pads = (0, -t.shape[2] % size, 0, -t.shape[1] % size) if size else (0, 0)
                seen = F.pad(active[0], pads, value=True)[..., None]
                keys.append((window_partition(seen, size)[0] if size else seen).flatten(1))
            with KeysInTurn(keys):
                for one in net.blocks:
                    t = one(t)
            assert not keys
            t = torch.where(active, t.permute(0, 3, 1, 2), 0)
            for layer in net.neck:
                t = torch.where(active, layer(t), 0)
            found.append(t)
    return torch.cat(found)
