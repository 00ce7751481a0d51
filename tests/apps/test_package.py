"""The package and its documents: what is installed, and that what README says is true."""

import contextlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sbnet
from support import zoo
from support.helpers import interpreter

ROOT = Path(__file__).parents[2]


def test_public_names_exist_and_are_documented():
    for name in sbnet.__all__:
        assert hasattr(sbnet, name)
        if callable(getattr(sbnet, name)):
            assert getattr(sbnet, name).__doc__, name


def test_models_and_export_are_installed():
    import sbnet.export
    import sbnet.models

    assert sbnet.export.__doc__
    assert sbnet.models.contour_net()


def test_subpackages_are_there_at_first_use():
    """And not before: `import sbnet` alone loads neither networks nor exporters, nor PyTorch's compiler, which takes as
    long as PyTorch."""
    code = """
import sys, sbnet
assert not {"sbnet.nn", "sbnet.engine", "sbnet.models", "sbnet.export", "torch._dynamo"} & set(sys.modules)
for name in ("engine", "export", "masks", "models", "nn"):
    assert name in dir(sbnet)
    assert getattr(sbnet, name).__name__ == f"sbnet.{name}"
assert not hasattr(sbnet, "nonsense")
"""
    subprocess.run(interpreter(code), check=True)


def test_contours_of_an_edge():
    """A vertical edge: strong there, nowhere else, and its double angle points left (a vertical line)."""
    from sbnet.models import contour_net, paint_contours

    x = torch.zeros(1, 3, 24, 32)
    x[..., 16:] = 0.8
    y = contour_net()(x)
    strength, cosine, sine = y[0, :, 12]
    assert strength[15:17].min() > 0.1
    assert strength[4:12].max() < 1e-3
    assert (cosine[15:17] < -0.3 * strength[15:17]).all()
    assert sine[15:17].abs().max() < 1e-3
    picture = paint_contours(y)
    assert picture.shape == (1, 24, 32, 3)
    assert picture.dtype == torch.uint8
    assert picture[0, 12, 15:17].max() > 100
    assert not picture[0, 12, 4:12].any()  # no strength: black
    hues = torch.arange(12) * (math.pi / 6)
    wheel = torch.stack([torch.full_like(hues, 0.5), hues.cos() / 3, hues.sin() / 3])[None, :, None]
    colours = paint_contours(wheel)[0, 0].int()
    assert colours[[0, 4, 8]].tolist() == [[255, 63, 63], [63, 255, 63], [63, 63, 255]]  # red, green, blue
    assert colours[2].tolist() == [255, 255, 63]
    assert (colours[1] - torch.tensor([255, 159, 63])).abs().max() <= 1
    with pytest.raises(ValueError, match="depth"):
        contour_net(0)


@pytest.mark.gpu
def test_contours_are_painted_alike_on_a_gpu():
    """In half precision by a kernel, where PyTorch compiles one, by its ops else and in float32."""
    from sbnet.models import paint_contours

    torch.manual_seed(0)
    output = (torch.rand(2, 3, 37, 50) - 0.5).half()
    output[:, :, 20:] = 0
    output[0, :, 5] = 0.0003 * output[0, :, 5]
    wanted = paint_contours(output.float()).int()
    assert wanted.amax() > 250
    for layout in (torch.contiguous_format, torch.channels_last):
        for given in (output, output.float()):
            picture = paint_contours(given.cuda().contiguous(memory_format=layout))
            assert picture.shape == wanted.shape
            assert (picture.cpu().int() - wanted).abs().amax() <= 1


def test_why_contours_are_painted_by_ops_is_said(monkeypatch):
    from sbnet.models import contours

    def door(error):
        def compiler(source, name):
            raise error

        monkeypatch.setattr(torch.cuda, "_compile_kernel", compiler, raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        contours._paint_kernel.cache_clear()
        return contours._paint_kernel(torch.device("cuda", 0))

    for error in (OSError("no libnvrtc"), RuntimeError("no cuda_fp16.h\nin line 2"), TypeError("one argument more")):
        with pytest.warns(UserWarning, match=f"by PyTorch's ops.*: {str(error).splitlines()[0]}$"):
            assert door(error) is None
    with pytest.raises(KeyError):  # of another kind: a fault of ours
        door(KeyError("paint"))
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    contours._paint_kernel.cache_clear()
    assert contours._paint_kernel(torch.device("cuda", 0)) is None
    contours._paint_kernel.cache_clear()


def test_build_info():
    facts = sbnet.build_info()
    assert facts["version"] in (sbnet.__version__, "0")
    assert set(facts) >= {"version", "compiler", "cuda", "archs"}


def code_blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)


