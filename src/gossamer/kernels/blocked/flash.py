"""Block layouts on a CPU by torch's flash attention operator, which reads views of any strides and adds a mask.

Where each row keeps one interval of keys, a call of the operator computes many blocks (`intervals.py`), and where one
call computes them all, its results are the results. Its backward makes the probabilities from the out and lse that it
is given: rows whose keys are in several calls get exact shares of their gradients from the combined ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.kernels.blocked.intervals import (
    PAIRS_OF_BLOCK,
    PAIRS_OF_CALL,
    IntervalBlocks,
    Intervals,
    blocks_of,
    clipped,
    intervals_of,
)
from gossamer.kernels.contract import Terms
from gossamer.kernels.launch import ALIGNMENT, Direction
from gossamer.kernels.row_formulas import Attended, compute_dtype, row_terms, sink_gradient
from gossamer.layouts.block import BlockLayout
from gossamer.memo import Memo, Memos
from gossamer.plan.problem import Problem

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Of the shares of dk and dv that the blocks of one call leave: they are added while they are in the cache.
CHUNK_BYTES = 8 << 20
# Rows of a head of keys, and numbers of all keys, up to which and from which on 16-bit inputs are not converted: a row
# takes about 0.04 ns of arithmetic for a number of a key, and a conversion 0.3 ns.
FEW_ROWS, FEW_KEYS = 32, 1 << 18
KEPT_LENGTHS = 16  # calls for given key lengths

Shape = tuple[int, ...]


class Place(NamedTuple):
    """A view of a contiguous array."""

    shape: Shape
    strides: Shape
    offset: int

    def of(self, x: Tensor) -> Tensor:
        return x.as_strided(self.shape, self.strides, self.offset + x.storage_offset())


class FlashCall(NamedTuple):
    """One call of the operator."""

    q: Place  # of q, out and dout: (blocks or key heads, heads, rows, features)
    k: Place  # of k and v
    lse: Place
    keys: int
    blocks: int  # the first dimension, where it is blocks; else 1
    move: int  # keys from one block to the next
    shared: bool  # whether the heads of the second dimension have the same keys
    causal: bool
    mask: Tensor | None  # (1, 1, rows, keys), added to scores
    again: bool  # its results are combined with those of earlier calls


@dataclass(frozen=True)
class FlashSchedule:
    """The calls of a problem, and the rows that no call, or no key of one, is for."""

    calls: tuple[FlashCall, ...]
    attended: Attended | None  # of what they read; None: all
    empty: tuple[tuple[slice, slice, Tensor], ...] = ()  # batch elements, heads, (Q,) bool
    whole: FlashCall | None = None  # the one call, of one block, that computes everything: its results are the results


class FlashPart(NamedTuple):
    """Batch elements and heads, one after the other in memory, that have the same intervals."""

    batch: slice
    heads: slice
    blocks: tuple[IntervalBlocks, ...]
    intervals: Intervals


class FlashPlan:
    """The calls for a layout whose rows keep an interval each, of one direction and set of shapes."""

    def __init__(self, parts: tuple[FlashPart, ...], problem: Problem, features: int) -> None:
        self.parts, self.problem, self.features = parts, problem, features
        self.wide = torch.float64 if problem.dtype == "float64" else torch.float32  # the type of lse
        self._masks: dict[tuple[bytes, bytes, int], Tensor] = {}
        self._of_lengths: Memo[FlashSchedule] = Memo(KEPT_LENGTHS)
        self.all = self._schedule(parts)

    def schedule(self, key_lengths: Tensor | None) -> FlashSchedule:
        """The calls of a problem whose batch elements have so many keys."""
        if key_lengths is None:
            return self.all
        K = self.problem.K
        lengths = tuple(max(0, min(n, K)) for n in key_lengths.tolist())
        if all(n == K for n in lengths):
            return self.all
        return self._of_lengths.get_or_make(lengths, lambda: self._schedule(tuple(self._clipped(lengths))))

    def _clipped(self, lengths: tuple[int, ...]) -> Iterator[FlashPart]:
        """Parts of batch elements of equal lengths."""
        at = 0
        for length, same in groupby(lengths):
            end = at + len(list(same))
            for part in self.parts:
                batch = slice(max(at, part.batch.start), min(end, part.batch.stop))
                if batch.start < batch.stop:
                    blocks = tuple(block for x in part.blocks for block in clipped(x, length))
                    lo, hi = part.intervals
                    yield FlashPart(batch, part.heads, blocks, Intervals(lo, np.minimum(hi, length)))
            at = end

    def _schedule(self, parts: tuple[FlashPart, ...]) -> FlashSchedule:
        calls: list[FlashCall] = []
        empty = []
        for part in parts:
            for run in self._in_memory(part):
                calls.extend(call for blocks in part.blocks for call in self._calls(run, blocks))
            none = part.intervals.hi <= part.intervals.lo
            if none.any():
                empty.append((part.batch, part.heads, torch.from_numpy(none)))
        whole = calls[0] if len(calls) == 1 and calls[0].blocks == 1 and not empty else None
        rows, keys = self._rows(empty) if empty else None, self._keys(parts)
        attended = None if rows is keys is None else Attended(rows, keys)
        return FlashSchedule(tuple(calls), attended, tuple(empty), whole)

    def _rows(self, empty: list[tuple[slice, slice, Tensor]]) -> Tensor:
        """The queries that keep anything."""
        p = self.problem
        kept = torch.ones(p.B, p.H, p.Q, 1, dtype=torch.bool, device="cpu")
        for batch, heads, none in empty:
            kept[batch, heads] = ~none[:, None]
        return kept

    def _keys(self, parts: tuple[FlashPart, ...]) -> Tensor | None:
        """The keys that any query keeps, where calls read others as well; else None.

        A block has the keys from the first to the last that its rows keep: others are between those of two rows.
        """
        p = self.problem
        if not any(_between(part.intervals) for part in parts):
            return None
        kept = torch.zeros(p.B, p.G, p.K, 1, dtype=torch.bool, device="cpu")
        for part in parts:
            group, some = p.H // p.G, part.intervals.hi > part.intervals.lo
            lo, hi = (x[some] for x in part.intervals)
            key_heads = slice(part.heads.start // group, (part.heads.stop - 1) // group + 1)
            ends = np.bincount(lo, minlength=p.K + 1) - np.bincount(hi, minlength=p.K + 1)
            kept[part.batch, key_heads] |= torch.from_numpy(ends.cumsum()[: p.K] > 0)[:, None]
        return kept

    def _in_memory(self, part: FlashPart) -> Iterator[_Heads]:
        """The heads of a part whose q and k lie at one stride each."""
        p = self.problem
        group, h = p.H // p.G, part.heads
        whole = h == slice(0, p.H)
        for b in range(part.batch.start, part.batch.start + 1 if whole else part.batch.stop):
            count = part.batch.stop - part.batch.start if whole else 1
            if h.start % group == 0 and h.stop % group == 0:
                n = (h.stop - h.start) // group
                yield _Heads(b * p.H + h.start, b * p.G + h.start // group, n * count, group)
                continue
            for g in range(h.start // group, (h.stop - 1) // group + 1):
                first, end = max(h.start, g * group), min(h.stop, (g + 1) * group)
                yield _Heads(b * p.H + first, b * p.G + g, 1, end - first)

    def _calls(self, heads: _Heads, x: IntervalBlocks) -> Iterator[FlashCall]:
        p, S, (first, first_key, n, group) = self.problem, self.features, heads
        q_at, k_at, mask = first * p.Q + x.row, first_key * p.K + x.key, self._mask(x)
        if x.n == 1:
            if x.rows == p.Q and not x.causal and mask is None:  # the group's heads are rows of one more
                yield self._call(x, q_at, k_at, (n, 1), (group * p.Q, 0), (p.K, 0), False, None, group * p.Q)
            else:
                yield self._call(x, q_at, k_at, (n, group), (group * p.Q, p.Q), (p.K, 0), group > 1, mask, x.rows)
            return
        # Blocks, and either the heads of a group, whose keys are the same, or a head of each group.
        by_group = group > 1 and n <= group
        width, between, apart = (group, p.Q, 0) if by_group else (n, group * p.Q, p.K)
        starts = [(g * group * p.Q, g * p.K) for g in range(n)] if by_group else [(h * p.Q, 0) for h in range(group)]
        most = max(1, CHUNK_BYTES // (2 * x.keys * width * S * 4))
        for at in range(0, x.n, most):
            for q_start, k_start in starts:
                yield self._call(
                    x, q_at + q_start + at * x.step, k_at + k_start + at * x.move, (min(most, x.n - at), width),
                    (x.step, between), (x.move, apart), by_group, mask, x.rows,
                )  # fmt: skip

    def _call(
        self, x: IntervalBlocks, q_at: int, k_at: int, lead: Shape, q_strides: Shape, k_strides: Shape, shared: bool,
        mask: Tensor | None, rows: int,
    ) -> FlashCall:  # fmt: skip
        """A call; strides and starts are given in positions."""
        S = self.features
        q = Place((*lead, rows, S), (*(s * S for s in q_strides), S, 1), q_at * S)
        k = Place((*lead, x.keys, S), (*(s * S for s in k_strides), S, 1), k_at * S)
        lse, blocks = Place((*lead, rows), (*q_strides, 1), q_at), lead[0] if x.n > 1 else 1
        return FlashCall(q, k, lse, x.keys, blocks, x.move, shared, x.causal, mask, x.again)

    def _mask(self, x: IntervalBlocks) -> Tensor | None:
        """The number added to the scores of blocks: 0 where a pair is kept, else -inf."""
        if x.bounds is None:
            return None
        lo, hi = x.bounds
        width = int(hi.max())
        key = lo.tobytes(), hi.tobytes(), width
        mask = self._masks.get(key)
        if mask is None:
            j, dtype = np.arange(width), np.float64 if self.problem.dtype == "float64" else np.float32
            kept = (j >= lo[:, None]) & (j < hi[:, None])
            mask = torch.from_numpy(np.where(kept, 0.0, -np.inf).astype(dtype))[None, None]
            self._masks[key] = mask
        return mask if width == x.keys else mask[..., : x.keys]


def _between(intervals: Intervals) -> bool:
    """Whether there are keys between those of two rows that no row keeps."""
    some = np.flatnonzero(intervals.hi > intervals.lo)
    if not len(some):
        return False
    if (np.diff(intervals.lo[some]) < 0).any():
        some = some[np.argsort(intervals.lo[some], kind="stable")]
    ends = np.maximum.accumulate(intervals.hi[some])
    return bool((np.delete(intervals.lo[some], 0) > np.delete(ends, -1)).any())


class _Heads(NamedTuple):
    """`n` key heads from `key` on, each with `group` heads, of which the first is `first`; counted over (B, heads)."""

    first: int
    key: int
    n: int
    group: int


_plans: Memos[tuple[FlashPlan | None]] = Memos()  # of layouts


def computes(problem: Problem, terms: Terms) -> bool:
    """Whether calls of the operator compute what a call asks for.

    It has no soft cap and no biases of its own, masks scores of causal calls before it scales them, and divides by the
    number of rows or keys.
    """
    p = problem
    if p.device != "cpu" or terms.softcap is not None or terms.alibi_slopes is not None or not terms.scale > 0:
        return False
    return p.B * p.H * p.Q * p.K * p.D * p.E > 0


def plan_of(layout: BlockLayout, problem: Problem, direction: Direction, features: int) -> FlashPlan | None:
    """The plan of a layout, made once for each set of shapes and kept as long as the layout."""
    p = problem
    key = (p.B, p.H, p.G, direction, features, p.dtype == "float64")
    make = partial(plan_flash, layout, problem, direction == "backward", features)
    (plan,) = _plans.of(layout).get_or_make(key, lambda: (make(),))
    return plan


def plan_flash(layout: BlockLayout, problem: Problem, backward: bool, features: int) -> FlashPlan | None:
    """The plan of a layout; None where a row keeps keys that are not consecutive, or tiles take fewer or larger calls.

    Args:
        features: of the arrays that the calls read.
    """
    intervals = intervals_of(layout)
    if intervals is None:
        return None
    (bl, hl), p = layout.rows.lead, problem
    parts, computed = [], 0
    for b in range(bl):
        batch = slice(b, b + 1) if bl > 1 else slice(0, p.B)
        h = 0
        while h < hl:
            end = h + 1
            mine = intervals[b * hl + h]
            while end < hl and all((x == y).all() for x, y in zip(mine, intervals[b * hl + end], strict=True)):
                end += 1
            heads = (batch.stop - batch.start) * (end - h if hl > 1 else p.H)
            blocks = blocks_of(mine, backward, heads)
            if blocks is None:
                return None
            parts.append(FlashPart(batch, slice(h, end) if hl > 1 else slice(0, p.H), tuple(blocks), mine))
            computed += sum(PAIRS_OF_CALL + heads * x.n * (PAIRS_OF_BLOCK + x.pairs // x.n) for x in blocks)
            h = end
    rows = layout.rows
    tiles = sum(int(np.asarray(x.counts).sum()) for x in (rows.full, rows.interval, rows.bits))
    tiled = tiles * rows.block_rows * rows.block_columns * p.B * p.H // (bl * hl)
    return FlashPlan(tuple(parts), problem, features) if computed <= 2 * tiled + 16 * PAIRS_OF_CALL else None


def forward(plan: FlashPlan, terms: Terms, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    p, schedule, dtype = plan.problem, plan.schedule(terms.key_lengths), q.dtype
    if (there := schedule.attended) is not None:
        q, k, v = there.of_rows(q), there.of_keys(k), there.of_keys(v)
    if schedule.whole is not None:
        out, lse = _whole(plan, schedule.whole, terms.scale, q, k, v)
    else:
        q, k, v = (widened(x, plan.features) for x in converted(q, k, v))
        out = (q.new_zeros if schedule.empty else q.new_empty)(p.B, p.H, p.Q, plan.features)
        lse = q.new_empty((p.B, p.H, p.Q), dtype=plan.wide)
        for call in schedule.calls:
            rows_out, sums = flash(
                call.q.of(q), call.k.of(k), call.k.of(v), 0.0, call.causal, attn_mask=call.mask, scale=terms.scale
            )
            rows, row_sums = call.q.of(out), call.lse.of(lse)
            if call.again:
                rows_out, sums = combined(rows, row_sums, rows_out, sums)
            rows.copy_(rows_out)
            row_sums.copy_(sums)
        for batch, heads, none in schedule.empty:
            lse[batch, heads].masked_fill_(none, -torch.inf)
    return finished(out[..., : p.E], lse, terms.sink_logits, dtype)


def _whole(
    plan: FlashPlan, call: FlashCall, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) by the one call that computes everything: of a cache, the keys that it reads are all that is touched.

    The operator's results lie as q does.
    """
    p, S = plan.problem, plan.features
    at, group = call.k.offset // S, p.H // p.G
    keys = slice(at, at + call.keys)
    q, k, v = converted(q, k[:, :, keys], v[:, :, keys])
    if group == 1:
        q, k, v = (widened(x, S, contiguous=False) for x in (q, k, v))
    else:
        q = widened(q, S).view(-1, group, p.Q, S)
        k, v = (widened(x, S, contiguous=False).flatten(0, 1) for x in (k, v))
        if call.shared:
            k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
        else:  # the heads of a group are rows of one
            q, k, v = q.view(-1, 1, group * p.Q, S), k[:, None], v[:, None]
    out, lse = flash(q, k, v, 0.0, call.causal, attn_mask=call.mask, scale=scale)
    return out.contiguous().view(p.B, p.H, p.Q, S), lse.contiguous().view(p.B, p.H, p.Q)


