"""The mission's example from JAX on a CPU: masks of `create_sparsity_mask` beside dense attention of XLA.

python benchmarks/jax_masks.py            # both masks, forward, and forward with gradients

4096 particles with features of 64, float32: pairs by their features, 1 % of all, and by positions in 3 dimensions,
22 %. Dense attention is softmax(q k^T) with the boolean mask, jitted. Calls are timed in turns, with a pause before
each, since after a long call other programs come first. Time of the clock says little on a machine that is shared: the
seconds of all processors are printed beside it, of which dense attention uses several and `lax` mostly one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import gossamer.jax as gsj

N, D = 4096, 64
PAUSE = 0.1


def dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(scale * q k^T) v over the pairs of a boolean mask."""
    return jax.nn.softmax(jnp.where(mask, q @ k.T * D**-0.5, -jnp.inf), axis=-1) @ v


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call: of the clock, and of all processors."""
    time.sleep(PAUSE)
    wall, work = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - work)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    q, k, v = (jax.random.normal(jax.random.key(i), (N, D)) for i in range(3))
    points = jax.random.uniform(jax.random.key(9), (N, 3))
    for name, x, share in (("features of 64", q, 0.01), ("3 dimensions", points, 0.22)):
        mask = gsj.create_sparsity_mask(x, share=share)
        plan, keep = gsj.prepare(mask, q, k), jnp.asarray(mask.materialize(N, N))
        print(f"{name}, {share:.0%} of {N} x {N}\n{gsj.explain(q, k, v, mask)}")

        def ours(q: jax.Array, k: jax.Array, v: jax.Array, plan: Any) -> jax.Array:
            return gsj.sparse_attention(q, k, v, plan)

        for what in ("forward", "with gradients"):
            calls: dict[str, Callable[[], Any]] = {}
            for who, function, by in (("dense", dense, keep), ("gossamer", ours, plan)):
                if what != "forward":
                    function = jax.grad(lambda *x, f=function: (f(*x) ** 2).sum(), (0, 1, 2))  # type: ignore[misc]
                calls[who] = partial(jax.jit(function), q, k, v, by)
            a, b = (jax.tree.leaves(call()) for call in calls.values())
            error = max(float(jnp.abs(x - y).max()) for x, y in zip(a, b, strict=True))
            found: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
            for _ in range(turns):
                for who, call in calls.items():
                    found[who].append(timed(call))
            wall, work = ({who: statistics.median(x[at] for x in found[who]) for who in calls} for at in (0, 1))
            ratios = [x["dense"] / x["gossamer"] for x in (wall, work)]
            print(
                f"{what:<15} dense {wall['dense']:6.1f} ms ({work['dense']:6.1f} of processors), gossamer "
                f"{wall['gossamer']:6.1f} ms ({work['gossamer']:6.1f}): {ratios[0]:.1f} x ({ratios[1]:.1f} x), "
                f"largest difference {error:.1e}"
            )


if __name__ == "__main__":
    main()