# torchvision may be there for another build of PyTorch (support/zoo.py).
TORCHVISION = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from support import zoo; zoo.torchvision()\n"


def test_readme_says_how_to_install_what_its_examples_import():
    imported = {
        name.partition(".")[0]
        for block in code_blocks("README.md", "python")
        for name in re.findall(r"^(?:import|from) ([\w.]+)", block, re.MULTILINE)
    }
    lines = [line for block in code_blocks("README.md", "sh") for line in block.splitlines() if "pip install" in line]
    named = set(re.findall(r"[a-z]\w+", " ".join(line.partition("#")[0] for line in lines)))
    assert imported - set(sys.stdlib_module_names) - {"sbnet"} <= named


@pytest.mark.parametrize("document", ["README.md", "docs/contracts.md", "docs/pipeline.md"])
def test_examples_run(document, tmp_path):
    blocks = code_blocks(document, "python")
    assert blocks
    for block in blocks:
        if "import torchvision" in block:
            if not zoo.available():
                continue
            block = TORCHVISION + block
        subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)


def test_the_guide_runs_from_top_to_bottom(tmp_path):
    blocks = code_blocks("docs/guide.md", "python")
    assert len(blocks) > 6
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True, cwd=tmp_path)


# What the blocks of a page speak of, and do not make.
GIVEN = {
    "docs/attention.md": """
import torch
from sbnet import AttentionLayout
q, k, v = torch.rand(3, 1, 8, 512, 16)
layout = AttentionLayout.causal()
""",
    "docs/language_model.md": "import torch; trained_lstm = torch.nn.LSTM(64, 128)",
    "docs/onnxruntime.md": "",
    "docs/quantization.md": """
import torch, sbnet
from torch import nn
net = nn.Sequential(*(nn.Conv2d(k, 8, 3, padding=1) for k in (3, 8, 8))).eval()
frames, masks = [torch.rand(1, 3, 32, 48)] * 2, [torch.rand(1, 32, 48) > 0.9] * 2
frame, mask = frames[0], masks[0]
""",
    "docs/weights.md": """
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate, self.output = nn.ModuleDict({"dense": nn.Linear(64, 128)}), nn.Linear(128, 64)
model = nn.ModuleDict({"conv": nn.Conv2d(32, 64, 3), "layer": Layer(), "classifier": nn.Linear(64, 10)})
""",
}


@pytest.mark.parametrize("page", GIVEN)
def test_pages_run_from_top_to_bottom(page, tmp_path):
    if page in ("docs/onnxruntime.md", "docs/quantization.md"):
        pytest.importorskip("onnxruntime")
    blocks = code_blocks(page, "python")
    assert blocks
    subprocess.run([sys.executable, "-c", "\n".join([GIVEN[page], *blocks])], check=True, cwd=tmp_path)


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


@pytest.mark.parametrize("document", sorted(page.relative_to(ROOT).as_posix() for page in PAGES))
def test_links_lead_somewhere(document):
    def anchors(headings: list[str]) -> list[str]:
        """As pages have them: of headings that read the same, the second ends in -1."""
        names = [re.sub(r"[^\w\- ]", "", h.lstrip("#").strip().lower()).replace(" ", "-") for h in headings]
        return [f"{name}-{n}" if (n := names[:i].count(name)) else name for i, name in enumerate(names)]

    page = ROOT / document
    for target, section in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if section:
            headings = [line for line in file.read_text().splitlines() if line.startswith("#")]
            assert section in anchors(headings), f"{target}#{section}"


def test_make_targets_of_the_readme_exist():
    named = set(re.findall(r"\bmake ([a-z]+)", "\n".join(code_blocks("README.md", "sh"))))
    assert {"demo", "test"} <= named
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert named <= targets
