"""What a run sees of the world around it: weights that are replaced, modes of PyTorch, threads, forks."""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import sbnet
from sbnet.graph.capture import capture
from support.contract import assert_holds
from support.helpers import run_python
from support.networks import Residual, UNet, conv, lively

SIZE = (24, 32)


pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of prune, where it is captured


def assert_follows(run, net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        want, exact = net(x), copy.deepcopy(net).double()(x.double())
    assert_holds(run(x, torch.ones(1, *SIZE, device=x.device)), want, exact)


# ---- weights


def assigned(net: nn.Module) -> None:
    net.load_state_dict({k: v.clone() * 1.5 for k, v in net.state_dict().items()}, assign=True)


def another_weight(net: nn.Module) -> None:
    net[1][0].weight = nn.Parameter(torch.randn_like(net[1][0].weight))


def another_buffer(net: nn.Module) -> None:
    net[1][1].running_mean = net[1][1].running_mean + 1


def another_part(net: nn.Module) -> None:
    net[1][0] = nn.Conv2d(8, 8, 3, padding=1, bias=False).to(net[0][0].weight.device)


def a_part_less(net: nn.Module) -> None:
    del net[1]


def no_bias(net: nn.Module) -> None:
    net[2].bias = None


def normalised(net: nn.Module) -> None:
    parametrizations.weight_norm(net[1][0])
    with torch.no_grad():
        net[1][0].parametrizations.weight.original0.mul_(2)


def normalised_as_of_old(net: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net[1][0])
    with torch.no_grad():
        net[1][0].weight_g.mul_(2)


def pruned(net: nn.Module) -> None:
    prune.l1_unstructured(net[1][0], "weight", 0.6)


def another_eps(net: nn.Module) -> None:
    net[1][1].eps = 0.7


def another_dilation(net: nn.Module) -> None:
    net[1][0].dilation = net[1][0].padding = (2, 2)


def another_padding(net: nn.Module) -> None:
    net[2].padding_mode = "reflect"


def a_hook(net: nn.Module) -> None:
    net[0].register_forward_hook(lambda part, given, made: made * 2)


def a_hook_before(net: nn.Module) -> None:
    net[1].register_forward_pre_hook(lambda part, given, more: ((given[0] + 1,), more), with_kwargs=True)


def another_forward(net: nn.Module) -> None:
    net[1].forward = lambda x: x * 2


def a_training_forward(net: nn.Module) -> None:
    net.train()
    net(torch.randn(4, 3, *SIZE, device=net[0][0].weight.device) + 3)
    net.eval()


def other_data(net: nn.Module) -> None:
    net.half().float()
    net[0][0].weight.data = net[0][0].weight.data * 2


CHANGES = [
    assigned, another_weight, another_buffer, another_part, a_part_less, no_bias, normalised, normalised_as_of_old,
    pruned, another_eps, another_dilation, another_padding, a_hook, a_hook_before, another_forward,
    a_training_forward,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["masked", "exact", "cached"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_is_replaced_is_followed(change, mode, device):
    net = lively(nn.Sequential(conv(3, 8), conv(8, 8), nn.Conv2d(8, 4, 3, padding=1))).to(device)
    x = torch.randn(1, 3, *SIZE, device=device)
    run = sbnet.sparsify(net, x, mode=mode)
    clone = run.clone()
    assert_follows(run, net, x)
    before = run(x, torch.ones(1, *SIZE, device=device), copy=True)
    change(net)
    for follower in (run, clone):
        if mode == "cached":
            follower.reset()
        assert_follows(follower, net, x)
    assert not torch.allclose(run(x, torch.ones(1, *SIZE, device=device)), before, atol=1e-3)


def test_data_that_is_swapped_is_followed_on_a_cpu():
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x)
    other_data(net)
    assert_follows(run, net, x)


def test_what_is_taken_away_again_is_followed():
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x)
    normalised(net)
    assert_follows(run, net, x)
    parametrize.remove_parametrizations(net[1][0], "weight")
    assert_follows(run, net, x)


def test_old_weights_are_left_alone(device):
    """A run does not write what it was made of: its owner may take them back."""
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))).to(device), torch.randn(1, 3, *SIZE, device=device)
    run, old = sbnet.sparsify(net, x), net[1][0].weight
    kept = old.detach().clone()
    another_weight(net)
    assert_follows(run, net, x)
    assert torch.equal(old, kept)
    net[1][0].weight = old
    assert_follows(run, net, x)


