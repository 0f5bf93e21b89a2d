"""Packed sequences with lengths of their own for queries and for keys, whose edges are tensors on the device."""

from __future__ import annotations

from copy import copy
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.checks import boolean, show
from gossamer.patterns import Pattern
from gossamer.patterns.reach import Bounds, Reach
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import describe, known
from gossamer.torch.structure.base import (
    ONE_BY_ONE,
    UNIONS,
    Edges,
    Sizes,
    Structure,
    is_read,
    narrow,
    rule_of,
    sorted_edges,
    vector_of,
)
from gossamer.torch.structure.pages import Pages


class PackedSequences(Structure):
    """Sequences packed behind one another, each with its own numbers of queries and keys, as `varlen` takes them.

    Sequence n has the query rows [cu_seq_q[n], cu_seq_q[n + 1]) and the keys [cu_seq_k[n], cu_seq_k[n + 1]), aligned at
    the end: row r of Lq, of a sequence with Lk keys, is at position r + Lk - Lq among them, so that with `Causal()` the
    last row sees all keys. Rows that see nothing give 0, and so do those of no sequence.

    `attention` takes it with q (1, H, Q, D), or with layout="bshd" as q (Q, H, D), k (K, G, D) and v (K, G, E);
    `device_layout` makes one layout of it for all layers of a step. Positions are those within a sequence: `q_offset`
    and `alibi_slopes` are refused with it, and a pattern is given here, not joined by `&`. With `pages` k and v
    are those of a cache in pages, and no gradients are computed.

    Args:
        cu_seq_q: (sequences + 1,) integers from 0 to Q that do not decrease: a tensor on q's device, a list or a numpy
            array. What the host has is checked in each call that is not compiled; on a GPU an entry that is less than
            one before it counts as that, one under 0 as 0 and one over Q as Q.
        cu_seq_k: (sequences + 1,) likewise, of keys; None is cu_seq_q.
        seqused_k: (sequences,) integers, likewise given: of each sequence only so many keys are there, from its first
            one on. Lk is then this number, where it is less than the room of the sequence; one under 0 counts as 0.
        pattern: Dense, Causal, Local, SlidingWindow (whose sinks are the first keys of each sequence), any `&` and `|`
            of them, and with pages Dilated and Strided too; None is every key of the sequence.
        pages: `Pages`, of as many sequences, in which k and v lie: cu_seq_k and seqused_k are then None.
        check: raise ValueError for wrong edges on a GPU too; this waits for it, and cannot be compiled.

    Raises:
        ValueError: an argument is none of these; `Unsupported` where the pattern does not go by positions alone.

    Examples:
        >>> q, k, v = torch.randn(7, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
        >>> cu_q, cu_k = torch.tensor([0, 2, 7]), torch.tensor([0, 4, 9])
        >>> packed = gs.PackedSequences(cu_q, cu_k, pattern=gs.Causal())
        >>> shared = gs.device_layout(q, k, v, packed, layout="bshd")
        >>> out = gs.attention(q, k, v, shared, layout="bshd")  # in every layer, with its own q, k and v
        >>> torch.allclose(out, gs.varlen(q, k, v, cu_q, cu_k, pattern=gs.Causal()), atol=1e-6)
        True
        >>> gs.PackedSequences([0, 2, 7], [0, 4, 9], check=True)
        PackedSequences(2)
    """

    own_positions = True

    def __init__(
        self, cu_seq_q: Edges, cu_seq_k: Edges | None = None, *, seqused_k: Edges | None = None,
        pattern: Pattern | None = None, pages: Pages | None = None, check: bool = False,
    ) -> None:  # fmt: skip
        self.cu_seq_q = vector_of("cu_seq_q", cu_seq_q)
        self.pages = pages
        if pages is not None:
            self._check_pages(cu_seq_q, cu_seq_k, seqused_k)
        self.cu_seq_k = self.cu_seq_q if cu_seq_k is None else vector_of("cu_seq_k", cu_seq_k)
        sequences = self.cu_seq_k.shape[0] - 1
        if known(self.cu_seq_q.shape[0] != sequences + 1):
            raise ValueError(
                "cu_seq_q and cu_seq_k must tell of as many sequences; "
                f"got {describe(cu_seq_q)} and {describe(cu_seq_k)}"
            )
        self.seqused_k = None if seqused_k is None else vector_of("seqused_k", seqused_k, sequences)
        self.pattern, self.checked = pattern, boolean("check", check)
        given = {
            "cu_seq_q": cu_seq_q,
            "cu_seq_k": cu_seq_k if cu_seq_k is not None else cu_seq_q,
            "seqused_k": seqused_k,
        }
        self.on_host = {n: getattr(self, n) for n, x in given.items() if x is not None and not isinstance(x, Tensor)}
        steps = "" if pages is None else "Dilated, Strided, "
        self.rule = rule_of(pattern, ONE_BY_ONE, f"Dense, Causal, Local, SlidingWindow, {steps}{UNIONS}")
        if pages is None and any(reach.step > 1 for reach in self.rule.reaches):
            raise Unsupported(f"pattern, {show(pattern)}, has a step, which is not counted in sequences. {ONE_BY_ONE}")

    def _check_pages(self, cu_seq_q: Any, cu_seq_k: Any, seqused_k: Any) -> None:
        if not isinstance(self.pages, Pages):
            raise ValueError(f"pages must be Pages or None; got {describe(self.pages)}")
        for name, x in (("cu_seq_k", cu_seq_k), ("seqused_k", seqused_k)):
            if x is not None:
                raise ValueError(f"{name} must be None with pages, which tell the keys of each; got {describe(x)}")
        if known(self.pages.block_table.shape[0] != self.cu_seq_q.shape[0] - 1):
            raise ValueError(
                "cu_seq_q and pages must tell of as many sequences; "
                f"got {describe(cu_seq_q)} and block_table {describe(self.pages.block_table)}"
            )

    def over_pages(self, device: torch.device, T: int) -> tuple[Tensor, Pages]:
        """cu_seq_q, of T tokens, and the pages, on a device; what the host was given is checked.

        Raises:
            ValueError: edges are wrong, as far as they are read, or a tensor is on another device.
        """
        assert self.pages is not None
        if self.on_host or is_read("PackedSequences", self.checked, self.cu_seq_q):
            self._check_edges("cu_seq_q", "cu_seq_q", T, "T")
        cu_seq_q = self.cu_seq_q.to(device) if self.on_host else self.cu_seq_q
        pages = self.pages.placed(device)
        for name, x in (("cu_seq_q", cu_seq_q), ("block_table", pages.block_table), ("seqused_k", pages.seqused_k)):
            if x.device != device:
                raise ValueError(f"{name} must be on q's device, {device}; got {describe(x)}")
        return cu_seq_q, pages

    def of_head(self, head: int) -> PackedSequences:
        """These sequences over the pages of one key head."""
        assert self.pages is not None
        made = copy(self)
        made.pages = self.pages.of_head(head)
        return made

    def held(self, device: torch.device, T: int) -> PackedSequences:
        """These sequences over pages as they are now, whatever is written to their tensors later."""
        made = copy(self)
        cu_seq_q, pages = self.over_pages(device, T)
        made.cu_seq_q, made.pages, made.on_host = cu_seq_q.clone(), pages.held(), {}
        return made

    def __repr__(self) -> str:
        used = "" if self.seqused_k is None else ", seqused_k"
        used = used if self.pages is None else f", {self.pages!r}"
        rule = "" if self.pattern is None else f", {self.rule}"
        return f"PackedSequences({self.cu_seq_q.shape[0] - 1}{used}{rule})"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        if self.pages is not None:
            return self.cu_seq_q, *self.pages.tensors
        return tuple(x for x in (self.cu_seq_q, self.cu_seq_k, self.seqused_k) if x is not None)

    def check(self, sizes: Sizes, placed: bool = False) -> None:
        """Edges are clamped to the sizes."""
        if self.pages is not None:
            raise Unsupported(f"{self!r}, with pages, is taken by attention, varlen, device_layout and explain alone")

    def check_numbers(self, sizes: Sizes) -> None:
        self._check_edges("cu_seq_q", "cu_seq_q", sizes.Q, "T")
        self._check_edges("cu_seq_k", "cu_seq_k", sizes.K, "S")

    def bounds(self, position: Tensor, sizes: Sizes) -> None:
        """Those of `reached` are within the sequences."""

    def reached(self, reach: Reach, position: Tensor, sizes: Sizes) -> Bounds:
        Q, K, n = sizes.Q, sizes.K, len(self.cu_seq_q) - 1
        if n == 0:
            return Bounds(*[position.new_zeros((1, 1, Q))] * 2)
        cu_q, cu_k = sorted_edges(self.cu_seq_q, Q), sorted_edges(self.cu_seq_k, K)
        row = torch.arange(Q, dtype=torch.int32, device=cu_q.device)
        before, behind = row < cu_q[0], row >= cu_q[n]
        # Rows of no sequence keep nothing, where the nearest row of one begins or ends: no key lies between.
        inner = row.clamp(cu_q[0], cu_q[n] - 1)
        at = (torch.searchsorted(cu_q, inner, right=True) - 1).clamp(0, n - 1)
        length = cu_k.diff()
        if self.seqused_k is not None:
            length = torch.minimum(length, narrow(self.seqused_k, 0, K))
        first, keys = cu_k[at], length[at]
        lo, hi = reach.bounds(inner - cu_q[at + 1] + keys, K)
        lo = torch.minimum(lo, keys) + first
        hi = torch.maximum(lo, torch.minimum(hi, keys) + first)
        return Bounds(torch.where(behind, hi, lo)[None, None], torch.where(before, lo, hi)[None, None])

    def __and__(self, other: Any) -> NoReturn:
        what = repr(other) if isinstance(other, (Structure, Pattern)) else describe(other)
        raise Unsupported(
            f"{self!r} is not joined by &: positions are those within a sequence. Give a pattern that goes by them as "
            f"PackedSequences(..., pattern=); got {what}"
        )

    __rand__ = __and__
