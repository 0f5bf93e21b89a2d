"""Functions of r^2 that users write: what they are called with, their derivatives, and digests of them.

A function gets r^2 as a `Number`, the functions that it may call as a `Functions`, and its numbers. It runs alike on
arrays of numpy, jax.numpy and torch and, when a kernel is compiled, on the instructions of a pair: `base` has exp, log,
sqrt, sin, cos, tanh and where of that kind. The derivative comes with the value, by the chain rule.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from gossamer.checks import whole

CALLS = ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "abs", "minimum", "maximum", "where")
BRANCHES = (
    "a radial kernel has no branches (if, while, and, or, min, max): xp.where(condition, x, y) chooses, and & and | "
    "join conditions"
)
PLAIN = (bool, int, float, str, bytes, type(None), type(...))


class Result(NamedTuple):
    """The value of a function, and its derivative by r^2 if that was asked for; None stands for 0 in between."""

    value: Any
    slope: Any


class Number:
    """A value, or one at each of some places, and its derivative by r^2, None where nobody asks for it."""

    __array_ufunc__ = None  # numbers of numpy on the left leave the operation to this class
    __array_priority__ = 1000

    def __init__(self, value: Any, slope: Any, base: Any) -> None:
        self.value, self.slope, self.base = value, slope, base

    def _with(self, value: Any, factor: Any) -> Number:
        """A function of this number, and its derivative there."""
        return Number(value, None if self.slope is None else factor() * self.slope, self.base)

    def _other(self, other: Any) -> Result:
        """The operand on the other side of an operator."""
        if isinstance(other, Number):
            return Result(other.value, other.slope)
        if isinstance(other, (bool, np.bool_)) or not isinstance(other, (int, float, np.integer, np.floating)):
            raise TypeError(f"a radial kernel computes with r^2 and numbers; got {type(other).__qualname__}")
        return Result(float(other), None)

    def __add__(self, other: Any) -> Number:
        value, slope = self._other(other)
        return Number(self.value + value, _sum(self.slope, slope), self.base)

    __radd__ = __add__

    def __neg__(self) -> Number:
        return Number(-self.value, None if self.slope is None else -self.slope, self.base)

    def __sub__(self, other: Any) -> Number:
        value, slope = self._other(other)
        return Number(self.value - value, _sum(self.slope, None if slope is None else -slope), self.base)

    def __rsub__(self, other: Any) -> Number:
        return -self + other

    def __mul__(self, other: Any) -> Number:
        value, slope = self._other(other)
        left = None if self.slope is None else self.slope * value
        return Number(self.value * value, _sum(left, None if slope is None else slope * self.value), self.base)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Number:
        return self * other._inverse() if isinstance(other, Number) else self * (1 / self._other(other).value)

    def __rtruediv__(self, other: Any) -> Number:
        return self._inverse() * other

    def _inverse(self) -> Number:
        inverse = 1 / self.value
        return self._with(inverse, lambda: -(inverse * inverse))

    def __pow__(self, n: Any) -> Number:
        given, n = n, whole(n)
        if n is None or abs(n) > 64:
            raise TypeError(
                f"** takes whole numbers of at most 64: for others there are sqrt, exp and log; got {given!r}"
            )
        if n < 0:
            return self._inverse() ** -n
        power: Number | None = None
        square = self
        while n:
            if n % 2:
                power = square if power is None else power * square
            n //= 2
            square = square * square if n else square
        return self * 0 + 1 if power is None else power

    def __lt__(self, other: Any) -> Condition:
        return Condition(self.value < self._other(other).value)

    def __le__(self, other: Any) -> Condition:
        return Condition(self.value <= self._other(other).value)

    def __gt__(self, other: Any) -> Condition:
        return Condition(self.value > self._other(other).value)

    def __ge__(self, other: Any) -> Condition:
        return Condition(self.value >= self._other(other).value)

    def __eq__(self, other: Any) -> Condition:  # type: ignore[override]
        return Condition(self.value == self._other(other).value)

    def __ne__(self, other: Any) -> Condition:  # type: ignore[override]
        return Condition(self.value != self._other(other).value)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError(BRANCHES)

    def __float__(self) -> float:
        raise TypeError(f"a radial kernel computes with numbers by {', '.join(CALLS)} of xp, and by no other functions")

    __int__ = __index__ = __abs__ = __float__


class Condition:
    """A condition on a number, at each place: for `xp.where`."""

    __array_ufunc__ = None

    def __init__(self, value: Any) -> None:
        self.value = value

    def _other(self, other: Any) -> Any:
        if not isinstance(other, Condition):
            raise TypeError(f"conditions of a radial kernel are joined with conditions; got {type(other).__qualname__}")
        return other.value

    def __and__(self, other: Any) -> Condition:
        return Condition(self.value & self._other(other))

    def __or__(self, other: Any) -> Condition:
        return Condition(self.value | self._other(other))

    def __bool__(self) -> bool:
        raise TypeError(BRANCHES)


class Functions:
    """The functions that a function of r^2 may call."""

    def __init__(self, base: Any, like: Number) -> None:
        self._base, self._like = base, like

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a radial kernel may call {', '.join(CALLS)}; got xp.{name}")

    def exp(self, x: Any) -> Number:
        x = self._number(x)
        value = self._base.exp(x.value)
        return x._with(value, lambda: value)

    def log(self, x: Any) -> Number:
        x = self._number(x)
        return x._with(self._base.log(x.value), lambda: 1 / x.value)

    def sqrt(self, x: Any) -> Number:
        x = self._number(x)
        value = self._base.sqrt(x.value)
        return x._with(value, lambda: 0.5 / value)

    def rsqrt(self, x: Any) -> Number:
        x = self._number(x)
        value = 1 / self._base.sqrt(x.value)
        return x._with(value, lambda: -0.5 * value * value * value)

    def sin(self, x: Any) -> Number:
        x = self._number(x)
        return x._with(self._base.sin(x.value), lambda: self._base.cos(x.value))

    def cos(self, x: Any) -> Number:
        x = self._number(x)
        return x._with(self._base.cos(x.value), lambda: -self._base.sin(x.value))

    def tanh(self, x: Any) -> Number:
        x = self._number(x)
        value = self._base.tanh(x.value)
        return x._with(value, lambda: 1 - value * value)

    def abs(self, x: Any) -> Number:
        x = self._number(x)
        return self.where(x < 0, -x, x)

    def minimum(self, x: Any, y: Any) -> Number:
        x = self._number(x)
        return self.where(x < y, x, y)

    def maximum(self, x: Any, y: Any) -> Number:
        x = self._number(x)
        return self.where(x > y, x, y)

    def where(self, condition: Any, x: Any, y: Any) -> Number:
        x, y = self._number(x), self._number(y)
        if isinstance(condition, bool):
            return x if condition else y
        if not isinstance(condition, Condition):
            raise TypeError(f"xp.where takes a comparison first; got {type(condition).__qualname__}")
        chosen = condition.value
        slope = None
        if x.slope is not None or y.slope is not None:
            none = self._like.value * 0
            slopes = (none if n.slope is None else none + n.slope for n in (x, y))
            slope = self._base.where(chosen, *slopes)
        return Number(self._base.where(chosen, x.value, y.value), slope, self._base)

    def _number(self, x: Any) -> Number:
        return x if isinstance(x, Number) else self._like * 0 + x


def result(function: Callable[..., Any], s: Any, base: Any, numbers: Iterable[Any], slope: bool) -> Result:
    """A user's function at s = r^2.

    Args:
        base: see the module.
        numbers: the function's own.
        slope: whether the derivative is asked for.
    """
    plain = Number(s, None, base)
    given = [Number(s * 0 + n if isinstance(n, float) else n, None, base) for n in numbers]
    value = function(Number(s, 1.0 if slope else None, base), Functions(base, plain), *given)
    if not isinstance(value, Number):
        value = plain * 0 + value
    return Result(value.value, s * 0 + (0.0 if value.slope is None else value.slope) if slope else None)


def digest(function: Callable[..., Any]) -> str:
    """The digest of all that a function computes from: its code, its defaults, the numbers and functions that it reads.

    Raises:
        TypeError: it reads something else, whose changes no digest would see.
    """
    return f"{hashlib.sha256(repr(_described(function, 'the function', ())).encode()).hexdigest():.32}"


def _described(thing: Any, name: str, above: tuple[Any, ...]) -> Any:
    if isinstance(thing, (*PLAIN, np.integer, np.floating)):
        return repr(thing)
    if isinstance(thing, (tuple, frozenset)):
        return [_described(part, name, above) for part in thing]
    if isinstance(thing, ModuleType):
        return thing.__name__, str(getattr(thing, "__version__", ""))
    if isinstance(thing, (type, BuiltinFunctionType)):
        return thing.__module__, thing.__qualname__
    if isinstance(thing, CodeType):
        return thing.co_code.hex(), _described(thing.co_consts, name, above), thing.co_names, thing.co_varnames
    if not isinstance(thing, FunctionType):
        raise TypeError(
            f"a radial kernel may read numbers, functions and modules, got {name}, which is of the type "
            f"{type(thing).__qualname__}: give numbers by RadialKernel's own"
        )
    if thing in above:
        return "itself"
    below = (*above, thing)
    read = {name: thing.__globals__.get(name, getattr(builtins, name, None)) for name in _names(thing.__code__)}
    closure = zip(thing.__code__.co_freevars, (cell.cell_contents for cell in thing.__closure__ or ()), strict=True)
    defaults = {str(n): x for n, x in enumerate(thing.__defaults__ or ())} | (thing.__kwdefaults__ or {})
    parts = {**read, **dict(closure), **defaults}
    return _described(thing.__code__, name, below), {
        key: _described(value, key, below) for key, value in sorted(parts.items())
    }


def _sum(x: Any, y: Any) -> Any:
    return x if y is None else y if x is None else x + y


def _names(code: CodeType) -> Iterator[str]:
    """The globals that code and the functions inside of it read."""
    yield from (line.argval for line in dis.get_instructions(code) if line.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
