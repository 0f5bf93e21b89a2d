"""Sums over neighbours from JAX on a GPU, beside a neighbour list in XLA: rows as lines of JSON.

    python benchmarks/particles.py                              # 64,000 to 4 million particles, 747 neighbours
    python benchmarks/particles.py --particles 64000 --out rows.jsonl
    python benchmarks/particles.py --particles --attention      # 4096 particles beside dense attention in XLA

Numbers of sampled particles are compared with sums in float64 before anything is timed. Times are those of many calls
in flight, per call: what a program that computes step after step sees. `waited_ms` is that of a call that is waited
for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
LISTED = 1_000_000  # with more particles the lists of XLA, 4 bytes a pair, are left out
FEWER_LISTED = 64_000  # of clustered ones, whose cells are unequal
WARPS = 64  # sampled, of 8 queries each
LOOP = 32_768  # particles that are all within the radius: the rate of the loop over pairs itself


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


PUSH = jnp.asarray([1.0, -0.5, 0.25])  # the gradient of the total that is differentiated, to every force


def waited(call: Callable[[], Any]) -> float:
    """Milliseconds of a call that is waited for, the median of 30."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def fill(cells: gp.Cells) -> float:
    """The share of the pairs that kernels evaluate which are within the radius, of sampled warps."""
    points = np.asarray(cells.runs.points).reshape(3, -1).T
    boxes = np.asarray(jax.tree.leaves(cells.runs.tree)[0])
    kept = evaluated = 0
    for warp in np.random.default_rng(0).integers(0, cells.num_particles // 8, WARPS):
        queries, own = points[8 * warp : 8 * warp + 8], boxes[warp]

        def gaps(places: np.ndarray, half: Any) -> np.ndarray:
            apart = np.abs(places - own[:3])  # noqa: B023
            apart = np.minimum(apart, 1 - apart) - half - own[4:7]  # noqa: B023
            return (np.maximum(apart, 0) ** 2).sum(1)

        near = gaps(boxes[:, :3], boxes[:, 4:7]) <= cells.radius**2
        found = points.reshape(-1, 8, 3)[near].reshape(-1, 3)
        found = found[gaps(found, 0) <= cells.radius**2]
        d = found[None] - queries[:, None]
        kept += ((d - np.round(d)) ** 2).sum(-1).__le__(cells.radius**2).sum()
        evaluated += 8 * len(found)
    return kept / evaluated


def loops() -> list[dict[str, Any]]:
    """The rate of the loop over pairs: all particles are within the radius of all."""
    x = cloud(LOOP, "uniform")
    cells, law = gp.Cells.build(x, 2.0), gp.ShortRangeGravity(2 / 5.5, 0.01)
    calls = {
        "density": lambda: gp.radial_sum(cells, 1.0, gp.Gaussian(0.7)),
        "gravity": lambda: gp.radial_force(cells, 1.0, law),
    }
    found = []
    for name, call in calls.items():
        ms = timed(jax.jit(call))
        found.append({"case": f"loop of {name}", "implementation": "gossamer", "particles": LOOP, "ms": ms,
                      "interactions_per_second": LOOP**2 / ms * 1e3})  # fmt: skip
    return found


class Exact:
    """Sums of sampled particles in float64, all masses being 1."""

    def __init__(self, x: jax.Array, radius: float) -> None:
        places = np.asarray(x, np.float64)
        self.rows = np.random.default_rng(0).integers(0, len(places), SAMPLES)
        self.found, self.columns = [], []
        for i in self.rows:
            d = places - places[i]
            d -= np.round(d)
            s = (d * d).sum(1)
            near = s <= radius**2
            self.found.append((d[near], s[near]))
            self.columns.append(np.flatnonzero(near))

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

    def push_error(self, found: jax.Array, law: gp.ShortRangeGravity) -> float:
        """Of the gradient to positions of the sum of all forces along `PUSH`, of masses 0, 1 and 2 in turn.

        Relative to the sum of the sizes of its terms.
        """
        worst = 0.0
        push = np.asarray(PUSH)
        for i, (d, s), columns in zip(self.rows, self.found, self.columns, strict=True):
            near = (s > 0) & (s <= law.radius**2)
            d, square, m = d[near], s[near] + law.softening**2, columns[near] % 3
            u = np.sqrt(square) / (2 * law.split)
            newton = square**-1.5
            f = newton - long_range(square / law.split**2) / law.split**3
            slope = -1.5 * f / square - np.exp(-u * u) / (4 * np.sqrt(np.pi) * law.split**3 * square)
            u = (i % 3 - m)[:, None] * push
            terms = f[:, None] * u + 2 * (slope * (d * u).sum(1))[:, None] * d
            sizes = np.linalg.norm(u, axis=1) * (newton + 3 * newton / square * s[near])
            worst = max(worst, float(np.linalg.norm(np.asarray(found[i]) - terms.sum(0)) / sizes.sum()))
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
    thirds = jnp.arange(N) % 3 * 1.0  # masses where forces of equal ones would have no gradient
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
        "gravity gradient": (
            jax.grad(lambda x, m: (force(x, m) @ PUSH).sum(), (0, 1)),
            lambda out: exact.push_error(out[0], law),
            1e-4,
        ),
    }
    common = {"particles": N, "kind": kind, "neighbors": pairs / N, "device": str(jax.devices()[0].device_kind),
              "jax": jax.__version__, "kernels": fused_jax.available(), "fill": fill(cells)}  # fmt: skip
    found = [{**common, "case": "order and boxes", "implementation": "gossamer", "ms": timed(lambda: build(x))}]
    for name, (function, error, limit) in calls.items():
        run, mass_of = jax.jit(function), thirds if name == "gravity gradient" else mass
        row: dict[str, Any] = {**common, "case": name, "implementation": "gossamer"}
        if error is not None:
            row["error"] = error(run(x, mass_of))
            row["status"] = "ok" if row["error"] <= limit else "failed"
        memory = run.lower(x, mass_of).compile().memory_analysis()
        row["bytes_a_particle"] = memory.temp_size_in_bytes / N
        if row.get("status") != "failed":
            row["ms"] = timed(lambda run=run, m=mass_of: run(x, m))
            row["waited_ms"] = waited(lambda run=run, m=mass_of: run(x, m))
            row["interactions_per_second"] = pairs / row["ms"] * 1e3
        found.append(row)
    found += attended(x, radius, h, common, exact) if N <= LISTED else []
    lists = (LISTED if kind == "uniform" else FEWER_LISTED) >= N
    return found + (listed(x, mass, radius, h, law, common, exact) if lists else [])


