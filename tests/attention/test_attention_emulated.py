"""The tensor-core kernels of block-sparse attention on the CPU, Hopper's and those for every GPU since sm_80: their own
source, run by tests/tools/emulator."""

import ctypes

import pytest
import torch

from support.attention_structs import Case
from support.emulator import CSRC, TOOLS, emulated_library
from support.helpers import assert_as_accurate_as_torch

pytestmark = pytest.mark.slow  # the compiler's time


CORE = [CSRC / f"core/attention/{name}.cpp" for name in ("attention", "layout")]


def hopper_library(tmp_path_factory):
    kernels = sorted((CSRC / "cuda/sm90/attention").glob("*.cu"))
    return emulated_library(tmp_path_factory, "attention", kernels, [TOOLS / "entry_attention.cpp", *CORE])


def mma_library(tmp_path_factory):
    kernels = [CSRC / f"cuda/attention/{name}.cu" for name in ("forward_mma", "backward_mma", "backward_pairs")]
    return emulated_library(tmp_path_factory, "attention_mma", kernels, [TOOLS / "entry_attention_mma.cpp", *CORE])


@pytest.fixture(scope="session", params=[hopper_library, mma_library], ids=["sm90", "mma"])
def emulated(request, tmp_path_factory):
    return request.param(tmp_path_factory)


@pytest.fixture(scope="session")
def emulated_mma(tmp_path_factory):
    return mma_library(tmp_path_factory)


def call(function, params, multiprocessors, seed) -> None:
    message = ctypes.create_string_buffer(4096)
    result = function(ctypes.byref(params), multiprocessors, seed, message, ctypes.c_int64(len(message)))
    assert result == 0, message.value.decode() or "not taken"


def tensors(batch, heads, q_length, k_length, dim, kv_heads=None, dtype=torch.float16, between=False):
    """q, k, v; between: heads beside each other, as views of (B, T, H, D)."""
    shapes = [(heads, q_length), *[(kv_heads or heads, k_length)] * 2]
    if between:
        return [torch.randn(batch, t, h, dim).to(dtype).transpose(1, 2) for h, t in shapes]
    return [torch.randn(batch, h, t, dim).to(dtype) for h, t in shapes]


def check_forward(library, case: Case, multiprocessors=2, seed=1) -> None:
    call(library.emulate_attention, case.params(), multiprocessors, seed)
    out, lse = case.reference(torch.float64)
    assert_as_accurate_as_torch(case.out, case.reference(case.q.dtype)[0], out)
    torch.testing.assert_close(case.lse.double(), lse, atol=2e-3, rtol=0)
    empty = ~case.visible().any(-1)
    assert (case.out[empty] == 0).all()
    assert (case.lse[empty] == -torch.inf).all()


def check(library, case: Case, multiprocessors=2, seed=1, grad_lse=False) -> None:
    """Forward, and backward in both forms."""
    check_forward(library, case, multiprocessors, seed)
    grad_out = torch.randn(case.q.shape).to(case.q.dtype)
    if case.q_lengths is not None:
        for b, length in enumerate(case.q_lengths):
            grad_out[b, :, length:] = float("nan")
    grads = torch.randn(case.lse.shape) if grad_lse else None
    exact, torchs = (case.reference(dtype, grad_out, grads)[2:] for dtype in (torch.float64, case.q.dtype))
    for deterministic in (False, True):
        params = case.backward(grad_out, grads, deterministic)
        call(library.emulate_attention_backward, params, multiprocessors, seed)
        for ours, theirs, reference in zip(case.grads, torchs, exact, strict=True):
            assert_as_accurate_as_torch(ours, theirs, reference)


