"""Layers around `attention`: those of Flax and Equinox with a dense mask are the truth."""

from __future__ import annotations

import doctest
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj

PATTERN = gs.SlidingWindow(9) | gs.Local(3)


def examples(module: str, name: str, **names: Any) -> None:
    """The examples of a docstring run."""
    found = importlib.import_module(module)
    (test,) = [one for one in doctest.DocTestFinder().find(getattr(found, name), name, module=found) if one.examples]
    test.globs = {"gs": gs, "gsj": gsj, "jax": jax, "jnp": jnp, **names}
    failed, _ = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test)
    assert not failed


def test_a_module_of_flax() -> None:
    nnx = pytest.importorskip("flax.nnx")
    examples("gossamer.jax.nnx", "MultiHeadAttention", nnx=nnx)
    layer = gsj.nn.MultiHeadAttention(32, 4, PATTERN, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(4, 32, use_bias=False, decode=False, rngs=nnx.Rngs(1))
    for name in ("query", "key", "value"):
        getattr(theirs, name).kernel[...] = getattr(layer, name).kernel[...].reshape(32, 4, 8)
    theirs.out.kernel[...] = layer.out.kernel[...].reshape(4, 8, 32)
    x = jax.random.normal(jax.random.key(2), (2, 40, 32))
    mask = PATTERN.materialize(40, 40)[None, None]

    def loss(layer: Any, x: Any, **options: Any) -> Any:
        return jnp.sin(layer(x, **options)).sum()

    np.testing.assert_allclose(layer(x), theirs(x, mask=mask), atol=2e-6)
    mine = nnx.jit(nnx.grad(loss))(layer, x)
    other = nnx.grad(lambda layer, x: loss(layer, x, mask=mask))(theirs, x)
    np.testing.assert_allclose(mine.key.kernel[...], other.key.kernel[...].reshape(32, 32), atol=1e-5)
    heads = jax.ShapeDtypeStruct((2, 40, 4, 8), x.dtype)
    whole, plan = layer(x, pattern=gs.Dense()), gsj.prepare(PATTERN, heads, heads)
    assert jnp.abs(whole - layer(x)).max() > 1e-3
    planned = gsj.nn.MultiHeadAttention(32, 4, plan, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(planned, x), layer(x), atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "dim must be a multiple of heads, and heads of kv_heads; got dim=32, heads=5"),
        ({"heads": 0}, "heads must be"),
        ({"kv_heads": 3}, "got dim=32, heads=4, kv_heads=3"),
    ],
)
def test_what_the_module_refuses(change: dict[str, int], message: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(ValueError, match=message):
        gsj.nn.MultiHeadAttention(**({"dim": 32, "heads": 4} | change), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must be \(B, T, 32\); got shape \(4, 32\)"):
        gsj.nn.MultiHeadAttention(32, 4, rngs=nnx.Rngs(0))(jnp.ones((4, 32)))


def test_a_layer_of_equinox() -> None:
    equinox = pytest.importorskip("equinox")
    examples("gossamer.jax.nn", "multihead_attention", equinox=equinox)
    layer = equinox.nn.MultiheadAttention(
        num_heads=4, query_size=24, key_size=16, value_size=20, output_size=12, use_query_bias=True, qk_size=8,
        vo_size=5, key=jax.random.key(0),
    )  # fmt: skip
    query, key, value = (jax.random.normal(jax.random.key(i), (30, size)) for i, size in enumerate((24, 16, 20)))

    def mine(layer: Any) -> Any:
        return gsj.nn.multihead_attention(layer, query, key, value, PATTERN)

    def theirs(layer: Any) -> Any:
        return layer(query, key, value, mask=jnp.asarray(PATTERN.materialize(30, 30)))

    np.testing.assert_allclose(mine(layer), theirs(layer), atol=2e-6)
    grads = [equinox.filter_grad(lambda layer, f=f: jnp.sin(f(layer)).sum())(layer) for f in (mine, theirs)]
    for x, y in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    with pytest.raises(ValueError, match=r"query must be \(positions, size\), without a batch"):
        gsj.nn.multihead_attention(layer, query[None])


def test_without_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flax", "flax.nnx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs flax, which no extra installs"):
        _ = gsj.nn.MultiHeadAttention
    with pytest.raises(AttributeError, match="has no attribute 'Attention'"):
        _ = gsj.nn.Attention
