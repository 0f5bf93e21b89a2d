"""From tensors and a layout to a forward call, and what all launches share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.devices import Workspace, elsewhere, empty_from, int32_lengths, processors, template
from gossamer.kernels.hopper import compiled
from gossamer.kernels.hopper.choice import forward_config
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.schedule.rows import lists, sharing, work
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.plan.problem import Problem

LOG2E = 1.0 / math.log(2.0)
FEW = 64  # query rows of the smallest tile
STEP = 8  # 16-bit numbers in the 16 bytes to which TMA wants addresses and strides aligned


@cache
def unused(device: torch.device, *shape: int) -> Tensor:
    """A tensor for an argument that the kernel does not read."""
    return torch.zeros(shape, dtype=torch.float32, device=device)


@cache
def unused_lengths(device: torch.device) -> Tensor:
    """Key lengths for a kernel that does not read them."""
    return torch.zeros(1, dtype=torch.int32, device=device)


_tickets: dict[tuple[int | None, int], Tensor] = {}
# Counters for calls in graphs, by device, 128 bytes apart: zeroed once, outside of any graph, each given to one call.
_captured: dict[int | None, tuple[Tensor, Iterator[int]]] = {}
CAPTURED, APART = 4096, 32


def tickets(device: torch.device) -> Tensor:
    """The counter of work items of the current stream. Kernels of one stream follow one another, and leave it at zero.

    A call in a graph gets its own, since replays may run beside the stream it was captured on. One that the graph must
    zero itself costs as much as a small kernel: only where all are given away, or no call has run before.
    """
    if torch.cuda.is_current_stream_capturing():
        counters, places = _captured.get(device.index, (None, iter(())))
        at = next(places, None)
        if counters is None or at is None:
            return torch.zeros(1, dtype=torch.int32, device=device)
        return counters[at, :1]
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _tickets.get(key)
    if found is None:
        found = _tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
        if device.index not in _captured:
            with torch.inference_mode(False):
                counters = torch.zeros((CAPTURED, APART), dtype=torch.int32, device=device)
            if device.type == "cuda":  # tests run this on a CPU
                torch.cuda.current_stream(device).synchronize()  # a graph may be replayed on any stream
            _captured[device.index] = counters, iter(range(CAPTURED))
    return found


def readable(x: Tensor) -> bool:
    """Whether TMA can read a (B, heads, rows, columns) tensor of 16-bit numbers where it is."""
    a, b, c, d = x.stride()
    return d == 1 and a > 0 and b > 0 and c > 0 and not (a | b | c) % STEP and not x.data_ptr() % 16


def aligned(x: Tensor) -> Tensor:
    """The tensor itself when it is contiguous and 16-byte aligned, as kernel arguments are compiled; else a copy."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def operand(x: Tensor) -> Tensor:
    """The tensor itself when TMA can read it, else a copy whose rows are padded to 16 bytes."""
    return x if readable(x) else empty_like(x).copy_(x)


