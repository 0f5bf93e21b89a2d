"""dK, dV and the gradient of u.

Of kept pairs first: for each chunk of queries and block of entries of its list of live keys, sums over the queries of
the chunk, in float32. A key is in the lists of consecutive chunks; `link_entries` says where it is in the next one, and
`add_entries` adds what a key has in all of them to what it has in the first. The kernel of windows adds that to its own
sums. So each sum has one order.

A list that would hold more than its capacity is not there: the kernel of windows goes through all pairs of its unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.sparse_k.triton.steps import LOG2E, gated_scores, gates, rows, store_rows, through_gate


@triton.jit
def _lists_hold(counts_ptr, unit, chunks, capacity, CHUNKS: tl.constexpr):
    """Whether every list of a unit is there."""
    chunk = tl.arange(0, CHUNKS)
    counts = tl.load(counts_ptr + (unit * chunks + chunk) * 2 + 1, mask=chunk < chunks, other=0)
    return tl.max(counts, 0) <= capacity


@triton.jit
def _kept_step(
    q_ptr, dout_ptr, lse_ptr, delta_ptr, tau_ptr, k, v, u, key, last, last_gated, there, row, stop, window, stride_qn,
    stride_on, scale, dk, dv, du, MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Add what the queries `row` before `stop` give to the keys; MASKED: not every pair is kept."""
    factor = scale * LOG2E
    inside = row < stop
    q = rows(q_ptr, row, stride_qn, inside, FORM.D, FORM.SIZE_D, False)
    dout = rows(dout_ptr, row, stride_on, inside, FORM.E, FORM.SIZE_E, False)
    lse2 = tl.load(lse_ptr + row, mask=inside, other=float("inf"))[None, :] * LOG2E
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)[None, :]
    m = gates(u[:, None], tl.load(tau_ptr + row, mask=inside, other=0.0)[None, :])
    s = tl.dot(k, q.T, input_precision=FORM.PRECISION)
    p = tl.exp2(gated_scores(s, m, factor, FORM.GATE) - lse2)
    interior = (m > 0) & (m < 1)
    if MASKED:
        past = there[:, None] & inside[None, :] & (row[None, :] > (key + window)[:, None])
        kept = past & (row[None, :] <= last[:, None])
        p = tl.where(kept, p, 0.0)
        counted = kept
        if FORM.STRAIGHT:
            counted = past & (row[None, :] <= last_gated[:, None])
        interior = interior & counted
    weight = p
    if FORM.GATE == "v" or FORM.GATE == "kv":
        weight = p * m
    dv = tl.dot(weight.to(dout.dtype), dout, dv, input_precision=FORM.PRECISION)
    dp = tl.dot(v, dout.T, input_precision=FORM.PRECISION)
    ds, dm = through_gate(s, p, dp, m, delta, lse2, factor, FORM.GATE, FORM.STRAIGHT)
    if FORM.GATE != "none" or FORM.STRAIGHT:
        du += tl.sum(tl.where(interior, dm, 0.0), 1)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=FORM.PRECISION)
    return dk, dv, du


