"""Networks of legal but unusual PyTorch: what `sparsify` makes of them is what PyTorch does, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sbnet

SIZE = (24, 40)


class Around(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function, self.last = nn.Conv2d(3, 8, 3, padding=1), function, nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.function(self.first(x))
        return y, self.last(y)


def full(n: int) -> Tensor:
    return torch.ones(n, *SIZE, dtype=torch.bool)


def assert_dense(net: nn.Module, x: Tensor, mode: str = "masked") -> None:
    """With a full mask the result is PyTorch's."""
    with torch.no_grad():
        want = net(x)
    for a, b in zip(sbnet.sparsify(net, x, mode=mode, block=4)(x, full(len(x))), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


OF_SAMPLES = {
    "product": lambda y, t: y * t,
    "quotient": lambda y, t: y / t,
    "sum": lambda y, t: y + t,
    "difference": lambda y, t: y - t,
    "from": lambda y, t: t - y,
    "pixels first": lambda y, t: (y.permute(0, 2, 3, 1) * t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "flat": lambda y, t: (y.flatten(2) * t[..., 0]).view_as(y),
}


@pytest.mark.parametrize("n", [2, 8])  # 8: as many as channels
@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("how", OF_SAMPLES)
def test_constants_that_are_a_number_for_each_sample(how, channels, n):
    t = torch.arange(1.0, 1 + n * channels).view(n, channels, 1, 1)
    assert_dense(Around(lambda y: OF_SAMPLES[how](y, t)).eval(), torch.randn(n, 3, *SIZE))
