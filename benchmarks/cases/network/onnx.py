"""The same layers and networks in ONNX Runtime: exported with sbnet's ops, and dense by ONNX Runtime's own.

A sparse call starts at a pixel mask and ends at a whole output, zeros included. Times are those of a session's call
through IOBinding, waiting included; on CUDA both sides replay CUDA graphs. The single layer takes and gives the layout
that each side likes (sparse NHWC, dense NCHW), as in the middle of a network; networks take and give NCHW.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.cases.network.chain import CHAINS, four_layers
from sbnet.benchmarks.harness import masks
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Skip, Work, WrongResult, close, same, short
from sbnet.engine import compare

LAYER = "one 3x3, 64 channels"


def cases(setting: Setting) -> Iterator[Case]:
    size = setting.pick((40, 56), (200, 352), (400, 704))
    densities = setting.pick((0.1,), (0.1,), (0.05, 0.1, 0.25, 0.5, 1.0))
    for network in setting.pick((LAYER, *CHAINS), ("contour_net",), (LAYER, *CHAINS)):
        for density in densities:
            facts: dict[str, Any] = {"network": network, "size": list(size)}
            facts |= {"dtype": short(setting.dtype), "mask": "random"}
            facts["wanted density"] = density
            group = "conv" if network == LAYER else "network"
            yield Case("ONNX Runtime", group, facts, partial(work, setting, network, size, density))


def require(setting: Setting) -> None:
    """Raises Skip where the packages or CUDA are missing."""
    try:
        from sbnet import export

        if setting.cuda and "CUDAExecutionProvider" not in export.default_providers():
            raise Skip("this ONNX Runtime, or this sbnet, has no CUDA")
        _ = export.to_onnx
    except ImportError as error:
        raise Skip(str(error)) from None


class Nhwc(nn.Module):
    """A module of x, mask and y between NHWC tensors: no Transpose is left in its model."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, block_map = self.chain(x.permute(0, 3, 1, 2), mask)
        return y.permute(0, 2, 3, 1), block_map


class Models:
    """A network's sessions with their inputs and outputs, where CUDA graphs need them: in one place."""

    def __init__(self, setting: Setting, network: str, size: tuple[int, int]):
        build, channels = (lambda: four_layers(1), 64) if network == LAYER else CHAINS[network]
        require(setting)
        self.net, device, dtype = build(), setting.device, setting.dtype
        self.x = torch.rand(1, channels, *size).to(dtype)
        sparse = sbnet.sparsify(copy.deepcopy(self.net).to(dtype), self.x, block=16)
        module: nn.Module = sparse.as_module(block_maps=True)
        self.mask = torch.zeros(1, *size, dtype=torch.bool)
        taken, self.nhwc = self.x, network == LAYER
        if self.nhwc:
            module, taken = Nhwc(module).eval(), self.x.permute(0, 2, 3, 1).contiguous()
        with torch.no_grad():
            wanted = module(taken, self.mask)
            dense = copy.deepcopy(self.net).to(dtype)
            self.given = [t.to(device) for t in (taken, self.mask)]
            self.x = self.x.to(device)
            self.outputs = [torch.empty_like(t, device=device).contiguous() for t in wanted]
            self.sparse = session(setting, module, (taken, self.mask))
            self.dense = {"ORT dense": session(setting, dense, (self.x.cpu(),))}
            if setting.cuda:
                self.dense["ORT dense, prefer_nhwc"] = session(setting, dense, (self.x.cpu(),), prefer_nhwc="1")
            k = self.outputs[0].shape[3 if self.nhwc else 1]
            self.whole = {name: torch.empty(1, k, *size, dtype=dtype, device=device) for name in self.dense}


def session(setting: Setting, module: nn.Module, inputs: tuple[Tensor, ...], **options: str) -> Any:
    """An exported module, ready to run; CUDA graphs on CUDA."""
    from sbnet import export

    with tempfile.TemporaryDirectory() as folder:
        path = export.to_onnx(module, inputs, Path(folder) / "model.onnx", fuse_bottlenecks=setting.cuda)
        if not setting.cuda:
            import onnxruntime

            own = onnxruntime.SessionOptions()
            own.intra_op_num_threads = torch.get_num_threads()
            # its threads must not wait in a loop while another side is timed
            own.add_session_config_entry("session.force_spinning_stop", "1")
            return export.session(path, ["CPUExecutionProvider"], options=own)
        return export.session(path, [("CUDAExecutionProvider", options), "CPUExecutionProvider"], cuda_graph=True)


@functools.lru_cache(maxsize=1)
def models(setting: Setting, network: str, size: tuple[int, int]) -> Models:
    """Cases that follow each other share sessions: a mask is an input."""
    return Models(setting, network, size)


def work(setting: Setting, network: str, size: tuple[int, int], density: float) -> Work:
    at = models(setting, network, size)
    from sbnet import export

    mask = masks.pixels("random", (1, *size), density, setting.device)
    at.given[1].copy_(mask)
    active = sbnet.reduce_mask(mask, sbnet.BlockGrid.cover(size, 16))

    def sparse() -> Tensor:
        y = export.run(at.sparse, at.given, at.outputs)[0]
        return y.permute(0, 3, 1, 2) if at.nhwc else y

    def dense(name: str) -> Tensor:
        return export.run(at.dense[name], [at.x], [at.whole[name]])[0]

    def check(side: str, got: Tensor) -> float:
        if side != "ORT sparse":
            own = copy.deepcopy(at.net).to(setting.device, setting.dtype)
            return close(got, own(at.x), own.double()(at.x.double()))
        same(at.outputs[1], active.block_map)
        agreement = compare(got, at.net, at.x, active)
        if not agreement.holds:
            raise WrongResult(str(agreement))
        return agreement.error

    sides = {"ORT sparse": Side(sparse, "ours", "wall")}
    sides |= {name: Side(partial(dense, name), "dense", "wall") for name in at.dense}
    return Work(sides, check, notes={"density": int(active.count) / active.capacity})
