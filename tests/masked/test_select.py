"""sbnet.select: which kernel serves a layer, as the launchers' own table says."""

import pytest
import torch
from typer.testing import CliRunner

from sbnet import _library
from sbnet.apps import machine
from sbnet.select import bottleneck_in_one_kernel, conv2d_kernel, layer_kernel
from sbnet_command import cli
from support.emulator import CSRC

CASES = {
    "conv 3x3 64->64 400x704 fp16 block 16": "Hopper 3x3",
    "conv 3x3 64->64 400x704 bf16 block 16 stride 2": "Hopper 3x3",
    "conv 3x3 72->72 400x704 fp16 block 16": "Hopper general",
    "conv 3x3 80->80 320x320 fp16 block 16": "Hopper 3x3",
    "conv 3x3 104->104 400x704 fp16 block 16": "Hopper 3x3",
    "conv 3x3 72->72 400x704 fp16 block 16 stride 2": "Hopper 3x3",
    "conv 1x1 256->64 100x176 fp16 block 4": "Hopper 1x1",
    "conv 7x7 3->64 400x704 fp16 block 8 stride 2": "Hopper stem",
    "conv 3x3 64->64 400x704 fp16 block 16 groups 64": "depthwise",
    "conv 3x3 60->64 400x704 fp16 block 16": "Hopper general",
    "conv 3x3 64->3 400x704 fp16 block 16": "Hopper general",
    "conv 3x3 1->64 400x704 fp16 block 16": "few channels",
    "conv 3x3 3->16 720x1280 bf16 block 10 stride 2": "few channels",
    "conv 3x4 4->17 400x704 fp16 block 2 dilation 3": "few channels",
    "conv 3x3 5->64 400x704 fp16 block 16": "Hopper general",
    "conv 3x3 3->72 400x704 fp16 block 16": "few channels",
    "conv 3x3 3->136 400x704 fp16 block 16": "Hopper general",
    "conv 5x4 3->64 400x704 fp16 block 16": "first layer",
    "conv 7x7 3->64 1024x1024 fp16 block 8 stride 4": "first layer",
    "conv 4x4 3->96 640x640 fp16 block 16 stride 4": "few channels",
    "conv 2x2 96->192 160x160 fp16 block 8 stride 2": "Hopper 1x1",
    "conv 4x4 64->100 160x160 bf16 block 8 stride 4": "Hopper general",
    "conv 2x2 24->64 160x160 fp16 block 8 stride 2": "Hopper general",
    "conv 3x3 3->64 32768x32768 fp16 block 16": "Hopper general",
    "conv 3x3 64->64 400x704 fp16 block 10": "Hopper general",
    "conv 3x3 64->64 400x704 fp16 block 16 dilation 2": "Hopper general",
    "conv 5x5 64->64 400x704 bf16 block 16": "Hopper general",
    "conv 3x3 256->256 100x176 fp16 block 16 groups 32": "3x3 by groups",
    "conv 3x3 64->64 400x704 fp16 block 4": "by rows",
    "conv 3x3 64->64 400x704 int8 block 16": "Hopper bytes",
    "conv 3x3 32->64 400x704 int8 block 16": "int8 3x3 by patches",
    "conv 3x3 128->256 80x80 int8 block 8 stride 2": "int8 by rows",
    "conv 3x3 128->256 80x80 fp8 block 8 stride 2": "Hopper bytes",
    "conv 1x1 64->64 400x704 fp8 block 8": "Hopper 1x1 bytes",
    "conv 1x1 512->72 100x176 int8 block 4 stride 2": "Hopper 1x1 bytes",
    "conv 1x1 640->64 100x176 fp8 block 8": "Hopper bytes",
    "conv 1x1 72->64 400x704 int8 block 16": "Hopper bytes",
    "conv 3x3 64->64 400x704 int8 block 4": "int8 by rows",
    "conv 3x3 64->64 400x704 fp8 block 4": "portable bytes",
    "conv 3x3 3->64 400x704 int8 block 16": "portable bytes",
    "conv 3x3 64->64 400x704 tf32 block 16": "Hopper general",
    "conv 3x3 64->64 400x704 fp32 block 16": "float32 in words",
    "conv 3x3 3->64 400x704 fp32 block 16": "float32",
    "conv_transpose 2x2 64->64 200x352 fp16 block 16 stride 2": "Hopper transposed",
    "conv_transpose 4x4 128->40 100x176 bf16 block 16x32 stride 2 prelu": "Hopper transposed",
    "conv_transpose 3x3 24->64 99x177 block 32 stride 2": "Hopper transposed",
    "conv_transpose 3x3 64->64 200x352 fp16 block 16": "by phases",
    "conv_transpose 4x4 64->24 200x352 fp16 block 16 stride 2": "by phases",
    "conv_transpose 4x4 64->64 200x352 fp16 block 8 stride 2": "by phases",
    "conv_transpose 4x4 64->64 200x352 fp32 block 16 stride 2": "by phases",
    "conv_transpose 1x1 64->64 200x352 fp16 block 16 stride 2": "by pixel",
}