def test_numbers_of_the_same_value_are_no_change():
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))), torch.randn(1, 3, *SIZE)
    run, mask = sbnet.sparsify(net, x), torch.ones(1, *SIZE)
    run(x, mask)
    planned = run.compiled
    net[1][1].eps = float(repr(net[1][1].eps))
    net[1][0].padding = tuple([1, 1])
    run(x, mask)
    assert run.compiled is planned


def test_an_export_has_the_weights_of_now():
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))), torch.randn(1, 3, *SIZE)
    run = sbnet.sparsify(net, x)
    another_weight(net)
    assert_follows(run.as_module(), net, x)


# ---- modes of PyTorch


def made(kind: str, net: nn.Sequential, x: Tensor):
    """A run of a network of two convolutions, in any mode."""
    return sbnet.sparsify(net, x, block=4, mode=kind)


@pytest.mark.parametrize("first", ["made", "used"])
@pytest.mark.parametrize("kind", ["masked", "exact", "cached"])
def test_inference_mode_leaves_nothing_behind(kind, first, device):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)).to(device)
    x, full = torch.randn(1, 3, *SIZE, device=device), torch.ones(1, *SIZE, device=device)
    with torch.inference_mode(first == "made"):
        run = made(kind, net, x)
    with torch.inference_mode():
        run(x.clone(), 0 * full)
        inside = run(x.clone(), full).clone()
        if kind in ("masked", "exact", "cached"):
            run(x[..., :24].clone(), full[..., :24])
    assert torch.equal(run(x, full), inside)
    if kind != "exact":
        assert kind == "cached" or not run(x, 0 * full).any()
    run(x, full).add_(1)  # a caller may, outside of inference mode
    assert torch.equal(run(x, full), inside)
    if kind in ("masked", "exact", "cached"):
        run(x[..., :24], full[..., :24])
        with torch.no_grad():
            net[0].weight.mul_(2)
        assert_follows(run, net, x)
        with torch.inference_mode():
            assert_follows(run, net, x)


def test_a_capture_in_inference_mode_is_one_outside_of_it():
    net, x = lively(Residual()), torch.randn(1, 3, *SIZE)
    with torch.inference_mode():
        inside = capture(net, (x,))
    assert str(inside) == str(capture(net, (x,)))


