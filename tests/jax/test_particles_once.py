"""Gradients of particles have none: to ask for one raises, where it is 0 by the rules of JAX too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from gossamer import particles as gp
from gossamer.plan.problem import Unsupported

N = 20
X, U = (jax.random.uniform(jax.random.key(i), (N, 3)) for i in range(2))
Q, K, V = jax.random.normal(jax.random.key(2), (3, N, 2, 4))


def attend(x: Array, u: Array, kernel: Any) -> Array:
    neighbors = gp.Neighbors.allocate(x, 0.3, 1.0, capacity=N)
    values = V * u[:, None, :1]
    if kernel == "gaussian":
        return gp.neighbor_attention(None, None, values, neighbors, kernel=kernel, bandwidth=0.1)
    width = None if kernel == "dot" else 0.1
    return gp.neighbor_attention(Q * u[:, None, :1], K, values, neighbors, kernel=kernel, bandwidth=width)


OF = {
    "sum": lambda x, u: gp.radial_sum(gp.Cells.build(x, 0.3, 1.0), u, gp.Gaussian(0.1)),
    "force": lambda x, u: gp.radial_force(gp.Cells.build(x, 0.3, 1.0), u[:, 0], gp.ShortRangeGravity(0.05, 0.001)),
    **{kernel: lambda x, u, kernel=kernel: attend(x, u, kernel) for kernel in ("dot", "gaussian", "dot+gaussian")},
}


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OF)
def test_a_second_derivative_raises(name: str, compiled: bool, square: bool) -> None:
    def loss(*given: Array) -> Array:
        found = OF[name](*given)
        return (found**2 if square else found).sum()

    run: Callable[..., Any] = jax.jit if compiled else lambda f: f
    of_first = (0, 1) if name != "dot" else (1,)
    assert all(bool(jnp.isfinite(g).all()) for g in run(jax.grad(loss, of_first))(X, U))
    for i in of_first:
        for j in of_first:
            again = jax.grad(lambda *given, i=i: jax.grad(loss, i)(*given).sum(), j)
            with pytest.raises(Unsupported, match="first derivatives alone"):
                run(again)(X, U)
