"""Packed documents, whose edges are tensors on the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.checks import boolean
from gossamer.patterns.reach import Bounds
from gossamer.torch.arguments import INTEGERS, OTHER_LAYOUT, describe, whole
from gossamer.torch.structure.base import (
    OF_INTEGERS,
    Edges,
    Sizes,
    Structure,
    sorted_edges,
    vector_of,
)


class DocumentIds(Structure):
    """Packed documents whose ids are a tensor on the device, which may change in each call: pairs of one document.

    A document is a run of equal ids: an id that returns later begins another one, while those of `Document`, which is
    made on the host, are the same. Query row r is at position r + q_offset of the ids; rows at positions without an
    id see nothing.

    `DocumentIds(ids) & Causal()` is packed causal attention. It joins by `&`, in either order, patterns that go by
    positions alone: `Dense`, `Causal`, `Local`, `SlidingWindow`, `Dilated`, `Strided`, a `Longformer` without global
    tokens, any `&` and `|` of them. Sinks are the first keys of all, not of each document.

    Args:
        ids: (K,), or (B, K) for documents that differ by batch element; a tensor of integers on q's device. Where
            `q_offset` is given there may be more than K: those of queries behind the keys of a cache.

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
                f"ids must be a tensor (K,) or (B, K) of {OF_INTEGERS}; got {describe(ids)}"
                f"{'' if isinstance(ids, Tensor) else '; gs.Document(ids) takes ids on the host'}"
            )
        self.ids, self.length = ids, ids.shape[-1]
        self.by_edges = False  # ids are those where documents begin and end

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Edges, length: int, *, check: bool = False) -> DocumentIds:
        """Documents [cu_seqlens[n], cu_seqlens[n + 1]) of one packed sequence; documents may be empty.

        Positions before the first entry and from the last one on are in no document: they see nothing, and nothing
        sees them. So a batch of fixed size may end with padding.

        Args:
            cu_seqlens: (documents + 1,) integers from 0 to `length` that do not decrease: a tensor on q's device, a
                list or a numpy array. What the host has is checked in each call that is not compiled; on a GPU an entry
                that is less than one before it counts as that, one over `length` as `length`.
            length: positions, K, or more where `q_offset` is given.
            check: raise ValueError for wrong entries on a GPU too; this waits for it, and cannot be compiled.

        Raises:
            ValueError: `cu_seqlens` is no such tensor, or `length` no number of positions.

        Examples:
            >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
            >>> packed = gs.DocumentIds.from_cu_seqlens(torch.tensor([0, 2, 5]), 6)
            >>> gs.attention(q, k, v, packed)[0, 0, 5].abs().max().item()  # in no document
            0.0
        """
        edges = vector_of("cu_seqlens", cu_seqlens)
        positions = whole(length)
        if positions is None or positions < 0:
            raise ValueError(f"length must be a number of positions, at least 0; got {describe(length)}")
        made = cls(edges)
        made.by_edges, made.length, made.checked = True, positions, boolean("check", check)
        made.on_host = None if isinstance(cu_seqlens, Tensor) else {"ids": edges}
        return made

    def __repr__(self) -> str:
        if self.by_edges:
            return f"DocumentIds.from_cu_seqlens({tuple(self.ids.shape)}, {self.length})"
        return f"DocumentIds({tuple(self.ids.shape)})"

    @property
    def facts(self) -> tuple[Any, ...]:
        return *super().facts, self.by_edges, self.length

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    def check(self, sizes: Sizes, placed: bool = False) -> None:
        turned = self.length > sizes.K > 0 and self.length == sizes.G and sizes.Q % sizes.K == 0
        if self.length < sizes.K or (self.length > sizes.K and (turned or not placed)):
            more = ", or more where q_offset says which of them the queries are at"
            other = OTHER_LAYOUT if turned else ""
            raise ValueError(f"ids of DocumentIds must have K={sizes.K} positions{more}; got {self.length}{other}")
        if not self.by_edges and self.ids.ndim == 2 and self.ids.shape[0] not in (1, sizes.B):
            raise ValueError(
                f"ids of DocumentIds must be for B={sizes.B} batch elements, or one for all; got {describe(self.ids)}"
            )

    def check_numbers(self, sizes: Sizes) -> None:
        if self.by_edges:
            self._check_edges("ids", "cu_seqlens", self.length, "length")

    def bounds(self, position: Tensor, sizes: Sizes) -> Bounds:
        lo, hi = self._runs(position, self.length)
        return Bounds(lo, hi) if self.length == sizes.K else Bounds(lo.clamp(max=sizes.K), hi.clamp(max=sizes.K))

    def _runs(self, i: Tensor, K: int) -> Bounds:
        """The document of each position i, of K that there are."""
        if self.by_edges:
            edges = sorted_edges(self.ids, K)
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
