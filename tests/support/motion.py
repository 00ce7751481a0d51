"""What tests of motion_mask share."""

import torch
from torch import Tensor

from sbnet import reference
from support.helpers import laid_out

CLOSE = 1e-5  # float32's rounding of sums of up to 31 x 31 brightnesses


def motion_frame(shape, dtype, layout="contiguous") -> Tensor:
    """Noise, 0 to 1 or 0 to 255, of any dtype."""
    frame = torch.rand(shape)
    return laid_out(frame.mul(255).byte() if dtype == torch.uint8 else frame.to(dtype), layout)


def motion_background(frame: Tensor, smooth: int) -> Tensor:
    """Near the frame's own brightness; of the last image far away, which makes that one a cut."""
    still = reference.motion_mask(
        frame.cpu(), torch.full((frame.shape[0], *frame.shape[2:]), torch.inf), smooth=smooth
    )[1]
    near = still + 0.15 * torch.rand_like(still) - 0.075
    near[-1] += 2
    return near.to(frame.device)


def assert_motion(mask, following, frame, background, threshold, rate, cut, smooth) -> None:
    """The float64 reference's, but where a difference is the threshold to within float32's rounding."""
    exact = background.double().cpu()
    wanted, then = reference.motion_mask(frame.cpu(), exact, threshold, rate, cut, smooth)
    low, high = (
        reference.motion_mask(frame.cpu(), exact, threshold + e, rate, cut, smooth)[0] for e in (CLOSE, -CLOSE)
    )
    assert float((low != high).float().mean()) < 0.02, "the test tests nothing"
    torch.testing.assert_close(following.cpu().double(), then, rtol=0, atol=CLOSE)
    clear = low == high
    assert bool((mask.cpu() == wanted)[clear].all())
