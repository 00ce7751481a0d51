"""motion_mask: the mask and the running background, against plain PyTorch in float64."""

import pytest
import torch

import sbnet
from sbnet import motion_mask, motion_mask_, reference
from support.helpers import assert_bitwise
from support.layer_checks import assert_same_bits_on_any_threads
from support.motion import assert_motion, motion_background, motion_frame
from support.refusals import refused

DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel_slice", "plane_slice", "permuted"])
def test_equals_reference(device, dtype, layout):
    """One image that is a cut and some that are none; widths of one chunk of columns and of several."""
    sizes = ((37, 45), 5), ((20, 530), 3), ((3, 300), 31), ((1, 1), 5), ((64, 64), 1), ((90, 24), 31), ((20, 290), 13)
    for size, smooth in sizes:
        frame = motion_frame((3, 3, *size), dtype, layout).to(device)
        background = motion_background(frame, smooth)
        numbers = (0.05, 0.25, 0.5, smooth)
        mask, following = motion_mask(frame, background, *numbers)
        assert_motion(mask, following, frame, background, *numbers)
        assert bool(mask[-1].all())
        assert_bitwise(
            following[-1:], motion_mask(frame[-1:], torch.full_like(background[-1:], torch.inf), *numbers)[1]
        )
        in_place = background.clone()
        assert_bitwise(motion_mask_(frame, in_place, *numbers), mask)
        assert_bitwise(in_place, following)


@pytest.mark.parametrize("channels", [1, 3, 4, 7])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_channels_and_rates(device, channels, rate):
    frame = motion_frame((2, channels, 24, 33), torch.uint8, "channels_last").to(device)
    background = motion_background(frame, 5)
    mask, following = motion_mask(frame, background, 0.03, rate, 0.5, 5)
    assert_motion(mask, following, frame, background, 0.03, rate, 0.5, 5)


def test_bytes_of_a_decoder_and_floats_are_the_same_picture(device):
    pixels = torch.randint(0, 256, (40, 60, 3), dtype=torch.uint8, device=device)
    background = motion_background(pixels[None].permute(0, 3, 1, 2), 5).abs()
    background[-1] -= 2  # no cut
    a, b = (
        motion_mask(x[None].permute(0, 3, 1, 2), background, 0.0513) for x in (pixels, pixels.float() / 255)
    )  # fmt: skip
    assert_bitwise(a[0], b[0])
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-6)


def test_the_first_frame_a_cut_and_nan_are_all_motion(device):
    frame = torch.rand(1, 3, 16, 24, device=device)
    background = torch.full((1, 16, 24), torch.inf, device=device)
    assert motion_mask_(frame, background).all()
    assert not motion_mask_(frame, background).any()
    frame[0, 1, 3, 3] = torch.nan
    assert motion_mask_(frame, background).all()
    frame[0, 1, 3, 3] = 0.5
    assert motion_mask_(frame, background).all()  # the background held the NaN
    assert background.isfinite().all()


def test_the_same_frames_give_the_same_bits(device):
    for shape, smooth in (((1, 3, 200, 300), 5), ((3, 3, 150, 40), 31)):  # ranges of rows end inside of images
        frame = motion_frame(shape, torch.uint8).to(device)
        background = motion_background(frame, smooth)
        assert_same_bits_on_any_threads(lambda: motion_mask(frame, background, smooth=smooth), (1, 2, 3, 7))  # noqa: B023


def test_nothing_in_nothing_out(device):
    for shape in ((0, 3, 8, 8), (1, 3, 0, 8), (2, 1, 8, 0)):
        background = torch.zeros(shape[0], *shape[2:], device=device)
        mask, following = motion_mask(torch.zeros(shape, device=device), background)
        assert mask.shape == following.shape == background.shape


