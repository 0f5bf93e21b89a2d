"""A window of 256 in JAX on a CPU, beside `jax.nn` with the same mask, and up to 131,072 positions: a table.

    python benchmarks/jax_window.py [--dense]

Where jax is installed (`.venv-jax`). `--dense` times `jax.nn.dot_product_attention` at 8192 positions as well, which
takes seconds and gigabytes. Numbers are checked against it at 1024 positions first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gossamer as gs
import gossamer.jax as gsj

WINDOW, HEADS, SIZE, ROUNDS = 256, 4, 64, 3
PATTERN = gs.SlidingWindow(WINDOW)


def inputs(N: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, N, HEADS, SIZE)), jnp.float32) for _ in range(3)]


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(WINDOW, 0), implementation="xla")


def ours(plan: gsj.Plan) -> Callable[..., jax.Array]:
    return lambda q, k, v: gsj.attention(q, k, v, plan)


def milliseconds(f: Callable[..., Any], *x: jax.Array) -> float:
    """The least of some rounds of a compiled function."""
    compiled = jax.jit(f).lower(*x).compile()
    jax.block_until_ready(compiled(*x))
    found = []
    for _ in range(ROUNDS):
        start = perf_counter()
        jax.block_until_ready(compiled(*x))
        found.append(1e3 * (perf_counter() - start))
    return min(found)


def gradient(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(lambda *x: f(*x).sum(), (0, 1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", action="store_true", help="time jax.nn as well")
    with_dense = parser.parse_args().dense
    x = inputs(1024)
    off = float(jnp.abs(gsj.attention(*x, PATTERN) - dense(*x)).max())
    assert off < 1e-5, off
    print(f"jax {jax.__version__}, window {WINDOW}, {HEADS} heads of {SIZE}, float32; off by {off:.1e} at 1024")
    print("positions  gossamer   with gradient   jax.nn   with gradient  (ms)")
    for N in (8192, 32768, 131072):
        x = inputs(N)
        f = ours(gsj.prepare(PATTERN, *x[:2]))
        theirs = (
            f"{milliseconds(dense, *x):8.0f} {milliseconds(gradient(dense), *x):15.0f}"
            if with_dense and N == 8192
            else ""
        )
        print(f"{N:9} {milliseconds(f, *x):9.0f} {milliseconds(gradient(f), *x):15.0f} {theirs}", flush=True)


if __name__ == "__main__":
    main()