@triton.jit
def entry_gradients(
    q_ptr, k_ptr, v_ptr, u_ptr, tau_ptr, last_ptr, last_gated_ptr, list_ptr, counts_ptr, dout_ptr, lse_ptr, delta_ptr,
    part_dk_ptr, part_dv_ptr, part_du_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on, H, G, U, N, window, chunk, chunks, capacity,
    scale, FORM: tl.constexpr,
):  # fmt: skip
    """Block program 0 of the entries of chunk program 1, of unit program 2.

    Args:
        part_dk_ptr, part_dv_ptr, part_du_ptr: (units, chunks, capacity, D), with E, and without: float32.
        chunk: queries of a chunk, a multiple of BLOCK_M; `list_ptr` and `counts_ptr` are of `live_lists` for these.
        OVER: lists may hold more than their capacity.
    """
    block, c, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = unit * chunks + c
    through, listed = tl.load(counts_ptr + at * 2), tl.load(counts_ptr + at * 2 + 1)
    holds = listed > block * FORM.BLOCK_N
    if FORM.OVER:
        holds = holds & _lists_hold(counts_ptr, unit, chunks, capacity, FORM.CHUNKS)
    if holds:
        b, of_unit = unit // U, unit % U
        heads = H // U
        h = of_unit * heads
        g = h // (H // G)
        entry = block * FORM.BLOCK_N + tl.arange(0, FORM.BLOCK_N)
        there = entry < listed
        key = tl.load(list_ptr + at * capacity + entry, mask=there, other=0)
        k = rows(k_ptr + b * stride_kb + g * stride_kh, key, stride_kn, there, FORM.D, FORM.SIZE_D, False)
        v = rows(v_ptr + b * stride_vb + g * stride_vh, key, stride_vn, there, FORM.E, FORM.SIZE_E, False)
        u = tl.load(u_ptr + unit * N + key, mask=there, other=0.0)
        last = tl.load(last_ptr + unit * N + key, mask=there, other=-1)
        last_gated = last
        if FORM.STRAIGHT:
            last_gated = tl.load(last_gated_ptr + unit * N + key, mask=there, other=-1)
        start, end = c * chunk, tl.minimum(c * chunk + chunk, N)
        first = tl.maximum(tl.min(tl.where(there, key, N), 0) + window + 1, start) // FORM.BLOCK_M * FORM.BLOCK_M
        stop = tl.minimum(tl.max(last_gated, 0) + 1, end)
        # Blocks of keys that live through the chunk; others are masked.
        plain = (block * FORM.BLOCK_N + FORM.BLOCK_N <= through) & (not FORM.STRAIGHT)
        dk = tl.zeros((FORM.BLOCK_N, FORM.SIZE_D), tl.float32)
        dv = tl.zeros((FORM.BLOCK_N, FORM.SIZE_E), tl.float32)
        du = tl.zeros((FORM.BLOCK_N,), tl.float32)
        for r in range(heads):
            head = (b * H + h + r) * N
            for m in range(first, tl.where(plain, stop, first), FORM.BLOCK_M):
                dk, dv, du = _kept_step(
                    q_ptr + b * stride_qb + (h + r) * stride_qh, dout_ptr + b * stride_ob + (h + r) * stride_oh,
                    lse_ptr + head, delta_ptr + head, tau_ptr + unit * N, k, v, u, key, last, last_gated, there, m +
                    tl.arange(0, FORM.BLOCK_M), end, window, stride_qn, stride_on, scale, dk, dv, du, False, FORM,
                )  # fmt: skip
            for m in range(first, tl.where(plain, first, stop), FORM.BLOCK_M):
                dk, dv, du = _kept_step(
                    q_ptr + b * stride_qb + (h + r) * stride_qh, dout_ptr + b * stride_ob + (h + r) * stride_oh,
                    lse_ptr + head, delta_ptr + head, tau_ptr + unit * N, k, v, u, key, last, last_gated, there, m +
                    tl.arange(0, FORM.BLOCK_M), end, window, stride_qn, stride_on, scale, dk, dv, du, True, FORM,
                )  # fmt: skip
        at = at * capacity
        store_rows(part_dk_ptr + at * FORM.D, entry, FORM.D, there, FORM.D, dk, FORM.SIZE_D)
        store_rows(part_dv_ptr + at * FORM.E, entry, FORM.E, there, FORM.E, dv, FORM.SIZE_E)
        tl.store(part_du_ptr + at + entry, du, mask=there)


