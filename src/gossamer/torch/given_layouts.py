"""Layouts that enter a call as tensors: put together from them, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import Wording
from gossamer.layouts import BlockLayout, GatherLayout, GatherWalk, TileList, Walk
from gossamer.layouts.gather import WIDTHS, queries_of
from gossamer.layouts.walk import ARRAYS_PER_WALK
from gossamer.patterns.grid import WORD, ranges
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import OTHER_LAYOUT, Arguments, describe

Given = BlockLayout | GatherLayout
ARRAYS_PER_GATHER = 4


def geometry_of(layout: Given) -> tuple[int, int, int, int, int]:
    """(block_q, block_kv, Q, K, heads), with a block_kv of 0 for a gather layout; heads are `GatherWalk.heads`."""
    if isinstance(layout, BlockLayout):
        return layout.block_q, layout.block_kv, layout.Q, layout.K, 1
    return layout.block_q, 0, layout.Q, layout.K, layout.rows.heads


def arrays_of(layout: Given) -> list[Any]:
    """The arrays of the rows, then of the columns if they were built."""
    columns = [x for walk in layout._transpose for x in walk.arrays()]
    return layout.rows.arrays() + columns


def layout_from(arrays: list[Tensor], geometry: tuple[int, ...]) -> Given:
    """The layout whose tensors entered an operator: `arrays_of` and `geometry_of` it."""
    block_q, block_kv, Q, K, heads = geometry
    n = ARRAYS_PER_WALK if block_kv else ARRAYS_PER_GATHER
    if len(arrays) not in (n, 2 * n):
        raise ValueError(f"layout must hold {n} or {2 * n} tensors, got {len(arrays)}")
    rows, columns = arrays[:n], arrays[n:]
    if not block_kv:
        of_keys = [_gathered(K, Q, 1, columns, 1)] if columns else []
        return GatherLayout(_gathered(Q, K, block_q, rows, heads), _transpose=of_keys, apart=True)
    none = TileList(None, None, None)
    whole = Walk(Q, K, block_q, block_kv, none, none, none, None, None, None, None)
    turned = Walk(K, Q, block_kv, block_q, none, none, none, None, None, None, None)
    return BlockLayout(whole.with_arrays(rows), _transpose=[turned.with_arrays(columns)] if columns else [])


def _gathered(rows: int, columns: int, block: int, arrays: list[Tensor], heads: int) -> GatherWalk:
    starts, counts, indices, bits = arrays
    return GatherWalk(rows, columns, block, starts, counts, indices, bits, heads)


def check_layout(walk: Walk | GatherWalk, q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless a layout's arrays fit together and the inputs; on a CPU its indices are read too."""
    what = "BlockLayout or BlockMask" if isinstance(walk, Walk) else "GatherLayout"
    checks = _layout_checks(walk, q, k) if isinstance(walk, Walk) else _gather_checks(walk, q, k)
    for right, name, given, accepted in checks:
        if not right:
            raise ValueError(f"pattern, a {what}, must have {name} {accepted}; got {describe(given)}")


def _shared_checks(walk: Walk | GatherWalk, q: Tensor, k: Tensor) -> Iterator[tuple[bool, str, Any, str]]:
    Q, K, B, H = q.shape[2], k.shape[2], *q.shape[:2]
    sizes, other = (walk.rows, walk.columns), OTHER_LAYOUT if (walk.rows, walk.columns) == (H, k.shape[1]) else ""
    yield sizes == (Q, K), "(Q, K)", Wording(f"{sizes}{other}"), f"of the inputs, {(Q, K)}"
    for at, x in enumerate(walk.arrays()):
        yield isinstance(x, Tensor), f"array {at}", x, "a torch tensor"
        yield x.dtype == torch.int32 and x.device == q.device, f"array {at}", x, f"of int32 on {q.device}"
    counts = walk.full.counts if isinstance(walk, Walk) else walk.counts
    yield counts.ndim == 3, "counts", counts, "of shape (Bl, Hl, T)"
    Bl, Hl = walk.lead
    G = k.shape[1]
    if isinstance(walk, GatherWalk):
        heads = walk.heads
        yield H // G % heads == 0, "heads", heads, f"a divisor of the inputs' {H // G} query heads for each key head"
        yield heads == 1 or Hl in (1, G), "Hl", Hl, f"1 or G = {G}, since the query heads of a key head gather together"
        if Bl in (1, B) and Hl == G:
            return
    yield Bl in (1, B) and Hl in (1, H), "(Bl, Hl)", (Bl, Hl), f"1 or the inputs' (B, H) = {(B, H)}"


