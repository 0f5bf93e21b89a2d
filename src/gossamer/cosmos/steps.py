"""Time: steps of drift, kick and drift, whose factors are exact for linear growth."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gossamer.cosmos.box import Box, State, check_state
from gossamer.cosmos.checks import describe, is_known
from gossamer.cosmos.cosmology import H0, Cosmology, as_cosmology, expansion, growth
from gossamer.cosmos.forces import Gas, check_gas, gravity, pressure
from gossamer.cosmos.initial import wrapped


def evolve(state: State, cosmology: Any, box: Box, scale_factors: Any, *, gas: Gas | None = None) -> State:
    """The state at the last of the scale factors: one step from each to the next.

    A step drifts to the middle, kicks by the force there, and drifts to the end. Drifts are (D1 - D0) / G, and kicks
    (G1 - G0) / D, with D the linear growth and G = a^2 dD/dt: exact while growth is linear, however long the steps
    (FastPM, Feng et al. 2016). The steps are one `lax.scan`, each of which a gradient computes again.

    Args:
        state: of `initial_conditions`, `load` or `evolve`.
        cosmology: a `Cosmology`, or one of jax_cosmo's.
        box: the box of the state.
        scale_factors: (n,) from the state's own on, increasing; `jnp.linspace(0.02, 1.0, 65)` is 64 steps.
        gas: makes all of the matter an isothermal gas; without it, it has no pressure.

    Returns:
        The state there, differentiable once by the state's arrays and by the cosmology, in reverse mode.

    Raises:
        ValueError: an argument is wrong.

    Examples:
        >>> box, cosmology = cosmos.Box(size_mpc_h=64.0, particles=8), cosmos.Cosmology()
        >>> state = cosmos.initial_conditions(jax.random.key(0), cosmology, box, a=0.1)
        >>> float(cosmos.evolve(state, cosmology, box, jnp.linspace(0.1, 0.5, 5)).a)
        0.5
    """
    check_state(state, box)
    cosmology = as_cosmology(cosmology)
    if gas is not None:
        check_gas(gas, box)
    return _evolve(state, cosmology, box, _scale_factors(scale_factors, state), gas)


def _scale_factors(given: Any, state: State) -> Array:
    dtype = jnp.asarray(state.a).dtype
    a = jnp.asarray(given, dtype) if not np.isscalar(given) else jnp.zeros((), dtype)
    if a.ndim != 1 or not len(a):
        raise ValueError(f"scale_factors must be an array (n,) from the state's own on; got {describe(given)}")
    if is_known((a, state.a)):
        known = np.asarray(a, np.float64)
        if not (np.diff(known) > 0).all() or not (known > 0).all() or known.max() > 1.5:
            raise ValueError("scale_factors must increase, over 0 and at most 1.5")
        first, *_ = known
        if abs(first / float(state.a) - 1) > 1e-5:
            raise ValueError(f"scale_factors must begin at the state's own, {float(state.a):.8g}; got {first:.8g}")
    return a


class Factors(NamedTuple):
    """The factors of each step."""

    drift: Array  # of momenta in km/s to Mpc/h, to the middle
    kick: Array  # of the force in Mpc/h to km/s
    push: Array  # of the pressure in (km/s)^2 h/Mpc to km/s
    drift_on: Array  # from the middle


def factors(cosmology: Cosmology, a: Array) -> Factors:
    """The factors of the steps between scale factors (n,)."""
    start, end = a[:-1], a[1:]
    middle = (start + end) / 2
    first, half, last = growth(cosmology, start), growth(cosmology, middle), growth(cosmology, end)
    times = [1 / (x**2 * expansion(cosmology, x)) for x in (start, middle, end)]  # dt / da, times a / H0
    inverse = sum(w * x * t for w, x, t in zip((1, 4, 1), (start, middle, end), times, strict=True))
    return Factors(
        (half.D - first.D) / first.momentum / H0,
        (last.momentum - first.momentum) / half.D * H0,
        (end - start) / 6 * inverse / H0,
        (last.D - half.D) / last.momentum / H0,
    )


def _step(state: State, by: Factors, end: Array, box: Box, gas: Gas | None) -> State:
    x, p, _ = state
    x = wrapped(x + by.drift * p, box)
    p = p + by.kick * gravity(x, box)
    if gas is not None:
        p = p + by.push * pressure(x, box, gas)
    return State(wrapped(x + by.drift_on * p, box), p, end)


@partial(jax.jit, static_argnames=("box", "gas"))
def _evolve(state: State, cosmology: Cosmology, box: Box, a: Array, gas: Gas | None) -> State:
    dtype = jnp.asarray(state.positions_mpc_h).dtype
    each = jax.tree.map(lambda x: x.astype(dtype), factors(cosmology, a))

    @jax.checkpoint
    def advance(state: State, step: tuple[Factors, Array]) -> tuple[State, None]:
        by, end = step
        return _step(state, by, end, box, gas), None

    begin = State(*(jnp.asarray(x) for x in state))
    last, _ = lax.scan(advance, begin, (each, a[1:]))
    return last
