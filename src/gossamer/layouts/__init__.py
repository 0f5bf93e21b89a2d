"""Layouts: where the work is. Tiles and bits that a kernel walks; built from a pattern or from data."""

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.cache import cached_gather, cached_layout, clear_cache
from gossamer.layouts.dense import from_dense
from gossamer.layouts.gather import GatherLayout, GatherWalk, build_gather
from gossamer.layouts.stats import LayoutStats
from gossamer.layouts.walk import TileList, Walk
from gossamer.layouts.work_list import WorkItems, work_items

__all__ = [
    "BlockLayout",
    "GatherLayout",
    "GatherWalk",
    "LayoutStats",
    "TileList",
    "Walk",
    "WorkItems",
    "build_gather",
    "cached_gather",
    "cached_layout",
    "clear_cache",
    "from_dense",
    "work_items",
]
