"""What the kernels of this folder have in common: directions, the sizes that heads are padded to, GPUs."""

from __future__ import annotations

from typing import Literal

Direction = Literal["forward", "dq", "dkdv"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "dq", "dkdv")
# The walks of a backward, and what each gives.
GRADIENTS: dict[Direction, tuple[str, ...]] = {"dq": ("dq",), "dkdv": ("dk", "dv")}
WALKS = tuple(GRADIENTS)
ROWS_OF_A_PROGRAM = 32  # that reads each row once: row terms, results and parts that are combined
# Head sizes are padded to a power of two; a configuration serves all sizes up to its bucket.
BUCKETS = (64, 128, 256)
ARCHITECTURES = (80, 89, 90, 100)
# Shared memory that a block can have, in bytes.
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448}
# float32 products as three of TF32: the rounding error of float32 at the speed of tensor cores.
X3: Literal["tf32x3"] = "tf32x3"


def architecture(sm: int) -> int:
    """The newest listed architecture that is not newer than `sm`.

    8.6 and 8.7 have the shared memory of 8.9, and so do 12.x parts.
    """
    if sm in (86, 87) or sm >= 110:
        return 89
    return max((listed for listed in ARCHITECTURES if listed <= sm), default=min(ARCHITECTURES))
