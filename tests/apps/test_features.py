"""Features of a vision transformer on what moves: the cached contract of its tokens, frame by frame, and a film."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

import sbnet
from sbnet.apps import video
from sbnet.apps.pipeline import PipelineError, open_network
from sbnet.apps.pipeline.networks import imagenet
from support import tokens
from support.contract import assert_holds
from support.remembering import Remembering, of_tokens

pytestmark = pytest.mark.skipif(not tokens.available(), reason="torchvision, timm and transformers are not installed")


@pytest.fixture(autouse=True)
def libraries():
    tokens.torchvision()


def test_each_frame_is_what_the_cached_contract_says():
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (4, 64, 96, 3), np.uint8)
    masks = torch.zeros(4, 1, 64, 96)
    masks[1, :, 10:20, 30:70] = masks[3, :, :40, 5:9] = 1
    network, seen, given = open_network("features:test_vit"), [], iter(masks)
    network = dataclasses.replace(network, margin=0, finish=lambda y, frame: (seen.append(y.clone()), (None, []))[1])
    summary = sbnet.Pipeline(
        frames, lambda x: next(given), network, device="cpu", compare=0, dtype=torch.float32
    ).run()  # fmt: skip
    assert (summary.frames, len(seen)) == (4, 4)
    net = network.model.net
    torchs, exact = (
        Remembering(copy.deepcopy(network.model).to(dtype)) for dtype in (torch.float32, torch.float64)
    )  # fmt: skip
    for k, (frame, mask) in enumerate(zip(frames, masks, strict=True)):
        active = torch.ones_like(mask) if k == 0 else mask
        keep = of_tokens(tokens.kept(active, 16, net.num_prefix_tokens))
        x = imagenet(torch.from_numpy(frame).permute(2, 0, 1)[None] / 255)
        assert_holds(seen[k], torchs(x, keep), exact(x.double(), keep))


def test_a_film_has_its_features_as_colours():
    seen = []
    film = str(video.demo_clip())
    summary = sbnet.Pipeline(film, network="features:test_vit", sink=seen.append, device="cpu", limit=4).run()
    assert summary.frames == 4
    assert 0 < seen[-1].density < 1
    pictures = [np.asarray(result.picture) for result in seen]
    assert all(p.shape == (272, 640, 3) for p in pictures)
    still = [(a == b).all(2) for a, b in itertools.pairwise(pictures)]
    assert all(0 < share.mean() < 1 for share in still)  # what is not active keeps its features, and so its colour


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("features:test_resnet", "expected a vision transformer of timm"),
        ("features:no_such_network", "expected a vision transformer of timm, got"),
        ("features:test_vit:none.safetensors", "expected a file of weights for test_vit, got no file"),
    ],
)
def test_other_networks_are_refused(name, why):
    with pytest.raises(PipelineError, match=why):
        open_network(name)
