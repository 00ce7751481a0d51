"""Networks as a pipeline takes them: a model, what it needs of a frame, and what to make of its output."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from sbnet.apps.pipeline.frames import Frame, PipelineError
from sbnet.apps.pipeline.programs import Program

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Finished = tuple[Any, list[dict[str, Any]]]  # picture [H,W,3] or [1,3,H,W], what draws it, or None; records


@dataclass
class Network:
    """A model for `Pipeline`, and what stands around it.

    Attributes:
        model: an nn.Module or an ONNX file; its input [1,C,H,W].
        name: for people.
        prepare: x [1,C,H,W], 0 to 1, as the model takes it, such as normalised.
        finish: (output, frame) -> (picture or None, records). The picture is [H,W,3] uint8 or [1,3,H,W], 0 to 1, on any
            device, or a function that draws one when it is needed; a record is a dict that JSON holds, a box in it
            "box": [x0, y0, x1, y1] in pixels of the frame.
        margin: pixels by which masks are grown, or "halo": as far as the network sees.
        pad: pixels by which frames are widened on each side, their border repeated; `finish` gets what comes of it.
        multiple: of which height and width are made a multiple, on the right and below, likewise.
        channels: of frames.
        read: reads a file of a source whose files are no pictures: pixels, or a Frame.
        mode: if the order says none.
        mask: likewise: a Mask, or what names one.
        checked: in masked mode, windows of some results are held against the contract in float64 (docs/contracts.md).
        captured: `prepare` and `finish` compute on tensors alone and give a picture, no records: on CUDA one graph
            holds them with mask and network.
        landing: (output, (height, width) of the frame) -> what `finish` reads of it: it gets that, on the host.
            `prepare` and this compute on tensors alone: on CUDA one graph holds them with mask and network, and
            `finish` runs in a thread of its own.
        located: of what `landing` gave and the frame's (height, width), on the device as well, boxes [K,4] of the frame
            and which of them count, [K] bool, the best first: masks that follow boxes then need not wait for records.
        finish_all: of what `landing` gave of several frames, stacked, and the frames, what `finish` makes of each, in
            few calls; `one_of(finish_all)` is that `finish`.
        enlarges: by how much the picture of a network that enlarges is larger. In cached mode kept blocks follow slow
            changes of the frame then, enlarged and added (`sbnet.apps.pipeline.drift`); its output is one feature map.
        notes: what `finish` has to say at the end of a run.
        half: an ONNX file that float16 leaves its accuracy: on CUDA it runs in that if the order says nothing.
    """

    model: Any
    name: str = "network"
    prepare: Callable[[Tensor], Tensor] | None = None
    finish: Callable[[Any, Frame], Finished] | None = None
    margin: int | str = 0
    pad: int = 0
    multiple: int = 1
    channels: int = 3
    read: Callable[[Path], Any] | None = None
    mode: str = "masked"
    mask: Any = "motion"
    checked: bool = False
    captured: bool = False
    landing: Callable[[Any, tuple[int, int]], Any] | None = None
    located: Callable[[Any, tuple[int, int]], tuple[Tensor, Tensor]] | None = None
    finish_all: Callable[[Any, Sequence[Frame]], list[Finished]] | None = None
    enlarges: int = 0
    notes: list[str] = field(default_factory=list)
    half: bool = False

    def input(self, x: Tensor) -> Tensor:
        """x widened and prepared."""
        return self.prepared(self.widened(x))

    def prepared(self, x: Tensor) -> Tensor:
        """x, widened, as the model takes it."""
        return x if self.prepare is None else self.prepare(x)

    def finished(self, output: Any, frame: Frame, drift: Tensor | None = None) -> Finished:
        """Picture, [H,W,3] uint8 where it is a tensor, and records of an output. drift: to be added to the picture."""
        if self.landing is not None:
            output = pytree.tree_map_only(Tensor, Tensor.cpu, self.landing(output, frame.size))
        return self.concluded(output, frame, drift)

    def concluded(self, found: Any, frame: Frame, drift: Tensor | None = None) -> Finished:
        """The same of what `finish` reads of an output."""
        picture, records = (self.finish or picture_of)(found, frame)
        return to_picture(picture if drift is None else picture + drift), records

    def concluded_all(self, found: Any, frames: Sequence[Frame]) -> list[Finished]:
        """`concluded` of what landed of several frames, stacked."""
        if self.finish_all is None:
            leaves, tree = pytree.tree_flatten(found)
            own = zip(*(images_of(leaf, len(frames)) for leaf in leaves), strict=True)
            parts = [pytree.tree_unflatten(list(one), tree) for one in own]
            return [self.concluded(part, frame) for part, frame in zip(parts, frames, strict=True)]
        return [(to_picture(picture), records) for picture, records in self.finish_all(found, frames)]

    def beyond(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows below a frame of this size and columns on its right that make its sides multiples, `pad` aside."""
        below, right = (-(n + 2 * self.pad) % self.multiple for n in size)
        return below, right

    def widened(self, x: Tensor) -> Tensor:
        """[N,C,H,W] with this network's border."""
        below, right = self.beyond((int(x.shape[2]), int(x.shape[3])))
        if not (self.pad or below or right):
            return x
        sides = (self.pad, self.pad + right, self.pad, self.pad + below)
        return F.pad(x.contiguous(memory_format=torch.channels_last), sides, mode="replicate")

    def widened_mask(self, mask: Tensor) -> Tensor:
        """[N,H,W] bool with the same border."""
        height, width = int(mask.shape[1]), int(mask.shape[2])
        below, right = self.beyond((height, width))
        if not (self.pad or below or right):
            return mask
        if mask.is_cuda:  # one launch
            at = _replicated((height, width), (self.pad, self.pad + below, self.pad, self.pad + right), mask.device)
            return mask.flatten(1).index_select(1, at).view(mask.shape[0], height + 2 * self.pad + below, -1)
        top, bottom, left, end = self.pad, self.pad + height, self.pad, self.pad + width
        found = mask.new_empty(mask.shape[0], bottom + self.pad + below, end + self.pad + right)
        found[:, top:bottom, left:end] = mask
        found[:, top:bottom, :left] = found[:, top:bottom, left : left + 1]
        found[:, top:bottom, end:] = found[:, top:bottom, end - 1 : end]
        found[:, :top] = found[:, top : top + 1]
        found[:, bottom:] = found[:, bottom - 1 : bottom]
        return found


