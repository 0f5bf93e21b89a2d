"""A bounded cache of layouts by pattern, sizes, tile and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.layouts.gather import GatherLayout, build_gather
from gossamer.memo import Memo
from gossamer.patterns.base import Pattern

_layouts: Memo[Any] = Memo()


def cached_layout(
    pattern: Pattern, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int, device: Any
) -> BlockLayout:
    """The layout of a pattern as torch tensors on `device`; those used last are kept, device copies with them."""
    key = (pattern, Q, K, q_offset, block_q, block_kv)
    return _kept(key, lambda: build(pattern, Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset), device)


def cached_gather(pattern: Pattern, Q: int, K: int, *, block_q: int, q_offset: int, device: Any) -> GatherLayout:
    """The gather layout of a pattern as torch tensors on `device`, kept with the others."""
    key = (pattern, Q, K, q_offset, block_q)
    return _kept(key, lambda: build_gather(pattern, Q, K, block_q=block_q, q_offset=q_offset), device)


def bytes_of(layout: BlockLayout | GatherLayout) -> int:
    """About what a layout of tensors holds, with its transpose; on a CPU with the masks of its partial tiles instead.

    There rows alone are walked, and a mask takes a byte for each pair. Intervals that are alike count each time. A
    gather layout is kept there with the lists that are made of it: four numbers for each edge.
    """
    size = sum(int(x.nbytes) for x in layout.rows.arrays())
    on_cpu = layout.rows.device.type == "cpu"
    if isinstance(layout, GatherLayout) or not on_cpu:
        return (4 if on_cpu else 2) * size
    masks = layout.rows.interval.indices.shape[0] + layout.rows.pool.shape[0]
    return size + masks * layout.rows.block_rows * layout.rows.block_columns


def _kept(key: tuple[Any, ...], make: Callable[[], Any], device: Any) -> Any:
    """The tensors on `device` of a layout that is kept, made if there is none."""
    return _layouts.get_or_make(key, make, lambda layout: bytes_of(layout.to(device))).to(device)


def clear_cache() -> None:
    """Forget every layout."""
    _layouts.clear()
