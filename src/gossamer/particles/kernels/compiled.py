"""The compiled kernels by kind: called with its configuration, each gives a function of arrays and numbers."""

from __future__ import annotations

import os

from gossamer.cute.store import Kernel
from gossamer.particles.kernels.attention.parameters import parameters

MODULE = __name__  # as a launch calls what these kernels are of
OLDEST = 8  # the major compute capability that sums and lists are compiled for
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a")
HERE = "gossamer.particles.kernels"

attention = Kernel(
    f"{HERE}.attention.entries:attention", ("particles/kernels/attention", "kernels/hopper/device"), parameters
)
radial = Kernel(f"{HERE}.radial.device.entries:radial", ("particles/kernels/radial", "checks.py"))
lists = Kernel(
    f"{HERE}.neighbors.device.entries:lists", ("particles/kernels/neighbors", "particles/kernels/radial", "checks.py")
)


def compiles_for(major: int, minor: int) -> bool:
    """Whether there are kernels for a compute capability; they are then compiled for it unless another is set."""
    if major >= OLDEST:
        sm = f"sm_{major}{minor}"
        os.environ.setdefault("CUTE_DSL_ARCH", f"{sm}a" if major >= 9 else sm)
    return major >= OLDEST
