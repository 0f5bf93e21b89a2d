"""What is right for random calls from JAX, from the definitions alone: numpy in float64, gradients by hand.

Nothing of gossamer is imported. Of attention, `attention` computes in any type: in float64 it is the truth, and in
float32, with what it makes on the way rounded to a type of 16 bits, what plain code gives, whose error is the measure.
Of sums over pairs of particles each number comes with how far rounding may move it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import erfc

Array = np.ndarray
EPS = 2.0**-24
FITTED = 2e-5  # of Newton's force: how far the documented polynomial of gravity may be off


class Terms(NamedTuple):
    """Of one call of attention, beside q, k and v."""

    keep: Array  # broadcasts to (B, H, Q, K)
    scale: float
    offset: int = 0  # position of query row 0
    softcap: float | None = None
    lengths: Array | None = None  # (B,)
    sinks: Array | None = None  # (H,)
    slopes: Array | None = None  # (H,) or (B, H)
    absolute: bool = False  # slopes are of -|i - j|, not of j - i
    bias: Array | None = None  # (Q, K): added to the scores
    folded: bool = False  # the scale is multiplied into q, in q's type


class Attended(NamedTuple):
    """Results (B, Q, H, ...) and gradients, of the scale and of r^2 too."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None
    dscale: Array
    dbias: Array  # (Q, K)
    largest: float  # score


