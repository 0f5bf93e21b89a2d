"""A bounded cache of layouts by pattern, sizes, tile and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.layouts.choice import forget_costs
from gossamer.layouts.gather import GatherLayout, build_gather
from gossamer.layouts.kept import Kept
from gossamer.patterns.base import Pattern

# Layouts that are kept: these many in any case, and these many that hold no more than these bytes.
LEAST_KEPT, MOST_KEPT, KEPT_BYTES = 64, 1024, 2**28

_layouts: Kept[Any] = Kept(LEAST_KEPT, MOST_KEPT, KEPT_BYTES)


def cached_layout(
    pattern: Pattern, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int, device: Any
) -> BlockLayout:
    """The layout of a pattern as torch tensors on `device`; those used last are kept, device copies with them."""
    key = (pattern, Q, K, q_offset, block_q, block_kv)
    return _kept(key, lambda: build(pattern, Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset)).to(device)


def cached_gather(pattern: Pattern, Q: int, K: int, *, block_q: int, q_offset: int, device: Any) -> GatherLayout:
    """The gather layout of a pattern as torch tensors on `device`, kept with the others."""
    key = (pattern, Q, K, q_offset, block_q)
    return _kept(key, lambda: build_gather(pattern, Q, K, block_q=block_q, q_offset=q_offset)).to(device)


def bytes_of(layout: BlockLayout | GatherLayout) -> int:
    """About what a layout holds with its transpose, on the host or on a device."""
    return 2 * sum(int(x.nbytes) for x in layout.rows.arrays())


def _kept(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    layout = _layouts.get(key)
    if layout is None:
        layout = make()
        layout = _layouts.put(key, layout, bytes_of(layout))
    return layout


def clear_cache() -> None:
    """Forget every layout, and what they were counted to take."""
    _layouts.clear()
    forget_costs()
