"""Arrays without elements: 0, an lse of -inf (or the sink) and zero gradients, under every transformation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCSR
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gossamer as gs
import gossamer.jax as gsj
from gossamer import particles as gp
from gossamer.jax.kernels import targets

H, G, D, E = 4, 2, 8, 5
SIZES = [(2, 0, 7), (2, 7, 0), (2, 0, 0), (0, 7, 9), (0, 0, 0)]
PATTERNS: dict[str, Any] = {
    "none": lambda B, Q, K: None,
    "window": lambda B, Q, K: gs.SlidingWindow(3),
    "composed": lambda B, Q, K: (gs.SlidingWindow(3) | gs.Dilated(2, 0, 2)) & ~gs.Local(3),
    "heads": lambda B, Q, K: gs.PerHead([gs.Causal()] * H),
    "mask": lambda B, Q, K: np.ones((1, H, Q, K), bool),
    "plan": lambda B, Q, K: gsj.prepare(gs.Causal(), *(jnp.ones((B, n, h, D)) for n, h in ((Q, H), (K, G)))),
    "sparse": lambda B, Q, K: BCSR.fromdense(jnp.ones((Q, K)), nse=Q * K),
    "blocks": lambda B, Q, K: gsj.prepare_blocks(
        jnp.zeros((-(-Q // 64), 2), int), *(jnp.ones((B, n, h, D)) for n, h in ((Q, H), (K, G))), pattern=gs.Causal()
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pattern(name: str, sizes: tuple[int, int, int]) -> None:
    B, Q, K = sizes
    q, k, v = jnp.ones((B, Q, H, D)), jnp.ones((B, K, G, D)), jnp.ones((B, K, G, E))
    pattern = PATTERNS[name](*sizes)
    out, lse = gsj.attention(q, k, v, pattern, return_residual=True)
    assert out.shape == (B, Q, H, E) and lse.shape == (B, Q, H)
    assert not jnp.any(out) and bool((lse == -jnp.inf).all())


@pytest.mark.parametrize("implementation", [None, "blocked"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_terms_and_gradients(sizes: tuple[int, int, int], implementation: str | None) -> None:
    """The sink is all of a row without keys: its gradient is that of lse."""
    B, Q, K = sizes
    q, k, v = jnp.ones((B, Q, H, D)), jnp.ones((B, K, G, D)), jnp.ones((B, K, G, E))
    sinks, slopes = jnp.arange(1.0, H + 1), jnp.ones(H)

    def total(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = gsj.attention(
            q, k, v, gs.Causal(), sink_logits=sinks, alibi_slopes=slopes, softcap=3.0, scale=0.5,
            key_lengths=jnp.full(B, 3), return_residual=True, implementation=implementation,
        )  # fmt: skip
        return out.sum() + (2 * lse).sum(), (out, lse)

    for run in (jax.jit, lambda f: f):
        grads, (out, lse) = run(jax.grad(total, (0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
        assert not any(jnp.any(g) for g in grads[:3]) and not jnp.any(out)
        assert [g.shape for g in grads] == [x.shape for x in (q, k, v, sinks)]
        np.testing.assert_allclose(lse, jnp.broadcast_to(sinks, lse.shape), rtol=1e-6)
        np.testing.assert_allclose(grads[3], np.full(H, 2.0 * B * Q), rtol=1e-6)


def test_no_particles_in_shards_that_share_values() -> None:
    """Sums differ over devices by their type, as positions do."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def pulled(x: Any, values: Any, g: Any) -> Any:
        def of(values: Any) -> Any:
            return gp.radial_sum(gp.Cells.build(x[0], 0.2, 1.0), values, gp.Gaussian(0.1))

        return jax.vjp(of, values)[1](g[0])

    x, values, g = jnp.ones((2, 0, 3)), jnp.ones((0, 6)), jnp.ones((2, 0, 6))
    specs = P("x"), P(), P("x")
    (found,) = jax.jit(jax.shard_map(pulled, mesh=mesh, in_specs=specs, out_specs=P()))(x, values, g)
    assert found.shape == values.shape


