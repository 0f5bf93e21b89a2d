"""Sums over neighbours from their definition, in float64 of numpy; and clouds of particles to try them on."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import erf, logsumexp

KINDS = ("uniform", "clustered", "coincident", "one place", "far outside")


class Pairs(NamedTuple):
    """All pairs of N particles."""

    steps: np.ndarray  # (N, N, d): x_j - x_i, to the nearest image
    s: np.ndarray  # (N, N): r^2


def cloud(rng: np.random.Generator, N: int, d: int, kind: str) -> np.ndarray:
    """Positions, about in the unit box."""
    x = rng.random((N, d))
    if kind == "clustered":
        x = 0.5 + 0.2 * rng.standard_normal((N, d)) ** 3
    elif kind == "coincident" and N:
        x = x[rng.integers(0, max(1, N // 5), N)]
    elif kind == "one place":
        x = np.full((N, d), 0.3)
    elif kind == "far outside":
        x = x + rng.integers(-2, 3, (N, d))
    return x.astype(np.float32)


def wrapped(x: np.ndarray, box: tuple[float | None, ...]) -> np.ndarray:
    """In the box, along periodic axes."""
    parts = [x[:, n] if size is None else np.mod(x[:, n], size) for n, size in enumerate(box)]
    return np.stack(parts, 1)


def pairs(x: np.ndarray, box: tuple[float | None, ...]) -> Pairs:
    x = x.astype(np.float64)
    steps = x[None] - x[:, None]
    for axis, size in enumerate(box):
        if size is not None:
            steps[..., axis] -= size * np.round(steps[..., axis] / size)
    return Pairs(steps, (steps**2).sum(-1))


def gaussian_sum(
    x: np.ndarray, box: tuple[float | None, ...], radius: float, h: float, values: np.ndarray
) -> np.ndarray:
    s = pairs(x, box).s
    return (np.exp(-s / (2 * h * h)) * (s <= radius**2)) @ values.astype(np.float64)


class Gravity(NamedTuple):
    force: np.ndarray  # (N, d)
    newton: np.ndarray  # (N,): the sum of the sizes of Newton's pair forces within the cut


def gravity(x: np.ndarray, box: tuple[float | None, ...], split: float, softening: float, mass: np.ndarray) -> Gravity:
    """Newton's force less that of a potential filtered by exp(-k^2 split^2), cut at 5.5 split."""
    steps, s = pairs(x, box)
    within = (s <= (5.5 * split) ** 2) & (s > 0)
    square = np.where(within, s + softening**2, 1.0)
    u = np.sqrt(square) / (2 * split)
    w = (1 - erf(u) + 2 * u * np.exp(-u * u) / math.sqrt(math.pi)) * square**-1.5 * within
    newton = (square**-1.5 * np.sqrt(s) * within) @ mass.astype(np.float64)
    return Gravity(np.einsum("ij,ijd,j->id", w, steps, mass.astype(np.float64)), newton)


class Attended(NamedTuple):
    out: np.ndarray  # (N, H, E)
    lse: np.ndarray  # (N, H)


def attention(
    s: np.ndarray, radius: float, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, bandwidth: float
) -> Attended:
    """Of particles with squared distances s (N, N); a scale of 0 or an infinite bandwidth: no such term."""
    scores = scale * np.einsum("ihd,jhd->hij", q, k) - s / (2 * bandwidth**2)
    scores = np.where(s <= radius**2, scores, -np.inf)
    lse = logsumexp(scores, -1)
    return Attended(np.einsum("hij,jhe->ihe", np.exp(scores - lse[..., None]), v), lse.T)
