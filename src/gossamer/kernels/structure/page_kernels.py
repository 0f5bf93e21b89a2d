"""The kernel that makes the structure of sequences over pages: tiles of queries, lists of pages, and copies of pages.

A program finds its tile of queries by the edges of the sequences, and looks once at the pages of its sequence, in the
order of positions. What it writes is defined by operations of torch: `torch.structure.page_tiles`.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.reaches import Reaching, narrowed, reached
from gossamer.kernels.sequences import interval, tile_of
from gossamer.kernels.structure.block_kernels import below

REACH: tl.constexpr = tl.constexpr(len(Reaching._fields))  # numbers of one

# The numbers of the kernel, of which it is compiled for none.
# tiles: of queries, of which the last one has none
# page: tiles of the pool from one page to the next
# unit, unit_tiles: pages that are copied together, and their tiles
# units: that are copied of a sequence
# rooms: for tiles of bits of a list; chunks: programs that write the copies of a sequence
PageNumbers = namedtuple(
    "PageNumbers",
    "sequences T heads n size slots pages tiles page unit unit_tiles units room copied_room chunks edge_step used_step "
    "table_row table_step",
)
# What it is compiled for. BLOCKED, STEPPED: which reaches have a block, and which a step.
PageForm = namedtuple(
    "PageForm", "BLOCK_Q BLOCK_KV ROWS WORDS IN_PLACE UNIT REACHES BLOCKED STEPPED SPLIT EDGES TILES CHUNK"
)


@triton.jit
def _modulo(x, n):
    """The remainder that is never negative."""
    rest = x % n
    return tl.where(rest < 0, rest + n, rest)


@triton.jit
def _seen(begin, end, first, last, keys, numbers, reaches, FORM: tl.constexpr):
    """Whether queries at positions first to last see some of the slots [begin, end), and whether they see all."""
    some, covered = begin < 0, begin
    for _ in range(FORM.REACHES):  # each turn covers what follows on what is covered
        for i in tl.static_range(FORM.REACHES):
            reach = reaches[REACH * i : REACH * i + REACH]
            lo, _end = reached(first, numbers.slots, reach, FORM.BLOCKED[i])
            _begin, hi = reached(last, numbers.slots, reach, FORM.BLOCKED[i])
            hi = tl.where(last < first, 0, tl.minimum(hi, keys))
            some = some | (tl.maximum(lo, begin) < tl.minimum(hi, end))
            covered = tl.where((lo <= covered) & (covered < hi), hi, covered)
    return some, covered >= end


@triton.jit
def _ends(first, last, keys, numbers, reaches, FORM: tl.constexpr):
    """The first key that a query at a position or behind it may see, and the one behind the last of another."""
    least, most = keys, keys * 0
    for i in tl.static_range(FORM.REACHES):
        reach = reaches[REACH * i : REACH * i + REACH]
        lo, _end = interval(first, keys, numbers, reach, FORM.BLOCKED[i])
        _begin, hi = interval(last, keys, numbers, reach, FORM.BLOCKED[i])
        least, most = tl.minimum(least, lo), tl.maximum(most, hi)
    return least, most


@triton.jit
def _entries(table, i_seq, page, there, numbers):
    """The pages at some places of a sequence's table, and which of these exist."""
    at = table + i_seq.to(tl.int64) * numbers.table_row + page.to(tl.int64) * numbers.table_step
    entry = tl.load(at, mask=there, other=-1)
    there = there & (entry >= 0) & (entry < numbers.pages)  # where it is read: -1 is no number of bytes
    return tl.where(there, entry, 0).to(tl.int32), there


