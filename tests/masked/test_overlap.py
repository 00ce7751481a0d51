"""Which tensors share memory: an op that writes one while it reads the other must refuse it, and no other."""

import random

import pytest
import torch

import sbnet
from sbnet import BlockGrid

ROOM = (3, 10, 12, 16)  # images, rows, columns, channels of the buffer


def part(rng: random.Random, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [rng.randint(0, room - n) for n, room in zip(sizes, ROOM, strict=True)]
    return tuple(slice(at, at + n) for n, at in zip(sizes, starts, strict=True))


@pytest.mark.parametrize("seed", range(150))
def test_slices_of_one_buffer(seed):
    """Boxes of one channels_last buffer: refused where an element is in both, taken where one lies behind the other."""
    rng = random.Random(seed)
    sizes = (*(rng.randint(1, room) for room in ROOM[:3]), rng.choice([1, 2, 4, 8]))
    apart = rng.randrange(4)  # more of a chance to be so in one dimension
    sizes = tuple(max(1, n // 2) if d == apart else n for d, n in enumerate(sizes))
    buffer, numbers = torch.zeros(ROOM), torch.arange(torch.tensor(ROOM).prod()).view(ROOM)
    parts = [part(rng, sizes) for _ in range(2)]
    if rng.random() < 0.4:  # neighbours that touch
        first, second = (list(p) for p in parts)
        second = list(first)
        if first[apart].stop + sizes[apart] <= ROOM[apart]:
            second[apart] = slice(first[apart].stop, first[apart].stop + sizes[apart])
        parts = [tuple(first), tuple(second)]
    x, out = (buffer[p].permute(0, 3, 1, 2) for p in parts)
    shared = bool(torch.isin(numbers[parts[0]].flatten(), numbers[parts[1]].flatten()).any())
    active = sbnet.reduce_mask(torch.ones(x.shape[0], *x.shape[2:]), BlockGrid.cover(x.shape[2:], 4))
    weight = torch.zeros(x.shape[1], 1, 3, 3)
    call = x, weight, None, active, out
    if shared:
        with pytest.raises(RuntimeError, match="memory of its own|memory apart|overlap"):
            sbnet.sparse_conv2d_(*call, padding=1, groups=x.shape[1])
        return
    starts = [[s.start for s in p] for p in parts]
    if any(all(a <= b for a, b in zip(*pair, strict=True)) for pair in (starts, starts[::-1])):
        sbnet.sparse_conv2d_(*call, padding=1, groups=x.shape[1])  # else it may be refused: it would take more to see


def test_halves_that_begin_within_an_element():
    """Channels 0, 1 of pixels of 16 and the last two lie apart; half an element further on the last one of a pixel ends
    in the first one of the next."""
    memory = bytearray(4096)
    active = sbnet.reduce_mask(torch.ones(1, 4, 4), BlockGrid.cover((4, 4), 4))

    def view(at: int) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.float16, count=512, offset=at).as_strided(
            (1, 2, 4, 4), (512, 1, 64, 16)
        )

    x, weight = view(0), torch.zeros(2, 1, 3, 3).half()
    sbnet.sparse_conv2d_(x, weight, None, active, view(28), padding=1, groups=2)
    for at in (0, 29):
        with pytest.raises(RuntimeError, match="memory of its own|memory apart|overlap"):
            sbnet.sparse_conv2d_(x, weight, None, active, view(at), padding=1, groups=2)


@pytest.mark.parametrize("rows", [3, 4])
def test_a_view_whose_rows_run_over_into_the_next_ones(rows):
    """Rows of 6 pixels, 4 apart: the last of three ends in what would be a fourth row, where `out` begins."""
    raw = torch.zeros(256)
    x = raw.as_strided((1, 4, 3, 6), (256, 1, 16, 4))
    out = raw[16 * rows :].as_strided((1, 4, 3, 4), (256, 1, 16, 4))
    active = sbnet.reduce_mask(torch.ones(1, 3, 4), BlockGrid.cover((3, 4), 4))
    call = x, torch.zeros(4, 1, 3, 3), None, active, out
    if rows == 3:
        with pytest.raises(RuntimeError, match="memory of its own|memory apart|overlap"):
            sbnet.sparse_conv2d_(*call, padding=(1, 0), groups=4)
    else:
        sbnet.sparse_conv2d_(*call, padding=(1, 0), groups=4)
