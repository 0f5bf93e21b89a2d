"""The scores of a call, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.visible import Seen, VisibleKeys

# Scores that are held together: 4 MiB in float32. Weights and their terms, in float64 for large supports, take up
# to 150 bytes a score: a call needs at most about 150 MiB beyond its inputs, its results and what it saves.
SCORES_AT_ONCE = 2**20


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
    visible: VisibleKeys

    def keys_of(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The rows of k or v (B G, K, size) that a chunk sees: (n, keys, size)."""
        units = slice(chunk.first // self.group, (chunk.last - 1) // self.group + 1)
        return x[units, chunk.slice] if chunk.slice else x[units][:, chunk.seen.keys]


class Chunk(NamedTuple):
    """Query rows [start, stop) of units [first, last), and the keys that they see."""

    first: int
    last: int
    start: int
    stop: int
    seen: Seen

    @property
    def slice(self) -> slice | None:
        """The keys as one run, where they are."""
        keys: Tensor = self.seen.keys
        first, last = int(keys[0]), int(keys[-1]) + 1
        return slice(first, last) if last - first == len(keys) else None


def operands(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, scale: float, top_k: int | None, visible: VisibleKeys,
    wide: torch.dtype,
) -> Operands:  # fmt: skip
    """The operands of a call of q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E) and alpha (H,) float64.

    Args:
        wide: the type that the call is computed in.
    """
    (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
    R = H // G if visible.shared else 1
    a = (alpha - 1).expand(B, H).reshape(B * H // R, R)
    least, most = (float(x) for x in torch.aminmax(alpha - 1))
    wide_k, wide_v = (x.to(wide).reshape(B * G, K, x.shape[3]).contiguous() for x in (k, v))
    return Operands(
        (q.to(wide) * scale).reshape(B * H // R, R, Q, D), wide_k, wide_v, a, least if least == most else None, H,
        H // G // R, top_k, visible,
    )  # fmt: skip


def chunks(o: Operands) -> Iterator[Chunk]:
    """Chunks that hold each row which sees a key exactly once."""
    U, R, Q, _ = o.q.shape
    for start in range(0, Q, o.visible.block):
        stop = min(Q, start + o.visible.block)
        for unit in range(1 if o.visible.shared else U):
            keys, mask = o.visible.seen(unit // o.heads, unit % o.heads, start, stop)
            if not len(keys):
                continue
            rows = max(1, min(stop - start, SCORES_AT_ONCE // (R * len(keys))))
            many = max(1, SCORES_AT_ONCE // (R * len(keys) * rows))
            for at in range(start, stop, rows):
                end = min(stop, at + rows)
                seen = Seen(keys, None if mask is None else mask[at - start : end - start])
                if not o.visible.shared:
                    yield Chunk(unit, unit + 1, at, end, seen)
                    continue
                for first in range(0, U, many):
                    yield Chunk(first, min(U, first + many), at, end, seen)


def scores(o: Operands, chunk: Chunk) -> Tensor:
    """(n, R, rows, keys), -inf where a row does not see a key."""
    q = o.q[chunk.first : chunk.last, :, chunk.start : chunk.stop]
    s = torch.matmul(q.flatten(1, 2), o.keys_of(o.k, chunk).mT).unflatten(1, q.shape[1:3])
    mask = chunk.seen.mask
    if mask is not None:
        some: Tensor = (~mask.all(0)).nonzero()  # of a causal mask the last few keys
        if len(some):
            part = slice(int(some[0]), int(some[-1]) + 1)
            s[..., part].masked_fill_(~mask[:, part], -torch.inf)
    return s


def row_numbers(o: Operands, chunk: Chunk) -> Tensor:
    """The rows of a chunk, in its order, counted over (B, H, Q)."""
    R, Q = o.q.shape[1:3]
    head = torch.arange(chunk.first * R, chunk.last * R, device=o.q.device)
    return (head[:, None] * Q + torch.arange(chunk.start, chunk.stop, device=o.q.device)).view(-1)


def row_alphas(o: Operands, chunk: Chunk) -> Tensor:
    """alpha - 1 of the rows of a chunk, in its order, float64."""
    return o.a[chunk.first : chunk.last].reshape(-1).repeat_interleave(chunk.stop - chunk.start)