@triton.jit
def _kinds(begin, listed, first, last, keys, numbers, reaches, steps, FORM: tl.constexpr):
    """Of tiles of keys that begin there: which ones queries at positions first to last keep whole, which in part."""
    full, some = begin < 0, begin < 0
    end = begin + FORM.BLOCK_KV
    for i in tl.static_range(FORM.REACHES):
        reach = reaches[REACH * i : REACH * i + REACH]
        first_lo, first_hi = interval(first, keys, numbers, reach, FORM.BLOCKED[i])
        last_lo, last_hi = interval(last, keys, numbers, reach, FORM.BLOCKED[i])
        meets = (begin < last_hi) & (end > first_lo)
        if FORM.STEPPED[i]:
            meets = meets & (_modulo(last - begin, steps[i]) < last - first + FORM.BLOCK_KV)
        else:
            full = full | ((begin >= last_lo) & (end <= first_hi))
        some = some | meets
    full = full & listed
    return full, some & listed & (full == 0)


@triton.jit
def _list(kept, number, indices, count, most):
    """Write what is kept behind what was before, up to `most`; the place of each, and how many there are."""
    place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(indices + place, number, mask=kept & (place < most))
    return place, count + tl.sum(kept.to(tl.int32), 0)


@triton.jit
def _classed(
    begin, listed, number, counts, full, mixed, pool, most, room, part, positions, keys, numbers, reaches, steps, words,
    FORM: tl.constexpr,
):  # fmt: skip
    """Write tiles of keys behind those before them, and of those that are mixed every SPLIT-th one's bits.

    Args:
        counts: how many full and mixed tiles there are before; likewise the result.
        positions: of the first and the last query, and of all rows.
    """
    n_full, n_mixed = counts
    first, last, position = positions
    of_full, of_mixed = _kinds(begin, listed, first, last, keys, numbers, reaches, steps, FORM)
    _place, full_end = _list(of_full, number, full, n_full, tl.where(part == 0, most, 0))
    place, end = _list(of_mixed, number, mixed, n_mixed, tl.where(part == 0, room, 0))
    row, word = tl.arange(0, FORM.ROWS)[:, None], tl.arange(0, FORM.WORDS)[None, :]
    some = (row < FORM.BLOCK_Q) & (word < FORM.BLOCK_KV // 32)
    own = n_mixed + (part + FORM.SPLIT - n_mixed % FORM.SPLIT) % FORM.SPLIT
    for k in range(own, tl.minimum(end, room), FORM.SPLIT):
        column = tl.sum(tl.where(of_mixed & (place == k), begin, 0), 0) + word * 32
        bits = row * 0 + word * 0
        for i in tl.static_range(FORM.REACHES):
            lo, hi = interval(position, keys, numbers, reaches[REACH * i : REACH * i + REACH], FORM.BLOCKED[i])
            kept = below(hi[:, None] - column) & ~below(lo[:, None] - column)
            if FORM.STEPPED[i]:
                bit = _modulo(position[:, None] - column, steps[i])
                kept = kept & tl.where(bit < 32, words[i] << tl.minimum(bit, 31), 0)
            bits = bits | kept
        tl.store(pool + (k * FORM.BLOCK_Q + row) * (FORM.BLOCK_KV // 32) + word, bits, mask=some)
    return full_end, end


@triton.jit
def _tile(
    i_tile, part, edges, used, table, token, head, place, copied_full_counts, copied_full, copied_mixed_counts,
    copied_mixed, copied_pool, full_counts, full, mixed_counts, mixed, pool, numbers, reaches, steps, words,
    FORM: tl.constexpr,
):  # fmt: skip
    """A tile of queries: its rows, and the lists of its keys; of the bits one part."""
    BLOCK_Q: tl.constexpr = FORM.BLOCK_Q
    BLOCK_KV: tl.constexpr = FORM.BLOCK_KV
    heads, tiles, unit_tiles, units = numbers.heads, numbers.tiles, numbers.unit_tiles, numbers.units
    i_seq, first, behind, start = tile_of(edges, i_tile, numbers, BLOCK_Q, FORM.EDGES)
    rows = (behind - first) * heads
    there = (i_seq < numbers.sequences) & (start < rows)
    i_seq = tl.minimum(i_seq, numbers.sequences - 1)
    keys = narrowed(tl.load(used + i_seq.to(tl.int64) * numbers.used_step), 0, numbers.slots)
    keys = tl.where(there, keys, 0)
    o = tl.arange(0, FORM.ROWS)
    to, row, own = i_tile * BLOCK_Q + o, start + o, o < tl.where(part == 0, BLOCK_Q, 0)
    # Tokens of no sequence have a row that keeps nothing.
    found = tl.where(there, to, (tiles - 1) * BLOCK_Q + row % heads)
    tl.store(place + first * heads + row, found, mask=own & (row < rows))
    if i_tile < tiles:
        row = tl.where(there, tl.minimum(row, rows - 1), 0)
        b_token = tl.where(there, first, 0) + row // heads
        tl.store(token + to, b_token, mask=own)
        tl.store(head + to, row % heads, mask=own)
        at = keys - behind  # the position of token 0
        last = first + (tl.minimum(start + BLOCK_Q, rows) - 1) // heads
        positions = at + first + start // heads, at + last, at + b_token
        counts = keys * 0, keys * 0
        copied_counts = keys * 0, keys * 0
        n_pages = keys * 0  # that are copied, so far
        full += i_tile * (numbers.n * unit_tiles)
        mixed += i_tile * numbers.room
        pool += i_tile * numbers.room * BLOCK_Q * (BLOCK_KV // 32)
        copied_full += i_tile * (units * unit_tiles)
        copied_mixed += i_tile * numbers.copied_room
        copied_pool += i_tile * numbers.copied_room * BLOCK_Q * (BLOCK_KV // 32)
        # From the first page on that some query of the sequence sees, so that all that are copied are counted.
        least, most = _ends(at + first, at + last, keys, numbers, reaches, FORM)
        least = least // numbers.size * numbers.size // BLOCK_KV
        for m0 in range(least, tl.cdiv(most, BLOCK_KV), FORM.TILES):
            m = m0 + tl.arange(0, FORM.TILES)
            of_unit, in_unit = m % unit_tiles, tl.arange(0, FORM.UNIT)[None, :]
            page = (m // unit_tiles * numbers.unit)[:, None] + in_unit
            entry, exists = _entries(table, i_seq, page, (in_unit < numbers.unit) & (page < numbers.n), numbers)
            slot = page * numbers.size
            some, whole = _seen(slot, slot + numbers.size, at + first, keys - 1, keys, numbers, reaches, FORM)
            listed = tl.max((some & exists).to(tl.int32), 1) > 0
            if FORM.IN_PLACE:  # a unit is a page
                whole = tl.max((whole & exists).to(tl.int32), 1) > 0
                counts = _classed(
                    m * BLOCK_KV, whole, tl.sum(entry, 1) * numbers.page + of_unit, counts, full, mixed, pool,
                    numbers.n * unit_tiles, numbers.room, part, positions, keys, numbers, reaches, steps, words, FORM,
                )  # fmt: skip
                new = (listed & (whole == 0) & (of_unit == 0)).to(tl.int32)
                unit = n_pages + tl.cumsum(new, 0) - 1
                n_pages += tl.sum(new, 0)
                listed = listed & (whole == 0)
            else:
                unit = m // unit_tiles
            number = (i_seq * units + unit) * unit_tiles + of_unit
            copied_counts = _classed(
                m * BLOCK_KV, listed, number, copied_counts, copied_full, copied_mixed, copied_pool, units * unit_tiles,
                numbers.copied_room, part, positions, keys, numbers, reaches, steps, words, FORM,
            )  # fmt: skip
        if part == 0:
            if FORM.IN_PLACE:
                tl.store(full_counts + i_tile, counts[0])
                tl.store(mixed_counts + i_tile, counts[1])
            tl.store(copied_full_counts + i_tile, copied_counts[0])
            tl.store(copied_mixed_counts + i_tile, copied_counts[1])


@triton.jit
def _copies(i_seq, chunk, edges, used, table, pages, unseen, numbers, reaches, FORM: tl.constexpr):
    """The pages of a sequence that are copied, and which of their slots no query sees; where it has all, one chunk."""
    first = i_seq * 0
    for i0 in range(0, i_seq + 1, FORM.EDGES):
        o = i0 + tl.arange(0, FORM.EDGES)
        edge = tl.load(edges + o.to(tl.int64) * numbers.edge_step, mask=o <= i_seq, other=0)
        first = tl.maximum(first, tl.max(narrowed(edge, 0, numbers.T), 0))
    behind = narrowed(tl.load(edges + (i_seq + 1).to(tl.int64) * numbers.edge_step), 0, numbers.T)
    keys = narrowed(tl.load(used + i_seq.to(tl.int64) * numbers.used_step), 0, numbers.slots)
    i_first, i_last = keys - tl.maximum(behind - first, 0), keys - 1
    size, units = numbers.size, numbers.units
    pages += i_seq.to(tl.int64) * (units * numbers.unit)
    unseen += i_seq.to(tl.int64) * (units * numbers.unit) * size
    if FORM.IN_PLACE:  # a unit is a page
        n_pages = keys * 0
        for c0 in range(0, tl.cdiv(keys, size), FORM.CHUNK):
            c = c0 + tl.arange(0, FORM.CHUNK)
            entry, exists = _entries(table, i_seq, c, c < numbers.n, numbers)
            some, whole = _seen(c * size, c * size + size, i_first, i_last, keys, numbers, reaches, FORM)
            partly = some & exists & (whole == 0)
            before = n_pages
            place, n_pages = _list(partly, entry, pages, n_pages, units)
            for k in range(before, tl.minimum(n_pages, units)):
                begin = tl.sum(tl.where(partly & (place == k), c, 0), 0) * size
                for s0 in range(0, size, FORM.CHUNK):
                    s = s0 + tl.arange(0, FORM.CHUNK)
                    slot = begin + s
                    some, _all = _seen(slot, slot + 1, i_first, i_last, keys, numbers, reaches, FORM)
                    tl.store(unseen + k * size + s, some == 0, mask=s < size)
        for k in range(n_pages, units):
            tl.store(pages + k, 0)
            for s0 in range(0, size, FORM.CHUNK):
                s = s0 + tl.arange(0, FORM.CHUNK)
                tl.store(unseen + k * size + s, s >= 0, mask=s < size)
    else:
        slot = chunk * FORM.CHUNK + tl.arange(0, FORM.CHUNK)
        there, c = slot < units * numbers.unit * size, slot // size
        entry, exists = _entries(table, i_seq, c, there & (c < numbers.n), numbers)
        some, _all = _seen(slot, slot + 1, i_first, i_last, keys, numbers, reaches, FORM)
        tl.store(unseen + slot, (some & exists) == 0, mask=there)
        some, _all = _seen(c * size, c * size + size, i_first, i_last, keys, numbers, reaches, FORM)
        tl.store(pages + c, tl.where(some & exists, entry, 0), mask=there & (slot % size == 0))


@triton.jit(do_not_specialize=["numbers", "reaches", "steps", "words"])
def page_tiles_kernel(
    edges, used, table, token, head, place, pages, unseen, copied_full_counts, copied_full, copied_mixed_counts,
    copied_mixed, copied_pool, full_counts, full, mixed_counts, mixed, pool, numbers: PageNumbers, reaches, steps,
    words, FORM: tl.constexpr,
):  # fmt: skip
    """A part of a tile of queries, or a chunk of the copies of a sequence.

    Args:
        edges, used, table: of any integers and strides.
        full_counts, ..., pool: over the pool, where it is read in place.
        reaches: the numbers of `Reaching` of each; `steps`; `words`: of which each step-th bit is set.
    """
    i_program = tl.program_id(0)
    # All but one sequence may end within a tile, and so may the tokens before and behind them.
    of_tiles = (numbers.tiles + 1) * FORM.SPLIT
    if i_program < of_tiles:
        _tile(
            i_program // FORM.SPLIT, i_program % FORM.SPLIT, edges, used, table, token, head, place, copied_full_counts,
            copied_full, copied_mixed_counts, copied_mixed, copied_pool, full_counts, full, mixed_counts, mixed, pool,
            numbers, reaches, steps, words, FORM,
        )  # fmt: skip
    else:
        i = i_program - of_tiles
        _copies(i // numbers.chunks, i % numbers.chunks, edges, used, table, pages, unseen, numbers, reaches, FORM)
