"""Small networks of every shape that people write, in plain PyTorch: what `sparsify` is held to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def lively(net: nn.Module) -> nn.Module:
    """Eval mode, normalisations that do something, activations that neither die nor explode."""
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.3, 0.3)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.3, 0.3)
        elif isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(part.weight)
    return net.eval()


def conv(i: int, o: int, k: int = 3, s: int = 1, groups: int = 1, act: nn.Module | None = None) -> nn.Sequential:
    layers = [nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, act if act is not None else nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips by concatenation, upsampling of three kinds."""

    def __init__(self, up: str, c: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, c), conv(c, 2 * c), conv(2 * c, 4 * c)])
        self.up, self.join = nn.ModuleList(), nn.ModuleList([conv(4 * c, 2 * c), conv(2 * c, c)])
        for i, o in ((4 * c, 2 * c), (2 * c, c)):
            if up == "transpose":
                self.up.append(nn.ConvTranspose2d(i, o, 2, 2))
            else:
                aligned = {"align_corners": False} if up == "bilinear" else {}
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2, mode=up, **aligned), nn.Conv2d(i, o, 1)))
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        c = self.down[2](F.max_pool2d(b, 2))
        b = self.join[0](torch.cat([b, self.up[0](c)], 1))
        return self.head(self.join[1](torch.cat([a, self.up[1](b)], 1)))


