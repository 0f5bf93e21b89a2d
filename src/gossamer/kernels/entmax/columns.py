"""dK and dV from the lists of keys: each pair has its weight p and the gradient dS of its score.

The lists of KEYS neighbouring keys follow one another. Their pairs are taken CHUNK at a time, whatever keys they are
of: with p and dS in the row of their key, and 0 in those of the others, the sums are products of matrices. Keys with
more than LONG pairs together are computed in parts, whose sums are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.entmax.rows import load_tile

KEYS = 16
LONG = 1024
HALF = 2048  # of the most parts: with more pairs, parts are longer


@triton.jit
def length_of(begins, K, blocks, n_blocks, SEGMENTS: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr):
    """The pairs of a part."""
    pairs = tl.load(begins + (n_blocks // blocks).to(tl.int64) * K * SEGMENTS)
    return tl.maximum(pairs // HALF + 1, LONG)


@triton.jit
def weighted(acc, own, w, rows, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """acc [M, S] + the sums of w [C] times rows [C, S] of those that each of M owns [M, C].

    With rows of bfloat16 weights are two such numbers each, with SPLIT, or one.
    """
    if rows.dtype == tl.bfloat16:
        high = w.to(tl.bfloat16)
        acc = tl.dot(tl.where(own, high[None, :], 0.0), rows, acc)
        if SPLIT:
            low = (w - high.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(tl.where(own, low[None, :], 0.0), rows, acc)
    else:
        acc = tl.dot(tl.where(own, w[None, :], 0.0), rows.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["K", "blocks", "n_blocks"])
def parts_kernel(
    begins,  # (B G K SEGMENTS + 1,) int32
    part_ends,  # (n_blocks,) int32, to write: parts of all blocks up to each
    K, blocks, n_blocks,
    KEYS: tl.constexpr, SEGMENTS: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """How many parts the blocks of keys have; none where their pairs are those of one."""
    before = 0
    length = length_of(begins, K, blocks, n_blocks, SEGMENTS, LONG, HALF)
    for first in range(0, n_blocks, STEP):
        block = first + tl.arange(0, STEP)
        begin, end = run_of(block, begins, K, blocks, block < n_blocks, KEYS, SEGMENTS)
        number = tl.where(end - begin > length, (end - begin + length - 1) // length, 0)
        tl.store(part_ends + block, before + tl.cumsum(number, 0), mask=block < n_blocks)
        before += tl.sum(number, 0)


@triton.jit
def run_of(block, begins, K, blocks, there, KEYS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Where the pairs of a block of keys begin and end; there are `blocks` of each head."""
    first = block % blocks * KEYS
    key = (block // blocks).to(tl.int64) * K + first
    begin = tl.load(begins + key * SEGMENTS, mask=there, other=0)
    return begin, tl.load(begins + (key + tl.minimum(KEYS, K - first)) * SEGMENTS, mask=there, other=0)


@triton.jit
def sums_of(
    q, dout, names, begins, gradients, begin, end, block, blocks, H, Q, K, stride_qb, stride_qh, stride_qn, stride_gb,
    stride_gh, stride_gn, L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(sum dS q [KEYS, BLOCK_D], sum p dout [KEYS, BLOCK_E]) of the pairs [begin, end) of a block of keys."""
    owner = block // blocks
    b, g = owner // (H // GROUP), owner % (H // GROUP)
    first_head = b * H + g * GROUP
    q_base = q + b.to(tl.int64) * stride_qb + g.to(tl.int64) * GROUP * stride_qh
    dout_base = dout + b.to(tl.int64) * stride_gb + g.to(tl.int64) * GROUP * stride_gh
    j = block % blocks * KEYS + tl.arange(0, KEYS)
    cell = begins + (owner.to(tl.int64) * K + j) * SEGMENTS
    first = tl.load(cell, mask=j < K, other=0)
    last = tl.load(cell + SEGMENTS, mask=j < K, other=0)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_E], tl.float32)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_e = tl.arange(0, BLOCK_E)[None, :]
    for start in tl.range(begin, end, CHUNK, num_stages=STAGES):
        place = start + tl.arange(0, CHUNK)
        there = place < end
        name = tl.load(names + place, mask=there, other=0)
        # Rows past the end are 0: what is there otherwise may be no number.
        row = tl.where(there, name // L - first_head * Q, 0)
        if GROUP == 1:
            of_q = row.to(tl.int64) * stride_qn
            of_dout = row.to(tl.int64) * stride_gn
        else:
            member = (row // Q).to(tl.int64)
            of_q = member * stride_qh + (row % Q).to(tl.int64) * stride_qn
            of_dout = member * stride_gh + (row % Q).to(tl.int64) * stride_gn
        p = tl.load(gradients + 2 * name.to(tl.int64), mask=there, other=0.0)
        ds = tl.load(gradients + 2 * name.to(tl.int64) + 1, mask=there, other=0.0)
        b_q = tl.load(q_base + of_q[:, None] + o_d, mask=there[:, None] & (o_d < D), other=0.0)
        b_dout = tl.load(dout_base + of_dout[:, None] + o_e, mask=there[:, None] & (o_e < E), other=0.0)
        own = (place[None, :] >= first[:, None]) & (place[None, :] < last[:, None])
        dk = weighted(dk, own, ds, b_q, SPLIT, PRECISION)
        dv = weighted(dv, own, p, b_dout, SPLIT, PRECISION)
    return dk, dv


@triton.jit
def store_sums(to, x, rows, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write x [KEYS, BLOCK] to those rows [KEYS] of a contiguous matrix of SIZE columns that are there."""
    o = tl.arange(0, BLOCK)
    pointers = to + rows.to(tl.int64)[:, None] * SIZE + o[None, :]
    tl.store(pointers, x.to(to.dtype.element_ty), mask=there[:, None] & (o < SIZE)[None, :])


@triton.jit(do_not_specialize=["Q", "K", "blocks", "n_blocks", "halvings"])
def columns_kernel(
    q,  # (B, H, Q, D)
    dout,  # (B, H, Q, E)
    names,  # (pairs,) int32, by keys
    begins,  # (B G K SEGMENTS + 1,) int32
    gradients,  # (rows, L, 2) float32: p and dS
    part_ends,  # (n_blocks,) int32
    part_dk,  # (parts, KEYS, D) float32, to write
    part_dv,  # (parts, KEYS, E) float32, to write
    dk,  # (B, G, K, D) contiguous, to write
    dv,  # (B, G, K, E) contiguous, to write
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, blocks, n_blocks, halvings, scale,
    L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, SEGMENTS: tl.constexpr,
    LONG: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of KEYS keys of a head without parts; or, with PARTS, the sums of parts of others.

    With PARTS each program takes every so many-th part.
    """
    length = length_of(begins, K, blocks, n_blocks, SEGMENTS, LONG, HALF)
    if PARTS:
        for part in range(tl.program_id(0), tl.load(part_ends + n_blocks - 1), tl.num_programs(0)):
            # The first block up to which there are more parts.
            low = 0
            high = n_blocks - 1
            for _ in range(halvings):
                between = low + (high - low) // 2
                over = tl.load(part_ends + between) > part
                high = tl.where(over, between, high)
                low = tl.where(over, low, tl.minimum(between + 1, high))
            begin, end = run_of(high, begins, K, blocks, True, KEYS, SEGMENTS)
            begin += (part - tl.load(part_ends + high - 1, mask=high > 0, other=0)) * length
            b_dk, b_dv = sums_of(
                q, dout, names, begins, gradients, begin, tl.minimum(end, begin + length), high, blocks, H, Q, K,
                stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, L, D, E, BLOCK_D, BLOCK_E, GROUP,
                KEYS, CHUNK, STAGES, SEGMENTS, SPLIT, PRECISION,
            )  # fmt: skip
            to = part * KEYS + tl.arange(0, KEYS)
            store_sums(part_dk, b_dk, to, to >= 0, D, BLOCK_D)
            store_sums(part_dv, b_dv, to, to >= 0, E, BLOCK_E)
    else:
        block = tl.program_id(0)
        begin, end = run_of(block, begins, K, blocks, True, KEYS, SEGMENTS)
        if end - begin > length:
            return
        b_dk, b_dv = sums_of(
            q, dout, names, begins, gradients, begin, end, block, blocks, H, Q, K, stride_qb, stride_qh, stride_qn,
            stride_gb, stride_gh, stride_gn, L, D, E, BLOCK_D, BLOCK_E, GROUP, KEYS, CHUNK, STAGES, SEGMENTS, SPLIT,
            PRECISION,
        )  # fmt: skip
        key = block % blocks * KEYS + tl.arange(0, KEYS)
        to = block // blocks * K + key
        store_sums(dk, b_dk * scale, to, key < K, D, BLOCK_D)
        store_sums(dv, b_dv, to, key < K, E, BLOCK_E)


@triton.jit(do_not_specialize=["K", "blocks", "n_blocks"])
def part_sums_kernel(
    part_ends,  # (n_blocks,) int32
    part_dk,  # (parts, KEYS, D) float32
    part_dv,  # (parts, KEYS, E) float32
    dk,  # (B, G, K, D) contiguous, to write
    dv,  # (B, G, K, E) contiguous, to write
    K, blocks, n_blocks, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of the blocks of keys that have parts: the sums of these, in order."""
    if tl.load(part_ends + n_blocks - 1) == 0:
        return
    for block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        end = tl.load(part_ends + block)
        begin = tl.load(part_ends + block - 1, mask=block > 0, other=0)
        if end > begin:
            own = tl.arange(0, KEYS)
            b_dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
            b_dv = tl.zeros([KEYS, BLOCK_E], tl.float32)
            for part in range(begin, end):
                rows = part * KEYS + own
                b_dk += load_tile(part_dk, rows, own >= 0, D, D, BLOCK_D)
                b_dv += load_tile(part_dv, rows, own >= 0, E, E, BLOCK_E)
            key = block % blocks * KEYS + own
            to = block // blocks * K + key
            store_sums(dk, b_dk * scale, to, key < K, D, BLOCK_D)
            store_sums(dv, b_dv, to, key < K, E, BLOCK_E)
