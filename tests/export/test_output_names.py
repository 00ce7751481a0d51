"""Names of an exported model's outputs."""

import numpy as np
import pytest
import torch
from torch import nn

import sbnet
from sbnet import export

pytest.importorskip("onnxruntime")


def test_outputs_of_a_dict_keep_their_names(tmp_path):
    """In PyTorch's order; those of a list under a key by their place; one of an input's name is told from it."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)

        def forward(self, x):
            y = self.trunk(x)
            return {"out": self.head(y), "aux": y.relu(), "parts": [y.sigmoid(), y.tanh()], "mask": -y}

    net, x, mask = Heads().eval(), torch.rand(1, 3, 32, 48), torch.ones(1, 32, 48, dtype=torch.bool)
    run = sbnet.sparsify(net, x)
    for mode, more in (("masked", []), ("cached", ["next"])):
        run = sbnet.sparsify(net, x, mode=mode)
        run.export(tmp_path / "net.onnx")
        session = export.session(tmp_path / "net.onnx", ["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        assert names[:5] == ["out", "aux", "parts.0", "parts.1", "y.mask"]
        assert all(name.startswith(tuple(more)) for name in names[5:])
    run = sbnet.sparsify(net, x)
    run.export(tmp_path / "net.onnx")
    session = export.session(tmp_path / "net.onnx", ["CPUExecutionProvider"])
    wanted = run(x, mask)
    out, part = session.run(["out", "parts.1"], {"x": x.numpy(), "mask": mask.numpy()})
    assert np.allclose(out, wanted["out"], atol=1e-5)
    assert np.allclose(part, wanted["parts"][1], atol=1e-5)