def _gather_checks(walk: GatherWalk, q: Tensor, k: Tensor) -> Iterator[tuple[bool, str, Any, str]]:
    rows = walk.block_rows
    known = list(WIDTHS) if walk.heads == 1 else [queries_of(walk.heads)]
    yield rows in known, "block_q", rows, f"one of {', '.join(map(str, known))}"
    yield from _shared_checks(walk, q, k)
    shape, n, width = (*walk.lead, walk.tiles), len(walk.indices), walk.width
    yield walk.starts.shape == shape, "starts", walk.starts, f"of shape {shape}"
    yield walk.counts.shape == shape, "counts", walk.counts, f"of shape {shape}"
    yield walk.indices.ndim == 1 and n % width == 0, "indices", walk.indices, f"of one dimension, a multiple of {width}"
    words = (n // WORD, rows) if walk.has_bits else (0, 1)
    yield walk.bits.shape == words, "bits", walk.bits, f"of shape {words}"
    if q.device.type != "cpu":
        return
    starts, counts = walk.starts.long(), walk.counts.long()
    inside = (counts >= 0) & (starts >= 0) & (starts % width == 0) & (starts + counts <= n)
    yield bool(inside.all()), "starts and counts", Wording("others"), f"within its {n} indices, in steps of {width}"
    _, place = listed(starts, counts)
    keys = walk.indices[place]
    bad = keys[(keys < 0) | (keys >= walk.columns)]
    yield not len(bad), "indices", next(iter(bad.tolist()), None), f"in [0, {walk.columns})"


def listed(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(which list, place in the indices) of all entries, of starts and counts of any shape, on a CPU."""
    which, place = ranges(starts.flatten().numpy(), (starts + counts).flatten().numpy())
    return torch.from_numpy(which), torch.from_numpy(place)


def _layout_checks(walk: Walk, q: Tensor, k: Tensor) -> Iterator[tuple[bool, str, Any, str]]:
    Q, br, bc = q.shape[2], walk.block_rows, walk.block_columns
    yield from _shared_checks(walk, q, k)
    for name, block in (("block_q", br), ("block_kv", bc)):
        yield 0 < block <= 1024 and block % WORD == 0, name, block, f"a multiple of {WORD} up to 1024"
    shape = (*walk.lead, walk.tiles)
    for kind, tiles in walk.lists.items():
        yield tiles.starts.shape == shape, f"{kind}.starts", tiles.starts, f"of shape {shape}"
        yield tiles.counts.shape == shape, f"{kind}.counts", tiles.counts, f"of shape {shape}"
        yield tiles.indices.ndim == 1, f"{kind}.indices", tiles.indices, "of one dimension"
    for name, x in (("lo", walk.lo), ("hi", walk.hi)):
        none = x.shape == (1, 1, 0) and not len(walk.interval.indices)
        yield none or x.shape == (*walk.lead, Q), name, x, f"of shape {(*walk.lead, Q)}, or (1, 1, 0) without intervals"
    n = len(walk.bits.indices)
    yield walk.pool_index.shape == (n,), "pool_index", walk.pool_index, f"of shape ({n},), one for each bits tile"
    yield walk.pool.ndim == 3 and walk.pool.shape[1:] == (br, bc // WORD), "pool", walk.pool, f"(P, {br}, {bc // WORD})"
    if q.device.type == "cpu":
        yield from _index_checks(walk)


def _index_checks(walk: Walk) -> Iterator[tuple[bool, str, Any, str]]:
    C = -(-walk.columns // walk.block_columns)
    seen = []
    for kind, tiles in walk.lists.items():
        starts, counts, indices = (x.long() for x in tiles)
        inside = (counts >= 0) & (starts >= 0) & (starts + counts <= len(indices))
        yield bool(inside.all()), f"{kind}.starts and counts", Wording("others"), f"within its {len(indices)} indices"
        row, place = listed(starts, counts)
        column = indices[place]
        bad = column[(column < 0) | (column >= C)]
        yield not len(bad), f"{kind}.indices", next(iter(bad.tolist()), None), f"in [0, {C})"
        if kind == "full" and walk.columns % walk.block_columns:
            yield not bool((column == C - 1).any()), "full.indices", C - 1, "no tile that reaches past the last key"
        if kind == "bits" and len(place):
            pool = walk.pool_index[place]
            right = bool(((pool >= 0) & (pool < len(walk.pool))).all())
            yield right, "pool_index", Wording(f"{int(pool.min())} to {int(pool.max())}"), f"in [0, {len(walk.pool)})"
        seen.append(row * C + column)
    every = torch.cat(seen)
    yield len(every.unique()) == len(every), "no tile", Wording("one that is listed twice"), "listed twice"


def at_offset_of(layout: Given, a: Arguments) -> Arguments:
    """The arguments of a call with the offset that its layout was made with, which only distances read.

    Raises:
        ValueError: another one is given; `Unsupported` for distances where each sequence has its own.
    """
    held, given = layout.q_offset, a.q_offset if a.q_offset_tensor is None else a.q_offset_tensor
    if held is None:
        return a
    slopes, of_each = a.alibi_slopes is not None, isinstance(held, str)
    if slopes and of_each:
        raise Unsupported(
            "alibi_slopes must be None with a BlockLayout in which each sequence has an offset of its own: distances "
            "need one for all"
        )
    known = not of_each and not isinstance(held, Tensor)
    if known and isinstance(given, Tensor) and a.counted and not given.is_meta and given.numel() == 1:
        given = int(given)  # as it would be, when the call runs
    if given is not None and (not known or isinstance(given, Tensor) or given != held):
        raise ValueError(
            f"q_offset must be left out with a BlockLayout that was made with {held if known else 'offsets in tensors'}"
            f"; got {describe(given)}"
        )
    if not slopes:
        return a._replace(q_offset=None, q_offset_tensor=None)
    return a._replace(q_offset=held, q_offset_tensor=None) if known else a._replace(q_offset_tensor=held)
