"""Sequences of tokens behind one another as kernels find them: tiles of their rows, and the keys that these keep.

`numbers` are a NamedTuple of a kernel's own, with `sequences`, `T` tokens, `heads` that share keys, `slots` of a
sequence for keys, and `edge_step`, the stride of the edges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.reaches import narrowed, reached


@triton.jit
def _greater(x, y):
    return tl.maximum(x, y)


@triton.jit
def tile_of(edges, i_tile, numbers, R: tl.constexpr, EDGES: tl.constexpr):
    """(sequence, its first token, the one behind its last, first row of the tile): rows are tokens times heads.

    Two more sequences than there are have the tokens behind all, and before all.
    """
    n, step = numbers.sequences, numbers.edge_step
    i_seq = i_tile * 0
    before = i_tile * 0  # tiles of the sequences before
    tiles = i_tile * 0  # of all that were looked at
    first = i_tile * 0
    last = i_tile * 0
    end = i_tile * 0  # the greatest edge so far
    for i0 in range(0, n, EDGES):
        o_i = i0 + tl.arange(0, EDGES)
        edge = edges + o_i.to(tl.int64) * step
        b_first = narrowed(tl.load(edge, mask=o_i < n, other=0), 0, numbers.T)
        b_first = tl.maximum(tl.associative_scan(b_first, 0, _greater), end)
        b_last = narrowed(tl.load(edge + step, mask=o_i < n, other=0), 0, numbers.T)
        b_last = tl.maximum(b_last, b_first)
        b_tiles = tl.where(o_i < n, tl.cdiv((b_last - b_first) * numbers.heads, R), 0)
        b_end = tiles + tl.cumsum(b_tiles, 0)
        m_own = (b_end > i_tile) & (b_end - b_tiles <= i_tile)
        i_seq += tl.sum(((b_end <= i_tile) & (o_i < n)).to(tl.int32), 0)
        before += tl.sum(tl.where(m_own, b_end - b_tiles, 0), 0)
        first += tl.sum(tl.where(m_own, b_first, 0), 0)
        last += tl.sum(tl.where(m_own, b_last, 0), 0)
        tiles += tl.sum(b_tiles, 0)
        end = tl.maximum(end, tl.max(b_last, 0))
    if i_seq >= n:
        first = end
        last = i_tile * 0 + numbers.T
        before = tiles
        tiles += tl.cdiv((last - first) * numbers.heads, R)
        if i_tile >= tiles:
            first = i_tile * 0
            last = narrowed(tl.load(edges), 0, numbers.T)
            before = tiles
    return i_seq, first, last, (i_tile - before) * R


@triton.jit
def interval(i, keys, numbers, reach, HAS_BLOCK: tl.constexpr):
    """[lo, hi) of the keys that a reach keeps of those of a sequence."""
    lo, hi = reached(i, numbers.slots, reach, HAS_BLOCK)
    lo = tl.minimum(lo, keys)
    return lo, tl.maximum(tl.minimum(hi, keys), lo)