def converted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, in float32 for 16 bits.

    The operator's exponentials have 15 bits for 16-bit inputs, and it takes no less time for them on a CPU without
    matrix units. But where few rows read many keys, all time goes into reading these, and they stay as they are.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        return q, k, v
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if rows < FEW_ROWS and k.numel() > FEW_KEYS:
        return q, k, v
    return q.float(), k.float(), v.float()


def finished(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks in the denominator, out contiguous and in `dtype`; it is written to before."""
    if sinks is None:
        return out.to(dtype).contiguous(), lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # A row that keeps nothing has out 0 already; its weight is NaN under a sink of -inf.
    out.mul_(torch.exp(lse - with_sink).nan_to_num_(0.0)[..., None])
    return out.to(dtype).contiguous(), with_sink


def combined(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows over two sets of keys."""
    # Of two weights near 0 and 1, neither is made of the other: it would lose its digits. Without keys both are NaN.
    weight, rest = (torch.sigmoid(x).nan_to_num_(0.0)[..., None] for x in (more_lse - lse, lse - more_lse))
    return more * weight + out * rest, torch.logaddexp(lse, more_lse)


def backward(
    plan: FlashPlan, terms: Terms, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and dsink_logits where there are sinks."""
    p, S, schedule = plan.problem, plan.features, plan.schedule(terms.key_lengths)
    if (there := schedule.attended) is not None:
        dout, q, k, v = there.of_rows(dout), there.of_rows(q), there.of_keys(k), there.of_keys(v)
    given = operands(dout, dlse, q, k, v, out, lse, S, bool(schedule.empty))
    padded: tuple[Tensor, ...] = ()
    if schedule.whole is not None and schedule.whole.keys == p.K:
        dq, dk, dv = (x.contiguous() for x in _gradients(schedule.whole, terms.scale, *given))
        padded = dq.view(p.B, p.H, p.Q, S), dk.view(p.B, p.G, p.K, S), dv.view(p.B, p.G, p.K, S)
    if not padded:
        made, like = (given.q.new_zeros if schedule.empty else given.q.new_empty), given.k
        padded = made(p.B, p.H, p.Q, S), like.new_zeros(p.B, p.G, p.K, S), like.new_zeros(p.B, p.G, p.K, S)
        dq, *others = padded
        for call in schedule.calls:
            mine, *shares = _gradients(call, terms.scale, *given)
            rows = call.q.of(dq)
            rows.add_(mine) if call.again else rows.copy_(mine)
            for x, share in zip(others, shares, strict=True):
                _add(call, x, share)
    of = zip(padded, (q, k, v), strict=True)
    gradients = tuple(_like(x, y) for x, y in of)
    if terms.sink_logits is None:
        return gradients
    return (*gradients, sink_gradient(*row_terms(dout, dlse, out, lse, compute_dtype(q.dtype)), terms.sink_logits))


def _like(x: Tensor, y: Tensor) -> Tensor:
    """A gradient in the type and shape of its input, contiguous."""
    return x if x.shape == y.shape and x.dtype == y.dtype else x[..., : y.shape[-1]].to(y.dtype).contiguous()


class Operands(NamedTuple):
    """The operands of the operator's backward, in float32 or float64, contiguous, all with as many features."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def operands(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, features: int,
    some_empty: bool,
) -> Operands:  # fmt: skip
    """The inputs of a backward, of which 16-bit types are converted: it adds the gradients of a head's blocks in them.

    With an lse of +inf every probability of a row that keeps nothing is exactly 0. dlse is in one more feature, which
    is 1 in dout, -dlse in out and 0 elsewhere: rowsum(dout * out) is then less dlse, and dout v as it was.

    Args:
        some_empty: whether any row keeps nothing.
    """
    dtype = compute_dtype(q.dtype)
    dout, q, k, v, out = (widened(x.to(dtype), features) for x in (dout, q, k, v, out))
    if some_empty:
        empty = lse == -torch.inf
        lse, dlse = lse.masked_fill(empty, torch.inf), None if dlse is None else dlse.masked_fill(empty, 0.0)
    if dlse is not None:
        dout.select(-1, -1).fill_(1.0)
        out.select(-1, -1).copy_(-dlse)
    return Operands(dout, q, k, v, out, lse.contiguous())


def features_of(problem: Problem, dlse: Tensor | None) -> int:
    """The number of features of the arrays that the operator reads: that of q, k and v, where dlse takes one more."""
    return max(problem.D, problem.E) + (dlse is not None)


def widened(x: Tensor, features: int, contiguous: bool = True) -> Tensor:
    """`x` with zeros in further features, contiguous or with contiguous features alone, at an aligned address."""
    *_, size = x.shape
    if size != features:  # of a tensor whose second dimension is the fastest torch makes another such
        return pad(x, (0, features - size)).contiguous()
    if contiguous or x.stride(-1) != 1:
        x = x.contiguous()
    # Matrix products of MKL have other bits at addresses that are not aligned.
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNMENT else x


def _gradients(
    call: FlashCall, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call; keys that heads share have one of each."""
    dq, dk, dv = flash_backward(
        call.q.of(dout), call.q.of(q), call.k.of(k), call.k.of(v), call.q.of(out), call.lse.of(lse), 0.0, call.causal,
        attn_mask=call.mask, scale=scale,
    )  # fmt: skip
    return (dq, dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)) if call.shared else (dq, dk, dv)


def _add(call: FlashCall, x: Tensor, share: Tensor) -> None:
    """Add what the blocks of a call give to their keys, so that no addition meets the same key twice."""
    keys = call.keys
    if call.blocks > 1 and call.move == 0:
        share = share.sum(0, keepdim=True)
    each = call.move if 0 < call.move < keys and call.blocks > 1 else keys
    for at in range(0, keys, each):
        piece = share[:, :, at : at + each]
        x.as_strided(piece.shape, call.k.strides, call.k.offset + at * x.shape[-1]).add_(piece)
