"""Bounds of the keys of pages, and of the scores that queries have with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import power

PAGES = 64  # of a program
LEAST_ROWS, MOST_ROWS = 16, 64  # of queries that a program takes at a time
SLOTS_BYTES = 16384  # of keys that a program reads at a time
MOST, UNDER = tl.constexpr(2.0**127), tl.constexpr(2.0**126)  # scores of what is always kept, and at most of the rest


class CacheStrides(NamedTuple):
    """Strides, of which Triton compiles for no value."""

    page: int
    slot: int
    head: int


class ScoreStrides(NamedTuple):
    """Strides of what scores are computed of."""

    token: int  # of q
    head: int
    edge: int
    table_row: int
    table: int
    used: int


class ScoreNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    T: int
    G: int
    heads: int  # that share keys
    n: int  # pages of a table
    P: int
    first: int
    local: int


@triton.jit(do_not_specialize=["at", "step", "T"])
def update_kernel(
    k,  # (P, SIZE, G, D)
    slots,  # (T,)
    low,  # (P, G, D)
    high,
    at: CacheStrides,
    step,
    T,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The bounds of a page and a head, by the last token that was written to it, of all keys up to that."""
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token.to(tl.int64) * step).to(tl.int64)
    behind = tl.load(slots + (token + 1).to(tl.int64) * step, mask=token + 1 < T, other=-1).to(tl.int64)
    page = slot // SIZE
    ends = (behind < 0) | (behind // SIZE != page)
    if (slot >= 0) & ends:
        o = tl.arange(0, BLOCK_D)
        b_low = tl.full([BLOCK_D], float("inf"), tl.float32)
        b_high = tl.full([BLOCK_D], float("-inf"), tl.float32)
        for s0 in range(0, SIZE, SLOTS):
            s = s0 + tl.arange(0, SLOTS)
            mask = (s <= slot % SIZE)[:, None] & (o < D)[None, :]
            begin = page * at.page + head * at.head + s.to(tl.int64) * at.slot
            x = tl.load(k + begin[:, None] + o[None, :], mask=mask, other=0.0).to(tl.float32)
            b_low = tl.minimum(b_low, tl.min(tl.where(mask, x, float("inf")), 0))
            b_high = tl.maximum(b_high, tl.max(tl.where(mask, x, float("-inf")), 0))
        to = (page * tl.num_programs(1) + head) * D + o
        tl.store(low + to, b_low.to(low.dtype.element_ty), mask=o < D)
        tl.store(high + to, b_high.to(high.dtype.element_ty), mask=o < D)


@triton.jit(do_not_specialize=["at", "numbers", "scale"])
def score_kernel(
    q,  # (T, H, D)
    low,  # (P, G, D)
    high,
    edges,  # (R + 1,)
    table,  # (R, n)
    used,  # (R,)
    bounds,  # (T, H, n)
    scores,  # (R, G, n)
    at: ScoreStrides,
    numbers: ScoreNumbers,
    scale,  # its magnitude
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """The bounds of the scores of a sequence's queries with some of its pages, and the largest of each page."""
    i_g, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g64 = i_g.to(tl.int64)
    first = tl.minimum(tl.maximum(tl.load(edges + seq * at.edge).to(tl.int64), 0), numbers.T).to(tl.int32)
    last = tl.minimum(tl.maximum(tl.load(edges + (seq + 1) * at.edge).to(tl.int64), 0), numbers.T).to(tl.int32)
    keys = tl.minimum(tl.maximum(tl.load(used + seq * at.used).to(tl.int64), 0), tl.cast(numbers.n, tl.int64) * SIZE)
    there_are = ((keys + SIZE - 1) // SIZE).to(tl.int32)
    p = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    there = p < there_are
    entry = tl.load(table + seq * at.table_row + p.to(tl.int64) * at.table, mask=there, other=-1).to(tl.int64)
    there = there & (entry >= 0) & (entry < numbers.P)
    o = tl.arange(0, BLOCK_D)
    begin = (tl.where(there, entry, 0) * numbers.G + g64) * D
    mask = there[:, None] & (o < D)[None, :]
    b_low = tl.load(low + begin[:, None] + o[None, :], mask=mask, other=0.0)
    b_high = tl.load(high + begin[:, None] + o[None, :], mask=mask, other=0.0)
    rows, heads = (last - first) * numbers.heads, numbers.heads
    best = tl.full([PAGES], float("-inf"), tl.float32)
    for r0 in range(0, rows, ROWS):
        r = r0 + tl.arange(0, ROWS)
        m_r = r < rows
        token = (first + r // heads).to(tl.int64)
        head = g64 * heads + r % heads
        b_q = tl.load(
            q + (token * at.token + head * at.head)[:, None] + o[None, :], mask=m_r[:, None] & (o < D)[None, :],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        if TURNED:  # by a scale that is negative
            b_q = -b_q
        above, under = tl.maximum(b_q, 0.0).to(q.dtype.element_ty), tl.minimum(b_q, 0.0).to(q.dtype.element_ty)
        b_s = tl.dot(above, tl.trans(b_high), input_precision="ieee")
        b_s = tl.dot(under, tl.trans(b_low), b_s, input_precision="ieee") * scale
        to = ((token * numbers.G * heads + head) * numbers.n)[:, None] + p[None, :]
        kept = m_r[:, None] & there[None, :]
        tl.store(bounds + to, tl.where(kept, b_s, float("-inf")), mask=m_r[:, None] & (p < numbers.n)[None, :])
        best = tl.maximum(best, tl.max(tl.where(kept, b_s, float("-inf")), 0))
    own = (tl.maximum(keys - (last - first), 0) // SIZE).to(tl.int32)  # where the sequence's tokens begin
    always = there & (rows > 0) & ((p < numbers.first) | (p >= tl.minimum(own, there_are - numbers.local)))
    best = tl.where(always, MOST, tl.minimum(best, UNDER))
    best = tl.where(always & (p == there_are - 1), float("inf"), best)
    tl.store(scores + (seq * numbers.G + g64) * numbers.n + p, best, mask=p < numbers.n)


def update_bounds(k: Tensor, slots: Tensor, low: Tensor, high: Tensor) -> None:
    """Write the bounds (P, G, D) of the pages of k (P, size, G, D) that slots (T,) lie in."""
    _, size, G, D = k.shape
    page, slot, head, _ = k.stride()
    block = power(D)
    at_once = min(power(size), max(1, SLOTS_BYTES // (block * k.element_size())))
    with torch.cuda.device_of(k):
        launch(
            update_kernel, (len(slots), G), k, slots, low, high, CacheStrides(page, slot, head), *slots.stride(),
            len(slots), size, D, block, at_once, num_warps=4,
        )  # fmt: skip


def score_pages(
    q: Tensor, low: Tensor, high: Tensor, edges: Tensor, table: Tensor, used: Tensor, size: int, first: int, local: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`bounds` (T, H, n) and `scores` (R, G, n) in float32, as `blocks.pages` defines them."""
    (T, H, D), (P, G, _), (R, n) = q.shape, low.shape, table.shape
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    bounds, scores = torch.full((T, H, n), -torch.inf, **wide), torch.empty((R, G, n), **wide)
    token, head, _ = q.stride()
    at = ScoreStrides(token, head, *edges.stride(), *table.stride(), *used.stride())
    numbers = ScoreNumbers(T, G, H // G, n, P, first, local)
    rows = power(-(-T // R) * (H // G), LEAST_ROWS, MOST_ROWS)
    with torch.cuda.device_of(q):
        launch(
            score_kernel, (-(-n // PAGES), G, R), q, low, high, edges, table, used, bounds, scores, at, numbers,
            abs(scale), size, D, power(D, 16), rows, PAGES, scale < 0, num_warps=4,
        )  # fmt: skip
    return bounds, scores
