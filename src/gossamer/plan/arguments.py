"""Checks of the arguments of attention that every framework makes: on sizes, names of types and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gossamer.checks import Check, show
from gossamer.checks import describe as described
from gossamer.patterns import Pattern
from gossamer.patterns.ahead import keeps_ahead
from gossamer.patterns.grid import Sizes

FLOATS = ("float16", "bfloat16", "float32", "float64")
ACCEPTED = "float16, bfloat16, float32 or float64"
DISTANCES = ("signed", "absolute")  # of ALiBi: what a slope is multiplied by is j - i, or -|i - j|
BLOCKS = (64, 128)  # sizes of blocks that are selected: tiles that every implementation walks
MAX_HEAD = 4096  # of D and of E
MOST = 2**31 - 2**16  # positions are below it
HEAD_SIZES = f"have head sizes D, E up to {MAX_HEAD}"
POSITIONS = f"have fewer than 2**31 - 2**16 = {MOST} positions Q, K"


def most_offset(Q: int, K: int) -> int:
    """The largest q_offset of either sign: positions and distances are 32-bit integers, in tiles that reach further."""
    return MOST - max(Q, K)


def within_positions(Q: int, K: int) -> str:
    """The values that a q_offset may have, for a message."""
    return f"be an integer up to 2**31 - 2**16 - max(Q, K) = {most_offset(Q, K)} in magnitude"


def offset_check(q_offset: int, Q: int, K: int) -> Check:
    """The check of a q_offset that is a whole number."""
    return abs(q_offset) <= most_offset(Q, K), "q_offset", q_offset, within_positions(Q, K)


def shape_check(name: str, x: Any, B: int, H: int) -> Check:
    """The check of the shape of key_lengths (B,), sink_logits (H,), or alibi_slopes (H,) or (B, H)."""
    letter, size = ("B", B) if name == "key_lengths" else ("H", H)
    accepted = f"have shape ({letter},) = ({size},)"
    if name != "alibi_slopes":
        return x.ndim == 1 and x.shape[0] == size, name, x, accepted
    fits = x.ndim in (1, 2) and x.shape[-1] == H and (x.ndim == 1 or x.shape[0] == B)
    return fits, name, x, f"{accepted}, or (B, H) = {(B, H)}"


def factor_checks(scale: float | None, softcap: float | None, D: int, dtype: str) -> Iterator[Check]:
    """The checks of numbers that scores are multiplied by, in the type that scores of inputs of `dtype` are in."""
    limits = np.finfo("float64" if dtype == "float64" else "float32")
    # Kernels multiply by up to 2 log2(e); s / softcap keeps its digits.
    most, capped = float(limits.max) / 4, float(limits.max) ** 0.5
    scale = D**-0.5 if scale is None else scale
    scale_rule = f"be a finite number up to {most:.1e} in magnitude, as {limits.dtype} holds, or None for D ** -0.5"
    yield abs(scale) <= most, "scale", scale, scale_rule
    if softcap is not None:
        yield softcap != 0, "softcap", softcap, "be a finite number over 0, or None for no cap"
        cap_rule = f"be a finite number over 0, from {1 / capped:.1e} to {capped:.1e} in {limits.dtype}, or None"
        yield 1 / capped <= softcap <= capped, "softcap", softcap, cap_rule
        yield abs(scale) / softcap <= most, "scale / softcap", scale / softcap, f"be up to {most:.1e}"


def listed_lengths(
    name: str, given: Sequence[Any], numbers: Sequence[int | None], B: int, describe: Callable[[Any], str]
) -> list[int]:
    """Numbers of keys that are given in a list, clamped to what an int32 holds: over K they are K, under 0 they are 0.

    Args:
        numbers: what is given, as whole numbers; None for what is none.

    Raises:
        ValueError: the list holds something else than integers, or not one for each batch element.
    """
    wanted = f"{name}, a list, must hold B={B} integers, one for each batch element"
    for one, number in zip(given, numbers, strict=True):
        if number is None:
            raise ValueError(f"{wanted}; it holds {describe(one)}")
    if len(numbers) != B:
        raise ValueError(f"{wanted}; got {describe(given)}")
    return [max(0, min(number or 0, 2**31 - 1)) for number in numbers]


def check_distance(alibi_distance: Any, slopes: bool) -> None:
    """Raise ValueError unless one that is given says how slopes count keys after the query.

    Args:
        slopes: whether the call has alibi_slopes.
    """
    if not isinstance(alibi_distance, str) or alibi_distance not in DISTANCES:
        raise ValueError(
            'alibi_distance must be "signed", slope * (j - i), "absolute", -slope * |i - j|, or None; '
            f"got {described(alibi_distance)}"
        )
    if not slopes:
        raise ValueError(f"alibi_distance must be None without alibi_slopes; got {described(alibi_distance)}")


def check_ahead(pattern: Pattern | None, Q: int, K: int, q_offset: int, otherwise: str) -> None:
    """Raise ValueError where slopes without a distance may meet a key after its query.

    Args:
        pattern: None for what is not looked into, of which the sizes alone may say that there is no such key.
        otherwise: what that is, in words.
    """
    if q_offset >= K - 1 or not min(Q, K):
        return
    if pattern is not None and not keeps_ahead(pattern, Sizes(Q, K, q_offset)):
        return
    keeps = f"{show(pattern)}, which keeps" if pattern is not None else f"{otherwise}, which may keep"
    raise ValueError(
        f'alibi_distance must be "signed", slope * (j - i), or "absolute", -slope * |i - j|, with {keeps} keys after '
        f"the query (j > i): both are published; got None"
    )


def instead(given: Any) -> str:
    """The hint at what to give instead of something that is no pattern, for the end of a message; "" without one."""
    if hasattr(given, "tocoo"):
        return "; CSR.from_scipy(matrix) takes a scipy sparse matrix"
    if isinstance(given, type) and issubclass(given, Pattern):
        return f"; this is a class, {given.__name__}(...) is a pattern"
    if isinstance(given, (list, tuple)) and given and all(isinstance(p, Pattern) for p in given):
        return "; PerHead(patterns) gives each query head its own, PerBatch(patterns) each batch element"
    if isinstance(given, (bool, str)):
        return "; causal attention is Causal(), a window SlidingWindow.of_size(W)"
    return ""
