"""Sums over neighbours from JAX on a GPU, beside a neighbour list in XLA: rows as lines of JSON.

    python benchmarks/particles.py                              # 64,000, 1 and 4 million particles, 747 neighbours
    python benchmarks/particles.py --particles 64000 --out rows.jsonl

Numbers of sampled particles are compared with sums in float64 before anything is timed. Times are those of many calls
in flight, per call: what a program that computes step after step sees.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossamer import particles as gp
from gossamer.particles import fused_jax
from gossamer.particles.laws import long_range

NEIGHBORS = 747
SAMPLES = 32
HEADS, HEAD_SIZE = 8, 64  # of attention between neighbours
LISTED = 64_000  # with more particles the lists of XLA, 4 bytes a pair, are left out


def cloud(N: int, kind: str) -> jax.Array:
    """N particles in the unit box."""
    if kind == "uniform":
        return jax.random.uniform(jax.random.key(0), (N, 3))
    centres = jax.random.uniform(jax.random.key(1), (2000, 3))[jax.random.randint(jax.random.key(2), (N,), 0, 2000)]
    return (centres + 0.03 * jax.random.normal(jax.random.key(3), (N, 3))) % 1


def timed(call: Callable[[], Any], seconds: float = 0.4) -> float:
    """Milliseconds of a call among many: the median of five rounds."""
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


class Exact:
    """Sums of sampled particles in float64, all masses being 1."""

    def __init__(self, x: jax.Array, radius: float) -> None:
        places = np.asarray(x, np.float64)
        self.rows = np.random.default_rng(0).integers(0, len(places), SAMPLES)
        self.found = []
        for i in self.rows:
            d = places - places[i]
            d -= np.round(d)
            s = (d * d).sum(1)
            self.found.append((d[s <= radius**2], s[s <= radius**2]))

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

    def force_error(self, found: jax.Array, law: gp.ShortRangeGravity) -> float:
        """Relative to the sum of the sizes of Newton's pair forces."""
        worst = 0.0
        for i, (d, s) in zip(self.rows, self.found, strict=True):
            near = (s > 0) & (s <= law.radius**2)
            d, square = d[near], s[near] + law.softening**2
            w = square**-1.5 - long_range(square / law.split**2) / law.split**3
            newton = (square**-1.5 * np.sqrt(s[near])).sum()
            worst = max(worst, float(np.linalg.norm(np.asarray(found[i]) - w @ d)) / newton)
        return worst


def rows_of(N: int, kind: str) -> list[dict[str, Any]]:
    x, mass = cloud(N, kind), jnp.ones(N)
    radius = (NEIGHBORS / N * 3 / (4 * np.pi)) ** (1 / 3)
    law, h = gp.ShortRangeGravity(radius / 5.5, radius / 200), radius / 3
    build = jax.jit(lambda x: gp.Cells.build(x, radius, 1.0))
    cells = build(x)
    exact = Exact(x, radius)
    pairs = float(N) * np.mean([len(s) for _, s in exact.found]) if kind != "uniform" else float(N) * NEIGHBORS

    def density(x: jax.Array, mass: jax.Array) -> jax.Array:
        return gp.radial_sum(gp.Cells(x, cells.runs, radius, cells.box), mass, gp.Gaussian(h))

    def force(x: jax.Array, mass: jax.Array) -> jax.Array:
        return gp.radial_force(gp.Cells(x, cells.runs, radius, cells.box), mass, law)

    calls = {
        "density": (density, lambda out: exact.density_error(out, h), 2e-5),
        "gravity": (force, lambda out: exact.force_error(out, law), 1e-4),
        "density gradient": (
            jax.grad(lambda x, m: density(x, m).sum(), (0, 1)),
            lambda out: exact.gradient_error(out, h),
            2e-5,
        ),
        "gravity gradient": (jax.grad(lambda x, m: (force(x, m) ** 2).sum(), (0, 1)), None, None),
    }
    common = {"particles": N, "kind": kind, "neighbors": pairs / N, "device": str(jax.devices()[0].device_kind),
              "jax": jax.__version__, "kernels": fused_jax.available()}  # fmt: skip
    found = [{**common, "case": "order and boxes", "implementation": "gossamer", "ms": timed(lambda: build(x))}]
    for name, (function, error, limit) in calls.items():
        run = jax.jit(function)
        row: dict[str, Any] = {**common, "case": name, "implementation": "gossamer"}
        if error is not None:
            row["error"] = error(run(x, mass))
            row["status"] = "ok" if row["error"] <= limit else "failed"
        memory = run.lower(x, mass).compile().memory_analysis()
        row["bytes_a_particle"] = memory.temp_size_in_bytes / N
        if row.get("status") != "failed":
            row["ms"] = timed(lambda run=run: run(x, mass))
            row["interactions_per_second"] = pairs / row["ms"] * 1e3
        found.append(row)
    found += attended(x, radius, h, common, exact)
    return found + (listed(x, mass, radius, h, law, common, exact) if N <= LISTED else [])


