"""Casts inside a network: of values, of dtypes that come out, in every mode and in the file that is exported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sbnet
from sbnet.graph.oracle import PlaneMasks, masked_oracle

SIZE = (24, 40)
CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int": lambda y: (y * 7).int().float(), "long": lambda y: (y * 7).long().float(),
    "bool": lambda y: y.bool().float(), "uint8": lambda y: (y.abs() * 20).to(torch.uint8).float() / 9,
    "half": lambda y: y.half().float(), "bfloat16": lambda y: y.bfloat16().float(),
    "double": lambda y: (y.double() * 3).float(), "type and type_as": lambda y: y.type(torch.int32).type_as(y),
    "computed in half": lambda y: torch.relu(y.half() * 2).float(), "half and float": lambda y: y.half() + y,
    "of a comparison": lambda y: (y > 0).float() * y,
    "of arithmetic in integers": lambda y: ((y * 7).int() + 1).float(),
    "bits": lambda y: (y.view(torch.int32) ^ 1).view(torch.float32),
}  # fmt: skip


class Net(nn.Module):
    """Layers in float32 around a cast, and one in half beside them; outputs of four dtypes and meanings."""

    def __init__(self, cast: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.halves, self.cast = nn.Conv2d(4, 4, 1).half(), cast

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        z = self.cast(y)
        return self.last(z), z, (y * 5).int(), self.halves(y.half())


def frame() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, 5:9, 8:20] = True
    return torch.rand(1, 3, *SIZE), mask


def assert_same(got, wanted, name: str, pixels: Tensor | None = None) -> None:
    """Sums in another order may round to another neighbour in the cast's dtype: one step of it, no more."""
    step = {"half": 1e-3, "bfloat16": 8e-3}.get(name.split()[0], 1e-5)
    for mine, right in zip(got, wanted, strict=True):
        assert mine.dtype == right.dtype
        shown = (mine, right) if pixels is None else (mine * pixels, right * pixels)
        torch.testing.assert_close(*shown, rtol=step if right.dtype != torch.float16 else 4e-3, atol=max(step, 1e-4))
    if name in ("half", "bfloat16"):
        assert torch.equal(got[1], CASTS[name](got[1]))  # rounded to the dtype


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_kept(name):
    net, (x, mask) = Net(CASTS[name]).eval(), frame()
    with torch.no_grad():
        dense = net(x)
    assert_same(sbnet.sparsify(net, x, block=4)(x, torch.ones_like(mask)), dense, name)
    assert_same(sbnet.sparsify(net, x, block=4)(x, mask), masked_oracle(net, [x], PlaneMasks(mask, 4)), name)
    assert_same(sbnet.sparsify(net, x, block=4, mode="exact")(x, mask), dense, name, mask[:, None])


@pytest.mark.parametrize("name", [name for name in CASTS if name != "bits"])  # ONNX has no op for those
def test_the_exported_file_has_them(name, tmp_path):
    pytest.importorskip("onnxruntime")
    export = pytest.importorskip("sbnet.export")
    net, (x, mask) = Net(CASTS[name]).eval(), frame()
    run = sbnet.sparsify(net, x, block=4)
    run.export(tmp_path / "casts.onnx")
    assert_same(export.run(export.session(tmp_path / "casts.onnx"), [x, mask]), run(x, mask), name)


def test_a_rule_that_does_not_give_what_pytorch_gives_is_not_followed(monkeypatch):
    """A node is made of what PyTorch's own op returns: a rule that forgets an argument falls back to the dense op."""
    from sbnet.graph import builder

    monkeypatch.setitem(builder.RULES, "relu", lambda b, call: b.add("act", call, [call.args[0]], (1, 1, 2, 2)))
    net, (x, mask) = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval(), frame()
    run = sbnet.sparsify(net, x, block=4)
    assert [node.kind for node in run.plan.graph.nodes] == ["conv", "aten"]
    torch.testing.assert_close(run(x, torch.ones_like(mask)), net(x))
