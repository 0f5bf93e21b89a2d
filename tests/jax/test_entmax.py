"""`entmax_attention` of JAX against its definition in float64, and under transformations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.entmax import rows_jax
from gossamer.plan.problem import Unsupported
from tests.support import entmax_definition as definition

B, H, G, D, E = 2, 4, 2, 16, 8
HEADS = np.asarray([1.0, 1.2, 1.5, 2.0])
ROUNDING = {"float32": 1e-5, "bfloat16": 2.0**-7, "float64": 1e-12}


class Inputs(NamedTuple):
    q: np.ndarray  # (B, Q, H, D)
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


def inputs(Q: int, K: int, dtype: str = "float32", size: float = 1.0, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    shapes = (B, Q, H, D), (B, K, G, D), (B, K, G, E), (B, Q, H, E)
    q, k, v, dout = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    return Inputs((q * size).astype(q.dtype), k, v, dout)


class Expected(NamedTuple):
    of_rows: definition.Oracle
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def expected(x: Inputs, keep: np.ndarray | None, alpha: Any, top_k: int | None = None, scale: float = 0.25) -> Expected:
    """The definition, and its gradients by the Jacobian of entmax."""
    q, k, v, dout = (one.astype(np.float64).swapaxes(1, 2) for one in x)
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), (H,))
    found = definition.attention(q, k, v, keep, alphas, top_k, scale)
    p, group = found.p, H // G
    kh, vh = (np.repeat(one, group, 1) for one in (k, v))
    u = np.where(p > 0, np.where(p > 0, p, 1) ** (2 - alphas)[:, None, None], 0)
    dp = dout @ vh.swapaxes(2, 3)
    ds = scale * u * (dp - (u * dp).sum(-1, keepdims=True) / np.maximum(u.sum(-1, keepdims=True), 1e-300))
    by_keys = [m.swapaxes(2, 3) @ one for m, one in ((ds, q), (p, dout))]
    dk, dv = (one.reshape(B, G, group, *one.shape[2:]).sum(2) for one in by_keys)
    return Expected(found, *(one.swapaxes(1, 2) for one in (ds @ kh, dk, dv)))


def close(found: Any, right: np.ndarray, rounding: float) -> None:
    found = np.asarray(found).astype(np.float64)
    assert found.shape == right.shape
    np.testing.assert_allclose(found, right, rtol=0, atol=rounding * max(1.0, np.abs(right).max()))


def check(x: Inputs, pattern: Any, keep: np.ndarray | None, alpha: Any, top_k: int | None = None, **more: Any) -> None:
    """Results, aux and gradients, in one compiled function."""
    want, rounding = expected(x, keep, alpha, top_k), ROUNDING[str(x.q.dtype)]
    rounding *= max(1.0, float(np.abs(x.q.astype(float)).max()) / 100)  # scores are rounded as they are large

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            options = {"alpha": alpha, "top_k": top_k, "scale": 0.25, "return_aux": True, **more}
            return gsj.entmax_attention(q, k, v, pattern, **options)

        out, back, aux = jax.vjp(attend, q, k, v, has_aux=True)
        return out, aux, back(dout)

    out, aux, (dq, dk, dv) = both(*x)
    of_rows = want.of_rows
    tau, certified = (one.swapaxes(1, 2) for one in (of_rows.tau, of_rows.certified))
    assert out.dtype == x.q.dtype
    close(out, of_rows.out.swapaxes(1, 2), rounding)
    for found, right in ((dq, want.dq), (dk, want.dk), (dv, want.dv)):
        close(found, right, 4 * rounding)
    np.testing.assert_array_equal(np.isinf(aux.tau), np.isinf(tau))
    some = np.isfinite(tau)
    close(np.asarray(aux.tau)[some], tau[some], min(rounding, ROUNDING["float32"]))
    np.testing.assert_array_equal(aux.certified, certified)
    # A weight near 0 may be rounded to it.
    least, most = (np.count_nonzero(of_rows.p > limit, -1).swapaxes(1, 2) for limit in (1e-6, 0))
    assert (aux.support >= least).all() and (aux.support <= most + 1).all()


def grid(pattern: gs.Pattern, Q: int, K: int) -> np.ndarray:
    keep = pattern.materialize(Q, K)
    return keep if keep.ndim == 4 else keep[None, None]


PATTERNS = {
    "every": gs.Dense(),
    "causal": gs.Causal(),
    "window": gs.SlidingWindow(20),
    "both sides": gs.Local(9),
    "by head": gs.PerHead([gs.Causal(), gs.SlidingWindow(5), gs.Dense(), gs.Local(30)]),
    "by batch element": gs.PerBatch([gs.Causal(), gs.SlidingWindow(8)]),
}


@pytest.mark.parametrize(
    ("name", "alpha"),
    [("every", 1.5), ("every", 1.25), ("causal", 1.0), ("causal", HEADS), ("window", 1.5), ("window", 2.0)],
    ids=str,
)
def test_the_definition(name: str, alpha: Any) -> None:
    check(inputs(70, 150), PATTERNS[name], grid(PATTERNS[name], 70, 150), alpha)


@pytest.mark.parametrize("name", ["both sides", "by head", "by batch element"])
def test_other_patterns(name: str) -> None:
    check(inputs(70, 90, seed=1), PATTERNS[name], grid(PATTERNS[name], 70, 90), 1.5, top_k=6)


@pytest.mark.parametrize(
    ("alpha", "top_k", "dtype"),
    [(1.0, 3, "float32"), (1.5, 1, "float32"), (1.5, 5, "bfloat16"), (HEADS, 7, "float32"), (1.5, 1000, "bfloat16")],
    ids=str,
)
def test_the_largest_scores(alpha: Any, top_k: int, dtype: str) -> None:
    check(inputs(66, 80, dtype, size=2.0), gs.Causal(), grid(gs.Causal(), 66, 80), alpha, top_k)


def test_float64() -> None:
    with jax.enable_x64(True):
        for alpha in (1.5, 1.3):
            check(inputs(40, 300, "float64"), None, None, alpha)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_large_scores(alpha: float) -> None:
    """Of which one key nearly always has all weight."""
    check(inputs(40, 300, size=300.0), gs.Causal(), grid(gs.Causal(), 40, 300), alpha)


def test_rows_that_see_nothing_and_rows_of_one_key() -> None:
    rng = np.random.default_rng(3)
    mask = rng.random((B, 1, 70, 90)) < 0.1
    mask[:, :, ::5], mask[:, :, 1] = False, np.arange(90) == 7
    x = inputs(70, 90)
    x.k[:, 88:], x.v[:, 88:] = np.nan, np.inf  # which nothing sees
    mask[..., 88:] = False
    clean = x._replace(k=np.nan_to_num(x.k), v=np.nan_to_num(x.v, posinf=0))
    want = expected(clean, mask, 1.5)
    attend = lambda q, k, v: gsj.entmax_attention(q, k, v, mask, scale=0.25, return_aux=True)  # noqa: E731
    out, back, aux = jax.vjp(attend, x.q, x.k, x.v, has_aux=True)
    close(out, want.of_rows.out.swapaxes(1, 2), 1e-5)
    for found, right in zip(back(jnp.asarray(x.dout)), (want.dq, want.dk, want.dv), strict=True):
        close(found, right, 4e-5)
    assert (out[:, ::5] == 0).all() and np.isinf(aux.tau[:, ::5]).all() and (aux.support[:, ::5] == 0).all()
    assert (aux.support[:, 1] == 1).all() and aux.certified.all()


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_ties(alpha: float) -> None:
    """Of equal scores all have the same weight; with `top_k` the lowest keys are kept."""
    x = inputs(50, 130)
    x.k[:] = x.k[:, :1]
    out, aux = gsj.entmax_attention(*x[:3], alpha=alpha, return_aux=True)
    close(out, np.repeat(x.v.astype(float).mean(1, keepdims=True), 2, 2).repeat(50, 1), 1e-5)
    assert (aux.support == 130).all()
    out, aux = gsj.entmax_attention(*x[:3], alpha=alpha, top_k=3, return_aux=True)
    close(out, np.repeat(x.v[:, :3].astype(float).mean(1, keepdims=True), 2, 2).repeat(50, 1), 1e-5)
    assert (aux.support == 3).all() and not aux.certified.any()
    rng = np.random.default_rng(5)
    whole = Inputs(*(rng.integers(-2, 3, one.shape).astype(np.float32) for one in x))
    check(whole, gs.Causal(), grid(gs.Causal(), 50, 130), alpha, 5)


def test_scores_that_are_no_numbers() -> None:
    x = inputs(20, 30)
    x.k[0, 4, 0, 0], x.k[1, 5, 1, 0] = np.nan, np.inf
    x.q[1, :, :, 0] = 1
    for alpha in (1.0, 1.3, 1.5, 2.0):
        for top_k in (None, 4):
            out = np.asarray(gsj.entmax_attention(*x[:3], alpha=alpha, top_k=top_k))
            assert np.isnan(out[0, :, :2]).all() and np.isnan(out[1, :, 2:]).all()
            assert np.isfinite(out[0, :, 2:]).all() and np.isfinite(out[1, :, :2]).all()
    x = inputs(20, 30)
    x.k[0, 4, 0, 0], x.q[0, :, :2, 0] = -np.inf, 1  # a score of -inf is as a key that is not seen
    keep = np.ones((B, H, 20, 30), bool)
    keep[0, :2, :, 4] = False
    clean = x._replace(k=np.nan_to_num(x.k, neginf=0))
    out = gsj.entmax_attention(*x[:3], scale=0.25)
    close(out, expected(clean, keep, 1.5).of_rows.out.swapaxes(1, 2), 1e-5)


def test_long_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a step computes a few queries, as few as make its scores bounded."""
    x, long = inputs(70, 1500), gs.SlidingWindow(600)
    keep = grid(long, 70, 1500)
    monkeypatch.setattr(rows_jax, "MOST", 2**14)
    from gossamer.entmax import in_jax

    in_jax._operator.cache_clear()
    check(x, long, keep, 1.5)
    check(x, long, keep, 1.5, 9)
    in_jax._operator.cache_clear()


