"""A frame of each camera in one CUDA graph; without a GPU, in the stand-in of test_frame_graph.py."""

from __future__ import annotations

import copy
import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from sbnet import masks
from sbnet.apps.pipeline import Cameras, Frame, Network, Pipeline, tick_graph
from sbnet.apps.pipeline.batch import Batch
from sbnet.apps.pipeline.boxes import _face_boxes, face_candidates, faces_among, located_faces, text_areas, uncovered
from sbnet.apps.pipeline.decode import _apart, _corners, _detr, _rtdetr, _vector, _yolo, decoded
from sbnet.apps.pipeline.networks import one_of
from sbnet.apps.pipeline.tick_graph import of_each, row_of
from sbnet.apps.surface import Look, Surface
from sbnet.masks.motion import joined_motion

SIZE = (32, 48)


class Replayed:
    """What `cuda_graph` gives, on any device: a replay writes where the capture wrote."""

    count = 0

    def __init__(self, run) -> None:
        self.run = run
        for _ in range(3):
            run()
        self.made = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, run())

    def replay(self) -> None:
        Replayed.count += 1
        new, old = (pytree.tree_leaves(v) for v in (self.run(), self.made))
        for given, own in zip(new, old, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """On a CPU, cameras that take themselves to be on a GPU."""
    Replayed.count = 0
    if request.param == "cpu":
        made = Batch.__init__

        def init(self, *given) -> None:
            made(self, *given)
            for mask in self.masks:
                mask.expect_boxes(self.network.located is not None)
            self._together = all(mask.captured for mask in self.masks)

        def graph(run, device):
            found = Replayed(run)
            return found, found.made

        monkeypatch.setattr(Batch, "__init__", init)
        monkeypatch.setattr(tick_graph, "cuda_graph", graph)
    else:
        monkeypatch.setattr(tick_graph.TickGraph, "replay", counted(tick_graph.TickGraph.replay))
    return request.param


def counted(call):
    def called(graph):
        Replayed.count += not graph._eager()
        return call(graph)

    return called


def frames(count: int, row: int = 8, step: int = 4) -> list[np.ndarray]:
    """A bright square walks over a dark floor."""
    found = []
    for k in range(count):
        picture = np.full((*SIZE, 3), 10, np.uint8)  # so dark that black before it would be no cut
        picture[row : row + 8, step * k % 40 : step * k % 40 + 8] = 230
        found.append(picture)
    return found


def edges() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)).eval()


def own() -> list:
    return [masks.MotionMask(), masks.Changed(0.1), masks.MotionMask()]


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
def test_each_camera_is_as_alone(mode, device):
    """Of different lengths: the graph serves as long as there is a frame of each."""
    sources = [frames(7), frames(5, 16), frames(6, 0, 8)]
    order = {"mode": mode, "margin": 2, "block": 8, "device": device, "dtype": torch.float32, "compare": 0}
    seen: list = [[] for _ in sources]
    Cameras(
        sources, own(), Network(edges(), "edges"), lambda k, result: seen[k].append(result), patience=5.0, **order
    ).run()
    assert Replayed.count == (4 if mode == "cached" else 5)
    for source, mask, results in zip(sources, own(), seen, strict=True):
        alone: list = []
        Pipeline(source, mask, Network(edges()), alone.append, **order).run()
        assert [r.frame.index for r in results] == list(range(len(source)))
        for got, wanted in zip(results, alone, strict=True):
            if mode != "cached" or got.frame.index:  # of a first frame in cached mode all is computed, masked or not
                assert np.array_equal(got.active, wanted.active)
            assert got.density == pytest.approx(got.active.mean())
            assert np.abs(got.picture.astype(int) - wanted.picture).max() <= 1


def test_no_call_with_a_frame_of_each_camera_is_made_step_by_step(device, monkeypatch):
    def stepped(*_):
        raise AssertionError("step by step")

    monkeypatch.setattr(Batch, "_stepped", stepped)
    seen: list = [[], []]
    Cameras([frames(4), frames(4, 16)], own()[:2], Network(edges(), "edges"), lambda k, r: seen[k].append(r.density),
            mode="cached", compare=0, device=device, dtype=torch.float32, patience=5.0).run()  # fmt: skip
    assert [densities[0] for densities in seen] == [1.0, 1.0]
    assert Replayed.count == 3


