"""Gradients of particles in JAX, which have no gradient: to ask for one raises, and does not give 0."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from gossamer.particles.edges import ONCE
from gossamer.plan.problem import Unsupported


@jax.custom_jvp
def once(found: Any, given: Any) -> Any:
    """`found`, gradients at `given`: the way by which JAX sees what they depend on, since runs and lists hide it."""
    return found


@once.defjvp
def _again(primals: Any, tangents: Any) -> NoReturn:
    raise Unsupported(ONCE)