CPU_CASES = {  # on every processor
    "conv 3x3 64->64 400x704 fp32 cpu block 16": "Winograd F(2x2)",
    "conv 5x5 32->16 400x704 cpu block 16": "Winograd F(2x2)",
    "conv 3x3 64->64 400x704 fp32 cpu block 16 dilation 2": "Winograd F(2x2)",
    "conv 3x3 64->64 400x704 fp32 cpu block 16 dilation 12": "direct",
    "conv 3x3 64->64 400x704 fp32 cpu block 16 stride 2": "direct",
    "conv 3x3 64->64 400x704 fp32 cpu block 2": "Winograd F(2x2)",
    "conv 3x3 64->64 400x704 fp32 cpu block 2x3": "Winograd F(2x2)",
    "conv 3x3 64->64 400x704 fp32 cpu block 3": "direct",
    "conv 3x3 64->64 400x704 fp32 cpu block 1x16": "direct",
    "conv 7x7 64->64 400x704 fp32 cpu block 1x16": "direct",
    "conv 3x3 64->64 400x704 fp32 cpu block 2 dilation 2": "direct",
    "conv 3x3 3->64 400x704 fp32 cpu block 16": "direct",
    "conv 3x3 64->64 400x704 fp32 cpu block 16 groups 4": "direct",
    "conv 1x1 64->256 100x176 fp32 cpu block 8": "1x1 in place",
    "conv 1x1 8->64 100x176 fp16 cpu block 8": "direct",
    "conv 3x3 64->2 400x704 fp32 cpu block 16": "few outputs",
    "conv 3x3 64->64 400x704 fp32 cpu block 16 groups 64": "lanewise",
    "conv 3x3 13->13 400x704 fp32 cpu block 16 groups 13": "lanewise by patches",
    "conv 3x3 64->64 400x704 int8 cpu block 16": "int8 by AMX" if _library.cpu_isa().startswith("amx") else "int8",
    "conv 3x3 64->64 400x704 fp8 cpu block 16": "float8",
}


@pytest.mark.parametrize("layer", CASES | CPU_CASES)
def test_the_kernel_of_a_layer(layer):
    assert layer_kernel(layer).kernel == (CASES | CPU_CASES)[layer]


