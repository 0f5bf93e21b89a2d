"""dK and dV from the lists of keys: each pair has its weight p and the gradient dS of its score.

A program takes keys with about as many pairs each, so that none waits for a longer one. Keys with more than LONG pairs
are computed in parts, whose sums are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.gather import where
from gossamer.kernels.triton.gather.pieces import added, load_pieces, scaled, store_pieces, zeros

LONG = 128
HALF = 16384  # of the most parts: with more pairs these are longer


@triton.jit
def length_of(begins, n_keys, LONG: tl.constexpr, HALF: tl.constexpr):
    """The pairs of a part, of which there are then at most 2 HALF."""
    return tl.maximum(tl.load(begins + n_keys) // HALF + 1, LONG)


@triton.jit(do_not_specialize=["n_keys"])
def order_keys_kernel(
    begins,  # (B G K + 1,) int32
    order,  # (B G K,) int32, to write: keys, of each STEP those with the most pairs first
    parts,  # (B G K,) int32, to write: parts of keys that are computed in parts
    n_keys, LONG: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the order in which keys are computed; those in parts, which have no pairs left, come last."""
    length = length_of(begins, n_keys, LONG, HALF)
    own = tl.arange(0, STEP)
    key = tl.program_id(0) * STEP + own
    there = key < n_keys
    number = tl.load(begins + key + 1, mask=there, other=0) - tl.load(begins + key, mask=there, other=0)
    tl.store(parts + key, tl.where(number > length, (number + length - 1) // length, 0), mask=there)
    # What is compared is the number of pairs, then the place; what does not exist stays behind all else.
    left = tl.where(number > length, 0, number)
    place = tl.where(there, tl.minimum(left, 32767) * STEP + STEP - 1 - own, own - STEP)
    ordered = tl.sort(place, 0, descending=True)
    tl.store(order + key, tl.program_id(0) * STEP + STEP - 1 - ordered % STEP, mask=there)


@triton.jit
def sums_of(
    q, dout, names, gradients, begin, left, b64, g64, H, Q, stride_qb, stride_qh, stride_qn, stride_gb,
    stride_gh, stride_gn, L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr,
    RP: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(sum dS q, sum p dout) of `left` [RP] pairs from `begin` [RP] on, every STRIDE-th of them, in pieces."""
    q_base = q + (b64 * stride_qb + g64 * GROUP * stride_qh)[:, None] + tl.arange(0, SD)[None, :]
    dout_base = dout + (b64 * stride_gb + g64 * GROUP * stride_gh)[:, None] + tl.arange(0, SE)[None, :]
    first_row = (b64 * H + g64 * GROUP) * Q
    b_dk = zeros(RP, D, SD)
    b_dv = zeros(RP, E, SE)
    pointers = names + begin
    # Past the end a list names its first pair, with weights of 0: rows of others may hold what is no number.
    some = left > 0
    start = tl.load(pointers, mask=some, other=0)
    ahead: tl.tuple = ()
    for c in tl.static_range(N):
        ahead += (tl.load(pointers + c * STRIDE, mask=c * STRIDE < left, other=start),)
    for _step in range(0, tl.max(left, 0), N * STRIDE):
        rows_q: tl.tuple = ()
        rows_dout: tl.tuple = ()
        p: tl.tuple = ()
        ds: tl.tuple = ()
        for c in tl.static_range(N):
            there = c * STRIDE < left
            of_pair = gradients + 2 * ahead[c].to(tl.int64)
            p += (tl.load(of_pair, mask=there, other=0.0),)
            ds += (tl.load(of_pair + 1, mask=there, other=0.0),)
            row = tl.where(some, (ahead[c] // L).to(tl.int64) - first_row, 0)
            if GROUP == 1:
                rows_q += (load_pieces(q_base, row * stride_qn, D, SD),)
                rows_dout += (load_pieces(dout_base, row * stride_gn, E, SE),)
            else:
                member, r = row // Q, row % Q
                rows_q += (load_pieces(q_base, member * stride_qh + r * stride_qn, D, SD),)
                rows_dout += (load_pieces(dout_base, member * stride_gh + r * stride_gn, E, SE),)
        # The next names are loaded a step ahead, so that the loads of their rows do not wait for them.
        pointers += N * STRIDE
        left -= N * STRIDE
        following: tl.tuple = ()
        for c in tl.static_range(N):
            following += (tl.load(pointers + c * STRIDE, mask=c * STRIDE < left, other=start),)
        ahead = following
        for c in tl.static_range(N):
            b_dk = added(b_dk, ds[c], rows_q[c], D, SD)
            b_dv = added(b_dv, p[c], rows_dout[c], E, SE)
    return where(some, b_dk, D, SD), where(some, b_dv, E, SE)


@triton.jit(do_not_specialize=["Q", "K", "n_keys"])
def columns_kernel(
    q,  # (B, H, Q, D)
    dout,  # (B, H, Q, E)
    names,  # (pairs,) int32, by keys
    begins,  # (B G K + 1,) int32
    gradients,  # (rows, L, 2) float32: p and dS
    order,  # (B G K,) int32
    dk,  # (B, G, K, D) contiguous, to write
    dv,  # (B, G, K, E) contiguous, to write
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, n_keys, scale,
    L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr,
    N: tl.constexpr, GROUP: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """dK and dV of RP keys that are not computed in parts."""
    place = tl.program_id(0) * RP + tl.arange(0, RP)
    m_key = place < n_keys
    key = tl.load(order + place, mask=m_key, other=0).to(tl.int64)
    owner = key // K
    G = H // GROUP
    begin = tl.load(begins + key, mask=m_key, other=0)
    count = tl.load(begins + key + 1, mask=m_key, other=0) - begin
    m_key = m_key & (count <= length_of(begins, n_keys, LONG, HALF))
    left = tl.where(m_key, count, 0)
    b64 = tl.where(m_key, owner // G, 0)
    b_dk, b_dv = sums_of(
        q, dout, names, gradients, begin, left, b64, tl.where(m_key, owner % G, 0), H, Q, stride_qb, stride_qh,
        stride_qn, stride_gb, stride_gh, stride_gn, L, D, E, SD, SE, RP, N, 1, GROUP,
    )  # fmt: skip
    b_dk = scaled(b_dk, tl.zeros([RP], tl.float32) + scale, D, SD)
    store_pieces(dk + tl.arange(0, SD)[None, :], key * D, m_key, b_dk, D, SD)
    store_pieces(dv + tl.arange(0, SE)[None, :], key * E, m_key, b_dv, E, SE)


@triton.jit
def folded(blocks, SIZE: tl.constexpr, S: tl.constexpr):
    """Pieces [RP, S] added over their rows: [1, S]."""
    sums: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        sums += (tl.sum(blocks[p], 0)[None, :],)
    return sums


@triton.jit(do_not_specialize=["Q", "K", "n_keys", "halvings"])
def long_parts_kernel(
    q,  # (B, H, Q, D)
    dout,  # (B, H, Q, E)
    names,  # (pairs,) int32, by keys
    begins,  # (B G K + 1,) int32
    part_ends,  # (B G K,) int32: parts of all keys up to each
    gradients,  # (rows, L, 2) float32: p and dS
    part_dk,  # (parts, D) float32, to write
    part_dv,  # (parts, E) float32, to write
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, n_keys, halvings,
    L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr,
    N: tl.constexpr, GROUP: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The sums of the parts of keys; each program takes every so many-th part."""
    length = length_of(begins, n_keys, LONG, HALF)
    G = H // GROUP
    o = tl.arange(0, RP)
    for part in range(tl.program_id(0), tl.load(part_ends + n_keys - 1), tl.num_programs(0)):
        # The first key up to which there are more parts.
        low = 0
        high = n_keys - 1
        for _ in range(halvings):
            between = low + (high - low) // 2
            over = tl.load(part_ends + between) > part
            high = tl.where(over, between, high)
            low = tl.where(over, low, tl.minimum(between + 1, high))
        before = tl.load(part_ends + high - 1, mask=high > 0, other=0)
        owner = (high // K).to(tl.int64)
        begin = tl.load(begins + high) + (part - before) * length
        left = tl.minimum(tl.load(begins + high + 1) - begin, length) - o
        b64 = tl.zeros([RP], tl.int64) + owner // G
        b_dk, b_dv = sums_of(
            q, dout, names, gradients, begin + o, left, b64, tl.zeros([RP], tl.int64) + owner % G, H, Q,
            stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, L, D, E, SD, SE, RP, N, RP, GROUP,
        )  # fmt: skip
        at = tl.zeros([1], tl.int64) + part
        store_pieces(part_dk + tl.arange(0, SD)[None, :], at * D, at >= 0, folded(b_dk, D, SD), D, SD)
        store_pieces(part_dv + tl.arange(0, SE)[None, :], at * E, at >= 0, folded(b_dv, E, SE), E, SE)


@triton.jit(do_not_specialize=["n_keys"])
def long_sums_kernel(
    part_ends,  # (B G K,) int32
    part_dk,  # (parts, D) float32
    part_dv,  # (parts, E) float32
    dk,  # (B, G, K, D) contiguous, to write
    dv,  # (B, G, K, E) contiguous, to write
    n_keys, scale,
    D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """dK and dV of those keys among RP that have parts: the sums of these, in order."""
    if tl.load(part_ends + n_keys - 1) == 0:
        return
    for block in range(tl.program_id(0), (n_keys + RP - 1) // RP, tl.num_programs(0)):
        key = tl.arange(0, RP).to(tl.int64) + block * RP
        m_key = key < n_keys
        end = tl.load(part_ends + key, mask=m_key, other=0)
        begin = tl.load(part_ends + key - 1, mask=m_key & (key > 0), other=0)
        m_key = m_key & (end > begin)
        parts = tl.where(m_key, end - begin, 0)
        most = tl.max(parts, 0)
        if most > 0:
            b_dk = zeros(RP, D, SD)
            b_dv = zeros(RP, E, SE)
            for i in range(most):
                there = tl.where(i < parts, 1.0, 0.0)
                at = tl.where(m_key, tl.minimum(begin + i, end - 1), 0).to(tl.int64)
                b_dk = added(b_dk, there, load_pieces(part_dk + tl.arange(0, SD)[None, :], at * D, D, SD), D, SD)
                b_dv = added(b_dv, there, load_pieces(part_dv + tl.arange(0, SE)[None, :], at * E, E, SE), E, SE)
            b_dk = scaled(b_dk, tl.zeros([RP], tl.float32) + scale, D, SD)
            store_pieces(dk + tl.arange(0, SD)[None, :], key * D, m_key, b_dk, D, SD)
            store_pieces(dv + tl.arange(0, SE)[None, :], key * E, m_key, b_dv, E, SE)
