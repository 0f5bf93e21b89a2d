"""Scores from products, for every kernel that is written in Triton: scale, soft cap and ALiBi, in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Builder

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Where the running maximum starts: finite, so that a row with nothing kept yet needs no special case.
FLOOR = tl.constexpr(-3.4028234663852886e38)


def scales(scoring: Scoring) -> tuple[float, float]:
    """The arguments `scale` and `cap` of `score`."""
    if scoring.softcap is None:
        return scoring.scale * LOG2E.value, 0.0
    return scoring.scale / scoring.softcap, scoring.softcap * LOG2E.value


def alibi(b: Builder, scoring: Scoring) -> int:
    """The argument `ALIBI`: 0 without slopes; 1 of signed distances, 2 of absolute ones; 2 more of slopes (B, H)."""
    if "alibi_slopes" not in b:
        return 0
    return 1 + scoring.absolute + 2 * (len(b["alibi_slopes"].shape) == 2)


@triton.jit
def tanh(x):
    """tanh in float32 to 2e-7 of its value: a series near 0, where the quotient would cancel."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = (1.0 - e) / (1.0 + e)
    y = x * x
    series = x * (1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def score(b_s, scale, cap, slope, distance, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Base-2 scores of the products q.k, and tanh(s / softcap) for the gradient (or 0).

    `scale` is scale * log2(e), or scale / softcap with a softcap, whose `cap` is softcap * log2(e). `distance` is
    j - i.
    """
    b_t = b_s
    if SOFTCAP:
        b_t = tanh(b_s * scale)
        b_s = b_t * cap
    else:
        b_s = b_s * scale
    if ALIBI:
        if ALIBI % 2 == 0:
            distance = -tl.abs(distance)
        # Rounded once, and alike in both directions: a compiler may fuse either product of a plain sum.
        b_s = tl.fma(distance.to(tl.float32), slope, b_s)
    return b_s, b_t
