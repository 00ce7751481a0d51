"""Convolutions of one feature map that a plan for CUDA makes one."""

import torch.nn.functional as F
from torch import nn

from support.planned import for_cuda
from support.small_nets import layer


class Siblings(nn.Module):
    """Heads that begin alike; of the others one differs by its window, one by its activation, two are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layer(3, 16)
        self.heads = nn.ModuleList(layer(16, c) for c in (8, 24, 16))
        self.ends = nn.ModuleList(layer(c, 8, 1) for c in (8, 24, 16))
        self.wide, self.active, self.kept = layer(16, 8, 1), layer(16, 8), layer(16, 8)
        self.rest = nn.ModuleList(layer(8, 8, 1) for _ in range(2))

    def forward(self, x):
        y = self.body(x)
        heads = [end(head(y)) for head, end in zip(self.heads, self.ends, strict=True)]
        kept = self.kept(y)  # returned, and read by a convolution
        return [
            *heads,
            kept,
            self.rest[0](kept),
            self.rest[0](self.wide(y)),
            self.rest[1](F.relu(self.active(y))),
            self.heads[0](y) * 2,
        ]


def test_convolutions_of_one_map_with_one_window_are_one_on_cuda():
    nodes = for_cuda(Siblings()).nodes
    read = [n for n in nodes if n.kind == "conv" and n.args[0].shape[1] == 16 and n.params["weight"].shape[2] == 3]
    assert sorted(n.output.shape[1] for n in read) == [8, 8, 8, 48]
    assert [n.options["start"] for n in nodes if n.kind == "slice"] == [0, 8, 32]
