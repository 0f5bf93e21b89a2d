"""The forward: scores in chunks, the weights of each row's support, and what the backward will read."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.entmax.chunks import Chunk, Operands, row_alphas, scores
from gossamer.entmax.lists import PairLists, PairsOfRows, in_order
from gossamer.entmax.selection import largest, supports
from gossamer.entmax.thresholds import cut, normalised, of_halves

# Rows of which a larger share has weight are multiplied with v as a dense matrix, and rows of so few keys, if no list
# of their pairs is wanted.
DENSE = 0.125
FEW = 1024


class Weights(NamedTuple):
    """The probabilities of the m rows of a chunk."""

    p: Tensor  # (m, c), in the type that the call is computed in
    columns: Tensor | None  # (m, c) int64: which of the chunk's keys; None for all, in order
    counts: Tensor  # (m,) int64: how many are not 0; NaN is one
    normaliser: Tensor  # (m,) float64
    certified: Tensor  # (m,) bool: whether these are the entmax over all keys


class Forward(NamedTuple):
    """The results of a forward."""

    out: Tensor  # (B H Q, E), in the type that the call is computed in
    normaliser: Tensor  # (B H Q,) in that type, inf in rows that see nothing
    support: Tensor  # (B H Q,) int32
    certified: Tensor  # (B H Q,) bool
    lists: PairLists | None


def weights(o: Operands, chunk: Chunk, start: Tensor | None = None) -> Weights:
    """The weights of the rows of a chunk. Normalisers are computed in float64; scores and weights alone are rounded.

    Args:
        start: (m,) the normalisers to begin from, of an earlier pass.
    """
    s = scores(o, chunk).flatten(0, 2)
    if o.same == 0.5 and o.top_k is None and s.dtype == torch.float32 and s.shape[1] <= FEW:
        p, normaliser = of_halves(s, start)
        return Weights(p, None, counted(p, s), normaliser, torch.ones_like(normaliser, dtype=torch.bool))
    a = row_alphas(o, chunk)
    picked = supports(s, a.to(s.dtype), o.same) if o.top_k is None else largest(s, o.top_k)
    if start is None and picked.under is not None:
        start = picked.under.double()
    p, normaliser = normalised(picked.s.double(), a, start, o.same)
    if picked.after is None:
        certified = torch.ones_like(normaliser, dtype=torch.bool)
    else:  # whether the largest score that was left out has no weight in the entmax over all keys
        certified = (picked.after == -torch.inf) | (picked.after.double() <= cut(normaliser, a))
    p = p.to(s.dtype)
    return Weights(p, picked.columns, counted(p, torch.empty_like(p)), normaliser, certified)


def counted(p: Tensor, scratch: Tensor) -> Tensor:
    """The number of weights of each row, of which NaN is one."""
    return torch.ne(p, 0, out=scratch).sum(1).long()  # a type that sums fast


def forward(o: Operands, most_pairs: int) -> Forward:
    """The forward of a call.

    Args:
        most_pairs: the most pairs whose lists are saved for the backward; 0 for none.
    """
    U, R, Q, _ = o.q.shape
    rows, E = U * R * Q, o.v.shape[2]
    out = o.v.new_zeros(rows, E)
    normaliser = out.new_full((rows,), torch.inf)
    support = torch.zeros(rows, dtype=torch.int32, device=out.device)
    certified = torch.ones(rows, dtype=torch.bool, device=out.device)
    parts: list[PairsOfRows] | None = [] if most_pairs else None
    for chunk in o.chunks:
        w, number = weights(o, chunk), chunk.rows
        counts, pairs = w.counts, int(w.counts.sum())
        few = parts is None and w.columns is None and len(chunk.keys) <= FEW
        dense = few or pairs > DENSE * len(number) * len(chunk.keys)
        most_pairs -= pairs
        if most_pairs < 0:
            parts = None
        if parts is not None or not dense:
            column, values = listed(w)
        if parts is not None:
            parts.append(PairsOfRows(number, counts, chunk.keys[column].to(torch.int32), values))
        out[number] = dense_product(o, chunk, w) if dense else listed_product(o, chunk, column, values, counts)
        normaliser[number] = w.normaliser.to(out.dtype)
        support[number], certified[number] = counts.to(torch.int32), w.certified
    return Forward(out, normaliser, support, certified, in_order(parts, rows) if parts else None)


def listed(w: Weights) -> tuple[Tensor, Tensor]:
    """(column, weight) of the pairs with a weight, row by row; columns count the chunk's keys."""
    place = (w.p != 0).view(-1).nonzero().squeeze(1)
    column = place % w.p.shape[1] if w.columns is None else w.columns.reshape(-1)[place]
    return column, w.p.reshape(-1)[place]


def dense_product(o: Operands, chunk: Chunk, w: Weights) -> Tensor:
    """p v of the rows of a chunk, (m, E)."""
    return torch.matmul(matrix(chunk, w).view(chunk.last - chunk.first, -1, len(chunk.keys)),
                        o.keys_of(o.v, chunk)).flatten(0, 1)  # fmt: skip


def matrix(chunk: Chunk, w: Weights) -> Tensor:
    """p of the rows of a chunk over all of its keys, (m, keys)."""
    if w.columns is None:
        return w.p
    # A column may be named again beside a weight of 0.
    return w.p.new_zeros(len(w.p), len(chunk.keys)).scatter_add_(1, w.columns, w.p)


def listed_product(o: Operands, chunk: Chunk, column: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """p v of the rows of a chunk, (m, E), of the pairs in order of rows."""
    B_G, K, E = o.v.shape
    per_unit = len(counts) // (chunk.last - chunk.first)
    unit = torch.arange(chunk.first, chunk.last, device=column.device) // o.group
    key_offsets = (unit * K).repeat_interleave(per_unit).repeat_interleave(counts)
    return bag(o.v.view(B_G * K, E), chunk.keys[column] + key_offsets, values, counts)


def bag(x: Tensor, index: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """(m, size): row r is the sum of values * x[index] over its `counts[r]` entries, one row behind the other."""
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return F.embedding_bag(index, x, ends, mode="sum", per_sample_weights=values, include_last_offset=True)
