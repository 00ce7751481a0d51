"""Where masks come from."""

from sbnet.masks.motion import MotionMask

__all__ = ["MotionMask"]
