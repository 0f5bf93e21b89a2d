"""Layouts: where the work is. Tiles and bits that a kernel walks; built from a pattern or from data."""

from gossamer.layouts.block import BlockLayout, TileList, Walk
from gossamer.layouts.dense import from_dense

__all__ = ["BlockLayout", "TileList", "Walk", "from_dense"]