def test_memory_is_linear_in_keys() -> None:
    """Of a compiled function with its gradient: under a tenth of what all scores take."""
    N = 8192
    q = jax.ShapeDtypeStruct((1, N, 2, 16), jnp.float32)
    loss = lambda q, k, v: gsj.entmax_attention(q, k, v, causal=True).sum()  # noqa: E731
    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * N * N * 4 / 10


def test_alpha_has_a_gradient() -> None:
    x = inputs(60, 90)
    q, k, v, dout = (one.astype(np.float64).swapaxes(1, 2) for one in x)

    def loss(alphas: np.ndarray) -> float:
        keep = grid(gs.Causal(), 60, 90)
        return float((definition.attention(q, k, v, keep, alphas, None, 0.25).out * dout).sum())

    @jax.jit
    def slopes(alpha: Any) -> Any:
        of = lambda alpha: (gsj.entmax_attention(*x[:3], gs.Causal(), alpha=alpha, scale=0.25) * x.dout).sum()  # noqa: E731
        return jax.grad(of)(alpha)

    alphas, e = np.asarray([1.1, 1.3, 1.5, 1.9]), 1e-5
    steps = np.eye(H) * e
    right = np.asarray([(loss(alphas + step) - loss(alphas - step)) / (2 * e) for step in steps])
    np.testing.assert_allclose(slopes(jnp.asarray(alphas, jnp.float32)), right, rtol=2e-3, atol=1e-3)
    # At 1, from both sides in the formula: against numbers near it.
    near = np.asarray(slopes(jnp.full(H, 1.001, jnp.float32)))
    np.testing.assert_allclose(slopes(jnp.ones(H)), near, rtol=0.02, atol=0.02)
    one = jax.grad(lambda a: (gsj.entmax_attention(*x[:3], gs.Causal(), alpha=a, scale=0.25) * x.dout).sum())
    np.testing.assert_allclose(one(jnp.float32(1.3)), slopes(jnp.full(H, 1.3)).sum(), rtol=1e-4)


