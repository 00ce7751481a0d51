"""What a call makes of its mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbnet.active import ActiveBlocks, Fringe


@dataclass(frozen=True)
class Lists:
    """What a call makes of its mask.

    Attributes:
        active: one list a plane, or, exact, one a demand.
        fringes: of the storage's.
        stale: by plane, what kept tensors hold of the call before and this one does not write.
        lasting: another call may run on the same tensors: kernels that read them are worth recording.
    """

    active: tuple[ActiveBlocks, ...]
    fringes: Sequence[Fringe]
    stale: dict[int, Fringe]
    lasting: bool = False