def test_transformations() -> None:
    q, k = jnp.ones((3, 2, 5, H, D)), jnp.ones((3, 2, 0, G, D))
    attend = partial(gsj.attention, pattern=gs.Causal(), return_residual=True)
    out, lse = jax.vmap(attend)(q, k, k)
    assert out.shape == q.shape and not out.any() and bool((lse == -jnp.inf).all())
    out, _ = jax.jit(jax.vmap(attend, (None, 0, 0)))(q[0], k, k)
    assert out.shape == q.shape
    none = jnp.ones((0, 2, 5, G, D))
    for run in (jax.vmap(attend), jax.jit(jax.vmap(attend))):
        assert run(none, none, none)[0].shape == none.shape
    grads = jax.vmap(jax.grad(lambda q, k: attend(q, k, k)[0].sum(), (0, 1)))(q, k)
    assert [g.shape for g in grads] == [q.shape, k.shape] and not grads[0].any()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda q, k: attend(q, k, k), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert not mapped(q[0], k[0])[0].any()
    assert not jax.grad(lambda q: mapped(q, k[0])[0].sum())(q[0]).any()

    def pulled(q: Any, k: Any, dout: Any) -> Any:
        """With queries that all devices share: results differ over them by their type."""
        sinks = jnp.ones(H)
        return jax.vjp(lambda q: gsj.attention(q, k, k, gs.Causal(), sink_logits=sinks), q)[1](dout)

    q, k, dout = jnp.ones((1, 0, H, D)), jnp.ones((2, 9, G, D)), jnp.ones((2, 0, H, D))
    specs = P(), P("x"), P("x")
    assert jax.jit(jax.shard_map(pulled, mesh=mesh, in_specs=specs, out_specs=P()))(q, k, dout)[0].shape == q.shape
    two, one = jnp.ones((5, D)), jnp.ones((0, D))
    assert gsj.attention(two, one, one).shape == (5, D) and gsj.attention(one, two, two).shape == (0, D)
    assert gsj.explain(two[None, :, None], one[None, :, None], one[None, :, None]).implementation == "blocked, in lax"


def test_points() -> None:
    for d in (2, 9):
        mask = gsj.create_sparsity_mask(jnp.ones((0, d)), threshold=1.0)
        assert gsj.sparse_attention(jnp.ones((0, 4)), jnp.ones((0, 4)), jnp.ones((0, 4)), mask).shape == (0, 4)
    mask = gsj.create_sparsity_mask(jnp.ones((0, 2)), threshold=1.0, capacity=4)
    assert gsj.sparse_attention(jnp.ones((0, 4)), jnp.ones((0, 4)), jnp.ones((0, 4)), mask).shape == (0, 4)


def every(x: Any, v: Any, capacity: int | None) -> Any:
    """All that particles have."""
    cells = gp.Cells.build(x, 0.2, (1.0, None))
    neighbors = gp.Neighbors.allocate(x, 0.2, (1.0, None), capacity).update(x)
    heads = v[:, None]
    return [
        gp.radial_sum(cells, v, gp.Gaussian(0.1)), gp.radial_sum(cells, v[:, 0], gp.Gaussian(0.1)),
        gp.radial_sum(cells, v, gp.RadialKernel(lambda s, xp: xp.exp(-s))),
        gp.radial_force(cells, v[:, 0], gp.ShortRangeGravity(0.03)), gp.radial_sum(cells, 1.0, gp.Gaussian(0.1)),
        gp.neighbor_attention(heads, heads, heads, neighbors),
        *gp.neighbor_attention(v, v, v, neighbors, kernel="dot+gaussian", bandwidth=0.1, return_residual=True),
        gp.neighbor_attention(None, None, v, neighbors, kernel="gaussian", bandwidth=0.1),
        neighbors.indices, neighbors.counts,
    ]  # fmt: skip


