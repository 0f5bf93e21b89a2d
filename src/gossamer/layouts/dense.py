"""Between dense boolean matrices and layouts: the slow, plain direction (`expand`), and `from_dense`."""

from __future__ import annotations

import numpy as np

from gossamer.layouts.block import BlockLayout, TileList, Walk, iterate
from gossamer.layouts.build import unique_tiles
from gossamer.patterns.grid import pack_bits, unpack_bits


def expand(walk: Walk) -> np.ndarray:
    """The dense boolean matrix of a numpy walk, (rows, columns) or (Bl, Hl, rows, columns)."""
    walk = walk.on_host()
    br, bc = walk.block_rows, walk.block_columns
    height, width = walk.tiles * br, -(-walk.columns // bc) * bc
    dense = np.zeros((*walk.lead, height, width), dtype=bool)
    columns = np.arange(bc)
    for b, h, t, kind, c, entry in iterate(walk):
        rows = slice(t * br, (t + 1) * br)
        tile = dense[b, h, rows, c * bc : (c + 1) * bc]
        if tile.any():
            raise ValueError(f"layout lists tile ({t}, {c}) of batch element {b}, head {h} more than once")
        if kind == "full":
            if (c + 1) * bc > walk.columns:
                raise ValueError(f"full tile ({t}, {c}) reaches past the last column {walk.columns - 1}")
            tile[:] = True
        elif kind == "interval":
            lo, hi = walk.lo[b, h, rows, None], walk.hi[b, h, rows, None]
            j = c * bc + columns
            tile[: lo.shape[0]] = (j >= lo) & (j < hi)
        else:
            tile[:] = unpack_bits(walk.pool[entry])
            if tile[walk.rows - t * br :].any() or tile[:, walk.columns - c * bc :].any():
                raise ValueError(f"bits tile ({t}, {c}) has bits outside the {walk.rows} x {walk.columns} matrix")
    dense = dense[:, :, : walk.rows, : walk.columns]
    return dense[0, 0] if walk.lead == (1, 1) else dense


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
    return TileList(starts, counts, np.nonzero(listed)[-1].astype(np.int32))
