"""Every transformation against `jax.nn.dot_product_attention` with the dense mask, under the same transformation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gossamer as gs
import gossamer.jax as gsj
from tests.support.thorough import more

PATTERN = gs.SlidingWindow(40) | gs.BigBird(16)
B, N, H, G, D = 4, 150, 4, 2, 16
MASK = PATTERN.materialize(N, N)
Function = Callable[..., jax.Array]


def turns(values: list[Any]) -> Any:
    """Values, every other one by tiles and by gathered columns; the other way each is for thorough runs."""
    first = [(at % 2, value) for at, value in enumerate(values)]
    return [*first, *more(*((1 - walk, value) for walk, value in first))]


@pytest.fixture(autouse=True, params=[0, 1])
def walked(request: pytest.FixtureRequest, together: Callable[[int | None], None]) -> None:
    """By tiles, and by columns that are gathered for each row."""
    together(request.param)


def ours(q: Any, k: Any, v: Any) -> jax.Array:
    return gsj.attention(q, k, v, PATTERN)


def theirs(q: Any, k: Any, v: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=MASK[None, None], implementation="xla")


def loss(f: Function) -> Function:
    return lambda *x: (f(*x).astype(jnp.float32) ** 2).sum()


def tensors(*lead: int, batch: int = B, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = ((*lead, batch, N, heads, D) for heads in (H, G, G))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def same(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        assert float(jnp.abs(x - y).max()) <= tolerance * max(1.0, float(jnp.abs(y).max()))


def both(transform: Callable[[Function], Function], *x: Any, tolerance: float = 2e-5) -> None:
    same(transform(ours)(*x), transform(theirs)(*x), tolerance)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_values_and_gradients(jit: Any) -> None:
    both(jit, *tensors())
    both(lambda f: jit(jax.value_and_grad(loss(f), (0, 1, 2))), *tensors())


@pytest.mark.parametrize(
    ("walked", "axes"),
    turns([(0, 0, 0), (0, None, None), (None, 1, None), (None, None, 3), (2, 1, 0)]), indirect=["walked"], ids=str,
)  # fmt: skip
def test_vmap(axes: tuple[int | None, ...]) -> None:
    every = tensors(3)
    given = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(every, axes, strict=True)]
    both(lambda f: jax.vmap(f, axes), *given)
    both(lambda f: jax.vmap(jax.grad(loss(f), (0, 1, 2)), axes), *given)
    both(lambda f: jax.grad(lambda *x: (jax.vmap(f, axes, 1)(*x) ** 2).sum(), (0, 1, 2)), *given)


def test_vmap_of_vmap_and_of_what_has_no_batch() -> None:
    every = tensors(2, 3, batch=1)
    both(lambda f: jax.vmap(jax.vmap(f)), *every)
    q, k, v = (x[0, 0, 0] for x in every)
    both(lambda f: jax.vmap(lambda q: f(q[:, None], k[:, :1], v[:, :1]), 1, 1), q)


@pytest.mark.parametrize("walked", [1, *more(0)], indirect=True)
def test_vmap_of_score_terms() -> None:
    """Lengths and slopes (B, H) join the batch; sinks and slopes (H,) are computed one by one, and Plans."""
    q, k, v = tensors(3)
    lengths, sinks, one = jnp.asarray([[9, 150, 0, 70]] * 3), jnp.ones((3, H)), jnp.full((3, H), 0.1)
    each = jnp.arange(3 * 4 * H).reshape(3, 4, H) * 0.01

    def f(q: Any, lengths: Any, sinks: Any, slopes: Any) -> jax.Array:
        return gsj.attention(
            q, k[0], v[0], PATTERN, key_lengths=lengths, sink_logits=sinks, alibi_slopes=slopes,
            alibi_distance="absolute",
        )  # fmt: skip

    every_axes = ((0, 0, None, None), (0, None, 0, None), (0, 0, 0, 0), (None, 0, None, 0), (0, None, None, 0))
    for axes, slopes in [(axes, slopes) for axes in every_axes for slopes in (one, each)]:
        given = [x if axis == 0 else x[0] for x, axis in zip((q, lengths, sinks, slopes), axes, strict=True)]
        every = [x if axis == 0 else [x[0]] * 3 for x, axis in zip((q, lengths, sinks, slopes), axes, strict=True)]
        want = jnp.stack([f(*each) for each in zip(*every, strict=True)])
        same(jax.vmap(f, axes)(*given), want)
    plans = [gsj.prepare(gs.SlidingWindow(w), q[0], k[0]) for w in (3, 4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *plans)
    want = jnp.stack([gsj.attention(q[0], k[0], v[0], plan) for plan in plans])
    same(jax.vmap(lambda plan: gsj.attention(q[0], k[0], v[0], plan))(stacked), want)


def test_jacrev_and_checkpoint_in_scan() -> None:
    q, k, v = tensors(batch=1)
    both(lambda f: jax.jacrev(lambda q: f(q, k, v)[0, :3, 0, :2]), q)

    def scanned(f: Function) -> Function:
        def layer(x: Any, _: Any) -> Any:
            return jax.checkpoint(lambda x: x + f(x, k, v))(x), None

        return jax.jit(jax.grad(lambda q: (jax.lax.scan(layer, q, None, length=3)[0] ** 2).sum()))

    both(scanned, q, tolerance=1e-4)


@pytest.mark.parametrize("walked", [0, *more(1)], indirect=True)
def test_forward_mode() -> None:
    """Refused by name where the gradient is a rule; plain lax has it, of any order."""
    x = tensors(batch=1)
    with pytest.raises(TypeError, match='implementation="blocked"'):
        jax.jvp(ours, x, x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda *x: jax.jvp(ours, x, x))(*x)
    once = jax.grad(loss(ours))
    for again in (jax.grad(lambda q: once(q, *x[1:]).sum()), jax.hessian(lambda q: loss(ours)(q, *x[1:]))):
        for form in (again, jax.jit(again)):
            with pytest.raises(TypeError, match=r'no second derivative .* implementation="blocked"'):
                form(x[0])

    def plain(q: Any, k: Any, v: Any) -> jax.Array:
        return gsj.attention(q, k, v, PATTERN, implementation="blocked")

    same(jax.jvp(plain, x, x), jax.jvp(theirs, x, x))
    q, k, v = x

    def along(f: Function) -> Function:
        return lambda t: loss(f)(q * t, k, v)

    same(jax.hessian(along(plain))(1.0), jax.hessian(along(theirs))(1.0), 1e-4)
    same(jax.jacfwd(along(plain))(1.0), jax.jacfwd(along(theirs))(1.0), 1e-4)
    same(jax.vmap(jax.grad(loss(plain)))(*tensors(2)), jax.vmap(jax.grad(loss(theirs)))(*tensors(2)))


def test_export() -> None:
    x = tensors()
    plan = gsj.prepare(PATTERN, *x[:2])

    def f(arrays: Any, q: Any, k: Any, v: Any) -> jax.Array:
        return gsj.attention(q, k, v, jax.tree.unflatten(jax.tree.structure(plan), arrays))

    for given, function in (((), ours), ((jax.tree.leaves(plan),), f)):
        exported = export.export(jax.jit(function))(*given, *x)
        again = export.deserialize(exported.serialize())
        same(again.call(*given, *x), theirs(*x))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


def test_sharded_jit_gathers_nothing() -> None:
    """Batch elements and heads stay on their devices, in the gradient too."""
    x, spec = tensors(), P("x", None, "y", None)
    sharded = [jax.device_put(t, NamedSharding(mesh_of(AxisType.Auto), spec)) for t in x]
    step = jax.jit(jax.value_and_grad(loss(ours), (0, 1, 2)))
    text = step.lower(*sharded).compile().as_text()
    assert text is not None
    assert not [word for word in ("all-gather", "all-to-all", "collective-permute") if word in text]
    out, gradients = jax.jit(ours)(*sharded), step(*sharded)
    assert out.sharding.spec == spec
    assert all(dx.sharding.spec == spec for dx in jax.tree.leaves(gradients[1]))
    same((out, gradients), (theirs(*x), jax.value_and_grad(loss(theirs), (0, 1, 2))(*x)))


@pytest.mark.parametrize(
    ("walked", "spec"), [(0, P("x")), (1, P(None, "x")), *more(*(
        (walk, spec) for walk in (0, 1) for spec in (P(None, None, "y"), P(("x", "y")), P())
    ))], indirect=["walked"], ids=str,
)  # fmt: skip
def test_sharded_any_way(spec: P) -> None:
    """Right however tensors lie, score terms and a Prepared beside them, with lists of each head too."""
    q, k, v = tensors()
    mesh = mesh_of(AxisType.Auto)
    pattern = gs.PerHead([gs.SlidingWindow(n) for n in (3, 9, 27, 81)])
    lengths, sinks = jnp.asarray([9, 150, 0, 70]), jnp.ones(H)
    for what in (PATTERN, pattern):
        plan = gsj.prepare(what, q, k)

        def f(q: Any, k: Any, v: Any, plan: Any = plan) -> Any:
            return gsj.attention(q, k, v, plan, key_lengths=lengths, sink_logits=sinks)

        step = jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
        same(step(*placed), jax.value_and_grad(loss(f), (0, 1, 2))(q, k, v))


@pytest.mark.parametrize(("walked", "implementation"), turns([None, "blocked"]), indirect=["walked"])
def test_shard_map(implementation: str | None) -> None:
    """With check_vma: over batch and heads, and with keys that are the same everywhere, whose gradients are summed."""
    mesh, x = mesh_of(AxisType.Auto), tensors()

    def f(q: Any, k: Any, v: Any) -> jax.Array:
        return gsj.attention(q, k, v, PATTERN, implementation=implementation)

    by_all = jax.shard_map(f, mesh=mesh, in_specs=P("x", None, "y"), out_specs=P("x", None, "y"), check_vma=True)
    same(jax.jit(by_all)(*x), theirs(*x))
    same(jax.grad(loss(by_all), (0, 1, 2))(*x), jax.grad(loss(theirs), (0, 1, 2))(*x))
    q, k, v = x
    one = (q, k[:1], v[:1])

    def each(f: Function, q: Any, k: Any, v: Any) -> jax.Array:
        return jnp.concatenate([f(q[at : at + 1], k, v) for at in range(len(q))])

    shared = jax.shard_map(partial(each, f), mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=True)
    same(shared(*one), each(theirs, *one))
    same(jax.grad(loss(shared), (0, 1, 2))(*one), jax.grad(loss(partial(each, theirs)), (0, 1, 2))(*one))


@pytest.mark.parametrize("walked", [0, *more(1)], indirect=True)
def test_a_row_of_no_tile_and_nothing_at_all_in_shard_map() -> None:
    mesh, (q, _, _) = mesh_of(AxisType.Auto), tensors()
    for pattern in (~gs.Dense(), gs.BlockMask(np.eye(3, dtype=bool)[:, ::-1] & (np.arange(3) > 0), 64)):

        def f(q: Any, pattern: Any = pattern) -> jax.Array:
            return gsj.attention(q, q, q, pattern)

        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True)
        same(jax.grad(loss(mapped))(q), jax.grad(loss(f))(q))


def test_at_compile_time() -> None:
    """`jax.ensure_compile_time_eval` computes constants at once, in the program that JAX partitions too."""
    x = tensors()

    def constant() -> Any:
        with jax.ensure_compile_time_eval():
            return ours(*x), jax.grad(loss(ours), (0, 1, 2))(*x)

    want = theirs(*x), jax.grad(loss(theirs), (0, 1, 2))(*x)
    same(constant(), want)
    same(jax.jit(lambda y: jax.tree.map(lambda one: one * y, constant()))(1.0), want)


@pytest.mark.parametrize(("walked", "spec"), turns([P("x"), P(None, None, "x")]), indirect=["walked"], ids=str)
def test_explicit_axes(spec: P) -> None:
    """Batch elements or heads on several devices: forward and gradient, results where the query is."""
    mesh, rng = mesh_of(AxisType.Explicit), np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((4, 70, heads, 16)), jnp.float32) for heads in (8, 4, 4))
    sinks = jnp.asarray(rng.standard_normal(8), jnp.float32)
    plan = gsj.prepare(gs.SlidingWindow(20), q, k)

    def attend(q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> Any:
        return gsj.attention(q, k, v, plan, sink_logits=sinks, key_lengths=[70, 50, 0, 3], return_residual=True)

    def both(q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> Any:
        total = lambda *x: sum((one**2).sum() for one in attend(*x, plan))  # noqa: E731
        return attend(q, k, v, sinks, plan), jax.grad(total, (0, 1, 2, 3))(q, k, v, sinks)

    for pattern in (plan, gs.Causal()):
        run = (lambda *x, pattern=pattern: both(*x, pattern)) if pattern is not plan else both
        more = (plan,) if pattern is plan else ()
        want = run(q, k, v, sinks, *more)
        with jax.set_mesh(mesh):
            there = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
            found = jax.jit(run)(*there, sinks, *more)
            (out, lse), (dq, dk, dv, _) = found
            same(jax.tree.leaves(found), jax.tree.leaves(want))
            at_once = attend(*there, sinks, pattern)
            same(at_once, (out, lse))
            for x in (out, lse, dq, dk, dv, *at_once):
                assert tuple(x.sharding.spec)[: len(spec)] == tuple(spec)


def test_explicit_axes_that_are_refused() -> None:
    mesh = mesh_of(AxisType.Explicit)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    long = jnp.zeros((4, 64, 4, 16))
    with jax.set_mesh(mesh):
        with pytest.raises(
            ValueError, match="query must be sharded over explicit mesh axes by batch elements and heads"
        ):
            gsj.attention(place(long, None, "x"), long, long)
        with pytest.raises(ValueError, match="key must be sharded over explicit mesh axes as query is, or not at all"):
            jax.jit(gsj.attention)(place(long, "x"), place(long, None, None, "x"), long)
        with pytest.raises(ValueError, match=r"has gradients and batched axes inside of jax\.jit alone"):
            jax.grad(lambda q: gsj.attention(q, long, long).sum())(place(long, "x"))
        with pytest.raises(ValueError, match=r"this function has no rule; it is over x: call it inside jax\.shard_map"):
            gsj.entmax_attention(place(long, "x"), long, long)
