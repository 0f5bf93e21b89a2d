"""The forward of a block layout as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import TileCall, forward_config
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.launch.arguments import (
    factors,
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
    whole,
)  # fmt: skip
from gossamer.kernels.hopper.schedule.attended import clears
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.kernels.hopper.schedule.rows import sharing, work
from gossamer.kernels.launch import Builder, Operand, Prepared
from gossamer.layouts.block import BlockLayout
from gossamer.plan.problem import Problem

FEW = 64  # query rows of the smallest tile


def forward(
    problem: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: ForwardConfig | None = None, split: int | None = None,
) -> Prepared:  # fmt: skip
    """out and lse.

    With key_lengths, the launch serves k and v of fewer keys than the problem has as well, and of any strides, as long
    as TMA can read them and could read the operands: nothing here depends on more.

    Args:
        config: replaces the configuration for these head sizes and tiles.
        split: replaces the automatic split of long rows.
    """
    p, b, has_sinks = problem, Builder(operands), "sink_logits" in operands
    q, k, v = (operand(b, name) for name in ("q", "k", "v"))
    out, lse = result(b, "out", p.dtype, (p.B, p.H, p.Q, p.E)), b.result("lse", "float32", (p.B, p.H, p.Q))
    heads = 1  # whose rows are those of a tile
    if packs(p, layout, has_sinks) and heads_follow(b[out]) and heads_follow(b[lse]):
        heads = p.H // p.G
        q = q if heads_follow(b[q]) else b.copied(q, whole(p.D))
        q, out, lse = (heads_as_rows(b, name, p.G) for name in (q, out, lse))
        p = replace(p, H=p.G, Q=p.Q * heads)
    walk, score, end = layout.rows, score_of(scoring), lengths(b, p.K)
    tile = walk.block_rows, walk.block_columns
    call = TileCall(p.dtype, p.D, p.E, *tile, score, end is not None, clears(layout))
    config = config or forward_config(call)
    most = config.blocks * p.processors
    made = work(layout, *sharing(p.H, p.B, walk), most, split)
    # Lengths are looked up in lists that ascend.
    known = lists(layout, blocks=0 if end else most, repeat=heads)
    s = schedule(b, "rows", made, most, config.block_q, **known._asdict())
    part_out, part_lse = (
        parts(b, "part_out", s.slots, s.rows, config.E), parts(b, "part_lse", s.slots, s.rows)
    )  # fmt: skip
    b.step(
        kernel("forward", config), q, k, v, out, lse, *s.arrays, sinks(b), part_out, part_lse, s.merges,
        end or unread(b, "no_lengths", "int32", 1), tile_counter(b), *factors(scoring), s.items, int(has_sinks),
        s.blocks, int(s.slots > 0),
    )  # fmt: skip
    return b.done("out", "lse")


def packs(p: Problem, layout: BlockLayout, has_sinks: bool) -> bool:
    """Whether the query heads of a key head become the rows of one tile, so that its keys are loaded once for all.

    For few queries of heads that share their layout; a learned sink is the head's own.
    """
    few = p.G < p.H and p.Q * (p.H // p.G) <= FEW <= layout.block_q
    # The kernel for wide tiles reads which half of one is empty off the first and last row: they must ascend.
    ascend = p.Q == 1 or layout.block_kv == 64
    _, Hl = layout.lead
    return few and ascend and Hl == 1 and not has_sinks


def heads_follow(x: Operand) -> bool:
    """Whether the rows of each head of (B, H, Q, ...) lie behind those of the head before, at the same distance."""
    return x.shape[2] == 1 or x.strides[1] == x.shape[2] * x.strides[2]


def heads_as_rows(b: Builder, name: str, groups: int) -> str:
    """The view (B, G, H / G * Q, ...) of an array (B, H, Q, ...) whose heads follow one another."""
    B, H, Q, *size = b[name].shape
    batch, head, row, *last = b[name].strides
    heads = H // groups
    strides = (batch, heads * head, row if Q > 1 else head, *last)
    return b.view(f"{name}_rows", name, (B, groups, heads * Q, *size), strides)