def one_of(finish_all: Callable[[Any, Sequence[Frame]], list[Finished]]) -> Callable[[Any, Frame], Finished]:
    """`Network.finish` of a `Network.finish_all`."""

    def finish(found: Any, frame: Frame) -> Finished:
        return finish_all(pytree.tree_map_only(Tensor, lambda v: v[None], found), [frame])[0]

    return finish


def images_of(x: Any, count: int) -> list[Any]:
    """What each of `count` images has of a tensor on the host; other things belong to all."""
    return list(x.unbind()) if isinstance(x, Tensor) else [x] * count


def imagenet(x: Tensor) -> Tensor:
    """Colours of 0 to 1, normalised as networks of ImageNet take them."""
    return normalised(x, *IMAGENET)


def normalised(x: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    """Colours [N,C,H,W] less their means, over their deviations."""
    shift, scale = _shift_and_scale(mean, deviation, x.device, x.dtype)
    return torch.addcmul(shift, x, scale)


@functools.cache  # a CUDA graph reads them where they are
def _shift_and_scale(
    mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[1,C,1,1] each: what normalises colours, as a shift after a scale."""
    middle, wide = (torch.tensor(v)[None, :, None, None] for v in (mean, deviation))
    return (-middle / wide).to(device, dtype), (1 / wide).to(device, dtype)


@functools.cache  # a CUDA graph reads them where they are
def _replicated(size: tuple[int, int], border: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Of each pixel of a mask with a border (above, below, left, right), which of one of `size` it is, row by row."""
    height, width = size
    above, below, left, right = border
    rows = torch.arange(-above, height + below, device=device).clamp_(0, height - 1)
    columns = torch.arange(-left, width + right, device=device).clamp_(0, width - 1)
    return (rows[:, None] * width + columns).flatten().int()


def picture_of(output: Any, frame: Frame) -> Finished:
    """What to show of an output of unknown meaning: its three channels, 0 to 1; of other feature maps, their size in
    grey; of one vector, the largest entry as a record."""
    found = shown_of(output)
    if found is None:
        return None, []
    if found.dim() == 2:
        score, label = found[0].float().softmax(0).max(0)
        return None, [{"class": int(label), "score": round(float(score), 6)}]
    if found.shape[1] == 3:
        return found[:1], []
    size = found[:1].float().square().mean(1, keepdim=True).sqrt()
    return (size / size.amax().clamp(min=1e-20)).expand(-1, 3, -1, -1), []


def shown_of(output: Any) -> Tensor | None:
    """What `picture_of` reads: the first feature maps, [N,C,H,W]; of an output without any the first vectors, [N,C]."""
    leaves = [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor)]
    maps = [v for v in leaves if v.dim() == 4 and v.shape[2] * v.shape[3] > 1]
    return next(iter([*maps, *(v for v in leaves if v.dim() == 2)]), None)


def _contours(**options: Any) -> Network:
    from sbnet.models import contour_net

    return Network(contour_net(), "contours", finish=_painted, checked=True, captured=True)


def _painted(output: Tensor, frame: Frame) -> Finished:
    from sbnet.models import paint_contours

    return (paint_contours(output)[0], []) if output.shape[1] == 3 else picture_of(output, frame)


def _is_exported(path: Path) -> bool:
    """Does an ONNX file hold sbnet's own ops?"""
    import onnx
    from google.protobuf.message import DecodeError

    from sbnet.export.schemas import DOMAIN

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"not an ONNX model ({error})") from None
    return any(entry.domain == DOMAIN for entry in model.opset_import)


