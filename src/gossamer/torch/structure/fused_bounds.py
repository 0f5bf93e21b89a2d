"""The bounds of rows by kernels, where a structure is made on a GPU: those of the operations in `inputs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.structure.told import DOCUMENTS, IDS, NOTHING, SEQUENCES
from gossamer.patterns.reach import MOST, Bounds, Reach
from gossamer.plan.arguments import most_offset
from gossamer.torch import device_arrays
from gossamer.torch.fused_structure import kernels
from gossamer.torch.structure.base import Sizes, Structure
from gossamer.torch.structure.documents import DocumentIds
from gossamer.torch.structure.sequences import PackedSequences


class Told(NamedTuple):
    """What says the keys of rows beside their positions, as the operator `row_bounds` takes it."""

    kind: int
    length: int  # positions that have ids or edges
    ids_or_edges: Tensor | None = None
    edges_k: Tensor | None = None
    used: Tensor | None = None


def fused_bounds(
    structure: Structure, sizes: Sizes, q_offset: int | None, vectors: Sequence[Tensor | None], device: torch.device
) -> Callable[[Reach], Bounds] | None:
    """The keys of each row by a reach, (Bl, 1, Q) int32; None where no kernel finds them, or where shapes say them.

    Args:
        vectors: the offset, key_starts and key_lengths.
    """
    if torch.compiler.is_compiling() or any(len(reach.blocks) > 1 for reach in structure.rule.reaches):
        return None
    told = _told(structure, sizes.K)
    if told is None:
        return None
    offset, key_starts, key_lengths = vectors
    offset = None if offset is None else offset.to(device)  # one number may be on the host
    given = [x for x in (told.ids_or_edges, offset, key_starts, key_lengths) if x is not None]
    # What follows from shapes is made once, by operations, and what is recorded keeps it.
    if not given or device_arrays.fused(given[0]) is None:
        return None
    Q, K = sizes.Q, sizes.K
    numbers = Q, K, told.length, K - Q if q_offset is None else q_offset, most_offset(Q, K)
    kind, _, *tensors = told

    def interval(reach: Reach) -> Bounds:
        return kernels.row_bounds(kind, *tensors, offset, key_starts, key_lengths, numbers, reach_numbers(reach, K))

    return interval


def _told(structure: Structure, K: int) -> Told | None:
    """What says its documents or sequences; None where two terms do, or where there is no sequence."""
    terms = [term for term in structure.terms if isinstance(term, (DocumentIds, PackedSequences))]
    if not terms:
        return Told(NOTHING, K)
    term, *others = terms
    if others:
        return None
    if isinstance(term, DocumentIds):
        return Told(DOCUMENTS if term.by_edges else IDS, term.length, term.ids)
    return Told(SEQUENCES, K, term.cu_seq_q, term.cu_seq_k, term.seqused_k) if len(term.cu_seq_q) > 1 else None


def reach_numbers(reach: Reach, K: int) -> tuple[int, ...]:
    """The interval of a reach as kernels take it: numbers of int32 by which they compute `Reach.bounds`."""
    left, right, blocks, first, _ = reach
    lo = (0, 0, 0) if left is None or left >= MOST else _moved(-left, K)
    hi = (0, 0, K) if right is None or right >= MOST else _moved(right + 1, K)
    return (*lo, *hi, K if first is None else min(first, K), *(blocks or (0,)))


def _moved(by: int, K: int) -> tuple[int, int, int]:
    """What a position is clipped by, from below and above, before `by` is added, which gives a number in [0, K]."""
    return max(-by, -MOST), min(K - by, MOST), by