def test_gradients_are_refused_or_absent(device):
    frame = torch.rand(1, 3, 8, 8, device=device, requires_grad=True)
    background = torch.zeros(1, 8, 8, device=device)
    assert not motion_mask(frame, background)[1].requires_grad
    with pytest.raises(RuntimeError, match="motion_mask_"):
        motion_mask_(frame, background.requires_grad_())


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"frame": 3}, "frame: expected a torch.Tensor, got int"),
        ({"background": None}, "background: expected a torch.Tensor, got NoneType"),
        ({"frame": torch.zeros(3, 8, 9)}, "frame|rank|dimensions"),
        ({"frame": torch.zeros(1, 0, 8, 9)}, "frame: expected at least one channel"),
        ({"frame": torch.zeros(1, 3, 8, 9).long()}, "frame: expected uint8.*int64"),
        ({"frame": torch.zeros(1, 3, 8, 9).bool()}, "frame: expected uint8.*bool"),
        ({"background": torch.zeros(1, 8, 8)}, r"background: expected contiguous float32 \[1,8,9\]"),
        ({"background": torch.zeros(2, 8, 9)}, "background: expected contiguous"),
        ({"background": torch.zeros(1, 8, 9).double()}, "background: expected contiguous"),
        ({"background": torch.zeros(1, 9, 8).transpose(1, 2)}, "background: expected contiguous"),
        ({"background": torch.zeros(1, 1, 8, 9)}, "background"),
        ({"smooth": 4}, "smooth: expected an odd number of pixels, 1 to 31, got 4"),
        ({"smooth": 33}, "smooth: expected"),
        ({"smooth": -1}, "smooth: expected"),
        ({"rate": 0.0}, "rate: expected"),
        ({"rate": 1.5}, "rate: expected"),
        ({"rate": float("nan")}, "rate: expected"),
        ({"threshold": float("nan")}, "threshold: expected a number"),
        ({"cut": float("nan")}, "cut: expected a number"),
    ],
)
def test_bad_input(device, change, pattern):
    given = {"frame": torch.zeros(1, 3, 8, 9), "background": torch.zeros(1, 8, 9), **change}
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    for op in (motion_mask, motion_mask_):
        refused("motion_mask.*(" + pattern + ")", op, **given)


def test_is_a_module_of_exported_programs(device):
    """The state goes in and out, as an ONNX graph has it."""

    class Step(torch.nn.Module):
        def forward(self, frame, background):
            return sbnet.motion_mask(frame, background, 0.06)

    frame, background = torch.rand(1, 3, 20, 24, device=device), torch.rand(1, 20, 24, device=device)
    program = torch.export.export(Step(), (frame, background))
    for mine, theirs in zip(program.module()(frame, background), motion_mask(frame, background, 0.06), strict=True):
        assert_bitwise(mine, theirs)


@pytest.mark.gpu
def test_two_launches_in_a_cuda_graph():
    frame = torch.zeros(1, 3, 60, 90, dtype=torch.uint8, device="cuda")
    background = torch.full((1, 60, 90), torch.inf, device="cuda")
    motion_mask_(frame, background)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        motion_mask_(frame, background)
        torch.cuda.synchronize()
    assert sum(e.count for e in seen.key_averages() if "_kernel" in e.key) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = motion_mask_(frame, background)
    other = torch.full_like(background, torch.inf)
    background.copy_(other)
    for value in (10, 10, 80, 255, 255):
        frame.fill_(value)
        graph.replay()
        assert torch.equal(mask, motion_mask_(frame, other))
        assert torch.equal(background, other)


def test_reference_is_what_its_words_say():
    """A frame of one brightness on a background of another: exact numbers."""
    frame, background = torch.full((1, 3, 6, 6), 0.5), torch.full((1, 6, 6), 0.4)
    mask, following = reference.motion_mask(frame, background, 0.08, 0.5, 0.15, 5)
    assert mask.all()
    torch.testing.assert_close(following, torch.full((1, 6, 6), 0.45))