@triton.jit
def link_entries(
    last_gated_ptr, list_ptr, counts_ptr, next_ptr, home_ptr, N, window, chunk, chunks, capacity,
    OVER: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the keys of a block of entries are in the list of the next chunk.

    Args:
        next_ptr: (units, chunks, capacity) int32: an entry among those of the unit, or -1.
        home_ptr: (units, N) int32: the first entry of each key; written for those that are in any list.
        STEPS: of a binary search among `capacity` entries.
    """
    block, c, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = unit * chunks + c
    listed = tl.load(counts_ptr + at * 2 + 1)
    holds = listed > block * BLOCK
    if OVER:
        holds = holds & _lists_hold(counts_ptr, unit, chunks, capacity, CHUNKS)
    if holds:
        entry = block * BLOCK + tl.arange(0, BLOCK)
        there = entry < listed
        key = tl.load(list_ptr + at * capacity + entry, mask=there, other=0)
        last_gated = tl.load(last_gated_ptr + unit * N + key, mask=there, other=-1)
        starts = there & ((key + window + 1) // chunk == c)
        tl.store(home_ptr + unit * N + key, c * capacity + entry, mask=starts)
        goes_on = there & (last_gated // chunk > c)
        found = tl.full((BLOCK,), -1, tl.int32)
        if c + 1 < chunks:
            # It lives from the start of the next chunk on: it is among the first entries if it lives through it.
            end = tl.minimum(c * chunk + 2 * chunk, N)
            through = tl.load(counts_ptr + at * 2 + 2)
            all_of_it = last_gated >= end - 1
            low = tl.where(all_of_it, 0, through)
            high = tl.where(all_of_it, through, tl.load(counts_ptr + at * 2 + 3))
            for _ in range(STEPS):
                middle = (low + high) // 2
                search = goes_on & (low < high)
                less = tl.load(list_ptr + (at + 1) * capacity + middle, mask=search, other=0) < key
                low = tl.where(search & less, middle + 1, low)
                high = tl.where(search & ~less, middle, high)
            found = tl.where(goes_on, (c + 1) * capacity + low, -1)
        tl.store(next_ptr + at * capacity + entry, found, mask=there)


@triton.jit
def add_entries(
    keys_ptr, key_counts_ptr, count_stride, counts_ptr, next_ptr, home_ptr, part_dk_ptr, part_dv_ptr, part_du_ptr, N,
    chunks, capacity, D: tl.constexpr, E: tl.constexpr, OVER: tl.constexpr, CHUNKS: tl.constexpr, SIZE_D: tl.constexpr,
    SIZE_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what each key of a block has in later chunks to what it has in its first one.

    Args:
        keys_ptr: (units, N) int32: the keys of any list; their number is the last in a row of `key_counts_ptr`, of
            `count_stride` numbers.
    """
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    known = tl.load(key_counts_ptr + unit * count_stride + count_stride - 1)
    holds = known > block * BLOCK
    if OVER:
        holds = holds & _lists_hold(counts_ptr, unit, chunks, capacity, CHUNKS)
    if holds:
        i = block * BLOCK + tl.arange(0, BLOCK)
        there = i < known
        key = tl.load(keys_ptr + unit * N + i, mask=there, other=0)
        home = tl.load(home_ptr + unit * N + key, mask=there, other=-1)
        base = unit * chunks * capacity
        at = tl.where(there, tl.load(next_ptr + base + home, mask=there, other=-1), -1)
        if tl.max(at, 0) >= 0:
            dk = rows(part_dk_ptr + base * D, home, D, there, D, SIZE_D, False)
            dv = rows(part_dv_ptr + base * E, home, E, there, E, SIZE_E, False)
            du = tl.load(part_du_ptr + base + home, mask=there, other=0.0)
            while tl.max(at, 0) >= 0:
                more = at >= 0
                after = tl.load(next_ptr + base + at, mask=more, other=-1)
                dk += rows(part_dk_ptr + base * D, at, D, more, D, SIZE_D, False)
                dv += rows(part_dv_ptr + base * E, at, E, more, E, SIZE_E, False)
                du += tl.load(part_du_ptr + base + at, mask=more, other=0.0)
                at = after
            store_rows(part_dk_ptr + base * D, home, D, there, D, dk, SIZE_D)
            store_rows(part_dv_ptr + base * E, home, E, there, E, dv, SIZE_E)
            tl.store(part_du_ptr + base + home, du, mask=there)


@triton.jit
def gated_key_gradients(
    q_ptr, k_ptr, v_ptr, u_ptr, tau_ptr, last_ptr, last_gated_ptr, counts_ptr, home_ptr, dout_ptr, lse_ptr, delta_ptr,
    part_dk_ptr, part_dv_ptr, part_du_ptr, dk_ptr, dv_ptr, du_ptr, stride_qb, stride_qh, stride_qn, stride_kb,
    stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on, H, G, U, N, window,
    chunk, chunks, capacity, scale, FORM: tl.constexpr,
):  # fmt: skip
    """The keys of block program 0 of batch element and key head program 1: windows, and what kept pairs have given.

    Args:
        dk_ptr, dv_ptr: (B, G, N, D) and (B, G, N, E), contiguous, in the type of k and v.
        du_ptr: (B, U, N) float32.
    """
    block, of_key = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = of_key // G, of_key % G
    start = block * FORM.BLOCK_N
    key = start + tl.arange(0, FORM.BLOCK_N)
    there = key < N
    k = rows(k_ptr + b * stride_kb + g * stride_kh, key, stride_kn, there, FORM.D, FORM.SIZE_D, False)
    v = rows(v_ptr + b * stride_vb + g * stride_vh, key, stride_vn, there, FORM.E, FORM.SIZE_E, False)
    dk = tl.zeros((FORM.BLOCK_N, FORM.SIZE_D), tl.float32)
    dv = tl.zeros((FORM.BLOCK_N, FORM.SIZE_E), tl.float32)
    factor = scale * LOG2E
    ratio = H // G
    end = tl.minimum(start + FORM.BLOCK_N + window, N)
    for r in range(ratio):
        h = g * ratio + r
        head = (b * H + h) * N
        for m in range(start // FORM.BLOCK_M * FORM.BLOCK_M, end, FORM.BLOCK_M):
            row = m + tl.arange(0, FORM.BLOCK_M)
            inside = row < N
            q = rows(q_ptr + b * stride_qb + h * stride_qh, row, stride_qn, inside, FORM.D, FORM.SIZE_D, False)
            dout = rows(dout_ptr + b * stride_ob + h * stride_oh, row, stride_on, inside, FORM.E, FORM.SIZE_E, False)
            lse2 = tl.load(lse_ptr + head + row, mask=inside, other=float("inf")) * LOG2E
            delta = tl.load(delta_ptr + head + row, mask=inside, other=0.0)
            s = tl.dot(k, q.T, input_precision=FORM.PRECISION)
            p = tl.exp2(s * factor - lse2[None, :])
            distance = row[None, :] - key[:, None]
            p = tl.where((distance >= 0) & (distance <= window), p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=FORM.PRECISION)
            dp = tl.dot(v, dout.T, input_precision=FORM.PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=FORM.PRECISION)

    per_group = U // G
    heads = H // U
    for i in range(per_group):
        unit = b * U + g * per_group + i
        last = tl.load(last_ptr + unit * N + key, mask=there, other=-1)
        last_gated = tl.load(last_gated_ptr + unit * N + key, mask=there, other=-1)
        live = there & (last_gated > key + window)
        du = tl.zeros((FORM.BLOCK_N,), tl.float32)
        summed = live
        if FORM.OVER:
            holds = _lists_hold(counts_ptr, unit, chunks, capacity, FORM.CHUNKS)
            summed = there & (tl.where(holds, last_gated, -1) > key + window)
        home = tl.load(home_ptr + unit * N + key, mask=summed, other=0)
        base = unit * chunks * capacity
        if tl.max(live.to(tl.int32), 0) > 0:
            dk += rows(part_dk_ptr + base * FORM.D, home, FORM.D, summed, FORM.D, FORM.SIZE_D, False)
            dv += rows(part_dv_ptr + base * FORM.E, home, FORM.E, summed, FORM.E, FORM.SIZE_E, False)
            du += tl.load(part_du_ptr + base + home, mask=summed, other=0.0)
        if FORM.OVER:
            u = tl.load(u_ptr + unit * N + key, mask=there, other=0.0)
            stop = tl.where(holds, 0, tl.max(tl.where(live, last_gated, -1), 0) + 1)
            for r in range(heads):
                h = (unit % U) * heads + r
                head = (b * H + h) * N
                for m in range((start + window + 1) // FORM.BLOCK_M * FORM.BLOCK_M, stop, FORM.BLOCK_M):
                    dk, dv, du = _kept_step(
                        q_ptr + b * stride_qb + h * stride_qh, dout_ptr + b * stride_ob + h * stride_oh, lse_ptr +
                        head, delta_ptr + head, tau_ptr + unit * N, k, v, u, key, last, last_gated, there, m +
                        tl.arange(0, FORM.BLOCK_M), N, window, stride_qn, stride_on, scale, dk, dv, du, True, FORM,
                    )  # fmt: skip
        tl.store(du_ptr + unit * N + key, du, mask=there)
    store_rows(dk_ptr + of_key * N * FORM.D, key, FORM.D, there, FORM.D, dk * scale, FORM.SIZE_D)
    store_rows(dv_ptr + of_key * N * FORM.E, key, FORM.E, there, FORM.E, dv, FORM.SIZE_E)
