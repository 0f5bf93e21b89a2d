"""A scale that is an array, and keys of one batch element for all: as numbers, and as keys that are repeated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer import particles as gp
from tests.jax.calls import made
from tests.jax.oracle import expected

B, Q, K, H, G, D = 2, 70, 90, 4, 2, 16


def arrays(dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, n, h, D))).astype(dtype) for n, h in ((Q, H), (K, G), (K, G))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [0.37, -2.0, 0.0])
def test_a_traced_scale(scale: float, dtype: str) -> None:
    """Results and all gradients, its own too, against the definition."""
    keep = gs.SlidingWindow(20).materialize(Q, K, K - Q)[None, None]
    x = made(np.random.default_rng(1), (B, H, G, Q, K, D, D), dtype, keep, scale=scale, q_offset=K - Q)
    want = expected(x)

    @jax.jit
    def both(q: Any, k: Any, v: Any, scale: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, scale: Any) -> Any:
            return gsj.attention(q, k, v, gs.SlidingWindow(20), scale=scale, return_residual=True)

        (out, lse), back = jax.vjp(attend, q, k, v, scale)
        return out, lse, back((jnp.asarray(x.dout), jnp.asarray(x.dlse)))

    out, lse, (dq, dk, dv, ds) = both(x.q, x.k, x.v, jnp.float32(scale))
    rounding = {"float32": 2e-5, "bfloat16": 0.03, "float16": 0.004}[dtype]
    pairs = zip((out, lse, dq, dk, dv), (want.out, want.lse, want.dq, want.dk, want.dv), strict=True)
    for found, right in pairs:
        error = np.abs(np.asarray(found).astype(float) - right).max()
        assert error <= rounding * max(1.0, np.abs(right).max())
    e = 1e-6
    ends = [expected(x._replace(scale=scale + way * e)) for way in (1, -1)]
    loss = [(end.out * x.dout.astype(float)).sum() + (end.lse * x.dlse.astype(float)).sum() for end in ends]
    right = (loss[0] - loss[1]) / (2 * e)
    size = np.abs(ends[0].dq / (scale + e) * x.q.astype(float)).sum()
    assert ds.dtype == jnp.float32 and abs(float(ds) - right) <= rounding * size + 1e-3


def test_a_known_one_is_a_number() -> None:
    q, k, v = arrays()
    want = gsj.attention(q, k, v, gs.Causal(), scale=0.3)
    for scale in (jnp.float32(0.3), np.float32(0.3), np.array(0.3), np.float64(0.3)):
        np.testing.assert_allclose(gsj.attention(q, k, v, gs.Causal(), scale=scale), want, rtol=1e-5, atol=1e-6)
    assert gsj.explain(q, k, v, scale=jnp.float32(0.3)).problem == gsj.explain(q, k, v, scale=0.3).problem
    mapped = jax.vmap(lambda s: gsj.attention(q, k, v, gs.Causal(), scale=s))(jnp.asarray([0.3, 0.6]))
    np.testing.assert_allclose(mapped[0], want, rtol=1e-5, atol=1e-6)
    for wrong in (jnp.ones(2), True, "1", 1j):
        with pytest.raises(ValueError, match="scale must be a number, an array of floats without dimensions, or None"):
            gsj.attention(q, k, v, scale=wrong)
    with pytest.raises(ValueError, match="softcap must be a number that is known, or None"):
        jax.jit(lambda c: gsj.attention(q, k, v, softcap=c))(1.0)


def test_a_scale_of_neighbours() -> None:
    x = jax.random.uniform(jax.random.key(0), (60, 2))
    q, k, v = (jax.random.normal(jax.random.key(n), (60, 2, 4)) for n in range(3))
    lists = gp.Neighbors.allocate(x, 0.3)

    def total(scale: Any) -> Any:
        return (gp.neighbor_attention(q, k, v, lists, scale=scale) ** 2).sum()

    found, slope = jax.jit(jax.value_and_grad(total))(0.7)
    np.testing.assert_allclose(found, total(0.7), rtol=1e-5)
    np.testing.assert_allclose(slope, (total(0.72) - total(0.68)) / 0.04, rtol=2e-3)


def test_keys_of_one_batch_element() -> None:
    q, k, v = arrays()
    repeated = jnp.repeat(k[:1], B, 0), jnp.repeat(v[:1], B, 0)
    for pattern in (gs.SlidingWindow(20), gs.PerBatch([gs.Causal(), gs.Dense()])):

        def f(q: Any, k: Any, v: Any, pattern: Any = pattern) -> Any:
            return (gsj.attention(q, k, v, pattern, key_lengths=[50, 90]) ** 2).sum()

        found, (dq, dk, dv) = jax.value_and_grad(f, (0, 1, 2))(q, k[:1], v[:1])
        want, (eq, ek, ev) = jax.value_and_grad(f, (0, 1, 2))(q, *repeated)
        np.testing.assert_allclose(found, want, rtol=1e-5)
        for one, other in ((dq, eq), (dk, ek.sum(0, keepdims=True)), (dv, ev.sum(0, keepdims=True))):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.abs(other).max()))
    assert gsj.attention(q, k[:1], v).shape == q.shape
    with pytest.raises(ValueError, match="key must have B=2 batch elements, as query has, or one for all"):
        gsj.attention(q, jnp.repeat(k, 2, 0), v)
