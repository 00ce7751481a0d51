"""What several test files share: random inputs, memory layouts, comparisons, and the error measure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbnet
from sbnet import ActiveBlocks, BlockGrid, reference

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
COPIES = [*FLOATS, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
ACTIVATIONS = [None, "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"]
LAYOUTS = [
    "contiguous", "channels_last", "channel_slice", "odd_channel_slice", "plane_slice", "batch_slice", "permuted",
]  # fmt: skip


def tensor(shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Random values that a copy must not disturb: normal floats, the whole range of integers."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=device, dtype=torch.float64 if dtype == torch.float64 else None).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, device=device) > 0.5
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, device=device, dtype=dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x [N,C,H,W] in another layout; the *_slice ones are views into a larger buffer, NaN around them."""
    n, c, h, w = x.shape
    fill = float("nan") if x.dtype.is_floating_point else 1

    def buffer(*shape: int) -> Tensor:
        return x.new_full(shape, fill)

    if layout == "contiguous":
        return x.contiguous()
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "channel_slice":  # one operand of a channels_last torch.cat
        view = buffer(n, h, w, c + 16).permute(0, 3, 1, 2)[:, 8 : 8 + c]
    elif layout == "odd_channel_slice":  # ... off every vector boundary
        view = buffer(n, h, w, c + 11).permute(0, 3, 1, 2)[:, 3 : 3 + c]
    elif layout == "plane_slice":
        view = buffer(n, c, h + 5, w + 6)[:, :, 2 : 2 + h, 3 : 3 + w]
    elif layout == "batch_slice":
        view = buffer(2 * n, h, w, c).permute(0, 3, 1, 2)[::2]
    elif layout == "permuted":  # neither NCHW nor NHWC: columns outermost
        view = buffer(w, n, c, h).permute(1, 2, 3, 0)
    else:
        raise ValueError(layout)
    return view.copy_(x)


