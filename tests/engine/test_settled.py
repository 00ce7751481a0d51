"""Launches that read weights and lists before the launch ahead has ended: the same bits as those that wait."""

import pytest
import torch

from sbnet.benchmarks.harness import masks
from sbnet.engine import executor
from sbnet.models import resnet18, resnet50

SIZE = (1, 320, 384)


def capture(net, monkeypatch, settled: bool):
    with monkeypatch.context() as patch:
        said: list[bool] = []
        real = executor.settle_inputs
        patch.setattr(executor, "settle_inputs", lambda v: said.append(v) or real(v and settled))
        frame = torch.rand(SIZE[0], 3, *SIZE[1:], generator=torch.Generator().manual_seed(1)).half().cuda()
        run = net.capture(frame)
        assert said[0] is True
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


def test_a_call_that_raises_takes_it_back(monkeypatch):
    said: list[bool] = []
    monkeypatch.setattr(executor, "settle_inputs", said.append)
    run = resnet18(weights=0).eval().capture(torch.rand(1, 3, 64, 64))
    run.executor.device = torch.device("cuda")  # as the executor sees it; the kernels are the CPU's
    monkeypatch.setattr(run.executor, "step", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.executor.layers([run.frame], run.executor.lists_of(run.mask))
    assert said == [False]