def attended(x: jax.Array, radius: float, h: float, common: dict[str, Any], exact: Exact) -> list[dict[str, Any]]:
    """Attention between neighbours in bfloat16, lists made before, and what they take."""
    N, H, D = len(x), HEADS, HEAD_SIZE
    neighbors = gp.Neighbors.allocate(x, radius, 1.0)
    pairs, common = float(neighbors.counts.sum(dtype=jnp.float32)), {**common, "heads": H, "head_size": D}
    common["neighbors"] = pairs / N
    q, k, v = (jax.random.normal(jax.random.key(n), (N, H, D), jnp.bfloat16) for n in range(3))
    update = jax.jit(lambda neighbors, x: neighbors.update(x))
    found = [{**common, "case": "lists", "implementation": "gossamer", "ms": timed(lambda: update(neighbors, x))}]
    for kernel, bandwidth in (("dot", None), ("dot+gaussian", h)):

        def attend(q: Any, k: Any, v: Any, neighbors: Any, kernel: str = kernel, bandwidth: Any = bandwidth) -> Any:
            return gp.neighbor_attention(q, k, v, neighbors, kernel=kernel, bandwidth=bandwidth)

        def total(*given: Any, attend: Any = attend) -> Any:
            return (attend(*given).astype(jnp.float32) ** 2).sum()

        run, gradient = jax.jit(attend), jax.jit(jax.grad(total, (0, 1, 2)))
        error = exact.attention_error(run(q, k, v, neighbors), x, q, k, v, radius, bandwidth)
        row = {**common, "case": f"attention, {kernel}", "implementation": "gossamer", "error": error}
        row["status"] = "ok" if error <= 0.02 else "failed"
        if row["status"] == "ok":
            row["ms"] = timed(lambda run=run: run(q, k, v, neighbors))
            row["pair_heads_per_second"] = pairs * H / row["ms"] * 1e3
        found.append(row)
        if kernel == "dot":  # that of a Gaussian is computed by operations of JAX
            ms = timed(lambda run=gradient: run(q, k, v, neighbors))
            found.append({**common, "case": f"attention gradient, {kernel}", "implementation": "gossamer", "ms": ms,
                          "pair_heads_per_second": pairs * H / ms * 1e3})  # fmt: skip
    return found


def listed(
    x: jax.Array, mass: jax.Array, radius: float, h: float, law: gp.ShortRangeGravity, common: dict[str, Any],
    exact: Exact,
) -> list[dict[str, Any]]:  # fmt: skip
    """The same sums over lists of neighbours that were made before, by XLA alone."""
    N = len(x)

    def within(i: jax.Array) -> jax.Array:
        d = x - x[i]
        d = d - jnp.round(d)
        return (d * d).sum(1) <= radius**2

    def of_each(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.jit(lambda: jax.lax.map(function, jnp.arange(N), batch_size=256))()

    most = int(of_each(lambda i: within(i).sum()).max())
    lists = of_each(lambda i: jnp.nonzero(within(i), size=most, fill_value=N)[0].astype(jnp.int32))
    pairs = float((lists < N).sum())
    places, masses = jnp.concatenate([x, jnp.full((1, 3), 1e9)]), jnp.concatenate([mass, jnp.zeros(1)])

    def steps(places: jax.Array, lists: jax.Array) -> tuple[jax.Array, jax.Array]:
        d = places[lists] - places[:N, None]
        d = d - jnp.round(d)
        return d, (d * d).sum(-1)

    @jax.jit
    def density(places: jax.Array, masses: jax.Array, lists: jax.Array) -> jax.Array:
        _, s = steps(places, lists)
        return jnp.where((s <= radius**2) & (lists < N), jnp.exp(-s / (2 * h * h)) * masses[lists], 0).sum(1)

    @jax.jit
    def force(places: jax.Array, masses: jax.Array, lists: jax.Array) -> jax.Array:
        d, s = steps(places, lists)
        near = (s <= law.radius**2) & (lists < N) & (s > 0)
        return (jnp.where(near, law.of(jnp.where(near, s, 1.0), jnp) * masses[lists], 0)[..., None] * d).sum(1)

    found = []
    for name, function in (("density", density), ("gravity", force)):
        out = function(places, masses, lists)
        error = exact.density_error(out, h) if name == "density" else exact.force_error(out, law)
        ms = timed(lambda function=function: function(places, masses, lists))
        found.append({**common, "neighbors": pairs / N, "case": name, "implementation": "XLA list", "error": error,
                      "ms": ms, "interactions_per_second": pairs / ms * 1e3})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, nargs="*", default=[64_000, 1_000_000, 4_000_000])
    parser.add_argument("--kinds", nargs="*", default=["uniform", "clustered"], choices=["uniform", "clustered"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for N in given.particles:
        for kind in given.kinds:
            for row in rows_of(N, kind):
                line = json.dumps(row)
                print(line, flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
