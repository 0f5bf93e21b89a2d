"""Kernels from JAX on a GPU, those for Hopper and those in Triton, against the definition in float64.

JAX_PLATFORMS=cuda,cpu python -m pytest --confcutdir tests/jax tests/jax/test_kernels_gpu.py
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.jax.kernels import targets
from gossamer.jax.kernels.recipes import implementation_of
from gossamer.testing.cases import SMALL, Case
from gossamer.testing.graphs import power_law_graph, proximity_graph, random_graph
from tests.jax.calls import ROUNDING, inputs_of, kept, made, run, scattered
from tests.jax.oracle import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(targets.chip() is None or targets.chip().sm != 90, reason="needs a GPU of capability 9.0"),
    pytest.mark.skipif(bool(targets.missing()), reason="; ".join(targets.missing())),
]
IN_TRITON = pytest.mark.skipif(bool(targets.missing_for_triton()), reason="; ".join(targets.missing_for_triton()))
ABLE = [case for case in SMALL if not case.alibi_slopes and max(case.D, case.E) <= 256]
# Pattern, then B, H, G, Q, K, D, E, then score terms.
LARGER: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "window": (gs.SlidingWindow(300), (2, 8, 2, 2048, 2048, 128, 128), {}),
    "dense": (gs.Dense(), (1, 2, 2, 1000, 1300, 64, 64), {}),
    "wide heads": (gs.SlidingWindow(200), (1, 2, 1, 700, 700, 256, 256), {}),
    "blocks": (gs.BigBird(64), (1, 4, 4, 1024, 1024, 128, 128), {}),
    "dilated": (gs.Dilated(256, 0, dilation=4), (1, 2, 2, 4099, 4099, 64, 64), {}),
    "power strided": (gs.PowerStrided(2, 40), (1, 2, 2, 2000, 2000, 64, 64), {}),
    "proximity": (proximity_graph((4, 4, 4), 2.0), (1, 2, 2, 4096, 4096, 64, 64), {}),
    "random graph": (random_graph(1500, 16), (1, 2, 2, 1500, 1500, 64, 64), {}),
    "power law": (power_law_graph(2000, 9000), (2, 4, 2, 2000, 2000, 128, 128), {}),
    "single rows": (scattered(1500, 1700, 3), (2, 4, 1, 1500, 1700, 64, 64), {}),
    "single rows, cut": (scattered(1000, 1500, 2, 1), (1, 2, 1, 1000, 1500, 64, 40), {"sink_logits": np.ones(2)}),
    "single rows, terms": (
        scattered(1000, 1000, 4),
        (2, 4, 2, 1000, 1000, 40, 128),
        {"softcap": 5.0, "key_lengths": np.asarray([700, 30]), "sink_logits": np.arange(4.0) - 2},
    ),
    "single rows of heads": (
        gs.PerHead([scattered(150, 150, 2), scattered(150, 150, 3)]),
        (2, 2, 1, 150, 150, 128, 64),
        {},
    ),
    "single rows, odd sizes": (scattered(800, 800, 3), (1, 2, 2, 800, 800, 20, 7), {}),
    "terms": (gs.SlidingWindow(200), (2, 4, 2, 1024, 1024, 128, 128), {"softcap": 20.0}),
    "few queries": (gs.Causal(), (2, 8, 2, 3, 5000, 128, 128), {}),
    "odd sizes": (gs.Causal(), (2, 4, 2, 333, 333, 40, 20), {}),
}


WIDER: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "wider heads": (gs.SlidingWindow(100), (1, 2, 1, 300, 300, 300, 260), {}),
    "one query": (gs.Causal(), (2, 8, 2, 1, 5000, 128, 128), {"key_lengths": np.asarray([4000, 30])}),
}


# Types take turns: each has kernels of its own.
OF_CASES = [*zip(ABLE, cycle(["bfloat16", "float16"])), *((case, "float32") for case in ABLE[::3])]
OF_LARGER = [
    *((name, "bfloat16") for name in LARGER),
    *((name, "float16") for name in LARGER if name.startswith("single")),
    *((name, "float32") for name in (*LARGER, *WIDER)),
]


def of_type(pairs: list[tuple[Any, str]]) -> list[Any]:
    """The same as parameters of a test."""
    return [pytest.param(*pair, marks=[IN_TRITON] if pair[1] == "float32" else []) for pair in pairs]


@pytest.mark.parametrize(("case", "dtype"), of_type(OF_CASES), ids=str)
def test_cases(case: Case, dtype: str) -> None:
    x = inputs_of(case, dtype)
    compare(x, run(x, case.pattern(), implementation_of(dtype)), ROUNDING[dtype])


@pytest.mark.filterwarnings("ignore:the lists of")  # of single rows they are large
@pytest.mark.parametrize(("name", "dtype"), of_type(OF_LARGER))
def test_larger(name: str, dtype: str) -> None:
    pattern, sizes, terms = (LARGER | WIDER)[name]
    *_, Q, K, D, _ = sizes
    keep = kept(pattern, Q, K, K - Q)
    x = made(np.random.default_rng(0), sizes, dtype, keep, scale=D**-0.5, q_offset=K - Q, **terms)
    compare(x, run(x, pattern, implementation_of(dtype)), ROUNDING[dtype])


def test_the_backward_of_small_tiles_keeps_dS() -> None:
    q = jnp.ones((1, 1024, 4, 128), jnp.bfloat16)
    assert "kept" in str(gsj.explain(q, q, q, gs.BigBird(64)))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=IN_TRITON)])
def test_transformations(dtype: str) -> None:
    """Copies of a batched axis, layers of a scan, and a Prepared as an argument give the bits of single calls."""
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 2, 512, 4, 64), dtype) for i in range(3))
    pattern = gs.SlidingWindow(100)

    def one(q: Any, k: Any, v: Any) -> Any:
        return gsj.attention(q, k, v, pattern, implementation=implementation_of(dtype))

    each = jnp.stack([one(*x) for x in zip(q, k, v, strict=True)])
    assert (jax.vmap(one)(q, k, v) == each).all()
    scanned = jax.jit(lambda *x: jax.lax.scan(lambda c, x: (c, one(*x)), 0, x)[1])
    assert (scanned(q, k, v) == each).all()
    plan = gsj.prepare(pattern, q[0], k[0])
    assert (jax.jit(lambda plan, *x: gsj.attention(*x, plan))(plan, q[0], k[0], v[0]) == each[0]).all()

    def loss(*x: Any) -> Any:
        return one(*x).astype(jnp.float32).sum()

    found = jax.vmap(jax.grad(loss, (0, 1, 2)))(q, k, v)
    wanted = [jax.grad(loss, (0, 1, 2))(*x) for x in zip(q, k, v, strict=True)]
    for x, *parts in zip(found, *wanted, strict=True):
        assert jnp.abs(x.astype(jnp.float32) - jnp.stack(parts).astype(jnp.float32)).max() < 2e-2


def test_it_is_chosen_and_said() -> None:
    q = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)
    text = str(gsj.explain(q, q, q, gs.SlidingWindow(128)))
    assert "hopper, compiled kernels" in text and "forward, preprocess" in text
    wide = q.astype(jnp.float32)
    with pytest.raises(gs.Unsupported, match="dtype float32 not in"):
        gsj.attention(wide, wide, wide, gs.SlidingWindow(128), implementation="hopper")
    with pytest.raises(gs.Unsupported, match="dtype bfloat16 not in"):
        gsj.attention(q, q, q, gs.SlidingWindow(128), implementation="triton")
    with pytest.raises(gs.Unsupported, match="alibi_slopes"):
        gsj.attention(q, q, q, alibi_slopes=jnp.ones(2), implementation="hopper")


@IN_TRITON
def test_float32_runs_by_triton() -> None:
    """Chosen, said, and with the same bits every time."""
    q = jax.random.normal(jax.random.key(0), (1, 2000, 2, 64))
    text = str(gsj.explain(q, q, q, gs.SlidingWindow(128)))
    assert "triton, compiled kernels" in text and "forward_kernel, row_terms_kernel, dq_kernel, dkdv_kernel" in text
    gradients = jax.jit(jax.grad(lambda *x: (gsj.attention(*x, gs.BigBird(64)) ** 2).sum(), (0, 1, 2)))
    first, again = gradients(q, q, q), gradients(q, q, q)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
