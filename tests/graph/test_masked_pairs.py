"""Inside `sbnet.masked`, any two maps in any op: what is not made yet of either is made before it is read, and memory
that nobody wrote never shows. The oracle masks by torch.where."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sbnet
from support.helpers import assert_as_accurate_as_torch, unwritten_is_nan

C, SIDE, BLOCK, LAYERS = 4, 16, 4, 10
MASK = torch.zeros(2, SIDE, SIDE)
MASK[0, 4:9, 5:7] = MASK[1, 12:, :3] = 1


class Layers:
    """A network that is written while it runs; `masked` multiplies by the mask, or leaves it to the context."""

    def __init__(self, device: str, dtype: torch.dtype, oracle: bool) -> None:
        g, self.oracle, self.made = torch.Generator().manual_seed(1), oracle, 0
        self.x = torch.randn(2, C, SIDE, SIDE, generator=g)
        self.weights = [torch.randn(C, C, 3, 3, generator=g) * 0.3 for _ in range(LAYERS)]
        self.scales = [torch.rand(C, generator=g) + 0.5 for _ in range(LAYERS)]
        self.shifts = [torch.randn(C, generator=g) for _ in range(LAYERS)]
        self.leaves = [self.x, *self.weights, *self.scales, *self.shifts]
        for t in self.leaves:
            t.data = t.to(device, dtype)
            t.requires_grad_()
        blocks = F.max_pool2d(MASK[:, None], BLOCK).repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
        self.mask = blocks.bool().to(device)

    def masked(self, y: Tensor) -> Tensor:
        return torch.where(self.mask, y, torch.zeros_like(y)) if self.oracle else y

    def conv(self, x: Tensor | None = None) -> Tensor:
        self.made += 1
        return self.masked(F.conv2d(self.x if x is None else x, self.weights[self.made - 1], padding=1))

    def norm(self, x: Tensor | None = None) -> Tensor:
        x = self.conv(x)
        scale, shift = self.scales[self.made - 1], self.shifts[self.made - 1]
        if not self.oracle:
            return F.batch_norm(x, None, None, scale, shift, training=True)
        seen = self.mask.to(x.dtype)
        mean = (x * seen).sum((0, 2, 3), keepdim=True) / seen.sum()
        var = ((x - mean).square() * seen).sum((0, 2, 3), keepdim=True) / seen.sum()
        return self.masked((x - mean) / (var + 1e-5).sqrt() * scale.view(-1, 1, 1) + shift.view(-1, 1, 1))

    def sum(self, inplace: bool = False) -> Tensor:
        a, b = self.norm(), self.norm()
        return self.masked(a.add_(b) if inplace else a + b)


STATES = {
    "input": lambda n: n.x,
    "convolution": lambda n: n.conv(),
    "norm": lambda n: n.norm(),
    "activation": lambda n: n.masked(F.silu(n.norm())),
    "activation in place": lambda n: n.masked(F.relu(n.norm(), inplace=True)),
    "sum": lambda n: n.sum(),
    "sum in place": lambda n: n.sum(inplace=True),
    "activation of a sum": lambda n: n.masked(F.relu(n.sum())),
    "average": lambda n: n.masked(F.avg_pool2d(n.norm(), 3, 1, 1)),
    "maximum": lambda n: n.masked(F.max_pool2d(n.sum(), 3, 1, 1)),
    "product": lambda n: n.masked(n.norm() * n.norm()),
    "half": lambda n: n.masked(torch.cat([n.norm(), n.norm()], 1))[:, 2:6],
}


OPS = {
    "add": lambda n, a, b: n.masked(a + b),
    "add in place": lambda n, a, b: n.masked(a.add_(b)),
    "subtract": lambda n, a, b: n.masked(a - b),
    "add twice": lambda n, a, b: n.masked(n.masked(F.silu(n.masked(a + b))) + a),
    "multiply": lambda n, a, b: n.masked(a * b),
    "join": lambda n, a, b: n.conv(n.masked(torch.cat([a, b], 1))[:, 2:6]),
    "larger": lambda n, a, b: n.masked(torch.maximum(a, b)),
}
ENDS = [lambda n, y: y, lambda n, y: n.conv(y), lambda n, y: n.masked(F.avg_pool2d(y, 3, 1, 1)), lambda n, y: n.norm(y)]


def found(device: str, dtype: torch.dtype, oracle: bool, first: str, second: str, op: str, end: int) -> Tensor:
    """The result and all gradients, side by side."""
    net = Layers(device, dtype, oracle)

    def run() -> Tensor:
        a, b = STATES[first](net), STATES[second](net)
        return ENDS[end](net, OPS[op](net, a, b))

    if oracle:
        y = run()
    else:
        with sbnet.masked(MASK.to(device), block=BLOCK):
            y = run()
    factors = torch.linspace(-1, 1, y.numel(), device=device, dtype=dtype).view(y.shape)
    grads = torch.autograd.grad((y * factors).sum(), net.leaves, allow_unused=True)
    return torch.cat([y.detach().flatten(), *(g.flatten() for g in grads if g is not None)])


NOT_WRITTEN = "input", "activation in place", "activation of a sum"  # it needs its own values for its gradient


@pytest.mark.parametrize("first", STATES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_two_maps(device, op, first):
    for k, second in enumerate(() if op == "add in place" and first in NOT_WRITTEN else STATES):
        case = first, second, op, k % len(ENDS)
        exact, theirs = (found(device, t, True, *case) for t in (torch.float64, torch.float32))
        with unwritten_is_nan():
            got = found(device, torch.float32, False, *case)
        assert_as_accurate_as_torch(got, theirs, exact, ", ".join(map(str, case)))
