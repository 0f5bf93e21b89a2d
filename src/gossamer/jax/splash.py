"""Masks of JAX's splash attention for TPUs as Plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gossamer.jax.arguments import describe
from gossamer.jax.prepared import Prepared, lists_of
from gossamer.patterns import CSR, Causal, Dense, Local, Pattern, PerHead, SlidingWindow

KNOWN = "FullMask, CausalMask, LocalMask, ChunkedCausalMask, NumpyMask, MultiHeadMask, and any & and | of them"


def from_splash(mask: Any) -> Prepared:
    """The prepared form of a mask of `jax.experimental.pallas.ops.tpu.splash_attention`: for `attention` alone.

    Args:
        mask: FullMask, CausalMask, LocalMask, ChunkedCausalMask, NumpyMask, any & and | of them, or a MultiHeadMask,
            which has one for each query head.

    Raises:
        ValueError: it is none of these, or joins masks whose offsets differ in a way that no window says.

    Examples:
        >>> from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
        >>> plan = gsj.from_splash(splash.LocalMask((128, 128), window_size=(32, 0), offset=0))
        >>> x = jnp.ones((1, 128, 2, 16))
        >>> bool((gsj.attention(x, x, x, plan) == gsj.attention(x, x, x, gs.SlidingWindow(32))).all())
        True
    """
    if not hasattr(mask, "shape") or len(mask.shape) not in (2, 3):
        raise ValueError(f"mask must be a splash attention mask: {KNOWN}; got {describe(mask)}")
    *_, Q, K = mask.shape
    offset = min(_offsets(mask), default=0)
    if _kind(mask) == "MultiHeadMask":
        pattern: Pattern = PerHead([_pattern(one, offset) for one in mask.masks])
    else:
        pattern = _pattern(mask, offset)
    _, heads = pattern.lead
    return lists_of(pattern, 1, heads, Q, K, offset if pattern.reads_positions else None)


def _kind(mask: Any) -> str:
    return type(mask).__name__


def _offsets(mask: Any) -> Iterator[int]:
    """Those of all masks that count positions."""
    if _kind(mask) in ("LogicalAnd", "LogicalOr"):
        yield from _offsets(mask.left)
        yield from _offsets(mask.right)
    elif _kind(mask) == "MultiHeadMask":
        for one in mask.masks:
            yield from _offsets(one)
    elif _kind(mask) in ("CausalMask", "LocalMask", "ChunkedCausalMask"):
        yield getattr(mask, "offset", 0)


def _pattern(mask: Any, base: int) -> Pattern:
    """The pattern of a mask, where the first query is at the position `base`."""
    kind, ahead = _kind(mask), getattr(mask, "offset", 0) - base  # of its positions over those of the call
    if kind == "LogicalAnd":
        return _pattern(mask.left, base) & _pattern(mask.right, base)
    if kind == "LogicalOr":
        return _pattern(mask.left, base) | _pattern(mask.right, base)
    if kind == "FullMask":
        return Dense()
    if kind == "NumpyMask":
        rows, columns = np.nonzero(np.asarray(mask.array))
        return CSR._from_pairs(rows, columns, *mask.shape)
    if kind == "CausalMask":
        return SlidingWindow(None, ahead) if ahead else Causal()
    if kind == "LocalMask":
        left, right = mask.window_size
        left, right = None if left is None else left - ahead, None if right is None else right + ahead
        if min(left or 0, right or 0) >= 0:
            return SlidingWindow(left, right)
    if kind == "ChunkedCausalMask" and not ahead:
        return Local(mask.chunk_size) & Causal()
    if kind in ("LocalMask", "ChunkedCausalMask"):
        raise ValueError(f"mask joins a {kind} with masks of other offsets, which no pattern says; give it as an array")
    raise ValueError(f"mask must be a splash attention mask: {KNOWN}; got {describe(mask)}")
