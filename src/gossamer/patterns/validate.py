"""Checks of constructor arguments: each names the argument, prints what was given and what is accepted."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np


def show(value: Any) -> str:
    """A short repr on one line, for error messages; of an array that has none, its type, shape and dtype."""
    try:
        text = repr(value)
    except Exception as error:  # a user's object may have a broken repr; the message must still come out
        text = f"<{type(value).__name__}, repr failed: {error!r}>"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and (len(text) > 80 or "\n" in text):
        return f"{type(value).__name__} of shape {tuple(shape)}, dtype {dtype}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def integer(name: str, value: Any, *, minimum: int | None = None, maximum: int = 2**31 - 1) -> int:
    """`value` as an int within [minimum, maximum]; booleans and fractions are refused."""
    bounds = f"an integer of at most {maximum}" if minimum is None else f"an integer in [{minimum}, {maximum}]"
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be {bounds}, got {show(value)}") from None
    if (minimum is not None and number < minimum) or number > maximum:
        raise ValueError(f"{name} must be {bounds}, got {number}")
    return number


def optional_integer(name: str, value: Any, *, minimum: int | None = None) -> int | None:
    """Like `integer`, but None passes and means unbounded."""
    return None if value is None else integer(name, value, minimum=minimum)


def boolean(name: str, value: Any) -> bool:
    """`value` as a bool; numbers are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {show(value)}")
    return bool(value)


def array(name: str, value: Any, *, ndim: tuple[int, ...], kind: str) -> np.ndarray:
    """`value` as a contiguous read-only numpy array; kind is "integer" (becomes int64) or "boolean"."""
    shapes = " or ".join(f"{n}-dimensional" for n in ndim)
    wanted = f"{name} must be a {shapes} array of {kind} values"
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        given = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{wanted}, got {show(value)} ({error})") from None
    if given.size == 0 and kind == "integer" and given.dtype.kind == "f":
        given = given.astype(np.int64)  # an empty list has no type of its own
    kinds = {"integer": "iu", "boolean": "b"}[kind]
    if given.dtype.kind not in kinds or given.ndim not in ndim:
        raise ValueError(f"{wanted}, got shape {given.shape}, dtype {given.dtype}")
    if given.dtype.kind == "u" and given.size and int(given.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{wanted} that fit int64, got a largest value of {int(given.max())}")
    out = np.array(given, dtype=np.int64 if kind == "integer" else bool, order="C")
    out.setflags(write=False)
    return out


def digest(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """A hashable key of an array's content."""
    return str(values.dtype), values.shape, hashlib.blake2b(values.tobytes(), digest_size=16).digest()
