"""Layouts made from arrays on their own device, by operations that every array framework has (`arrays.Arrays`).

Nothing here imports a framework, and nothing reads a value back: the functions run while a graph is captured, and are
traced as a whole. Every size follows from shapes, so lists are padded to what they can hold at most.
"""

from gossamer.layouts.device.arrays import Arrays, BlockLists, Fused, IntervalLists, Sorted
from gossamer.layouts.device.block_lists import block_list_layout
from gossamer.layouts.device.intervals import empty_layout, interval_layout
from gossamer.layouts.device.key_lists import key_list_layout
from gossamer.layouts.device.pages import KeyTiles, Listed, check_tiles, listed_layout, most_mixed, page_layout
from gossamer.layouts.device.progressions import Progression, progression_layout

__all__ = [
    "Arrays",
    "BlockLists",
    "Fused",
    "IntervalLists",
    "KeyTiles",
    "Listed",
    "Progression",
    "Sorted",
    "block_list_layout",
    "check_tiles",
    "empty_layout",
    "interval_layout",
    "key_list_layout",
    "listed_layout",
    "most_mixed",
    "page_layout",
    "progression_layout",
]
