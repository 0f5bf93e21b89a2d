"""Which keys the rows of a call see, as kernels are compiled for it."""

from __future__ import annotations

from typing import Literal

Bounds = Literal["every", "causal", "intervals"]