def lively(module: nn.Module, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """In eval mode, with normalisations whose shift and scale would show at a border."""
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t, low in ((m.running_mean, -1), (m.running_var, 0.5), (m.weight, 0.5), (m.bias, -1)):
                t.data.uniform_(low, 1.5)
    return module.eval().to(device, dtype)


@contextlib.contextmanager
def unwritten_is_nan():
    """Memory that torch.empty gives holds NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def poison(shape, dtype: torch.dtype, device: str, layout: str = "contiguous") -> Tensor:
    """NaN (or the largest integer) everywhere: what an op leaves or forgets to write shows."""
    value = float("nan") if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max
    return laid_out(torch.full(shape, value, dtype=dtype, device=device), layout)


def random_active(
    grid: BlockGrid, batch: int = 1, density: float = 0.5, device: str = "cpu", capacity: int | None = None
) -> ActiveBlocks:
    """Blocks drawn at random, each with probability `density` (0 and 1 are exact); lists made by plain PyTorch, so that
    a fault in reduce_mask does not hide behind a test of another op."""
    hits = torch.rand(batch, *grid.bcount) < density
    indices = hits.nonzero().int()
    block_map = torch.full((batch, *grid.bcount), -1, dtype=torch.int32)
    limit = hits.numel() if capacity is None else capacity
    total = len(indices)
    indices = indices[:limit]
    block_map[tuple(indices.long().unbind(1))] = torch.arange(len(indices), dtype=torch.int32)
    listed = torch.full((limit, 3), -1, dtype=torch.int32)
    listed[: len(indices)] = indices
    count, total = torch.tensor([len(indices)]).int(), torch.tensor([total]).int()
    return ActiveBlocks(listed.to(device), count.to(device), total.to(device), block_map.to(device), grid)


def one_block(grid: BlockGrid, batch: int, device: str) -> ActiveBlocks:
    """The last block of the last image alone: the one that the plane's edge clips."""
    at = [[batch - 1, grid.bcount[0] - 1, grid.bcount[1] - 1]]
    return ActiveBlocks.from_indices(torch.tensor(at, dtype=torch.int32, device=device), grid, batch)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `run`, which has run once before, and what its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def rows_that_name_no_block(device: str) -> tuple[ActiveBlocks, list[tuple[int, ActiveBlocks]]]:
    """Two blocks of two planes of 3 x 4, and (count, list) of lists that hold rows beside them which name none."""
    grid = BlockGrid.cover((20, 26), 8)
    rows = [[0, 0, 0], [-1, -1, -1], [2, 0, 0], [0, 3, 0], [0, 0, 4], [1, 2, 3], [2**31 - 1] * 3, [-(2**31)] * 3]
    indices = torch.tensor(rows, dtype=torch.int32, device=device)
    good = ActiveBlocks.from_indices(indices[[0, 5]], grid, 2)
    counts = [(n, torch.tensor([n], dtype=torch.int32, device=device)) for n in (8, 9, 2**31 - 1, -5)]
    return good, [(n, ActiveBlocks(indices, count, count, good.block_map, grid)) for n, count in counts]


def assert_bitwise(got: Tensor, want: Tensor, what: str = "") -> None:
    """Same shape, dtype and bits (a NaN equals that NaN only, -0 does not equal 0)."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, wanted {want.dtype}"
    a, b = got.detach().contiguous(), want.detach().contiguous()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.numel() and a.dtype != torch.bool:
        a, b = a.view(kinds[a.element_size()]), b.view(kinds[b.element_size()])
    wrong = (a != b).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} of {a.numel()} differ, first {at}: {got[at]}, wanted {want[at]}")


def assert_same_active(got: ActiveBlocks, want: ActiveBlocks) -> None:
    for name in ("count", "total", "indices", "block_map"):
        assert_bitwise(getattr(got, name), getattr(want, name), name)
    assert got.grid == want.grid


def assert_layout(x: Tensor, channels_last: bool) -> None:
    """Packed in that memory format. (Where both formats are one, either is right.)"""
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=wanted), f"strides {x.stride()} of shape {tuple(x.shape)}, wanted {wanted}"


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def assert_as_accurate_as_torch(got: Tensor, torchs: Tensor, exact: Tensor, what: str = "") -> None:
    """The project's error measure: rms error against float64 <= 2 x that of PyTorch's run in the same dtype + 1 ulp.

    A few wrong elements drown in an rms, so the largest error is held to 4 x PyTorch's largest + 4 ulp as well. NaN
    must stand where the exact result has it and nowhere else. (Elements that overflow in PyTorch's run are not judged.)
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    assert got.dtype == torchs.dtype, f"{what}: {got.dtype}, wanted {torchs.dtype}"
    got, torchs, exact = got.detach(), torchs.detach(), exact.detach()
    assert_bitwise(got.isnan(), exact.isnan(), f"{what}: NaN")
    finite = torchs.isfinite() & exact.isfinite()
    zero = torch.zeros((), dtype=torch.float64, device=got.device)
    exact = torch.where(finite, exact.double(), zero)
    mine = (torch.where(finite, got.double(), zero) - exact).abs()
    theirs = (torch.where(finite, torchs.double(), zero) - exact).abs()
    if not mine.numel():
        return
    ulp = torch.finfo(got.dtype).eps
    limit = 2 * rms(theirs) + ulp * rms(exact)
    assert rms(mine) <= limit, f"{what}: rms error {rms(mine):.3g}, PyTorch's {rms(theirs):.3g}, limit {limit:.3g}"
    limit = 4 * float(theirs.max()) + 4 * ulp * float(exact.abs().max())
    if float(mine.max()) > limit:
        at = tuple(int(v) for v in torch.unravel_index(mine.argmax(), mine.shape))
        raise AssertionError(
            f"{what}: error {float(mine.max()):.3g} at {at} (got {float(got[at])}, exact {float(exact[at])}), "
            f"PyTorch's largest {float(theirs.max()):.3g}"
        )


def dense_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, **options) -> Tensor:
    """act(F.conv2d + bias + residual), or the residual after it, of the whole plane, all in `dtype`."""
    activation, residual = options.pop("activation", None), options.pop("residual", None)
    after = options.pop("residual_after", False)
    slopes = options.pop("negative_slope", 0.01), options.pop("slope", None)
    # oneDNN's half convolutions, grouped or strided, crash or give NaN on some CPUs (torch 2.13): float32, rounded,
    # stands for PyTorch's run
    compute = torch.float32 if x.device.type == "cpu" and dtype.itemsize == 2 else dtype
    with torch.no_grad():
        x, weight = x.to(compute).contiguous(), weight.to(compute).contiguous()
        y = F.conv2d(x, weight, None if bias is None else bias.to(dtype).to(compute), **options).to(dtype)
        if residual is not None and not after:
            y = y + residual.to(dtype)
        y = reference.activate(y, activation, *slopes)
        return y if residual is None or not after else y + residual.to(dtype)


def to_tf32(t: Tensor) -> Tensor:
    """float32 rounded to the nearest number of 10 bits of mantissa; infinities and NaN as they are."""
    bits = t.view(torch.int32)
    return torch.where(t.isfinite(), (bits + 0x1000 & ~0x1FFF).view(torch.float32), t)


def assert_same_gradients(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    """Gradients of the sum of squares, and gradients of theirs."""
    first = [torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True) for f in (ours, theirs)]
    for got, want in zip(*first, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    second = [torch.autograd.grad(sum(t.square().sum() for t in grads), leaves) for grads in first]
    for got, want in zip(*second, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


def assert_conv(
    got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, active: ActiveBlocks, outside: Tensor, **options
) -> None:
    """On active pixels `got` is as accurate as PyTorch; elsewhere it holds the bits of `outside`."""
    exact = dense_conv2d(x, weight, bias, torch.float64, **options)
    torchs = dense_conv2d(x, weight, bias, x.dtype, **options)
    mask = active.pixel_mask(exact.shape[2:]).expand_as(exact)
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    assert_bitwise(got[~mask], outside.expand_as(exact)[~mask], "outside the active blocks")
    assert_as_accurate_as_torch(got[mask], torchs[mask], exact[mask], "on the active blocks")


def interpreter(code: str, *flags: str) -> list[str]:
    """The command that runs `code` with nothing of the folder it is called in on its path."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", *flags, "-c", code]
    return [sys.executable, *flags, "-c", f"import sys; sys.path.remove('')\n{code}"]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the same sbnet, for what is decided when the library loads."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    package = os.path.dirname(os.path.dirname(os.path.abspath(sbnet.__file__)))
    path = os.pathsep.join([package, here, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run(interpreter(code), capture_output=True, text=True, env=env, timeout=300)