def attention(
    q: Array, k: Array, v: Array, dout: Array, dlse: Array, t: Terms, dtype: Any = np.float64, stored: Any = None
) -> Attended:  # fmt: skip
    """q (B, Q, H, D), k (B, K, G, D), v (B, K, G, E), dout as out, dlse as lse."""

    def kept(x: Array) -> Array:
        return x if stored is None else x.astype(stored).astype(dtype)

    q, k, v, dout = (np.moveaxis(np.asarray(x).astype(dtype), 2, 1) for x in (q, k, v, dout))
    dlse = np.moveaxis(np.asarray(dlse).astype(dtype), 2, 1)[..., None]
    (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
    share = H // G
    k, v = (np.repeat(np.broadcast_to(x, (B, *x.shape[1:])), share, 1) for x in (k, v))
    scale, base = dtype(t.scale), 2.0 ** -round(math.log2(D) / 2)
    products = q @ k.swapaxes(-1, -2)
    folded = kept(q * dtype(t.scale / base)) @ k.swapaxes(-1, -2) * dtype(base)
    s, tanh = folded if t.folded else kept(products) * scale, None
    if t.softcap is not None:
        tanh = np.tanh(s / dtype(t.softcap))
        s = tanh * dtype(t.softcap)
    i, j = np.arange(Q)[:, None] + t.offset, np.arange(K)
    if t.slopes is not None:
        distance = -np.abs(j - i) if t.absolute else j - i
        s = s + np.asarray(t.slopes).astype(dtype)[..., None, None] * distance.astype(dtype)
    if t.bias is not None:
        s = s + t.bias.astype(dtype)
    keep = np.broadcast_to(t.keep, s.shape)
    if t.lengths is not None:
        keep = keep & (j < np.asarray(t.lengths).reshape(B, 1, 1, 1))
    largest = float(np.abs(s).max(initial=0, where=keep))
    s = np.where(keep, s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    sinks = None if t.sinks is None else np.asarray(t.sinks).astype(dtype)[:, None, None]
    m = m if sinks is None else np.maximum(m, sinks)
    m = np.where(np.isinf(m), 0, m)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks - m)
    with np.errstate(divide="ignore"):
        lse = m + np.log(total)
    p = kept(p / np.where(total > 0, total, 1))
    out = kept(p @ v)
    delta = (dout * out).sum(-1, keepdims=True) - np.where(total > 0, dlse, 0)
    ds = kept(p * (kept(dout @ v.swapaxes(-1, -2)) - delta))
    dsinks = None if sinks is None else -(np.exp(sinks - lse) * delta).sum((0, 2, 3))
    dbias = ds.sum((0, 1))
    if tanh is not None:
        ds = ds * (1 - tanh * tanh)

    def of_groups(x: Array) -> Array:
        return x.reshape(B, G, share, K, x.shape[-1]).sum(2)

    dscale = (ds * products).sum()
    ds = ds * scale
    dk, dv = of_groups(ds.swapaxes(-1, -2) @ q), of_groups(p.swapaxes(-1, -2) @ dout)
    out, dq, dk, dv = (np.moveaxis(x, 1, 2) for x in (out, ds @ k, dk, dv))
    return Attended(out, np.moveaxis(lse[..., 0], 1, 2), dq, dk, dv, dsinks, dscale, dbias, largest)


# -- patterns: nested tuples, a name and its numbers -------------------------------------------------------------------


def mask(spec: tuple[Any, ...], B: int, H: int, Q: int, K: int, offset: int) -> Array:
    """Which pairs a pattern keeps by its published definition, (B or 1, H or 1, Q, K)."""
    name, *rest = spec
    i, j = np.arange(Q)[:, None] + offset, np.arange(K)[None]
    if name == "PerHead":
        return np.concatenate([mask(one, B, 1, Q, K, offset)[:, :1] for one in rest], 1)
    if name == "PerBatch":
        return np.concatenate([mask(one, 1, H, Q, K, offset)[:1] for one in rest])
    if name in ("And", "Or"):
        one, other = (mask(part, B, H, Q, K, offset) for part in rest)
        return one & other if name == "And" else one | other
    if name == "Not":
        return ~mask(rest[0], B, H, Q, K, offset)
    if name == "SlidingWindow":
        left, right, sinks = rest
        found = (j >= i - left) & (j <= i + right) | (j < sinks) & ((j <= i) | (right > 0))
    elif name == "Dilated":
        left, right, step = rest
        found = ((i - j) % step == 0) & (j >= i - left * step) & (j <= i + right * step)
    elif name == "Local":
        found = (i // rest[0] == j // rest[0]) & (i >= 0)
    elif name == "Document":
        ids = np.asarray(rest[0])
        found = ((i >= 0) & (i < K)) & (ids[np.clip(i, 0, K - 1)] == ids[j])
    elif name == "BlockMask":
        blocks, size = rest
        found = blocks[np.arange(Q)[:, None] // size, j // size]
    elif name == "Pairs":
        (found,) = rest
    elif name == "Causal":
        found = j <= i
    else:
        assert name == "Dense", name
        found = np.ones((Q, K), bool)
    return np.broadcast_to(found, (Q, K))[None, None]


# -- particles ---------------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """All pairs of N particles, in float64."""

    steps: Array  # (N, N, d): x_j - x_i, to the nearest image
    s: Array  # (N, N): r^2
    keep: Array  # within the radius
    unsure: bool  # whether any pair's distance is the radius but for rounding, or half of the box
    off: Array  # (N, N): how far a float32 difference across a seam, which is rounded, may move r^2


def pairs(x: Array, box: tuple[float | None, ...], radius: float) -> Pairs:
    """Of float32 positions, which the box takes in float32."""
    x = np.stack([one if size is None else one - np.float32(size) * np.floor(one / np.float32(size))
                  for one, size in zip(x.T, box, strict=True)], 1).astype(np.float64)  # fmt: skip
    steps = x[None] - x[:, None]
    halves, off = np.zeros(steps.shape[:2], bool), np.zeros(steps.shape[:2])
    for axis, size in enumerate(box):
        if size is not None:
            turns = np.round(steps[..., axis] / size)
            steps[..., axis] -= size * turns
            known = 2.0**-23 * (turns != 0) * size
            off += 2 * np.abs(steps[..., axis]) * known + known**2
            halves |= np.abs(np.abs(steps[..., axis]) - size / 2) < 1e-5 * size
    s = (steps**2).sum(-1)
    near = (np.abs(s / radius**2 - 1) < 1e-5) | halves & (s <= radius**2 * (1 + 1e-5))
    near |= (s > 0) & (s < 1e-10 * radius**2)  # whether they are at one place
    return Pairs(steps, s, s <= radius**2, bool(near.any()), off)


class Law(NamedTuple):
    """A function of r^2: its value and its derivative."""

    name: str
    numbers: tuple[float, ...]

    def value(self, s: Array) -> Array:
        return FUNCTIONS[self.name][0](s, *self.numbers)

    def slope(self, s: Array) -> Array:
        return FUNCTIONS[self.name][1](s, *self.numbers)


def _gravity(s: Array, split: float, softening: float) -> Array:
    square = s + softening**2
    u = np.sqrt(square) / (2 * split)
    return (erfc(u) + 2 * u * np.exp(-u * u) / math.sqrt(math.pi)) * square**-1.5


def _gravity_slope(s: Array, split: float, softening: float) -> Array:
    square = s + softening**2
    gaussian = np.exp(-square / (4 * split**2)) / (2 * math.sqrt(math.pi) * split**3)
    return -(3 * _gravity(s, split, softening) + gaussian) / (2 * square)


def _spline(s: Array, h: float) -> Array:
    u = np.sqrt(s) / h
    return np.where(u < 1, 1 - 1.5 * u**2 + 0.75 * u**3, np.where(u < 2, 0.25 * (2 - u) ** 3, 0.0))


def _spline_slope(s: Array, h: float) -> Array:
    u = np.sqrt(s) / h
    by_u = np.where(u < 1, -3 + 2.25 * u, np.where(u < 2, -0.75 * (2 - u) ** 2 / np.maximum(u, 1), 0.0))
    return by_u / (2 * h * h)


FUNCTIONS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "gaussian": (
        lambda s, h: np.exp(-s / (2 * h * h)), lambda s, h: -np.exp(-s / (2 * h * h)) / (2 * h * h),
    ),
    "gravity": (_gravity, _gravity_slope),
    "spline": (_spline, _spline_slope),
    "plummer": (lambda s, h: (s + h * h) ** -1.5, lambda s, h: -1.5 * (s + h * h) ** -2.5),
    "waves": (
        lambda s, h: np.cos(s / h**2) * np.exp(-s / h**2),
        lambda s, h: -(np.sin(s / h**2) + np.cos(s / h**2)) * np.exp(-s / h**2) / h**2,
    ),
}  # fmt: skip


class Known(NamedTuple):
    """A law at pairs: values and derivatives, and how far float32 may be off."""

    value: Array
    slope: Array
    off: Array
    slope_off: Array


def known(law: Law, found: Pairs, keep: Array) -> Known:
    """At the pairs that are kept, 0 at others."""
    s = np.where(keep, found.s, 1.0)
    made: list[Array] = []
    for function in (law.value, law.slope):
        value, ds = function(s), 8 * EPS * s
        off = 64 * EPS * np.abs(value) + np.maximum(
            *(np.abs(function(np.maximum(s + d, 0)) - value) for d in (ds, -ds))
        )
        made += [np.where(keep, one, 0.0) for one in (value, off)]
    value, off, slope, slope_off = made
    if law.name == "gravity":
        square = s + law.numbers[1] ** 2
        off = off + keep * FITTED * square**-1.5
        slope_off = slope_off + keep * 3 * FITTED * square**-2.5
    if law.name == "waves":  # of cosines and sines, which cancel
        off = off + 64 * EPS * keep
        slope_off = slope_off + 64 * EPS * keep * 2 / law.numbers[0] ** 2
    return Known(value, slope, off, slope_off)


class Sums(NamedTuple):
    """A result or a gradient, and how far it may be off."""

    value: Array
    off: Array


def radial_sum(law: Law, found: Pairs, v: Array, g: Array) -> dict[str, Sums]:
    """Of values v (N, C) and the output's gradient g: out, dx and dv."""
    v, g = v.astype(np.float64), g.astype(np.float64)
    f = known(law, found, found.keep)
    steep = known(law, found, found.keep & (found.s > 0))
    rounded = EPS * (4 + np.sqrt(len(v)))
    both = g @ v.T + v @ g.T  # (i, j): of the pair as (i, j) and (j, i)
    size = np.abs(g) @ np.abs(v).T + np.abs(v) @ np.abs(g).T
    length = np.abs(found.steps)
    dx = -2 * np.einsum("ij,ijd->id", steep.slope * both, found.steps)
    off = steep.slope_off * size + 16 * EPS * np.abs(steep.slope) * size
    dx_off = 2 * np.einsum("ij,ijd->id", off + rounded * np.abs(steep.slope) * size, length)
    weights = f.off + rounded * np.abs(f.value)
    of_values = Sums(f.value @ g, weights @ np.abs(g))
    return {"out": Sums(f.value @ v, weights @ np.abs(v)), "x": Sums(dx, dx_off), "v": of_values}


def radial_force(law: Law, found: Pairs, m: Array, g: Array) -> dict[str, Sums]:
    """Of masses m (N,) and the force's gradient g (N, d): out, dx and dm."""
    m, g = m.astype(np.float64), g.astype(np.float64)
    keep = found.keep & (found.s > 0)
    w = known(law, found, keep)
    rounded = EPS * (16 + np.sqrt(len(m)))
    length = np.abs(found.steps)
    off = w.off + rounded * np.abs(w.value)
    out = np.einsum("ij,j,ijd->id", w.value, m, found.steps)
    # Of the step x_j - x_i: m_j (w g_i + 2 w' (g_i . d) d), and the same of the pair (j, i), whose step is opposite.
    u = m[None, :, None] * g[:, None] - m[:, None, None] * g[None]
    u_size = np.abs(m[None, :, None] * g[:, None]) + np.abs(m[:, None, None] * g[None])
    along, along_size = (u * found.steps).sum(-1), (u_size * length).sum(-1)
    dx = -(w.value[..., None] * u + 2 * (w.slope * along)[..., None] * found.steps).sum(1)
    slopes = w.slope_off + rounded * np.abs(w.slope)
    dx_off = (off[..., None] * u_size + 2 * (slopes * along_size)[..., None] * length).sum(1)
    pull, pull_size = np.einsum("ijd,jd->ij", found.steps, g), np.einsum("ijd,jd->ij", length, np.abs(g))
    return {
        "out": Sums(out, np.einsum("ij,j,ijd->id", off, np.abs(m), length)), "x": Sums(dx, dx_off),
        "v": Sums(-(w.value * pull).sum(1), (off * pull_size).sum(1)),
    }  # fmt: skip