@pytest.mark.parametrize(
    ("layer", "kernel", "reason"),
    [
        ("conv 3x3 64->64 64x64 cpu stride 2", "Winograd F(2x2)", "stride is not 1"),
        (
            "conv 3x3 64->64 64x64 cpu dilation 12",
            "Winograd F(2x2)",
            "squares of four outputs reach too far beyond a tile",
        ),
        ("conv 3x3 64->64 64x64 cpu block 1", "Winograd F(2x2)", "squares of four outputs reach too far beyond a tile"),
        ("conv 3x3 15->64 64x64 cpu", "Winograd F(2x2)", "input channels are not 16 to 512"),
        ("conv 1x3 64->64 64x64 cpu", "Winograd F(2x2)", "kernel is not 2x2, 3x3, 5x5 or 7x7"),
        ("conv 3x3 64->64 64x64 cpu groups 4", "lanewise", "neither depthwise nor groups narrower than a vector"),
        ("conv 3x3 13->13 64x64 cpu groups 13", "lanewise", "channels are no whole vectors"),
        ("conv 1x1 8->64 64x64 fp16 cpu", "1x1 in place", "dtype is not float32"),
        ("conv 3x3 64->64 64x64 cpu block 2", "AMX", None),
    ],
)
def test_kernels_of_a_cpu_say_why_they_do_not_serve(layer, kernel, reason):
    why = dict(layer_kernel(layer).declined)[kernel]
    assert why == reason if reason else why in ("dtype is neither float16 nor bfloat16", "not in this build")


def test_a_cpu_says_how_it_cuts_the_work():
    assert layer_kernel("conv 3x3 64->64 400x704 cpu block 16").cut.startswith("tiles of 16x16 pixels, panels of ")
    assert layer_kernel("conv 3x3 64->64 400x704 cpu block 5x40").cut.startswith("tiles of 5x20 pixels, panels of ")
    assert not layer_kernel("conv 3x3 64->64 400x704 block 16").cut


def test_each_kernel_above_says_why_it_does_not_serve():
    found = layer_kernel("conv 3x3 60->64 400x704 fp16 block 16")
    assert dict(found.declined)["Hopper 3x3"] == "input channels are no multiple of 8"
    assert dict(found.declined)["Hopper 1x1"] == "kernel is neither 1x1 nor the stride"
    assert [name for name, _ in found.declined] == [
        "Hopper 3x3", "Hopper 1x1", "Hopper stem", "few channels", "3x3 by groups", "first layer"
    ]  # fmt: skip


def test_a_transposed_convolution_names_the_kernels_of_its_phases():
    found = layer_kernel("conv_transpose 3x3 64->24 200x352 fp16 block 16 stride 2")
    assert (found.kernel, found.cut) == ("by phases", "Hopper 1x1, Hopper general")
    assert dict(found.declined) == {"Hopper transposed": "few output channels, which it fills up to 64"}
    assert layer_kernel("conv_transpose 2x2 64->64 99x88 block 16 stride 2", 80).cut == "by rows"
    found = layer_kernel("conv_transpose 2x2 64->64 99x88 block 15 stride 2")
    assert [name for name, _ in found.declined] == ["Hopper transposed", "by phases"]


def test_hopper_kernels_are_hoppers_alone():
    found = layer_kernel("conv 3x3 64->64 400x704 fp16 block 16", capability=80)
    assert found.kernel == "3x3 by patches"
    assert dict(found.declined)["Hopper 3x3"] == "not this device"


GROUPS_OF = "not 4, 8, 16 or 32 input channels a group"


