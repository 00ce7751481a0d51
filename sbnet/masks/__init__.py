"""Where masks come from."""

from sbnet.masks.grow import grow
from sbnet.masks.motion import MotionMask

__all__ = ["MotionMask", "grow"]
