"""Calls by kernels, whose launches XLA runs: on a stand-in of numpy for the kernels, which reads the same lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gossamer as gs
import gossamer.jax as gsj
from gossamer.jax import prepared as plans
from gossamer.jax.api import asked_of
from gossamer.jax.arguments import AttentionOptions, arguments_of
from gossamer.memo import forget_all
from gossamer.plan import partition
from tests.jax import stand_in
from tests.jax.calls import scattered

pytest.importorskip("jax_tvm_ffi")

P = PartitionSpec
# 64 rows keep the same keys, which are not near each other.
TOGETHER = gs.Predicate(lambda i, j: (37 * (i // 64) + j * j) % 11 < 2)
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
    "gathered": (TOGETHER, (2, 320, 320, 2, 1, 64, 64), {}),
    "gathered, terms": (TOGETHER, (1, 320, 320, 2, 2, 40, 64), {"key_lengths": [200], "softcap": 4.0}),
    "single rows": (scattered(200, 230, 3), (2, 200, 230, 4, 2, 64, 64), {}),
    "single rows, cut": (scattered(1000, 1500, 2, 1), (1, 1000, 1500, 2, 1, 64, 40), {"sink_logits": jnp.arange(2.0)}),
    "single rows, terms": (scattered(120, 120, 4), (2, 120, 120, 4, 2, 40, 128),
                           {"softcap": 5.0, "key_lengths": [100, 30], "sink_logits": jnp.arange(4.0), "scale": -0.2}),
    "single rows of heads": (gs.PerHead([scattered(150, 150, 2), scattered(150, 150, 3)]),
                             (2, 150, 150, 2, 1, 128, 64), {}),
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
    if "single rows" in name:
        assert calls.count("rows") == 3 and ("merge" in calls) == ("sum_parts" in calls) == ("cut" in name)
    elif "gathered" in name:
        assert calls == ["gather", "preprocess", "gather", "gather"]
    else:
        assert "forward" in calls and {"query_gradient", "kept", "postprocess"} & set(calls)
    close(found, by_lax(pattern, arrays, **terms))


@pytest.mark.parametrize(
    ("name", "pattern", "sizes"),
    [
        ("dilated", gs.Dilated(20, 0, dilation=3), (2, 131, 131, 2, 1, 64, 64)),
        ("merged", gs.LongNet((32, 64), (1, 2), heads=2), (1, 140, 140, 2, 2, 64, 64)),
        ("rows that keep nothing", gs.DilatedSegment(40, dilation=4), (1, 130, 130, 2, 2, 64, 64)),
    ],
)
def test_parts(
    name: str, pattern: gs.Pattern, sizes: tuple[int, ...], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several launches write one result through views, whatever that costs."""
    cheaper = partition._cheaper

    def take(found: Any, pattern: Any, p: Any, size: Any, cost: Any) -> Any:
        cost.call = lambda *a, **k: math.inf
        return cheaper(found, pattern, p, size, cost)

    forget_all()
    monkeypatch.setattr(partition, "_cheaper", take)
    monkeypatch.setattr(partition, "_classes_cost", lambda *a: 0.0)
    arrays = inputs(sizes)
    found = jax.block_until_ready(jax.jit(both(pattern, "hopper"))(*arrays))
    assert calls.count("preprocess") > 1 or calls.count("forward") > 1 or name == "rows that keep nothing"
    forget_all()
    close(found, by_lax(pattern, arrays), 1e-2)


WINDOW, SIZES = gs.SlidingWindow(60), (2, 130, 130, 4, 2, 64, 64)


def attend(q: Any, k: Any, v: Any) -> Any:
    return gsj.attention(q, k, v, WINDOW, return_residual=True, implementation="hopper")


def plain(q: Any, k: Any, v: Any) -> Any:
    return gsj.attention(*(x.astype(jnp.float32) for x in (q, k, v)), WINDOW, return_residual=True,
                         implementation="blocked")  # fmt: skip


def loss(f: Callable[..., Any], *arrays: Any) -> Any:
    out, lse = f(*arrays)
    return (jnp.sin(out.astype(jnp.float32)).sum() + jnp.cos(lse).sum()).astype(jnp.float32)


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(partial(loss, f), (0, 1, 2))


