"""dK and dV from the lists of keys: each pair has its weight p and the gradient dS of its score.

A program takes keys with about as many pairs each, so that none waits for a longer one. Keys with more than LONG pairs
are computed in parts, whose sums are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.gather import where
from gossamer.entmax.triton.transpose import length_of
from gossamer.kernels.triton.gather.pieces import added, load_pieces, scaled, store_pieces, zeros

LONG = 128
HALF = 16384  # of the most parts: with more pairs these are longer


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


@triton.jit(do_not_specialize=["Q", "K", "n_keys", "halvings", "part_programs", "part_places"])
def columns_kernel(
    q,  # (B, H, Q, D)
    dout,  # (B, H, Q, E)
    names,  # (pairs,) int32, by keys
    begins, numbers, part_ends, arrived, order, pair_counts,  # of `order_keys_kernel`
    gradients,  # (rows, L, 2) float32: p and dS
    dk,  # (B, G, K, D) contiguous, to write
    dv,  # (B, G, K, E) contiguous, to write
    part_dk,  # (B G, part_places, D) float32, to write
    part_dv,  # (B G, part_places, E) float32, to write
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, n_keys, halvings, part_programs,
    part_places, scale,
    L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr,
    N: tl.constexpr, GROUP: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """dK and dV: of RP keys, or of some of the parts of the keys of a head, by its first programs."""
    heads = n_keys // K
    program = tl.program_id(0) - heads * part_programs
    if program < 0:
        head = tl.program_id(0) // part_programs
        length = length_of(pair_counts, head, heads, GROUP, LONG, HALF)
        for part in range(tl.program_id(0) % part_programs, tl.load(part_ends + (head + 1) * K - 1), part_programs):
            add_part(
                head, part, length, q, dout, names, begins, numbers, part_ends, arrived, gradients, dk, dv, part_dk,
                part_dv, stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, halvings,
                part_places, scale, L, D, E, SD, SE, RP, N, GROUP,
            )  # fmt: skip
    else:
        add_keys(
            program, q, dout, names, begins, numbers, part_ends, order, gradients, dk, dv, stride_qb, stride_qh,
            stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, n_keys, scale, L, D, E, SD, SE, RP, N, GROUP,
        )  # fmt: skip


@triton.jit
def add_keys(
    program, q, dout, names, begins, numbers, part_ends, order, gradients, dk, dv, stride_qb, stride_qh, stride_qn,
    stride_gb, stride_gh, stride_gn, H, Q, K, n_keys, scale, L: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dK and dV of RP keys that are not computed in parts."""
    place = program * RP + tl.arange(0, RP)
    m_key = place < n_keys
    key = tl.load(order + place, mask=m_key, other=0).to(tl.int64)
    owner = key // K
    G = H // GROUP
    begin = tl.load(begins + key, mask=m_key, other=0)
    count = tl.load(numbers + key, mask=m_key, other=0)
    parts_before = tl.load(part_ends + key - 1, mask=m_key & (key % K > 0), other=0)
    m_key = m_key & (tl.load(part_ends + key, mask=m_key, other=0) == parts_before)
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


@triton.jit
def add_part(
    head, part, length, q, dout, names, begins, numbers, part_ends, arrived, gradients, dk, dv, part_dk, part_dv,
    stride_qb, stride_qh, stride_qn, stride_gb, stride_gh, stride_gn, H, Q, K, halvings, part_places, scale,
    L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr,
    N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sums of a part of a key of a head; who is last of the key adds up all of them, in order."""
    # The first key up to which there are more parts.
    first_key = head.to(tl.int64) * K
    low = 0
    high = K - 1
    for _ in range(halvings):
        between = low + (high - low) // 2
        over = tl.load(part_ends + first_key + between) > part
        high = tl.where(over, between, high)
        low = tl.where(over, low, tl.minimum(between + 1, high))
    key = first_key + high
    before = tl.load(part_ends + key - 1, mask=high > 0, other=0)
    parts = tl.load(part_ends + key) - before
    begin = tl.load(begins + key) + (part - before) * length
    o = tl.arange(0, RP)
    left = tl.minimum(tl.load(numbers + key) - (part - before) * length, length) - o
    G = H // GROUP
    zero = tl.zeros([RP], tl.int64)
    b_dk, b_dv = sums_of(
        q, dout, names, gradients, begin + o, left, zero + head // G, zero + head % G, H, Q, stride_qb, stride_qh,
        stride_qn, stride_gb, stride_gh, stride_gn, L, D, E, SD, SE, RP, N, RP, GROUP,
    )  # fmt: skip
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    first_place = tl.zeros([1], tl.int64) + head * part_places
    at = first_place + part
    store_pieces(part_dk + o_d, at * D, at >= 0, folded(b_dk, D, SD), D, SD)
    store_pieces(part_dv + o_e, at * E, at >= 0, folded(b_dv, E, SE), E, SE)
    tl.debug_barrier()  # all of it is written before it counts as arrived
    if tl.atomic_add(arrived + key, 1, sem="acq_rel") == parts - 1:
        one = tl.zeros([1], tl.float32) + 1.0
        s_dk = zeros(1, D, SD)
        s_dv = zeros(1, E, SE)
        for i in range(parts):
            at = first_place + before + i
            s_dk = added(s_dk, one, load_pieces(part_dk + o_d, at * D, D, SD), D, SD)
            s_dv = added(s_dv, one, load_pieces(part_dv + o_e, at * E, E, SE), E, SE)
        s_dk = scaled(s_dk, one * scale, D, SD)
        to = tl.zeros([1], tl.int64) + key
        store_pieces(dk + o_d, to * D, to >= 0, s_dk, D, SD)
        store_pieces(dv + o_e, to * E, to >= 0, s_dv, E, SE)
