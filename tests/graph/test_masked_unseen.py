"""Inside `sbnet.masked`: ops by other names than torch.nn's, writes beside the first argument, and what no mode of
functions sees, which is refused. The oracle multiplies by the mask."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sbnet
from support.helpers import assert_as_accurate_as_torch

aten = torch.ops.aten
MASK = torch.zeros(2, 32, 32, dtype=torch.bool)
MASK[0, 8:24, 8:24] = MASK[1, :16, :8] = True
BLOCK = 8


@torch.library.custom_op("sbnet_tests::twice_into", mutates_args={"out"})
def twice_into(x: Tensor, out: Tensor) -> None:
    out.copy_(2 * x + 1)


def conv(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 32, 32), torch.randn(8, 8, 3, 3) / 8


def held(run, oracle) -> None:
    """run(x, weight) inside the context gives what oracle(x, weight, mask) gives in float64."""
    x, weight = tensors()
    mask = MASK[:, None]
    exact, torchs = (oracle(x.to(t), weight.to(t), mask.to(t)) for t in (torch.float64, torch.float32))
    with sbnet.masked(MASK, block=BLOCK):
        got = run(x, weight)
    assert_as_accurate_as_torch(got, torchs, exact)


def normalised(x: Tensor, m: Tensor, groups: int) -> Tensor:
    v = x.unflatten(1, (groups, -1))
    count = m.sum((2, 3), keepdim=True)[:, None] * v.shape[2]
    mean = (v * m[:, None]).sum((2, 3, 4), keepdim=True) / count
    var = ((v - mean).square() * m[:, None]).sum((2, 3, 4), keepdim=True) / count
    return ((v - mean) / (var + 1e-5).sqrt()).flatten(1, 2) * m


@pytest.mark.parametrize("norm", [F.instance_norm, nn.InstanceNorm2d(8), lambda x: F.group_norm(x, 8)])
def test_norms_of_instances_are_of_active_pixels(norm):
    held(lambda x, w: norm(conv(x, w)), lambda x, w, m: normalised(conv(x, w), m, 8))


def test_ops_of_aten_are_layers():
    def run(x, w):
        for copied in (aten.clone.default(x), aten._to_copy.default(x), aten.slice.Tensor(x, 2, 0, 32)):
            y = aten.conv2d.default(copied, w, None, [1, 1], [1, 1])
        return aten.conv2d(aten.relu(y), w, None, [1, 1], [1, 1])

    held(run, lambda x, w, m: conv(F.relu(conv(x, w) * m), w) * m)


def test_functions_in_python_take_other_arguments():
    x, other = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
    want = aten.cdist.default(x, other, 2.0, 1)
    with sbnet.masked(torch.ones(2, 32, 32)):
        assert torch.equal(aten.cdist.default(x, other, 2.0, 1), want)


def written(write):
    """A map is read, written and read again."""

    def run(x, w):
        a = conv(x, w)
        before = conv(a, w)
        write(x, a)
        return before + conv(a, w)

    return run


WRITES = {
    "overload": (lambda x, a: aten.relu_.default(a), lambda x, a: F.relu(a)),
    "packet": (lambda x, a: aten.mul_(a, 3.0), lambda x, a: 3 * a),
    "out=": (lambda x, a: torch.mul(x, 2, out=a), lambda x, a: 2 * x),
    "second argument": (lambda x, a: twice_into(x, a), lambda x, a: 2 * x + 1),
    "by name": (lambda x, a: twice_into(x, out=a), lambda x, a: 2 * x + 1),
}


@pytest.mark.parametrize("how", WRITES)
@torch.no_grad()
def test_writes_beside_methods_are_seen(how):
    write, value = WRITES[how]

    def oracle(x, w, m):
        a = conv(x, w) * m
        return conv(a, w) * m + conv(value(x, a) * m, w) * m

    held(written(write), oracle)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


@pytest.mark.parametrize(
    "form",
    [
        lambda net, x: torch.export.export(net, (x,)).module(),
        lambda net, x: torch.export.export(net, (x,)).run_decompositions().module(),
        lambda net, x: torch.compile(net, backend="aot_eager"),
    ],
)
def test_other_forms_of_a_module_are_masked(form):
    net, (x, _) = network(), tensors()
    other = form(net, x)
    mask = MASK[:, None]

    def oracle(dtype):
        double = network().to(dtype)
        double.load_state_dict(net.state_dict())
        return double[2](F.relu(double[0](x.to(dtype)) * mask)) * mask

    with sbnet.masked(MASK, block=BLOCK):
        got = other(x)
    assert_as_accurate_as_torch(got, oracle(torch.float32), oracle(torch.float64))


STATISTICS = {
    "torch.batch_norm": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    "torch.native_batch_norm": lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0],
    "SyncBatchNorm's": lambda x: torch.batch_norm_stats(x, 1e-5)[0],
    "torch.group_norm": lambda x: torch.group_norm(x, 2),
    "aten": lambda x: aten.batch_norm.default(x, None, None, None, None, True, 0.1, 1e-5, False),
    "groups as instances": lambda x: F.instance_norm(x.unflatten(1, (4, 2))),
    "groups, flat": lambda x: F.group_norm(x.flatten(2), 4),
    "a batch, flat": lambda x: F.batch_norm(x.flatten(2), None, None, training=True),
    "a batch of tokens": lambda x: nn.BatchNorm1d(8)(x.flatten(2).mT.flatten(0, 1)),
    "instances of all images": lambda x: F.instance_norm(x.flatten(0, 1)[None]),
    "running, of instances": lambda x: nn.InstanceNorm2d(8, track_running_stats=True)(x),
    "running, float64": lambda x: F.batch_norm(x, torch.zeros(8).double(), torch.ones(8).double(), training=True),
}


@pytest.mark.parametrize("how", STATISTICS)
def test_statistics_of_all_pixels_are_refused(how):
    x, weight = tensors()
    with pytest.raises(NotImplementedError, match="sbnet: masked: .*statistics"), sbnet.masked(MASK, block=BLOCK):
        STATISTICS[how](conv(x, weight))


def test_batch_norms_of_tokens_in_eval_mode_are_none_of_them():
    norm = nn.BatchNorm1d(8).eval()
    nn.init.normal_(norm.bias)
    held(
        lambda x, w: norm(conv(x, w).flatten(2)).view(2, 8, *MASK.shape[1:]),
        lambda x, w, m: norm.to(x)(conv(x, w).mul(m).flatten(2)).view_as(m.expand(2, 8, -1, -1)) * m,
    )


def test_running_statistics_that_are_given_need_no_pixels():
    mean, var = torch.randn(8), torch.rand(8) + 0.5
    held(
        lambda x, w: torch.batch_norm(conv(x, w), None, None, mean, var, False, 0.1, 1e-5, False),
        lambda x, w, m: F.batch_norm(conv(x, w), mean.to(x), var.to(x)) * m,
    )


@torch.jit.script
def scripted(x: Tensor, times: float) -> Tensor:
    return torch.relu(x * times + 1)


SCRIPTS = {
    "scripted": lambda net, x: torch.jit.script(net),
    "traced": lambda net, x: torch.jit.trace(net, x),
    "a function": lambda net, x: lambda t: scripted(t, 2.0),
    "by name": lambda net, x: lambda t: scripted(times=2.0, x=t),
    "seen as [N,H,W,C]": lambda net, x: lambda t: scripted(t.permute(0, 2, 3, 1), 2.0),
    "tokens": lambda net, x: lambda t: scripted(t.flatten(2), 2.0),
}


@pytest.mark.parametrize("how", SCRIPTS)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_scripts_between_eager_layers_are_refused(how, with_gradients):
    """Without gradients nothing tells what they gave from what a network was given."""
    net, (x, weight) = network(), tensors()
    script = SCRIPTS[how](net, x)
    refused = pytest.raises(NotImplementedError, match="of torch.jit")
    with torch.set_grad_enabled(with_gradients), refused, sbnet.masked(MASK, block=BLOCK):
        script(conv(x, weight))


@pytest.mark.filterwarnings("ignore")
def test_scripts_run_on_what_is_no_map():
    x, weight = tensors()
    given = torch.randn(5)
    with sbnet.masked(MASK, block=BLOCK):
        conv(x, weight)
        got = scripted(given, 2.0)
    assert torch.equal(got, torch.relu(given * 2 + 1))
    assert torch.equal(scripted(x, 2.0), torch.relu(x * 2 + 1))  # outside of a context, anything


UNSEEN = {
    "jit.script": lambda net, x: conv(torch.jit.script(net)(x), x[:, :, :3, :3].new_ones(8, 8, 3, 3)),
    "vmap": lambda net, x: torch.vmap(lambda t: net(t[None])[0])(x).square().sum(),
    "func.grad": lambda net, x: torch.func.grad(lambda t: net(t).square().sum())(x),
    "checkpoint": lambda net, x: checkpoint(net, net(x), use_reentrant=True).square().sum(),
}


@pytest.mark.parametrize("how", UNSEEN)
@pytest.mark.filterwarnings("ignore")
def test_what_no_mode_sees_is_refused(how):
    net, (x, _) = network(), tensors()
    with pytest.raises(NotImplementedError, match="sbnet: masked: expected"), sbnet.masked(MASK, block=BLOCK):
        UNSEEN[how](net, x)


def test_layers_of_another_thread_are_refused():
    net, (x, _) = network(), tensors()
    refused = pytest.raises(ValueError, match="in this thread")
    with ThreadPoolExecutor(1) as thread, refused, sbnet.masked(MASK, block=BLOCK):
        thread.submit(net, x).result()


def test_functions_of_autograd_are_seen_through():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x + 1

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    def run(x, w):
        return conv(Doubled.apply(conv(x, w.requires_grad_())), w).detach()

    held(run, lambda x, w, m: conv((2 * conv(x, w) + 1) * m, w) * m)


CONVOLUTIONS = {  # op, sides of x and of the weight, dtype
    "float64": (F.conv2d, (2, 8, 32, 32), (8, 8, 3, 3), torch.float64),
    "transposed": (F.conv_transpose2d, (2, 8, 32, 32), (8, 8, 3, 3), torch.float64),
    "no batch": (F.conv2d, (2, 32, 32), (8, 2, 3, 3), torch.float32),
    "volumes": (F.conv3d, (2, 1, 4, 32, 32), (1, 1, 3, 3, 3), torch.float32),
}


@pytest.mark.parametrize("what", CONVOLUTIONS)
def test_convolutions_that_would_run_dense_are_refused(what):
    op, *sides, dtype = CONVOLUTIONS[what]
    x, weight = (torch.randn(s, dtype=dtype) for s in sides)
    refused = pytest.raises((NotImplementedError, ValueError), match="sbnet: masked: .*expected .*, got")
    with refused, sbnet.masked(MASK, block=BLOCK):
        op(x, weight)


DOUBLED = {
    "double": lambda y: y.double(),
    "to": lambda y: y.to(torch.float64),
    "[N,H,W,C]": lambda y: y.permute(0, 2, 3, 1).double(),
}


@pytest.mark.parametrize("how", DOUBLED)
def test_maps_of_float64_are_refused(how):
    x, weight = tensors()
    refused = pytest.raises(NotImplementedError, match="expected maps of float32.*got one that became torch.float64")
    with refused, sbnet.masked(MASK, block=BLOCK):
        DOUBLED[how](conv(x, weight))


CASTS = {
    "float": lambda y: (y <= 0).float(),
    "to": lambda y: (y <= 0).to(y.dtype),
    "type": lambda y: (y <= 0).type(y.dtype),
    "of integers": lambda y: (y.int() + 1).to(y.dtype),
    "one-hot": lambda y: F.one_hot(y.argmax(1), y.shape[1]).permute(0, 3, 1, 2).to(y.dtype),
}


@pytest.mark.parametrize("how", CASTS)
@torch.no_grad()
def test_casts_of_what_compared_maps_are_maps(how):
    """True where nothing is active, say, is 0."""

    def oracle(x, w, m):
        return conv(CASTS[how](conv(x, w) * m) * m, w) * m

    x, weight = tensors()
    y, mask = conv(x, weight), MASK[:, None]
    with sbnet.masked(MASK, block=BLOCK):
        got = conv(CASTS[how](conv(x, weight)), weight)
        made = CASTS[how](conv(x, weight))
    assert torch.equal(made, CASTS[how](y) * mask)
    assert_as_accurate_as_torch(got, oracle(x, weight, mask), conv((made * mask).double(), weight.double()) * mask)


def assigned(y: Tensor) -> None:
    y.data = torch.ones_like(y)


REMADE = {
    "set_": lambda y: y.set_(torch.ones(2, 8, 32, 32)),
    "aten.set_": lambda y: aten.set_.source_Tensor(y, torch.ones(2, 8, 32, 32)),
    "data": assigned,
    "[N,H,W,C]": lambda y: assigned(y.permute(0, 2, 3, 1)),
    "resize_": lambda y: y.resize_(2, 8, 16, 16),
    "as_strided_": lambda y: y.as_strided_((2, 8, 32, 32), (0, 0, 0, 0)),
    "storage": lambda y: y.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("how", REMADE)
@torch.no_grad()
def test_maps_that_are_given_other_memory_are_refused(how):
    x, weight = tensors()
    refused = pytest.raises(ValueError, match="expected a map to keep its shape and memory")
    with refused, sbnet.masked(MASK, block=BLOCK):
        y = conv(x, weight)
        REMADE[how](y)
        conv(y, weight)