def test_batched_axes(calls: list[str]) -> None:
    """vmap of all or of some arrays, of any axis and twice; of the gradient, and the gradient of it."""
    arrays = inputs((6, *SIZES[1:]))[:3]
    split = [x.reshape(3, 2, *x.shape[1:]) for x in arrays]
    q, k, v = split
    close(jax.vmap(attend)(*split), jax.vmap(plain)(*split))
    close(jax.vmap(attend, (0, None, None))(q, k[0], v[0]), jax.vmap(plain, (0, None, None))(q, k[0], v[0]))
    moved = jnp.moveaxis(q, 0, 2)
    close(jax.vmap(attend, (2, 0, 0))(moved, k, v), jax.vmap(plain, (2, 0, 0))(moved, k, v))
    close(jax.jit(jax.vmap(gradient(attend)))(*split), jax.jit(jax.vmap(gradient(plain)))(*split))
    summed = [lambda *x, f=f: loss(jax.vmap(f), *x) for f in (attend, plain)]
    close(*(jax.jit(jax.grad(f, (0, 1, 2)))(*split) for f in summed))
    assert calls.count("forward") == 5, "one launch for all copies"


def test_layers(calls: list[str]) -> None:
    """A scan over layers that are computed again in the backward."""
    q, *_ = inputs((1, 130, 130, 2, 2, 64, 64))

    def model(f: Callable[..., Any], x: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            out, _ = f(x, x, x)
            return (x + out).astype(x.dtype), None

        return jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0].astype(jnp.float32).sum()

    close(jax.jit(jax.grad(partial(model, attend)))(q), jax.jit(jax.grad(partial(model, plain)))(q), 2e-2)
    assert calls.count("forward") == 6 - 2 and calls.count("preprocess") == 2


