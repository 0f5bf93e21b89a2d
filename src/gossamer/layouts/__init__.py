"""Layouts: where the work is. Tiles and bits that a kernel walks; built from a pattern or from data."""

from gossamer.layouts.block import BlockLayout, TileList, Walk
from gossamer.layouts.build import build
from gossamer.layouts.cache import cached_layout, cheapest_tile, clear_cache
from gossamer.layouts.dense import from_dense
from gossamer.layouts.schedule import WorkItems, work_items
from gossamer.layouts.stats import LayoutStats

__all__ = [
    "BlockLayout",
    "LayoutStats",
    "TileList",
    "Walk",
    "WorkItems",
    "build",
    "cached_layout",
    "cheapest_tile",
    "clear_cache",
    "from_dense",
    "work_items",
]
