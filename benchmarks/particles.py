"""Sums over neighbours from JAX on a GPU, and beside a neighbour list in XLA: rows as lines of JSON.

    python benchmarks/particles.py                                # 64,000 to 4 million particles, 747 neighbours
    python benchmarks/particles.py --particles 64000 --of sums lists
    python benchmarks/particles.py --of table                     # 4096 particles beside dense attention in XLA
    python benchmarks/particles.py --at-once --out rows.jsonl     # a process for each part of each cloud

Numbers of sampled particles are compared with sums in float64 before anything is timed. Times are those of many calls
in flight, per call: what a program that computes step after step sees. `waited_ms` is that of a call that is waited
for. With `--at-once` all processes compile and compare at the same time, and measure one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from particle_clouds import NEIGHBORS, PUSH, TURNS, Exact, cloud, timed, waited
from particle_lists import listed

from gossamer import particles as gp
from gossamer.particles import fused_jax

HEADS, HEAD_SIZE = 8, 64  # of attention between neighbours
# With more particles lists, 4 bytes a pair, are left out; of clustered ones, whose cells are unequal, before that.
LISTED = {"uniform": 1_000_000, "clustered": 64_000}
WARPS = 64  # sampled, of 8 queries each
SHOWN = 64  # rows of attention that are compared with float64
STEPS = 20  # of attention in one program
SHARES = 0.25, 0.01  # of the pairs that are kept
LOOP = 32_768  # particles that are all within the radius: the rate of the loop over pairs itself


def fill(cells: gp.Cells) -> float:
    """The share of the pairs that kernels evaluate which are within the radius, of sampled warps."""
    points = np.asarray(cells.runs.points).reshape(3, -1).T
    boxes = np.asarray(jax.tree.leaves(cells.runs.tree)[0])
    (size, *_), square = cells.sizes, cells.reach**2
    kept = evaluated = 0
    for warp in np.random.default_rng(0).integers(0, cells.num_particles // 8, WARPS):
        queries, own = points[8 * warp : 8 * warp + 8], boxes[warp]

        def gaps(places: np.ndarray, half: Any) -> np.ndarray:
            apart = np.abs(places - own[:3])  # noqa: B023
            apart = np.minimum(apart, size - apart) - half - own[4:7]  # noqa: B023
            return (np.maximum(apart, 0) ** 2).sum(1)

        near = gaps(boxes[:, :3], boxes[:, 4:7]) <= square
        found = points.reshape(-1, 8, 3)[near].reshape(-1, 3)
        found = found[gaps(found, 0) <= square]
        d = found[None] - queries[:, None]
        kept += ((d - size * np.round(d / size)) ** 2).sum(-1).__le__(square).sum()
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


class Case(NamedTuple):
    """A cloud, what is summed over it, and what its rows share."""

    x: jax.Array
    radius: float
    law: gp.ShortRangeGravity
    h: float
    exact: Exact
    pairs: float
    common: dict[str, Any]


def case_of(N: int, kind: str) -> Case:
    x, radius = cloud(N, kind), (NEIGHBORS / N * 3 / (4 * np.pi)) ** (1 / 3)
    exact = Exact(x, radius)
    neighbors = float(np.mean([len(s) for _, s in exact.found])) if kind == "clustered" else float(NEIGHBORS)
    common = {"particles": N, "kind": kind, "neighbors": neighbors, "device": str(jax.devices()[0].device_kind),
              "jax": jax.__version__, "kernels": fused_jax.available()}  # fmt: skip
    return Case(x, radius, gp.ShortRangeGravity(radius / 5.5, radius / 200), radius / 3, exact, N * neighbors, common)


def sums(N: int, kind: str) -> Iterator[dict[str, Any]]:
    """The sums of a cloud and their gradients: all are compiled and compared with float64, then timed."""
    x, radius, law, h, exact, pairs, common = case_of(N, kind)
    mass, thirds = jnp.ones(N), jnp.arange(N) % 3 * 1.0  # of equal masses the gradients of pushed forces cancel
    build = jax.jit(lambda x: gp.Cells.build(x, radius, 1.0))
    cells = build(x)
    common = {**common, "implementation": "gossamer", "fill": fill(cells)}

    def density(x: jax.Array, mass: jax.Array, runs: Any) -> jax.Array:
        return gp.radial_sum(gp.Cells(x, runs, radius, cells.box), mass, gp.Gaussian(h))

    def force(x: jax.Array, mass: jax.Array, runs: Any) -> jax.Array:
        return gp.radial_force(gp.Cells(x, runs, radius, cells.box), mass, law)

    def total(x: jax.Array, mass: jax.Array, runs: Any, push: jax.Array) -> jax.Array:
        return (force(x, mass, runs) @ push).sum()

    def squares(function: Callable[..., jax.Array], to: Any) -> Callable[..., Any]:
        return jax.grad(lambda x, mass, runs: (function(x, mass, runs) ** 2).sum(), to)

    def check(name: str, out: Any) -> tuple[float, float] | None:
        """(error, limit)"""
        if name == "density":
            return exact.density_error(out, h), 2e-6
        if name == "gravity":
            return exact.force_error(out, law), 1e-4
        if name == "density gradient":
            return exact.gradient_error(out, h), 2e-6
        return (exact.push_error(out, law), 1e-4) if name.startswith("gravity gradient") else None

    alike, given = (x, mass, cells.runs), (x, thirds, cells.runs)  # as arguments: a constant is part of a program
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "density": (density, alike),
        "gravity": (force, alike),
        "density gradient": (jax.grad(lambda *given: density(*given).sum(), (0, 1)), alike),
        "density and gradient": (squares(density, (0, 1)), alike),
        "gravity gradient": (jax.grad(total, (0, 1)), (*given, PUSH)),
        "gravity and gradient": (squares(force, (0, 1)), given),
        "gravity gradient to positions": (jax.grad(total), (*given, PUSH)),
        "gravity and gradient to positions": (squares(force, 0), given),
    }
    checked = []
    for name, (function, arguments) in calls.items():
        run = jax.jit(function).lower(*arguments).compile()
        out, again = run(*arguments), run(*arguments)
        row = {**common, "case": name, "status": "ok"}
        found = check(name, out)
        if found is not None:
            row["error"], limit = found
            row["status"] = "ok" if row["error"] <= limit else "failed"
        row["repeats"] = all(bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (out, again)), strict=True))
        row["bytes_a_particle"] = run.memory_analysis().temp_size_in_bytes / N
        checked.append((row, partial(run, *arguments)))
    yield {**common, "case": "order and boxes", "ms": timed(lambda: build(x))}
    for row, call in checked:
        if row["status"] == "ok":
            row["ms"], row["waited_ms"] = timed(call), waited(call)
            row["interactions_per_second"] = pairs / row["ms"] * 1e3
        yield row


def lists(N: int, kind: str) -> list[dict[str, Any]]:
    return listed(*case_of(N, kind)) if LISTED[kind] >= N else []


def attention(N: int, kind: str) -> list[dict[str, Any]]:
    x, radius, _, h, exact, _, common = case_of(N, kind)
    return attended(x, radius, h, common, exact) if max(LISTED.values()) >= N else []


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


def table(dtype: str, kind: str) -> Iterator[dict[str, Any]]:
    """4096 particles of which each attends to a share, D 64, beside dense attention in XLA of the same type.

    `ms` is of steps of one program, `call_ms` of calls from Python, which take longer to make than to compute. XLA's
    products of float32 are at their highest precision.

    Args:
        kind: what is near: "positions" in a box, or "features" of 64 dimensions.
    """
    import gossamer.jax as gsj

    N, D = 4096, 64
    x, features = cloud(N, "uniform"), jax.random.normal(jax.random.key(7), (N, D))
    points, box = (x[gp.Cells.build(x, 0.1, 1.0).order], 1.0) if kind == "positions" else (features, None)
    q, k, v = (jax.random.normal(jax.random.key(n), (N, D)).astype(dtype) for n in range(3))
    rows = np.asarray(q[:SHOWN].astype(jnp.float32), np.float64) @ np.asarray(k.astype(jnp.float32), np.float64).T

    def sparse(q: jax.Array, k: jax.Array, v: jax.Array, plan: Any) -> jax.Array:
        return gsj.sparse_attention(q, k, v, plan)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            s = jnp.where(keep, (q @ k.T).astype(jnp.float32) * D**-0.5, -jnp.inf)
            return jax.nn.softmax(s, -1).astype(v.dtype) @ v

    for share in SHARES:
        mask = gsj.create_sparsity_mask(points, box=box, share=share)
        keep = jnp.asarray(mask.materialize(N, N))
        s = np.where(keep[:SHOWN], rows * D**-0.5, -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        exact = p / p.sum(1, keepdims=True) @ np.asarray(v.astype(jnp.float32), np.float64)
        gradients: list[Any] = []
        for name, call, of in (("gossamer", sparse, gsj.prepare(mask, q, k)), ("XLA dense", dense, keep)):

            def total(q: Any, k: Any, v: Any, of: Any, call: Any = call) -> jax.Array:
                return (call(q, k, v, of).astype(jnp.float32) ** 2).sum()

            for direction, function in (("forward", call), ("gradient", jax.grad(total, (0, 1, 2)))):
                run = jax.jit(function).lower(q, k, v, of).compile()
                memory, out = run.memory_analysis(), run(q, k, v, of)
                row = {"case": f"attention of {share:.0%} by {kind}", "particles": N, "dtype": dtype,
                       "implementation": name, "direction": direction, "density": float(keep.mean()),
                       "temporary_bytes": memory.temp_size_in_bytes,
                       "argument_bytes": memory.argument_size_in_bytes}  # fmt: skip
                if direction == "forward":
                    row["error"] = float(np.abs(np.asarray(out[:SHOWN].astype(jnp.float32)) - exact).max())
                else:
                    gradients.append([np.asarray(one.astype(jnp.float32)) for one in out])
                if len(gradients) == 2:
                    row["apart"] = max(
                        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(*gradients, strict=True)
                    )
                loop = looped(function).lower(q, k, v, of, 0.0).compile()
                row["ms"] = timed(partial(loop, q, k, v, of, 0.0)) / STEPS
                yield {**row, "call_ms": timed(partial(run, q, k, v, of))}


def looped(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Of q, k, v, their layout and 0: `STEPS` calls, of which each waits for the one before, as one program."""

    @jax.jit
    def loop(q: jax.Array, k: jax.Array, v: jax.Array, of: Any, none: float) -> jax.Array:
        def step(_: int, q: jax.Array) -> jax.Array:
            return q + none * sum(jax.tree.leaves(function(q, k, v, of)))

        return jax.lax.fori_loop(0, STEPS, step, q)

    return loop


