"""Float32 numbers as two of float16: what the Hopper kernels do with them, in numpy, beside float64."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.kernels.hopper import missing_packages

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hi, lo, e) of rows (n, D) of float32: they are (hi + lo) 2^(e - TOP)."""
    from gossamer.kernels.hopper.device.gather.float32.split import BIAS, FIELD, LEAST, TOP

    bits = np.abs(rows).view(np.int32).max(1)
    e = np.maximum(bits >> FIELD, BIAS + LEAST) - BIAS
    with np.errstate(invalid="ignore"):
        scaled = rows * np.exp2(TOP - e).astype(np.float32)[:, None]
        hi = scaled.astype(np.float16)
        return hi, (scaled - hi.astype(np.float32)).astype(np.float16), e


def joined(hi: np.ndarray, lo: np.ndarray, e: np.ndarray) -> np.ndarray:
    """The numbers again, in float64."""
    from gossamer.kernels.hopper.device.gather.float32.split import TOP

    return (hi.astype(float) + lo.astype(float)) * np.exp2(e - float(TOP))[:, None]


def drawn(*shape: int, spread: float = 0.0) -> np.ndarray:
    """Normal numbers, their magnitudes spread over 2^-spread to 1."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) * np.exp2(-spread * rng.random(shape))).astype(np.float32)


@pytest.mark.parametrize("exponent", [-97, -60, 0, 60, 124])
@pytest.mark.parametrize("spread", [0.0, 40.0])
def test_numbers_come_back(exponent: int, spread: float) -> None:
    """To 22 bits, and what is far below the largest of its row to 2^-39 of that."""
    x = drawn(300, 64, spread=spread) * np.float32(2.0**exponent)
    wrong = np.abs(joined(*split(x)) - x)
    largest = np.maximum(np.abs(x).max(1, keepdims=True), 2.0**-98).astype(float)
    assert (wrong <= np.maximum(2.0**-22 * np.abs(x), 2.0**-39 * largest)).all()


def test_rows_at_the_ends_of_float32() -> None:
    top, low = np.finfo(np.float32).max, 2.0**-115
    x = np.array([[top, -top, 1.0, 0.0], [low, -low, low / 2**10, 0.0], [0.0] * 4, [-0.0] * 4], dtype=np.float32)
    hi, lo, e = split(x)
    assert np.isfinite(hi).all() and np.isfinite(lo).all()
    assert (np.abs(joined(hi, lo, e) - x) <= 2.0**-22 * np.abs(x).max(1, keepdims=True)).all()
    assert (hi[2:] == 0).all() and (lo[2:] == 0).all()


def test_what_is_not_finite_becomes_nan_alone() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = drawn(3, 8)
        x[1, 5] = bad
        hi, lo, e = split(x)
        back = joined(hi, lo, e)
        assert np.isnan(back[1, 5]) and np.isfinite(back[[0, 2]]).all()


@pytest.mark.parametrize("spread", [0.0, 16.0])
def test_products(spread: float) -> None:
    """What three of four products leave out is about the rounding of products in float32."""
    q, k = drawn(200, 64, spread=spread), drawn(300, 64, spread=spread)[::-1]
    (qh, ql, eq), (kh, kl, ek) = ([part.astype(float) for part in split(x)] for x in (q, k))
    scores = (ql @ kh.T + qh @ kl.T + qh @ kh.T) * np.exp2(eq[:, None] + ek - 28)
    allowed = 2.0**-20.5 * (np.abs(q).astype(float) @ np.abs(k).astype(float).T)
    largest = np.abs(q).max(1)[:, None].astype(float) * np.abs(k).max(1)
    assert (np.abs(scores - q.astype(float) @ k.astype(float).T) <= allowed + 64 * 2.0**-38 * largest).all()


@pytest.mark.parametrize("exponents", [(0, 0), (-40, 40), (-97, -60), (60, 100)], ids=str)
def test_probabilities_and_values(exponents: tuple[int, int]) -> None:
    """A row's result, whatever rows of V hold that count little in it: relative to its own largest number."""
    from gossamer.kernels.hopper.device.gather.float32.split import TOP, VALUE_SHIFT

    rng = np.random.default_rng(1)
    v = drawn(96, 64) * np.exp2(rng.integers(exponents[0], exponents[1] + 1, 96)).astype(np.float32)[:, None]
    v[::7] = 0
    scores = 6 * rng.standard_normal((200, 96))
    hi, lo, e = split(v)
    power = e - VALUE_SHIFT
    reference = (scores + power).max(1, keepdims=True)
    weights = np.exp2((scores - reference).astype(np.float32))  # of the row sums
    p = (weights * np.exp2(power).astype(np.float32)).astype(np.float32)
    assert np.isfinite(weights).all() and (p <= 1).all()
    ph = p.astype(np.float16)
    pl = (p - ph.astype(np.float32)).astype(np.float16)
    ph, pl, hi, lo = (x.astype(float) for x in (ph, pl, hi, lo))
    found = (pl @ hi + ph @ lo + ph @ hi) / weights.astype(float).sum(1, keepdims=True) * 2.0 ** (VALUE_SHIFT - TOP)
    exact = np.exp2(scores) @ v.astype(float) / np.exp2(scores).sum(1, keepdims=True)
    contributions = np.exp2(scores)[..., None] * np.abs(v.astype(float)) / np.exp2(scores).sum(1)[:, None, None]
    rounding = 2.0**-21 + np.abs(scores - reference).max() * 2.0**-24
    assert (np.abs(found - exact) <= rounding * contributions.sum(1).max(1, keepdims=True)).all()
