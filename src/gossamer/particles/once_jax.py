"""Gradients of particles in JAX, which have no gradient: to ask for one raises, and does not give 0."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from gossamer.particles.edges import ONCE
from gossamer.plan.problem import Unsupported


@jax.custom_jvp
def once(gradients: Any, given: Any) -> Any:
    """The gradients at `given`, so that JAX sees what they depend on, which runs and lists hide."""
    return gradients


@once.defjvp
def _again(primals: Any, tangents: Any) -> NoReturn:
    raise Unsupported(ONCE)
