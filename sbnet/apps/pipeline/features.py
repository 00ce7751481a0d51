"""Features of a vision transformer on the film's moving parts: `features` of the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbnet.apps.pipeline.frames import Frame
from sbnet.apps.pipeline.networks import Finished, Network, imagenet

MASK = "changed:12:5 | refresh:50"  # a frame's keys and values are at most so many frames old


class Tokens(nn.Module):
    """What timm's VisionTransformer makes of each patch, [N,C,rows,columns], without class tokens and registers."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.patch = net, net.patch_embed.patch_size

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.net.forward_features(x)[:, self.net.num_prefix_tokens :]
        rows, columns = (side // patch for side, patch in zip(x.shape[2:], self.patch, strict=True))
        return tokens.transpose(1, 2).reshape(x.shape[0], -1, rows, columns)


class Colours:
    """The three directions in which the first frame's features differ most, as red, green and blue."""

    def __init__(self) -> None:
        self.axes: tuple[Tensor, ...] | None = None

    def __call__(self, features: Tensor) -> Tensor:
        """[1,C,h,w] to [1,3,h,w], 0 to 1."""
        rows = features[0].float().flatten(1).T
        if self.axes is None:
            mean = rows.mean(0)
            _, _, found = torch.linalg.svd(rows - mean, full_matrices=False)
            basis = F.pad(found[:3].T, (0, 3 - min(3, len(found))))
            shown = (rows - mean) @ basis
            least, most = (torch.quantile(shown, q, dim=0) for q in (0.02, 0.98))
            self.axes = mean, basis, least, (most - least).clamp(min=1e-6)
        mean, basis, least, span = self.axes
        shown = (((rows - mean) @ basis - least) / span).clamp(0, 1)
        return shown.T.reshape(1, 3, *features.shape[2:])


def features(which: str = "vit_small_patch16_224") -> Network:
    """Features of each patch by a timm VisionTransformer of this name, as colours; behind another colon its file of
    weights, else they are random and it shows what it costs.

    Raises:
        ValueError: no such network, or no such file.
    """
    import timm
    from timm.models.vision_transformer import VisionTransformer

    name, _, file = which.partition(":")
    if file and not Path(file).is_file():
        raise ValueError(f"features: {file}: expected a file of weights for {name}, got no file")
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        net = timm.create_model(name, num_classes=0, dynamic_img_size=True, checkpoint_path=file)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"features: {name}: expected a vision transformer of timm, got: {error}") from None
    finally:
        torch.random.set_rng_state(state)
    if not isinstance(net, VisionTransformer):
        raise ValueError(f"features: {name}: expected a vision transformer of timm, got {type(net).__name__}")
    model = Tokens(net.eval())
    patch, colours = model.patch[0], Colours()

    def finish(found: Tensor, frame: Frame) -> Finished:
        shown = F.interpolate(colours(found), scale_factor=float(patch))
        height, width = frame.size
        return shown[:, :, :height, :width], []

    title = f"{name}, features" + ("" if file else " (untrained)")
    return Network(model, title, prepare=imagenet, finish=finish, margin=patch, multiple=patch, mode="cached",
                   mask=MASK)  # fmt: skip
