"""Networks by `sbnet.quantize`: in int8 on CPUs, against ours in float32, and ONNX Runtime and OpenVINO dense, in both;
on GPUs in fp8 and int8, against ours in float16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import sbnet
from sbnet.benchmarks.cases.network.chain import four_layers
from sbnet.benchmarks.harness import dense, dense_int8, masks, nets
from sbnet.benchmarks.harness.registry import Case, Setting, Side, Work, WrongResult
from sbnet.models import SRVGG

NETWORKS = {
    "four 3x3 of 64": four_layers,
    "four 1x1 of 256": lambda: four_products(),
    "SRVGG x4": lambda: SRVGG(4),
    "MobileNetV2": lambda: nets.build("mobilenet_v2"),
}
FARTHEST = 0.1  # of int8 or fp8 from the same network in float, relative, rms; random weights


def four_products() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(256, 256, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def cases(setting: Setting) -> Iterator[Case]:
    for network in setting.pick(("four 3x3 of 64",), ("four 3x3 of 64",), tuple(NETWORKS)):
        height, width = setting.pick((24, 32), (200, 352), (400, 704))
        size = (height // 2, width // 2) if "3x3" not in network else (height, width)
        densities = setting.pick((0.5,), (1.0, 0.1), (1.0, 0.25, 0.1, 0.05))
        for dtype, density in product(("fp8", "int8") if setting.cuda else ("int8",), densities):
            facts: dict[str, Any] = {"network": network, "size": list(size), "dtype": dtype, "mask": "random"}
            facts["wanted density"] = density
            yield Case("quantized network", "network", facts, partial(work, setting, network, size, dtype, density))


def work(setting: Setting, name: str, size: tuple[int, int], name_of: str, density: float) -> Work:
    floats = setting.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = NETWORKS[name]().eval().to(setting.device, floats)
    channels = next(m.in_channels for m in net.modules() if isinstance(m, nn.Conv2d))
    x = torch.rand(1, channels, *size).to(setting.device, floats).contiguous(memory_format=torch.channels_last)
    mask = masks.pixels("random", (1, *size), density, setting.device)
    plain = sbnet.sparsify(net, x, block=16)
    ends = name.startswith("four")  # layers of one kind; of a whole network the ends stay in float
    run = sbnet.quantize(plain, [x], [mask], dtype=name_of, ends=ends)
    run(x, mask)
    with torch.no_grad():
        whole, sparse = net(x), plain(x, mask, copy=True)
    ours, peer = f"masked {name_of}", f"masked {str(floats).removeprefix('torch.')}"
    found = {ours: Side(lambda: run(x, mask), "ours", "own"), peer: Side(lambda: plain(x, mask), "peer", "own")}
    if setting.cuda or setting.level == "tiny":
        found["PyTorch"] = Side(torch.no_grad()(lambda: net(x)))
    else:
        both = dense.forms(net, x) | dense_int8.forms(net, [x])
        found |= {key: Side(partial(form.run, form.prepare(x)), "dense", "own") for key, form in both.items()}

    def check(side: str, got: Tensor) -> float:
        want = sparse if side.startswith("masked") else whole
        got, want = got.float(), want.float()
        error = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
        if not error <= (FARTHEST if side == ours or "int8" in side else 1e-2 if setting.cuda else 1e-4):
            raise WrongResult(f"{side}: {error:.2g} from the network in float")
        return error

    notes = {"density": run.density, "blocks": [plane[2][0] for plane in run.planes]}
    return Work(found, check, dtype=torch.float8_e4m3fn if name_of == "fp8" else torch.int8, notes=notes)
