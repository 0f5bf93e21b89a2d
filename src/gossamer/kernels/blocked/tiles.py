"""The parts that both directions share: padded inputs, scratch, the tiles of one piece, and their masked scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.blocked.batches import Batch, BatchPlan, Piece
from gossamer.kernels.contract import Terms
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.plan.problem import Problem

# Scores are in units of ln 2: torch's exp is ten times slower than exp2 on the -inf of a masked pair (on a CPU).
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


class Scratch:
    """Named buffers that grow to the largest batch and are used again by every other."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor of `shape`; what `name` held before is lost."""
        size = 1
        for n in shape:
            size *= n
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size)
        return buffer[:size].view(shape)


class Tiled(NamedTuple):
    """A (B, heads, positions, features) tensor, padded to whole tiles, for both ways to batch."""

    flat: Tensor  # (B * heads * tiles, edge, features)
    heads: int
    tiles: int
    edge: int

    def of(self, b: int, h: int) -> Tensor:
        """(tiles, edge, features) of one batch element and head."""
        at = (b * self.heads + h) * self.tiles
        return self.flat[at : at + self.tiles]

    def positions(self, count: int) -> Tensor:
        """(B, heads, count, features), without the padding; a view."""
        return self.flat.view(-1, self.heads, self.tiles * self.edge, self.flat.shape[-1])[:, :, :count]

    def untiled(self, positions: int, dtype: torch.dtype) -> Tensor:
        """Back to (B, heads, positions, features), without the padding."""
        return self.positions(positions).to(dtype).contiguous()


def tile(x: Tensor, tiles: int, edge: int, padding: float = 0.0) -> Tiled:
    """`x` (B, heads, positions, features) in the compute dtype and whole tiles; a copy only where needed."""
    B, heads, positions, size = x.shape
    x = x.to(compute_dtype(x.dtype))
    if positions != tiles * edge:
        x = torch.nn.functional.pad(x, (0, 0, 0, tiles * edge - positions), value=padding)
    return Tiled(x.contiguous().view(B * heads * tiles, edge, size), heads, tiles, edge)


def zeros(problem: Problem, heads: int, tiles: int, edge: int, size: int, like: Tensor) -> Tiled:
    """(B, heads, tiles * edge, size) of zeros in whole tiles."""
    return Tiled(like.new_zeros(problem.B * heads * tiles, edge, size), heads, tiles, edge)


class Where(NamedTuple):
    """One use of a batch: a (batch element, head) of a view, or all of a gather at once."""

    b: int
    h: int


def uses(batch: Batch) -> list[Where]:
    """How often a batch runs: once for a gather, once for each head of a view."""
    return [Where(0, 0)] if batch.index is not None else [Where(b, h) for b, h in batch.heads]


def rows_of(x: Tiled, batch: Batch, where: Where) -> Tensor:
    """(n, edge, features): the query tiles of a batch."""
    if batch.index is not None:
        return x.flat.index_select(0, batch.index)
    return x.of(where.b, where.h)[batch.first : batch.first + batch.n]


