"""dK and dV from the lists of keys: each pair has its weight p and the gradient dS of its score.

A program takes keys with about as many pairs each, so that none waits for a longer one. Keys with more than LONG pairs
are computed in parts, whose sums are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.gather import where
from gossamer.entmax.triton.parameters import ColumnNumbers, KeyLists, KeyResults, KeyStrides
from gossamer.entmax.triton.transpose import length_of
from gossamer.kernels.triton.gather.pieces import added, load_pieces, scaled, store_pieces, zeros

LONG = 128
HALF = 16384  # of the most parts: with more pairs these are longer


@triton.jit
def sums_of(arrays, begin, left, b64, g64, H, Q, strides, STRIDE: tl.constexpr, FORM: tl.constexpr):
    """(sum dS q, sum p dout) of `left` [RP] pairs from `begin` [RP] on, every STRIDE-th of them, in pieces.

    Args:
        arrays: q, dout, the names of the pairs, and their gradients.
    """
    q, dout, names, gradients = arrays
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    SD: tl.constexpr = FORM.SD
    SE: tl.constexpr = FORM.SE
    RP: tl.constexpr = FORM.RP
    N: tl.constexpr = FORM.N
    GROUP: tl.constexpr = FORM.GROUP
    q_base = q + (b64 * strides.at_q.b + g64 * GROUP * strides.at_q.h)[:, None] + tl.arange(0, SD)[None, :]
    dout_base = dout + (b64 * strides.at_dout.b + g64 * GROUP * strides.at_dout.h)[:, None] + tl.arange(0, SE)[None, :]
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
            row = tl.where(some, (ahead[c] // FORM.L).to(tl.int64) - first_row, 0)
            if GROUP == 1:
                rows_q += (load_pieces(q_base, row * strides.at_q.n, D, SD),)
                rows_dout += (load_pieces(dout_base, row * strides.at_dout.n, E, SE),)
            else:
                member, r = row // Q, row % Q
                rows_q += (load_pieces(q_base, member * strides.at_q.h + r * strides.at_q.n, D, SD),)
                rows_dout += (load_pieces(dout_base, member * strides.at_dout.h + r * strides.at_dout.n, E, SE),)
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


@triton.jit(do_not_specialize=["numbers"])
def columns_kernel(
    q,  # (B, H, Q, D)
    dout,  # (B, H, Q, E)
    keys: KeyLists,
    pair_counts,  # (B H,) int32
    gradients,  # (rows, L, 2) float32: p and dS
    results: KeyResults,
    strides: KeyStrides,
    H,
    numbers: ColumnNumbers,
    FORM: tl.constexpr,
):
    """dK and dV: of RP keys, or of some of the parts of the keys of a head, by its first programs."""
    K, n_keys, part_programs = numbers.K, numbers.n_keys, numbers.part_programs
    heads = n_keys // K
    program = tl.program_id(0) - heads * part_programs
    if program < 0:
        head = tl.program_id(0) // part_programs
        length = length_of(pair_counts, head, heads, FORM.GROUP, FORM.LONG, FORM.HALF)
        first = tl.program_id(0) % part_programs
        for part in range(first, tl.load(keys.part_ends + (head + 1) * K - 1), part_programs):
            add_part(head, part, length, q, dout, keys, gradients, results, strides, H, numbers, FORM)
    else:
        add_keys(program, q, dout, keys, gradients, results, strides, H, numbers, FORM)


@triton.jit
def add_keys(program, q, dout, keys, gradients, results, strides, H, numbers, FORM: tl.constexpr):
    """dK and dV of RP keys that are not computed in parts."""
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    SD: tl.constexpr = FORM.SD
    SE: tl.constexpr = FORM.SE
    RP: tl.constexpr = FORM.RP
    K, n_keys = numbers.K, numbers.n_keys
    place = program * RP + tl.arange(0, RP)
    m_key = place < n_keys
    key = tl.load(keys.order + place, mask=m_key, other=0).to(tl.int64)
    owner = key // K
    G = H // FORM.GROUP
    begin = tl.load(keys.begins + key, mask=m_key, other=0)
    count = tl.load(keys.numbers + key, mask=m_key, other=0)
    parts_before = tl.load(keys.part_ends + key - 1, mask=m_key & (key % K > 0), other=0)
    m_key = m_key & (tl.load(keys.part_ends + key, mask=m_key, other=0) == parts_before)
    left = tl.where(m_key, count, 0)
    b64 = tl.where(m_key, owner // G, 0)
    arrays, g64 = (q, dout, keys.names, gradients), tl.where(m_key, owner % G, 0)
    b_dk, b_dv = sums_of(arrays, begin, left, b64, g64, H, numbers.Q, strides, 1, FORM)
    b_dk = scaled(b_dk, tl.zeros([RP], tl.float32) + numbers.scale, D, SD)
    store_pieces(results.dk + tl.arange(0, SD)[None, :], key * D, m_key, b_dk, D, SD)
    store_pieces(results.dv + tl.arange(0, SE)[None, :], key * E, m_key, b_dv, E, SE)


@triton.jit
def folded(blocks, SIZE: tl.constexpr, S: tl.constexpr):
    """Pieces [RP, S] added over their rows: [1, S]."""
    sums: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        sums += (tl.sum(blocks[p], 0)[None, :],)
    return sums


@triton.jit
def add_part(head, part, length, q, dout, keys, gradients, results, strides, H, numbers, FORM: tl.constexpr):
    """The sums of a part of a key of a head; who is last of the key adds up all of them, in order."""
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    SD: tl.constexpr = FORM.SD
    SE: tl.constexpr = FORM.SE
    RP: tl.constexpr = FORM.RP
    K, part_ends = numbers.K, keys.part_ends
    # The first key up to which there are more parts.
    first_key = head.to(tl.int64) * K
    low = 0
    high = K - 1
    for _ in range(numbers.halvings):
        between = low + (high - low) // 2
        over = tl.load(part_ends + first_key + between) > part
        high = tl.where(over, between, high)
        low = tl.where(over, low, tl.minimum(between + 1, high))
    key = first_key + high
    before = tl.load(part_ends + key - 1, mask=high > 0, other=0)
    parts = tl.load(part_ends + key) - before
    begin = tl.load(keys.begins + key) + (part - before) * length
    o = tl.arange(0, RP)
    left = tl.minimum(tl.load(keys.numbers + key) - (part - before) * length, length) - o
    G = H // FORM.GROUP
    zero = tl.zeros([RP], tl.int64)
    arrays = (q, dout, keys.names, gradients)
    b_dk, b_dv = sums_of(
        arrays, begin + o, left, zero + head // G, zero + head % G, H, numbers.Q, strides, RP, FORM
    )  # fmt: skip
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    first_place = tl.zeros([1], tl.int64) + head * numbers.part_places
    at = first_place + part
    store_pieces(results.part_dk + o_d, at * D, at >= 0, folded(b_dk, D, SD), D, SD)
    store_pieces(results.part_dv + o_e, at * E, at >= 0, folded(b_dv, E, SE), E, SE)
    tl.debug_barrier()  # all of it is written before it counts as arrived
    if tl.atomic_add(keys.arrived + key, 1, sem="acq_rel") == parts - 1:
        one = tl.zeros([1], tl.float32) + 1.0
        s_dk = zeros(1, D, SD)
        s_dv = zeros(1, E, SE)
        for i in range(parts):
            at = first_place + before + i
            s_dk = added(s_dk, one, load_pieces(results.part_dk + o_d, at * D, D, SD), D, SD)
            s_dv = added(s_dv, one, load_pieces(results.part_dv + o_e, at * E, E, SE), E, SE)
        s_dk = scaled(s_dk, one * numbers.scale, D, SD)
        to = tl.zeros([1], tl.int64) + key
        store_pieces(results.dk + o_d, to * D, to >= 0, s_dk, D, SD)
        store_pieces(results.dv + o_e, to * E, to >= 0, s_dv, E, SE)
