"""`with sbnet.masked(mask)`: results and gradients of eager modules against the masked contract, written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet.graph.oracle import PlaneMasks, masked_oracle
from support.helpers import assert_as_accurate_as_torch

SIZE, BLOCK = (19, 26), 4


def _nothing(t: Tensor) -> Tensor:
    return t


class Small(nn.Module):
    """Strides, a shortcut, pools, a normalisation, a transposed convolution, an op in place, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.short, self.up = nn.Conv2d(6, 8, 1, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, after=_nothing) -> tuple[Tensor, Tensor]:
        """`after`: what the contract does after every op with a spatial result; nothing inside `sbnet.masked`."""
        y = after(self.first(x))
        y = F.relu(y, inplace=True) if after is _nothing else after(F.relu(y))
        z = after(self.norm(after(self.down(y))))
        z = after(F.relu(after(z + after(self.short(y)))))
        z = after(F.max_pool2d(z, 3, 1, 1))
        z = after(F.avg_pool2d(z, 3, 1, 1))
        return after(torch.sigmoid(after(self.up(z)))), self.head(z.mean((2, 3)))


def network(device: str) -> Small:
    torch.manual_seed(0)
    return Small().eval().to(device)


def masks(device: str):
    for density in (0.01, 0.0, 1.0):
        yield (torch.rand(2, *SIZE) < density).to(device)


