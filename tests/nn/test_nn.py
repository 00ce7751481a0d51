"""sbnet.nn: layers and residual blocks against PyTorch's dense ones, and against the masked contract."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet import BlockGrid
from sbnet.engine import compare, masked_oracle, plane_masks
from sbnet.nn import (
    SparseAvgPool2d,
    SparseBasicBlock,
    SparseBatchNorm2d,
    SparseBottleneck,
    SparseConv2d,
    SparseMaxPool2d,
    fold_batch_norm,
)
from support.helpers import FLOATS, assert_as_accurate_as_torch, assert_bitwise, lively, random_active

SIZE, BLOCK, OUT_BLOCK = (37, 53), 8, 4


def blocks(**options) -> dict[str, nn.Module]:
    return {
        "basic": SparseBasicBlock(16, 16, **options),
        "basic, stride 2": SparseBasicBlock(16, 24, 2, **options),
        "bottleneck": SparseBottleneck(32, 8, **options),
        "bottleneck, wider": SparseBottleneck(16, 8, **options),
        "bottleneck, stride 2": SparseBottleneck(16, 8, 2, **options),
    }


def actives(mask: torch.Tensor, stride: int) -> tuple[list[sbnet.ActiveBlocks], dict]:
    """Active blocks of the input and the output plane, and the same as pixel masks by plain PyTorch."""
    planes = [(*SIZE, BLOCK)]
    if stride == 2:
        planes.append(((SIZE[0] + 1) // 2, (SIZE[1] + 1) // 2, OUT_BLOCK))
    found = [
        sbnet.reduce_mask(F.adaptive_max_pool2d(mask.float()[:, None], (h, w)), BlockGrid.cover((h, w), block))
        for h, w, block in planes
    ]
    return found, plane_masks(mask, planes)


@pytest.mark.parametrize("preactivation", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("folded", [False, True], ids=["as written", "folded"])
@pytest.mark.parametrize("name", blocks())
def test_residual_blocks_keep_the_masked_contract(name, folded, preactivation, device):
    block = lively(blocks(preactivation=preactivation)[name], device)
    ours = fold_batch_norm(block) if folded else block
    stride = 2 if "stride" in name else 1
    for density in (0.004, 1.0, 0.0):
        mask = torch.rand(2, *SIZE, device=device) < density
        x = torch.randn(2, block.conv1.in_channels, *SIZE, device=device)
        active, masks = actives(mask, stride)
        with torch.no_grad():
            y = ours(x, *active)
        agreement = compare(y, block, x, masks)
        assert agreement.holds, (density, agreement)
        size = tuple(y.shape[2:])
        assert not y[~masks[size].expand_as(y)].any()


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("preactivation", [False, True], ids=["post", "pre"])
def test_residual_blocks_in_half_precision(preactivation, dtype, device):
    block = lively(SparseBottleneck(32, 8, preactivation=preactivation), device, dtype)
    x = torch.randn(1, 32, *SIZE, device=device).to(dtype)
    active, masks = actives(torch.rand(1, *SIZE, device=device) < 0.01, 1)
    with torch.no_grad():
        agreement = compare(fold_batch_norm(block)(x, *active), block, x, masks)
    assert agreement.holds, agreement


@pytest.mark.parametrize("preactivation", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("name", blocks())
def test_a_full_mask_is_the_dense_block(name, preactivation, device):
    """The borders too: beyond the image every convolution reads zeros, not normalised zeros."""
    block = lively(blocks(preactivation=preactivation)[name], device)
    x = torch.randn(1, block.conv1.in_channels, *SIZE, device=device)
    active, _ = actives(torch.ones(1, *SIZE, dtype=torch.bool, device=device), 2 if "stride" in name else 1)
    double = copy.deepcopy(block).double()
    with torch.no_grad():
        assert_as_accurate_as_torch(fold_batch_norm(block)(x, *active), block(x), double(x.double()))


@pytest.mark.parametrize("kind", [SparseBasicBlock, SparseBottleneck])
@pytest.mark.parametrize("preactivation", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("folded", [False, True], ids=["as written", "folded"])
def test_the_stacked_form_is_the_dense_block_on_active_pixels_and_x_elsewhere(kind, preactivation, folded, device):
    channels = 16
    block = lively(kind(channels, channels // kind.expansion, preactivation=preactivation, stacked=True), device)
    ours = fold_batch_norm(block) if folded else block
    x = torch.randn(2, channels, *SIZE, device=device)
    double = copy.deepcopy(block).double()
    for density in (0.3, 1.0, 0.0):
        active = random_active(BlockGrid.cover(SIZE, BLOCK), 2, density, device)
        inside = active.pixel_mask(SIZE)
        with torch.no_grad():
            y = ours(x, active)
            assert_bitwise(ours(x, active.trim()), y)
            want, exact = (torch.where(inside, net(t), t) for net, t in ((block, x), (double, x.double())))
        assert_as_accurate_as_torch(y, want, exact)
        assert torch.equal(y[~inside.expand_as(y)], x[~inside.expand_as(y)])


@pytest.mark.parametrize("kind", [SparseBasicBlock, SparseBottleneck])
@pytest.mark.parametrize("preactivation", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize(("inputs", "stride"), [(16, 2), (8, 1), (8, 2)])
def test_the_stacked_form_with_a_projection(kind, preactivation, inputs, stride, device):
    """The dense block on active pixels, the projection of the whole x elsewhere."""
    block = lively(kind(inputs, 16 // kind.expansion, stride, preactivation=preactivation, stacked=True), device)
    x = torch.randn(2, inputs, *SIZE, device=device)
    double = copy.deepcopy(block).double()
    size = tuple(-(-n // stride) for n in SIZE)

    def shortcut(net, t):
        return net.downsample(F.relu(net.bn1(t)) if preactivation else t)

    for density in (0.3, 1.0, 0.0):
        active = random_active(BlockGrid.cover(size, BLOCK), 2, density, device)
        inside = active.pixel_mask(size)
        with torch.no_grad():
            y = block(x, None, active)
            want, exact = (
                torch.where(inside, net(t), shortcut(net, t)) for net, t in ((block, x), (double, x.double()))
            )
        assert_as_accurate_as_torch(y, want, exact)


@pytest.mark.parametrize("preactivation", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize(("inputs", "stride"), [(8, 1), (4, 2)])
def test_the_stacked_form_in_training(preactivation, inputs, stride, device):
    """Batches are the gathered blocks with their halos, those past the count left out: as on a trimmed stack in plain
    PyTorch, with its gradients."""
    block = lively(SparseBasicBlock(inputs, 8, stride, preactivation=preactivation, stacked=True), device).train()
    plain = copy.deepcopy(block)
    size = tuple(-(-n // stride) for n in SIZE)
    active = random_active(BlockGrid.cover(size, BLOCK), 2, 0.3, device)
    x = torch.randn(2, inputs, *SIZE, device=device, requires_grad=True)
    y = block(x, active, active)

    middle = active.grid.conv_input(3, 1, 1)
    first = middle.conv_input(3, stride, 1)
    images, count = torch.ones(2, 1, *SIZE, device=device), int(active.count)

    def cut(t, grid):
        """Blocks by slices of the padded plane."""
        rows = []
        for n, i, j in active.indices[:count].tolist():
            top, left = (grid.boffset[d] + grid.bstride[d] * (i, j)[d] for d in range(2))
            padded = F.pad(t[n], (8, 32, 8, 32))
            rows.append(padded[:, top + 8 : top + 8 + grid.bsize[0], left + 8 : left + 8 + grid.bsize[1]])
        return torch.stack(rows)

    def normed(norm, t):
        return F.batch_norm(t, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)

    z = cut(x, first)
    if preactivation:
        z = F.relu(normed(plain.bn1, z)) * cut(images, first)
    z = F.conv2d(z, plain.conv1.weight, None, stride)
    z = F.relu(normed(plain.bn2 if preactivation else plain.bn1, z))
    z = F.conv2d(z * cut(torch.ones(2, 1, *size, device=device), middle), plain.conv2.weight)
    z = z if preactivation else normed(plain.bn2, z)
    base = x
    if plain.downsample is not None:
        base = plain.downsample(F.relu(normed(plain.bn1, x)) if preactivation else x)
    planes = []
    for n in range(2):
        plane = base[n]
        for row, (m, i, j) in enumerate(active.indices[:count].tolist()):
            if m != n:
                continue
            inside = torch.zeros(size, dtype=torch.bool, device=device)
            inside[BLOCK * i : BLOCK * i + BLOCK, BLOCK * j : BLOCK * j + BLOCK] = True
            block_plane = F.pad(z[row], (BLOCK * j, 64, BLOCK * i, 64))[:, : size[0], : size[1]]
            summed = base[n] + block_plane
            plane = torch.where(inside, summed if preactivation else F.relu(summed), plane)
        planes.append(plane)
    want = torch.stack(planes)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    names, ours = zip(*block.named_parameters(), strict=True)
    theirs = [p for _, p in plain.named_parameters()]
    dy = torch.randn_like(y)
    grads = [torch.autograd.grad(t, (x, *ps), dy, allow_unused=True) for t, ps in ((y, ours), (want, theirs))]
    for name, a, b in zip(("x", *names), *grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "layer",
    [
        SparseMaxPool2d(3, 2, 1),
        SparseMaxPool2d((2, 3), (1, 2), (1, 0), (2, 1)),
        SparseMaxPool2d(2, ceil_mode=True),
        SparseAvgPool2d(3, 2, 1),
        SparseAvgPool2d((3, 2), (2, 1), (1, 0), count_include_pad=False),
        SparseAvgPool2d(2, 3, 1, ceil_mode=True, divisor_override=3),
        SparseConv2d(8, 12, 3, 2, 1),
        SparseConv2d(8, 12, (3, 2), (1, 3), (2, 0), (2, 1), groups=4, bias=False),
    ],
    ids=str,
)
def test_layers_are_pytorchs_on_active_blocks(layer, device):
    layer = layer.to(device)
    x = torch.randn(2, 8, *SIZE, device=device)
    want = layer(x, None)
    active = random_active(BlockGrid.cover(want.shape[2:], BLOCK), 2, 0.4, device)
    inside = active.pixel_mask(want.shape[2:])
    torch.testing.assert_close(layer(x, active), torch.where(inside, want, 0.0))


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_what_follows_a_convolution(activation, device):
    """The residual, the activation and its parameter reach the op, as they reach the dense form."""
    layer = SparseConv2d(8, 12, 3, padding=1, device=device)
    x, residual = (torch.randn(2, c, *SIZE, device=device) for c in (8, 12))
    options = {"activation": activation, "negative_slope": 0.3, "residual": residual}
    active = random_active(BlockGrid.cover(SIZE, BLOCK), 2, 0.4, device)
    y = F.conv2d(x, layer.weight, layer.bias, padding=1) + residual
    want = F.relu(y) if activation == "relu" else F.leaky_relu(y, 0.3)
    torch.testing.assert_close(layer(x, **options), want)
    torch.testing.assert_close(layer(x, active, **options), torch.where(active.pixel_mask(SIZE), want, 0.0))


class Normalised(nn.Module):
    folds = (("conv", "norm"),)

    def __init__(self, bias: bool, affine: bool) -> None:
        super().__init__()
        self.conv, self.norm = SparseConv2d(5, 8, 3, bias=bias), SparseBatchNorm2d(8, eps=0.3, affine=affine)

    def forward(self, x):
        return self.norm(self.conv(x, None), None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_folding_takes_bias_and_epsilon_along(bias, affine):
    net = Normalised(bias, affine)
    net.norm.running_mean.uniform_(-1, 1)
    net.norm.running_var.uniform_(0.1, 1)
    if affine:
        nn.init.normal_(net.norm.weight)
        nn.init.normal_(net.norm.bias)
    folded = fold_batch_norm(net)
    assert isinstance(folded.norm, nn.Identity)
    x = torch.randn(1, 5, 9, 9)
    torch.testing.assert_close(folded(x), net.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_takes_its_statistics_from_active_pixels(momentum, affine, device):
    """Against PyTorch's on the active pixels alone, laid out as one long plane."""
    norm = SparseBatchNorm2d(6, momentum=momentum, affine=affine, device=device)
    dense = nn.BatchNorm2d(6, momentum=momentum, affine=affine, device=device)
    if affine:
        for m in (norm, dense):
            nn.init.uniform_(m.weight, generator=torch.Generator(device).manual_seed(1))
            nn.init.uniform_(m.bias, generator=torch.Generator(device).manual_seed(2))
    for _ in range(3):
        active = random_active(BlockGrid.cover(SIZE, BLOCK), 2, 0.5, device)
        inside = active.pixel_mask(SIZE).expand(2, 6, *SIZE)
        x = 3 * torch.randn(2, 6, *SIZE, device=device) + 5
        poisoned = torch.where(inside, x, float("nan")).requires_grad_()
        plane = x.detach().movedim(1, 0)[inside.movedim(1, 0)].view(1, 6, 1, -1).requires_grad_()
        y, want = norm(poisoned, active), dense(plane)
        torch.testing.assert_close(y.movedim(1, 0)[inside.movedim(1, 0)].view_as(want), want, rtol=1e-4, atol=1e-5)
        assert not y[~inside].any()
        pull = torch.randn_like(want)
        (want * pull).sum().backward()
        spread = torch.zeros_like(x).movedim(1, 0)
        spread[inside.movedim(1, 0)] = pull.flatten()
        (y * spread.movedim(0, 1)).sum().backward()
        got = poisoned.grad.movedim(1, 0)[inside.movedim(1, 0)].view_as(plane)
        torch.testing.assert_close(got, plane.grad, rtol=1e-3, atol=1e-4)
        assert not poisoned.grad[~inside].any()
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_of_nothing_leaves_the_running_statistics(momentum, device):
    """A batch without an active pixel changes nothing: neither what was, nor the mean over all that come (None)."""
    norm, other = (SparseBatchNorm2d(4, momentum=momentum, device=device) for _ in range(2))
    nothing = random_active(BlockGrid.cover(SIZE, 8), 1, 0.0, device)
    y = norm(torch.randn(1, 4, *SIZE, device=device), nothing)
    assert not y.any()
    assert torch.equal(norm.running_mean, torch.zeros(4, device=device))
    assert torch.equal(norm.running_var, torch.ones(4, device=device))
    active = random_active(BlockGrid.cover(SIZE, 8), 1, 0.5, device)
    for _ in range(2):
        x = torch.randn(1, 4, *SIZE, device=device) + 3
        for m, lists in ((norm, active), (norm, nothing), (other, active)):
            m(x, lists)
    for name, value in other.state_dict().items():
        assert torch.equal(norm.state_dict()[name], value), name


