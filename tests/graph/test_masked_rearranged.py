"""Inside `sbnet.masked`, pixels and channels that are laid out anew between convolutions: planes again, and masked."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbnet
from sbnet.benchmarks.harness.dense_masked import DenseMasked

SIZE, BLOCK = (32, 48), 8


def shifted_in_time(a):
    """TSM: pairs of images are two moments."""
    n, c, h, w = a.shape
    clips = a.view(n // 2, 2, c, h, w)
    out = torch.zeros_like(clips)
    out[:, :-1, :2], out[:, 1:, 2:4], out[:, :, 4:] = clips[:, 1:, :2], clips[:, :-1, 2:4], clips[:, :, 4:]
    return out.view(n, c, h, w)


def shuffled(a):
    n, c, h, w = a.shape
    return a.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


LAYOUTS = {
    "moments shifted": shifted_in_time,
    "space to depth by slices": lambda a: torch.cat([a[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)[:, :8],
    "pixels unshuffled": lambda a: F.pixel_unshuffle(a, 2)[:, :8],
    "rows cut off and padded": lambda a: F.pad(a[:, :, 1:], (0, 0, 0, 1)),
    "rolled": lambda a: torch.roll(a, (1, 1), (2, 3)),
    "images flipped": lambda a: a.flip(0),
    "half flipped": lambda a: torch.cat([a[:, :4].flip(3), a[:, 4:]], 1),
    "channels shuffled": shuffled,
    "channels by index": lambda a: a[:, torch.arange(7, -1, -1)],
    "channels sorted": lambda a: a.sort(1).values,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@torch.no_grad()
def test_convolutions_after_a_new_layout(device, layout):
    torch.manual_seed(0)
    one, two, three = (nn.Conv2d(8, 8, 3, padding=1).to(device) for _ in range(3))
    norm = nn.BatchNorm2d(8).to(device)
    x, mask = torch.randn(4, 8, *SIZE, device=device), torch.zeros(4, *SIZE, dtype=torch.bool, device=device)
    mask[:, :12, :12] = True
    mask[2, 20:, 30:] = True
    found = []
    for mode in (sbnet.masked(mask, block=BLOCK), DenseMasked(mask, BLOCK)):
        with mode:
            found.append(three(F.relu(two(layout(norm(one(x)))))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
