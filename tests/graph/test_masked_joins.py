"""Inside `sbnet.masked` channels are joined on active blocks, and all that read a map add up its gradient."""

import pytest
import torch
import torch.nn.functional as F
from graph.test_masked_open import BLOCK, data, layers
from graph.test_masked_resizes import check

import sbnet


def first(n, x):
    return F.relu(n["norm"](n["one"](F.relu(n["conv"](x)))))


def shared(n, x):
    """A map that a convolution, a pool, a resize, a join and a sum read."""
    a = first(n, x)
    up = F.interpolate(n["next"](F.max_pool2d(a, 2)), scale_factor=2)
    small = F.interpolate(F.interpolate(a, scale_factor=0.5), scale_factor=2, mode="bilinear")
    return torch.cat([n["next"](torch.cat([a, up], 1)[:, 4:12]), n["one"](small) + a, n["next"](a)], 1)


def counted(n, x):
    """Parts that need no gradient, are closed, or come twice."""
    a = first(n, x)
    b, c = a.detach(), torch.tanh(n["one"](a))
    return F.relu(n["next"](sum(torch.cat([a, b, c, a], 1).split(8, 1))))


def hooked(n, x):
    a = first(n, x)
    a.register_hook(lambda grad: 2 * grad)
    return n["next"](torch.cat([a, n["one"](a)], 1)[:, 4:12])


def halves(n, x, channels):
    """Two open maps, which a window reads next."""
    a, weight = first(n, x), n["next"].weight
    parts = [F.relu(F.conv2d(a, w, padding=1)) for w in (weight[:channels], weight[channels:])]
    return n["next"](torch.cat(parts, 1))


NETWORKS = {
    "shared": shared,
    "counted": counted,
    "hooked": hooked,
    "words": lambda n, x: halves(n, x, 4),
    "no words": lambda n, x: halves(n, x, 3),
}


@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_gradients(device, name, poisoned):
    check(NETWORKS[name], device, poisoned)


def test_autograd_adds_no_planes(device):
    x, mask = data(device)
    with sbnet.masked(mask, BLOCK):
        loss = shared(layers(device), x).square().sum()
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    planes = [e.name for e in profile.events() if e.input_shapes and e.input_shapes[0][:1] == [len(x)]]
    assert "sbnet::sparse_pointwise_" in planes
    assert not {"aten::add", "aten::add_"} & set(planes)
