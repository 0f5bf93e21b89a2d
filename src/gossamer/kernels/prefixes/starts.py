"""Where walks start: exact sums over the keys before a step, at some of their scores: kernels.

The keys of a prefix in order are cut into BUCKETS of equally many, and x is the score at which one begins. With the
sums over keys before the step of those over x, and of those over x + 1, f(x) = sum clip(u - x, 0, 1) follows. Scores
are integers in equal steps, which are added modulo 2^64: the sums that are used are smaller.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def steps_of(score, ONE: tl.constexpr):
    """Scores of float32 in steps of 1 / ONE, modulo 2^64."""
    whole = 18446744073709551616.0  # 2^64, of which what is infinite counts as a multiple
    x = tl.where(tl.abs(score) == float("inf"), 0.0, score).to(tl.float64)
    x = tl.floor(x * ONE + 0.5)
    x = x - tl.floor(x / whole) * whole
    return tl.where(x >= whole / 2, x - whole, x).to(tl.int64)


@triton.jit
def prefix_of(node, NODE: tl.constexpr, least, N):
    """(which prefix, its first step, its length) of a node of NODE steps."""
    start = node * NODE
    prefix, length = 0, least
    while length <= start:
        prefix += 1
        length *= 2
    return prefix, tl.where(prefix == 0, 0, length // 2), tl.minimum(length, N)


@triton.jit
def edge_places(bucket, length, BUCKETS: tl.constexpr):
    """The place at which a bucket begins."""
    return (bucket.to(tl.int64) * length // BUCKETS).to(tl.int32)


@triton.jit
def add_keys(
    keys_ptr, scores_ptr, counts_ptr, sums_ptr, N, least, nodes, ONE: tl.constexpr, NODE: tl.constexpr,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the keys of block program 0 of a prefix to the node in which they come, and the bucket in which they lie.

    Args:
        keys_ptr, scores_ptr: (prefixes, rows, N), of `write_prefixes`.
        counts_ptr, sums_ptr: (rows, nodes, 2, BUCKETS) int32 and int64, zero before: of the keys in a bucket, and of
            those over the bucket's x + 1 and not over the next one's; of nodes in the prefix's second half, and of all
            keys before these in its first node.
    """
    block, row, prefix = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows = tl.num_programs(1)
    length = tl.minimum(least << prefix, N)
    first = tl.where(prefix == 0, 0, (least << prefix) // 2)
    at = block * BLOCK + tl.arange(0, BLOCK)
    base = (prefix * rows + row) * N
    there = at < length
    score = tl.load(scores_ptr + base + at, mask=there, other=float("-inf"))
    key = tl.load(keys_ptr + base + at, mask=there, other=0)
    there = there & (score > float("-inf"))
    # A key counts from the start of the node after its own; what the last node adds, nobody reads.
    node = tl.where(key < first, first // NODE, key // NODE + 1)
    there = there & (node * NODE < length)
    value = steps_of(tl.where(there, score, 0.0), ONE)
    # The last bucket of which the first place is not over this one.
    low = (((at + 1).to(tl.int64) * BUCKETS - 1) // length).to(tl.int32)
    low = tl.minimum(low, BUCKETS - 1)
    cell = (row * nodes + node) * 2 * BUCKETS
    tl.atomic_add(counts_ptr + cell + low, 1, mask=there, sem="relaxed")
    tl.atomic_add(sums_ptr + cell + low, value, mask=there, sem="relaxed")
    # The last bucket with x + 1 under the score, if any: x is the score at its first place.
    below = tl.full((BLOCK,), -1, tl.int32)
    above = tl.full((BLOCK,), BUCKETS, tl.int32)
    size = BUCKETS
    while size > 0:
        middle = (below + above) // 2
        search = above - below > 1
        x = tl.load(scores_ptr + base + edge_places(middle, length, BUCKETS), mask=search & there, other=0.0)
        under = score.to(tl.float64) - 1 > x.to(tl.float64)
        below = tl.where(search & under, middle, below)
        above = tl.where(search & (under == 0), middle, above)
        size //= 2
    over = there & (below >= 0)
    tl.atomic_add(counts_ptr + cell + BUCKETS + below, 1, mask=over, sem="relaxed")
    tl.atomic_add(sums_ptr + cell + BUCKETS + below, value, mask=over, sem="relaxed")


@triton.jit
def sum_nodes(counts_ptr, sums_ptr, N, least, nodes, NODE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
              PART: tl.constexpr):  # fmt: skip
    """Sums over the nodes of prefix program 2 up to each one, in place, of some columns of a row."""
    column = tl.program_id(0) * PART + tl.arange(0, PART)
    row, prefix = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.where(prefix == 0, 0, (least << prefix) // 2) // NODE
    end = tl.cdiv(tl.minimum(least << prefix, N), NODE)
    count = tl.zeros((PART,), tl.int32)
    total = tl.zeros((PART,), tl.int64)
    for n in range(first, end, BLOCK):
        node = n + tl.arange(0, BLOCK)
        at = ((row * nodes + node) * COLUMNS)[:, None] + column[None, :]
        inside = (node < end)[:, None]
        counts = tl.load(counts_ptr + at, mask=inside, other=0)
        sums = tl.load(sums_ptr + at, mask=inside, other=0)
        tl.store(counts_ptr + at, tl.cumsum(counts, 0) + count[None, :], mask=inside)
        tl.store(sums_ptr + at, tl.cumsum(sums, 0) + total[None, :], mask=inside)
        count += tl.sum(counts, 0)
        total += tl.sum(sums, 0)


@triton.jit
def find_starts(
    scores_ptr, counts_ptr, sums_ptr, absent_ptr, bucket_ptr, top_bucket_ptr, count_ptr, sum_ptr, top_count_ptr,
    total_ptr, N, least, nodes, k, ONE: tl.constexpr, NODE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """The last bucket at which a walk of node program 0 may begin: where more than k is kept.

    Args:
        counts_ptr, sums_ptr: of `sum_nodes`.
        absent_ptr: (prefixes, rows) int32: keys that are not there, which come first.
        bucket_ptr, top_bucket_ptr: (rows, nodes) int32: of the threshold, where f > k, and of the hard top-k, where at
            least k keys are not below; -1 where the walk begins below all keys.
        count_ptr, sum_ptr: (rows, nodes) int32 and int64: C and S there.
        top_count_ptr, total_ptr: (rows, nodes) int32: the keys that are not below `top_bucket_ptr`, and all.
    """
    node, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    prefix, _, length = prefix_of(node, NODE, least, N)
    bucket = tl.arange(0, BUCKETS)
    base = (prefix * rows + row) * N
    place = edge_places(bucket, length, BUCKETS)
    x = tl.load(scores_ptr + base + place)
    cell = (row * nodes + node) * 2 * BUCKETS + bucket
    over_x = tl.cumsum(tl.load(counts_ptr + cell), 0, reverse=True)
    over_one = tl.cumsum(tl.load(counts_ptr + cell + BUCKETS), 0, reverse=True)
    sum_x = tl.cumsum(tl.load(sums_ptr + cell), 0, reverse=True)
    sum_one = tl.cumsum(tl.load(sums_ptr + cell + BUCKETS), 0, reverse=True)
    one = tl.full((), ONE, tl.int64)
    C = over_x - over_one
    S = sum_x - sum_one + over_one * one
    there = (place >= tl.load(absent_ptr + prefix * rows + row)) & (x > float("-inf"))
    excess = S - C * steps_of(tl.where(there, x, 0.0), ONE) - k * one
    found = tl.max(tl.where(there & (excess > 0), bucket, -1), 0)
    here = bucket == found
    total = tl.sum(tl.where(bucket == 0, over_x, 0), 0)
    at = row * nodes + node
    tl.store(bucket_ptr + at, found)
    tl.store(total_ptr + at, total)
    tl.store(count_ptr + at, tl.sum(tl.where(here, C, 0), 0))
    tl.store(sum_ptr + at, tl.where(found < 0, total * one, tl.sum(tl.where(here, S, 0), 0)))
    top = tl.max(tl.where(there & (over_x >= k), bucket, -1), 0)
    tl.store(top_bucket_ptr + at, top)
    tl.store(top_count_ptr + at, tl.where(top < 0, total, tl.sum(tl.where(bucket == top, over_x, 0), 0)))