def parts_of(given: argparse.Namespace) -> dict[str, Callable[[], Iterable[dict[str, Any]]]]:
    """What is measured, by names."""
    found: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {}
    for name, function in (("sums", sums), ("lists", lists), ("attention", attention)):
        if name in given.of:
            found |= {f"{name} {N} {kind}": partial(function, N, kind) for N in given.particles for kind in given.kinds}
    if "table" in given.of:
        found |= {
            f"table {dtype} {kind}": partial(table, dtype, kind)
            for dtype in ("bfloat16", "float32") for kind in ("positions", "features")
        }  # fmt: skip
    return found | ({"loops": loops} if "loops" in given.of else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, nargs="*", default=[64_000, 256_000, 1_000_000, 4_000_000])
    parser.add_argument("--kinds", nargs="*", default=list(LISTED), choices=list(LISTED))
    parser.add_argument("--of", nargs="*", default=["sums", "lists", "attention", "loops"],
                        choices=["sums", "lists", "attention", "loops", "table"])  # fmt: skip
    parser.add_argument("--out", type=Path)
    parser.add_argument("--at-once", action="store_true", help="a process for each part")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--turns", nargs=2, metavar=("FOLDER", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts = parts_of(given)
    if given.at_once:
        at_once(list(parts))
        return
    if given.turns:
        folder, count = given.turns
        TURNS.share(Path(folder), int(count))
    for name, rows in parts.items():
        for row in rows() if given.part in (None, name) else ():
            line = json.dumps(row)
            print(line, flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(line + "\n")


def at_once(parts: list[str]) -> None:
    """Each part in a process of its own, of the same arguments."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, __file__, *(argument for argument in sys.argv[1:] if argument != "--at-once")]
    with tempfile.TemporaryDirectory() as folder:
        turns = ["--turns", folder, str(len(parts))]
        running = [subprocess.Popen([*command, *turns, "--part", part], env=environment) for part in parts]
        for process in running:
            process.wait()


if __name__ == "__main__":
    main()
