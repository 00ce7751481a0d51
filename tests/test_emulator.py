"""The Hopper convolution kernels on the CPU: their own source, run by tests/emulator, warps in random order.

For machines without such a GPU. It finds what is computed wrongly, waits that are missing or never end, and shared
memory that is not the kernel's own; tests marked gpu run the same kernels where they belong.
"""

import ctypes
import fcntl
import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conv_cases import make
from helpers import assert_as_accurate_as_torch, dense_conv2d, poison, tensor

from sbnet import conv_output_size, fringe

ROOT = Path(__file__).resolve().parents[1]
SM90 = ROOT / "csrc/cuda/sm90"
KERNELS = {"1x1": 0, "1x1 wide": 1, "1x1 split": 2, "3x3": 3, "3x3 stride 2": 3, "stem": 4}
ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 3, "silu": 4}
CASES = 12  # for each seed


def fields(kind, names: str):
    return [(name, kind) for name in names.split()]


class Conv(ctypes.Structure):  # as in entry.cpp
    _fields_ = [
        *fields(ctypes.c_int32, "kernel multiprocessors seed bfloat16 n h w c k r stride ho wo"),
        *fields(ctypes.c_int32, "block_h block_w activation"),
        *fields(ctypes.c_void_p, "x weight bias residual y indices count fringe fringe_count"),
        *fields(ctypes.c_int64, "capacity fringe_capacity"),
    ]


def sources() -> list[Path]:
    return sorted(p for p in SM90.glob("*.cu"))


