"""Checks of the arguments of `entmax_attention` that every framework makes, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gossamer.checks import integer


def check_alpha(alpha: Any, describe: Callable[[Any], str], several: str = "a tensor") -> None:
    """Raise ValueError for what is no number in [1, 2].

    Args:
        several: what a framework calls several numbers.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2:
        raise ValueError(f"alpha must be a number in [1, 2] or {several} (H,); got {describe(alpha)}")


def check_alphas_inside(outside: Sequence[float], several: str = "a tensor") -> None:
    """Raise ValueError where alphas of heads are outside of [1, 2]."""
    if outside:
        raise ValueError(f"alpha must lie in [1, 2] in every head; got {several} that holds {sorted(outside)[:4]}")


def number_of_keys(name: str, top_k: Any, optional: bool = True) -> int | None:
    """top_k as an int, or None where it may be.

    Raises:
        ValueError: it is none of these.
    """
    if top_k is None and optional:
        return None
    return integer(name, top_k, minimum=1, otherwise=" or None" * optional)


def check_positions(name: str, x: Any, shapes: Sequence[tuple[int, ...]], describe: Callable[[Any], str]) -> None:
    """Raise ValueError for positions that broadcast to none of some shapes."""
    if not any(broadcasts(x, shape) for shape in shapes):
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} must broadcast to {wanted}; got {describe(x)}")


def broadcasts(x: Any, shape: tuple[int, ...]) -> bool:
    """Whether x broadcasts to a shape."""
    own = (1,) * (len(shape) - x.ndim) + tuple(x.shape)
    return len(own) == len(shape) and all(n in (1, want) for n, want in zip(own, shape, strict=True))
