"""Calls by kernels, whose launches XLA runs: on a stand-in of numpy for the kernels, which reads the same lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gossamer as gs
import gossamer.jax as gsj
from tests.jax import stand_in

pytest.importorskip("jax_tvm_ffi")

P = PartitionSpec
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "window": (gs.SlidingWindow(100), (2, 300, 300, 4, 2, 64, 64), {}),
    "dense, ragged": (None, (1, 130, 333, 2, 1, 64, 32), {}),
    "wide tiles": (gs.Causal(), (1, 500, 500, 2, 2, 128, 128), {}),
    "blocks": (gs.BigBird(64), (1, 512, 512, 2, 1, 64, 64), {}),
    "terms": (gs.SlidingWindow(90), (2, 300, 300, 4, 2, 64, 64),
              {"softcap": 5.0, "key_lengths": [250, 40], "sink_logits": jnp.arange(4.0), "scale": 0.2}),
    "odd sizes": (gs.Causal(), (1, 70, 70, 2, 2, 20, 7), {}),
    "negative scale": (gs.Causal(), (1, 200, 200, 1, 1, 64, 64), {"scale": -0.1}),
    "one query": (gs.Causal(), (2, 1, 900, 4, 1, 64, 64), {}),
    "heads": (gs.PerHead([gs.SlidingWindow(20), gs.Causal()]), (2, 300, 300, 2, 1, 64, 64), {}),
    "deterministic": (gs.SlidingWindow(200), (1, 600, 600, 2, 2, 128, 128), {"deterministic": True}),
    "offset": (gs.Causal(), (1, 200, 300, 1, 1, 64, 64), {"q_offset": 10}),
    "nothing kept": (gs.Causal(), (1, 200, 100, 1, 1, 64, 64), {"q_offset": -50}),
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of kernels that were called."""
    return stand_in.use(monkeypatch)


def inputs(sizes: tuple[int, ...], seed: int = 0, dtype: Any = jnp.float16) -> tuple[Any, ...]:
    """q, k, v and dout."""
    B, Q, K, H, G, D, E = sizes
    rng = np.random.default_rng(seed)
    shapes = (B, Q, H, D), (B, K, G, D), (B, K, G, E), (B, Q, H, E)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def both(pattern: Any, implementation: str | None = None, **terms: Any) -> Callable[..., Any]:
    """out, lse and the gradients of a call."""
    sinks = terms.pop("sink_logits", None)

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        def f(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return gsj.attention(
                q, k, v, pattern, sink_logits=sinks, return_residual=True, implementation=implementation, **terms
            )

        (out, lse), back = jax.vjp(f, q, k, v, sinks)
        return out, lse, *back((dout, jnp.where(lse == -jnp.inf, 0.0, jnp.cos(lse))))

    return run


def by_lax(pattern: Any, arrays: tuple[Any, ...], **terms: Any) -> Any:
    """The same in float32 by `blocked`."""
    wide = (x.astype(jnp.float32) for x in arrays)
    return jax.jit(both(pattern, "blocked", **terms))(*wide)


def close(found: Any, want: Any, tolerance: float = 4e-3) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert x.shape == y.shape and (np.isinf(x) == np.isinf(y)).all()
        there = ~np.isinf(y)
        scale = max(1.0, np.abs(y[there]).max(initial=0.0))
        assert np.abs(x[there] - y[there]).max(initial=0.0) <= tolerance * scale


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, calls: list[str]) -> None:
    pattern, sizes, terms = CASES[name]
    arrays = inputs(sizes)
    found = jax.jit(both(pattern, "hopper", **terms))(*arrays)
    jax.block_until_ready(found)
    assert "forward" in calls and ("query_gradient" in calls or "postprocess" in calls)
    close(found, by_lax(pattern, arrays, **terms))
