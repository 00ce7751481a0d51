"""What cases of training share: a step, its graph, its memory, and what its gradients are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sbnet.benchmarks.harness.registry import Setting, WrongResult
from sbnet.engine.capture import cuda_graph

Loss = Callable[[], Tensor]


def backward(net: nn.Module, loss: Loss, halves: bool) -> Tensor:
    """A step: loss() and the gradients of net's parameters. halves: in bfloat16 autocast."""
    parameters = list(net.parameters())
    for p in parameters:
        p.grad = None
    with torch.enable_grad():
        with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=halves):
            found = loss()
        found.backward()
    return found.detach()


def under(mode: Callable[[], Any], loss: Callable[..., Tensor], *args: Any) -> Tensor:
    """loss(*args) inside a context that is made anew."""
    with mode():
        return loss(*args)


def one_graph(setting: Setting, run: Loss) -> Loss:
    """A replay of the whole step as one CUDA graph; on a CPU the step itself."""
    if not setting.cuda:
        return run
    graph, loss = cuda_graph(run, torch.device("cuda", torch.cuda.current_device()), grad=True)

    def replay(_run: Loss = run) -> Tensor:  # whose tensors the graph reads, a mask among them: kept as long as it
        graph.replay()
        return loss

    return replay


def peak_gib(setting: Setting, run: Loss) -> dict[str, float]:
    """What an eager step adds to the memory that is in use; nothing on a CPU."""
    if not setting.cuda:
        return {}
    run()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return {"GiB": (torch.cuda.max_memory_allocated() - before) / 2**30}


def hold_loss(setting: Setting, side: str, got: Any, right: float) -> float:
    error = abs(float(got) - right) / max(abs(right), 1e-6)
    if not error < (0.05 if setting.cuda else 1e-3):
        raise WrongResult(f"{side}: a loss of {float(got):.6g}, expected {right:.6g}")
    return error


def hold_gradients(setting: Setting, net: nn.Module, masked: Loss, dense_masked: Loss) -> dict[str, float]:
    """How far all parameters' gradients are from those of the dense masked step in float32, each relative to its size:
    of the masked step and, in halves, of the dense masked one. Raises where the first is over twice the second."""

    def gradients(loss: Loss, halves: bool) -> list[Tensor]:
        backward(net, loss, halves)
        return [p.grad.double() for p in net.parameters() if p.grad is not None]

    with torch.backends.cudnn.flags(benchmark=False, allow_tf32=False):  # once: trying algorithms would take seconds
        exact = gradients(dense_masked, False)

    def apart(found: list[Tensor]) -> float:
        parts = [((a - b).norm() / b.norm().clamp(min=1e-30)) ** 2 for a, b in zip(found, exact, strict=True)]
        return float(torch.stack(parts).mean().sqrt())

    ours = apart(gradients(masked, setting.cuda))
    allowed = 2 * apart(gradients(dense_masked, True)) if setting.cuda else 1e-3
    if not ours <= allowed:
        raise WrongResult(f"masked: gradients {ours:.3g} from the dense masked step's, expected {allowed:.3g} at most")
    return {"gradients apart": ours} | ({"gradients apart, dense masked": allowed / 2} if setting.cuda else {})
