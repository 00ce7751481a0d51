"""A .pt2 from elsewhere: nothing in it is run, whatever its members hold."""

import io
import json
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from sbnet.apps.pipeline import PipelineError, open_network
from sbnet.apps.pipeline.programs import Program

NET = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)).eval()


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("program") / "net.pt2"
    sides = {2: Dim("h", min=8, max=4096), 3: Dim("w", min=8, max=4096)}
    torch.export.save(torch.export.export(NET, (torch.rand(1, 3, 16, 24),), dynamic_shapes=(sides,)), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def pickled(mark: Path) -> bytes:
    file = io.BytesIO()
    torch.save((Bomb(mark),), file)
    return file.getvalue()


def test_a_program_gives_what_it_gave_and_its_sample_inputs_are_not_read(members, tmp_path):
    mark = tmp_path / "run"
    hostile = {**members, "net/data/sample_inputs/model.pt": pickled(mark)}
    x = torch.rand(1, 3, 40, 32)
    assert torch.equal(Program(written(tmp_path / "net.pt2", hostile))(x), NET(x))
    assert not mark.exists()


@pytest.mark.parametrize("pickling", [pickled, lambda mark: pickle.dumps(Bomb(mark))], ids=["torch", "pickle"])
def test_no_member_is_unpickled(members, tmp_path, pickling):
    """Each in turn, and those of earlier formats, of classes and of compiled code."""
    mark = tmp_path / "run"
    constants = [f"data/constants/{name}" for name in ("model.pt", "custom_obj_0", "opaque_obj_0")]
    more = [*constants, "data/weights/model.pt", "extra/note", "data/aotinductor/x.so", "serialized_state_dict.json"]
    for name in [*members, *(f"net/{name}" for name in more)]:
        hostile = written(tmp_path / "net.pt2", {**members, name: pickling(mark)})
        with suppress(PipelineError):  # what is not read is no reason to refuse
            open_network(hostile)
        assert not mark.exists(), name


@pytest.mark.parametrize("where", ["weights", "constants"])
def test_tensors_that_say_they_are_pickles(members, tmp_path, where):
    mark = tmp_path / "run"
    name = f"net/data/{where}/model_{where}_config.json"
    config = json.loads(members[name])
    for path in ("weight_0", "tensor_0", "custom_obj_0", "opaque_obj_0", "../sample_inputs/model.pt"):
        entry = {"path_name": path, "is_param": False, "use_pickle": True, "tensor_meta": None}
        config["config"]["0.weight"] = entry
        hostile = {**members, name: json.dumps(config).encode(), f"net/data/{where}/{path}": pickled(mark)}
        with pytest.raises(PipelineError, match="not a plain program"):
            open_network(written(tmp_path / "net.pt2", hostile))
        assert not mark.exists()


def changed(value, key: str, new: str, count: int = 1):
    """The JSON with the first `count` values under a key replaced."""
    if isinstance(value, dict):
        for k, v in value.items():
            if k == key and count and (isinstance(v, str) or key == "guards_code"):
                value[k], count = new, count - 1
            else:
                count = changed(v, key, new, count)[1]
    elif isinstance(value, list):
        for v in value:
            count = changed(v, key, new, count)[1]
    return value, count


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("target", "torch.os.system"), ("target", "torch.ops.load_library"), ("target", "torch.load"),
        ("target", "_operator.methodcaller"), ("target", "_operator.call"),
        ("target", "torch.ops.aten.from_file.default"),
        ("target", "torch.ops.aten.save.default"), ("target", "math.__loader__.load_module"), ("target", "#x:y"),
        ("target", "torch.ops.__class__.__base__.__subclasses__"), ("target", "conv"),
        ("expr_str", "open('MARK', 'w')"), ("expr_str", "().__class__.__base__.__subclasses__()"),
        ("expr_str", "__import__('os').system('touch MARK')"), ("expr_str", "9**9**9**9"),
        ("expr_str", "Pow(9, 999999999)"),
        ("expr_str", "Pow(Pow(Pow(9, 16), 16), 16)"), ("expr_str", "lambdify(s0, s1)"), ("expr_str", "s0.func"),
        ("expr_str", "sympify('s0')"), ("expr_str", "[s0 for s0 in s1]"), ("expr_str", "(lambda: s0)()"),
        ("expr_str", ""),
        ("expr_str", "(" * 4000), ("expr_str", "-" * 3999 + "1"), ("expr_str", "factorial(10**9)"),
        ("guards_code", ["open('MARK', 'w')"]), ("guards_code", ["__import__('os').system('touch MARK')"]),
        ("guards_code", ["L['x'].__class__"]), ("guards_code", ["9**9**9**9 == 1"]), ("guards_code", [7]),
        ("name", "x=open('MARK', 'w')"), ("name", "x):\n open('MARK', 'w')\n#"),
        ("parameter_name", 'a"]+open("MARK", "w")+"'),
        ("in_spec", '[1, {"type": "os.system", "context": "\\"touch MARK\\"", "children_spec": []}]'),
        ("in_spec", '[1, {"type": "collections.defaultdict", "context": "[]", "children_spec": []}]'),
        ("out_spec", "no JSON"), ("out_spec", "[" * 100000),
    ],
)  # fmt: skip
def test_no_text_of_the_graph_is_run(members, tmp_path, key, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, left = changed(json.loads(members["net/models/model.json"]), key, text)
    assert not left
    with pytest.raises(PipelineError, match="plain program of torch.export|not a program of torch.export"):
        open_network(written(tmp_path / "net.pt2", {**members, "net/models/model.json": json.dumps(model).encode()}))
    assert not (tmp_path / "MARK").exists()


@pytest.mark.parametrize("kind", ["text", "no zip of ours", "cut", "deep"])
def test_what_is_no_program_gives_one_line(members, tmp_path, kind):
    path = tmp_path / "net.pt2"
    if kind == "text":
        path.write_text("hello")
    elif kind == "no zip of ours":
        written(path, {"a/b": b"c"})
    elif kind == "deep":
        written(path, {**members, "net/models/model.json": b"[" * 100_000})
    else:
        data = written(path, members).read_bytes()
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(PipelineError) as found:
        open_network(path)
    assert "program of torch.export" in str(found.value)
    assert "\n" not in str(found.value)


def test_networks_whose_sizes_are_expressions(tmp_path):
    """Strides, resizing to the frame's size and outputs in dicts: what files of people hold."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            y = self.down(x)
            y = nn.functional.interpolate(
                self.up(nn.functional.gelu(y, approximate="tanh")), x.shape[2:], mode="bilinear"
            )
            return {"out": y.flatten(2).transpose(1, 2), "parts": [y[:, :, ::2]]}

    net, x = Net().eval(), torch.rand(1, 3, 33, 47)
    sides = {2: Dim.AUTO, 3: Dim.AUTO}
    torch.export.save(
        torch.export.export(net, (torch.rand(1, 3, 32, 48),), dynamic_shapes=(sides,)), tmp_path / "n.pt2"
    )
    got, want = Program(tmp_path / "n.pt2")(x), net(x)
    assert torch.equal(got["out"], want["out"])
    assert torch.equal(got["parts"][0], want["parts"][0])