def test_jacrev_and_forward_mode(calls: list[str]) -> None:
    """Rows of a Jacobian are copies of one backward; forward mode is refused by name."""
    q, k, v = inputs((1, 130, 130, 2, 1, 64, 64))[:3]

    def some(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jacrev(lambda q: f(q, k, v)[0][0, :2, 0, :2].astype(jnp.float32))

    close(some(attend)(q), some(plain)(q))
    assert calls.count("forward") == 1 and calls.count("preprocess") == 1
    with pytest.raises(TypeError, match='implementation="blocked"'):
        jax.jvp(attend, (q, k, v), (q, k, v))


def test_explicit_axes(calls: list[str]) -> None:
    """Of batch elements: kernels compute each device's, as of a sharded `jit`."""
    explicit = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    arrays = inputs((4, *SIZES[1:]))[:3]
    want = plain(*arrays)
    with jax.set_mesh(explicit):
        given = [jax.device_put(x, NamedSharding(explicit, P("x"))) for x in arrays]
        close([np.asarray(x) for x in jax.jit(attend)(*given)], want)
    assert set(calls) == {"forward"}


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def test_sharded_jit_computes_where_arrays_are(calls: list[str]) -> None:
    arrays = inputs(SIZES)[:3]
    where = NamedSharding(mesh(), P("data", None, "model"))
    there = [jax.device_put(x, where) for x in arrays]
    compiled = jax.jit(gradient(attend)).lower(*there).compile()
    assert "all-gather" not in compiled.as_text()
    found = compiled(*there)
    close(found, jax.jit(gradient(plain))(*arrays))
    assert all(x.sharding.is_equivalent_to(where, 4) for x in found)
    assert calls.count("forward") == 4, "one on each device"


def test_shard_map(calls: list[str]) -> None:
    """With types of what varies, and an operand that is the same on all devices."""
    q, k, v = inputs(SIZES)[:3]
    k, v, two = k[:1], v[:1], Mesh(np.asarray(jax.devices()[:2]), ("data",))

    def local(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any) -> Any:
            return jax.lax.psum(loss(f, q, k, v), "data")

        return jax.jit(
            jax.grad(
                jax.shard_map(run, mesh=two, in_specs=(P("data"), P(), P()), out_specs=P(), check_vma=True),
                (0, 1, 2),
            )
        )  # fmt: skip

    close(local(attend)(q, k, v), local(plain)(q, k, v))


def test_a_plan_is_an_argument(calls: list[str]) -> None:
    """Its lists are no constants of the program; other batch elements make their own."""
    arrays = inputs(SIZES)
    q, k, v, _ = arrays
    plan = gsj.prepare(WINDOW, q, k)
    assert plan.recipe is not None and plan.lists["backward"]
    run = jax.jit(lambda plan, *arrays: both(plan, "hopper")(*arrays))
    close(run(plan, *arrays), by_lax(WINDOW, arrays))
    more = [jnp.concatenate([x, x]) for x in arrays]
    close(run(plan, *more), by_lax(WINDOW, tuple(more)))
    mask = WINDOW.materialize(130, 130)
    of_mask = gsj.prepare(mask, q, k)
    close(run(of_mask, *arrays), by_lax(WINDOW, arrays))
    first = gsj.prepare(gs.Causal(), q, k, q_offset=0, softcap=3.0, key_lengths=True)
    given: dict[str, Any] = {"softcap": 3.0, "key_lengths": [100, 130]}
    assert gsj.explain(q, k, v, first, **given).kernels and plan_of(first, q, k, v, **given).recipe is first.recipe
    close(jax.jit(both(first, "hopper", **given))(*arrays), by_lax(gs.Causal(), arrays, **given))
    with pytest.raises(gs.Unsupported, match="its Prepared was prepared for other calls"):
        gsj.attention(q, k, v, of_mask, softcap=3.0, implementation="hopper")


def test_a_plan_of_gathered_keys_has_no_tiles(calls: list[str]) -> None:
    """A call that reads them makes them."""
    pattern, sizes, _ = CASES["gathered"]
    arrays = inputs(sizes)
    q, k, v, _ = arrays
    plan = gsj.prepare(pattern, q, k)
    assert plan.recipe is not None and plan.recipe.gathers and not plan.rows.groups
    close(jax.jit(both(plan))(*arrays), by_lax(pattern, arrays))
    assert calls == ["gather", "preprocess", "gather", "gather"]
    close(gsj.attention(q, k, v, plan, implementation="blocked"), gsj.attention(q, k, v, pattern))
    wide = (x.astype(jnp.float32) for x in arrays)
    close(jax.jit(both(plan))(*wide), by_lax(pattern, arrays))


def plan_of(plan: Any, q: Any, k: Any, v: Any, **terms: Any) -> Any:
    """What a call with a Prepared reads."""
    lengths = jnp.asarray(terms.pop("key_lengths"))
    a = arguments_of(q, k, v, AttentionOptions(key_lengths=lengths, **terms), ())
    return plans.plan_of(plan, asked_of(a, None))


def test_what_is_said_of_single_rows(calls: list[str]) -> None:
    pattern, sizes, _ = CASES["single rows"]
    q, k, v, _ = inputs(sizes)
    said = gsj.explain(q, k, v, pattern)
    assert said.kernels == ("rows", "preprocess", "rows", "rows") and said.tile == (1, 1)
    assert said.tiles == pattern.materialize(200, 230).sum() and "hopper, compiled kernels" in str(said)


def test_export(calls: list[str]) -> None:
    """A program holds the names of kernels, which the process that reads it has registered."""
    arrays = inputs(SIZES)[:3]
    exported = jax.export.export(
        jax.jit(attend), disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in _names(arrays)]
    )(*arrays)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(*arrays), plain(*arrays))


def _names(arrays: Any) -> set[str]:
    import re

    text = jax.jit(attend).lower(*arrays).as_text()
    return set(re.findall(r"stand_in_\w+", text))


def test_a_call_that_no_kernel_computes(calls: list[str]) -> None:
    """By name every reason is said; without one lax computes it."""
    q, k, v = (x.astype(jnp.float32) for x in inputs(SIZES)[:3])
    with pytest.raises(gs.Unsupported, match=r"implementation='hopper' cannot compute .* dtype float32 not in"):
        gsj.attention(q, k, v, WINDOW, implementation="hopper")
    out = gsj.attention(q, k, v, WINDOW)
    assert out.dtype == jnp.float32 and not calls
    half = [x.astype(jnp.float16) for x in (q, k, v)]
    with pytest.raises(gs.Unsupported, match="does not compute alibi_slopes"):
        gsj.attention(*half, WINDOW, alibi_slopes=jnp.ones(4), implementation="hopper")


def test_same_bits(calls: list[str]) -> None:
    """The counter of items is each call's own."""
    q, k, v = inputs((1, 130, 130, 2, 2, 64, 64))[:3]
    first, _ = attend(q, k, v)

    @jax.jit
    def many(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x, (attend(q + 0 * x, k, v)[0] == first).all()), q, None, length=3)[1]

    assert many(q, k, v).all()