def weighted(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that no gradient of is the same everywhere."""
    return sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)).sum() for y in outputs)


def by_the_contract(net: Small, x: Tensor, mask: Tensor) -> list[Tensor]:
    """Outputs, then gradients of x and of the parameters; every mask by torch.where."""
    planes = PlaneMasks(mask, BLOCK)
    x = x.detach().clone().requires_grad_()
    outputs = net(x, lambda t: torch.where(planes(tuple(t.shape[2:])), t, 0.0))
    return [*outputs, *torch.autograd.grad(weighted(outputs), [x, *net.parameters()])]


def test_results_and_gradients_are_the_contracts(device):
    net = network(device)
    exact = network(device).double()
    for mask in masks(device):
        x = torch.randn(2, 3, *SIZE, device=device, requires_grad=True)
        with sbnet.masked(mask, block=BLOCK):
            outputs = net(x)
            loss = weighted(outputs)
        found = [*outputs, *torch.autograd.grad(loss, [x, *net.parameters()])]
        own, right = by_the_contract(net, x, mask), by_the_contract(exact, x.double(), mask)
        for part, torchs, exacts in zip(found, own, right, strict=True):
            assert_as_accurate_as_torch(part, torchs, exacts)


def test_the_oracle_says_the_same(device):
    """The contract written out here is the one that `masked_oracle` reads off any network."""
    net = network(device)
    for mask in masks(device):
        x = torch.randn(2, 3, *SIZE, device=device)
        want = masked_oracle(net, [x], PlaneMasks(mask, BLOCK))
        for a, b in zip(by_the_contract(net, x, mask), want, strict=False):
            torch.testing.assert_close(a.detach(), b)


def test_backward_inside_is_backward_outside(device):
    """Gradients are of whole tensors: the mode masks none of what backward computes."""
    net, mask = network(device), torch.rand(2, *SIZE, device=device) < 0.01
    x = torch.randn(2, 3, *SIZE, device=device, requires_grad=True)
    with sbnet.masked(mask, block=BLOCK):
        weighted(net(x)).backward()
    inside, x.grad = x.grad, None
    with sbnet.masked(mask, block=BLOCK):
        loss = weighted(net(x))
    loss.backward()
    assert torch.equal(x.grad, inside)
    with sbnet.masked(mask, block=BLOCK):
        (again,) = torch.autograd.grad(weighted(net(x)), [x])
    assert torch.equal(again, inside)


def test_a_margin_grows_the_mask(device):
    net, mask = network(device), torch.zeros(1, *SIZE, dtype=torch.bool, device=device)
    mask[0, 9, 13] = True
    grown = torch.zeros_like(mask)
    grown[0, 5:14, 9:18] = True
    x = torch.randn(1, 3, *SIZE, device=device)
    with torch.no_grad(), sbnet.masked(mask, block=BLOCK, margin=4):
        got = net(x)
    with torch.no_grad(), sbnet.masked(grown, block=BLOCK):
        want = net(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_one_inside_another_is_refused():
    """Which of two masks would a plane be of?"""
    mask = torch.ones(1, *SIZE)
    outer = sbnet.masked(mask)
    with outer:
        for inner in (outer, sbnet.masked(mask)):
            with pytest.raises(RuntimeError, match="sbnet: masked: contexts cannot be nested"), inner:
                pass
        assert outer.active(SIZE).capacity  # as before
    with sbnet.masked(mask), torch.no_grad():
        pass


def test_an_exception_leaves_nothing_behind():
    net, x, mask = network("cpu"), torch.randn(1, 3, *SIZE), torch.zeros(1, *SIZE)
    with torch.no_grad():
        want = net(x)
        with pytest.raises(RuntimeError), sbnet.masked(mask, block=BLOCK):
            net(x[:, :2])
        assert all(torch.equal(a, b) for a, b in zip(net(x), want, strict=True))  # dense
        with sbnet.masked(mask, block=BLOCK):
            assert not net(x)[0].any()


def test_bad_masks_are_named():
    with pytest.raises(ValueError, match="masked: mask"):
        sbnet.masked(torch.ones(3))
    with pytest.raises(ValueError, match="masked: block"):
        sbnet.masked(torch.ones(1, *SIZE), block=(4, 4, 4))


@pytest.mark.parametrize("size", [(SIZE[0] // 2, SIZE[1] // 2), (SIZE[0], SIZE[1] + 1), (SIZE[1], SIZE[0])])
def test_masks_of_another_plane_are_not_passed_over(size):
    net, mask = network("cpu"), torch.ones(1, *size)
    message = rf"masked: mask: expected \[1, {SIZE[0]}, {SIZE[1]}\].*, got \[1, {size[0]}, {size[1]}\]"
    with torch.no_grad(), pytest.raises(ValueError, match=message), sbnet.masked(mask, block=BLOCK):
        net(torch.randn(1, 3, *SIZE))
    eight = torch.nn.Conv2d(3, 1, 3)  # whose weights [1,3,3,3] look like a feature map
    with torch.no_grad(), sbnet.masked(torch.ones(1, *SIZE), block=BLOCK):
        assert eight.weight.detach().sum()
        net(torch.randn(1, 3, *SIZE))


def test_masks_of_another_batch_are_not_passed_over():
    """Without a word the network would run dense, and be trained so."""
    net, mask = network("cpu"), torch.ones(1, *SIZE)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="masked: mask: expected one for each of 2 samples, got 1"),
        sbnet.masked(mask, block=BLOCK),
    ):
        net(torch.randn(2, 3, *SIZE))
    crops = torch.nn.Conv2d(3, 4, 3)
    with torch.no_grad(), sbnet.masked(mask, block=BLOCK):  # heads have batches of their own
        net(torch.randn(1, 3, *SIZE))
        crops(torch.randn(5, 3, 7, 7))


def test_every_overridable_function_is_looked_up():
    """`y ** 2` and others wrap builtins that tell no signature: they once raised inside of `sbnet.masked`."""
    from sbnet.engine.eager_writes import _looked_up

    for func in torch.overrides.get_testing_overrides():
        name, _ = _looked_up(func)
        assert isinstance(name, str), func
    mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    mask[:, :4, :4] = True
    net = nn.Conv2d(1, 1, 3, padding=1)
    with sbnet.masked(mask, block=4):
        y = net(torch.rand(1, 1, 16, 16))
        z = ((y**2 + 2 - y) / 3) ** 0.5 % 1 // 1
    assert z.shape == y.shape
