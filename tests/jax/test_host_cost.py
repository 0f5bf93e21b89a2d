"""A repeated call that is computed at once: what of the package it enters, and that it is what the first one was."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.jax import api
from tests.support.entered import entered


def arrays(*shape: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key in keys]


def test_how_much_of_the_package_a_repeated_call_enters() -> None:
    x = arrays(1, 256, 4, 32)
    for _ in range(2):
        gsj.attention(*x, gs.SlidingWindow(31))
    repeat = entered(lambda: gsj.attention(*x, gs.SlidingWindow(31)))
    assert len(repeat.files) <= 7 and len(repeat.functions) <= 16, sorted(repeat.functions)


@pytest.mark.parametrize("implementation", [None, "blocked"])
@pytest.mark.parametrize("shape", [(2, 40, 4, 8), (40, 4, 8), (40, 8)], ids=str)
def test_repeated_calls_are_those_of_their_arguments(shape: tuple[int, ...], implementation: str | None) -> None:
    """Forms and options in turns: what differs in anything but values is another call."""
    api._known.clear()
    options: list[dict[str, Any]] = [
        {}, {"scale": 1}, {"scale": 0.25}, {"q_offset": 3}, {"softcap": 2.0}, {"deterministic": True},
    ]  # fmt: skip
    calls = [(dtype, None, {}) for dtype in (jnp.float32, jnp.bfloat16)]
    calls += [(jnp.float32, gs.SlidingWindow(3), more) for more in options]
    given = {dtype: arrays(*shape, dtype=dtype) for dtype, _, _ in calls}

    def run(x: list[jax.Array], pattern: gs.Pattern | None, more: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return gsj.attention(*x, pattern, implementation=implementation, return_residual=True, **more)

    first = [run(given[dtype], pattern, more) for dtype, pattern, more in calls]
    assert len(api._known) == len(calls)
    for (dtype, pattern, more), want in zip(calls, first, strict=True):
        jax.tree.map(np.testing.assert_array_equal, run(given[dtype], pattern, more), want)
        fresh = [2 * x for x in given[dtype]]
        in_program = jax.jit(lambda *x, p=pattern, m=more: run(list(x), p, m))(*fresh)  # type: ignore[misc]
        for a, b in zip(run(fresh, pattern, more), in_program, strict=True):
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=2e-2, rtol=2e-2)
    assert len(api._known) == len(calls)


def test_known_calls_are_transformed_as_others_are() -> None:
    q, k, v = arrays(2, 24, 2, 8)
    call = lambda q, k, v: gsj.attention(q, k, v, gs.Causal())  # noqa: E731
    out = [call(q, k, v) for _ in range(2)][1]
    gradient = jax.grad(lambda q: call(q, k, v).sum())(q)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(lambda q: call(q, k, v).sum()))(q), atol=1e-5)
    assert jnp.abs(gradient).max() > 0
    np.testing.assert_allclose(jax.vmap(call)(q[:, None], k[:, None], v[:, None])[:, 0], out, atol=1e-6)
    # Arrays that are there, in a program that is written.
    np.testing.assert_allclose(jax.jit(lambda x: x + call(q, k, v))(0.0), out, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda s: (s * call(q, k, v)).sum())(1.0), out.sum(), rtol=1e-5)


def test_errors_stay_what_they_are() -> None:
    q, k, v = arrays(1, 24, 2, 8)
    for _ in range(2):
        gsj.attention(q, k, v, gs.Causal())
        with pytest.raises(ValueError, match="value must"):
            gsj.attention(q, k, v[:, :-1], gs.Causal())
        with pytest.raises(ValueError, match="scale must"):
            gsj.attention(q, k, v, gs.Causal(), scale=float("nan"))
        with pytest.raises(ValueError, match="deterministic must"):
            gsj.attention(q, k, v, gs.Causal(), deterministic=1)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="q_offset must"):
            gsj.attention(q, k, v, gs.Causal(), q_offset=1.0)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="return_residual must"):
            gsj.attention(q, k, v, gs.Causal(), return_residual=1)  # type: ignore[call-overload]
