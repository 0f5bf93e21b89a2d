"""Lists of neighbours and attention over them from JAX: pair sets, capacities, values and gradients."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial import cKDTree

from gossamer import particles as gp
from gossamer.jax.kernels import targets
from gossamer.particles.blocked_jax import groups_of, reach_of
from tests.particles import oracle


@pytest.mark.parametrize(
    ("N", "d", "box", "radius", "kind"),
    [
        (0, 3, 1.0, 0.2, "uniform"),
        (1, 2, None, 0.2, "uniform"),
        (600, 3, (1.0, None, 0.9), 0.2, "clustered"),
        (300, 1, 1.0, 0.5, "coincident"),
        (100, 3, 1.0, 0.1, "one place"),
    ],
)
def test_lists_are_those_of_a_tree(N: int, d: int, box: Any, radius: float, kind: str) -> None:
    x = oracle.cloud(np.random.default_rng(N), N, d, kind)
    neighbors = gp.Neighbors.allocate(jnp.asarray(x), radius, box)
    assert not neighbors.overflow
    if not N:
        return
    inside = oracle.wrapped(x, neighbors.cells.box).astype(np.float32)
    sizes = neighbors.cells.box
    tree = cKDTree(inside.astype(float), boxsize=[size or 0 for size in sizes] if any(sizes) else None)
    unsure = np.abs(oracle.pairs(inside, sizes).s / radius**2 - 1) < 1e-6
    for i, (found, wanted) in enumerate(
        zip(np.asarray(neighbors.indices), tree.query_ball_point(inside, radius), strict=True)
    ):
        assert len(set(found[found >= 0])) == (found >= 0).sum() == neighbors.counts[i]
        assert all(unsure[i, j] for j in set(found[found >= 0]) ^ set(wanted))


def test_lists_under_jit_and_too_small_ones() -> None:
    x = jax.random.uniform(jax.random.key(0), (200, 3))
    neighbors = gp.Neighbors.allocate(x, 0.3, 1.0)
    moved = jax.jit(lambda neighbors, x: neighbors.update(x))(neighbors, x[::-1])
    np.testing.assert_array_equal(np.sort(moved.indices[::-1]), np.sort(jnp.where(
        neighbors.indices >= 0, 199 - neighbors.indices, -1)))  # fmt: skip
    q, k, v = (jax.random.normal(jax.random.key(n), (200, 2, 4)) for n in range(3))
    cut = gp.Neighbors.allocate(x, 0.3, 1.0, capacity=24)
    assert cut.overflow
    full = gp.neighbor_attention(q, k, v, neighbors)
    short, lse = gp.neighbor_attention(q, k, v, cut, return_residual=True)
    over = np.asarray(neighbors.counts) > 24
    assert over.any() and not over.all()
    assert np.isnan(short[over]).all() and np.isnan(lse[over]).all()
    np.testing.assert_allclose(short[~over], full[~over], rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda q, k, v: gp.neighbor_attention(q, k, v, cut).sum(), (0, 1, 2))(q, k, v)
    wanted = jax.grad(lambda q, k, v: gp.neighbor_attention(q, k, v, neighbors).sum(), (0, 1, 2))(q, k, v)
    for grad, right in zip(grads, wanted, strict=True):
        sure = ~np.isnan(grad)
        assert not sure[over].any()
        np.testing.assert_allclose(grad[sure], right[sure], rtol=1e-4, atol=1e-5)
    # Positions are in no score of "dot": nothing that is not a number reaches their gradient.
    placed = jax.grad(lambda x: gp.neighbor_attention(q, k, v, gp.Neighbors.allocate(x, 0.3, 1.0, 24)).sum())(x)
    np.testing.assert_array_equal(placed, np.zeros((200, 3)))
    with pytest.raises(ValueError, match="capacity must be given"):
        jax.jit(lambda x: gp.Neighbors.allocate(x, 0.3, 1.0).sizes)(x)


@pytest.mark.parametrize(
    ("N", "d", "box", "radius", "room"),
    [(1, 3, None, 0.1, 64), (200, 3, (1.0, None, 1.0), 0.2, 192), (130, 1, 1.0, 0.1, 64)],
)
def test_groups_are_the_unions_of_lists(N: int, d: int, box: Any, radius: float, room: int) -> None:
    """What operations make of lists is what the kernel is to make: columns, bits, counts, positions in the frame."""
    x = oracle.cloud(np.random.default_rng(N), N, d, "uniform")
    neighbors = gp.Neighbors.allocate(jnp.asarray(x), radius, box)
    cells = neighbors.cells
    places, sizes, groups = groups_of(reach_of(cells), neighbors.cells.runs, neighbors.capacity, room)
    np.testing.assert_array_equal(places, neighbors.places)
    np.testing.assert_array_equal(sizes, neighbors.sizes)
    order = np.asarray(neighbors.cells.order)
    keep = np.zeros((N, N + 1), bool)
    keep[np.arange(N)[:, None], places] = True
    exact = oracle.pairs(x[order], cells.box)
    unsure = np.abs(exact.s / radius**2 - 1) < 1e-5
    assert ((keep[:, :N] == (exact.s <= radius**2)) | unsure).all()
    T = -(-N // 64)
    columns, words = np.asarray(groups.columns).reshape(T, room), np.asarray(groups.bits).view(np.uint32)
    bits = (words.reshape(T, room // 32, 64, 1) >> np.arange(32, dtype=np.uint32)) & 1
    bits = bits.swapaxes(1, 2).reshape(T, 64, room)
    theirs, mine = (np.asarray(one).reshape(T, -1, 4)[..., :d] for one in (groups.theirs, groups.mine))
    for t in range(T):
        rows = slice(64 * t, min(64 * t + 64, N))
        union = np.flatnonzero(keep[rows, :N].any(0))
        listed, n = union[:room], len(union[:room])
        assert groups.counts[t] == len(union)
        np.testing.assert_array_equal(columns[t], np.pad(listed, (0, room - n), constant_values=-1))
        np.testing.assert_array_equal(bits[t, : rows.stop - rows.start, :n], keep[rows][:, listed])
        assert not bits[t, :, n:].any() and not bits[t, rows.stop - rows.start :].any()
        if not groups.far[t]:
            steps = theirs[t, None, :n] - mine[t, : rows.stop - rows.start, None]
            near = keep[rows][:, listed]
            np.testing.assert_allclose(steps[near], exact.steps[rows][:, listed][near] * cells.unit, atol=1e-5)


ATTENTION = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from gossamer import particles as gp
from tests.particles import oracle
shapes = (90, 3), (90, 2, 4), (90, 2, 4), (90, 2, 5)
x, q, k, v = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))
x = x * 0.3 % 1
wo, wl = jax.random.normal(jax.random.key(7), v.shape), jax.random.normal(jax.random.key(8), v.shape[:2])
for kernel, scale, bandwidth in (("dot", 0.5, None), ("gaussian", None, 0.1), ("dot+gaussian", 0.7, 0.2)):
    def attend(x, q, k, v):
        q, k = (q, k) if scale else (None, None)
        neighbors = gp.Neighbors.allocate(x, 0.3, 1.0, 90)
        terms = dict(kernel=kernel, scale=scale, bandwidth=bandwidth)
        return gp.neighbor_attention(q, k, v, neighbors, **terms, return_residual=True)
    out, lse = attend(x, q, k, v)
    s = oracle.pairs(np.asarray(x), (1.0,) * 3).s
    wanted = oracle.attention(s, 0.3, *(np.asarray(one) for one in (q, k, v)), scale or 0.0, bandwidth or np.inf)
    np.testing.assert_allclose(out, wanted.out, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, wanted.lse, rtol=1e-10, atol=1e-12)
    total = jax.jit(lambda *given: sum((a * b).sum() for a, b in zip(attend(*given), (wo, wl))))
    given, e = (x, q, k, v), 1e-6
    grads = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*given)
    for n, grad in enumerate(grads):
        step = jax.random.normal(jax.random.key(20 + n), grad.shape) * (0.01 if not n else 1)
        ends = [total(*given[:n], given[n] + way * e * step, *given[n + 1:]) for way in (1, -1)]
        error = abs((grad * step).sum() - (ends[0] - ends[1]) / (2 * e))
        assert error < 1e-5 * jnp.abs(grad * step).sum() + 1e-7, (kernel, n)
print("right")
"""


