"""Whether all that the tiles of a layout hold is attended: what is not is cleared by kernels that look for it."""

from __future__ import annotations

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk

FEW = 64  # queries
AT_ONCE = 2**24  # rows that are looked at together


def keeps_all(layout: BlockLayout) -> bool:
    """Whether every query of the tiles that are listed keeps a key, and every key of theirs a query.

    False where only a device knows.
    """
    host = layout.host or layout
    return host.rows.device is None and _rows_keep(host.rows) and _rows_keep(host.columns)


def reaches_all(layout: BlockLayout) -> bool:
    """Whether the intervals of a layout's rows, if there are any, begin with the first key and end with the last.

    Those of a few queries end where these are, and what lies around them is keys like all others: no matter. False
    where only a device knows.
    """
    walk = (layout.host or layout).rows
    if walk.device is not None:
        return False
    if walk.rows <= FEW or not walk.interval.counts.any():
        return True
    return bool((walk.lo.min(-1) == 0).all() and (walk.hi.max(-1) == walk.columns).all())


def _rows_keep(walk: Walk) -> bool:
    """Whether every row of the tiles that a walk of numpy arrays lists keeps something."""
    full, interval, bits = (tiles.counts.reshape(-1) for tiles in walk.lists.values())
    at = np.flatnonzero((full == 0) & (interval + bits > 0))  # rows of tiles that may have a row which keeps nothing
    if not at.size:
        return True
    block, tiles = walk.block_rows, walk.tiles
    exist = (np.arange(tiles * block) < walk.rows).reshape(tiles, block)
    given = np.zeros((*walk.lead, tiles * block), bool)
    if interval.any():
        given[..., : walk.rows] = walk.lo < walk.hi
    by_interval = given.reshape(-1, block)
    by_entry = walk.pool.any(axis=-1)  # (P, block)
    starts = walk.bits.starts.reshape(-1)
    together = max(1, AT_ONCE // block)
    for first in range(0, at.size, together):
        some = at[first : first + together]
        keeps = by_interval[some] & (interval[some] > 0)[:, None]
        for n in range(int(bits[some].max(initial=0))):
            listed = np.flatnonzero(bits[some] > n)
            keeps[listed] |= by_entry[walk.pool_index[starts[some[listed]] + n]]
        if (~keeps & exist[some % tiles]).any():
            return False
    return True