def random_blocks(batches, heads, rows, columns, density):
    """With a row and a column that have none."""
    blocks = torch.rand(batches, heads, rows, columns) < density
    blocks[..., rows // 2, :] = False
    blocks[..., columns // 2] = False
    return blocks


@pytest.mark.parametrize("dim", [64, 128])
def test_causal(emulated, dim):
    check(emulated, Case(*tensors(1, 2, 200, 200, dim), diagonal=0), grad_lse=True)
    check(emulated, Case(*tensors(2, 1, 77, 140, dim, dtype=torch.bfloat16, between=True), diagonal=63))


@pytest.mark.parametrize("dim", [64, 128])
def test_band_prefix_and_stride(emulated, dim):
    check(emulated, Case(*tensors(1, 1, 230, 230, dim), diagonal=0, band=50))
    check(emulated, Case(*tensors(1, 1, 150, 200, dim), diagonal=-20, prefix=70))
    check(emulated, Case(*tensors(1, 1, 200, 200, dim), diagonal=0, band=40, stride=24))
    check(emulated, Case(*tensors(1, 1, 150, 250, dim), diagonal=40, band=8, stride=100))


def test_phases(emulated):
    check(emulated, Case(*tensors(1, 2, 240, 240, 64, between=True), diagonal=0, phases=3))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_blocks(emulated, block, dim):
    rows, columns = -(-200 // block), -(-300 // block)
    blocks = random_blocks(2, 2, rows, columns, 0.5)
    check(emulated, Case(*tensors(2, 2, 200, 300, dim, kv_heads=1), blocks=blocks, block=block))
    check(emulated, Case(*tensors(1, 1, 200, 300, dim), blocks=blocks[:1, :1], block=block, diagonal=100))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_element_masks(emulated, block):
    q_length, k_length = 150, 270
    rows, columns = -(-q_length // block), -(-k_length // block)
    blocks = random_blocks(1, 2, rows, columns, 0.7)
    masks = torch.rand(3, block, block) < 0.5
    index = torch.randint(-1, 5, (2, rows, columns), dtype=torch.int32)
    case = Case(*tensors(1, 2, q_length, k_length, 64), blocks=blocks, block=block, masks=masks, mask_index=index)
    check(emulated, case)


def ragged(case_blocks=None, dim=64, **rule):
    """Past a sequence's own end there is NaN."""
    q, k, v = tensors(3, 2, 150, 200, dim)
    q_lengths, k_lengths = torch.tensor([150, 0, 61], dtype=torch.int32), torch.tensor([133, 200, 1], dtype=torch.int32)
    for b in range(3):
        q[b, :, q_lengths[b] :] = float("nan")
        k[b, :, k_lengths[b] :] = v[b, :, k_lengths[b] :] = float("nan")
    return Case(q, k, v, q_lengths=q_lengths, k_lengths=k_lengths, **rule)


def test_lengths(emulated):
    check(emulated, ragged())
    check(emulated, ragged(dim=128, diagonal=20))
    check(emulated, ragged(blocks=random_blocks(1, 2, 5, 7, 0.6), block=32))
    check(emulated, ragged(diagonal=3, phases=2))


@pytest.mark.parametrize("dim", [64, 128])
def test_dropout(emulated, dim):
    seed = torch.tensor([-(2**60) + 12345, 7 * 2**40 + 3])
    options = {"dropout": 0.3, "seed": seed}
    check(emulated, Case(*tensors(2, 2, 150, 150, dim, kv_heads=1), diagonal=0, **options))
    blocks = random_blocks(1, 2, 5, 7, 0.6)
    check(emulated, Case(*tensors(1, 2, 140, 200, dim), blocks=blocks, block=32, **options))
    check(emulated, Case(*tensors(1, 1, 150, 150, dim), diagonal=0, phases=3, **options))


def test_random_schedules(emulated):
    blocks = random_blocks(1, 2, 5, 5, 0.6)
    for seed in range(4):
        check(emulated, Case(*tensors(1, 2, 300, 300, 64), diagonal=0), 1 + seed, seed)
        check(emulated, Case(*tensors(1, 2, 300, 300, 64), blocks=blocks), 1 + seed, seed)


@pytest.mark.parametrize("dim", [16, 24, 40, 72, 80, 120])
def test_other_head_dimensions(emulated_mma, dim):
    """The kernels of sm_80 fill tiles of 64 or 128 columns with zeros."""
    check(emulated_mma, Case(*tensors(1, 2, 100, 90, dim, kv_heads=1, between=True), diagonal=30))
    blocks = random_blocks(1, 2, 13, 12, 0.5)
    check(emulated_mma, Case(*tensors(1, 2, 100, 90, dim, dtype=torch.bfloat16), blocks=blocks, block=8))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scale", [-0.2, 1e-30, 2.0])
def test_scales(emulated_mma, dim, scale):
    """A negative one makes the largest score that of the least product."""
    check(emulated_mma, Case(*tensors(1, 1, 100, 150, dim), diagonal=50, scale=scale))


def test_scores_that_grow_by_far(emulated_mma):
    """From step to step, so that the base of the exponents moves: 2^8 would be passed within each."""
    q, k, v = tensors(1, 1, 70, 260, 64)
    q = q.abs()
    k = (k.abs() * torch.linspace(0.1, 3, 260)[:, None]).half()
    check_forward(emulated_mma, Case(q, k, v))
    check_forward(emulated_mma, Case(q, k.flip(2).contiguous(), v))


def test_more_steps_than_shared_memory_keeps(emulated_mma):
    """Bits of 4096 steps at a time: of one tile of queries, and of a tile of keys over the heads of a group."""
    blocks = torch.rand(1, 1, 1, 35000) < 0.0005
    blocks[..., -1] = True
    check_forward(emulated_mma, Case(*tensors(1, 1, 1, 35000 * 8, 16), blocks=blocks, block=8))
    blocks = torch.rand(1, 45, 264, 1) < 0.01
    blocks[:, -1, -1] = True
    check(emulated_mma, Case(*tensors(1, 45, 264 * 8, 8, 16, kv_heads=1), blocks=blocks, block=8))