def test_attention_and_its_gradients_in_float64() -> None:
    """In a process of its own: the precision is a setting of the process."""
    done = subprocess.run([sys.executable, "-c", ATTENTION], capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(targets.chip() is None or targets.chip().sm != 90, reason="needs a GPU of capability 9.0")
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("dot", "bfloat16"), ("gaussian", "float16"), ("dot+gaussian", "bfloat16")]
)
def test_kernels_as_operations(kernel: str, dtype: str) -> None:
    """Values and all gradients of the kernels, lists whole and cut, against operations in float32."""
    N, radius, keys = 900, 0.2, jax.random.split(jax.random.key(len(kernel + dtype)), 6)
    x = jax.random.uniform(keys[0], (N, 3)) ** 1.5
    sizes = zip(keys[1:4], (64, 64, 40), strict=True)
    q, k, v = (jax.random.normal(one, (N, 2, size)).astype(dtype) for one, size in sizes)
    weights = jax.random.normal(keys[4], (N, 2, 40)), jax.random.normal(keys[5], (N, 2))
    whole = gp.Neighbors.allocate(x, radius, 1.0)
    cut = gp.Neighbors.allocate(x, radius, 1.0, int(np.quantile(whole.counts, 0.9)))

    def total(given: Any, capacity: int, room: int, by_kernels: bool) -> tuple[jax.Array, Any]:
        x, q, k, v = given
        neighbors = gp.Neighbors._made(gp.Cells.build(x, radius, 1.0), capacity, room)
        neighbors = neighbors if by_kernels else replace(neighbors, groups=None)
        q, k = (None, None) if kernel == "gaussian" else (q, k)
        bandwidth = None if kernel == "dot" else 0.08
        out, lse = gp.neighbor_attention(q, k, v, neighbors, kernel=kernel, bandwidth=bandwidth, return_residual=True)
        return (weights[0] * out).sum() + (weights[1] * lse).sum(), (out, lse)

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=(1, 2, 3))
    limit = 0.02 if dtype == "bfloat16" else 0.003
    for lists in (whole, cut):
        shape = lists.capacity, whole.groups.room if whole.groups is not None else 64
        (_, found), grads = run((x, q, k, v), *shape, True)
        low = tuple(one.astype(jnp.float32) for one in (x, q, k, v))
        (_, wanted), right = run(low, *shape, False)
        for one, other in zip((*found, *grads), (*wanted, *right), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other)
            np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
            assert np.nanmax(np.abs(one - other), initial=0) <= limit * max(np.nanmax(np.abs(other), initial=0), 1e-3)


