"""What is attended, told by tensors on the device, and by patterns that go by positions alone: what all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import _C, Tensor

from gossamer.checks import show
from gossamer.memo import Memo
from gossamer.patterns import Pattern
from gossamer.patterns.reach import EVERY_KEY, MOST_REACHES, Bounds, Reach, Rule
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import INTEGERS, describe, instead, known, whole

OF_INTEGERS = "integers: int8, uint8, int16, int32 or int64"
UNIONS = f"any & and | of them, up to {MOST_REACHES} intervals a row"
RULED = f"Dense, Causal, Local, SlidingWindow, Dilated, Strided, Longformer without global tokens, {UNIONS}"
ONE_BY_ONE = (
    "Call attention for each sequence, or give it one boolean mask (Q, K) of all that are packed, False between two"
)
OF_BOTH = "Give attention one boolean mask of the pairs that both keep"


_rules: Memo[Rule] = Memo()

Edges = Tensor | Sequence[int] | np.ndarray  # (n + 1,) integers, as they may be given


class Sizes(NamedTuple):
    """Those of a call."""

    B: int
    H: int
    G: int
    Q: int
    K: int


class Lists(NamedTuple):
    """The key blocks of each query block; blocks of one are keys and queries."""

    indices: Tensor  # (Bl, heads, rows, n) int32 or int64; heads is 1, G or H
    counts: Tensor | None  # (Bl, heads, rows) integers


class Structure(ABC):
    """What `attention` takes as a pattern and is told by tensors: its layout is made on their device in each call.

    Calls that share one take the layout that `device_layout` makes of it once. It joins others, and patterns of which
    positions are all that says what a row sees (`RULED`), by `&`.
    """

    rule = EVERY_KEY  # of the patterns that it was joined with
    own_positions = False  # whether positions are those within its sequences, and no q_offset says them
    checked = False  # whether numbers are checked on a GPU too
    on_host: dict[str, Tensor] | None = None  # vectors that were given as lists or arrays, by their names
    __array_ufunc__ = None  # numpy leaves `&` to the methods below

    @property
    def terms(self) -> tuple[Structure, ...]:
        """What it was joined of."""
        return (self,)

    @property
    def facts(self) -> tuple[Any, ...]:
        """What is said beside its tensors, which tells structures apart."""
        return type(self), len(self.tensors), self.block, self.rule, self.checked

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it reads."""

    def numbers(self, read: int = 0) -> tuple[bytes, ...] | None:
        """All that its tensors hold, where each was given on the host as a list or an array; None otherwise.

        Args:
            read: or where they are plain tensors on a CPU, of up to so many bytes.
        """
        tensors = self.tensors
        given = {id(x) for term in self.terms if term.on_host for x in term.on_host.values()}
        if any(id(x) not in given for x in tensors):
            for x in tensors:
                read -= x.nbytes if x.device.type == "cpu" and type(x) is Tensor else read + 1
            if read < 0:
                return None
        return tuple([x.numpy().tobytes() for x in tensors])

    def placed(self, device: torch.device) -> Structure:
        """This structure with what it was given on the host on a device."""
        moved = [name for name in self.on_host or () if getattr(self, name).device != device]
        if not moved:
            return self
        made = copy(self)
        for name in moved:
            setattr(made, name, getattr(self, name).to(device))
        return made

    @abstractmethod
    def check(self, sizes: Sizes, placed: bool = False) -> None:
        """Raise ValueError unless its tensors fit the sizes of the inputs.

        Args:
            placed: q_offset is given, so that it is clear where the rows are among more positions than keys.
        """

    def check_numbers(self, sizes: Sizes) -> None:
        """Raise ValueError for wrong numbers, where they are read: see `is_read`."""
        for term in self.terms:
            if term is not self:
                term.check_numbers(sizes)

    def _check_edges(self, name: str, label: str, most: int, end: str) -> None:
        """Raise ValueError unless a vector of edges does not decrease, from 0 up to `most`, where it is read.

        Args:
            label: its name in messages, as `end` is that of `most`.
        """
        edges = (self.on_host or {}).get(name, getattr(self, name))
        if is_read(type(self).__name__, self.checked, edges):
            check_ascending(label, edges, most, end)

    @property
    def block(self) -> int | None:
        """The size of the blocks that are listed, 1 where keys are; None: nothing is."""
        return None

    @property
    def list_heads(self) -> int | None:
        """Heads that have lists of their own: 1, G or H; None: nothing is listed."""
        return None

    def bounds(self, position: Tensor, sizes: Sizes) -> Bounds | None:
        """The keys of each row, (Bl, 1, Q) int32, both non-decreasing and in [0, K], but for its rule; None: all.

        Args:
            position: of each row, (Bl, 1, Q) int32, Bl 1 or B.
        """
        return None

    def reached(self, reach: Reach, position: Tensor, sizes: Sizes) -> Bounds:
        """The interval of a reach of its rule, as `bounds`."""
        return reach.bounds(position, sizes.K)

    def lists(self, sizes: Sizes) -> Lists | None:
        """The blocks of each query block; None: it tells none."""
        return None

    def __and__(self, other: Any) -> Structure:
        if isinstance(other, Structure):
            if other.own_positions:
                return other & self  # which is refused
            return Joined((*self.terms, *other.terms), _both(self.rule, other.rule))
        if isinstance(other, Pattern):
            return Joined(self.terms, _narrowed(self.rule, other))
        raise Unsupported(
            f"{self!r} joins by & a pattern that goes by positions, DocumentIds, BlockIndices or Indices; "
            f"got {describe(other)}{instead(other)}. {OF_BOTH}"
        )

    __rand__ = __and__

    def __or__(self, other: Any) -> NoReturn:
        raise Unsupported(f"{self!r} joins others by & alone; of a union give a boolean mask")

    __ror__ = __or__

    def __invert__(self) -> NoReturn:
        raise Unsupported(f"{self!r} has no complement; give a boolean mask")


