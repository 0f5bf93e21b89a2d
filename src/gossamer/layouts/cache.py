"""A bounded cache of layouts by pattern, sizes, tile and device."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.patterns.base import Pattern

LIMIT = 64
# A tile that executes no more than this for each useful pair is not compared with others.
WORTH_A_LOOK = 1.25

_layouts: OrderedDict[tuple[Any, ...], BlockLayout] = OrderedDict()
_tiles: OrderedDict[tuple[Any, ...], int] = OrderedDict()
_lock = Lock()


def cached_layout(
    pattern: Pattern, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int, device: Any
) -> BlockLayout:
    """The layout of a pattern as torch tensors on `device`; the last 64 are kept, device copies with them."""
    return _host_layout(pattern, Q, K, block_q, block_kv, q_offset).to(device)


def _host_layout(pattern: Pattern, Q: int, K: int, block_q: int, block_kv: int, q_offset: int) -> BlockLayout:
    key = (pattern, Q, K, q_offset, block_q, block_kv)
    with _lock:
        layout = _layouts.get(key)
        if layout is not None:
            _layouts.move_to_end(key)
    if layout is None:
        layout = build(pattern, Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset)
        with _lock:
            layout = _layouts.setdefault(key, layout)
            while len(_layouts) > LIMIT:
                _layouts.popitem(last=False)
    return layout


def cheapest_tile(
    pattern: Pattern, Q: int, K: int, *, options: tuple[tuple[int, int, float], ...], q_offset: int
) -> int:
    """Which of the options (block_q, block_kv, rate) takes the least time: executed pairs over rate, by counting.

    The first is taken without a look at the others where it executes at most 1.25 pairs for each useful one.
    """
    if len(options) == 1:
        return 0
    key = (pattern, Q, K, q_offset, options)
    with _lock:
        known = _tiles.get(key)
    if known is not None:
        return known
    times = []
    for block_q, block_kv, rate in options:
        stats = _host_layout(pattern, Q, K, block_q, block_kv, q_offset).stats
        times.append(stats.executed_pairs / rate)
        if len(times) == 1 and stats.overhead <= WORTH_A_LOOK:
            break
    best = times.index(min(times))
    with _lock:
        _tiles[key] = best
        while len(_tiles) > 4 * LIMIT:
            _tiles.popitem(last=False)
    return best


def clear_cache() -> None:
    """Forget every layout."""
    with _lock:
        _layouts.clear()
        _tiles.clear()
