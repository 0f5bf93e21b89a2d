"""A mask function of transformers, read: called with symbols in place of positions, it says which pairs it keeps.

`mask_function(b, h, q, kv)` compares positions, takes their distances, and looks up tensors at them. Of symbols these
operations make conditions (`Pairs`). No closure is opened and no value is read, so a compiler follows it. What cannot
be said by symbols raises `Unreadable`. What was read is checked against the function (`certificate`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MaskFunction = Callable[..., Any]

FAR = 2**31 - 1  # over every distance that there is


class Unreadable(ValueError):
    """A mask function does with positions what has no symbol, or no pattern."""


class Span(NamedTuple):
    """Distances first <= kv - q <= last."""

    first: int
    last: int


class Same(NamedTuple):
    """Pairs whose query and key have one value: ids of documents, or numbers of chunks.

    The value of position p is values[b, p], or values[b, at[b, p]]; without values (p - shift[b]) // block, or of
    at[b, p] in place of p.
    """

    values: Tensor | None  # (1 or B, positions) integers
    at: Tensor | None = None  # (1 or B, positions) integers: packed positions, which count anew in each document
    shift: Tensor | None = None  # (1 or B,) integers
    block: int = 1


class Keys(NamedTuple):
    """Pairs whose key has a true value: values[b, kv], or values[b, at[b, kv]]."""

    values: Tensor  # (1 or B, positions) booleans
    at: Tensor | None = None


class Rows(NamedTuple):
    """Pairs whose query has a value of at least 0: the tokens of images."""

    values: Tensor  # (1 or B, positions) integers
    at: Tensor | None = None


class Pairs:
    """The pairs that meet all of some conditions.

    Args:
        spans: their distances, as intervals in order that do not touch; none where no pair is kept.
        same, keys, rows: conditions of tensors.
        either: pairs of which each keeps one or more of the two.
        packed: position tensors that distances were counted by. They are those of absolute positions where the
            documents that other conditions keep apart are.
    """

    device = None  # what transformers moves results of mask functions to

    def __init__(
        self, spans: tuple[Span, ...] = (Span(-FAR, FAR),), same: tuple[Same, ...] = (), keys: tuple[Keys, ...] = (),
        rows: tuple[Rows, ...] = (), either: tuple[tuple[Pairs, Pairs], ...] = (), packed: tuple[Tensor, ...] = (),
    ) -> None:  # fmt: skip
        self.spans, self.same, self.keys, self.rows = spans, same, keys, rows
        self.either, self.packed = either, packed

    __hash__ = None  # type: ignore[assignment]

    def to(self, *device: Any) -> Pairs:
        """The value itself."""
        return self

    def __bool__(self) -> bool:
        raise Unreadable("it asks whether a condition holds")

    @property
    def by_distance(self) -> bool:
        """Whether distances alone say what is kept."""
        return len(self.same) + len(self.keys) + len(self.rows) + len(self.either) == 0

    def __and__(self, other: Any) -> Pairs:
        if not isinstance(other, Pairs):
            raise Unreadable("it joins a condition with something else")
        spans = [
            Span(max(a.first, b.first), min(a.last, b.last)) for a in self.spans for b in other.spans
        ]  # of those that follow one another
        return Pairs(
            joined(spans), self.same + other.same, self.keys + other.keys, self.rows + other.rows,
            self.either + other.either, self.packed + other.packed,
        )  # fmt: skip

    def __or__(self, other: Any) -> Pairs:
        if not isinstance(other, Pairs):
            raise Unreadable("it joins a condition with something else")
        for one, more in ((self, other), (other, self)):
            if (one.by_distance and one.spans == EVERY.spans) or len(more.spans) == 0:
                return one
        if self.by_distance and other.by_distance:
            return Pairs(joined([*self.spans, *other.spans]), packed=self.packed + other.packed)
        return Pairs(either=((self, other),))


def joined(spans: list[Span]) -> tuple[Span, ...]:
    """The distances of any of some spans, in order, those that touch as one."""
    merged: list[Span] = []
    for span in sorted(span for span in spans if span.first <= span.last):
        if merged and span.first <= merged[-1].last + 1:
            merged[-1] = Span(merged[-1].first, max(merged[-1].last, span.last))
        else:
            merged.append(span)
    return tuple(merged)


EVERY = Pairs()
NOTHING = Pairs(())


class Distance:
    """sign * (kv - q) + by, of absolute positions, or of packed ones."""

    def __init__(self, sign: int, by: int, packed: tuple[Tensor, ...]) -> None:
        self.sign, self.by, self.packed = sign, by, packed

    __hash__ = None  # type: ignore[assignment]

    def within(self, least: int | None, most: int | None) -> Pairs:
        """Pairs for which it is in [least, most]; None is unbounded."""
        low = -FAR if least is None else max(least - self.by, -FAR)
        high = FAR if most is None else min(most - self.by, FAR)
        span = Span(low, high) if self.sign > 0 else Span(-high, -low)
        return Pairs(joined([span]), packed=self.packed)

    def __lt__(self, other: Any) -> Pairs:
        return self.within(None, number(other) - 1)

    def __le__(self, other: Any) -> Pairs:
        return self.within(None, number(other))

    def __gt__(self, other: Any) -> Pairs:
        return self.within(number(other) + 1, None)

    def __ge__(self, other: Any) -> Pairs:
        return self.within(number(other), None)

    def __eq__(self, other: Any) -> Pairs:  # type: ignore[override]
        return self.within(number(other), number(other))

    def __ne__(self, other: Any) -> Pairs:  # type: ignore[override]
        return (self < other) | (self > other)

    def __neg__(self) -> Distance:
        return Distance(-self.sign, -self.by, self.packed)

    def __abs__(self) -> Magnitude:
        return Magnitude(self)

    def __bool__(self) -> bool:
        raise Unreadable("it asks whether a distance is 0")


class Magnitude:
    """|distance|."""

    def __init__(self, distance: Distance) -> None:
        self.distance = distance

    def __lt__(self, other: Any) -> Pairs:
        return self <= number(other) - 1

    def __le__(self, other: Any) -> Pairs:
        return self.distance.within(-number(other), number(other))


class OfBatch(NamedTuple):
    """values[b]."""

    values: Tensor


class Index:
    """A position of queries or of keys, or the value that a tensor has there.

    Args:
        axis: "b", "h", "q" or "kv".
        values: it is values[b, position].
        at: the position, in packed sequences: at[b, absolute position].
        by, shift, block: it is (that + by - shift[b]) // block.
    """

    def __init__(
        self, axis: str, values: Tensor | None = None, at: Tensor | None = None, by: int = 0,
        shift: Tensor | None = None, block: int | None = None,
    ) -> None:  # fmt: skip
        self.axis, self.values, self.at, self.by, self.shift, self.block = axis, values, at, by, shift, block

    __hash__ = None  # type: ignore[assignment]

    def new_ones(self, shape: Any, dtype: Any = None) -> Pairs:
        """The mask with which transformers begins an intersection."""
        return EVERY

    def new_zeros(self, shape: Any, dtype: Any = None) -> Pairs:
        """The mask with which transformers begins a union."""
        return NOTHING

    def __bool__(self) -> bool:
        raise Unreadable("it asks whether a position is 0")

    def looked_up(self, values: Tensor) -> Any:
        """values[b, this]."""
        here = self.position()
        if here.by or here.shift is not None or here.block is not None or values.ndim != 2:
            raise Unreadable("it looks up a tensor at other positions")
        if values.dtype != torch.bool:
            return Index(self.axis, values, here.at)
        if self.axis != "kv":
            raise Unreadable("it looks up a condition of queries")
        return Pairs(keys=(Keys(values, here.at),))

    def position(self) -> Index:
        """This as a position: a value that is used as one is that of packed sequences."""
        if self.axis not in ("q", "kv"):
            raise Unreadable("it reads numbers of batch elements or heads")
        if self.values is None:
            return self
        if self.at is not None:
            raise Unreadable("it looks up positions twice")
        return Index(self.axis, None, self.values, self.by, self.shift, self.block)

    def moved(self, by: int) -> Index:
        """by further."""
        here = self.position()
        if here.block is not None:
            raise Unreadable("it moves chunks")
        return Index(here.axis, None, here.at, here.by + by, here.shift)

    def __add__(self, other: Any) -> Index:
        return self.moved(number(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Index):
            return self.distance(other)
        here = self.position()
        if not isinstance(other, OfBatch):
            return here.moved(-number(other))
        if here.by or here.shift is not None or here.block is not None:
            raise Unreadable("it moves positions of batch elements")
        return Index(here.axis, None, here.at, 0, other.values)

    def __floordiv__(self, other: Any) -> Index:
        here, block = self.position(), number(other)
        if here.by or here.block is not None or block < 1:
            raise Unreadable("it divides positions")
        return Index(here.axis, None, here.at, 0, here.shift, block)

    def distance(self, other: Any) -> Distance:
        """This minus another."""
        if not isinstance(other, Index):
            raise Unreadable("it compares positions with something else")
        one, two = self.position(), other.position()
        if one.axis == two.axis or one.at is not two.at or one.shift is not two.shift:
            raise Unreadable("it compares other numbers than those of a query and a key")
        if one.block is not None or two.block is not None:
            raise Unreadable("it compares chunks")
        return Distance(1 if one.axis == "kv" else -1, one.by - two.by, () if one.at is None else (one.at,))

    def __lt__(self, other: Any) -> Pairs:
        return self.distance(other) < 0

    def __le__(self, other: Any) -> Pairs:
        return self.distance(other) <= 0

    def __gt__(self, other: Any) -> Pairs:
        return self.distance(other) > 0

    def __ge__(self, other: Any) -> Pairs:
        if isinstance(other, Index):
            return self.distance(other) >= 0
        if number(other) != 0 or self.by or self.shift is not None or self.block is not None:
            raise Unreadable("it compares positions with a number")
        if self.values is None:
            return EVERY  # no position is negative
        if self.axis != "q":
            raise Unreadable("it compares values of keys with a number")
        return Pairs(rows=(Rows(self.values, self.at),))

    def __eq__(self, other: Any) -> Pairs:  # type: ignore[override]
        if not isinstance(other, Index) or {self.axis, other.axis} != {"q", "kv"}:
            raise Unreadable("it compares other numbers than those of a query and a key")
        if self.values is None and self.block is None:
            return self.distance(other) == 0
        alike = self.values is other.values and self.at is other.at and self.shift is other.shift
        if not alike or self.by != other.by or self.block != other.block:
            raise Unreadable("it compares two tensors")
        return Pairs(same=(Same(self.values, self.at, self.shift, self.block or 1),))

    def __ne__(self, other: Any) -> Pairs:  # type: ignore[override]
        raise Unreadable("it keeps pairs whose values differ")


def number(value: Any) -> int:
    """A number of the configuration."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Unreadable("it computes with something that is no integer")


class _Symbolic(TorchFunctionMode):
    """Tensors that are looked up at symbols, and constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and isinstance(args[0], bool):
            return EVERY if args[0] else NOTHING
        if func is Tensor.__getitem__:
            values, index = args
            if isinstance(index, Index) and index.axis == "b" and values.ndim == 1:
                return OfBatch(values)
            if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], Index):
                if not isinstance(index[0], Index) or index[0].axis != "b":
                    raise Unreadable("it looks up a tensor at other positions")
                return index[1].looked_up(values)
        for x in args:
            if isinstance(x, (Index, Distance, Magnitude, Pairs, OfBatch)):
                raise Unreadable("it computes with positions by a function of torch")
        return func(*args, **(kwargs or {}))


def read(fn: MaskFunction) -> Pairs:
    """The pairs that a mask function keeps.

    Raises:
        Unreadable: symbols do not say.
    """
    with _Symbolic():
        kept = fn(Index("b"), Index("h"), Index("q"), Index("kv"))
    if not isinstance(kept, Pairs):
        raise Unreadable("it gives something else than a condition")
    return kept
