"""Training steps inside `sbnet.masked`: loss and gradients equal the dense masked step, compiled, in autocast, across
processes, with a capacity, as one CUDA graph."""

import copy
import queue
import socket
import time
from contextlib import suppress

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked
from support.helpers import assert_as_accurate_as_torch, captured
from support.training_steps import BLOCK, PARTS, SIZE, built, data, loss_of, of_two, step, two_steps_apart


@pytest.mark.parametrize(
    "name",
    ["small", "unet", *(pytest.param(n, marks=pytest.mark.slow) for n in ("yolo", "resnet18", "convnext_tiny"))],
)
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_step_is_the_dense_masked_step(name, channels_last):
    size = (96, 128) if name in ("yolo", "resnet18", "convnext_tiny") else SIZE
    x, mask = data(size=size, density=0.003 if size[0] > 64 else 0.01)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    net = built(name)
    got = step(net, x, sbnet.masked(mask, block=BLOCK))
    # Masked maps are channels last, in which PyTorch's batch norm on CPUs errs ten times as much; it runs planes whose
    # blocks are all active.
    torchs = step(built(name), x.contiguous(memory_format=torch.channels_last), DenseMasked(mask, BLOCK))
    exact = step(built(name, torch.float64), x.double(), DenseMasked(mask, BLOCK))
    assert len(got) == len(torchs) == len(exact)
    # A network's gradients are sums over all its layers' roundings: judged together, relative to each tensor's size.
    scale = [1 / t.norm().clamp(min=1e-30) for t in exact]
    joined = [
        torch.cat([(t.double() * s).flatten() for t, s in zip(part, scale, strict=True)]) for part in (got, torchs)
    ]
    whole = torch.cat([(t * s).flatten() for t, s in zip(exact, scale, strict=True)])
    assert_as_accurate_as_torch(joined[0].float(), joined[1].float(), whole)


def test_a_compiled_step_is_the_step():
    """Forward, loss and the mask's lists in one graph, without a break."""
    x, mask = data()
    net = built("small")
    want = step(net, x, sbnet.masked(mask, block=BLOCK))

    def loss(x, mask):
        with sbnet.masked(mask, block=BLOCK):
            return loss_of(net(x))

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for m in (mask, torch.ones_like(mask), mask):
        net.zero_grad()
        found = compiled(x, m)
        found.backward()
    got = [found.detach(), *(p.grad for p in net.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast():
    x, mask = data()
    net = built("small")
    want = step(net, x, sbnet.masked(mask, block=BLOCK))
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), sbnet.masked(mask, block=BLOCK):
        y = net(x)
        assert y.dtype == torch.bfloat16
        loss = loss_of(y.float())
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    torch.testing.assert_close(loss.detach(), want[0], rtol=0.1, atol=0.3)


def test_networks_written_for_the_other_memory_format():
    """`view` of a feature map, which is channels_last inside."""
    net = nn.Conv2d(3, 4, 3, padding=1)
    x, mask = data()
    with sbnet.masked(mask, block=BLOCK):
        y = net(x)
        flat = y.view(2, -1)
    assert torch.equal(flat, y.contiguous().view(2, -1))


def test_bits_repeat():
    x, mask = data()
    first, second = (step(built("small"), x, sbnet.masked(mask, block=BLOCK)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_statistics_in_training_are_those_of_active_pixels():
    x, mask = data()
    x = torch.where(mask[:, None], 5.0, x)
    norm = nn.BatchNorm2d(3)
    active = sbnet.masked(mask, block=BLOCK)
    with active:
        y = norm(x)
    inside = active.active(SIZE).pixel_mask(SIZE).expand_as(x)
    torch.testing.assert_close(norm.running_mean, 0.1 * torch.stack([x[:, c][inside[:, c]].mean() for c in range(3)]))
    assert not y[~inside].any()


def test_a_capacity_saves_stacks_and_says_what_did_not_fit():
    x, mask = data()
    net = built("small")
    whole = sbnet.masked(mask, block=BLOCK)
    want = step(net, x, whole)
    assert not any(whole.missed().values())
    saved = {}
    for capacity in (None, 1.0):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):  # noqa: B023
            got = step(net, x, sbnet.masked(mask, block=BLOCK, capacity=capacity))
        saved[capacity] = sum(sizes)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    few = sbnet.masked(mask, block=BLOCK, capacity=0.2)
    step(net, x, few)
    assert few.missed()[SIZE] > 0
    cut = few.active(SIZE)
    assert cut.capacity == int(0.2 * 2 * 48)
    assert int(cut.count) == cut.capacity


@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("synchronized", [False, True])
def test_distributed_data_parallel(synchronized, backend):
    """Two processes: their gradients' mean. Synchronised, their batch norms are those of both parts in one process."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=of_two, args=(rank, port, synchronized, backend, results), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    found = _first_of(results, workers)
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    # One process on the whole batch, on the same kind of device.
    device = "cuda" if backend == "nccl" else "cpu"
    net, parts = two_steps_apart(device=device)
    if synchronized:
        x, mask = (t.to(device) for t in data(batch=4))
        net.zero_grad()
        with sbnet.masked(mask, BLOCK):
            y = net(x)
        sum(loss_of(y[part]) for part in PARTS).backward()
        want = [*(p.grad / 2 for p in net.parameters()), *net.buffers()]
    else:
        sums = [step(two_steps_apart(device=device)[0], x, mode)[1:] for x, mode in parts]
        want = [(a + b) / 2 for a, b in zip(*sums, strict=True)]
    for got, right in zip(found, want, strict=False):
        torch.testing.assert_close(torch.from_numpy(got), right.cpu(), rtol=1e-3, atol=1e-4)


def _first_of(results, workers, seconds=120):
    """What a worker sends; none, where one of them has failed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(queue.Empty):
            return results.get(timeout=1)
        assert not any(worker.exitcode for worker in workers), [worker.exitcode for worker in workers]
    raise AssertionError(f"nothing came within {seconds} s")


@pytest.mark.gpu
def test_a_whole_step_is_one_cuda_graph():
    """Forward, loss, backward and optimizer; a new mask goes into the graph's own."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x, mask = data("cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    net = built("unet").to("cuda", memory_format=torch.channels_last)  # of ops whose bits repeat
    alone = copy.deepcopy(net)

    def train(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

        def run():
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", torch.bfloat16), sbnet.masked(mask, block=BLOCK):
                loss = loss_of(net(x).float())
            loss.backward()
            optimizer.step()
            return loss

        return run

    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    graph, loss = captured(train(net))
    alone.load_state_dict(net.state_dict())
    other = torch.ones_like(mask)
    run = train(alone)
    for p in alone.parameters():
        p.grad = torch.zeros_like(p)
    for m in (mask.clone(), other):
        mask.copy_(m)
        graph.replay()
        want = run()
        torch.testing.assert_close(loss, want)
    for a, b in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