@pytest.mark.parametrize("capacity", [None, 0, 8])
def test_no_particles(capacity: int | None) -> None:
    x, v = jnp.zeros((0, 2)), jnp.zeros((0, 3))
    assert all(one.shape[0] == 0 for one in every(x, v, capacity))
    grads = jax.grad(lambda x, v: sum(one.sum() for one in every(x, v, capacity)[:-2]), (0, 1))(x, v)
    assert [g.shape for g in grads] == [x.shape, v.shape]
    neighbors = gp.Neighbors.allocate(x, 0.2, capacity=capacity)
    assert not neighbors.overflow
    if capacity is not None:
        for run in (jax.jit, jax.vmap):
            given = (x[None], v[None]) if run is jax.vmap else (x, v)
            made = run(lambda x, v: every(x, v, capacity))(*given)
            assert all(0 in one.shape for one in made)
            run(jax.grad(lambda x, v: sum(one.sum() for one in every(x, v, capacity)[:-2]), (0, 1)))(*given)


def test_lists_without_room() -> None:
    """Each particle is its own neighbour: every list is cut, and no number is made of it."""
    x, v = jax.random.uniform(jax.random.key(0), (9, 2)), jnp.ones((9, 3))
    neighbors = gp.Neighbors.allocate(x, 0.2, capacity=0)
    assert neighbors.overflow and neighbors.capacity == 0 and neighbors.indices.shape == (9, 0)
    np.testing.assert_array_equal(neighbors.counts, gp.Neighbors.allocate(x, 0.2).counts)

    def total(x: Any, v: Any) -> Any:
        lists = gp.Neighbors.allocate(x, 0.2, capacity=0)
        return gp.neighbor_attention(v, v, v, lists, kernel="dot+gaussian", bandwidth=0.1).sum()

    for run in (jax.jit, lambda f: f):
        assert all(bool(jnp.isnan(one).all()) for one in run(jax.grad(total, (0, 1)))(x, v))


def test_no_channels() -> None:
    x = jax.random.uniform(jax.random.key(0), (9, 2))
    cells = gp.Cells.build(x, 0.2)
    assert gp.radial_sum(cells, jnp.ones((9, 0)), gp.Gaussian(0.1)).shape == (9, 0)
    grad = jax.grad(lambda x: gp.radial_sum(gp.Cells.build(x, 0.2), jnp.ones((9, 0)), gp.Gaussian(0.1)).sum())(x)
    assert not grad.any()


@pytest.mark.gpu
@pytest.mark.skipif(targets.chip() is None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_where_kernels_compute_the_rest(sizes: tuple[int, int, int]) -> None:
    """In 16 bits, by name too, mapped over nothing, and particles whose kernels are given no memory."""
    B, Q, K = sizes
    q, k = jnp.ones((B, Q, H, 64), jnp.bfloat16), jnp.ones((B, K, G, 64), jnp.bfloat16)
    for name in (None, "hopper"):

        def attend(q: Any, k: Any, name: str | None = name) -> Any:
            return gsj.attention(q, k, k, gs.SlidingWindow(3), implementation=name, return_residual=True)

        out, lse = jax.jit(attend)(q, k)
        assert out.shape == q.shape and not out.any() and bool((lse == -jnp.inf).all())
        grads = jax.jit(jax.grad(lambda q, k, attend=attend: attend(q, k)[0].astype(jnp.float32).sum(), (0, 1)))(q, k)
        assert [g.shape for g in grads] == [q.shape, k.shape] and not any(g.any() for g in grads)
    some = jnp.ones((0, 2, 64, H, 64), jnp.bfloat16)
    assert jax.vmap(lambda q: gsj.attention(q, q, q, gs.Causal()))(some).shape == some.shape
    x, v = jnp.zeros((0, 2)), jnp.zeros((0, 3))
    assert all(0 in one.shape for one in jax.jit(lambda x, v: every(x, v, 8))(x, v))
    lists = gp.Neighbors.allocate(jnp.ones((9, 2)), 0.2, capacity=0)
    assert lists.overflow and lists.indices.shape == (9, 0)
