"""connected_components: areas of a map, against the definition in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from sbnet.ops.frames.components import connected_components
from sbnet.reference.frames import connected_components as defined
from support.components import fields, scored

LEAST = 0.25


def assert_defined(scores, smallest, capacity, of="", least=LEAST):
    got = connected_components(scores, least, smallest, capacity)
    for name, a, b in zip(
        ("boxes", "pixels", "sums", "count"), got, defined(scores, least, smallest, capacity), strict=True
    ):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), (of, name)
    return got


@pytest.mark.parametrize("size", [(1, 1), (1, 70), (9, 1), (33, 31), (20, 67), (40, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_reference(device, dtype, size):
    """Maps that touch by corners, wind, have holes and lie on borders; more components than there is place for."""
    torch.manual_seed(0)
    for name, field in fields(*size).items():
        scores = scored(field, LEAST).to(device, dtype)[None]
        for smallest, capacity in ((1, 4096), (1, 3), (5, 2)):
            assert_defined(scores, smallest, capacity, name)


def test_images_have_components_of_their_own(device):
    torch.manual_seed(0)
    maps = torch.stack([scored(field, LEAST) for field in fields(21, 40).values()]).to(device)
    assert_defined(maps, 2, 64)
    assert [int(v) for v in assert_defined(maps[:0], 2, 64)[3]] == []


def test_scores_of_any_strides(device):
    torch.manual_seed(0)
    wide = scored(torch.rand(2, 3, 50, 60) < 0.4, LEAST).to(device)
    for scores in (
        wide[:, 1, 3:40, 5:38],
        wide.permute(0, 1, 3, 2)[:, 0],
        wide[:, 2, ::2, ::3],
        wide[:1, 0].expand(3, -1, -1),
    ):
        assert_defined(scores, 1, 4096)


def test_sums_are_whole_numbers_whatever_the_scores(device):
    """Scores beyond 0 to 1 are clamped, and what is not a number is not set."""
    torch.manual_seed(0)
    scores = torch.rand(1, 37, 53, device=device) ** 8  # of which many are no multiples of 2**-30
    scores[0, 3, 5], scores[0, 9, 9], scores[0, 20, 20] = 7.5, torch.inf, torch.nan
    _, pixels, sums, _ = assert_defined(scores, 1, 4096, least=1e-6)
    assert int(pixels.sum()) == int((scores > 1e-6).sum())
    assert int(sums.sum()) == int((scores[scores > 1e-6].double().clamp(0, 1) * 2**30).round().sum())


def test_a_large_map(device):
    """More than a CTA ranks, of several images: counts, pixels and sums of all against those of SciPy's labels."""
    ndimage = pytest.importorskip("scipy.ndimage")
    torch.manual_seed(0)
    scores = torch.rand(2, 300, 517)
    boxes, pixels, sums, count = (v.cpu() for v in connected_components(scores.to(device), 0.65, 3, 8192))
    for n in range(2):
        labels, _ = ndimage.label(scores[n].numpy() > 0.65, [[1] * 3] * 3)
        wanted = [(k, v) for k, v in enumerate(ndimage.find_objects(labels)) if (labels[v] == k + 1).sum() >= 3]
        assert count[n] == len(wanted) > 100
        found = set(map(tuple, boxes[n, : len(wanted)].tolist()))
        assert found == {(x.start, y.start, x.stop, y.stop) for _, (y, x) in wanted}
        inside = torch.isin(torch.from_numpy(labels), torch.tensor([k + 1 for k, _ in wanted]))
        assert pixels[n].sum() == inside.sum()
        assert sums[n].sum() == (scores[n][inside].double() * 2**30).round().sum()


def test_vmap_and_fakes(device):
    torch.manual_seed(0)
    scores = scored(torch.rand(3, 2, 12, 40) < 0.3, LEAST).to(device)
    got = torch.vmap(lambda s: connected_components(s, LEAST, 2, 16))(scores)
    for k in range(3):
        for a, b in zip(got, connected_components(scores[k], LEAST, 2, 16), strict=True):
            assert torch.equal(a[k], b)
    torch.library.opcheck(torch.ops.sbnet.connected_components.default, (scores[0], LEAST, 2, 16))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((torch.zeros(4, 4), 0.5, 1, 4), "scores: expected 3 dimensions, got 2"),
        ((torch.zeros(1, 4, 4, dtype=torch.int32), 0.5, 1, 4), "scores: dtype: expected float16, bfloat16 or float32"),
        ((torch.zeros(1, 4, 4), float("nan"), 1, 4), "least: expected a number"),
        ((torch.zeros(1, 4, 4), 0.5, 0, 4), "smallest: expected 1 to"),
        ((torch.zeros(1, 4, 4), 0.5, 1, 0), "capacity: expected 1 to"),
    ],
)
def test_refusals(arguments, why):
    with pytest.raises(RuntimeError, match=why):
        connected_components(*arguments)
