"""blocksparse.optimize: optimizers with block gates, moving averages, clipping and pruning, in PyTorch's own ops.

A parameter of blocks [blocks, ...] may have an attribute `gate`, a tensor [blocks]: with gated=True blocks whose gate
is 0 stay as they are, with their moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbnet.compat.blocksparse.ewops import filter_tensor
from sbnet.weights.functional import blocksparse_l2_decay as blocksparse_l2_decay
from sbnet.weights.functional import blocksparse_norm as blocksparse_norm


class _Optimizer(torch.optim.Optimizer):
    """Gradients scaled and filtered, then `_update` of each parameter, in float32, where its gate is open."""

    def __init__(self, params: Any, lr: float, options: dict[str, Any]) -> None:
        if not lr >= 0:
            raise ValueError(f"{type(self).__name__}: learning_rate: expected 0 or more, got {lr}")
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, norm_scale: Tensor | float = 1.0
    ) -> Any:
        """One step; norm_scale: second result of `clip_by_global_norm`, a factor of all gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                names = ("saturate", "zero_infs", "zero_nans")
                grad = filter_tensor(p.grad.float(), 1.0, *(group[name] for name in names))
                gate = getattr(p, "gate", None) if group["gated"] else None
                where = None if gate is None else (gate != 0).to(p.device).view(-1, *[1] * (p.dim() - 1))
                if where is not None:  # what a closed block's gradient holds must not reach sums over blocks
                    grad = torch.where(where, grad, torch.zeros_like(grad))
                self._update(p, grad * group["grad_scale"] * norm_scale, group, where)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], where: Tensor | None) -> None:
        raise NotImplementedError


def _put(target: Tensor, value: Tensor, where: Tensor | None) -> None:
    """target = value, where the gate is open."""
    target.copy_(value if where is None else torch.where(where, value.to(target.dtype), target))


class AdamOptimizer(_Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980), epsilon beside the square root of the second moment as it is.

    Args:
        params: parameters or groups of them, of any float; moments are float32.
        clip_sigmas: gradients are held to so many square roots of their second moment; 0: not.
        grad_scale, saturate, zero_infs, zero_nans: what is done to gradients, as in `filter_tensor`; scaled last.
        gated: parameters with a gate keep the blocks where it is 0, their moments too.

    >>> optimizer = AdamOptimizer(model.parameters(), lr=1e-3)
    >>> norm, scale = clip_by_global_norm([p.grad for p in model.parameters()])
    >>> optimizer.step(norm_scale=scale)
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float = 3e-4,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        clip_sigmas: float = 0.0,
        grad_scale: float = 1.0,
        saturate: float = 0.0,
        zero_infs: bool = False,
        zero_nans: bool = False,
        gated: bool = False,
    ) -> None:
        options = {
            "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "clip_sigmas": clip_sigmas, "grad_scale": grad_scale,
            "saturate": saturate, "zero_infs": zero_infs, "zero_nans": zero_nans, "gated": gated,
        }  # fmt: skip
        super().__init__(params, learning_rate, options)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], where: Tensor | None) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["mean"], state["var"] = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
        state["step"] += 1
        beta1, beta2, mean, var = group["beta1"], group["beta2"], state["mean"], state["var"]
        rate = group["lr"] * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        new_var = beta2 * var + (1 - beta2) * grad.square()
        sigma = new_var.sqrt()
        if group["clip_sigmas"]:
            limit = group["clip_sigmas"] * sigma
            grad = grad.clamp(-limit, limit)
        new_mean = beta1 * mean + (1 - beta1) * grad
        _put(p, p.float() - rate * new_mean / (sigma + group["epsilon"]), where)
        _put(mean, new_mean, where)
        _put(var, new_var, where)