class Joined(Structure):
    """The pairs that several structures and a rule of positions keep."""

    def __init__(self, terms: tuple[Structure, ...], rule: Rule) -> None:
        if sum(term.block is not None for term in terms) > 1:
            raise Unsupported("two of BlockIndices and Indices cannot be joined by &: give what both list as one")
        self._terms, self.rule = terms, rule
        if self.block is not None and rule.interval is None:
            raise Unsupported(f"{self!r}: lists are joined by & with patterns of one interval of keys alone. {OF_BOTH}")

    def __repr__(self) -> str:
        return " & ".join([*map(repr, self._terms), *[str(self.rule)] * (not self.rule.every)])

    @property
    def terms(self) -> tuple[Structure, ...]:
        return self._terms

    @property
    def facts(self) -> tuple[Any, ...]:
        return *(term.facts for term in self._terms), self.rule

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for term in self._terms for x in term.tensors)

    @property
    def block(self) -> int | None:
        for term in self._terms:
            if term.block is not None:
                return term.block
        return None

    @property
    def list_heads(self) -> int | None:
        for term in self._terms:
            if term.list_heads is not None:
                return term.list_heads
        return None

    def placed(self, device: torch.device) -> Structure:
        return Joined(tuple(term.placed(device) for term in self._terms), self.rule)

    def check(self, sizes: Sizes, placed: bool = False) -> None:
        for term in self._terms:
            term.check(sizes, placed)

    def bounds(self, position: Tensor, sizes: Sizes) -> Bounds | None:
        found = [both for both in [term.bounds(position, sizes) for term in self._terms] if both is not None]
        if not found:
            return None
        lo, hi = found[0]
        for more_lo, more_hi in found[1:]:
            lo, hi = torch.maximum(lo, more_lo), torch.minimum(hi, more_hi)
        return Bounds(lo, hi)

    def lists(self, sizes: Sizes) -> Lists | None:
        for term in self._terms:
            found = term.lists(sizes)
            if found is not None:
                return found
        return None


