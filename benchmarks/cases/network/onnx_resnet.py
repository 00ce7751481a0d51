"""SparseResNet-50 (on a CPU ResNet-18, too) without its head in ONNX Runtime, against its dense form there, against
itself in PyTorch, and on a CPU against OpenVINO.

Each time is that of a call whose frame and mask are on the device already, until its output is there, by the host's
clock. ONNX Runtime replays CUDA graphs on bound tensors, PyTorch what `capture` gives; both take and give NHWC.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.benchmarks.cases.network.onnx import require, session
from sbnet.benchmarks.cases.network.resnet import pixel_mask
from sbnet.benchmarks.harness import dense, masks, planned
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, short
from sbnet.engine import SparseRun
from sbnet.engine.capture import cuda_graph
from sbnet.models import resnet18, resnet50
from sbnet.nn import fold_batch_norm

OURS = ("ORT sparse", "torch masked")


# On a CPU: blocks of 64x64 pixels of the frame on every plane, so that each plane's share is the mask's.
EVEN = (16, 16, 8, 4, 2)


def cases(setting: Setting) -> Iterator[Case]:
    nets: list[tuple[str, Any]] = [("50", None)] if setting.cuda else [("18", EVEN), ("50", EVEN)]
    large = [(1, 1024, 1024), (8, 1024, 1024), (1, 2048, 2048)]
    some, shares = [("top-left", 0.1)], [("random", 0.05), ("random", 0.3), ("top-left", 0.05), ("top-left", 0.3)]
    every = [*(some if setting.cuda else shares), ("all", 1.0)]
    for depth, blocks in setting.pick(nets[-1:], nets[-1:], nets):
        for size in setting.pick([(1, 64, 64)], [(1, 256, 256)], large if setting.cuda else [(1, 512, 512)]):
            for kind, density in setting.pick(some, some, every):
                facts: dict[str, object] = {
                    "of": f"SparseResNet-{depth}, no head",
                    "size": list(size),
                    "dtype": short(setting.dtype),
                }
                facts |= {"mask": kind, "wanted density": density}
                if blocks is not None:
                    facts["block"] = "-".join(map(str, blocks))
                make = partial(work, setting, depth, blocks, size, kind, density)
                yield Case("residual network, ONNX Runtime", "network", facts, make)


class Nhwc(nn.Module):
    """A network between NHWC tensors: what stands at the boundary of its model cancels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.net(x.permute(0, 3, 1, 2), mask).permute(0, 2, 3, 1)


class Models:
    """The network in PyTorch and in sessions, with the tensors that they read and write."""

    def __init__(self, setting: Setting, depth: str, blocks: Any, size: tuple[int, int, int]) -> None:
        require(setting)
        from sbnet import export

        device, dtype = setting.device, setting.dtype
        build = {"18": resnet18, "50": resnet50}[depth]
        self.net = build(weights=0, classes=0, **({} if blocks is None else {"blocks": blocks})).eval()
        own = fold_batch_norm(self.net).to(dtype)
        x, mask = torch.rand(size[0], *size[1:], 3).to(dtype), torch.zeros(size, dtype=torch.bool)
        self.run: SparseRun = self.net.to(device).capture(x.permute(0, 3, 1, 2).to(device))
        self.run.frame.copy_(x.permute(0, 3, 1, 2))
        self.nhwc = self.run.frame.permute(0, 2, 3, 1)
        y = self.run(self.run.frame, self.run.mask).permute(0, 2, 3, 1)
        searched = {"cudnn_conv_algo_search": "EXHAUSTIVE"} if setting.cuda else {}
        sparse = session(setting, Nhwc(own), (x, mask))
        own_dense = {"ORT dense": session(setting, Nhwc(own), (x,), **searched)}
        if setting.cuda:
            own_dense["ORT dense, prefer_nhwc"] = session(setting, Nhwc(own), (x,), prefer_nhwc="1", **searched)
        self.sparse = export.Bound(sparse, [self.nhwc, self.run.mask], [torch.empty_like(y)])
        self.dense = {k: export.Bound(s, [self.nhwc], [torch.empty_like(y)]) for k, s in own_dense.items()}
        self.torch_dense = planned.dense_sides(self.run, self.run.frame, Setting(device, setting.level, False))
        if setting.cuda:
            form = self.torch_dense["fused cuDNN"].run
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                self.graph, self.whole = cuda_graph(form, self.run.frame.device)


@functools.lru_cache(maxsize=1)
def models(setting: Setting, depth: str, blocks: Any, size: tuple[int, int, int]) -> Models:
    """Cases that follow each other share sessions: a mask is an input."""
    return Models(setting, depth, blocks, size)


@functools.lru_cache(maxsize=1)
def openvino(setting: Setting, depth: str, blocks: Any, size: tuple[int, int, int]) -> dict[str, Side]:
    """OpenVINO's dense network; none on CUDA, in the tests, and where it is not installed."""
    if setting.cuda or setting.level == "tiny":
        return {}
    at = models(setting, depth, blocks, size)
    form = dense.forms(fold_batch_norm(at.net), at.run.frame).get("OpenVINO")
    return {"OpenVINO dense": Side(partial(form.run, form.prepare(at.run.frame)), "peer", "wall")} if form else {}


def work(setting: Setting, depth: str, blocks: Any, size: tuple[int, int, int], kind: str, density: float) -> Work:
    at = models(setting, depth, blocks, size)
    if kind == "random":
        at.run.mask.copy_(masks.pixels("random", size, density, setting.device, 32 * blocks[-1]))
    else:
        at.run.mask.copy_(pixel_mask(kind, size, density, setting.device))

    def done(y: Tensor) -> Tensor:
        if setting.cuda:
            torch.cuda.synchronize()
        return y

    def torch_dense() -> Tensor:
        if not setting.cuda:
            return at.torch_dense["PyTorch"].run()
        at.graph.replay()
        return done(at.whole)

    held = planned.contract(at.net, at.run.frame, at.run.mask, at.run.planes)

    def check(side: str, got: Tensor) -> float:
        return held("masked" if side in OURS else "dense", got)

    def bound(call: Any) -> Side:
        return Side(lambda: call()[0].permute(0, 3, 1, 2), "dense", "wall")

    sides = {
        "ORT sparse": Side(bound(at.sparse).run, "ours", "wall"),
        "torch masked": Side(lambda: done(at.run(at.run.frame, at.run.mask)), "peer", "wall"),
        "torch dense": Side(torch_dense, "peer", "wall"),
        **{name: bound(call) for name, call in at.dense.items()},
        **openvino(setting, depth, blocks, size),
    }
    import onnxruntime

    notes = {"densities": planned.densities(at.run.lists(at.run.mask)), "onnxruntime": onnxruntime.__version__}
    return Work(sides, check, notes=notes)
