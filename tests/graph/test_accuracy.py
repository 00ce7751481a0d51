"""What is measured of a run: `sbnet.accuracy`, `sbnet.tune` and `run.profile`, of every form that a call has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sbnet
from sbnet.graph.blocks import tuning_key
from support.networks import UNet, lively

SIZE = (48, 64)


class Stateful(nn.Module):
    """An image and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv2d(11, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.out(torch.relu(self.mix(torch.cat([x, state], 1))))


def rectangle() -> Tensor:
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, 10:22, 20:40] = True
    return mask


def test_the_error_is_that_of_the_masks_pixels_alone():
    net, x, mask = lively(UNet("nearest")), torch.randn(2, 1, 3, *SIZE), rectangle()
    run = sbnet.sparsify(net, x[0], block=4)
    (row,) = sbnet.accuracy(run, net, x, [mask, mask])
    with torch.no_grad():
        dense, inside = [net(frame) for frame in x], mask[:, None].expand(1, net(x[0]).shape[1], *SIZE)
    wrong = sum(
        float((run(frame, mask) - want)[inside].double().square().sum()) for frame, want in zip(x, dense, strict=True)
    )
    right = sum(float(want[inside].double().square().sum()) for want in dense)
    assert row.error == pytest.approx((wrong / right) ** 0.5, rel=1e-6)
    assert 0.01 < row.error < 1
    assert row.density == pytest.approx(run.density)
    assert row.ms > 0


def test_margins_bring_the_error_down():
    net, x, mask = lively(UNet("nearest")), torch.randn(1, 3, *SIZE), rectangle()
    run = sbnet.sparsify(net, x, block=4)
    errors = [row.error for row in sbnet.accuracy(run, net, [x], [mask], margin=[0, 4, 64])]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-5  # every pixel
    (one,) = sbnet.accuracy(run, net, [x], [mask], margin=4)
    assert one.error == errors[1]


def test_outputs_of_submodules_are_measured():
    """Of a run with `out`, the network's own result is another thing."""
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    run, plain = sbnet.sparsify(net, x, block=8, out=("down.0", "head")), sbnet.sparsify(net, x, block=8)
    (row,) = sbnet.accuracy(run, net, [x], [rectangle()])
    (whole,) = sbnet.accuracy(plain, net, [x], [rectangle()])
    assert row.error > 0
    (full,) = sbnet.accuracy(run, net, [x], [torch.ones(1, *SIZE)])
    assert full.error < 1e-5 < whole.error
    assert not net.training


def test_networks_of_several_inputs_are_measured():
    net, inputs, mask = lively(Stateful()), (torch.randn(1, 3, *SIZE), torch.randn(1, 8, *SIZE)), rectangle()
    run = sbnet.sparsify(net, inputs, block=8)
    (row,) = sbnet.accuracy(run, net, [inputs], [mask])
    with torch.no_grad():
        want = net(*inputs)
    inside = mask[:, None].expand_as(want)
    error = float((run(*inputs, mask) - want)[inside].norm() / want[inside].norm())
    assert row.error == pytest.approx(error, rel=1e-4)
    (key,) = (found := sbnet.tune(run, [inputs], [mask], blocks=(4,), rounds=1))["entries"]
    assert key == tuning_key(inputs[0].device)
    assert found["entries"][key]["dtype"] == "float32"
    for measure in (lambda: sbnet.accuracy(run, net, inputs[:1], [mask]), lambda: sbnet.tune(run, inputs[:1], [mask])):
        with pytest.raises(ValueError, match="frames: expected 2 inputs each, got 1"):
            measure()


def test_a_run_that_makes_its_masks_is_measured():
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x, block=4, mask_source=lambda frame: rectangle())
    given = sbnet.sparsify(net, x, block=4)
    assert sbnet.accuracy(run, net, [x], [rectangle()])[0].error == pytest.approx(
        sbnet.accuracy(given, net, [x], [rectangle()])[0].error
    )
    nodes = run.plan.graph.nodes
    assert len(run.profile(x, calls=1)) == len(run.profile(x, rectangle(), calls=1)) == len(nodes)
    with pytest.raises(ValueError, match="profile: expected 1 inputs and a mask, got 0 arguments"):
        run.profile()
    with pytest.raises(ValueError, match="profile: expected 1 inputs and a mask, got 1 arguments"):
        given.profile(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rounds": 0}, "rounds: expected at least 1, got 0"), ({"blocks": (8, 0)}, "blocks: expected at least 1, got 0")],
)
def test_what_cannot_be_measured_is_said_in_a_line(options, message):
    net, x = lively(UNet("nearest")), torch.randn(1, 3, *SIZE)
    with pytest.raises(ValueError, match=f"^sbnet: tune: {message}$"):
        sbnet.tune(sbnet.sparsify(net, x), [x], [rectangle()], **options)
