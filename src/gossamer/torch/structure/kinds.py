"""What is attended, told by tensors on the device, and by patterns that go by positions alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.patterns import Pattern
from gossamer.patterns.reach import Bounds, Reach
from gossamer.patterns.validate import show
from gossamer.plan.problem import Unsupported
from gossamer.torch.validate import INTEGERS, describe

BLOCKS = (64, 128)  # sizes of blocks that are selected: tiles that every implementation walks
_INTEGERS = "integers: int8, uint8, int16, int32 or int64"


class Rows(NamedTuple):
    """The rows of a call."""

    position: Tensor  # (Bl, 1, Q) int32, Bl 1 or B
    B: int
    H: int
    G: int
    Q: int
    K: int


class Lists(NamedTuple):
    """The key blocks of each query block."""

    indices: Tensor  # (Bl, heads, T, n) int32; heads is 1, G or H
    counts: Tensor | None  # (Bl, heads, T) int32


class Structure(ABC):
    """What `attention` takes as a pattern and is told by tensors: its layout is made on their device in each call.

    It joins others, and patterns of which positions are all that says what a row sees (`Dense`, `Causal`, `Local`, a
    `SlidingWindow` without sinks, and any `&` of them), by `&`.
    """

    rule = Reach()  # of the patterns that it was joined with

    @property
    def terms(self) -> tuple[Structure, ...]:
        """What it was joined of."""
        return (self,)

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it reads."""

    @property
    @abstractmethod
    def static(self) -> tuple[Any, ...]:
        """What tells it from another one with the same tensors."""

    @abstractmethod
    def check(self, rows: Rows) -> None:
        """Raise ValueError unless it fits the inputs."""

    @property
    def block(self) -> int | None:
        """The size of the blocks that are listed; None: none are."""
        return None

    def bounds(self, rows: Rows) -> Bounds | None:
        """The keys of each row, (Bl, 1, Q) int32, both non-decreasing and in [0, K]; None: it tells no bounds."""
        return None

    def lists(self, rows: Rows) -> Lists | None:
        """The blocks of each query block; None: it tells none."""
        return None

    def __and__(self, other: Any) -> Structure:
        if isinstance(other, Structure):
            return Joined((*self.terms, *other.terms), self.rule.both(other.rule))
        if isinstance(other, Pattern):
            return Joined(self.terms, self.rule.both(rule_of(other)))
        return NotImplemented

    __rand__ = __and__

    def __or__(self, other: Any) -> NoReturn:
        raise Unsupported(f"{self!r} joins others by & alone; of a union give a boolean mask")

    __ror__ = __or__

    def __invert__(self) -> NoReturn:
        raise Unsupported(f"{self!r} has no complement; give a boolean mask")


class Joined(Structure):
    """The pairs that several structures and a rule of positions keep."""

    def __init__(self, terms: tuple[Structure, ...], rule: Reach) -> None:
        if sum(isinstance(term, BlockIndices) for term in terms) > 1:
            raise Unsupported("two BlockIndices cannot be joined by &: give the blocks that both list as one")
        self._terms, self.rule = terms, rule

    def __repr__(self) -> str:
        return " & ".join([*map(repr, self._terms), *[str(self.rule)] * (self.rule != Reach())])

    @property
    def terms(self) -> tuple[Structure, ...]:
        return self._terms

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for term in self._terms for x in term.tensors)

    @property
    def static(self) -> tuple[Any, ...]:
        return (*(term.static for term in self._terms), self.rule)

    @property
    def block(self) -> int | None:
        for term in self._terms:
            if term.block is not None:
                return term.block
        return None

    def check(self, rows: Rows) -> None:
        for term in self._terms:
            term.check(rows)

    def bounds(self, rows: Rows) -> Bounds | None:
        found = [both for both in [term.bounds(rows) for term in self._terms] if both is not None]
        if self.rule != Reach():
            found.append(self.rule.bounds(rows.position, rows.K))
        if not found:
            return None
        lo, hi = found[0]
        for more_lo, more_hi in found[1:]:
            lo, hi = torch.maximum(lo, more_lo), torch.minimum(hi, more_hi)
        return Bounds(lo, hi)

    def lists(self, rows: Rows) -> Lists | None:
        for term in self._terms:
            found = term.lists(rows)
            if found is not None:
                return found
        return None