class Positions(Structure):
    """A rule of positions alone, of rows whose positions are on the device."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __repr__(self) -> str:
        return str(self.rule)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def check(self, sizes: Sizes, placed: bool = False) -> None:
        """Nothing can be wrong."""


def rule_of(pattern: Any, advice: str, ruled: str = RULED) -> Rule:
    """The rule of positions of a pattern; of None that of every pair.

    Args:
        advice: what may be given instead of one that has none, a sentence.
        ruled: patterns that have one.

    Raises:
        Unsupported: it has none.
    """
    if pattern is None:
        return EVERY_KEY
    if isinstance(pattern, Pattern):
        rule = pattern.device_rule()
        if rule is not None:
            return rule
    if not isinstance(pattern, Pattern):
        raise Unsupported(f"pattern, {describe(pattern)}, has no rule there. {advice}")
    raise Unsupported(
        f"pattern must go by positions alone where its structure is made on the device: {ruled}; {show(pattern)} has "
        f"no rule there. {advice}"
    )


def _narrowed(rule: Rule, pattern: Pattern) -> Rule:
    """The rule of the pairs that a pattern keeps too, known by its handle, which stands for no other one ever."""
    if torch.compiler.is_compiling():
        return _both(rule, rule_of(pattern, OF_BOTH))
    key = rule, pattern.handle
    found = _rules.get(key)
    return _rules.put(key, _both(rule, rule_of(pattern, OF_BOTH))) if found is None else found


def _both(one: Rule, other: Rule) -> Rule:
    found = one.both(other)
    if found is None:
        raise Unsupported(f"too many unions are joined by &: {one}, and {other}. {OF_BOTH}")
    return found


def narrow(x: Tensor, least: int, most: int) -> Tensor:
    """Integers of any type as int32, clamped: one that int32 does not hold is not wrapped."""
    return (x if x.dtype == torch.int64 else x.int()).clamp(least, most).int()


def vector_of(name: str, given: Any, entries: int | None = None) -> Tensor:
    """A vector of integers, of a list or a numpy array one on the CPU.

    Args:
        entries: how many; None: at least one.

    Raises:
        ValueError: it is no such vector.
    """
    made = given
    if isinstance(given, (list, tuple)):
        numbers = [whole(x) for x in given]
        if None not in numbers and all(-(2**63) <= x < 2**63 for x in numbers):
            made = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    elif isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        made = torch.from_numpy(given.astype(np.int64))
    right = isinstance(made, Tensor) and not made.is_nested and made.dtype in INTEGERS and made.ndim == 1
    if not right or known(made.shape[0] == 0 if entries is None else made.shape[0] != entries):
        size = "at least one entry" if entries is None else f"shape ({entries},)"
        raise ValueError(
            f"{name} must be a tensor of one dimension of {size}, {OF_INTEGERS}, or a list of integers; "
            f"got {describe(given)}"
        )
    return made


def is_read(name: str, asked: bool, x: Tensor) -> bool:
    """Whether the numbers of a structure are looked at before a call: where that is asked for, and on a CPU.

    Raises:
        ValueError: it is asked for in a compiled function.
    """
    if torch.compiler.is_compiling():
        if asked:
            raise ValueError(f"check of {name} must be False in a compiled function: it reads the numbers")
        return False
    if type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    if _C._len_torch_dispatch_stack() or _C._functorch.peek_interpreter_stack() is not None:
        return False
    return asked or x.device.type == "cpu"


def check_ascending(name: str, edges: Tensor, most: int, end: str) -> None:
    """Raise ValueError unless edges, which are read, do not decrease, from 0 on up to `most`, which is called `end`."""
    numbers = edges.tolist()
    for one, other in pairwise(numbers):
        if other < one:
            raise ValueError(f"{name} must not decrease: sequences would overlap; got {other} behind {one}")
    least, greatest = min(numbers), max(numbers)
    if least < 0 or greatest > most:
        raise ValueError(f"{name} must be in [0, {end}] = [0, {most}]; got {least} to {greatest}")


def sorted_edges(edges: Tensor, most: int) -> Tensor:
    """(n + 1,) int32 in [0, most], non-decreasing."""
    return narrow(edges, 0, most).cummax(0).values.contiguous()