def build(folder: Path, compiler: str, headers: Path) -> Path:
    """The kernels as a library: one line of each differs (shared memory), and the instructions that C++ cannot say."""
    (folder / "cuda/sm90").mkdir(parents=True)
    shutil.copy(ROOT / "tests/emulator/ptx.h", folder / "cuda/sm90/ptx.cuh")
    common = (ROOT / "csrc/cuda/common.cuh").read_text()
    common = re.sub(r'asm\("(max|min)\.NaN.*\);', r"r = a != a ? a : b != b ? b : \1(a, b);", common)
    (folder / "cuda/common.cuh").write_text('#include "machine.h"\n' + common)
    units = [ROOT / "tests/emulator/entry.cpp"]
    for source in sources():
        text = source.read_text()
        text, found = re.subn(
            r"extern __shared__ .*shared\[\];", "uint8_t* shared = emulator::self->cta->shared;", text
        )
        assert found, source
        units.append(folder / f"{source.stem}.cpp")
        units[-1].write_text(text)
    paths = [f"-I{p}" for p in (folder, ROOT / "tests/emulator", ROOT / "csrc", headers)]

    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-Wno-psabi"]

    def compiled(unit: Path) -> str:
        out = str(folder / f"{unit.stem}.o")
        subprocess.run([compiler, *flags, *paths, "-c", str(unit), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / "libemulated.so"
    subprocess.run([compiler, "-shared", *objects, "-o", str(library)], check=True)
    return library


def cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """emulate_conv of the library, which the first process that wants it builds for all."""
    compiler, headers = shutil.which("g++"), cuda_headers()
    if not compiler or not headers:
        pytest.skip("needs g++ and the headers of the CUDA toolkit")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "emulator"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / "libemulated.so"
        if not library.exists():
            shutil.rmtree(folder, ignore_errors=True)
            build(folder, compiler, headers)
    return ctypes.CDLL(str(library)).emulate_conv


def emulate(function, which: str, seed: int, multiprocessors: int, activation, residual, **case) -> bool:
    """Runs a case and checks it. False: that kernel does not take it."""
    x, weight, bias, active, options = make("cpu", **case)
    size = conv_output_size(
        x.shape[2:], weight.shape[2:], *([options[k]] * 2 for k in ("stride", "padding", "dilation"))
    )
    shape = (x.shape[0], weight.shape[0], *size)
    options |= {"activation": activation, "residual": None}
    if residual:
        options["residual"] = tensor(shape, x.dtype).contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    edge, y = fringe(active, active, size, 3, 1, 1), poison(shape, x.dtype, "cpu", "channels_last")
    held = {
        "x": x, "weight": weight, "bias": bias, "residual": options["residual"], "y": y, "indices": active.indices,
        "count": active.count, "fringe": edge.pixels, "fringe_count": edge.count,
    }  # fmt: skip
    conv = Conv(
        kernel=KERNELS[which], multiprocessors=multiprocessors, seed=seed, bfloat16=x.dtype == torch.bfloat16,
        n=x.shape[0], h=x.shape[2], w=x.shape[3], c=x.shape[1], k=weight.shape[0], r=weight.shape[2],
        stride=options["stride"], ho=size[0], wo=size[1], block_h=active.grid.bsize[0], block_w=active.grid.bsize[1],
        activation=ACTIVATIONS[activation], capacity=len(active.indices), fringe_capacity=len(edge.pixels),
        **{name: None if v is None else v.data_ptr() for name, v in held.items()},
    )  # fmt: skip
    message = ctypes.create_string_buffer(4096)
    result = function(ctypes.byref(conv), message, ctypes.c_int64(len(message)))
    if result == 1:
        return False
    assert result == 0, message.value.decode()
    mask = active.pixel_mask(size).expand(shape)
    exact = dense_conv2d(x, weight, bias, torch.float32, **options)
    torchs = dense_conv2d(x, weight, bias, x.dtype, **options)
    assert_as_accurate_as_torch(y[mask], torchs[mask], exact[mask])
    zeros = torch.zeros(shape[0] * size[0] * size[1], dtype=torch.bool)
    zeros[edge.pixels[: int(edge.count)].long()] = True
    zeros = zeros.view(shape[0], 1, *size).expand(shape)
    assert bool((y[zeros] == 0).all()), "the fringe"
    assert bool((y.isnan() | mask | zeros).all()), "other pixels were written"
    return True


def some(rng: random.Random, kernel: str) -> dict:
    """A small convolution that `kernel` may take."""
    few, stride = rng.choice([8, 24, 64, 72, 128, 192]), 1
    sizes = {
        "1x1": ([8, 24, 64, 72, 256, 384], [8, 40, 64, 136, 200, 264]),
        "1x1 wide": ([64, 128, 320, 512], [128, 256, 384]),
        "1x1 split": ([1536, 1600], [128, 256, 384]),
        "3x3": ([few], [8, 40, 64, 72, 128]),
        "3x3 stride 2": ([few], [8, 64, 72, 128]),
        "stem": ([3], [8, 24, 64]),
    }  # fmt: skip
    blocks = {"stem": [8, 10, 16], "3x3": [8, 16, (8, 16), (16, 8)], "3x3 stride 2": [8, 16, (8, 16)]}
    size = (rng.randint(1, 40), rng.randint(1, 40))
    if kernel in ("3x3 stride 2", "stem") or (kernel in ("1x1", "1x1 wide") and rng.random() < 0.3):
        stride = 2
    if kernel == "stem":
        size = (size[0] * 2, size[1] // 8 * 8 + 8)
    return {
        "channels": rng.choice(sizes[kernel][0]), "filters": rng.choice(sizes[kernel][1]), "size": size,
        "batch": rng.choice([1, 1, 2]), "block": rng.choice(blocks.get(kernel, [8, 8, 16, (8, 16), 4, (4, 12)])),
        "density": rng.choice([0.0, 0.1, 0.4, 0.8, 0.95, 1.0, 1.0]), "stride": stride,
        "kernel": {"s": 7, "3": 3, "1": 1}[kernel[0]], "padding": {"s": 3, "3": 1, "1": 0}[kernel[0]],
        "dtype": rng.choice([torch.float16, torch.bfloat16]),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_kernels_without_one(emulated, kernel, seed):
    rng, taken = random.Random(f"{kernel} {seed}"), 0
    while taken < CASES:
        case = some(rng, kernel)
        more = {"activation": rng.choice(list(ACTIVATIONS)), "residual": kernel != "stem" and rng.random() < 0.4}
        more |= {"seed": rng.randrange(2**31), "multiprocessors": rng.choice([1, 2, 4, 6, 12])}
        torch.manual_seed(more["seed"])
        try:
            taken += emulate(emulated, kernel, **more, **case)
        except AssertionError as error:
            raise AssertionError(f"{more} {case}: {error}") from error


def test_all_hopper_kernels_are_emulated():
    stems = {"conv1x1", "conv1x1_wide", "conv1x1_split", "conv3x3", "conv3x3_stride2", "conv_stem"}
    assert {source.stem for source in sources()} == stems
