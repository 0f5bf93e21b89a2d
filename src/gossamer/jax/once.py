"""Functions within a gradient that is a rule of its own, which none differentiates again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def once(function: Callable[..., Any], message: str) -> Callable[..., Any]:
    """The function, which raises TypeError with the message where it is differentiated."""

    @jax.custom_jvp
    def attention_gradient(*arguments: Any) -> Any:
        return function(*arguments)

    @attention_gradient.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise TypeError(message)

    return attention_gradient