def test_the_oracle_masks_after_every_op():
    """Hand case: a normalisation's shift must not reach the next convolution from outside the mask."""
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 1, 3, padding=1, bias=False)).eval()
    net[0].bias.data.fill_(1)
    net[1].weight.data.fill_(1)
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[0, 0, 0] = True
    y = masked_oracle(net, torch.zeros(1, 1, 4, 4), plane_masks(mask, [(4, 4, 2)]))
    assert y[0, 0].tolist() == [[4, 4, 0, 0], [4, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(ValueError, match="expected masks of each plane, \\(4, 4\\) too"):
        masked_oracle(net, torch.zeros(1, 1, 4, 4), plane_masks(mask, [(2, 2, 2)]))


def test_plane_masks_of_uneven_planes():
    """Blocks of 2x3 on a 5x7 plane: the pixel in the corner belongs to a block that the edge clips."""
    mask = torch.zeros(1, 10, 14, dtype=torch.bool)
    mask[0, 9, 13] = True
    found = plane_masks(mask, [(5, 7, (2, 3))])[5, 7][0, 0]
    assert found.nonzero().tolist() == [[4, 6]]


@pytest.mark.parametrize("preactivation", [False, True])
def test_gradients_reach_every_parameter(preactivation, device):
    """Training: the gradient of the masked block is that of PyTorch's, masked after every op."""
    block = SparseBottleneck(8, 4, 2, preactivation=preactivation).to(device)
    x = torch.randn(2, 8, *SIZE, device=device)
    active, masks = actives(torch.rand(2, *SIZE, device=device) < 0.01, 2)
    block(x, *active).square().sum().backward()
    wanted = copy.deepcopy(block).double()
    wanted.zero_grad()
    inside = {size: m.double() for size, m in masks.items()}
    _masked_by_hand(wanted, x.double(), inside, active).square().sum().backward()
    for (name, p), want in zip(block.named_parameters(), wanted.parameters(), strict=True):
        assert want.grad.abs().sum() > 0, name
        error = (p.grad - want.grad).norm() / want.grad.norm()
        assert error < 1e-4, (name, float(error))


def _masked_by_hand(block, x, inside, active):
    """The block by dense convolutions, a mask after each op and normalisations of the active pixels."""
    small = min(inside)

    def keep(t):
        return t * inside[tuple(t.shape[2:])]

    def norm(m, t):
        return m(t, active[1] if tuple(t.shape[2:]) == small else active[0])

    y = F.relu(norm(block.bn1, x)) if block.preactivation else x
    shortcut = keep(block.downsample[0](y))
    if not block.preactivation:
        shortcut = norm(block.downsample[1], shortcut)
    for k in range(1, 4):
        y = keep(getattr(block, f"conv{k}")(y))
        if not block.preactivation:
            y = norm(getattr(block, f"bn{k}"), y)
        elif k < 3:
            y = norm(getattr(block, f"bn{k + 1}"), y)
        y = F.relu(y) if k < 3 else y
    return y + shortcut if block.preactivation else F.relu(y + shortcut)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="SparseConv2d: padding: expected .*, got 'same'"):
        SparseConv2d(8, 8, 3, padding="same")
    with pytest.raises(ValueError, match="return_indices"):
        SparseMaxPool2d(2, return_indices=True)
    active = random_active(BlockGrid.cover(SIZE, 8))
    with pytest.raises(ValueError, match="out_active: expected .*, got None"):
        SparseBasicBlock(8, 8, 2)(torch.zeros(1, 8, *SIZE), active)
    block = SparseBasicBlock(8, 8)
    block.bn1 = SparseBatchNorm2d(8, track_running_stats=False)
    with pytest.raises(ValueError, match="without running statistics"):
        fold_batch_norm(block)
