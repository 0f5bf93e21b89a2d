"""Kernels that find the starts of walks, by exact sums over the keys before a step at some of their scores.

The threshold never falls, so that in the second half of a prefix no score matters under v - 1, of the (k + 1)-th
largest score v of the first half. The places from there on are cut into EDGES ranges of equally many: a point x is the
score at which one begins, v - 1 the first. With the sums over keys before the step of those over x, and of those over
x + 1, f(x) = sum clip(u - x, 0, 1) follows. Scores are integers in equal steps, which are added modulo 2^64: the sums
that are used are smaller. They are in a table for each chunk of steps; the nodes of a chunk add its keys to that.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded_steps(score, ONE: tl.constexpr):
    """Scores of float32 in steps of 1 / ONE: whole numbers of float64."""
    return tl.floor(score.to(tl.float64) * ONE + 0.5)


@triton.jit
def steps_of(score, ONE: tl.constexpr):
    """Scores of float32 in steps of 1 / ONE, modulo 2^64."""
    whole = 18446744073709551616.0  # 2^64; infinite scores count as a multiple of it
    x = rounded_steps(tl.where(tl.abs(score) == float("inf"), 0.0, score), ONE)
    return (x - tl.floor(x / whole + 0.5) * whole).to(tl.int64)


@triton.jit
def prefix_of(step, least, N):
    """(number, length) of the prefix of a step."""
    prefix, length = 0, least
    while length <= step:
        prefix += 1
        length *= 2
    return prefix, tl.minimum(length, N)


@triton.jit
def edge_places(edge, begin, length, EDGES: tl.constexpr):
    """The place at which a range begins."""
    return begin + (edge.to(tl.int64) * (length - begin) // EDGES).to(tl.int32)


@triton.jit
def _first_place(scores_ptr, x, length, LESS: tl.constexpr, EQUAL: tl.constexpr):
    """The first place whose score minus LESS is over x, or at least x with EQUAL; for each x."""
    low = tl.zeros(x.shape, tl.int32)
    high = low + length
    while tl.max(high - low, 0) > 0:
        search = low < high
        middle = (low + high) // 2
        point = tl.load(scores_ptr + middle, mask=search, other=0.0).to(tl.float64) - LESS
        over = point > x
        if EQUAL:
            over = point >= x
        high = tl.where(search & over, middle, high)
        low = tl.where(search & (over == 0), middle + 1, low)
    return low


@triton.jit
def find_edges(scores_ptr, absent_ptr, begin_ptr, entering_ptr, N, least, k, EDGES: tl.constexpr):
    """Find the places at which the ranges of prefix program 1 begin.

    Args:
        scores_ptr: (prefixes, rows, N), of `write_prefixes`.
        absent_ptr: (prefixes, rows) int32: keys that are not there, which come first.
        begin_ptr: (prefixes, rows) int32: the first place that matters.
        entering_ptr: (prefixes, rows, EDGES) int32: the first place of a score over x + 1, for each point x.
    """
    row, prefix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0)
    at = prefix * rows + row
    length = tl.minimum(least << prefix, N)
    begin = tl.load(absent_ptr + at)
    edge = tl.arange(0, EDGES)
    x = tl.full((EDGES,), float("-inf"), tl.float64)
    if prefix > 0:
        half = (least << prefix) // 2
        if half - tl.load(absent_ptr + at - rows) > k:
            v = tl.load(scores_ptr + (at - rows) * N + half - k - 1).to(tl.float64)
            x = tl.zeros((EDGES,), tl.float64) + (v - 1)
            begin = tl.min(_first_place(scores_ptr + at * N, x, length, 0, True), 0)
    place = edge_places(edge, begin, length, EDGES)
    score = tl.load(scores_ptr + at * N + place, mask=place < length, other=float("inf")).to(tl.float64)
    x = tl.where(edge == 0, x, score)
    tl.store(begin_ptr + at, begin)
    tl.store(entering_ptr + at * EDGES + edge, _first_place(scores_ptr + at * N, x, length, 1, False))


@triton.jit
def add_keys(
    keys_ptr, scores_ptr, begin_ptr, entering_ptr, counts_ptr, sums_ptr, N, least, chunks, ONE: tl.constexpr,
    CHUNK: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the keys of block program 0 of a prefix to the chunk behind that in which they come, and the range of each.

    Args:
        keys_ptr, scores_ptr: (prefixes, rows, N), of `write_prefixes`.
        counts_ptr, sums_ptr: (rows, chunks, 2, EDGES) int32 and int64, zero before: of the keys in a range, and of
            those over the range's x + 1 and not over the next one's; of chunks in the prefix's second half, and of all
            keys before these in its first chunk.
    """
    block, row, prefix = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    prefix_row = prefix * tl.num_programs(1) + row
    length = tl.minimum(least << prefix, N)
    begin = tl.load(begin_ptr + prefix_row)
    if (block * BLOCK < length) & (block * BLOCK + BLOCK > begin):
        first = tl.where(prefix == 0, 0, (least << prefix) // 2)
        at = block * BLOCK + tl.arange(0, BLOCK)
        there = (at >= begin) & (at < length)
        score = tl.load(scores_ptr + prefix_row * N + at, mask=there, other=0.0)
        key = tl.load(keys_ptr + prefix_row * N + at, mask=there, other=0)
        # A key counts from the start of the chunk after its own; what the last chunk adds, nobody reads.
        chunk = tl.where(key < first, first // CHUNK, key // CHUNK + 1)
        there = there & (chunk * CHUNK < length)
        value = steps_of(score, ONE)
        # The last range of which the first place is not over this one.
        low = ((tl.maximum(at + 1 - begin, 0).to(tl.int64) * EDGES - 1) // tl.maximum(length - begin, 1)).to(tl.int32)
        low = tl.minimum(low, EDGES - 1)
        cell = (row * chunks + chunk) * 2 * EDGES
        tl.atomic_add(counts_ptr + cell + low, 1, mask=there, sem="relaxed")
        tl.atomic_add(sums_ptr + cell + low, value, mask=there, sem="relaxed")
        # The last range with x + 1 under the score, if any.
        below = tl.full((BLOCK,), -1, tl.int32)
        above = tl.full((BLOCK,), EDGES, tl.int32)
        size = EDGES
        while size > 0:
            middle = (below + above) // 2
            search = there & (above - below > 1)
            place = tl.load(entering_ptr + prefix_row * EDGES + middle, mask=search, other=0)
            below = tl.where(search & (place <= at), middle, below)
            above = tl.where(search & (place > at), middle, above)
            size //= 2
        over = there & (below >= 0)
        tl.atomic_add(counts_ptr + cell + EDGES + below, 1, mask=over, sem="relaxed")
        tl.atomic_add(sums_ptr + cell + EDGES + below, value, mask=over, sem="relaxed")


@triton.jit
def sum_chunks(counts_ptr, sums_ptr, N, least, chunks, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
               PART: tl.constexpr):  # fmt: skip
    """Sums over the chunks of prefix program 2 up to each one, in place, of some columns of a row."""
    column = tl.program_id(0) * PART + tl.arange(0, PART)
    row, prefix = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.where(prefix == 0, 0, (least << prefix) // 2) // CHUNK
    end = tl.cdiv(tl.minimum(least << prefix, N), CHUNK)
    count = tl.zeros((PART,), tl.int32)
    total = tl.zeros((PART,), tl.int64)
    for n in range(first, end, BLOCK):
        chunk = n + tl.arange(0, BLOCK)
        at = ((row * chunks + chunk) * COLUMNS)[:, None] + column[None, :]
        inside = (chunk < end)[:, None]
        counts = tl.load(counts_ptr + at, mask=inside, other=0)
        sums = tl.load(sums_ptr + at, mask=inside, other=0)
        tl.store(counts_ptr + at, tl.cumsum(counts, 0) + count[None, :], mask=inside)
        tl.store(sums_ptr + at, tl.cumsum(sums, 0) + total[None, :], mask=inside)
        count += tl.sum(counts, 0)
        total += tl.sum(sums, 0)


@triton.jit
def _at(x, index, i):
    return tl.sum(tl.where(index == i, x, 0), 0)


@triton.jit
def _before(some):
    """The sum over all nodes before each one; `some` is (NODES, NODE)."""
    node_sums = tl.sum(some, 1)
    return tl.cumsum(node_sums, 0) - node_sums


@triton.jit
def find_starts(
    u_ptr, scores_ptr, place_ptr, counts_ptr, sums_ptr, begin_ptr, entering_ptr, starts_ptr, sum_ptr, N, least, nodes,
    k, ONE: tl.constexpr, CHUNK: tl.constexpr, NODE: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Find the last point at which the walk of each node of chunk program 0 may begin: one that keeps more than k.

    Args:
        u_ptr, place_ptr: (rows, N) float32 and int32, of `prefixes`.
        counts_ptr, sums_ptr: of `sum_chunks`.
        begin_ptr, entering_ptr: of `find_edges`.
        starts_ptr: (6, rows, nodes) int32: the place at which the walk of the threshold begins, the first place that is
            over x + 1 there, C there, all keys (or more than k), the place at which the walk of the hard top-k begins,
            where at least k keys are not below, and how many these are.
        sum_ptr: (rows, nodes) int64: S.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    prefix, length = prefix_of(chunk * CHUNK, least, N)
    prefix_row = prefix * rows + row
    begin = tl.load(begin_ptr + prefix_row)
    scores_ptr += prefix_row * N
    entering_ptr += prefix_row * EDGES
    edge = tl.arange(0, EDGES)
    place = edge_places(edge, begin, length, EDGES)
    x = tl.load(scores_ptr + place, mask=place < length, other=0.0)
    cell = (row * tl.num_programs(0) + chunk) * 2 * EDGES + edge
    over_x = tl.cumsum(tl.load(counts_ptr + cell), 0, reverse=True)
    over_one = tl.cumsum(tl.load(counts_ptr + cell + EDGES), 0, reverse=True)
    sum_x = tl.cumsum(tl.load(sums_ptr + cell), 0, reverse=True)
    sum_one = tl.cumsum(tl.load(sums_ptr + cell + EDGES), 0, reverse=True)
    one = tl.full((), ONE, tl.int64)
    C = over_x - over_one
    S = sum_x - sum_one + over_one * one
    some = (place < length) & (edge > 0)  # the first is right whenever more than k keys are there
    first = tl.max(tl.where(some & (S - C * steps_of(x, ONE) - k * one > 0), edge, 0), 0)
    top_first = tl.max(tl.where(some & (over_x >= k), edge, 0), 0)

    step = chunk * CHUNK + tl.arange(0, CHUNK // NODE)[:, None] * NODE + tl.arange(0, NODE)[None, :]
    score = tl.load(u_ptr + row * N + step, mask=step < N, other=float("-inf"))
    key_place = tl.load(place_ptr + row * N + step, mask=step < N, other=-1)
    key_place = tl.where(score > float("-inf"), key_place, -1)
    value = steps_of(tl.where(key_place >= begin, score, 0.0), ONE)

    total = _at(over_x, edge, 0) + _before((key_place >= begin).to(tl.int32))
    node = chunk * (CHUNK // NODE) + tl.arange(0, CHUNK // NODE)
    there, each, zeros = node < nodes, rows * nodes, tl.zeros_like(node)
    starts_ptr += row * nodes + node
    tl.store(starts_ptr + 3 * each, total, mask=there)
    # A later point that is right overwrites an earlier one, by the same threads.
    e, behind = first, EDGES
    while e < behind:
        low = edge_places(e, begin, length, EDGES)
        high = tl.load(entering_ptr + e)
        interior = (key_place >= low) & (key_place < high)
        added = tl.where(interior, value, tl.where(key_place >= high, one, 0))
        inside = _at(C, edge, e) + _before(interior.to(tl.int32))
        kept = _at(S, edge, e) + _before(added)
        point = steps_of(tl.load(scores_ptr + low, mask=low < length, other=0.0), ONE)
        later = there & ((zeros + e == first) | (kept - inside * point - k * one > 0))
        tl.store(starts_ptr, zeros + low, mask=later)
        tl.store(starts_ptr + each, zeros + high, mask=later)
        tl.store(starts_ptr + 2 * each, inside, mask=later)
        tl.store(sum_ptr + row * nodes + node, kept, mask=later)
        e += 1
        behind = tl.where(tl.sum(later.to(tl.int32), 0) > 0, EDGES, 0)
    e, behind = top_first, EDGES
    while e < behind:
        low = edge_places(e, begin, length, EDGES)
        count = _at(over_x, edge, e) + _before((key_place >= low).to(tl.int32))
        later = there & ((zeros + e == top_first) | (count >= k))
        tl.store(starts_ptr + 4 * each, zeros + low, mask=later)
        tl.store(starts_ptr + 5 * each, count, mask=later)
        e += 1
        behind = tl.where(tl.sum(later.to(tl.int32), 0) > 0, EDGES, 0)
