"""Runs against the masked contract in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

import sbnet
from sbnet.benchmarks.harness import dense
from sbnet.engine import compare, masked_oracle, plane_masks
from sbnet.models import resnet18
from support.runs import run_of

SIZE = (37, 53)
GRID = sbnet.BlockGrid.cover(SIZE, 8)


def conv(inputs: int, outputs: int, kernel: int = 3, **options) -> nn.Conv2d:
    padding = options.get("dilation", 1) * (kernel - 1) // 2
    return nn.Conv2d(inputs, outputs, kernel, padding=padding, **options)


def networks() -> dict[str, nn.Sequential]:
    return {
        "chain": nn.Sequential(conv(3, 16), nn.ReLU(inplace=True), conv(16, 16), nn.ReLU(), conv(16, 5)),
        "mixed": nn.Sequential(
            nn.Sequential(conv(3, 8, 5, bias=False), nn.SiLU()),
            conv(8, 8, 1),
            conv(8, 12, 3, dilation=2, groups=4),
            nn.LeakyReLU(0.2),
            conv(12, 8, 1),
            nn.Hardswish(),
        ),
        "one layer": nn.Sequential(conv(3, 4)),
    }


def masks(batch: int, device: str):
    """Random masks, and all or nothing between them: a stale output or buffer would show."""
    for density in (0.002, 1.0, 0.0, 0.002, 0.01, 0.002):
        yield (torch.rand(batch, *SIZE) < density).to(device)


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_call_keeps_the_masked_contract(name, dtype, batch, device):
    net = networks()[name].eval()
    runner = run_of(net, SIZE, 8, batch=batch, device=device, dtype=dtype)
    for mask in masks(batch, device):
        x = torch.randn(batch, 3, *SIZE, device=device).to(dtype)
        y = runner(x, mask)
        active = sbnet.reduce_mask(mask, GRID)
        assert torch.equal(runner.active[0].block_map, active.block_map)
        agreement = compare(y, net, x, active)
        assert agreement.holds, agreement
        outside = ~active.pixel_mask(SIZE).expand_as(y)
        assert not y[outside].any()


def test_the_result_is_the_same_bits_each_time(device):
    net = networks()["chain"].eval()
    runner = run_of(net, SIZE, 8, device=device)
    x, mask = torch.randn(1, 3, *SIZE, device=device), torch.rand(1, *SIZE, device=device) < 0.01
    first = runner(x, mask).clone()
    runner(x, ~mask)
    assert torch.equal(runner(x, mask), first)


def test_runners_record_no_gradients(device):
    net = networks()["chain"].eval()
    masked = run_of(net, SIZE, 8, device=device)
    x = torch.randn(1, 3, *SIZE, device=device)
    mask = torch.rand(1, *SIZE, device=device) < 0.01
    want = masked(x, mask).clone()
    got = masked(x.requires_grad_(), mask)
    assert not got.requires_grad
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_runner_on_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    net = networks()["chain"].eval()
    masked = run_of(net, SIZE, 8, device="cuda:1")
    whole = dense.cudnn(net, torch.zeros(1, 3, *SIZE, device="cuda:1"))
    for mask in masks(1, "cuda:1"):
        x = torch.randn(1, 3, *SIZE, device="cuda:1")
        assert torch.cuda.current_device() == 0
        y, want = masked(x, mask), whole.run(x)
        assert compare(y, net, x, sbnet.reduce_mask(mask, GRID)).holds
        torch.testing.assert_close(want, net.to("cuda:1")(x), rtol=1e-4, atol=1e-5)


def test_mask_source(device):
    net = networks()["chain"].eval()
    runner = run_of(net, SIZE, 8, device=device, mask_source=lambda x: x[:, 0] > 3)
    x = torch.randn(1, 3, *SIZE, device=device)
    y = runner(x)
    assert compare(y, net, x, sbnet.reduce_mask(x[:, 0] > 3, GRID)).holds
    with pytest.raises(ValueError, match="mask_source"):
        runner(x, x[:, 0] > 3)


@pytest.mark.gpu
def test_the_dense_form_on_cuda_is_the_network():
    norm = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU(), nn.Identity(), conv(4, 4)).eval()
    for net in (*networks().values(), norm):
        x = torch.randn(1, 3, *SIZE, device="cuda")
        want = copy.deepcopy(net).to("cuda")(x)
        run = dense.cudnn(net, x).run
        for _ in range(2):
            torch.testing.assert_close(run(x), want, rtol=1e-4, atol=1e-5)
        assert not run(x.requires_grad_()).requires_grad


def test_normalisations_are_folded_and_dropout_left_out(device):
    norms = nn.BatchNorm2d(8, eps=0.1), nn.BatchNorm2d(6, affine=False)
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.1, 3)
    nn.init.normal_(norms[0].weight)
    nn.init.normal_(norms[0].bias)
    net = nn.Sequential(
        conv(3, 8), nn.Identity(), norms[0], nn.ReLU(), nn.Dropout(),
        conv(8, 6, bias=False), norms[1], nn.SiLU(), conv(6, 4),
    )  # fmt: skip
    net = net.eval().to(device)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    runner = run_of(net, SIZE, 8, device=device)
    x = torch.randn(1, 3, *SIZE, device=device)
    for density in (0.01, 1.0):
        mask = torch.rand(1, *SIZE, device=device) < density
        assert compare(runner(x, mask), net, x, sbnet.reduce_mask(mask, GRID)).holds
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_bad_calls_are_named():
    runner = run_of(networks()["one layer"], SIZE)
    x, mask = torch.zeros(1, 3, *SIZE), torch.zeros(1, *SIZE, dtype=torch.bool)
    with pytest.raises(ValueError, match="x: .*float64"):
        runner(x.double(), mask)
    with pytest.raises(ValueError, match="mask: .*37, *53"):
        runner(x[:, :, 1:], mask)
    with pytest.raises(ValueError, match="mask: .*36, 53"):
        runner(x, mask[:, 1:])
    with pytest.raises(ValueError, match="mask: .*complex64"):
        runner(x, mask.to(torch.complex64))
    with pytest.raises(ValueError, match="1 inputs and a mask"):
        runner(x)


def test_compare_sees_a_wrong_pixel():
    net = networks()["chain"].eval()
    x = torch.randn(1, 3, *SIZE)
    active = sbnet.reduce_mask(torch.rand(1, *SIZE) < 0.01, sbnet.BlockGrid.cover(SIZE, 8))
    right = masked_oracle(net, x, active)
    assert compare(right, net, x, active).holds
    for wrong in (right + 1e-3, right * float("nan")):
        assert not compare(wrong, net, x, active).holds


def test_what_is_compared_is_the_output():
    """Another shape would broadcast, another dtype be held to the wrong tolerance."""
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), torch.rand(1, 3, 16, 24)
    active = sbnet.reduce_mask(torch.ones(1, 16, 24), sbnet.BlockGrid.cover((16, 24), 8))
    for bad in (torch.zeros(1, 1, 16, 24), torch.zeros(1, 4, 16, 24).half()):
        with pytest.raises(ValueError, match="compare: result: "):
            compare(bad, net, x, active)
    with pytest.raises(TypeError, match="masked_oracle: active: expected .*, got Tensor"):
        masked_oracle(net, x, torch.ones(1, 16, 24))
    with pytest.raises(ValueError, match="plane_masks: mask: shape"):
        plane_masks(torch.ones(16, 24), [(16, 24, 8)])


def test_bad_examples_and_masks_are_named():
    net = resnet18(weights=0).eval()
    for bad in (None, (1, 3, 64, 64), torch.zeros(3, 64, 64), torch.zeros(1, 3, 64, 64).byte()):
        with pytest.raises(ValueError, match="sbnet: capture: example: "):
            net.capture(bad)
    chain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    with pytest.raises(TypeError, match="mask: .*NoneType"):
        sbnet.sparsify(chain, torch.rand(1, 3, 16, 24), mask_source=lambda x: None)(torch.rand(1, 3, 16, 24))
    with pytest.raises(TypeError, match="model: .*NoneType"):
        sbnet.sparsify(None, torch.rand(1, 3, 16, 24))
    with pytest.raises(ValueError, match="activation: expected .*, got 'swish'"):
        sbnet.nn.SparseConv2d(3, 4, 3)(torch.rand(1, 3, 16, 24), activation="swish")