def registry() -> dict[str, Callable[..., Network]]:
    """Name -> builder; each takes what follows the colon of "name:argument", if anything does."""
    from sbnet.apps.pipeline.trained import BUILDERS

    return {"contours": _contours, **BUILDERS}


def open_network(given: Any) -> Network:
    """The network that `given` is or names: a Network, an nn.Module, a file (.onnx, .pt2), a name of the registry
    ("upscale:2"), or "module:name" of any of these or of a callable that returns one.

    Raises:
        PipelineError: there is no such thing, or a package that it needs is missing.
    """
    if isinstance(given, Network):
        return given
    if isinstance(given, nn.Module):
        from sbnet.apps.pipeline.detectors import is_detector, split_detector

        return split_detector(given) if is_detector(given) else Network(given, type(given).__name__)
    if not isinstance(given, (str, os.PathLike)):
        raise PipelineError(f"network: expected an nn.Module, a Network, a file or a name, got {type(given).__name__}")
    text = os.fspath(given)
    path = Path(text)
    if path.suffix.lower() in (".onnx", ".pt2") and not path.is_file():
        raise PipelineError(f"{path}: no such file")
    name, _, rest = text.partition(":")
    known = registry()
    try:
        if path.suffix.lower() == ".onnx":
            if _is_exported(path):
                raise PipelineError(
                    f"{path}: expected a network as others write it, got an exported run, whose mask is an input of "
                    "its own; sbnet.export.session runs it, and a Pipeline takes the network that it was made of"
                )
            return Network(text, path.stem)
        if path.suffix.lower() == ".pt2":
            return Network(Program(path), path.stem)
        if name in known:
            return known[name](*([rest] if rest else []))
        if rest:
            found = getattr(importlib.import_module(name), rest)
            return open_network(found if isinstance(found, nn.Module | Network) or not callable(found) else found())
    except (ImportError, AttributeError) as error:
        raise PipelineError(f"network {text}: {error}") from None
    except ValueError as error:
        raise PipelineError(f"network {text}: {str(error).removeprefix('sbnet: ')}") from None
    raise PipelineError(f"network {text}: expected one of {', '.join(known)}, module:name, a .onnx or a .pt2 file")


def halo_of(run: Any) -> int:
    """Pixels of the input that the network of a SparseRun sees beside a pixel.

    Raises:
        PipelineError: it sees the whole frame (a global pool, or a layer that is not planned).
    """
    from sbnet.graph.reach import reach

    found = reach(run.plan)
    if found is None:
        raise PipelineError("margin: expected a number of pixels where the network sees the whole frame, got halo")
    return found


def to_picture(found: Any) -> Tensor | Any:
    """[H,W,3] uint8 of what `finish` gave: floats [1,3,H,W] are 0 to 1."""
    if not isinstance(found, Tensor) or found.dim() == 3:
        return found
    return found[0].detach().movedim(0, 2).mul(255).add_(0.5).clamp_(0, 255).to(torch.uint8)


def leaves(output: Any) -> Sequence[Tensor]:
    """Floating tensors of an output."""
    return [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
