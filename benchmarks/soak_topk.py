"""The family `topk`: random calls of `topk_keys`, drawn and run by `soak_entmax`."""

from __future__ import annotations

import soak_entmax
from soak_entmax import Call, run

__all__ = ["draw", "run"]


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    return soak_entmax.draw(seed, device, "topk")
