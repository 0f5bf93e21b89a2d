"""BlockLayout: where the work is. Tiles and bits that a kernel walks, in either direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gossamer.layouts.base import Layout
from gossamer.layouts.stats import LayoutStats, walk_stats
from gossamer.layouts.transpose import transpose
from gossamer.layouts.walk import Walk, expand


@dataclass(frozen=True, eq=False)
class BlockLayout(Layout[Walk]):
    """The tiles of a (Q, K) score matrix to compute, and the pairs in them.

    `rows` walks query tiles (block_q) over key tiles (block_kv). `columns` is its transpose, built on first use.

    Examples:
        >>> layout = gs.SlidingWindow(40).layout(128, 128, block_q=32, block_kv=32)
        >>> layout.stats.all_tiles, layout.stats.full_tiles, layout.stats.interval_tiles
        (16, 0.0, 9.0)
        >>> bool((layout.expand() == gs.SlidingWindow(40).materialize(128, 128)).all())
        True
    """

    @property
    def block_kv(self) -> int:
        return self.rows.block_columns

    def _transposed(self, walk: Walk) -> Walk:
        return transpose(walk)

    def expand(self) -> np.ndarray:
        """The dense boolean matrix (Q, K), or (Bl, Hl, Q, K) unless Bl == Hl == 1. The oracle of every builder."""
        return expand(self.rows)

    @cached_property
    def stats(self) -> LayoutStats:
        """Counts of tiles and pairs."""
        return walk_stats(self.rows)

    def __repr__(self) -> str:
        tiles = ", ".join(f"{kind}={int(tiles.counts.sum())}" for kind, tiles in self.rows.lists.items())
        return (
            f"BlockLayout(Q={self.Q}, K={self.K}, block_q={self.block_q}, block_kv={self.block_kv}, "
            f"lead={self.lead}, {tiles}, pool={int(self.rows.pool.shape[0])})"
        )
