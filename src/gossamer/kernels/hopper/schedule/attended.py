"""What of the tiles of a layout is attended: what is not is cleared by kernels that look for it."""

from __future__ import annotations

import numpy as np

from gossamer.cute.configurations import Clears
from gossamer.kernels.arrays import Array, placed
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.kept import every_row_kept, rows_kept
from gossamer.memo import Memos

_known: Memos[bool] = Memos()  # of walks
_words: Memos[Array] = Memos()


def clears(layout: BlockLayout, backward: bool = False) -> Clears:
    """What kernels of a layout have to look for.

    backward: queries too, which matter to the gradients of keys alone.
    """
    if (layout.host or layout).rows.device is not None:
        return Clears.INTERVALS
    if not keys_kept(layout):
        return Clears.KEYS
    return Clears.QUERIES if backward and not queries_kept(layout) else Clears.NOTHING


def keys_kept(layout: BlockLayout) -> bool:
    """Whether every key of the tiles that are listed is attended, of a layout that the host knows."""
    walk = (layout.host or layout).rows

    def made() -> bool:
        if walk.bits.counts.any():
            return every_row_kept((layout.host or layout).columns, listed=True)
        if not walk.interval.counts.any():
            return True
        # Bounds ascend: no key lies before the first interval, between two, or behind the last.
        lo, hi = walk.lo, walk.hi
        ends = (lo.min(-1) == 0) & (hi.max(-1) == walk.columns)
        return bool(ends.all() and (lo <= np.roll(hi, 1, -1)).all())

    return _known.of(walk).get_or_make("keys", made)


def queries_kept(layout: BlockLayout) -> bool:
    """Whether every query of the tiles that are listed keeps a key, of a layout that the host knows."""
    walk = (layout.host or layout).rows
    return _known.of(walk).get_or_make("queries", lambda: every_row_kept(walk, listed=True))


def with_attended(layout: BlockLayout, pool: Array, width: int) -> Array:
    """A pool, and behind it a bit for each key that is attended, where a kernel looks for such.

    A row for each tile of keys of each lead, in the reverse order: the last row is the first tile's.
    """
    host = layout.host or layout
    if host.rows.device is not None or keys_kept(layout):
        return pool

    def made() -> Array:
        walk = host.columns
        every = rows_kept(walk)
        past = np.arange(walk.tiles * walk.block_rows).reshape(walk.tiles, -1) >= walk.rows
        every = every.reshape(-1, *past.shape) | past  # what is past the last key is zero in any case
        packed = np.packbits(every.reshape(-1, walk.block_rows), axis=1, bitorder="little").view(np.int32)
        return np.flip(np.pad(packed, ((0, 0), (0, width - packed.shape[1]))), 0).copy()

    words = _words.of(host.rows).get_or_make(width, made)
    if isinstance(pool, np.ndarray):
        return np.concatenate([pool, words])
    from torch import cat

    return cat([pool, placed(words, pool.device)])
