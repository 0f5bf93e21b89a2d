"""Any boolean function of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.checks import raised, show
from gossamer.patterns.base import Pattern
from gossamer.patterns.grid import Sizes

_PROCESS = object()  # an address means nothing to another process, nor after its function is gone


@dataclass(frozen=True, eq=False)
class Predicate(Pattern):
    """Pairs for which `fn(i, j)` is true.

    Equal only to a Predicate of the same function object: keep the pattern, and its layout is built once. The
    layout is evaluated tile by tile, over all Q x K pairs unless it is composed by & with a pattern that has fewer.

    A mask function of FlexAttention, `mask_mod(b, h, q_idx, kv_idx)` over tensors, is given to `from_flex`.

    Args:
        fn: a vectorised boolean function of int64 numpy arrays of query and key positions, which broadcast against
            each other. Positions may lie outside the sequence: with `q_offset`, and where tiles reach past its end, of
            which what it says is ignored. Arrays that it captures are read while a layout is built, and not again,
            since the layout is kept with the function: what it reads must not change.

    Examples:
        >>> gs.Predicate(lambda i, j: (i + j) % 3 == 0).materialize(3, 3).astype(int)
        array([[1, 0, 0],
               [0, 0, 1],
               [0, 1, 0]])
    """

    fn: Callable[[np.ndarray, np.ndarray], Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn must be a function fn(i, j) of numpy arrays of positions, got {show(self.fn)}")

    def _key(self) -> tuple[Any, ...]:
        return _PROCESS, id(self.fn)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        try:
            kept = np.asarray(self.fn(i, j))
        except Exception as error:
            raise ValueError(f"fn of Predicate raised {raised(error)}{_hint(error)}") from error
        shape = np.broadcast_shapes(i.shape, j.shape)
        try:
            if kept.dtype != np.bool_:
                raise ValueError
            return np.broadcast_to(kept, shape)
        except ValueError:
            raise ValueError(
                f"fn of Predicate must return booleans that broadcast to {shape} for positions of shapes {i.shape} "
                f"and {j.shape}; got shape {kept.shape}, dtype {kept.dtype}"
            ) from None


def _hint(error: Exception) -> str:
    """A hint at what may be wrong, for the end of a message."""
    if isinstance(error, IndexError):
        return (
            "; positions may lie outside the sequence (with q_offset, and in tiles that reach past its end): clip "
            "those that index an array, np.clip(i, 0, len(array) - 1)"
        )
    if isinstance(error, (TypeError, AttributeError)):
        return (
            "; fn is called with numpy arrays of positions, fn(i, j). Of a mask function of FlexAttention, "
            "mask_mod(b, h, q_idx, kv_idx), from_flex(mask_mod, Q, K) makes a pattern"
        )
    return ""
