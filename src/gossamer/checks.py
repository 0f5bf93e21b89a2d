"""Checks of arguments: each names the argument, prints what was given and what is accepted. No framework is needed."""

from __future__ import annotations

import hashlib
import math
import operator
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

SHOWN = 80  # characters of a value in a message
SAID = 300  # characters of an error that a user's function raised
BITS_SHOWN = 256  # of an integer; str() refuses those of thousands of digits

Check = tuple[bool, str, Any, str]  # is it right, the argument, what was given, what it must do


def whole(value: Any) -> int | None:
    """`value` as an int if it is a whole number of any library (`operator.index`); None for all else, booleans too.

    Every argument that is an int is read by this one. An array or tensor without dimensions that holds an integer is
    such a number where its value is known.
    """
    if isinstance(value, int):
        return None if isinstance(value, bool) else int(value)
    if str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def real(value: Any) -> float | None:
    """`value` as a float if it is a real number whose value is known; None for all else, booleans too.

    A number of Python or numpy, or an array of any library without dimensions. One that is traced has no value yet, and
    one that asks for a gradient would lose it.
    """
    if hasattr(value, "shape"):
        kind = str(value.dtype).rpartition(".")[2]
        known = not len(value.shape) and kind.startswith(("int", "uint", "float", "bfloat"))
        if not known or getattr(value, "requires_grad", False):
            return None
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # of an int of Python
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def sized(value: Any) -> bool:
    """Whether it is several numbers, not one: an iterable, or an array with dimensions."""
    return len(value.shape) > 0 if hasattr(value, "shape") else isinstance(value, Iterable)


class Wording(NamedTuple):
    """What was given, explained in words."""

    text: str


def describe(value: Any) -> str:
    """What was given, for a message: words as they are, the repr and the type of anything else."""
    return value.text if isinstance(value, Wording) else f"{show(value)} ({type(value).__name__})"


def raise_first(checks: Iterable[Check], describe: Callable[[Any], str] = describe) -> None:
    """Raise ValueError for the first argument that is wrong; each check may rely on the ones before it."""
    for right, name, given, accepted in checks:
        if not right:
            raise ValueError(f"{name} must {accepted}; got {describe(given)}")


class _Short(reprlib.Repr):
    """Looks at no more entries and characters of a value than are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        # Entries of three characters, "1, ", fill what is shown.
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = SHOWN // 3 + 1
        self.maxother = 2**31  # cut below, with its length

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= BITS_SHOWN else f"{'-' * (x < 0)}<integer of {bits} bits>"

    def repr_str(self, x: str | bytes, level: int) -> str:
        return repr(x[: SHOWN + 1])

    repr_bytes = repr_str


_short = _Short()


def show(value: Any) -> str:
    """A short repr on one line, for error messages, with the length of what is cut.

    Of an array that has no short one: its type, shape and dtype.
    """
    try:
        return _shown(value)
    except Exception as error:  # a user's object may have a broken repr; the message must still come out
        return f"<{type(value).__name__}, repr failed: {type(error).__name__}>"


def raised(error: Exception) -> str:
    """What a user's function raised, on one line and cut, for the message of another error."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        return type(error).__name__
    return f"{type(error).__name__}: {text if len(text) <= SAID else text[: SAID - 3] + '...'}"


def _shown(value: Any) -> str:
    text = _short.repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and (len(text) > SHOWN or "\n" in text):
        return f"{type(value).__name__} of shape {tuple(shape)}, dtype {dtype}"
    text = " ".join(text.split())
    size = f"{len(text)} characters"
    if isinstance(value, (str, bytes)):
        size = f"{len(value)} characters"
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        size = f"{len(value)} entries"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}... ({size})"


def integer(name: str, value: Any, *, minimum: int | None = None, otherwise: str = "") -> int:
    """`value` as an int from the minimum to 2**31 - 1; booleans and fractions are refused.

    Args:
        otherwise: what else is accepted, for the message.
    """
    maximum = 2**31 - 1
    bounds = f"an integer of at most {maximum}" if minimum is None else f"an integer in [{minimum}, {maximum}]"
    number = whole(value)
    if number is None or (minimum is not None and number < minimum) or number > maximum:
        raise ValueError(f"{name} must be {bounds}{otherwise}, got {show(value if number is None else number)}")
    return number


def optional_integer(name: str, value: Any, *, minimum: int | None = None, none: str = "unbounded") -> int | None:
    """Like `integer`, but None passes, which means what `none` says."""
    return None if value is None else integer(name, value, minimum=minimum, otherwise=f" or None ({none})")


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
        raise ValueError(f"{wanted}, got {show(value)} ({raised(error)})") from None
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
