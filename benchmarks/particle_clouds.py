"""Clouds of particles, their sums in float64, and times of calls of JAX: what the benchmarks of particles share."""

from __future__ import annotations

import atexit
import fcntl
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossamer import particles as gp

NEIGHBORS = 747
SAMPLES = 32
PUSH = jnp.asarray([1.0, -0.5, 0.25])  # the gradient of the total that is differentiated, to every force


def cloud(N: int, kind: str) -> jax.Array:
    """N particles in the unit box."""
    if kind == "uniform":
        return jax.random.uniform(jax.random.key(0), (N, 3))
    centres = jax.random.uniform(jax.random.key(1), (2000, 3))[jax.random.randint(jax.random.key(2), (N,), 0, 2000)]
    return (centres + 0.03 * jax.random.normal(jax.random.key(3), (N, 3))) % 1


class Turns:
    """Of processes that compile at the same time, each measures alone: the first time is asked for when all can."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.count = 1
        self.lock: Any = None

    def share(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        atexit.register(self.ready)  # one that ends before it measures lets the others go on

    def ready(self) -> None:
        if self.folder:
            (self.folder / str(os.getpid())).touch()

    def take(self) -> None:
        """Wait until all processes are ready and no other one measures; the turn ends with the process."""
        if self.folder is None or self.lock is not None:
            return
        self.ready()
        while len(list(self.folder.glob("[0-9]*"))) < self.count:
            time.sleep(0.05)
        self.lock = (self.folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)


TURNS = Turns()


def timed(call: Callable[[], Any], seconds: float = 0.1) -> float:
    """Milliseconds of a call among many: the median of five rounds."""
    TURNS.take()
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    n = max(2, int(seconds / 5 / max(time.perf_counter() - start, 1e-5)))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(n):
            last = call()
        jax.block_until_ready(last)
        rounds.append((time.perf_counter() - start) / n * 1e3)
    return float(np.median(rounds))


def waited(call: Callable[[], Any]) -> float:
    """Milliseconds of a call that is waited for, the median of 15."""
    times = []
    for _ in range(15):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


class Exact:
    """Sums of sampled particles in float64, all masses being 1."""

    def __init__(self, x: jax.Array, radius: float) -> None:
        places = np.asarray(x, np.float64)
        self.rows = np.random.default_rng(0).integers(0, len(places), SAMPLES)
        self.found, self.columns = [], []
        for i in self.rows:
            apart = places[:, 0] - places[i, 0]
            (slab,) = np.nonzero(np.abs(apart - np.round(apart)) <= radius)
            d = places[slab] - places[i]
            d -= np.round(d)
            s = (d * d).sum(1)
            near = s <= radius**2
            self.found.append((d[near], s[near]))
            self.columns.append(slab[near])

    def density(self, h: float) -> np.ndarray:
        return np.array([np.exp(-s / (2 * h * h)).sum() for _, s in self.found])

    def density_error(self, found: jax.Array, h: float) -> float:
        return float(np.abs(np.asarray(found)[self.rows] / self.density(h) - 1).max())

    def attention_error(
        self, found: jax.Array, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, radius: float, h: float | None
    ) -> float:
        """The largest of an output's, of numbers near 1."""
        places, worst = np.asarray(x, np.float64), 0.0
        for i in self.rows:
            d = places - places[i]
            d -= np.round(d)
            s = (d * d).sum(1)
            (near,) = np.nonzero(s <= radius**2)
            keys, values = (np.asarray(one[near], np.float64) for one in (k, v))
            scores = np.einsum("hd,jhd->hj", np.asarray(q[i], np.float64), keys) * q.shape[-1] ** -0.5
            scores -= s[near] / (2 * h * h) if h else 0.0
            weights = np.exp(scores - scores.max(1, keepdims=True))
            wanted = np.einsum("hj,jhe->he", weights / weights.sum(1, keepdims=True), values)
            worst = max(worst, float(np.abs(np.asarray(found[i], np.float64) - wanted).max()))
        return worst

    def gradient_error(self, found: tuple[jax.Array, jax.Array], h: float) -> float:
        """Of the sum of all densities to positions, relative to the sum of the sizes of its terms; and to masses."""
        worst = self.density_error(found[1], h)
        for i, (d, s) in zip(self.rows, self.found, strict=True):
            w = 2 / h**2 * np.exp(-s / (2 * h * h))
            worst = max(worst, float(np.linalg.norm(np.asarray(found[0][i]) - w @ d) / (w @ np.sqrt(s))))
        return worst

    def push_error(self, found: Any, law: gp.ShortRangeGravity) -> float:
        """Of the gradient of the sum of all forces along `PUSH` to positions, and to masses if it is among them.

        Masses are 0, 1 and 2 in turn. Relative to the sum of the sizes of its terms.
        """
        worst = 0.0
        to_x, *to_mass = found if isinstance(found, tuple) else (found,)
        push = np.asarray(PUSH, np.float64)
        for i, (d, s), columns in zip(self.rows, self.found, self.columns, strict=True):
            near = (s > 0) & (s <= law.radius**2)
            d, square, m = d[near], s[near] + law.softening**2, columns[near] % 3
            newton, w = square**-1.5, short_range(square, law.split)
            gaussian = np.exp(-square / (4 * law.split**2)) / (4 * np.sqrt(np.pi) * law.split**3)
            slope = -(1.5 * w + gaussian) / square
            u = (i % 3 - m)[:, None] * push
            terms = w[:, None] * u + 2 * (slope * (d * u).sum(1))[:, None] * d
            sizes = np.linalg.norm(u, axis=1) * (newton + 3 * newton / square * s[near])
            worst = max(worst, float(np.linalg.norm(np.asarray(to_x[i]) - terms.sum(0)) / sizes.sum()))
            for one in to_mass:
                size = (newton * np.abs(d @ push)).sum()
                worst = max(worst, float(np.abs(np.asarray(one[i]) + w @ (d @ push)) / size))
        return worst

    def force_error(self, found: jax.Array, law: gp.ShortRangeGravity) -> float:
        """Relative to the sum of the sizes of Newton's pair forces."""
        worst = 0.0
        for i, (d, s) in zip(self.rows, self.found, strict=True):
            near = (s > 0) & (s <= law.radius**2)
            d, square = d[near], s[near] + law.softening**2
            newton = (square**-1.5 * np.sqrt(s[near])).sum()
            off = np.asarray(found[i]) - short_range(square, law.split) @ d
            worst = max(worst, float(np.linalg.norm(off)) / newton)
        return worst


def short_range(square: np.ndarray, split: float) -> np.ndarray:
    """Newton's force less a mesh's, over the distance, at squared (softened) distances."""
    u = np.sqrt(square) / (2 * split)
    return (np.array([math.erfc(x) for x in u]) + 2 * u * np.exp(-u * u) / math.sqrt(math.pi)) * square**-1.5
