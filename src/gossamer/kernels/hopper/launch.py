"""From tensors and a layout to a kernel call."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.hopper import compile as compiled
from gossamer.kernels.hopper.config import forward_config
from gossamer.kernels.hopper.schedule import lists, work
from gossamer.layouts.block import BlockLayout

LOG2E = 1.0 / math.log(2.0)


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def unused(device: torch.device, *shape: int) -> Tensor:
    """A tensor for an argument that the kernel does not read."""
    return torch.zeros(shape, dtype=torch.float32, device=device)


_tickets: dict[tuple[torch.device, int], Tensor] = {}


def tickets(device: torch.device) -> Tensor:
    """The counter of work items of the current stream. Kernels of one stream follow one another, and leave it at zero.

    A graph gets its own, zeroed by the graph itself: its replays may run beside the stream it was captured on.
    """
    stream = torch.cuda.current_stream(device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _tickets.get((device, stream.cuda_stream))
    if found is None:
        found = _tickets[device, stream.cuda_stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def readable(x: Tensor) -> bool:
    """Whether TMA can read a (B, heads, rows, columns) tensor where it is."""
    step = 16 // x.element_size()
    return x.stride(3) == 1 and all(s > 0 and s % step == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0


def operand(x: Tensor) -> Tensor:
    """The tensor itself when TMA can read it, else a copy whose rows are padded to 16 bytes."""
    return x if readable(x) else empty(x, x.shape).copy_(x)


def empty(like: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """An uninitialised tensor that TMA can address: rows padded to 16 bytes."""
    step = 16 // like.element_size()
    columns = -(-shape[-1] // step) * step
    return torch.empty((*shape[:-1], columns), dtype=like.dtype, device=like.device)[..., : shape[-1]]


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
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return forward(problem, q, k, v, layout, terms, split=split, into=into)
    if into is not None and not readable(into[0]):
        out, _ = forward(problem, q, k, v, layout, terms, split=split, into=(empty(q, into[0].shape), into[1]))
        into[0].copy_(out)
        return into
    p, walk, device = problem, layout.rows, q.device
    score = "softcap" if terms.softcap is not None else "fold" if terms.scale > 0 else "scale"
    config = forward_config(p.dtype, p.D, p.E, walk.block_rows, walk.block_columns, score)
    if into is None:
        out = empty(q, (p.B, p.H, p.Q, p.E))
        lse = torch.empty((p.B, p.H, p.Q), dtype=torch.float32, device=device)
    else:
        out, lse = into
    if not lse.numel():
        return out, lse
    if not p.K:
        sinks = terms.sink_logits
        lse.copy_(lse.new_full((1,), -math.inf) if sinks is None else sinks.float()[:, None])
        return out.zero_(), lse
    q, k, v = operand(q), operand(k), operand(v)
    Bl, Hl = walk.lead
    heads = p.H if Hl == 1 else 1
    copies = heads * (p.B if Bl == 1 else 1)
    known = lists(layout)
    plan = work(layout, copies, processors(device), split)
    items = plan.items.shape[0]
    before, exponent = 1.0, terms.scale * LOG2E
    if terms.softcap is not None:
        before, exponent = terms.scale / terms.softcap, terms.softcap * LOG2E
    elif score == "scale":
        before, exponent = terms.scale, LOG2E
    sinks = unused(device, 1) if terms.sink_logits is None else terms.sink_logits.float().contiguous()
    has_sinks = int(terms.sink_logits is not None)
    if plan.slots:
        part_out = torch.empty((copies * plan.slots, config.block_q, config.E), dtype=torch.float32, device=device)
        part_lse = torch.empty((copies * plan.slots, config.block_q), dtype=torch.float32, device=device)
    else:
        part_out, part_lse = unused(device, 1, config.block_q, config.E), unused(device, 1, config.block_q)
    blocks = min(processors(device), items * copies)
    compiled.forward(config)(
        q, k, v, out, lse, plan.items, known.lists, known.lo, known.hi, known.pool, sinks, part_out, part_lse,
        tickets(device), before, exponent, items, copies, heads, plan.slots, has_sinks, blocks,
    )  # fmt: skip
    if plan.slots:
        compiled.merge(p.dtype, config.E, config.block_q)(
            out, lse, part_out, part_lse, plan.merges, sinks, copies, heads, plan.slots, has_sinks
        )
    return out, lse
