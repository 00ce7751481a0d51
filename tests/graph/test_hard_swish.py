"""What becomes of hard swishes and of affine functions before a convolution: which nodes are left. That they compute
the same is test_passes' to say."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from support.networks import lively
from support.small_nets import SIZE, C, Net, layer


def planned(work, *layers: nn.Module) -> list[str]:
    """Kinds of the nodes behind the stem, with their activations."""
    run = sbnet.sparsify(lively(Net(work, *layers)), torch.zeros(1, 3, *SIZE), block=4)
    nodes = run.plan.graph.nodes[1:]
    return [" ".join([node.kind, *([node.options["activation"]] if node.options.get("activation") else [])])
            for node in nodes]  # fmt: skip


class Written(nn.Module):
    """A hard swish whose 3 is a parameter, which may be written."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(x + self.three) / 6


def test_hard_swish_is_in_the_convolution():
    """Where 3 and 6 are numbers, and nothing else reads the gate."""
    one = ["conv hardswish"]
    assert planned(lambda f, x: f[0](x).mul(F.relu6(f[0](x) + 3)) / 6, layer()) != one
    for work in (
        lambda y: y * F.relu6(y + 3) / 6, lambda y: F.relu6(y + 3) * y / 6, lambda y: y * (F.relu6(y + 3) / 6),
        lambda y: y * torch.clamp(y + 3, 0, 6) * (1 / 6), lambda y: y * F.hardtanh(y + 3, 0, 6) / 6,
    ):  # fmt: skip
        assert planned(lambda f, x, work=work: work(f[0](x)), layer()) == one
    for work in (
        lambda y: y * F.relu6(y + 2) / 6, lambda y: y * F.relu6(y + 3) / 5, lambda y: y * F.relu(y + 3) / 6,
        lambda y: y * F.relu6(y + 3), lambda y: y * (F.relu6(y + 3) / 6 + 0.5),
    ):  # fmt: skip
        assert planned(lambda f, x, work=work: work(f[0](x)), layer()) != one
    assert planned(lambda f, x: f[1](f[0](x)), layer(), Written()) != one


def test_affine_functions_go_into_the_convolution_behind():
    """That looks at one pixel; not where it reads zeros beside the plane, or another reads the function."""

    def work(f, x):
        return f[1](F.silu(f[0](x)) * 0.5 + 0.3)

    both = ["conv silu", "conv"]
    assert planned(work, layer(), layer(k=1)) == both
    assert planned(work, layer(), layer(k=1, groups=2)) == both
    for other in (layer(), layer(k=1, p=1), layer(k=1, s=2)):
        assert planned(work, layer(), other) == ["conv silu", "channelwise", "conv"]

    def read_twice(f, x):
        y = F.silu(f[0](x)) * 0.5 + 0.3
        return f[1](y), y.tanh()

    assert planned(read_twice, layer(), layer(k=1))[:2] == ["conv silu", "channelwise"]


def test_weights_that_took_an_affine_function_follow_its_parameters():
    net = lively(Net(lambda f, x: f[2](f[1](F.silu(f[0](x)))), layer(), nn.BatchNorm2d(C), layer(k=1)))
    x, mask = torch.randn(1, 3, *SIZE), torch.ones(1, *SIZE, dtype=torch.bool)
    run = sbnet.sparsify(net, x, block=4)
    assert [node.kind for node in run.plan.graph.nodes] == ["conv"] * 3
    run(x, mask)
    with torch.no_grad():
        net.layers[1].weight.mul_(2)
        net.layers[1].running_mean.add_(1)
        torch.testing.assert_close(run(x, mask), net(x))
