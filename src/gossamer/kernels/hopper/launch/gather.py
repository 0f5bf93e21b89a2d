"""Both directions of a gather layout as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gossamer.kernels.arrays import zeros
from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import gather_config
from gossamer.kernels.hopper.device.gather.configurations import ROWS, GatherConfig
from gossamer.kernels.hopper.launch.arguments import (
    Schedule,
    factors,
    gathered,
    kernel,
    lengths,
    operand,
    parts,
    result,
    schedule,
    score_of,
    sinks,
    tile_counter,
    unread,
)  # fmt: skip
from gossamer.kernels.hopper.launch.backward import done, gradients, row_terms, run
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.rows import sharing, work
from gossamer.kernels.launch import Builder, Operand, Prepared, compact
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.problem import Problem


def forward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: GatherConfig | None = None, split: int | None = None,
) -> Prepared:  # fmt: skip
    """out and lse. Float32 numbers of v must be below 2^103 in magnitude: see docs/kernels/gather.md.

    Args:
        config: replaces the configuration for these head sizes.
        split: replaces the automatic split of long lists, in steps of 64 columns.
    """
    p, b, heads = problem, Builder(operands), layout.rows.heads
    config = config or gather_config("forward", p.dtype, p.D, p.E, score_of(scoring), "key_lengths" in b, heads)
    return forward_by(config, b, p, scoring, _schedule(b, p, layout, config, split))


def forward_by(config: GatherConfig, b: Builder, p: Problem, scoring: Scoring, s: Schedule) -> Prepared:
    """out and lse of a schedule."""
    q, k, v = operand(b, "q"), gathered(b, "k"), gathered(b, "v")
    out = result(b, "out", p.dtype, (p.B, p.H, p.Q, p.E), pairs=p.dtype == "float32")
    lse = b.result("lse", "float32", (p.B, p.H, p.Q))
    end, sink, has_sinks = lengths(b, p.K), sinks(b), int("sink_logits" in b)
    halves = []
    if config.dtype == "float32":  # K and V, which the kernel writes before it gathers them
        halves = [b.array(f"{x}_halves", "float16", (p.B, p.G, p.K, 2 * config.size)) for x in ("k", "v")]
        halves.append(b.array("powers", "float32", (p.B, p.G, p.K, 2)))
    part_out, part_lse = parts(b, "part_out", s.slots, ROWS, config.size), parts(b, "part_lse", s.slots, ROWS)
    b.step(
        kernel("gather", config), q, k, v, *halves, out, lse, *s.arrays, sink, part_out, part_lse,
        end or unread(b, "no_lengths", "int32", 1), tile_counter(b), *factors(scoring), s.items, has_sinks, s.blocks,
    )  # fmt: skip
    if s.slots:
        b.step(kernel("merge", p.dtype, config.size, ROWS), out, lse, part_out, part_lse, s.merges, sink, has_sinks)
    return b.done("out", "lse")


def backward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: GatherConfig | None = None, query: GatherConfig | None = None, split: int | None = None,
) -> Prepared:  # fmt: skip
    """dq, dk and dv, and dsink_logits where there are sinks.

    Args:
        config: replaces the configuration of the kernel of dK and dV; query: that of dQ's.
        split: as for the forward.
    """
    if layout.apart:
        return _by_rows(problem, layout, scoring, operands, query)
    p, b = problem, Builder(operands)
    dq, dk, dv = gradients(b, p)
    out = operand(b, "out")
    q, k, v, dout = (gathered(b, name) for name in ("q", "k", "v", "dout"))
    end = lengths(b, p.K)
    given = p.dtype, p.D, p.E, score_of(scoring, True), end is not None
    by_columns, by_rows = config or gather_config("columns", *given), query or gather_config("query", *given)
    terms, _ = row_terms(b, p, out, dout, by_rows.size, by_rows.size)
    unknown = end or unread(b, "no_lengths", "int32", 1)
    for one, results in (by_columns, (dk, dv)), (by_rows, (dq,)):
        gradients_by(one, b, p, layout, scoring, (q, k, v, dout, terms), unknown, results, split)
    return done(b, terms)


def _by_rows(
    p: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], config: GatherConfig | None
) -> Prepared:
    """The backward of lists that only a device knows: one kernel, which adds dK and dV in memory."""
    b, heads = Builder(operands), layout.rows.heads
    dq, out = result(b, "dq", p.dtype, b["q"].shape), operand(b, "out")
    q, k, v, dout = (gathered(b, name) for name in ("q", "k", "v", "dout"))
    end = lengths(b, p.K)
    config = config or gather_config("gradients", p.dtype, p.D, p.E, score_of(scoring, True), end is not None, heads)
    size = config.size
    terms, _ = row_terms(b, p, out, dout, size, size)
    sums = [b.array(f"{name}_sum", "float32", (p.B, p.G, p.K, size), 0.0) for name in ("dk", "dv")]
    s = _schedule(b, p, layout, config, None)
    assert not s.slots, "lists that only a device knows are not cut"
    run(
        b, p, scoring, kernel("gather", config), s, (q, k, v, dout, terms, *sums),
        end or unread(b, "no_lengths", "int32", 1), {dq: (size, scoring.scale)},
    )  # fmt: skip
    for made, name in zip(sums, ("k", "v"), strict=True):
        shape = b[name].shape
        seen = made if shape[3] == size else b.view(f"{made}_columns", made, shape, compact((*shape[:3], size)))
        b.copy(seen, b.result(f"d{name}", p.dtype, shape))
    return done(b, terms)


def gradients_by(
    config: GatherConfig, b: Builder, p: Problem, layout: GatherLayout, scoring: Scoring,
    inputs: Sequence[str], end: str, results: Sequence[str], split: int | None = None,
) -> None:  # fmt: skip
    """Write dk and dv, or dq, by one kernel. `inputs`: q, k, v, dout and row terms; `end`: key lengths."""
    s = _schedule(b, p, layout, config, split)
    factors = (scoring.scale, 1.0)  # of dk and dv, or of dq
    sized = {name: (config.size, factor) for name, factor in zip(results, factors, strict=False)}
    run(b, p, scoring, kernel("gather", config), s, inputs, end, sized)


def _schedule(b: Builder, p: Problem, layout: GatherLayout, config: GatherConfig, split: int | None) -> Schedule:
    most, by_columns = config.blocks * p.processors, config.direction == "columns"
    if by_columns:
        walk, made = layout.columns, column_work(layout, *sharing(p.G, p.B, layout.columns), p.H // p.G, most, split)
    else:
        tiles = p.H // config.heads  # of heads, that items know
        walk = layout.rows.for_heads(tiles)
        if walk is not layout.rows:
            layout = replace(layout, rows=walk)
        made = work(layout, *sharing(tiles, p.B, walk), most, split)
    rows = walk.block_rows if by_columns or config.heads == 1 else ROWS
    assert rows == ROWS, f"the kernels gather for {ROWS} rows, this walk is of {walk.block_rows}"
    # A kernel argument needs an address.
    indices = walk.indices if len(walk.indices) else zeros((ROWS,), walk.indices) - 1
    bits = zeros((2, walk.block_rows), walk.bits) if 0 in walk.bits.shape else walk.bits
    bits = bits.view(np.int32) if isinstance(bits, np.ndarray) else bits
    return schedule(b, "columns" if by_columns else "rows", made, most, ROWS, indices=indices, bits=bits)
