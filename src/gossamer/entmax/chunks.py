"""The scores of a call, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.visible import VisibleKeys

# Scores that are held together: 4 MiB in float32. Weights and their terms, in float64 for large supports, take up
# to 150 bytes a score: a call needs at most about 150 MiB beyond its inputs, its results and what it saves.
SCORES_AT_ONCE = 2**20
# The bits of -inf as an integer.
MINUS_INF = {torch.float32: (torch.int32, -(2**23)), torch.float64: (torch.int64, -(2**52))}


class Operands(NamedTuple):
    """The tensors of a call in the type that it is computed in, and what each row may see.

    A unit is the heads of a group where all heads see the same keys, else one head; units U, heads of each R.
    """

    q: Tensor  # (U, R, Q, D), times the scale
    k: Tensor  # (B G, K, D)
    v: Tensor  # (B G, K, E)
    a: Tensor  # (U, R) float64, alpha - 1
    same: float | None  # alpha - 1 of all heads, where they have one
    heads: int  # H
    group: int  # units that share a key head
    top_k: int | None
    chunks: Iterable[Chunk]

    def keys_of(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The rows of k or v (B G, K, size) that a chunk sees: (n, keys, size)."""
        units = slice(chunk.first // self.group, (chunk.last - 1) // self.group + 1)
        return x[units, chunk.run] if chunk.run else x[units][:, chunk.keys]


class Chunk(NamedTuple):
    """Query rows [start, stop) of units [first, last), and the keys that they see."""

    first: int
    last: int
    start: int
    stop: int
    keys: Tensor  # (n,) int64, ascending
    run: slice | None  # the same keys, where they are one run
    part: slice  # of the n keys, those that some row does not see and those between
    bits: Tensor | None  # (rows, keys of the part) int32: -1 where a row sees a key, else 0; None: all see all
    rows: Tensor  # (rows of all heads,) int64: their numbers over (B, H, Q)

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self.keys.nbytes + self.rows.nbytes + (0 if self.bits is None else self.bits.nbytes)


def chunks(visible: VisibleKeys, B: int, H: int, G: int, Q: int) -> Iterator[Chunk]:
    """Chunks that hold each row which sees a key exactly once."""
    R = heads_of_a_unit(visible, H, G)
    U = B * H // R
    for start in range(0, Q, visible.block):
        stop = min(Q, start + visible.block)
        for unit in range(1 if visible.shared else U):
            keys, mask = visible.seen(unit // H, unit % H, start, stop)
            if not len(keys):
                continue
            rows = max(1, min(stop - start, SCORES_AT_ONCE // (R * len(keys))))
            many = max(1, SCORES_AT_ONCE // (R * len(keys) * rows))
            for at in range(start, stop, rows):
                end = min(stop, at + rows)
                of_rows = None if mask is None else mask[at - start : end - start]
                units = [(unit, unit + 1)]
                if visible.shared:
                    units = [(first, min(U, first + many)) for first in range(0, U, many)]
                yield from chunks_of(units, at, end, R, Q, keys, of_rows)


def chunks_of(
    units: Sequence[tuple[int, int]], start: int, stop: int, R: int, Q: int, keys: Tensor, mask: Tensor | None
) -> Iterator[Chunk]:
    """The chunks of some rows of units [first, last) that see the same keys."""
    begin, end = int(keys[0]), int(keys[-1]) + 1
    run = slice(begin, end) if end - begin == len(keys) else None
    part, bits = slice(0, 0), None
    if mask is not None:
        some = (~mask.all(0)).nonzero()  # of a causal mask the last few keys
        if len(some):
            part = slice(int(some[0]), int(some[-1]) + 1)
            bits = -mask[:, part].to(torch.int32)
    row = torch.arange(start, stop, device=keys.device)
    for first, last in units:
        head = torch.arange(first * R, last * R, device=keys.device)
        yield Chunk(first, last, start, stop, keys, run, part, bits, (head[:, None] * Q + row).view(-1))


def heads_of_a_unit(visible: VisibleKeys, H: int, G: int) -> int:
    """The heads of each unit."""
    return H // G if visible.shared else 1


def scores(o: Operands, chunk: Chunk) -> Tensor:
    """(n, R, rows, keys), -inf where a row does not see a key."""
    q = o.q[chunk.first : chunk.last, :, chunk.start : chunk.stop]
    s = torch.matmul(q.flatten(1, 2), o.keys_of(o.k, chunk).mT).unflatten(1, q.shape[1:3])
    if chunk.bits is not None:  # arithmetic takes a CPU a twentieth of the time of a mask; that of bits knows no NaN
        whole, hidden = MINUS_INF[s.dtype]
        bits = chunk.bits.to(whole)
        s.view(whole)[..., chunk.part].bitwise_and_(bits).bitwise_or_(~bits & hidden)
    return s


def row_alphas(o: Operands, chunk: Chunk) -> Tensor:
    """alpha - 1 of the rows of a chunk, in its order, float64."""
    return o.a[chunk.first : chunk.last].reshape(-1).repeat_interleave(chunk.stop - chunk.start)
