"""Small networks for tests of passes: a stem, layers, and what is done with them."""

from __future__ import annotations

from torch import Tensor, nn

SIZE, C = (16, 24), 8


def layer(i: int = C, o: int = C, k: int | tuple[int, int] = 3, s: int = 1, p: int | None = None, **more) -> nn.Conv2d:
    padding = p if p is not None else k // 2 if isinstance(k, int) else tuple(v // 2 for v in k)
    return nn.Conv2d(i, o, k, s, padding, **more)


class Net(nn.Module):
    """A stem, layers, and a forward of them: `work(net, features)`."""

    def __init__(self, work, *layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers, self.work = layer(3), nn.ModuleList(layers), work

    def forward(self, x: Tensor):
        return self.work(self.layers, self.stem(x).relu())
