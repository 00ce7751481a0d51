"""The residual networks of sbnet.models: against PyTorch's dense network of the same state dict, and the contract."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbnet.engine import compare, masked_oracle, plane_masks
from sbnet.models import RESNETS, SparseResNet, resnet18, resnet34, resnet50, sbnet_resnet
from sbnet.nn import SparseAvgPool2d, SparseBasicBlock, SparseBottleneck, SparseConv2d, SparseMaxPool2d, fold_batch_norm
from support.contract import poison
from support.helpers import assert_as_accurate_as_torch, lively
from support.runs import run_of

SIZE = (75, 106)
SMALL = (4, 8, 12, 16)  # planes


class DenseBlock(nn.Module):
    """A residual block as He et al. drew it, in plain PyTorch."""

    def __init__(self, inputs: int, planes: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = planes * (4 if bottleneck else 1)
        kernels = ((inputs, planes, 1, 1), (planes, planes, 3, stride), (planes, outputs, 1, 1))
        if not bottleneck:
            kernels = ((inputs, planes, 3, stride), (planes, planes, 3, 1))
        self.depth = len(kernels)
        for k, (c, o, size, step) in enumerate(kernels, 1):
            setattr(self, f"conv{k}", nn.Conv2d(c, o, size, step, size // 2, bias=False))
            setattr(self, f"bn{k}", nn.BatchNorm2d(o))
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        for k in range(1, self.depth):
            x = F.relu(getattr(self, f"bn{k}")(getattr(self, f"conv{k}")(x)))
        return F.relu(getattr(self, f"bn{k + 1}")(getattr(self, f"conv{k + 1}")(x)) + shortcut)


class DenseResNet(nn.Module):
    """A ResNet with torchvision's parameter names."""

    def __init__(self, bottleneck: bool, layers=(2, 2, 2, 2), planes=(64, 128, 256, 512), classes=1000):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.maxpool, inputs = nn.MaxPool2d(3, 2, 1), 64
        for stage, (count, width) in enumerate(zip(layers, planes, strict=True), 1):
            made = []
            for k in range(count):
                made.append(DenseBlock(inputs, width, 2 if stage > 1 and not k else 1, bottleneck))
                inputs = width * (4 if bottleneck else 1)
            setattr(self, f"layer{stage}", nn.Sequential(*made))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def networks() -> dict[str, tuple[SparseResNet, nn.Module]]:
    basic, bottleneck = (2, 1, 1, 2), (1, 2, 1, 1)
    return {
        "basic": (SparseResNet(SparseBasicBlock, basic, SMALL, classes=10), DenseResNet(False, basic, SMALL, 10)),
        "bottleneck": (
            SparseResNet(SparseBottleneck, bottleneck, SMALL, classes=10, blocks=8),
            DenseResNet(True, bottleneck, SMALL, 10),
        ),
    }


def pair(name: str, device: str) -> tuple[SparseResNet, nn.Module]:
    ours, dense = networks()[name]
    lively(dense, device)
    ours.load_state_dict(dense.state_dict())
    return ours.eval().to(device), dense


def random_masks(device: str, batch: int = 2):
    """Calls after one another: what an earlier one left in a buffer would show."""
    for density in (0.0005, 1.0, 0.0, 0.002, 0.0005):
        yield (torch.rand(batch, *SIZE, device=device) < density)


@pytest.mark.parametrize("name", networks())
def test_a_full_mask_is_the_dense_network(name, device):
    ours, dense = pair(name, device)
    x = torch.randn(2, 3, *SIZE, device=device)
    full = torch.ones(2, *SIZE, dtype=torch.bool, device=device)
    with torch.no_grad():
        want, exact = dense(x), copy.deepcopy(dense).double()(x.double())
        for got in (ours(x), ours(x, full), ours.capture(x)(x, full)):
            assert_as_accurate_as_torch(got, want, exact)


@pytest.mark.parametrize("name", networks())
def test_any_mask_keeps_the_masked_contract(name, device):
    ours, dense = pair(name, device)
    run = ours.capture(torch.zeros(2, 3, *SIZE, device=device))
    for mask in random_masks(device):
        x = torch.randn(2, 3, *SIZE, device=device)
        masks = plane_masks(mask, ours.planes(SIZE))
        with torch.no_grad():
            for got in (ours(x, mask), run(x, mask)):
                agreement = compare(got, dense, x, masks)
                assert agreement.holds, agreement


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, device):
    ours, dense = pair("bottleneck", device)
    run = ours.capture(torch.zeros(1, 3, *SIZE, device=device, dtype=dtype))
    for mask in random_masks(device, 1):
        x = torch.randn(1, 3, *SIZE, device=device).to(dtype)
        agreement = compare(run(x, mask), dense, x, plane_masks(mask, ours.planes(SIZE)))
        assert agreement.holds, agreement


