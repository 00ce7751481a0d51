"""Which kernel serves a layer: asked of the tables that the launchers use.

csrc/core/masked/conv_select.cpp and conv_transpose_select.cpp have CUDA's, csrc/cpu/masked/conv_select.cpp the CPU's.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sbnet import _library
from sbnet.geometry import to_pair

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 6, torch.float8_e4m3fn: 10}
_NAMES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """The kernel that serves a layer, and why those above it in the table do not.

    Attributes:
        kernel: its name.
        declined: (name, reason) of each kernel that would come first.
        cut: how it cuts the work, on a CPU; "" on CUDA.
    """

    kernel: str
    declined: tuple[tuple[str, str], ...]
    cut: str = ""


_QUERY: list[Any] = [  # SbnetConvQuery
    *((name, ctypes.c_int64) for name in ("dtype", "batch", "channels", "height", "width", "out_channels")),
    *((name, ctypes.c_int64 * 2) for name in ("kernel", "stride", "padding", "dilation")),
    ("groups", ctypes.c_int64),
    ("block", ctypes.c_int64 * 2),
    *((name, ctypes.c_int64) for name in ("residual", "slope", "allow_tf32", "capability")),
]


class _Query(ctypes.Structure):
    _fields_ = _QUERY


class _Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("message", ctypes.c_char * 508)]


@functools.cache
def _kernels() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_library.KERNEL_LIBRARY))
    for query in (library.sbnet_select_conv2d_cpu, library.sbnet_select_conv2d_cuda):
        query.restype = _Status
        query.argtypes = [ctypes.POINTER(_Query), ctypes.c_char_p, ctypes.c_int64]
    library.sbnet_select_conv_transpose2d_cuda.restype = _Status
    library.sbnet_select_conv_transpose2d_cuda.argtypes = [
        ctypes.POINTER(_Query), ctypes.c_int64 * 2, ctypes.c_char_p, ctypes.c_int64,
    ]  # fmt: skip
    library.sbnet_select_bottleneck2d.argtypes = [ctypes.c_int64] * 4
    if _library.build_info()["cuda"]:
        packed_bytes = library.sbnet_blocksparse_packed_bytes_cuda
        packed_bytes.restype = ctypes.c_int64
        packed_bytes.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int32, ctypes.c_bool]
    return library


def conv2d_kernel(
    shape: Sequence[int],
    out_channels: int,
    kernel_size: int | Sequence[int],
    block: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dtype: torch.dtype = torch.float16,
    residual: bool = False,
    slope: bool = False,
    allow_tf32: bool = False,
    device: str = "cuda",
    capability: int = 90,
) -> Selection:
    """The kernel of sparse_conv2d on packed channels_last tensors, all blocks in the list. Needs no GPU.

    Args:
        shape: of x, (N, C, H, W).
        block: sides of a block of the output plane, in pixels.
        dtype: float32, float16, bfloat16, int8 or float8_e4m3fn: of x and weight.
        residual, slope: has it a residual, slopes a channel (PReLU)?
        device: "cuda", or "cpu" for this machine's processor.
        capability: compute capability of a CUDA device, as 80 or 90.

    Raises:
        ValueError: sizes that make no convolution.

    >>> conv2d_kernel((1, 64, 400, 704), 64, 3, 16, padding=1).kernel
    'Hopper 3x3'
    >>> conv2d_kernel((1, 64, 400, 704), 64, 3, 16, padding=1, dtype=torch.float32, device="cpu").kernel
    'Winograd F(2x2)'
    """
    op = "conv2d_kernel"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"sbnet::{op}: device: expected 'cpu' or 'cuda', got {device!r}")
    query = _query(
        op, shape, dtype, kernel=kernel_size, stride=stride, padding=padding, dilation=dilation, block=block,
        out_channels=out_channels, groups=groups, residual=residual, slope=slope, allow_tf32=allow_tf32,
        capability=capability,
    )  # fmt: skip
    return _selected(getattr(_kernels(), f"sbnet_select_conv2d_{device}"), query)


def conv_transpose2d_kernel(
    shape: Sequence[int],
    out_channels: int,
    kernel_size: int | Sequence[int],
    block: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dtype: torch.dtype = torch.float16,
    residual: bool = False,
    slope: bool = False,
    allow_tf32: bool = False,
    capability: int = 90,
) -> Selection:
    """The CUDA kernel of sparse_conv_transpose2d, asked as `conv2d_kernel` asks. "by phases" has theirs as its `cut`.

    >>> conv_transpose2d_kernel((1, 64, 200, 352), 64, 4, 16, stride=2, padding=1).kernel
    'Hopper transposed'
    """
    op = "conv_transpose2d_kernel"
    query = _query(
        op, shape, dtype, kernel=kernel_size, stride=stride, padding=padding, dilation=dilation, block=block,
        out_channels=out_channels, groups=groups, residual=residual, slope=slope, allow_tf32=allow_tf32,
        capability=capability,
    )  # fmt: skip
    extra = (ctypes.c_int64 * 2)(*to_pair(output_padding, f"{op}: output_padding"))
    return _selected(_kernels().sbnet_select_conv_transpose2d_cuda, query, extra)


def _query(op: str, shape: Sequence[int], dtype: torch.dtype, **values: Any) -> _Query:
    if dtype not in _DTYPES:
        raise ValueError(f"sbnet::{op}: dtype: expected float32, float16, bfloat16, int8 or float8_e4m3fn, got {dtype}")
    pairs = {
        name: (ctypes.c_int64 * 2)(*to_pair(values.pop(name), f"{op}: {name}"))
        for name in ("kernel", "stride", "padding", "dilation", "block")
    }
    sides = dict(zip(("batch", "channels", "height", "width"), shape, strict=True))
    return _Query(dtype=_DTYPES[dtype], **sides, **pairs, **values)


def _selected(select: Any, query: _Query, *more: Any) -> Selection:
    text = ctypes.create_string_buffer(2048)
    status = select(ctypes.byref(query), *more, text, len(text))
    if status.code:
        raise ValueError(f"sbnet::{status.message.decode()}")
    chosen, *rest = text.value.decode().split("\n")
    declined = [tuple(line.split(": ", 1)) for line in rest]
    name, _, cut = chosen.partition(": ")
    return Selection(name, tuple((name, why) for name, why in declined), cut)


def bottleneck_in_one_kernel(channels: int, hidden: int, block: Sequence[int]) -> bool:
    """Has Hopper one kernel for a residual block of these channels, in float16 or bfloat16?"""
    return bool(_kernels().sbnet_select_bottleneck2d(channels, hidden, *block))


def packed_filter_bytes(layout: Sequence[int], dtype: torch.dtype, transposed: bool, device: torch.device) -> int:
    """What `pack_blocksparse_filters` makes of filters of a layout (`ConvLayout.on`) on a device that is there."""
    if device.type != "cuda":
        return 0
    with torch.cuda.device(device):
        numbers = (ctypes.c_int64 * len(layout))(*map(int, layout))
        return _kernels().sbnet_blocksparse_packed_bytes_cuda(numbers, _DTYPES[dtype], transposed)


_LAYER = re.compile(
    r"conv(?P<transposed>_transpose)? (?P<kernel>\d+)x(?P<kernel_w>\d+) (?P<c>\d+)->(?P<k>\d+) (?P<h>\d+)x(?P<w>\d+)"
    r"(?: (?P<dtype>fp32|tf32|fp16|bf16|int8|fp8))?(?P<cpu> cpu)?(?: block (?P<block>\d+)(?:x(?P<block_w>\d+))?)?"
    r"(?: stride (?P<stride>\d+))?(?: dilation (?P<dilation>\d+))?(?: groups (?P<groups>\d+))?(?: batch (?P<n>\d+))?"
    r"(?P<slope> prelu)?"
)


def layer_kernel(text: str, capability: int = 90) -> Selection:
    """conv2d_kernel() or conv_transpose2d_kernel() of a layer in words.

    "conv 3x3 64->64 400x704 fp16 block 16 stride 1 dilation 1 groups 1 batch 1 prelu": what follows the size may be
    left out; the padding keeps the plane's size at stride 1. "fp32 cpu" asks for a CPU's kernel. "conv_transpose" makes
    a plane `stride` times as large.

    Raises:
        ValueError: other words.

    >>> layer_kernel("conv 1x1 64->256 100x176 bf16 block 8").kernel
    'Hopper 1x1'
    """
    found = _LAYER.fullmatch(" ".join(text.split()))
    if not found:
        wanted = "conv 3x3 64->64 400x704 fp16 block 16 stride 1 dilation 1 groups 1 batch 1 prelu"
        raise ValueError(f"layer: expected words as {wanted!r}, got {text[:80]!r}")
    v = {key: int(value) for key, value in found.groupdict().items() if value and value.isdigit()}
    name = found["dtype"] or ("fp32" if found["cpu"] else "fp16")
    block, dilation = v.get("block", 16), v.get("dilation", 1)
    kernel, stride = (v["kernel"], v["kernel_w"]), v.get("stride", 1)
    layer = (v.get("n", 1), v["c"], v["h"], v["w"]), v["k"], kernel, (block, v.get("block_w", block))
    options: dict[str, Any] = {
        "stride": stride, "dilation": dilation, "groups": v.get("groups", 1), "dtype": _NAMES[name],
        "slope": found["slope"] is not None, "allow_tf32": name == "tf32", "capability": capability,
    }  # fmt: skip
    reach = [dilation * (side - 1) for side in kernel]
    if not found["transposed"]:
        padding = tuple(r // 2 for r in reach)
        return conv2d_kernel(*layer, padding=padding, device="cpu" if found["cpu"] else "cuda", **options)
    if found["cpu"]:
        raise ValueError("layer: conv_transpose: expected a layer of a GPU, got cpu")
    padding = tuple(max(r + 2 - stride, 0) // 2 for r in reach)
    extra = [stride - 1 - r + 2 * p for r, p in zip(reach, padding, strict=True)]
    return conv_transpose2d_kernel(*layer, padding=padding, output_padding=extra, **options)
