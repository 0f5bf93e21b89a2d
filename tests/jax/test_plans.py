"""Plans: what enters `jit` as an argument, what a program holds, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.jax.tiles import capacity_of
from gossamer.testing.graphs import random_graph


def ones(N: int, heads: int = 1, size: int = 4) -> jax.Array:
    return jnp.ones((1, N, heads, size))


def test_a_large_plan_is_no_part_of_the_program() -> None:
    """16 MiB of lists add under 100 KB to the program; as constants they would add twice their size, with a warning."""
    rng = np.random.default_rng(0)
    pattern = gs.CSR.from_edge_index(rng.integers(0, 8192, (2, 1_800_000)), 8192)
    x = ones(8192)
    plan = gsj.prepare(pattern, x, x)
    assert plan.nbytes > 16 * 2**20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = jax.jit(lambda plan, x: gsj.attention(x, x, x, plan)).lower(plan, x).as_text()
    assert len(text) < 100_000
    with pytest.warns(UserWarning, match=r"make a Prepared by gossamer\.jax\.prepare\(pattern, query, key\) outside"):
        jax.jit(lambda x: gsj.attention(x, x, x, pattern)).lower(x)
    small = gs.SlidingWindow(200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: gsj.attention(x, x, x, small)).lower(x)
        gsj.attention(x, x, x, pattern)  # eagerly lists are arguments


def test_a_plan_is_a_pytree() -> None:
    x = ones(300, 2)
    plan = gsj.prepare(gs.BigBird(32), x, x)
    leaves, tree = jax.tree.flatten(plan)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = jax.tree.unflatten(tree, leaves)
    assert (again.Q, again.K, again.nbytes) == (300, 300, plan.nbytes) and "BigBird" in repr(again)
    step = jax.jit(lambda plan, x: gsj.attention(x, x, x, plan), donate_argnums=1)
    want = gsj.attention(x, x, x, gs.BigBird(32))
    assert (step(plan, jnp.copy(x)) == want).all()
    calls = []

    @jax.jit
    def counted(plan: Any, x: Any) -> Any:
        calls.append(None)
        return gsj.attention(x, x, x, plan)

    for window in (10, 20, 20):
        out = counted(gsj.prepare(gs.SlidingWindow(window), x, x), x)
        assert (out == gsj.attention(x, x, x, gs.SlidingWindow(window))).all()
    assert len(calls) == 1  # another pattern with as many tiles does not compile again


def test_shapes_are_enough() -> None:
    q = jax.ShapeDtypeStruct((2, 256, 4, 8), jnp.bfloat16)
    assert gsj.prepare(gs.Causal(), q, q).K == 256
    assert gsj.prepare(gs.Causal(), jax.ShapeDtypeStruct((70, 8), jnp.float32), q).Q == 70


@pytest.mark.parametrize("rows", [0, 1, 64])
def test_lists_hold_each_tile_once(rows: int, together: Callable[[int | None], None]) -> None:
    """Of a graph, memory follows from tiles, not from pairs of rows; or from the keys that are gathered."""
    together(rows)
    x = ones(2048)
    plan = gsj.prepare(random_graph(2048, 3), x, x)
    of_rows, of_columns = (int(lists.counts.sum()) for lists in (plan.rows, plan.columns))
    assert of_rows == of_columns or rows == 64
    assert len(plan.rows.columns) == capacity_of(of_rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": np.ones((3,))}, "query, key and value must all have 2, 3 or 4 dimensions"),
        ({"query": [1.0]}, r"query must be an array of JAX or numpy; got \[1\.0\] \(list\)"),
        ({"key": jnp.ones((1, 70, 2, 9))}, "key must have the head size of query, D=8"),
        ({"value": jnp.ones((1, 71, 2, 8))}, r"value must have the positions and heads of key, \(K, G\) = \(70, 2\)"),
        ({"key": jnp.ones((1, 70, 3, 8)), "value": jnp.ones((1, 70, 3, 8))}, "key must have a number of heads G that"),
        ({"key": jnp.ones((2, 70, 2, 8))}, "key must have B=1 batch elements"),
        ({"key": jnp.ones((1, 70, 2, 8), jnp.bfloat16)}, "key must be an array of query's dtype, float32"),
        ({"query": jnp.ones((1, 70, 2, 8), jnp.int32)}, "query must be an array of float16, bfloat16"),
        ({"scale": "1"}, r"scale must be a number, an array of floats without dimensions, or None; got '1' \(str\)"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"scale": 1e39}, "scale must be a finite number up to 8.5e\\+37"),
        ({"softcap": -1.0}, "softcap must be a finite number over 0"),
        ({"softcap": True}, "softcap must be a number"),
        ({"q_offset": jnp.float32(3)}, "q_offset must be an int or None"),
        ({"q_offset": 2**31}, "q_offset must be an integer up to"),
        ({"key_lengths": jnp.ones((1,))}, "key_lengths must be integers"),
        ({"key_lengths": [1, 2]}, "key_lengths, a list, must hold B=1 integers"),
        ({"key_lengths": [1.5]}, "key_lengths, a list, must hold B=1 integers"),
        ({"sink_logits": jnp.ones(3)}, r"sink_logits must have shape \(H,\) = \(2,\)"),
        ({"alibi_slopes": jnp.ones(2, jnp.int32)}, "alibi_slopes must be float16"),
        ({"implementation": "magic"}, "implementation must be None or one of blocked, hopper, triton; got 'magic'"),
        ({"return_residual": 1}, "return_residual must be True or False"),
        ({"deterministic": None}, "deterministic must be True or False"),
        ({"pattern": "causal"}, "pattern must be None, a Pattern.*causal attention is Causal"),
        ({"pattern": gs.Causal}, r"this is a class, Causal\(\.\.\.\) is a pattern"),
        ({"pattern": [gs.Causal(), gs.Dense()]}, r"PerHead\(patterns\) gives each query head its own"),
        ({"pattern": np.ones((70, 71), bool)}, r"must be boolean and broadcast to \(B, H, Q, K\) = \(1, 2, 70, 70\)"),
        ({"pattern": np.ones((70, 70))}, "must be boolean"),
        ({"pattern": gs.PerHead([gs.Causal()] * 3)}, "describes 3 query heads, the inputs have 2"),
        ({"pattern": gs.CSR([0, 1], [0], 70)}, "CSR"),
        ({"pattern": np.ones((70, 70), bool), "q_offset": 3}, "q_offset must be left out with a mask"),
        ({"pattern": gs.CSR(np.arange(71), np.arange(70), 70), "q_offset": 3}, "q_offset must be left out with CSR"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    x = jnp.ones((1, 70, 2, 8))
    arguments: dict[str, Any] = {"query": x, "key": x, "value": x} | change
    with pytest.raises(ValueError, match=message):
        gsj.attention(**arguments)


def test_what_is_refused_of_plans() -> None:
    x = ones(70, 2)
    plan = gsj.prepare(gs.Causal(), x, x)
    with pytest.raises(ValueError, match="is of Q=70, K=70; the inputs have Q=71, K=70"):
        gsj.attention(ones(71, 2), x, x, plan)
    with pytest.raises(ValueError, match="q_offset must be left out with a Prepared, which was made with q_offset=0"):
        gsj.attention(x, x, x, plan, q_offset=2)
    assert gsj.attention(x, x, x, plan, q_offset=0).shape == x.shape
    each = gsj.prepare(gs.PerHead([gs.Causal(), gs.Dense()]), x, x)
    with pytest.raises(ValueError, match="is of 1 batch elements and 2 heads; the inputs have 1 and 1"):
        gsj.attention(x[:, :, :1], x[:, :, :1], x[:, :, :1], each)
    with pytest.raises(ValueError, match="computed in a program: make a Prepared of it"):
        jax.jit(lambda mask: gsj.attention(x, x, x, mask))(np.ones((70, 70), bool))


def test_symbolic_sizes_are_refused() -> None:
    batch, *_ = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 70, 2, 8), jnp.float32)
    with pytest.raises(
        ValueError, match=r"query must be of sizes that are known; symbolic ones are not taken; got shape"
    ):
        jax.export.export(jax.jit(lambda x: gsj.attention(x, x, x)))(x)


def test_memory_grows_with_positions_alone() -> None:
    """Four times the positions take four times the memory, forward and gradient, and less than one score matrix."""

    def bytes_of(N: int) -> tuple[int, int]:
        x = jax.ShapeDtypeStruct((1, N, 2, 32), jnp.float32)
        plan = gsj.prepare(gs.SlidingWindow(200), x, x)

        def f(plan: Any, x: Any) -> Any:
            return gsj.attention(x, x, x, plan).sum()

        programs = (jax.jit(g).lower(plan, x).compile() for g in (f, jax.grad(f, 1)))
        forward, backward = (int(p.memory_analysis().temp_size_in_bytes) for p in programs)
        return forward, backward

    small, large = bytes_of(2048), bytes_of(8192)
    assert all(b <= 4.5 * a + 2**22 for a, b in zip(small, large, strict=True)), (small, large)
    assert max(large) < 4 * 8192**2 / 4


def test_slopes_are_constants() -> None:
    x, slopes = ones(70, 2), jnp.ones(2)
    with pytest.raises(ValueError, match=r"give jax\.lax\.stop_gradient\(alibi_slopes\)"):
        jax.grad(lambda s: gsj.attention(x, x, x, alibi_slopes=s, alibi_distance="signed").sum())(slopes)
    jax.grad(lambda x: gsj.attention(x, x, x, alibi_slopes=slopes, alibi_distance="signed").sum())(x)


def test_lengths_of_any_integer_type() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 200, 1, 8)), jnp.float32) for _ in range(3))
    want = gsj.attention(q, k, v, key_lengths=[100, 200, 0])
    for lengths in (
        np.asarray([100, 2**40, -(2**40)]), np.asarray([100, 2**63, 0], np.uint64), [100, 2**70, -5],
        jnp.asarray([100, 2**31 - 1, -1]), jnp.asarray([100, 2**32 - 1, 0], jnp.uint32),
    ):  # fmt: skip
        assert (gsj.attention(q, k, v, key_lengths=lengths) == want).all()
    small = jnp.asarray([100, 127, -128], jnp.int8)
    assert (gsj.attention(q, k, v, key_lengths=small) == gsj.attention(q, k, v, key_lengths=[100, 127, 0])).all()


def test_explain() -> None:
    x = jnp.ones((2, 1024, 4, 64), jnp.bfloat16)
    found = gsj.explain(x, x, x, gs.SlidingWindow(128), softcap=3.0, key_lengths=[3, 4])
    assert (found.tiles, found.all_tiles, found.tile) == (45, 256, (64, 64))
    text = str(found)
    assert "key_lengths, softcap" in text and "45 of 256 of 64 x 64" in text and "no forward mode" in text
    assert gsj.explain(x, x, x, gs.Causal(), implementation="blocked").gradient == "JAX's own"


def test_forms_of_tensors() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 100, 2, 8)), jnp.float32)
    out, lse = gsj.attention(x, x, x, gs.Causal(), return_residual=True)
    three, of_three = gsj.attention(x[0], x[0], x[0], gs.Causal(), return_residual=True)
    assert (three == out[0]).all() and (of_three == lse[0]).all()
    two, of_two = gsj.attention(x[0, :, 0], x[0, :, 0], x[0, :, 0], gs.Causal(), return_residual=True)
    assert two.shape == (100, 8) and of_two.shape == (100,)
    assert jnp.abs(two - out[0, :, 0]).max() < 1e-6


def test_terms_of_a_plan_are_checked() -> None:
    q = jnp.ones((1, 8, 1, 4))
    for wrong in ({"key_lengths": [3]}, {"sink_logits": q}, {"scale": "a"}, {"softcap": True}, {"deterministic": 2},
                  {"scale": np.nan}, {"softcap": 0.0}, {"q_offset": 0.5}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gsj.prepare(gs.Causal(), q, q, **wrong)


def test_a_plan_without_arrays_has_a_repr() -> None:
    """As in messages of JAX: shapes, trees of axes, nothing."""
    plan = gsj.prepare(gs.Causal(), jnp.ones((1, 8, 1, 4)), jnp.ones((1, 8, 1, 4)))
    shapes = jax.eval_shape(lambda plan: plan, plan)
    assert repr(shapes) == repr(plan) and shapes.nbytes == plan.nbytes > 0
    for leaf in (None, 0, "x"):
        assert repr(jax.tree.map(lambda _, leaf=leaf: leaf, plan)) == "Prepared(Causal(), Q=8, K=8, 0 bytes)"


def test_the_name_before_is_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"gossamer\.jax\.Plan is called gossamer\.jax\.Prepared"):
        assert gsj.Plan is gsj.Prepared
    with pytest.raises(AttributeError, match="no attribute 'Plans'"):
        gsj.Plans  # noqa: B018


def test_what_lax_gathers() -> None:
    """What takes the least by counted work, and what is said of it."""
    x = ones(2048, size=64)
    points = jax.random.uniform(jax.random.key(0), (2048, 3))
    graph = random_graph(2048, 3)
    near = gsj.create_sparsity_mask(points, share=0.22)
    for pattern, tile in ((graph, (1, 1)), (near, (64, 1)), (gs.SlidingWindow(99), (64, 64)), (gs.Causal(), (64, 64))):
        assert gsj.explain(x, x, x, pattern).tile == tile, pattern
    assert "gathered        6,142 keys, each for 1 query: 0.1% of all pairs" in str(gsj.explain(x, x, x, graph))
    found = gsj.explain(x, x, x, near)
    assert 0.3 < found.share < 0.5 and found.bits_tiles == found.tiles
    assert "each for 64 queries" in str(found)
    scattered = gs.CSR(near.indptr, near.indices, 2048)  # in no order it is computed by tiles
    assert gsj.explain(x, x, x, scattered).tile == (64, 64)