def test_positions() -> None:
    x, rng = inputs(50, 60), np.random.default_rng(7)
    of_q, of_k = rng.integers(-5, 40, (B, H, 50)), rng.integers(0, 40, (B, H, 60))
    for q_positions, k_positions in ((of_q, of_k), (of_q[:, :1], of_k[:, :G]), (of_q[0, 0], None), (None, of_k[0, 0])):
        mine = np.arange(10, 60) if q_positions is None else q_positions
        theirs = np.arange(60) if k_positions is None else k_positions
        if theirs.ndim > 2 and theirs.shape[1] == G:
            theirs = theirs.repeat(H // G, 1)
        keep = theirs[..., None, :] <= mine[..., None]
        positions = {"q_positions": q_positions, "k_positions": k_positions, "causal": True}
        check(x, gs.SlidingWindow(25), keep & grid(gs.SlidingWindow(25), 50, 60), 1.5, **positions)


def test_causal_meets_every_form_of_a_pattern() -> None:
    x, causal = inputs(70, 90), grid(gs.Causal(), 70, 90)
    mask = np.random.default_rng(2).random((B, H, 70, 90)) < 0.4
    plan = gsj.prepare(gs.Local(30), x.q, x.k)
    for pattern, keep in ((None, causal), (mask, mask & causal), (plan, grid(gs.Local(30), 70, 90) & causal)):
        out = gsj.entmax_attention(*x[:3], pattern, causal=True, scale=0.25)
        close(out, expected(x, keep, 1.5).of_rows.out.swapaxes(1, 2), 1e-5)


def test_forms_and_nothing() -> None:
    x = inputs(20, 30)
    want, aux = gsj.entmax_attention(*x[:3], return_aux=True)
    out, of_one = gsj.entmax_attention(*(one[0] for one in x[:3]), return_aux=True)
    close(out, np.asarray(want[0]), 1e-6)
    assert out.shape == (20, H, E) and of_one.tau.shape == (20, H)
    out, of_one = gsj.entmax_attention(x.q[0, :, 0], x.k[0, :, 0], x.v[0, :, 0], return_aux=True)
    close(out, np.asarray(want[0, :, 0]), 1e-6)
    np.testing.assert_array_equal(of_one.support, aux.support[0, :, 0])
    for q, k in ((x.q[:, :0], x.k), (x.q, x.k[:, :0]), (x.q[:0], x.k[:0])):
        v = np.zeros((*k.shape[:3], E), np.float32)
        loss = lambda q, k, v: gsj.entmax_attention(q, k, v, gs.Causal(), top_k=2).sum()  # noqa: E731
        out, aux = gsj.entmax_attention(q, k, v, return_aux=True)
        assert not out.any() and np.isinf(aux.tau).all() and not aux.support.any() and aux.certified.all()
        assert all(not one.any() for one in jax.grad(loss, (0, 1, 2))(q, k, v))


def test_transformations() -> None:
    """jit, vmap and grad in every order, checkpoint, scan, and four devices."""
    x = inputs(40, 50)
    q, k, v = (jnp.asarray(one) for one in x[:3])

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (gsj.entmax_attention(q, k, v, gs.Causal(), alpha=jnp.asarray([1.2, 1.5, 1.5, 2.0]), top_k=9) ** 2).sum()

    want = jax.grad(loss, (0, 1, 2))(q, k, v)
    alone = jax.grad(lambda q, k, v: loss(q[None], k[None], v[None]), (0, 1, 2))
    for found in (
        jax.jit(jax.vmap(alone))(q, k, v),
        jax.vmap(jax.jit(alone))(q, k, v),
        jax.grad(lambda q, k, v: jax.vmap(lambda q, k, v: loss(q[None], k[None], v[None]))(q, k, v).sum(), (0, 1, 2))(
            q, k, v
        ),
        jax.grad(jax.checkpoint(loss), (0, 1, 2))(q, k, v),
        jax.lax.scan(lambda none, one: (none, alone(*one)), None, (q, k, v))[1],
    ):
        for one, right in zip(found, want, strict=True):
            close(one, np.asarray(right), 1e-5)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("manual", [False, True])
def test_four_devices(manual: bool) -> None:
    x = inputs(40, 50)
    twice = [jnp.concatenate([one, one[::-1]]) for one in x[:3]]
    grad = jax.grad(lambda *a: (gsj.entmax_attention(*a, gs.Causal(), alpha=1.3) ** 2).sum(), (0, 1, 2))
    want = grad(*twice)
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")
    split = [jax.device_put(one, jax.sharding.NamedSharding(mesh, spec)) for one in twice]
    run = jax.shard_map(grad, mesh=mesh, in_specs=spec, out_specs=spec) if manual else grad
    for one, right in zip(jax.jit(run)(*split), want, strict=True):
        close(one, np.asarray(right), 1e-5)


def test_a_prepared_pattern() -> None:
    """As an argument of a jitted function; one that gathers is refused."""
    x = inputs(300, 300)
    plan = gsj.prepare(gs.SlidingWindow(40), x.q, x.k)
    step = jax.jit(lambda plan, q, k, v: gsj.entmax_attention(q, k, v, plan))
    close(step(plan, *x[:3]), np.asarray(gsj.entmax_attention(*x[:3], gs.SlidingWindow(40))), 1e-6)
    edges = np.stack([np.arange(300), np.arange(300)[::-1]])
    if jax.default_backend() != "cpu":  # where lax gathers nothing
        return
    gathered = gsj.prepare(gs.CSR.from_edge_index(edges, (300, 300)), x.q, x.k)
    assert gathered.row_extent.gathers
    with pytest.raises(Unsupported, match="pattern must be a Prepared of tiles"):
        gsj.entmax_attention(*x[:3], gathered)
    close(gsj.entmax_attention(*x[:3], gs.CSR.from_edge_index(edges, (300, 300))), np.repeat(x.v[:, ::-1], 2, 2), 1e-6)


def test_what_is_wrong() -> None:
    x = inputs(20, 30)
    for options, text in (
        ({"alpha": 2.5}, r"alpha must be a number in \[1, 2\] or an array \(H,\); got 2.5"),
        ({"alpha": True}, "alpha must be a number"),
        ({"alpha": jnp.ones(3)}, r"alpha must be a number, or an array of floating point of shape \(N,\) = \(4,\)"),
        ({"alpha": jnp.asarray([1.0, 2.0, 2.25, 1.0])}, r"alpha must lie in \[1, 2\] in every head; .* holds \[2.25\]"),
        ({"top_k": 0}, r"top_k must be an integer in \[1, 2147483647\] or None, got 0"),
        ({"causal": 1}, "causal must be True or False"),
        ({"return_aux": 1}, "return_aux must be True or False"),
        ({"q_positions": [1]}, "q_positions must be an array of integers or None"),
        ({"q_positions": np.ones(20)}, "q_positions must be integers"),
        ({"k_positions": np.ones((B, 3, 30), int)}, r"k_positions must broadcast to \(2, 4, 30\) or \(2, 2, 30\)"),
        ({"k_positions": np.full(30, 2**40)}, "k_positions must be integers that int32 holds"),
        ({"scale": "1"}, "scale must be a number"),
    ):
        with pytest.raises(ValueError, match=text):
            gsj.entmax_attention(*x[:3], **options)
    loss = lambda q: gsj.entmax_attention(q, *x[1:3]).sum()  # noqa: E731
    for wrong in (jax.hessian(loss), lambda q: jax.jvp(loss, (q,), (q,)), jax.grad(lambda q: jax.grad(loss)(q).sum())):
        with pytest.raises(TypeError, match="entmax_attention has no forward mode and no second derivative"):
            wrong(jnp.asarray(x.q))
    traced = jax.jit(lambda alpha: gsj.entmax_attention(*x[:3], alpha=alpha))(jnp.asarray([1.0, 1.5, 2.0, 2.5]))
    assert np.isfinite(traced[:, :, :3]).all() and np.isnan(traced[:, :, 3]).all()