def test_attention_in_low_precision_and_without_heads() -> None:
    x = jax.random.uniform(jax.random.key(0), (300, 2))
    q, k, v = (jax.random.normal(jax.random.key(n), (300, 8)) for n in range(3))
    neighbors = gp.Neighbors.allocate(x, 0.1)
    out, lse = gp.neighbor_attention(q, k, v, neighbors, return_residual=True)
    assert out.shape == (300, 8) and lse.shape == (300,)
    low = gp.neighbor_attention(*(one.astype(jnp.bfloat16) for one in (q, k, v)), neighbors)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), out, atol=0.05)
    _, density = gp.neighbor_attention(
        None, None, v, neighbors, kernel="gaussian", bandwidth=0.05, return_residual=True
    )
    sums = gp.radial_sum(gp.Cells.build(x, 0.1), 1.0, gp.Gaussian(0.05))
    np.testing.assert_allclose(density, jnp.log(sums), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("kernel must be one of", {"kernel": "cosine"}),
        ("bandwidth is needed", {"kernel": "gaussian", "q": None, "k": None}),
        ("bandwidth is needed", {"bandwidth": 1.0}),
        ("must be None", {"kernel": "gaussian", "bandwidth": 1.0}),
        ("v must be", {"v": jnp.zeros((8, 4))}),
        ("q and k must be", {"q": jnp.zeros((9, 3))}),
        ("scale must be positive", {"scale": -1.0}),
    ],
)
def test_what_is_refused(said: str, changed: dict[str, Any]) -> None:
    one = jnp.zeros((9, 4))
    given = {"q": one, "k": one, "v": one, "neighbors": gp.Neighbors.allocate(jnp.zeros((9, 3)), 0.1), **changed}
    with pytest.raises(ValueError, match=said):
        gp.neighbor_attention(**given)