class AdafactorOptimizer(_Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235) without momentum: second moments by rows and columns.

    Vectors keep a moment for each element, matrices one for each row and each column. Blocks [blocks, bs, bs] keep
    those of each block as of a matrix of its own.

    Args:
        beta2: limit of the decay beta2 (1 - beta2^t) / (1 - beta2^(t+1)) of step t.
        clip_thresh: updates are shortened to this root mean square, over all of a parameter whose gate is open.
        others: as in `AdamOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        learning_rate: float = 5e-4,
        beta2: float = 0.999,
        epsilon: float = 1e-30,
        clip_thresh: float = 1.0,
        grad_scale: float = 1.0,
        saturate: float = 0.0,
        zero_infs: bool = False,
        zero_nans: bool = False,
        gated: bool = False,
    ) -> None:
        options = {
            "beta2": beta2, "epsilon": epsilon, "clip_thresh": clip_thresh, "grad_scale": grad_scale,
            "saturate": saturate, "zero_infs": zero_infs, "zero_nans": zero_nans, "gated": gated,
        }  # fmt: skip
        super().__init__(params, learning_rate, options)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], where: Tensor | None) -> None:
        if not 1 <= p.dim() <= 3:
            raise ValueError(f"AdafactorOptimizer: expected parameters of 1 to 3 dimensions, got {p.dim()}")
        state = self.state[p]
        factored = p.dim() > 1 and p.shape[-2] > 1
        if not state:
            state["step"] = 0
            shapes = {"cv": (*p.shape[:-2], 1, p.shape[-1]), "rv": (*p.shape[:-1], 1)} if factored else {"cv": p.shape}
            state |= {name: torch.zeros(shape, device=p.device) for name, shape in shapes.items()}
        state["step"] += 1
        beta = group["beta2"]
        decay = beta * (1 - beta ** state["step"]) / (1 - beta ** (state["step"] + 1))
        squares = grad.square() + group["epsilon"]

        def averaged(name: str, now: Tensor) -> Tensor:
            new = decay * state[name] + (1 - decay) * now
            _put(state[name], new, where)
            return new

        if factored:
            rows, columns = averaged("rv", squares.mean(-1, True)), averaged("cv", squares.mean(-2, True))
            update = grad / ((rows / rows.mean(-2, True)).sqrt() * columns.sqrt())
        else:
            update = grad / averaged("cv", squares).sqrt()
        counted = update.square()
        if where is not None:
            share = where.float().mean().clamp(min=1 / len(where))
            rms = (torch.where(where, counted, torch.zeros_like(counted)).mean() / share).sqrt()
        else:
            rms = counted.mean().sqrt()
        _put(p, p.float() - group["lr"] * update / (rms / group["clip_thresh"]).clamp(min=1.0), where)


def clip_by_global_norm(
    grads: Sequence[Tensor],
    clip_norm: float = 1.0,
    grad_scale: float = 1.0,
    saturate: float = 0.0,
    zero_infs: bool = False,
    zero_nans: bool = False,
) -> tuple[Tensor, Tensor]:
    """(norm of all gradients together, factor that brings it to clip_norm at most): float32 scalars; grads stay.

    Gradients may be of several float dtypes; they count filtered as by `filter_tensor`, then scaled. Nothing waits for
    the device.
    """
    if not grads:
        raise ValueError("clip_by_global_norm: grads: expected a tensor, got none")
    filtered = [filter_tensor(g.detach().float(), 1.0, saturate, zero_infs, zero_nans) for g in grads]
    norms = torch.stack([torch.linalg.vector_norm(g) for g in filtered])
    norm = torch.linalg.vector_norm(norms) * grad_scale
    return norm, clip_norm / norm.clamp(min=clip_norm)


def global_norm(grads: Sequence[Tensor], grad_scale: float = 1.0, **filters: Any) -> Tensor:
    """The norm of all gradients together; see `clip_by_global_norm`."""
    return clip_by_global_norm(grads, 1.0, grad_scale, **filters)[0]


ClipGlobalNorm = clip_by_global_norm


class Ema:
    """Moving averages of parameters: average += (1 - decay) (parameter - average), from their first values on.

    Args:
        decay: share that stays.
        gated: averages of blocks whose gate is 0 stay.
        fp16: keeps averages in float16.
    """

    def __init__(self, decay: float = 0.999, gated: bool = False, fp16: bool = False) -> None:
        self.decay, self.gated, self.fp16 = decay, gated, fp16
        self.averages: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def apply(self, params: Iterable[Tensor]) -> None:
        """Takes the parameters' present values in."""
        for p in params:
            if p not in self.averages:
                self.averages[p] = p.detach().to(torch.float16 if self.fp16 else torch.float32, copy=True)
                continue
            average = self.averages[p]
            gate = getattr(p, "gate", None) if self.gated else None
            where = None if gate is None else (gate != 0).to(p.device).view(-1, *[1] * (p.dim() - 1))
            _put(average, average.float() + (1 - self.decay) * (p.float() - average.float()), where)

    def average(self, param: Tensor) -> Tensor | None:
        """The average of a parameter, or None."""
        return self.averages.get(param)


@torch.no_grad()
def blocksparse_prune(
    param: Tensor,
    gate: Tensor,
    step: int,
    sparsity: float | None = None,
    threshold: float | None = None,
    norm: str = "max",
    frequency: int = 1,
) -> Tensor:
    """Sets `gate` [blocks] in place: 1 for blocks of param [blocks, bs, bs] that stay, 0 for the others; returns it.

    sparsity: share that goes, those of least norm ("max" or "l2"); or threshold: those of a norm below it. Acts where
    step is a multiple of frequency.
    """
    if (sparsity is None) == (threshold is None):
        raise ValueError("blocksparse_prune: expected sparsity or threshold, one of them")
    if gate.shape != param.shape[:1]:
        raise ValueError(f"blocksparse_prune: gate: expected [{param.shape[0]}], got {list(gate.shape)}")
    if frequency < 1 or step % frequency:
        return gate
    norms = blocksparse_norm(param, norm)
    if threshold is not None:
        return gate.copy_(norms >= threshold)
    assert sparsity is not None
    if not 0 <= sparsity <= 1:
        raise ValueError(f"blocksparse_prune: sparsity: expected 0 to 1, got {sparsity}")
    keep = int(len(gate) * (1 - sparsity) + 0.5)
    return gate.zero_().index_fill_(0, norms.argsort(descending=True, stable=True)[:keep], 1)
