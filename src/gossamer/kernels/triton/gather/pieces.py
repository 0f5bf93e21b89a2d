"""What the kernels of `rows` share: their items, and rows in pieces, as tuples of blocks that are unrolled."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.row_access import BEGIN, END, ITEM, LEAD, PART, SLOT, TILE, batch_and_head


@triton.jit
def decode_rows(lists, numbers, heads, lead_heads, FORM: tl.constexpr):
    """What this program computes: (b, h, row, begin, end, slot, part, exists) of its RP items, and their `longest`.

    b and h are scalars where they come from the grid. One head is finished before the next one starts: its keys and
    values stay in L2. Where heads and batch elements are dimensions of the grid, no program divides: that would be a
    tenth of what it does for a short list.
    """
    if FORM.FLAT:
        i_group = tl.program_id(0) % numbers.n_programs
        copy = tl.program_id(0) // numbers.n_programs
    else:
        i_group = tl.program_id(0)
    o_i = i_group * FORM.RP + tl.arange(0, FORM.RP)
    m_i = o_i < numbers.n_items
    item = lists.items + o_i * ITEM
    lead = tl.load(item + LEAD, mask=m_i, other=0)
    row = tl.load(item + TILE, mask=m_i, other=0)
    begin = tl.load(item + BEGIN, mask=m_i, other=0)
    end = tl.load(item + END, mask=m_i, other=0)
    slot = tl.load(item + SLOT, mask=m_i, other=-1)
    part = tl.load(item + PART, mask=m_i, other=0)
    if FORM.FLAT:
        b, h = batch_and_head(lead, copy, heads, lead_heads, FORM.B_FROM_GRID, FORM.H_FROM_GRID)
    else:
        b = tl.program_id(2) if FORM.B_FROM_GRID else lead // lead_heads
        h = tl.program_id(1) if FORM.H_FROM_GRID else lead % lead_heads
    return b, h, row, begin, end, slot, part, m_i, tl.load(lists.longest + i_group)


@triton.jit
def of_row(x, FROM_GRID: tl.constexpr):
    """A scalar, or a vector over items as [RP, 1]."""
    return x if FROM_GRID else x[:, None]


@triton.jit
def load_pieces(base, offsets, SIZE: tl.constexpr, S: tl.constexpr, ONCE: tl.constexpr = False):
    """The rows at `offsets` [RP] from `base` [1 or RP, S]: ceil(SIZE / S) blocks [RP, S] float32.

    Rows that are read ONCE leave the caches first.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    blocks: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        pointers = base + offsets[:, None] + p * S
        if (p + 1) * S <= SIZE:
            block = tl.load(pointers, eviction_policy=POLICY)
        else:
            inside = (p * S + tl.arange(0, S) < SIZE)[None, :]
            block = tl.load(pointers, mask=inside, other=0.0, eviction_policy=POLICY)
        blocks += (block.to(tl.float32),)
    return blocks


@triton.jit
def load_columns(base, columns, STRIDE: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """The rows that each of C vectors [RP] names: C tuples as `load_pieces` gives them."""
    rows: tl.tuple = ()
    for c in tl.static_range(C):
        rows += (load_pieces(base, columns[c].to(tl.int64) * STRIDE, SIZE, S),)
    return rows


@triton.jit
def store_pieces(base, offsets, mask, blocks, SIZE: tl.constexpr, S: tl.constexpr, ONCE: tl.constexpr = False):
    """Write the pieces of rows to `offsets` [RP] from `base` [1 or RP, S] where `mask` [RP]."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    for p in tl.static_range((SIZE + S - 1) // S):
        pointers = base + offsets[:, None] + p * S
        inside = mask[:, None] & (p * S + tl.arange(0, S) < SIZE)[None, :]
        tl.store(pointers, blocks[p].to(base.dtype.element_ty), mask=inside, eviction_policy=POLICY)


@triton.jit
def first_listed(pointers, left, C: tl.constexpr):
    """The first C columns of each list of `left` [RP]: C vectors [RP], past the end the first one, 0 of an empty list.

    No load waits for another one, as it would for what it gives past the end.
    """
    first = tl.load(pointers, mask=left > 0, other=0)
    columns: tl.tuple = (first,)
    for c in tl.static_range(1, C):
        columns += (tl.where(c < left, tl.load(pointers + c, mask=c < left, other=0), first),)
    return columns


@triton.jit
def next_listed(pointers, left, before, C: tl.constexpr):
    """The next C columns of each list, of which `left` [RP] are left: C vectors [RP], past the end those `before`."""
    columns: tl.tuple = ()
    for c in tl.static_range(C):
        columns += (tl.load(pointers + c, mask=c < left, other=before[c]),)
    return columns


@triton.jit
def below(columns, first, end, C: tl.constexpr):
    """Columns with the first of their list in place of those from `end` on: nothing past it is read."""
    inside: tl.tuple = ()
    for c in tl.static_range(C):
        inside += (tl.where(columns[c] < end, columns[c], first),)
    return inside


@triton.jit
def where_some(m_some, x, SIZE: tl.constexpr, S: tl.constexpr):
    """Rows in pieces, and 0 where `m_some` [RP] is false: in place of a list of nothing any row was read."""
    blocks: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        blocks += (tl.where(m_some[:, None], x[p], 0.0),)
    return blocks


@triton.jit
def zeros(RP: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr):
    """Pieces of rows of nothing."""
    blocks: tl.tuple = ()
    for _p in tl.static_range((SIZE + S - 1) // S):
        blocks += (tl.zeros([RP, S], tl.float32),)
    return blocks


@triton.jit
def dot(x, y, SIZE: tl.constexpr, S: tl.constexpr):
    """The products of rows in pieces, [RP]."""
    total = x[0] * y[0]
    for p in tl.static_range(1, (SIZE + S - 1) // S):
        total += x[p] * y[p]
    return tl.sum(total, 1)


@triton.jit
def scaled(x, factor, SIZE: tl.constexpr, S: tl.constexpr):
    """Rows in pieces times a number each, [RP]."""
    blocks: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        blocks += (x[p] * factor[:, None],)
    return blocks


@triton.jit
def added(x, factor, y, SIZE: tl.constexpr, S: tl.constexpr):
    """x + factor y, of rows in pieces."""
    blocks: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        blocks += (x[p] + factor[:, None] * y[p],)
    return blocks