def empty(like: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """An uninitialised tensor that TMA can address: rows padded to 16 bytes."""
    columns = shape[-1]
    if columns % STEP == 0:
        return like.new_empty(shape)
    return like.new_empty((*shape[:-1], -(-columns // STEP) * STEP))[..., :columns]


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the same shape and type; padded as those of `empty`."""
    if x.shape[-1] % STEP:
        return empty(x, x.shape)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Prepared(NamedTuple):
    """What the calls of one layout, of the same sizes and kind of score, have in common."""

    config: ForwardConfig
    run: Callable[..., None]
    arrays: tuple[Any, ...]  # items and lists, in the form that costs least to pass
    merges: Any  # of split rows, in that form
    items: int
    slots: int
    blocks: int
    parts: tuple[Tensor, Tensor] | None  # what stands for none


_prepared: WeakKeyDictionary[Walk, dict[Any, Prepared]] = WeakKeyDictionary()


def packs(p: Problem, layout: BlockLayout, terms: Terms) -> bool:
    """Whether the query heads of a key head become the rows of one tile, so that its keys are loaded once for all.

    For few queries of heads that share their layout; a learned sink is the head's own.
    """
    few = p.G < p.H and p.Q * (p.H // p.G) <= FEW <= layout.block_q
    # The kernel for wide tiles reads which half of one is empty off the first and last row: they must ascend.
    ascend = p.Q == 1 or layout.block_kv == 64
    return few and ascend and layout.lead[1] == 1 and terms.sink_logits is None


def prepared(
    problem: Problem, layout: BlockLayout, score: str, lengths: bool, packed: bool, split: int | None
) -> Prepared:
    """Compiled kernels, items and lists of a call; made once and kept as long as the layout.

    `packed`: the problem's rows are those of several heads, the layout's those of one.
    """
    p = problem
    kept = _prepared.get(layout.rows)
    if kept is None:
        kept = _prepared.setdefault(layout.rows, {})
    key = (forward_config, p.dtype, p.B, p.H, p.D, p.E, score, lengths, p.Q if packed else 0, split)
    return kept.get(key) or kept.setdefault(key, _prepare(p, layout, score, lengths, packed, split))


def _prepare(p: Problem, layout: BlockLayout, score: str, lengths: bool, packed: bool, split: int | None) -> Prepared:
    from tvm_ffi import from_dlpack

    walk = layout.rows
    config = forward_config(p.dtype, p.D, p.E, walk.block_rows, walk.block_columns, score, lengths)
    copies, heads = sharing(p.H, p.B, walk)
    device = walk.lo.device
    blocks = config.blocks * processors(device)
    known = lists(layout, blocks=0 if lengths else blocks)  # lengths are looked up in lists that ascend
    plan = work(layout, copies, heads, blocks, split)
    items = plan.items.shape[0]
    lo, hi, pool = known.lo, known.hi, known.pool
    if packed:
        repeat = p.Q // layout.Q
        lo, hi = (x.repeat(1, repeat) if layout.rows.lo.numel() else x for x in (lo, hi))
        pool = pool.clone()
        if layout.rows.pool.numel():
            rows = pool.view(-1, config.block_q, pool.shape[1])
            rows[:, : p.Q] = rows[:, : layout.Q].repeat(1, repeat, 1)
        if device.type == "cuda" and layout.host is not None:  # kept for every stream, and others would not wait
            torch.cuda.current_stream(device).synchronize()
    return Prepared(
        config,
        compiled.forward(config),
        tuple(from_dlpack(x) for x in (plan.items, known.lists, lo, hi, pool)),
        from_dlpack(plan.merges),
        items,
        plan.slots,
        min(blocks, items),
        None if plan.slots else (unused(device, 1, config.block_q, config.E), unused(device, 1, config.block_q)),
    )


def without_keys(out: Tensor, lse: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call without keys, written: the sinks alone are attended."""
    sinks = terms.sink_logits
    lse.copy_(lse.new_full((1,), -math.inf) if sinks is None else sinks.float()[:, None])
    return out.zero_(), lse


def lengths_of(lengths: Tensor | None, K: int, device: torch.device) -> Tensor:
    """Key lengths as the kernels want them, or what is never read in their place."""
    return unused_lengths(device) if lengths is None else aligned(int32_lengths(lengths, K))


def score_of(terms: Terms) -> str:
    """The kind of score, for which kernels are compiled."""
    return "softcap" if terms.softcap is not None else "fold" if terms.scale > 0 else "scale"


def factors(terms: Terms, score: str) -> tuple[float, float]:
    """Factors of a score before its soft cap, and of the exponent in base 2."""
    if terms.softcap is not None:
        return terms.scale / terms.softcap, terms.softcap * LOG2E
    return (terms.scale, LOG2E) if score == "scale" else (1.0, terms.scale * LOG2E)


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse).

    Args:
        split: replaces the automatic split of long rows.
        into: (out (B, H, Q, E), lse (B, H, Q) float32) that receive the results, of any strides; an out that TMA cannot
            address is written by a copy.
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return forward(problem, q, k, v, layout, terms, split=split, into=into)
    if into is not None and not readable(into[0]):
        out, _ = forward(problem, q, k, v, layout, terms, split=split, into=(empty(q, into[0].shape), into[1]))
        into[0].copy_(out)
        return into
    p, device = problem, q.device
    if into is None:
        out = empty_like(q) if p.E == p.D else empty(q, (p.B, p.H, p.Q, p.E))
        lse = q.new_empty((p.B, p.H, p.Q), dtype=torch.float32)
    else:
        out, lse = into
    if not lse.numel():
        return out, lse
    if not p.K:
        return without_keys(out, lse, terms)
    score = score_of(terms)
    results = out, lse
    packed = packs(p, layout, terms) and (p.Q == 1 or (out.is_contiguous() and lse.is_contiguous()))
    if packed:
        shape = (p.B, p.G, p.Q * (p.H // p.G))
        q = q.reshape(*shape, p.D)
        out, lse = out.view(*shape, p.E), lse.view(shape)
        p = replace(p, H=p.G, Q=shape[2])
    call = prepared(p, layout, score, terms.key_lengths is not None, packed, split)
    before, exponent = factors(terms, score)
    sinks = unused(device, 1) if terms.sink_logits is None else aligned(terms.sink_logits.float())
    has_sinks = int(terms.sink_logits is not None)
    if call.parts is None:
        slots, config = call.slots, call.config
        part_out = q.new_empty((slots, config.block_q, config.E), dtype=torch.float32)
        part_lse = q.new_empty((slots, config.block_q), dtype=torch.float32)
    else:
        part_out, part_lse = call.parts
    call.run(
        operand(q), operand(k), operand(v), out, lse, *call.arrays, sinks, part_out, part_lse, call.merges,
        lengths_of(terms.key_lengths, p.K, device), tickets(device), before, exponent, call.items, has_sinks,
        call.blocks, int(call.slots > 0),
    )  # fmt: skip
    return results if into is not None else (results[0].contiguous(), results[1])


def bound_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, terms: Terms,
    into: tuple[Tensor, Tensor] | None = None,
) -> Callable[..., tuple[Tensor, Tensor]] | None:  # fmt: skip
    """See `kernels.contract.Binding`."""
    p, device, score, shape = problem, q.device, score_of(terms), q.shape[:3]
    if not (readable(q) and readable(k) and readable(v)) or p.E % STEP or (into and not readable(into[0])):
        return None
    packed = packs(p, layout, terms) and (into is None or p.Q == 1)
    if packed:  # the query heads of a key head are rows of one tile
        p = replace(p, H=p.G, Q=p.Q * (p.H // p.G))
    kept = prepared(p, layout, score, terms.key_lengths is not None, packed, None)
    run, plain = kept.run, terms.having(None, None, None)
    rows, no_sinks, has_sinks = (p.B, p.H, p.Q), unused(device, 1), int(terms.sink_logits is not None)
    out_like, lse_like = template(q, (*shape, p.E)), template(q, shape, torch.float32)
    block, size = kept.config.block_q, kept.config.E
    parts = Workspace(q, (kept.slots, block, size), (kept.slots, block))
    after = (*factors(terms, score), kept.items, has_sinks, kept.blocks, int(kept.slots > 0))
    no_lengths = unused_lengths(device)

    def call(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, sinks: Tensor | None = None,
        slopes: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if elsewhere(q):
            return forward(problem, q, k, v, layout, plain.having(lengths, sinks, slopes), into=into)
        results = out, lse = into or (empty_from(out_like), empty_from(lse_like))
        if packed:
            q, out, lse = q.reshape(*rows, p.D), out.view(*rows, p.E), lse.view(rows)
        room, (part_out, part_lse) = (None, kept.parts) if kept.parts else parts.take()
        end = no_lengths if lengths is None else aligned(int32_lengths(lengths, p.K))
        sink = no_sinks if sinks is None else aligned(sinks.float())
        run(q, k, v, out, lse, *kept.arrays, sink, part_out, part_lse, kept.merges, end, tickets(device), *after)
        if room is not None:
            parts.leave(room)
        return results

    return call
