"""The masked contract's own measure and oracle: neither may be kinder than docs/contracts.md."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbnet.engine import compare, masked_oracle, plane_masks
from sbnet.engine.oracle import Agreement
from support.runs import run_of


@pytest.mark.parametrize(
    ("error", "torchs", "ulp", "holds"),
    [
        (2.0, 1.0, 0.0, True), (2.1, 1.0, 0.0, False), (2.9, 1.0, 1.0, True), (3.1, 1.0, 1.0, False),
        (0.0, 0.0, 0.0, True), (1e-9, 0.0, 0.0, False),
        (float("nan"), 1.0, 1.0, False), (float("inf"), 1.0, 1.0, False),
    ],
)  # fmt: skip
def test_the_bound_of_the_contract(error, torchs, ulp, holds):
    assert Agreement(error, torchs, ulp, error).holds is holds


def test_the_contract_measures_what_it_says():
    """A network whose result is its input: errors are known."""
    net = nn.Conv2d(1, 1, 1, bias=False)
    net.weight.data.fill_(1)
    x = torch.full((1, 1, 4, 4), 2.0)
    wrong = torch.zeros_like(x)
    wrong[0, 0, 0, 0], wrong[0, 0, 1, 1] = 3.0, -4.0
    found = compare(x + wrong, net, x, plane_masks(torch.ones(1, 4, 4), [(4, 4, 2)]))
    assert found.error == pytest.approx((25 / 16) ** 0.5)
    assert found.largest == 4.0
    assert found.torch_error == 0.0
    assert found.ulp == pytest.approx(torch.finfo(torch.float32).eps * 2)


@pytest.mark.parametrize("block", [1, 3, (2, 5), 64])
@pytest.mark.parametrize("size", [(12, 10), (7, 11), (23, 5)])
def test_the_pixels_of_a_plane(size, block):
    """Blocks that hold a set pixel of the mask brought to the plane, cut off at its border."""
    mask = torch.rand(2, 23, 11) < 0.02
    on_plane = F.adaptive_max_pool2d(mask.float()[:, None], size)[:, 0] > 0
    bh, bw = (block, block) if isinstance(block, int) else block
    want = torch.zeros(2, 1, *size, dtype=torch.bool)
    for n, y, x in on_plane.nonzero().tolist():
        want[n, 0, y // bh * bh : y // bh * bh + bh, x // bw * bw : x // bw * bw + bw] = True
    found = plane_masks(mask, [(*size, block)])
    assert list(found) == [size]
    assert torch.equal(found[size], want)


class InPlace(nn.Module):
    """Goes on with what an op in place wrote, not with what it returned."""

    def forward(self, x):
        y = x * 1.0
        y.add_(1)
        return F.avg_pool2d(y, 3, 1, 1)


def test_the_oracle_masks_what_ops_in_place_wrote():
    x, mask = torch.randn(1, 2, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., :4, :4] = True
    got = masked_oracle(InPlace(), x, {(8, 8): mask})
    want = F.avg_pool2d((x + 1) * mask, 3, 1, 1) * mask
    torch.testing.assert_close(got, want)


def test_one_activation_module_that_is_used_twice():
    relu = nn.ReLU()
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), relu, nn.Conv2d(4, 4, 3, padding=1), relu).eval()
    run = run_of(net, (16, 24), 8)
    x, mask = torch.randn(1, 3, 16, 24), torch.rand(1, 16, 24) < 0.05
    y = run(x, mask)
    assert bool((y >= 0).all())
    assert compare(y, net, x, run.active[0]).holds
