"""Networks and training steps under masks, and a step as one of two processes makes it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness import nets

SIZE, BLOCK = (48, 64), 8


class Small(nn.Module):
    """Strides, shortcuts added in place, activations in place, joined channels, pools, resizes, norms of all kinds."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GroupNorm(4, 16), nn.GELU(),
                                  nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))  # fmt: skip
        self.short = nn.Conv2d(8, 16, 1, 2)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.join = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.LeakyReLU(0.1, inplace=True))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        a = self.stem(x)
        b = self.down(a)
        c = self.body(b)
        c += self.short(a)
        c = F.relu(c + b)
        d = torch.cat([self.up(c), a, F.interpolate(F.max_pool2d(a, 2), scale_factor=2, mode="bilinear")], 1)
        return self.head(self.join(d).mean((2, 3)))


def torchvision():
    try:
        return nets.torchvision()
    except ImportError:
        pytest.skip("torchvision is not installed")


def built(name, dtype=torch.float32):
    torch.manual_seed(0)
    if name == "small":
        net = Small()
    elif name == "unet":
        net = nets.UNet(8, 3)
    elif name == "yolo":
        net = nets.Yolo()
    else:
        net = getattr(torchvision().models, name)(weights=None, num_classes=5)
        for module in net.modules():
            if type(module).__name__ == "StochasticDepth":
                module.p = 0.0
    return net.train().to(dtype)


def loss_of(y):
    if isinstance(y, (tuple, list)):
        return sum(map(loss_of, y))
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)).sum() + y.square().mean()


def step(net, x, mode):
    net.zero_grad()
    with mode:
        loss = loss_of(net(x))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def data(device="cpu", batch=2, size=SIZE, density=0.03):
    torch.manual_seed(1)
    return torch.randn(batch, 3, *size, device=device), (torch.rand(batch, *size) < density).to(device)


def two_steps_apart(synchronized=False, device="cpu"):
    """The network and each process's part of a batch."""
    net = built("small").to(device)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.fill_(0.5)
    x, mask = (t.to(device) for t in data(batch=4))
    return net, [(x[part], sbnet.masked(mask[part], BLOCK, synchronized=synchronized)) for part in PARTS]


PARTS = (slice(0, 2), slice(2, 4))


def of_two(rank, port, synchronized, backend, results):
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.backends.cudnn.allow_tf32 = False  # of masked convolutions, too
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    net, parts = two_steps_apart(synchronized, device)
    parallel = nn.parallel.DistributedDataParallel(net)
    x, mode = parts[rank]
    with mode:
        loss = loss_of(parallel(x))
    loss.backward()
    if rank == 0:
        results.put([t.detach().cpu().clone().numpy() for t in (*(p.grad for p in net.parameters()), *net.buffers())])
    dist.barrier()
    dist.destroy_process_group()
