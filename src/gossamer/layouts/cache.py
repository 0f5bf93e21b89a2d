"""A bounded cache of layouts by pattern, sizes, tile and device."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.patterns.base import Pattern

LIMIT = 64

_layouts: OrderedDict[tuple[Any, ...], BlockLayout] = OrderedDict()
_lock = Lock()


def cached_layout(
    pattern: Pattern, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int, device: Any
) -> BlockLayout:
    """The layout of a pattern as torch tensors on `device`; the last 64 are kept, device copies with them."""
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
    return layout.to(device)


def clear_cache() -> None:
    """Forget every layout."""
    with _lock:
        _layouts.clear()
