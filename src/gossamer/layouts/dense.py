"""Layouts from dense boolean matrices."""

from __future__ import annotations

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import TileList, Walk
from gossamer.patterns.grid import pack_bits
from gossamer.patterns.tiles import unique_tiles


def from_dense(mask: np.ndarray, *, block_q: int, block_kv: int) -> BlockLayout:
    """A layout of full and bits tiles from a dense boolean matrix (Q, K) or (Bl, Hl, Q, K)."""
    mask = np.asarray(mask, dtype=bool)
    mask = mask.reshape((1, 1, *mask.shape)) if mask.ndim == 2 else mask
    bl, hl, q, k = mask.shape
    nq, nk = -(-q // block_q), -(-k // block_kv)
    padded = np.zeros((bl, hl, nq * block_q, nk * block_kv), dtype=bool)
    padded[:, :, :q, :k] = mask
    tiles = padded.reshape(bl, hl, nq, block_q, nk, block_kv).swapaxes(3, 4)
    kept = tiles.sum(axis=(-1, -2))
    height = np.minimum(block_q, q - block_q * np.arange(nq))[:, None]
    fits = (np.arange(1, nk + 1) * block_kv <= k)[None, :]
    full = (kept == height * block_kv) & fits
    bits = (kept > 0) & ~full
    pool, pool_index = unique_tiles(pack_bits(tiles[bits]))
    none = np.zeros((1, 1, 0), dtype=np.int32)
    walk = Walk(
        q, k, block_q, block_kv,
        full=list_tiles(full), interval=list_tiles(np.zeros_like(full)), bits=list_tiles(bits),
        lo=none, hi=none,
        pool_index=pool_index.astype(np.int32),
        pool=pool,
    )  # fmt: skip
    return BlockLayout(walk)


def list_tiles(listed: np.ndarray) -> TileList:
    """A boolean tile matrix (Bl, Hl, T, C) as a TileList."""
    counts = listed.sum(axis=-1).astype(np.int32)
    ends = np.cumsum(counts.reshape(-1), dtype=np.int64)
    starts = (ends.reshape(counts.shape) - counts).astype(np.int32)
    *_, columns = np.nonzero(listed)
    return TileList(starts, counts, columns.astype(np.int32))