@pytest.mark.parametrize(
    ("layer", "kernel", "declined"),
    [
        ("conv 3x3 64->72 400x704 bf16 block 8x16 prelu", "3x3 by patches", {}),
        ("conv 1x1 64->72 400x704 fp16 block 7x5 stride 2", "by rows", {"3x3 by patches": "kernel is not 3x3"}),
        ("conv 3x3 64->64 400x704 fp16 block 16 stride 2", "by rows", {"3x3 by patches": "stride is not 1"}),
        ("conv 3x3 64->64 400x704 fp16 block 10", "by rows",
         {"3x3 by patches": "block sides are no multiples of 8", "3x3 by groups": GROUPS_OF}),
        ("conv 3x3 256->256 100x176 fp16 block 16 groups 32", "3x3 by groups", {}),
        ("conv 3x3 256->256 100x176 fp16 block 16 stride 2 groups 32", "3x3 by groups", {}),
        ("conv 3x3 128->128 100x176 bf16 block 8 groups 32", "3x3 by groups", {}),
        ("conv 3x3 448->448 100x176 fp16 block 16 groups 8", "by rows",
         {"3x3 by groups": GROUPS_OF, "3x3 by patches": "groups"}),
        ("conv 5x5 256->256 100x176 fp16 block 16 groups 32", "implicit GEMM",
         {"3x3 by groups": "kernel is not 3x3", "by rows": "up to 16 output channels a group"}),
        ("conv 7x7 3->64 400x704 fp16 block 16 stride 2", "first layer", {"few channels": "more than 16 taps"}),
        ("conv 7x7 4->72 400x704 fp16 block 16 stride 2", "implicit GEMM",
         {"first layer": "output channels are no multiple of 8 up to 64"}),
        ("conv 5x5 64->64 400x704 fp16 block 16", "implicit GEMM", {"by rows": "long sums of few output channels"}),
        ("conv 5x5 64->72 400x704 fp16 block 16", "by rows", {}),
        ("conv 9x9 64->72 400x704 fp16 block 16", "implicit GEMM", {"by rows": "more than 8 taps along an axis"}),
        ("conv 1x1 64->60 400x704 fp16 block 16", "implicit GEMM",
         {"by rows": "output channels are no multiple of 8"}),
        ("conv 3x3 64->64 400x704 tf32 block 16", "3x3 by patches", {}),
        ("conv 3x3 64->64 400x704 fp32 block 16", "float32 in words",
         {"3x3 by patches": "float32 without allow_tf32"}),
    ],
)  # fmt: skip
def test_kernels_of_every_gpu(layer, kernel, declined):
    found = layer_kernel(layer, capability=86)
    assert found.kernel == kernel
    assert declined.items() <= dict(found.declined).items()


def test_a_residual_keeps_the_stem_kernel_away():
    shape = dict(stride=2, padding=3)
    assert conv2d_kernel((1, 3, 64, 64), 64, 7, 8, **shape).kernel == "Hopper stem"
    assert conv2d_kernel((1, 3, 64, 64), 64, 7, 8, residual=True, **shape).kernel == "first layer"


@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        ("conv 3x3 64->64 400x704 fp16 block 16", "Hopper 3x3"),
        ("conv 3x3 64->64 400x704 fp16 block 16 stride 2", "Hopper general"),
        ("conv 1x1 64->256 100x176 bf16 block 8", "Hopper general"),
        ("conv 3x3 64->64 400x704 fp32 block 16", "float32 in words"),
    ],
)
def test_slopes_keep_some_kernels_away(layer, kernel):
    found = layer_kernel(layer + " prelu")
    assert found.kernel == kernel
    without = layer_kernel(layer).kernel
    assert without == kernel or dict(found.declined)[without].startswith("slopes a channel")