class FPN(nn.Module):
    """A pyramid: sums of upsampled maps, a dict of outputs."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stages = nn.ModuleList([conv(3, c, s=2), conv(c, 2 * c, s=2), conv(2 * c, 4 * c, s=2)])
        self.lateral = nn.ModuleList([nn.Conv2d(c << k, c, 1) for k in range(3)])
        self.smooth = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1) for _ in range(3)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found, outputs, top = [], {}, None
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        for k in (2, 1, 0):
            y = self.lateral[k](found[k])
            top = y if top is None else y + F.interpolate(top, size=y.shape[2:], mode="nearest")
            outputs[f"p{k}"] = self.smooth[k](top)
        return outputs


class C2f(nn.Module):
    """Chunks, sums after the activation, a concatenation of all of them."""

    def __init__(self, c: int, n: int = 2) -> None:
        super().__init__()
        self.first, self.last = conv(c, 2 * c, 1, act=nn.SiLU()), conv((2 + n) * c, c, 1, act=nn.SiLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(c, c, act=nn.SiLU()), conv(c, c, act=nn.SiLU(inplace=True))) for _ in range(n)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """C2f, SPPF, a neck, several heads."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        silu = nn.SiLU()
        self.stem, self.one = conv(3, c, 3, 2, act=silu), C2f(c)
        self.down, self.two = conv(c, c, 3, 2, act=silu), C2f(c)
        self.squeeze, self.spread = conv(c, c, 1, act=silu), conv(4 * c, c, 1, act=silu)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.neck = conv(2 * c, c, 1, act=silu)
        self.boxes = nn.ModuleList([nn.Conv2d(c, 6, 1), nn.Conv2d(c, 6, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.one(self.stem(x))
        b = self.squeeze(self.two(self.down(a)))
        pools = [b]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        b = self.spread(torch.cat(pools, 1))
        up = F.interpolate(b, scale_factor=2, mode="nearest")[:, :, : a.shape[2], : a.shape[3]]
        return self.boxes[0](self.neck(torch.cat([up, a], 1))), self.boxes[1](b).sigmoid()


class SRVGG(nn.Module):
    """Super-resolution: PReLU, PixelShuffle, the upsampled image added."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        body: list[nn.Module] = []
        for i in (3, c, c):
            body += [nn.Conv2d(i, c, 3, padding=1), nn.PReLU(c)]
        self.body, self.shuffle = nn.Sequential(*body, nn.Conv2d(c, 12, 3, padding=1)), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.body(x)) + F.interpolate(x, scale_factor=2, mode="nearest")


class Residual(nn.Module):
    """Basic blocks, a shortcut with a stride, the sum in place, a classifier."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.pool = conv(3, c, 7, 2), nn.MaxPool2d(3, 2, 1)
        self.a = nn.Sequential(conv(c, c), nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c))
        self.b = nn.Sequential(conv(c, 2 * c, s=2), nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c))
        self.short = nn.Sequential(nn.Conv2d(c, 2 * c, 1, 2, bias=False), nn.BatchNorm2d(2 * c))
        self.fc = nn.Linear(2 * c, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        out = self.a(x)
        out += x
        x = F.relu(out, inplace=True)
        x = F.relu(self.b(x) + self.short(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Gated(nn.Module):
    """Inverted residuals with squeeze and excite: depthwise, hardswish, gates by channel and by pixel."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = conv(3, c, 3, 2, act=nn.Hardswish())
        self.wide, self.deep = conv(c, 3 * c, 1, act=nn.Hardswish()), conv(3 * c, 3 * c, 5, 1, 3 * c, nn.ReLU6())
        self.squeeze, self.excite = nn.Conv2d(3 * c, 4, 1), nn.Conv2d(4, 3 * c, 1)
        self.narrow, self.where = (
            nn.Sequential(nn.Conv2d(3 * c, c, 1), nn.BatchNorm2d(c)),
            nn.Conv2d(2, 1, 7, padding=3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.deep(self.wide(x))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        y = x + self.narrow(y * F.hardsigmoid(gate))
        pooled = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
        return y * torch.sigmoid(self.where(pooled))


class Dense(nn.Module):
    """Pre-activation, features concatenated again and again, an average pool."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(c * k) for k in (1, 2, 3, 4)])
        self.convs = nn.ModuleList([nn.Conv2d(c * k, c, 3, padding=1, bias=False) for k in (1, 2, 3)])
        self.last = nn.Conv2d(4 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, layer in zip(self.norms, self.convs, strict=False):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        return F.avg_pool2d(self.last(F.relu(self.norms[3](torch.cat(features, 1)))), 2, 2)


class Shuffle(nn.Module):
    """Channel shuffle and split."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.stem = conv(3, c, 3, 2)
        self.branch = nn.Sequential(
            conv(c // 2, c // 2, 1), conv(c // 2, c // 2, 3, 1, c // 2), conv(c // 2, c // 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            a, b = x.chunk(2, dim=1)
            x = torch.cat((a, self.branch(b)), 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return x


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """NHWC inside: LayerNorm over channels, Linear, a scale for each channel."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 4, 4), LayerNorm2d(c))
        self.deep, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.up, self.down, self.scale = nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.Parameter(torch.rand(c))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class RepVGG(nn.Module):
    """Parallel branches: 3x3, 1x1 and a normalised identity."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = conv(3, c, 3, 2)
        self.three = nn.Sequential(nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c))
        self.one, self.same = nn.Sequential(nn.Conv2d(c, c, 1, bias=False), nn.BatchNorm2d(c)), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return F.relu(self.three(x) + self.one(x) + self.same(x))


class ASPP(nn.Module):
    """Dilated branches beside a global one, group normalisation, logits upsampled to the image."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, c, 3, 2), conv(c, c, 3, 2))
        self.branches = nn.ModuleList([nn.Conv2d(c, c, 3, padding=d, dilation=d) for d in (1, 2, 4)])
        self.pooled, self.norm, self.head = nn.Conv2d(c, c, 1), nn.GroupNorm(4, 4 * c), nn.Conv2d(4 * c, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.stem(x)
        everywhere = F.interpolate(self.pooled(F.adaptive_avg_pool2d(y, 1)), size=y.shape[2:], mode="bilinear")
        y = F.leaky_relu(self.norm(torch.cat([*(branch(y) for branch in self.branches), everywhere], 1)), 0.1)
        return {"out": F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear", align_corners=False)}


class Attention(nn.Module):
    """Pixels as tokens: softmax(q k) v over the plane, flattened."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.qkv, self.out = nn.Conv2d(3, c, 8, 8), nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.norm, self.last = nn.LayerNorm(c), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        tokens = tokens + self.out((q @ k.transpose(1, 2) / c**0.5).softmax(-1) @ v)
        return self.last(tokens.transpose(1, 2).reshape(n, c, h, w))


class Focus(nn.Module):
    """The image's pixels dealt out to channels; pads of one side, as TensorFlow's SAME has them; ceil_mode."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.pool = conv(12, c), nn.Conv2d(c, c, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True)
        self.norm = nn.InstanceNorm2d(c, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        x = F.pad(self.first(2 * x - 1), (0, 1, 0, 1))
        return self.pool(F.elu(self.norm(self.second(x))) * 0.5)


class Folded(nn.Module):
    """What lies in the batch beside images: heads, mirrored views, pairs of frames."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.head = conv(3, width), conv(width // 2, width // 2)
        self.view, self.pair, self.out = conv(width, width), conv(width, width), nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        x = x + self.head(x.reshape(n * 2, c // 2, h, w)).reshape(n, c, h, w)
        plain, mirrored = self.view(torch.cat([x, x.flip(3)])).chunk(2)
        x = plain + mirrored.flip(3)
        frames = self.pair(x).view(-1, min(n, 2), c, h, w)
        return self.out((frames * 2 + 1).flatten(0, 1))


class Sampled(nn.Module):
    """Features sampled at pixels that move, and at points that are no plane."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.flow, self.out = conv(3, width), nn.Conv2d(width, 2, 1), nn.Conv2d(width, 4, 3, padding=1)
        self.register_buffer("points", torch.linspace(-1, 1, 40).view(1, 5, 4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1), x.shape, False)
        grid = grid + 0.1 * torch.tanh(self.flow(x)).permute(0, 2, 3, 1)
        points = F.grid_sample(x, self.points.to(x.dtype).expand(len(x), -1, -1, -1), align_corners=False)
        return self.out(F.grid_sample(x, grid, align_corners=False)), points.flatten(2).mean(2)


NETWORKS = {
    "U-Net, transposed convolution": lambda: UNet("transpose"), "U-Net, bilinear": lambda: UNet("bilinear"),
    "U-Net, nearest": lambda: UNet("nearest"), "FPN": FPN, "YOLO-like": Yolo, "SRVGG": SRVGG, "ResNet": Residual,
    "MobileNet with gates": Gated, "DenseNet": Dense, "ShuffleNet": Shuffle, "ConvNeXt": ConvNeXt, "RepVGG": RepVGG,
    "ASPP": ASPP, "attention": Attention, "Focus": Focus, "batches that hold more": Folded, "sampled": Sampled,
}  # fmt: skip