class Positions(Structure):
    """A rule of positions alone, of rows whose positions are on the device."""

    def __init__(self, rule: Reach) -> None:
        self.rule = rule

    def __repr__(self) -> str:
        return str(self.rule)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def static(self) -> tuple[Any, ...]:
        return (self.rule,)

    def check(self, rows: Rows) -> None:
        """Nothing can be wrong."""

    def bounds(self, rows: Rows) -> Bounds | None:
        return self.rule.bounds(rows.position, rows.K)


class DocumentIds(Structure):
    """Packed documents whose ids are a tensor on the device, which may change in each call: pairs of one document.

    A document is a run of equal ids: an id that returns later begins another one, while those of `Document`, which is
    made on the host, are the same. Query row r is at position r + q_offset of the ids; rows at positions outside [0, K)
    see nothing.

    `DocumentIds(ids) & Causal()` is packed causal attention. It joins by `&`, in either order, patterns that go by
    positions alone: `Dense`, `Causal`, `Local`, a `SlidingWindow` without sinks, any `&` of them.

    Args:
        ids: (K,), or (B, K) for documents that differ by batch element; a tensor of integers on q's device.

    Raises:
        ValueError: `ids` is no such tensor; `attention` raises where it has not K positions or other batch elements.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
        >>> ids = torch.tensor([4, 4, 4, 0, 0, 7])
        >>> out = gs.attention(q, k, v, gs.DocumentIds(ids) & gs.Causal())
        >>> torch.allclose(out, gs.attention(q, k, v, gs.Document(ids) & gs.Causal()), atol=1e-6)
        True
    """

    def __init__(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.is_nested or ids.dtype not in INTEGERS or ids.ndim not in (1, 2):
            raise ValueError(
                f"ids must be a tensor (K,) or (B, K) of {_INTEGERS}; got {describe(ids)}"
                f"{'' if isinstance(ids, Tensor) else '; gs.Document(ids) takes ids on the host'}"
            )
        self.ids, self.length = ids, ids.shape[-1]
        self.edges: Tensor | None = None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, length: int) -> DocumentIds:
        """Documents [cu_seqlens[n], cu_seqlens[n + 1]) of one packed sequence; documents may be empty.

        Positions before the first entry and from the last one on are in no document: they see nothing, and nothing
        sees them. So a batch of fixed size may end with padding.

        Args:
            cu_seqlens: (documents + 1,) integers on q's device, non-decreasing (not checked: an entry that is less than
                one before it counts as that).
            length: positions, K.

        Raises:
            ValueError: `cu_seqlens` is no such tensor, or `length` no number of positions.

        Examples:
            >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
            >>> packed = gs.DocumentIds.from_cu_seqlens(torch.tensor([0, 2, 5]), 6)
            >>> gs.attention(q, k, v, packed)[0, 0, 5].abs().max().item()  # in no document
            0.0
        """
        check_edges("cu_seqlens", cu_seqlens, least=1)
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 1:
            raise ValueError(f"length must be a number of positions of at least 1; got {describe(length)}")
        made = cls(cu_seqlens)
        made.edges, made.length = cu_seqlens, length
        return made

    def __repr__(self) -> str:
        if self.edges is not None:
            return f"DocumentIds.from_cu_seqlens({tuple(self.edges.shape)}, {self.length})"
        return f"DocumentIds({tuple(self.ids.shape)})"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    @property
    def static(self) -> tuple[Any, ...]:
        return "documents", self.edges is None, self.length

    def check(self, rows: Rows) -> None:
        if self.length != rows.K:
            raise ValueError(f"ids of DocumentIds must have K={rows.K} positions; got {self.length}")
        if self.edges is None and self.ids.ndim == 2 and self.ids.shape[0] not in (1, rows.B):
            raise ValueError(
                f"ids of DocumentIds must be for B={rows.B} batch elements, or one for all; got {describe(self.ids)}"
            )

    def bounds(self, rows: Rows) -> Bounds:
        i, K = rows.position, rows.K
        if self.edges is not None:
            edges = sorted_edges(self.edges, K)
            run, last = torch.searchsorted(edges, i, right=True), len(edges) - 1
            # Before the first entry and behind the last one both are the same entry.
            return Bounds(edges[(run - 1).clamp(0, last)], edges[run.clamp(0, last)])
        ids = self.ids.reshape(-1, K)
        # The number of the document at each position: a document is where its number is.
        number = F.pad(ids.diff() != 0, (1, 0)).cumsum(1, dtype=torch.int32)  # a difference that wraps is not 0 either
        B = max(len(ids), len(i))
        number, i = number.expand(B, -1).contiguous(), i.squeeze(1).expand(B, -1)
        at = number.gather(1, i.clamp(0, K - 1).long())
        lo, hi = (torch.searchsorted(number, at, right=right, out_int32=True) for right in (False, True))
        outside = i.clamp(0, K)
        here = (i >= 0) & (i < K)
        return Bounds(*(torch.where(here, x, outside)[:, None] for x in (lo, hi)))


