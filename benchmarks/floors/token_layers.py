"""Layers of transformers under masks on a GPU, each in a chain of dependent launches in one CUDA graph, µs a launch.

python benchmarks/floors/token_layers.py

Products of ViT-B's tokens (8 and 65 of 65 blocks active), attention of packed tokens, and of PVTv2-B2's pixels to those
of a pooled plane.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import sbnet
from sbnet import AttentionLayout, BlockGrid
from sbnet._library import settle_inputs
from sbnet.ops.attention.attention import block_attention_
from sbnet.ops.attention.window_attention import window_attention_
from sbnet.ops.masked.token_rows import pack_tokens

HEIGHT, HEADS, DIM = 520, 12, 64  # of a plane of packed tokens, eight wide; of ViT-B


def timed(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Microseconds of one of the calls, in a graph of twice as many and two."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls[:2]:
            call()
        settle_inputs(True)
        for call in (*calls, *calls):
            call()
        settle_inputs(False)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times) / (2 * len(calls) + len(calls[:2]))


def plane(n: int, channels: int, height: int, width: int) -> Tensor:
    x = torch.randn(n, channels, height, width, device="cuda").half()
    return x.contiguous(memory_format=torch.channels_last)


def products() -> None:
    for c, k, activation, added in (
        (768, 2304, None, False), (768, 3072, None, False), (768, 3072, "gelu", False), (768, 768, None, True),
        (3072, 768, None, True),
    ):  # fmt: skip
        x, y, residual = plane(1, c, HEIGHT, 8), plane(1, k, HEIGHT, 8), plane(1, k, HEIGHT, 8) if added else None
        weights = [
            (torch.randn(k, c, 1, 1, device="cuda") / c**0.5).half() for _ in range(12)
        ]  # more than the L2 holds
        bias = torch.randn(k, device="cuda").half()
        for blocks in (8, HEIGHT // 8):
            mask = torch.zeros(1, HEIGHT, 8, dtype=torch.bool, device="cuda")
            mask[:, : blocks * 8] = True
            active = sbnet.reduce_mask(mask, BlockGrid.cover((HEIGHT, 8), 8))

            options: dict[str, Any] = {"activation": activation, "residual": residual}
            us = timed([functools.partial(sbnet.sparse_conv2d_, x, w, bias, active, y, **options) for w in weights])
            print(f"{c:>5} to {k:<5} {activation or '':5} {'residual' if added else '':8} {blocks:3} blocks {us:7.2f}")


def packed() -> None:
    for batch, length in ((1, 500), (1, 4097), (8, 500), (8, 4097)):
        q, k, v = torch.randn(batch, 4097, 3 * HEADS * DIM, device="cuda").half().split(HEADS * DIM, 2)
        out, lengths = torch.empty_like(q).contiguous(), torch.full((batch,), length, dtype=torch.int32, device="cuda")
        layout = AttentionLayout.dense()
        given = q, k, v, layout, DIM**-0.5, (lengths, lengths), HEADS, out
        us = timed([functools.partial(block_attention_, *given)] * 4)
        print(f"packed tokens {batch}x4097, {length} there {us:7.2f}")


def pooled() -> None:
    for side, heads in ((256, 1), (128, 2), (64, 5), (32, 8)):
        q, kv, out = (
            plane(1, heads * DIM, side, side),
            plane(1, 2 * heads * DIM, 32, 32),
            plane(1, heads * DIM, side, side),
        )
        rows, keys = (torch.arange(1, n * n + 1, device="cuda")[None] for n in (side, 32))
        for share in (1.0, 0.1):
            lists, options = [], dict[str, Any]()
            for n, name in ((side, "row"), (32, "key")):
                mask = torch.zeros(1, n, n, dtype=torch.bool, device="cuda")
                mask[:, : max(8, int(n * share**0.5)), : max(8, int(n * share**0.5))] = True
                lists.append(sbnet.reduce_mask(mask, BlockGrid.cover((n, n), 8)))
                found = pack_tokens(lists[-1], (n, n))
                options |= {f"{name}_order": found.order, f"{name}_lengths": found.lengths}
            options["active_keys"] = lists[1].pixel_mask((32, 32)).flatten(1)
            options |= {"starts": (0, 0, heads * DIM), "heads": heads, "dim": DIM, "value_dim": DIM, "scale": DIM**-0.5}
            us = timed([functools.partial(window_attention_, q, kv, kv, rows, keys, lists[0], out, **options)] * 8)
            print(f"{side}x{side} pixels, {heads} heads, to 32x32, share {share} {us:7.2f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.no_grad():
        products()
        packed()
        pooled()