class Bright(nn.Module):
    """A detector of bright cells of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 8, 8)
        nn.init.zeros_(self.conv.bias)
        with torch.no_grad():
            self.conv.weight.zero_()
            self.conv.weight[1] = 1 / 192

    def forward(self, x):
        scores = self.conv(x)
        rows, columns = (torch.arange(n, dtype=x.dtype, device=x.device) * 8 + 4 for n in scores.shape[2:])
        centre = torch.stack([columns.expand(len(rows), -1), rows[:, None].expand(-1, len(columns))])[None]
        centre = centre.expand(len(x), -1, -1, -1)
        return torch.cat([centre, torch.full_like(centre, 12.0), scores], 1).flatten(2)


def test_records_of_each_camera_are_its_own(device):
    sources = [frames(5, 8, 8), frames(5, 16, 8)]
    found: list = [[] for _ in sources]
    network = decoded(Network(Bright().eval(), "bright"), "yolo:0.5")
    Cameras(sources, "motion", network, lambda k, r: found[k].append([one["box"] for one in r.records]), compare=0,
            device=device, dtype=torch.float32, patience=5.0).run()  # fmt: skip
    assert Replayed.count == 4
    for row, boxes in zip((8, 16), found, strict=True):
        wanted = [[[max(0, 8 * k - 2), row - 2, 8 * k + 10, row + 10]] for k in (0, 1, 2, 3, 4)]
        assert boxes == wanted


@pytest.mark.parametrize("mask", [masks.Tracks(refresh=3), masks.MotionMask() | masks.Tracks(0.5, 4)])
@pytest.mark.parametrize("mode", ["masked", "cached"])
def test_masks_that_follow_boxes_do_not_wait_for_records(mask, mode, device):
    """Blocks and records of each camera are those of its film alone, whose mask learns from records."""
    sources = [frames(8, 8, 8), frames(8, 16, 4), [np.zeros((*SIZE, 3), np.uint8)] * 8]
    found: list = [[] for _ in sources]
    network = decoded(Network(Bright().eval(), "bright"), "yolo:0.5")
    network.margin, network.multiple = 0, 8
    order = {"compare": 0, "dtype": torch.float32, "mode": mode, "block": 1}
    Cameras(sources, mask, network, lambda k, r: found[k].append(r), device=device, patience=5.0, **order).run()
    assert Replayed.count == (7 if mode == "cached" else 8)
    for source, results in zip(sources, found, strict=True):
        alone: list = []
        Pipeline(source, copy.deepcopy(mask), network, alone.append, device="cpu", **order).run()
        assert [r.records for r in results] == [r.records for r in alone]
        for got, wanted in list(zip(results, alone, strict=True))[mode == "cached" :]:
            assert np.array_equal(got.active, wanted.active)
    assert len({result.active.tobytes() for result in found[1]}) > 3


def _settled(decode):
    """What a decoder gives on a GPU: candidates, and which of them stay."""

    def landing(output):
        found = decode(output)
        valid = found[4] >= 0.3
        return found, *uncovered(_apart(_corners(found), found[5], valid), valid, 0.5), None

    return landing


def _faces(output):
    rows, *_ = face_candidates(*output, 0.3)
    return rows, *uncovered(_face_boxes(rows), rows[0] > 0.3, 0.3)


def _classes(output):
    return _vector(output, (1, 1))


def _lines(output):
    return text_areas(output, (30, 37), 0.6, 4)


@pytest.mark.parametrize(
    ("landing", "shapes"),
    [
        (_settled(_yolo), [(9, 300)]),
        (_settled(_yolo), [(300, 9)]),
        (_settled(_yolo), [(50, 6)]),
        (_rtdetr, [(40, 5), (40, 4)]),
        (_detr, [(40, 5), (40, 4)]),
        (_classes, [(10,)]),
        (_lines, [(1, 32, 40)]),
        (_faces, [(1, 12, 16), (2, 12, 16), (2, 12, 16)]),
    ],
)
def test_decoders_of_all_cameras_at_once_give_what_each_gives(landing, shapes, device):
    torch.manual_seed(0)
    output = [torch.rand(3, *shape, device=device) for shape in shapes]
    if landing in (_classes, _lines):
        (output,) = output
    stacked = of_each(landing, output, 3)
    for k in range(3):
        wanted = landing(row_of(output, k, 3))
        got = pytree.tree_map_only(torch.Tensor, lambda v, k=k: v[k], stacked)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
            assert a is b is None or a.dtype == b.dtype
            assert a is None or torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["faces", "yolo", "detr"])
@pytest.mark.parametrize("settled", [False, True])
def test_records_of_all_cameras_at_once_are_those_of_each(kind, settled):
    """Of images with none, some and many candidates. settled: as a GPU leaves them, certain of some images alone."""
    torch.manual_seed(0)
    given = [Frame(k, np.zeros((256 - 8 * k, 320 - 16 * k, 3), np.uint8)) for k in range(4)]
    if kind == "faces":
        network = Network(None, finish_all=partial(faces_of, 0.3), located=partial(located_faces, least=0.3))
        maps = torch.rand(4, 1, 64, 80), torch.rand(4, 2, 64, 80) * 3, torch.rand(4, 2, 64, 80)
        maps[0][0] = 0
        maps[0][1] *= 0.31
        landed = [face_candidates(*(v[k : k + 1] for v in maps), 0.3)[0] for k in range(4)]
        settle = lambda rows: uncovered(_face_boxes(rows), rows[0] > 0.3, 0.3)  # noqa: E731
    else:
        network = decoded(Network(None), f"{kind}:0.3")
        boxes, scores = torch.rand(4, 4, 300) * 200, torch.rand(4, 3, 300) ** 4
        scores[0] = 0
        if kind == "yolo":
            landed = [_yolo(torch.cat([boxes, scores], 1)[k : k + 1]) for k in range(4)]
        else:
            logits = 5 * torch.cat([scores, 1 - scores.amax(1, keepdim=True)], 1)
            landed = [_detr([logits[k : k + 1].mT, boxes[k : k + 1].mT / 256]) for k in range(4)]
        settle = lambda rows: uncovered(_apart(_corners(rows), rows[5], rows[4] >= 0.3), rows[4] >= 0.3, 0.7)  # noqa: E731
    kept = certain = None
    if settled:
        kept, certain = (torch.stack(one) for one in zip(*map(settle, landed), strict=True))
        certain[2] = False
        kept[2] = ~kept[2]  # which is not to be believed
    stacked = torch.stack(landed), kept, certain
    together = network.concluded_all(stacked, given)
    for k, (frame, (_, records)) in enumerate(zip(given, together, strict=True)):
        (alone,) = network.concluded_all((landed[k][None], None, None), [frame])
        assert records == alone[1] == one_of(network.finish_all)((landed[k], None, None), frame)[1]
    assert [bool(records) for _, records in together] == [False, True, True, True]
    for k, (frame, (_, records)) in enumerate(zip(given, together, strict=True)):
        own = [None if v is None else v[k] for v in stacked]
        boxes, counts = network.located(own, frame.size)
        boxes, counts = (boxes[counts].double() * 10).round() / 10, int(counts.sum())
        assert len(records) <= counts  # where the host settles overlaps, all that it may leave count
        assert counts == len(records) or not settled or not certain[k]
        assert all(np.abs(boxes - torch.tensor(r["box"])).amax(1).amin() < 0.11 for r in records)


def faces_of(least, found, frames):
    return [(None, own) for own in faces_among(found, [frame.size for frame in frames], least)]


def test_a_decoder_that_cannot_see_all_cameras_at_once_sees_one_after_the_other(device):
    def finish(scores, frame):
        return None, [{"box": scores.tolist()}]

    class Plain(torch.autograd.Function):  # which vmap does not know
        @staticmethod
        def forward(ctx, y):
            return y.amax((2, 3))

    sources, found = [frames(4), frames(4, 16)], [[], []]
    network = Network(edges(), "edges", landing=lambda y, size: Plain.apply(y), finish=finish)
    Cameras(sources, "motion", network, lambda k, r: found[k].append(r.records), compare=0, device=device,
            dtype=torch.float32, patience=5.0).run()  # fmt: skip
    assert Replayed.count == 4
    alone: list = [[], []]
    for source, seen in zip(sources, alone, strict=True):
        Pipeline(source, "motion", network, lambda r, seen=seen: seen.append(r.records), compare=0, device=device,
                 dtype=torch.float32).run()  # fmt: skip
    for got, wanted in zip(found, alone, strict=True):
        for a, b in zip(got, wanted, strict=True):
            assert np.allclose(a[0]["box"], b[0]["box"], atol=1e-5)


def test_a_camera_that_is_late_does_not_stop_the_graph_for_good(device):
    release, seen = threading.Event(), [[], []]

    def stalls():
        yield from frames(3)
        release.wait(60)
        yield from frames(3)

    def steady():
        for k, picture in enumerate(frames(14)):
            if k == 9:
                release.set()
            yield picture

    run = Cameras([steady(), stalls()], "motion", Network(edges(), "edges"), lambda k, r: seen[k].append(r.frame.index),
                  patience=0.2, device=device, dtype=torch.float32, compare=0)  # fmt: skip
    run.run()
    assert [len(one) for one in seen] == [14, 6]
    assert Replayed.count > 3


def test_surfaces_and_pictures_that_the_host_decoded_together(device):
    """Of one kind they go into the graph; of two, step by step: results are the same."""
    planes = [np.random.default_rng(k).integers(0, 256, (48, 48), np.uint8) for k in range(4)]

    def surfaces(look):
        return [Frame(k, Surface(torch.from_numpy(p).to(device), look)) for k, p in enumerate(planes)]

    def pictures(look):
        return [Frame(k, Surface(torch.from_numpy(p), look).rgb().numpy()) for k, p in enumerate(planes)]

    found, replays = [], []
    for first, second in ((pictures, pictures), (surfaces, surfaces), (surfaces, pictures)):
        seen: list = [[], []]
        Replayed.count = 0
        Cameras([first(Look(1)), second(Look(1))], "motion", Network(edges(), "edges"),
                lambda k, r, seen=seen: seen[k].append(r.picture), patience=5.0, device=device, dtype=torch.float32,
                compare=0, mode="masked").run()  # fmt: skip
        found.append([np.stack(one).astype(int) for one in seen])
        replays.append(Replayed.count)
    assert replays == [4, 4, 0]
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            assert np.abs(got - wanted).max() <= 1


def test_now_and_then_the_dense_network_runs_beside(device):
    run = Cameras([frames(8), frames(8, 16)], "changed", Network(edges(), "edges"), None, mode="cached", margin="halo",
                  compare=2, patience=5.0, device=device, dtype=torch.float32)  # fmt: skip
    summary = run.run()
    assert Replayed.count
    assert summary.errors.count >= 3
    assert summary.errors.mean < 1e-4


def test_motion_masks_of_all_cameras_are_one_call_with_the_memory_of_each():
    """Calls on all images, and on one of them alone as when a camera is late, in any order."""
    x = torch.rand(6, 3, 3, *SIZE)
    joined, apart = ([masks.MotionMask(threshold=0.1, cut=0.4) for _ in range(3)] for _ in range(2))
    joint = joined_motion(joined, x[0])
    for k, frame in enumerate(x):
        if k in (2, 3):
            assert torch.equal(joined[1](frame[1:2]), apart[1](frame[1:2]))
        else:
            wanted = torch.cat([one(frame[n : n + 1]) for n, one in enumerate(apart)])
            assert torch.equal(joint(frame), wanted)
            assert bool(wanted.all()) == (k == 0)
    joined[2].reset()
    assert joint(x[0])[2].all()
    assert not joint(x[0])[0].all()


@pytest.mark.parametrize(
    "other", [masks.MotionMask(threshold=0.2), masks.MotionMask() | masks.MotionMask(), masks.Ink()]
)
def test_other_masks_stay_apart(other):
    assert joined_motion([masks.MotionMask(), other], torch.rand(2, 3, *SIZE)) is None