class BlockIndices(Structure):
    """Key blocks that are chosen on the device: for each query block and head a list of them, in any order.

    Query block t holds the rows [t * block_size, (t + 1) * block_size), key block c the keys likewise: rows count from
    0, whatever `q_offset` is. Entries of -1 are unused, a block that is listed twice counts once, and one that does not
    exist is left out. It joins what `DocumentIds` joins by `&`, and `DocumentIds`.

    Args:
        indices: (B, H, rows, n) int32 or int64 on q's device, rows = ceil(Q / block_size); 1 in the place of B or H is
            shared, and G key heads are those of their query heads. Leading dimensions that q has not may be left out.
        block_size: 64 or 128.
        counts: (B, H, rows) integers, with the leading dimensions of `indices`: only so many entries of a list count.
        check: raise ValueError in `attention` where an entry is no block of the keys and not -1; this reads the
            indices, which waits for the device, and cannot be compiled.

    Raises:
        ValueError: an argument is none of these; `attention` raises where shapes do not fit q and k.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 256, 8) for _ in range(3))
        >>> chosen = torch.tensor([[0, -1], [0, 1], [2, 0], [3, 3]])[None, None]  # for all heads
        >>> out = gs.attention(q, k, v, gs.BlockIndices(chosen) & gs.Causal())
        >>> blocks = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=bool)
        >>> torch.allclose(out, gs.attention(q, k, v, gs.BlockMask(blocks, 64) & gs.Causal()), atol=1e-6)
        True
    """

    def __init__(
        self, indices: Tensor, block_size: int = 64, counts: Tensor | None = None, *, check: bool = False
    ) -> None:
        wide = (torch.int32, torch.int64)
        if not isinstance(indices, Tensor) or indices.is_nested or indices.dtype not in wide or indices.ndim < 2:
            raise ValueError(f"indices must be a tensor (B, H, rows, n) of int32 or int64; got {describe(indices)}")
        if indices.ndim > 4:
            raise ValueError(f"indices must be a tensor (B, H, rows, n), of 4 dimensions; got {describe(indices)}")
        if isinstance(block_size, bool) or block_size not in BLOCKS:
            raise ValueError(f"block_size must be 64 or 128; got {describe(block_size)}")
        if counts is not None:
            right = isinstance(counts, Tensor) and not counts.is_nested and counts.dtype in INTEGERS
            if not right or counts.shape != indices.shape[:-1]:
                raise ValueError(
                    f"counts must be a tensor of {_INTEGERS}, of shape {tuple(indices.shape[:-1])}, as indices have "
                    f"lists; got {describe(counts)}"
                )
        if not isinstance(check, bool):
            raise ValueError(f"check must be True or False; got {describe(check)}")
        self.indices, self.block_size, self.counts, self.checked = indices, block_size, counts, check

    def __repr__(self) -> str:
        return f"BlockIndices({tuple(self.indices.shape)}, {self.block_size})"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.indices,) if self.counts is None else (self.indices, self.counts)

    @property
    def static(self) -> tuple[Any, ...]:
        return "blocks", self.block_size, self.counts is None

    @property
    def block(self) -> int:
        return self.block_size

    def check(self, rows: Rows) -> None:
        B, H, T, _ = self._four().shape
        wanted = -(-rows.Q // self.block_size)
        if B not in (1, rows.B) or H not in (1, rows.G, rows.H) or wanted != T:
            raise ValueError(
                f"indices of BlockIndices must have shape (B, heads, rows, n), B=1 or {rows.B}, heads 1, "
                f"G={rows.G} or H={rows.H}, rows = ceil(Q / {self.block_size}) = {wanted}; got {describe(self.indices)}"
            )
        if self.checked:
            self._check_values(-(-rows.K // self.block_size))

    def _check_values(self, blocks: int) -> None:
        if torch.compiler.is_compiling():
            raise ValueError("check of BlockIndices must be False in a compiled function: it reads the indices")
        wrong = (self.indices < -1) | (self.indices >= blocks)
        if self.counts is not None:
            wrong &= torch.arange(wrong.shape[-1], device=wrong.device) < self.counts[..., None]
        if wrong.any():
            found = next(iter(self.indices[wrong].tolist()))
            raise ValueError(f"indices of BlockIndices must be in [0, {blocks}), or -1 where unused; got {found}")

    def _four(self) -> Tensor:
        shape = self.indices.shape
        return self.indices.reshape((1,) * (4 - len(shape)) + tuple(shape))

    def lists(self, rows: Rows) -> Lists:
        indices, n = self._four(), self.indices.shape[-1]
        counts = None if self.counts is None else narrow(self.counts, 0, n).reshape(indices.shape[:3])
        return Lists(narrow(indices, -1, -(-rows.K // self.block_size)), counts)


class Sequences(Structure):
    """Sequences packed behind one another, of lengths of their own for queries and for keys, aligned at their ends.

    Row r of a sequence of Lq queries and Lk keys is at position r + Lk - Lq among them.

    Args:
        cu_q, cu_k: (sequences + 1,) integers.
        used_k: (sequences,) integers: only so many keys of each are there.
    """

    def __init__(self, cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None, rule: Reach) -> None:
        self.cu_q, self.cu_k, self.used_k, self.rule = cu_q, cu_k, used_k, rule

    def __repr__(self) -> str:
        return f"{len(self.cu_q) - 1} packed sequences"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.cu_q, self.cu_k) if self.used_k is None else (self.cu_q, self.cu_k, self.used_k)

    @property
    def static(self) -> tuple[Any, ...]:
        return "sequences", self.rule

    def check(self, rows: Rows) -> None:
        """`varlen` has checked them."""

    def bounds(self, rows: Rows) -> Bounds:
        Q, K, n = rows.Q, rows.K, len(self.cu_q) - 1
        cu_q, cu_k = sorted_edges(self.cu_q, Q), sorted_edges(self.cu_k, K)
        row = torch.arange(Q, dtype=torch.int32, device=cu_q.device)
        which = torch.searchsorted(cu_q, row, right=True) - 1
        at = which.clamp(0, n - 1)
        length = cu_k.diff()
        if self.used_k is not None:
            length = torch.minimum(length, narrow(self.used_k, 0, K))
        first, keys = cu_k[at], length[at]
        lo, hi = self.rule.bounds(row - cu_q[at + 1] + keys, K)
        lo, hi = torch.minimum(lo, keys) + first, torch.minimum(hi, keys) + first
        behind = torch.where(which < 0, 0, K).to(torch.int32)
        inside = (which >= 0) & (which < n)
        lo, hi = (torch.where(inside, x, behind)[None, None] for x in (lo, hi))
        return Bounds(lo, hi)


def rule_of(pattern: Any) -> Reach:
    """The rule of positions of a pattern; of None that of every pair.

    Raises:
        Unsupported: it has none.
    """
    if pattern is None:
        return Reach()
    if isinstance(pattern, Pattern):
        rule = pattern.device_rule()
        if rule is not None:
            return rule
    what = pattern if isinstance(pattern, Pattern) else Wrong(pattern)
    raise Unsupported(
        f"pattern must go by positions alone where its structure is made on the device: Dense, Causal, Local, a "
        f"SlidingWindow without sinks, or any & of them; {show(what)} has no rule there. Give a boolean mask, or "
        "q_offset as an int and no key_starts"
    )


class Wrong(NamedTuple):
    """What is no pattern, for a message."""

    given: Any

    def __repr__(self) -> str:
        return describe(self.given)


def check_edges(name: str, edges: Any, least: int) -> None:
    """Raise ValueError unless it is a vector of integers, of so many entries at least."""
    right = isinstance(edges, Tensor) and not edges.is_nested and edges.dtype in INTEGERS
    if not right or edges.ndim != 1 or len(edges) < least:
        raise ValueError(
            f"{name} must be a tensor of one dimension of at least {least} entries, {_INTEGERS}; got {describe(edges)}"
        )


def narrow(x: Tensor, least: int, most: int) -> Tensor:
    """Integers of any type as int32, clamped: one that int32 does not hold is not wrapped."""
    return (x if x.dtype == torch.int64 else x.int()).clamp(least, most).int()


def sorted_edges(edges: Tensor, most: int) -> Tensor:
    """(n + 1,) int32 in [0, most], non-decreasing."""
    return narrow(edges, 0, most).cummax(0).values.contiguous()