class Tokens(nn.Module):
    """A convolution, and a product that has no sparse form."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2)
        return x @ x.mT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype, device):
    """A run computes in the dtype of its example, wherever it was made and wherever it is called."""
    net, x = lively(Tokens()).to(device), torch.randn(1, 3, *SIZE, device=device)
    mask = torch.rand(1, *SIZE, device=device) < 0.1
    want = sbnet.sparsify(net, x)(x, mask, copy=True)
    with torch.autocast(device, dtype=dtype):
        run = sbnet.sparsify(net, x)
        assert torch.equal(run(x, mask), want)
        assert torch.is_autocast_enabled(device)
    assert torch.equal(run(x, mask), want)
    assert run(x, mask).dtype == torch.float32


def test_inside_of_masked_is_said_to_be_no_place():
    net, x = lively(nn.Sequential(conv(3, 8))), torch.randn(1, 3, *SIZE)
    mask, run = torch.ones(1, *SIZE), sbnet.sparsify(net, x)
    with sbnet.masked(mask):
        for name, call in {"sparsify": lambda: sbnet.sparsify(net, x), "run": lambda: run(x, mask)}.items():
            with pytest.raises(RuntimeError, match=f"sbnet: {name}: expected a call outside of sbnet.masked"):
                call()
        net(x)
    assert run(x, mask).shape == (1, 8, *SIZE)


def test_a_call_without_a_mask_is_named():
    run = sbnet.sparsify(lively(conv(3, 8)), torch.randn(1, 3, *SIZE))
    with pytest.raises(ValueError, match="sbnet: run: mask: expected a tensor, got None"):
        run(torch.randn(1, 3, *SIZE), None)


# ---- threads


def in_threads(*work) -> list[BaseException]:
    raised: list[BaseException] = []
    start = threading.Barrier(len(work))

    def call(f) -> None:
        start.wait()
        try:
            f()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=call, args=(f,)) for f in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_threads_may_capture_at_once():
    """Networks of their own, one network, clones that meet a new shape, and one that is called meanwhile."""
    nets = [lively(UNet("nearest")) for _ in range(3)]
    x, wide = torch.randn(1, 3, *SIZE), torch.randn(1, 3, 32, 40)
    shared, mask = sbnet.sparsify(nets[0], x, block=4), torch.rand(1, *SIZE) < 0.2
    want, clones = shared(x, mask, copy=True), [shared.clone() for _ in range(2)]
    found: list[Tensor] = []

    def make(net: nn.Module) -> None:
        found.append(sbnet.sparsify(net, wide, block=4)(wide, torch.ones(1, 32, 40), copy=True))

    def call() -> None:
        for _ in range(20):
            assert torch.equal(shared(x, mask), want)

    work = [lambda net=net: make(net) for net in (*nets, nets[1])]
    work += [lambda clone=clone: clone(wide, torch.ones(1, 32, 40)) for clone in clones]
    assert in_threads(*work, call) == []
    assert len(found) == 4
    for net in nets:
        with torch.no_grad():
            want = net(wide)
        assert any(torch.allclose(want, got, atol=1e-4) for got in found)
        assert not any(part.training for part in net.modules())
        assert all(type(p) is nn.Parameter for p in net.parameters())
    make(nets[0])  # nor is anything left behind


def test_a_call_waits_for_another_threads_capture_of_its_network():
    """While torch.export has tensors of its own in a module, nothing is taken for replaced."""
    net, x = lively(nn.Sequential(conv(3, 8), conv(8, 8))), torch.randn(1, 3, *SIZE)
    run, mask, began, went_on = sbnet.sparsify(net, x), torch.ones(1, *SIZE), threading.Event(), []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            began.set()
            time.sleep(0.3)
            return self.net(x)

    def call() -> None:
        began.wait()
        planned = run.compiled
        run(x, mask)
        went_on.append(run.compiled is planned)

    assert in_threads(lambda: sbnet.sparsify(Slow().eval(), x), call) == []
    assert went_on == [True]


# ---- forks

FORK = """
import os, sys, threading, time, torch, sbnet
from torch import nn
net = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)], nn.Softmax(1)).eval()
x, mask = torch.rand(1, 16, 128, 128), torch.ones(1, 128, 128)
run = sbnet.sparsify(net, x, block=16)
want, stop = run(x, mask, copy=True), False

def work():
    while not stop:
        run(x, mask)

def capture():
    while not stop:
        sbnet.sparsify(net[:1], x)

threads = [threading.Thread(target=f) for f in (work, capture)[:int(sys.argv[1])]]
for t in threads: t.start()
time.sleep(0.2)
for _ in range(4):
    child = os.fork()
    if not child:
        right = torch.allclose(run(x, mask), want, atol=1e-6) and torch.allclose(run.clone()(x, mask), want, atol=1e-6)
        sbnet.sparsify(net[:1], x)
        os._exit(0 if right else 3)
    end = time.time() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done: break
        if time.time() > end:
            os.kill(child, 9)
            sys.exit("a child hangs")
        time.sleep(0.01)
    if status: sys.exit(f"a child ended with {status}")
stop = True
for t in threads: t.join()
print("children were right")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(
    "threads",
    [
        pytest.param(0, marks=pytest.mark.slow, id="alone"),
        pytest.param(1, id="beside a call"),
        pytest.param(2, marks=pytest.mark.slow, id="beside a capture"),
    ],
)
def test_children_compute(threads):
    ran = run_python(f"import sys; sys.argv[1:] = ['{threads}']\n{FORK}")
    assert ran.stdout == "children were right\n", ran.stderr
