"""Attention and its gradients from the definition, in numpy: in float64 the truth, in float32 what plain code gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Inputs(NamedTuple):
    """A problem in numbers: q (B, Q, H, D), k (B, K, G, D), v (B, K, G, E), dout as out, dlse (B, Q, H)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    keep: np.ndarray  # broadcasts to (B, H, Q, K)
    scale: float
    q_offset: int
    softcap: float | None = None
    key_lengths: np.ndarray | None = None
    sink_logits: np.ndarray | None = None
    alibi_slopes: np.ndarray | None = None  # (H,) or (B, H)
    alibi_distance: str | None = None


class Expected(NamedTuple):
    """Results and gradients, as they lie in JAX."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


def expected(x: Inputs, dtype: Any = np.float64, stored: Any = None) -> Expected:
    """All of a problem, computed in one type.

    Args:
        stored: the type in which plain code of few bits keeps what it makes on the way; None: that of the arithmetic.
    """

    def kept(t: np.ndarray) -> np.ndarray:
        return t if stored is None else t.astype(stored).astype(dtype)

    q, k, v, dout = (np.moveaxis(np.asarray(t).astype(dtype), 2, 1) for t in (x.q, x.k, x.v, x.dout))  # heads first
    dlse = np.moveaxis(x.dlse.astype(dtype), 2, 1)
    (B, H, Q, _), (_, G, K, _) = q.shape, k.shape
    group = H // G
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    i, j = np.arange(Q)[:, None] + x.q_offset, np.arange(K)
    s = kept(kept(q @ k.swapaxes(-1, -2)) * dtype(x.scale))
    tanh = None
    if x.softcap is not None:
        tanh = np.tanh(s / dtype(x.softcap))
        s = tanh * dtype(x.softcap)
    if x.alibi_slopes is not None:
        distance = (j - i).astype(dtype)
        distance = -np.abs(distance) if x.alibi_distance == "absolute" else distance
        s = s + x.alibi_slopes.astype(dtype)[..., None, None] * distance
    keep = np.broadcast_to(x.keep, s.shape)
    if x.key_lengths is not None:
        keep = keep & (j < x.key_lengths.reshape(B, 1, 1, 1))
    s = np.where(keep, s, -np.inf)
    m = s.max(-1, keepdims=True)
    if x.sink_logits is not None:
        sinks = x.sink_logits.astype(dtype)[:, None, None]
        m = np.maximum(m, sinks)
    m = np.where(np.isinf(m), 0, m)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    if x.sink_logits is not None:
        total = total + np.exp(sinks - m)
    p = p / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = m + np.log(total)
    p = kept(p)
    out = kept(p @ v)
    delta = (dout * out).sum(-1, keepdims=True) - np.where(total > 0, dlse[..., None], 0)
    ds = kept(p * (kept(dout @ v.swapaxes(-1, -2)) - delta))
    dsinks = None
    if x.sink_logits is not None:
        dsinks = -(np.exp(sinks - lse) * delta).sum((0, 2, 3))
    if tanh is not None:
        ds = ds * (1 - tanh * tanh)
    ds = ds * dtype(x.scale)

    def of_groups(t: np.ndarray) -> np.ndarray:
        return t.reshape(B, G, group, K, -1).sum(2)

    dk, dv = of_groups(ds.swapaxes(-1, -2) @ q), of_groups(p.swapaxes(-1, -2) @ dout)
    out, dq, dk, dv = (np.moveaxis(t, 1, 2) for t in (out, ds @ k, dk, dv))
    return Expected(out, np.moveaxis(lse[..., 0], 1, 2), dq, dk, dv, dsinks)


def compare(x: Inputs, found: Expected, rounding: float) -> int:
    """Assert that results are as near to the truth as plain code of their type is, twice over; how many there are.

    Probabilities are exp(s - lse), off by what a float32 of that size is rounded by, and sums by what their terms are.

    Args:
        rounding: of the type of the results, but for lse.
    """
    short = x.q.dtype.itemsize == 2
    truth, plain = expected(x), expected(x, np.float32, x.q.dtype if short else None)
    largest = {
        name: float(np.abs(np.asarray(getattr(x, name)).astype(float)).max()) for name in ("q", "k", "v", "dout")
    }
    *_, D = x.q.shape
    *_, E = x.v.shape
    s = min(abs(x.scale) * largest["q"] * largest["k"] * D, x.softcap or np.inf)
    if x.alibi_slopes is not None:
        s += float(np.abs(x.alibi_slopes).max()) * (abs(x.q_offset) + max(x.q.shape[1], x.k.shape[1]))
    unit = 2.0**-24 * (8 + s)
    ds = largest["dout"] * largest["v"] * E + float(np.abs(x.dlse).max())
    sizes = {
        "out": largest["v"], "lse": 1.0, "dq": abs(x.scale) * ds * largest["k"], "dk": abs(x.scale) * ds * largest["q"],
        "dv": largest["dout"], "dsinks": ds,
    }  # fmt: skip
    count = 0
    for name, got, want, near in zip(Expected._fields, found, truth, plain, strict=True):
        assert (got is None) == (want is None), name
        if want is None:
            continue
        got = np.asarray(got).astype(np.float64)
        assert got.shape == want.shape, (name, got.shape, want.shape)
        finite = np.isfinite(want)
        assert (got[~finite] == want[~finite]).all(), name
        assert np.isfinite(got[finite]).all(), name
        biggest = np.abs(want[finite]).max(initial=0.0)
        allowed = 2 * np.abs(near[finite] - want[finite]).max(initial=0.0) + unit * sizes[name]
        allowed += 0.0 if name == "lse" else rounding * max(biggest, sizes[name] if name == "dsinks" else 0.0)
        error = np.abs(got[finite] - want[finite]).max(initial=0.0)
        assert error <= allowed, f"{name}: {error:.2e} is over {allowed:.2e}"
        count += 1
    return count
