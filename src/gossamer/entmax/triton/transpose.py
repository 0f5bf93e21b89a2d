"""Lists of rows turned into lists of keys on the device, in a fixed order and without synchronisation.

A cell is a key of a key head and one of SEGMENTS equal parts of the rows that read that head. Pairs are counted by
cell and placed into their cell in any order; then each finds its place among the others of its cell, which are few.
A pair is named by its place in the lists of rows, row * L + its place in the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENTS = 16


@triton.jit
def length_of(pair_counts, head, heads, GROUP: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr):
    """The pairs of a part of a key of a key head, which has then at most 2 HALF / heads parts."""
    pairs = tl.load(pair_counts + head * GROUP).to(tl.int64)
    for member in range(1, GROUP):
        pairs += tl.load(pair_counts + head * GROUP + member)
    return tl.maximum(pairs * heads // HALF + 1, LONG).to(tl.int32)


@triton.jit(do_not_specialize=["K", "head_pairs"])
def order_keys_kernel(
    cells,  # (B G, SEGMENTS, K) int32: pairs of each key in each segment; then those in earlier segments
    pair_counts,  # (B H,) int32: the pairs of each head
    sums,  # (B G, chunks, 2) int32, zero before: 1 + the pairs, 1 + the parts of the keys of each chunk
    begins,  # (B G K,) int32, to write: where the pairs of each key begin
    numbers,  # (B G K,) int32, to write: how many these are
    part_ends,  # (B G K,) int32, to write: parts of keys that are computed in parts, up to each of a head
    arrived,  # (B G K,) int32, to write: 0
    order,  # (B G K,) int32, to write: keys, of each chunk those with the most pairs first
    K,
    head_pairs,  # places for the pairs of a key head
    FORM: tl.constexpr,
):
    """Where the pairs of a chunk of STEP keys are, from their number by cell, and the order in which keys are computed.

    A chunk waits for the sums of those before it, whose programs have begun earlier. Keys that are computed in parts,
    which have no pairs left, come last.
    """
    STEP: tl.constexpr = FORM.STEP
    SEGMENTS: tl.constexpr = FORM.SEGMENTS
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    own = tl.arange(0, STEP)
    key = chunk * STEP + own
    there = key < K
    number = tl.zeros([STEP], tl.int32)
    for segment in tl.static_range(SEGMENTS):
        at = cells + (head * SEGMENTS + segment) * K + key
        of_cell = tl.load(at, mask=there, other=0)
        tl.store(at, number, mask=there)
        number += of_cell
    length = length_of(pair_counts, head, tl.num_programs(1), FORM.GROUP, FORM.LONG, FORM.HALF)
    parts = tl.where(number > length, (number + length - 1) // length, 0)
    sums += head * chunks * 2
    tl.atomic_xchg(sums + 2 * chunk, tl.sum(number, 0) + 1)
    tl.atomic_xchg(sums + 2 * chunk + 1, tl.sum(parts, 0) + 1)
    pairs_before = 0
    parts_before = 0
    for first in range(0, chunk, STEP):
        other = first + own
        of_pairs = tl.load(sums + 2 * other, mask=other < chunk, other=1, volatile=True)
        of_parts = tl.load(sums + 2 * other + 1, mask=other < chunk, other=1, volatile=True)
        while (tl.min(of_pairs, 0) == 0) | (tl.min(of_parts, 0) == 0):
            of_pairs = tl.load(sums + 2 * other, mask=other < chunk, other=1, volatile=True)
            of_parts = tl.load(sums + 2 * other + 1, mask=other < chunk, other=1, volatile=True)
        pairs_before += tl.sum(of_pairs - 1, 0)
        parts_before += tl.sum(of_parts - 1, 0)
    to = head * K + key
    first_pair = (head * head_pairs).to(tl.int32) + pairs_before
    tl.store(begins + to, first_pair + tl.cumsum(number, 0) - number, mask=there)
    tl.store(numbers + to, number, mask=there)
    tl.store(part_ends + to, parts_before + tl.cumsum(parts, 0), mask=there)
    tl.store(arrived + to, tl.zeros([STEP], tl.int32), mask=there)
    # What is compared is the number of pairs, then the place; what does not exist stays behind all else.
    left = tl.where(parts > 0, 0, number)
    place = tl.where(there, tl.minimum(left, 32767) * STEP + STEP - 1 - own, own - STEP)
    ordered = tl.sort(place, 0, descending=True)
    first_key = (head * K).to(tl.int32) + chunk * STEP
    tl.store(order + to, first_key + STEP - 1 - ordered % STEP, mask=there)


@triton.jit
def pairs(list_keys, list_counts, Q, K, n_rows, FORM: tl.constexpr):
    """(name, key, cell, segment, exists) [RP, VECTOR] of the pairs of some rows; keys of all heads."""
    GROUP: tl.constexpr = FORM.GROUP
    SEGMENTS: tl.constexpr = FORM.SEGMENTS
    number = tl.program_id(0) * FORM.RP + tl.arange(0, FORM.RP)
    place = tl.program_id(1) * FORM.VECTOR + tl.arange(0, FORM.VECTOR)
    count = tl.load(list_counts + number, mask=number < n_rows, other=0)
    there = place[None, :] < count[:, None]
    name = number.to(tl.int64)[:, None] * FORM.L + place[None, :]
    key = tl.load(list_keys + name, mask=there, other=0)
    head = number // Q
    owner = head // GROUP  # of the key heads of all batch elements: H is a multiple of GROUP
    local = (head % GROUP).to(tl.int64) * Q + number % Q
    segment = local * SEGMENTS // (Q.to(tl.int64) * GROUP)
    owner = owner.to(tl.int64)
    cell = (owner * SEGMENTS + segment)[:, None] * K + key
    return name, owner[:, None] * K + key, cell, segment[:, None] + tl.zeros_like(key), there


@triton.jit(do_not_specialize=["Q", "K", "n_rows"])
def count_kernel(
    list_keys,  # (rows, L) int32
    list_counts,  # (rows,) int32
    cells,  # (B G, SEGMENTS, K) int32, zero before
    Q, K, n_rows, FORM: tl.constexpr,
):  # fmt: skip
    """The number of pairs of each cell."""
    _, _, cell, _, there = pairs(list_keys, list_counts, Q, K, n_rows, FORM)
    tl.atomic_add(cells + cell, 1, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["Q", "K", "n_rows"])
def place_kernel(
    list_keys,  # (rows, L) int32
    list_counts,  # (rows,) int32
    begins,  # (B G K,) int32: where each key begins
    cells,  # (B G, SEGMENTS, K) int32: pairs in earlier segments; then also those of the segment
    names,  # (pairs,) int32, to write
    Q, K, n_rows, FORM: tl.constexpr,
):  # fmt: skip
    """Every pair into its cell."""
    name, key, cell, _, there = pairs(list_keys, list_counts, Q, K, n_rows, FORM)
    place = tl.load(begins + key, mask=there, other=0) + tl.atomic_add(cells + cell, 1, mask=there, sem="relaxed")
    tl.store(names + place, name.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["Q", "K", "n_rows"])
def order_kernel(
    list_keys,  # (rows, L) int32
    list_counts,  # (rows,) int32
    begins,  # (B G K,) int32: where each key begins
    cells,  # (B G, SEGMENTS, K) int32: where each cell of a key ends
    names,  # (pairs,) int32
    ordered_names,  # (pairs,) int32, to write
    Q, K, n_rows, FORM: tl.constexpr,
):  # fmt: skip
    """The pairs of each cell in the order of their names."""
    name, key, cell, segment, there = pairs(list_keys, list_counts, Q, K, n_rows, FORM)
    begin = tl.load(begins + key, mask=there, other=0)
    end = begin + tl.load(cells + cell, mask=there, other=0)
    begin += tl.load(cells + cell - K, mask=there & (segment > 0), other=0)
    name = name.to(tl.int32)
    before = tl.zeros([FORM.RP, FORM.VECTOR], tl.int32)
    for i in range(tl.max(tl.max(tl.where(there, end - begin, 0), 1), 0)):
        other = tl.load(names + begin + i, mask=there & (begin + i < end), other=0x7FFFFFFF)
        before += (other < name).to(tl.int32)
    tl.store(ordered_names + begin + before, name, mask=there)