def keys_of(x: Tiled, batch: Batch, piece: Piece, where: Where, group: int, scratch: Scratch, name: str) -> Tensor:
    """(n, tiles * edge, features): the key tiles of a piece, as a view wherever the lists are consecutive."""
    edge, size = x.edge, x.flat.shape[-1]
    if piece.index is not None:
        out = scratch.take(name, piece.index.numel(), edge, size)
        torch.index_select(x.flat, 0, piece.index.view(-1), out=out)
        return out.view(batch.n, piece.tiles * edge, size)
    start = ((where.b * x.heads + where.h // group) * x.tiles + piece.first) * edge * size
    shape = (batch.n, piece.tiles * edge, size)
    return x.flat.as_strided(shape, (piece.step * edge * size, size, 1), start + x.flat.storage_offset())


def store(x: Tiled, batch: Batch, where: Where, value: Tensor) -> None:
    """Write (n, edge, features) to the query tiles of a batch; no tile belongs to two batches."""
    if batch.index is not None:
        x.flat[batch.index] = value
    else:
        rows_of(x, batch, where).copy_(value)


def add(x: Tiled, batch: Batch, piece: Piece, where: Where, group: int, share: Tensor) -> None:
    """Add (n, tiles * edge, features) to the key tiles of a piece, always in the same order."""
    share = share.view(batch.n, piece.tiles, x.edge, -1)
    if piece.index is not None:
        index, share = piece.index.view(-1), share.flatten(0, 1)
        if share.is_cuda:  # sorted by index, where the additions of index_add_ are atomic
            x.flat.index_put_((index,), share, accumulate=True)
        else:
            x.flat.index_add_(0, index, share)
        return
    mine = x.of(where.b, where.h // group)
    if piece.step == 0:
        mine[piece.first : piece.first + piece.tiles].add_(share.sum(0) if batch.n > 1 else share[0])
        return
    # Slot by slot, so that no addition meets the same key tile twice.
    reach = (batch.n - 1) * piece.step + 1
    for slot in range(piece.tiles):
        first = piece.first + slot
        mine[first : first + reach : piece.step].add_(share[:, slot])


class Scorer:
    """Masked scores of a piece: scale, softcap, alibi, key lengths, and the masks of partial tiles."""

    def __init__(self, problem: Problem, plan: BatchPlan, terms: Terms, block_q: int, block_kv: int, scratch: Scratch):
        self.p, self.plan, self.terms = problem, plan, terms
        self.block_q, self.block_kv, self.scratch = block_q, block_kv, scratch
        self.group = problem.H // problem.G

    def __call__(
        self, q: Tensor, k: Tensor, batch: Batch, piece: Piece, where: Where, keep_tanh: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(scores * LOG2E (n, block_q, tiles * block_kv), tanh(s / softcap) or None)."""
        n, width = batch.n, piece.tiles * self.block_kv
        cap = self.terms.softcap
        s = self.scratch.take("scores", n, self.block_q, width)
        alpha = self.terms.scale * (LOG2E if cap is None else 1 / cap)
        torch.baddbmm(s, q, k.mT, beta=0, alpha=alpha, out=s)
        tanh = None
        if cap is not None:
            s.tanh_()
            if keep_tanh:
                tanh = self.scratch.take("tanh", n, self.block_q, width).copy_(s)
            s.mul_(cap * LOG2E)
        if self.terms.alibi_slopes is not None or self.terms.key_lengths is not None:
            self._by_position(s, batch, piece, where)
        tiles = s.view(n, self.block_q, piece.tiles, self.block_kv)
        for first, end, ids in piece.masks:
            tiles[:, :, first:end].masked_fill_(self.plan.masks.dropped(ids).transpose(1, 2), -torch.inf)
        return s, tanh

    def _by_position(self, s: Tensor, batch: Batch, piece: Piece, where: Where) -> None:
        device, edge = s.device, torch.arange(self.block_kv, device=s.device)
        if batch.index is not None and piece.index is not None:
            head = torch.div(batch.index, self.plan.query_tiles, rounding_mode="floor")
            row_tile, key_tile = batch.index % self.plan.query_tiles, piece.index % self.plan.key_tiles
            b, h = torch.div(head, self.p.H, rounding_mode="floor"), head % self.p.H
        else:
            i = torch.arange(batch.n, device=device)
            row_tile = batch.first + i
            key_tile = piece.first + i[:, None] * piece.step + torch.arange(piece.tiles, device=device)
            b, h = torch.tensor([where.b], device=device), torch.tensor([where.h], device=device)
        j = (key_tile[:, :, None] * self.block_kv + edge).flatten(1)
        if self.terms.alibi_slopes is not None:
            rows = torch.arange(self.block_q, device=device)
            i = row_tile[:, None] * self.block_q + rows + self.terms.q_offset
            distance = (j[:, None, :] - i[:, :, None]).to(s.dtype)
            distance = distance.abs_().neg_() if self.terms.absolute else distance
            slopes = self.terms.alibi_slopes.to(s).expand(self.p.B, self.p.H)[b, h]
            s.addcmul_(distance, slopes[:, None, None], value=LOG2E)
        if self.terms.key_lengths is not None:
            s.masked_fill_((j >= self.terms.key_lengths.to(device)[b][:, None])[:, None, :], -torch.inf)