@pytest.mark.parametrize(
    ("channels", "hidden", "block", "one"),
    [(512, 128, 8, True), (520, 128, 8, False), (512, 136, 8, False), (60, 64, 8, False), (64, 64, 12, False)],
)
def test_bottleneck_blocks(channels, hidden, block, one):
    assert bottleneck_in_one_kernel(channels, hidden, (block, block)) is one


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_kernel("conv 3x3 64 400x704"), "expected words as"),
        (lambda: layer_kernel("conv_transpose 2x2 8->8 9x9 cpu stride 2"), "expected a layer of a GPU"),
        (lambda: layer_kernel("conv_transpose 2x2 8->8 9x9 int8 stride 2"), "dtype: expected float32, float16 or"),
        (lambda: layer_kernel("conv_transpose 2x2 8->9 9x9 stride 2 groups 2"), "groups: expected a divisor"),
        (lambda: layer_kernel("conv_transpose 2x2 8->20000 9x9 stride 2"), "expected sizes from 1 to 2\\^14"),
        (lambda: conv2d_kernel((1, 64, 8, 8), 64, 3, 0), "expected sizes from 1 to 2\\^20, got 0"),
        (lambda: conv2d_kernel((1, 64, 8, 8), 64, 3, 8, groups=5), "groups: expected a divisor"),
        (lambda: conv2d_kernel((1, 64, 8, 8), 64, 30, 8), "expected a kernel within the padded plane"),
        (lambda: conv2d_kernel((1, 64, 8, 8), 64, 3, 8, padding=-1), "padding: expected 0 to 2\\^20, got -1"),
        (lambda: conv2d_kernel((1, 2**40, 8, 8), 64, 3, 8), "expected sizes from 1 to 2\\^20"),
        (lambda: conv2d_kernel((1, 64, 8, 8), 64, 3, 8, dtype=torch.int32), "dtype: expected float32.*got torch.int32"),
        (lambda: conv2d_kernel((1, 64, 8, 8), 64, 3, 8, device="xpu"), "device: expected 'cpu' or 'cuda', got 'xpu'"),
    ],
)
def test_what_makes_no_layer_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command_prints_kernel_and_reasons():
    runner = CliRunner()
    layer = "conv 3x3 60->64 400x704 fp16 block 16"
    shown = runner.invoke(cli.app, ["info", "--capability", "90", "--layer", layer])
    assert shown.exit_code == 0
    assert shown.output.splitlines()[:2] == [
        "a GPU of compute capability 9: Hopper general",
        "  not Hopper 3x3: input channels are no multiple of 8",
    ]
    shown = runner.invoke(cli.app, ["info", "--layer", "conv 1x1 64->64 64x64 fp32 cpu block 16"])
    assert shown.output.startswith("CPU, ")
    assert ": 1x1 in place: tiles of 16x16 pixels" in shown.output.splitlines()[0]
    assert "\n  not Winograd F(2x2): kernel is not 2x2" in shown.output
    assert runner.invoke(cli.app, ["info", "--layer", "pool"]).exit_code == 2


@pytest.mark.parametrize("devices", [[], ["One", "Two"]])
@pytest.mark.parametrize("dtype", ["", " fp16", " fp32", " int8"])
def test_the_command_asks_the_devices_that_are_there(devices, dtype, monkeypatch):
    monkeypatch.setattr(machine, "cuda_obstacle", lambda: "" if devices else "no CUDA driver was found")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: devices[k])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda k: [(9, 0), (8, 0)][k])
    monkeypatch.setattr(_library, "PORTABLE", False)
    layer = f"conv 3x3 64->64 400x704{dtype} block 16"
    lines = [line for line in machine.kernel_of(layer).splitlines() if not line.startswith("  not")]
    cpu = layer_kernel(f"conv 3x3 64->64 400x704{dtype} cpu block 16")
    assert lines[0].startswith("CPU, ")
    assert lines[0].endswith(f": {cpu.kernel}: {cpu.cut}" if cpu.cut else f": {cpu.kernel}")
    if devices:
        assert lines[1:] == [
            f"{name}: {layer_kernel(layer, k).kernel}" for name, k in zip(devices, (90, 80), strict=True)
        ]
    else:
        assert lines[1:] == ["no GPU: no CUDA driver was found; --capability 90 asks for one"]
    assert "transposed" in machine.kernel_of("conv_transpose 2x2 64->64 99x88 block 16 stride 2").splitlines()[0]


def test_one_file_says_what_a_device_may_run():
    """SBNET_GPU=portable holds for an op only if it asks capability.cu. Launches alone differ by the device itself:
    those of common.cuh, and of batch norms, whose CTAs meet."""
    kernels = [path for path in (CSRC / "cuda").rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    asking = {path.name for path in kernels if "device.capability" in path.read_text()}
    assert asking == {"capability.cu", "common.cuh", "batch_norm_walk.cuh"}