def lists_by_cells(x: jax.Array, radius: float) -> jax.Array:
    """(N, most) neighbours of each particle, N where there is none, from a grid of cells of at least the radius."""
    N, across = len(x), max(1, int(1 / radius))
    across = 1 if across < 3 else across
    cell = jnp.minimum((x * across).astype(jnp.int32), across - 1)
    flat = (cell[:, 0] * across + cell[:, 1]) * across + cell[:, 2]
    order = jnp.argsort(flat).astype(jnp.int32)
    ends = jnp.searchsorted(flat[order], jnp.arange(across**3), side="right").astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    room = int((ends - starts).max())
    steps = np.stack(np.meshgrid(*[np.arange(-1, 2) if across > 1 else np.arange(1)] * 3), -1).reshape(-1, 3)

    def candidates(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        beside = (cell[i] + steps) % across
        at = (beside[:, 0] * across + beside[:, 1]) * across + beside[:, 2]
        place = starts[at][:, None] + jnp.arange(room)
        there = (place < ends[at][:, None]).reshape(-1)
        other = order[jnp.minimum(place, N - 1)].reshape(-1)
        d = x[other] - x[i]
        d = d - jnp.round(d)
        return other, there & ((d * d).sum(1) <= radius**2)

    def of_each(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.jit(lambda: jax.lax.map(function, jnp.arange(N), batch_size=2048))()

    def compact(i: jax.Array) -> jax.Array:
        other, near = candidates(i)
        at = jnp.where(near, jnp.cumsum(near) - 1, most)
        return jnp.full(most, N, jnp.int32).at[at].set(other, mode="drop")

    most = int(of_each(lambda i: candidates(i)[1].sum()).max())
    return of_each(compact)


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
    lists = lists_by_cells(x, radius)
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
        one = waited(lambda function=function: function(places, masses, lists))
        found.append({**common, "neighbors": pairs / N, "case": name, "implementation": "XLA list", "error": error,
                      "capacity": lists.shape[1], "ms": ms, "waited_ms": one,
                      "interactions_per_second": pairs / ms * 1e3})  # fmt: skip
    return found


def attention() -> Iterator[dict[str, Any]]:
    """4096 particles of which each attends to a quarter, D 64, beside dense attention in XLA of the same type."""
    import gossamer.jax as gsj

    N, D = 4096, 64
    x, features = cloud(N, "uniform"), jax.random.normal(jax.random.key(7), (N, D))
    some = np.asarray(features[:256], np.float64)
    wide = float(np.quantile(np.sqrt(((some[:, None] - np.asarray(features, np.float64)) ** 2).sum(-1)), 0.25))
    clouds = {"positions": (x[gp.Cells.build(x, 0.1, 1.0).order], (0.25 * 3 / (4 * np.pi)) ** (1 / 3), 1.0),
              "features": (features, wide, None)}  # fmt: skip
    for kind, (points, threshold, box) in clouds.items():
        mask = gsj.create_sparsity_mask(points, threshold, box)
        keep = jnp.asarray(mask.materialize(N, N))
        for dtype in ("bfloat16", "float32"):
            q, k, v = (jax.random.normal(jax.random.key(n), (N, D)).astype(dtype) for n in range(3))
            plan = gsj.prepare(mask, q, k)

            def sparse(q: jax.Array, k: jax.Array, v: jax.Array, plan: Any) -> jax.Array:
                return gsj.sparse_attention(q, k, v, plan)

            def dense(q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array) -> jax.Array:
                s = jnp.where(keep, (q @ k.T).astype(jnp.float32) * D**-0.5, -jnp.inf)
                return jax.nn.softmax(s, -1).astype(v.dtype) @ v

            rows = q[:64].astype(jnp.float32).__array__().astype(np.float64)
            s = np.where(keep[:64], rows @ np.asarray(k, np.float64).T * D**-0.5, -np.inf)
            p = np.exp(s - s.max(1, keepdims=True))
            exact = p / p.sum(1, keepdims=True) @ np.asarray(v, np.float64)
            for name, call, of in (("gossamer", sparse, plan), ("XLA dense", dense, keep)):
                for direction in ("forward", "gradient"):
                    total = jax.grad(
                        lambda q, k, v, of, call=call: call(q, k, v, of).astype(jnp.float32).sum(), (0, 1, 2)
                    )
                    run = jax.jit(call if direction == "forward" else total)
                    memory = run.lower(q, k, v, of).compile().memory_analysis()
                    row = {"case": f"attention of a quarter by {kind}", "particles": N, "dtype": dtype,
                           "implementation": name, "direction": direction, "density": float(keep.mean()),
                           "temporary_bytes": memory.temp_size_in_bytes,
                           "argument_bytes": memory.argument_size_in_bytes,
                           "ms": timed(partial(run, q, k, v, of))}  # fmt: skip
                    if direction == "forward":
                        row["error"] = float(np.abs(np.asarray(run(q, k, v, of)[:64], np.float64) - exact).max())
                    yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, nargs="*", default=[64_000, 256_000, 1_000_000, 4_000_000])
    parser.add_argument("--kinds", nargs="*", default=["uniform", "clustered"], choices=["uniform", "clustered"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--attention", action="store_true", help="rows of attention beside dense attention")
    given = parser.parse_args()
    calls: list[Callable[[], Iterable[dict[str, Any]]]] = [
        partial(rows_of, N, kind) for N in given.particles for kind in given.kinds
    ]
    calls += [loops] if given.particles else []
    calls += [attention] if given.attention else []
    for call in calls:
        for row in call():
            line = json.dumps(row)
            print(line, flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
