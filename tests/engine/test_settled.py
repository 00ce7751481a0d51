"""Launches that read weights and lists before the launch ahead has ended: the same bits as those that wait."""

from unittest import mock

import pytest
import torch
from torch import nn

import sbnet
from sbnet.benchmarks.harness import masks
from sbnet.engine import streams
from sbnet.graph.passes.lanes import lanes
from sbnet.models import resnet18, resnet50
from sbnet.select import conv_transpose2d_kernel

SIZE = (1, 320, 384)


def capture(net, monkeypatch, settled: bool):
    with monkeypatch.context() as patch:
        said: list[bool] = []
        real = streams.settle_inputs
        patch.setattr(streams, "settle_inputs", lambda v: said.append(v) or real(v and settled))
        frame = torch.rand(SIZE[0], 3, *SIZE[1:], generator=torch.Generator().manual_seed(1)).half().cuda()
        run = net.capture(frame)
        assert said[0] is False
        assert True in said
        assert said[-1] is False
    run.frame.copy_(frame)
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("build", [resnet18, resnet50])
def test_settled_inputs_give_the_same_bits(monkeypatch, build):
    """Masks that change from call to call: a list read too early would be the one of the call before."""
    net = build(weights=0).eval().cuda()
    early, late = (capture(net, monkeypatch, settled) for settled in (True, False))
    shares = (0.01, 0.3, 0.05, 1.0, 0.02)
    given = [masks.pixels(kind, SIZE, share, "cuda") for share in shares for kind in ("top-left", "random")]
    wanted = []
    for mask in given:
        late.mask.copy_(mask)
        wanted.append(late(late.frame, late.mask, copy=True))
    for _ in range(20):
        for mask, want in zip(given, wanted, strict=True):
            early.mask.copy_(mask)
            assert torch.equal(early(early.frame, early.mask), want)


class Small(nn.Module):
    """What reads its list by itself: depthwise layers, a norm of channels, a gate, pools, resizing, sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 48, 3, 2, 1), nn.LayerNorm(48)
        self.deep = nn.ModuleList(nn.Conv2d(48, 48, k, 1, k // 2, groups=48) for k in (3, 5, 7))
        self.down, self.up = nn.Conv2d(48, 48, 5, 2, 2, groups=48), nn.Upsample(scale_factor=2)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(48, 16, 1), nn.ReLU(), nn.Conv2d(16, 48, 1), nn.Hardsigmoid()
        )
        self.pool, self.last = nn.MaxPool2d(5, 1, 2), nn.Conv2d(96, 16, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.deep:
            x = x + nn.functional.silu(self.norm(layer(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        low = self.down(x)
        low = self.pool(low * self.gate(low))
        return self.last(torch.cat([x, self.up(low)], 1))


@pytest.mark.gpu
def test_layers_that_read_their_lists_early_give_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    net, frame = Small().half().eval().cuda(), torch.rand(SIZE[0], 3, *SIZE[1:]).half().cuda()
    with monkeypatch.context() as patch:
        patch.setattr(streams, "settle_inputs", lambda _: None)
        late = sbnet.sparsify(net, frame)
    early = sbnet.sparsify(net, frame)
    given = [
        masks.pixels(kind, SIZE, share, "cuda") for share in (0.01, 0.3, 1.0, 0.02) for kind in ("top-left", "random")
    ]
    wanted = [late(frame, mask, copy=True) for mask in given]
    for _ in range(20):
        for mask, want in zip(given, wanted, strict=True):
            assert torch.equal(early(frame, mask), want)


@pytest.mark.gpu
def test_weights_that_a_launch_makes_are_waited_for(monkeypatch):
    """Transposed convolutions by phases: the first launch writes the weights of the others into memory that holds those
    of another layer."""
    assert conv_transpose2d_kernel((1, 24, 72, 96), 24, 2, 16, stride=2).kernel.startswith("by phases")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3, padding=1), *(nn.ConvTranspose2d(24, 24, 2, 2) for _ in range(3))]
    net = nn.Sequential(*layers).half().eval().cuda()
    frame, mask = torch.rand(1, 3, 72, 96).half().cuda(), torch.ones(1, 72, 96, dtype=torch.bool, device="cuda")
    real = streams.settle_inputs
    with monkeypatch.context() as patch:
        patch.setattr(streams, "settle_inputs", lambda v: real(False))
        want = sbnet.sparsify(net, frame)(frame, mask, copy=True)
    run = sbnet.sparsify(net, frame)
    for _ in range(200):
        assert torch.equal(run(frame, mask), want)


def test_a_call_that_raises_takes_it_back(monkeypatch):
    said: list[bool] = []
    nodes = resnet18(weights=0).eval().capture(torch.rand(1, 3, 64, 64)).plan.graph.nodes[:2]
    monkeypatch.setattr(streams, "settle_inputs", said.append)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    run = streams.Streams(lanes(nodes, set()), nodes, torch.device("cuda"))
    with pytest.raises(KeyboardInterrupt):
        run(mock.Mock(side_effect=[None, KeyboardInterrupt]), None, set())
    assert said == [False, True, False]
