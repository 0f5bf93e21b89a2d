"""`mask_mod(b, h, row, key)` functions, as FlexAttention calls them, of gossamer's patterns and layouts.

A mask function sees query rows, which begin at 0; a pattern sees positions, which begin at `q_offset`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer import patterns
from gossamer.layouts import BlockLayout
from gossamer.patterns.compose import And, Not, Or
from gossamer.patterns.grid import WORD
from gossamer.torch.block_mask import MaskMod

EMPTY, FULL, INTERVAL = -1, -2, -3


def by_formula(p: patterns.Pattern, Q: int, K: int, q_offset: int, device: torch.device) -> MaskMod | None:
    """A mask function that computes a pattern's definition from the indices, or None where none is written."""

    def inner(pattern: patterns.Pattern) -> MaskMod | None:
        return by_formula(pattern, Q, K, q_offset, device)

    p = p.at(0, 0) if p.lead == (1, 1) else p
    # Indices may be 32-bit: what is further away than any key makes no difference, and is not compared with.
    past, ahead = max(0, q_offset + Q - 1), max(0, K - 1 - q_offset)
    apart = max(abs(q_offset) + Q, K) + past + ahead
    match p:
        case patterns.Dense():
            return lambda b, h, r, j: j >= 0
        case patterns.Causal():
            return lambda b, h, r, j: j <= r + q_offset
        case patterns.SlidingWindow():
            return _window(p, q_offset, past, ahead)
        case patterns.Local(block=block):
            block = min(block, apart)
            return lambda b, h, r, j: (r + q_offset) // block == j // block
        case patterns.BlockMask() | patterns.BigBird(causal=False) if p.lead == (1, 1) and q_offset == 0:
            return _block_matrix(p, Q, K, device)
        case patterns.Dilated(left=left, right=right, dilation=d):
            before, after, step = min(left * d, past), min(right * d, ahead), min(d, apart)
            return lambda b, h, r, j: (
                ((r + q_offset - j) % step == 0) & (r + q_offset - j <= before) & (j - r - q_offset <= after)
            )
        case patterns.Strided(stride=stride, local=local):
            near, step = min(local, past), min(stride, apart)
            return lambda b, h, r, j: (
                (j <= r + q_offset) & ((r + q_offset - j <= near) | ((r + q_offset - j) % step == 0))
            )
        case patterns.Document() if p.lead[0] == 1 and q_offset == 0 and Q <= K:
            ids = torch.from_numpy(np.array(p.ids).reshape(-1)).to(device)
            return lambda b, h, r, j: ids[r] == ids[j]
        case And(left=one, right=other):
            return _both(inner(one), inner(other), torch.logical_and)
        case Or(left=one, right=other):
            return _both(inner(one), inner(other), torch.logical_or)
        case Not(pattern=one):
            first = inner(one)
            return None if first is None else lambda b, h, r, j: ~first(b, h, r, j)
    return None


def _both(first: MaskMod | None, second: MaskMod | None, join: Callable[..., Tensor]) -> MaskMod | None:
    if first is None or second is None:
        return None
    return lambda b, h, r, j: join(first(b, h, r, j), second(b, h, r, j))


def _window(p: Any, q_offset: int, past: int, ahead: int) -> MaskMod:
    ends = (p.left, past, ahead), (p.right, ahead, past)
    left, right = (x if x is None else max(min(x, most), -other - 1) for x, most, other in ends)
    sinks = min(p.sinks, ahead + past + 1)

    def mask(b: Tensor, h: Tensor, r: Tensor, j: Tensor) -> Tensor:
        i = r + q_offset
        kept = j >= 0
        if left is not None:
            kept = kept & (j >= i - left)
        if right is not None:
            kept = kept & (j <= i + right)
        if sinks:
            first = j < sinks
            kept = kept | (first & (j <= i) if right is not None and right <= 0 else first)
        return kept

    return mask


def _block_matrix(p: Any, Q: int, K: int, device: torch.device) -> MaskMod:
    block = p.block
    kept = p.keep(np.arange(0, Q, block)[:, None], np.arange(0, K, block)[None, :], Q, K, 0)
    matrix = torch.from_numpy(kept).to(device)
    return lambda b, h, r, j: matrix[r // block, j // block]


def by_lookup(layout: BlockLayout, device: torch.device) -> MaskMod:
    """A mask function that reads a layout: its tile in a map (Bl, Hl, T, C) int32, then bounds or bits.

    Serves every pattern. The tensors it captures take 4 bytes a tile of the whole matrix beside the layout's own.
    """
    rows = layout.rows.on_host()
    block_q, block_kv = rows.block_rows, rows.block_columns
    classes = np.full((*rows.lead, rows.tiles, -(-rows.columns // block_kv)), EMPTY, dtype=np.int32)
    flat = classes.reshape(-1, classes.shape[-1])
    for tiles, value in ((rows.full, FULL), (rows.interval, INTERVAL), (rows.bits, None)):
        row, at = tiles.listed()
        flat[row, tiles.indices[at]] = rows.pool_index[at] if value is None else value
    place = torch.from_numpy(classes).to(device)
    moved = rows.on_device(device)
    # Something to index where there are no interval or no bits tiles.
    lo, hi = (x if x.numel() else x.new_zeros(*rows.lead, rows.rows) for x in (moved.lo, moved.hi))
    # A function that reads the batch element or the head tells them apart: see `depends`.
    place, lo, hi = (x.reshape([n for n in rows.lead if n > 1] + list(x.shape[2:])) for x in (place, lo, hi))
    pool = moved.pool if moved.pool.numel() else moved.pool.new_zeros(1, block_q, block_kv // WORD)

    def mask(b: Tensor, h: Tensor, r: Tensor, j: Tensor) -> Tensor:
        own = [x for x, many in zip((b, h), rows.lead, strict=True) if many > 1]
        at = place[(*own, r // block_q, j // block_kv)]
        word = pool[at.clamp(min=0), r % block_q, j % block_kv // WORD]
        bit = ((word >> (j % WORD)) & 1) == 1
        inside = (j >= lo[(*own, r)]) & (j < hi[(*own, r)])
        return torch.where(at >= 0, bit, (at == FULL) | ((at == INTERVAL) & inside))

    return mask
