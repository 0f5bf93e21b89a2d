"""The forms of visible keys that kernels are compiled for."""

from __future__ import annotations

from typing import Literal

Bounds = Literal["every", "causal", "intervals"]