@pytest.mark.parametrize("preactivation", [False, True])
def test_the_narrow_network_of_sbnet(preactivation, device):
    net = sbnet_resnet(weights=0, preactivation=preactivation)
    assert [net.get_submodule(f"layer{k}")[-1].conv3.out_channels for k in (1, 2, 3, 4)] == [96, 192, 256, 384]
    lively(net, device)
    run = net.capture(torch.zeros(2, 3, *SIZE, device=device))
    for mask in random_masks(device):
        x = torch.randn(2, 3, *SIZE, device=device)
        got = run(x, mask)
        masks = plane_masks(mask, net.planes(SIZE))
        agreement = compare(got, net, x, masks)
        assert agreement.holds, agreement
        inside = masks[tuple(got.shape[2:])]
        assert not got[~inside.expand_as(got)].any()


def test_state_dicts_are_torchvisions():
    for build, bottleneck, layers in (
        (resnet18, False, (2, 2, 2, 2)),
        (resnet34, False, (3, 4, 6, 3)),
        (resnet50, True, (3, 4, 6, 3)),
    ):
        with torch.device("meta"):
            ours, dense = build().state_dict(), DenseResNet(bottleneck, layers).state_dict()
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in dense.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_torchvision(name, dtype):
    torchvision = pytest.importorskip("torchvision")
    dense = lively(getattr(torchvision.models, name)(), "cuda")
    ours = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50}[name](dense.state_dict()).eval().cuda()
    size = (224, 320)
    x = torch.randn(2, 3, *size, device="cuda").to(dtype)
    run = ours.capture(x)
    own, double = copy.deepcopy(dense).to(dtype), copy.deepcopy(dense).to(dtype).double()
    with torch.no_grad():
        full = run(x, torch.ones(2, *size, dtype=torch.bool, device="cuda"))
        assert_as_accurate_as_torch(full, own(x), double(x.double()))
        for density in (0.0002, 0.001):
            mask = torch.rand(2, *size, device="cuda") < density
            agreement = compare(run(x, mask), dense, x, plane_masks(mask, ours.planes(size)))
            assert agreement.holds, agreement


def test_weights_by_seed_by_state_dict_and_from_a_file(tmp_path):
    one, two, other = (resnet18(weights=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    torch.save(one, tmp_path / "weights.pt")
    for weights in (tmp_path / "weights.pt", one):
        found = resnet18(weights, classes=0).state_dict()  # without a classifier: the rest fits
        assert all(torch.equal(found[k], one[k]) for k in found)


class Assorted(nn.Module):
    """What ResNets lack: average pools, dilation, groups, readers of several windows, outputs that are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SparseConv2d(3, 8, 3, padding=1)
        self.wide = SparseConv2d(8, 8, (5, 3), padding=(4, 1), dilation=(2, 1), groups=2)
        self.largest = SparseMaxPool2d(3, 2, 1, dilation=2)
        self.mean = SparseAvgPool2d((3, 2), 2, (1, 0), ceil_mode=True, count_include_pad=False)
        self.last, self.more = SparseConv2d(8, 6, 3, padding=1), SparseConv2d(8, 6, 1)
        self.point = SparseConv2d(6, 6, 1)

    def forward(self, x, fine=None, largest=None, mean=None):
        a = self.first(x, fine, activation="leaky_relu", negative_slope=0.2)
        b = self.wide(a, fine, activation="silu", residual=a)
        c = self.mean(b, mean)
        d = self.last(c, mean)
        e = self.more(c, mean, residual=d)  # not in the place of d, which is read once more
        return self.largest(a, largest), b, self.point(e, mean, activation="relu", residual=d)

    def planes(self):
        found = self(torch.zeros(1, 3, *SIZE))
        return [(*t.shape[2:], block) for t, block in zip([found[k] for k in (1, 0, 2)], (8, (4, 6), 5), strict=True)]


def test_networks_of_other_layers(device):
    net = Assorted().requires_grad_(False).to(device)
    planes = Assorted().planes()
    blocks = {(height, width): block for height, width, block in planes}
    run = run_of(net, SIZE, blocks, batch=2, device=device)
    for mask in random_masks(device):
        poison(run.executor)  # a pixel that is read and not written would show
        x = torch.randn(2, 3, *SIZE, device=device)
        want = masked_oracle(copy.deepcopy(net).double(), x.double(), plane_masks(mask, planes))
        for got, exact in zip(run(x, mask), want, strict=True):
            torch.testing.assert_close(got, exact.float(), rtol=1e-3, atol=1e-4)


def test_buffers_are_shared_and_outputs_are_not():
    net = SparseResNet(SparseBottleneck, (2, 2, 2, 2), SMALL, classes=0).eval()
    run = net.capture(torch.zeros(1, 3, 128, 128))
    nodes, place = run.plan.graph.nodes, run.executor.storage.place
    assert len(run.executor.buffers) < 6 < len(nodes)
    assert [root.buffer for root, _ in place.values()].count(place[nodes[-1].output][0].buffer) == 1
    for node in nodes:
        if node.args[0] in place:
            assert place[node.args[0]][0].buffer != place[node.output][0].buffer


def test_block_sizes_of_the_planes():
    with pytest.raises(ValueError, match="one size for each of 2 planes"):
        SparseResNet(SparseBasicBlock, (1,), (4,), blocks=(8,))


def test_inputs_written_where_they_are_read(device):
    """What a call copies and what the caller wrote into the runner's own tensors give the same bits, in turns."""
    ours, _ = pair("basic", device)
    x = torch.randn(2, 3, *SIZE, device=device)
    copied, own = ours.capture(x), ours.capture(x)
    for k, mask in enumerate(random_masks(device)):
        x = torch.randn(2, 3, *SIZE, device=device)
        if k == 2:  # copies in between do no harm
            got = own(x, mask)
        else:
            own.frame.copy_(x)
            own.mask.copy_(mask)
            got = own(own.frame, own.mask)
        assert torch.equal(got, copied(x, mask))


@pytest.mark.gpu
def test_a_captured_call_does_not_wait_for_the_device():
    net = SparseResNet(SparseBasicBlock, (1, 1), (16, 16), classes=4).cuda().half()
    x = torch.randn(1, 3, *SIZE, device="cuda", dtype=torch.half)
    mask = torch.rand(1, *SIZE, device="cuda") < 0.001
    run = net.capture(x)
    run(x, mask)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    run(x, mask)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_training_overfits(device):
    """A masked network learns which way a square moves, from the active blocks of a few frames."""
    torch.manual_seed(0)
    frames, masks, labels = [], [], []
    for k in range(12):
        down, y, x = k % 2, 8 + 6 * (k % 5), 10 + 7 * (k % 6)
        frame = 0.1 * torch.rand(3, 64, 64)
        shade = torch.linspace(0, 1, 14)
        frame[:, y : y + 14, x : x + 14] += (shade if down else shade.flip(0))[:, None]
        frames.append(frame)
        masks.append(torch.zeros(64, 64, dtype=torch.bool))
        masks[-1][y : y + 14, x : x + 14] = True
        labels.append(down)
    x, mask, label = torch.stack(frames).to(device), torch.stack(masks).to(device), torch.tensor(labels, device=device)
    net = SparseResNet(SparseBasicBlock, (1, 1), (8, 16), stem=8, classes=2, blocks=8).to(device)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = F.cross_entropy(net(x, mask), label)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], losses
    with torch.no_grad():
        run = net.eval().capture(x)
        assert (run(x, mask).argmax(1) == label).all()


@pytest.mark.parametrize("name", RESNETS)
def test_networks_in_onnx_runtime(device, name, tmp_path):
    """One file, frame and mask in, logits out: within the contract, as PyTorch's call of the folded network."""
    pytest.importorskip("onnxruntime")
    export = pytest.importorskip("sbnet.export")
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[device]
    if provider not in export.default_providers():
        pytest.skip("needs onnxruntime-gpu")
    net = fold_batch_norm(lively(RESNETS[name](0, classes=10))).to(device)
    frame, mask = torch.randn(2, 3, 64, 96, device=device), torch.zeros(2, 64, 96, dtype=torch.bool, device=device)
    mask[:, 20:30, 40:60] = True
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.float16):
        net, frame = net.to(dtype), frame.to(dtype)
        path = export.to_onnx(net, (frame, mask), tmp_path / f"{name}.onnx")
        for now in (mask, ~mask, torch.zeros_like(mask), torch.ones_like(mask)):
            (error,) = export.verify(path, net, (frame, now), [provider], quiet=True)
            assert error.rms <= (1e-5 if dtype == torch.float32 else 2e-3) * error.rms_of_torch, error
        session = export.session(path, [provider])
        (got,) = export.run(session, [frame, mask])
        agreement = compare(got, net, frame, plane_masks(mask, net.planes((64, 96))))
        assert agreement.holds, agreement
