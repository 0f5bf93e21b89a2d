"""The backward of a block layout as data.

Row terms and zeroed sums of dQ; dK, dV and those sums by the columns of the layout; parts of split columns; dQ from its
sums. A deterministic backward, one of wide heads and one of 64 x 64 tiles have no sums in memory: dQ comes from dS that
the columns leave (kept.py), or where that is too much memory from a walk over the rows. Parts are added in slot order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.cute.configurations import Clears
from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import WIDE, TileCall, backward_config, query_config, wide_config
from gossamer.kernels.hopper.device.configurations import BackwardConfig, QueryConfig, WideConfig
from gossamer.kernels.hopper.launch.arguments import (
    Schedule,
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
)  # fmt: skip
from gossamer.kernels.hopper.launch.kept import gradients as keeping
from gossamer.kernels.hopper.launch.kept import kept, summed
from gossamer.kernels.hopper.schedule.attended import clears
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.kernels.hopper.schedule.rows import sharing, work
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared
from gossamer.layouts.block import BlockLayout
from gossamer.plan.problem import Problem

TERMS = 128  # row terms are padded to whole tiles of this many queries
TILE = 64  # rows of a tile of dQ's sums
NARROW = 8  # tiles of 128 queries: a window of 900


def backward(
    problem: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: BackwardConfig | WideConfig | None = None, query: QueryConfig | None = None, split: int | None = None,
    most_kept: int | None = None,
) -> Prepared:  # fmt: skip
    """dq, dk and dv, and dsink_logits where there are sinks.

    Args:
        config: replaces the configuration of the walk over columns; query: that of the walk over rows.
        split: replaces the automatic split of long rows and columns.
        most_kept: replaces the automatic limit of what is kept of dS, in bytes; 0: nothing is.
    """
    p, b = problem, Builder(operands)
    dq, dk, dv = gradients(b, p)
    out, q, k, v, dout = (operand(b, name) for name in ("out", "q", "k", "v", "dout"))
    inputs = q, k, v, dout
    end = lengths(b, p.K)
    what = clears(layout, backward=True)
    config = config or column_config(p, layout, scoring, end is not None, what)
    with_dq = getattr(config, "with_dq", False)
    terms, sums = row_terms(b, p, out, dout, config.D, config.E, with_dq)
    # dQ from dS that is kept looks for no keys that nothing attends, but for those past a length.
    how = kept(p, layout, most_kept) if query is None and what < Clears.INTERVALS else None
    if how is not None:
        keeping(b, p, layout, scoring, how, config, (*inputs, terms, sums), end, (dq, dk, dv), split)
        return done(b, terms)
    most = config.blocks * p.processors
    made = column_work(layout, *sharing(p.G, p.B, layout.columns), p.H // p.G, most, split)
    known, rows = lists(layout, True), layout.columns.block_rows
    s = schedule(b, "columns", made, most, rows, config.block_kv, **known._asdict())
    by_columns = kernel("wide" if isinstance(config, WideConfig) else "backward", config)
    run(
        b, p, scoring, by_columns, s, (*inputs, terms, sums, None), end,
        {dk: (config.D, scoring.scale), dv: (config.E, 1.0)},
    )  # fmt: skip
    if with_dq:
        b.step(kernel("postprocess", p.dtype, config.D), sums, dq, scoring.scale)
    else:
        query_gradient(b, p, layout, scoring, (*inputs, terms), end, dq, query, split, what)
    return done(b, terms)


def query_gradient(
    b: Builder, p: Problem, layout: BlockLayout, scoring: Scoring, inputs: Sequence[str], end: str | None, dq: str,
    config: QueryConfig | None = None, split: int | None = None, what: int = Clears.NOTHING,
) -> None:  # fmt: skip
    """Write dq by a walk over the rows of the layout. `inputs`: q, k, v, dout and row terms; `end`: key lengths."""
    walk, tile = layout.rows, (layout.rows.block_rows, layout.rows.block_columns)
    call = TileCall(p.dtype, p.D, p.E, *tile, score_of(scoring, True), end is not None, what)
    config = config or query_config(call)
    most = config.blocks * p.processors
    made = work(layout, *sharing(p.H, p.B, walk), most, split)
    s = schedule(b, "rows", made, most, config.block_q, **lists(layout, blocks=0 if end else most)._asdict())
    run(b, p, scoring, kernel("query_gradient", config), s, inputs, end, {dq: (config.D, scoring.scale)})


def column_config(
    p: Problem, layout: BlockLayout, scoring: Scoring, has_lengths: bool, what: int
) -> BackwardConfig | WideConfig:
    """The configuration of the walk over columns; `what` it clears."""
    tile = layout.columns.block_columns, layout.columns.block_rows
    call = TileCall(p.dtype, p.D, p.E, *tile, score_of(scoring, True), has_lengths, what)
    if max(p.D, p.E) > WIDE:
        return wide_config(call)
    return backward_config(call, summed(p, layout), narrow(layout))


def narrow(layout: BlockLayout) -> bool:
    """Whether key tiles are windows of at most `NARROW` tiles of queries on average; where only a device knows, not."""
    walk = (layout.host or layout).columns
    if walk.device is not None:
        return False
    full, intervals, bits = (int(tiles.counts.sum()) for tiles in walk.lists.values())
    listed = full + intervals + bits
    return 0 < listed <= 4 * intervals and listed <= NARROW * walk.full.counts.size


def gradients(b: Builder, p: Problem) -> list[str]:
    """Memory for dq, dk and dv."""
    return [result(b, f"d{name}", p.dtype, b[name].shape) for name in ("q", "k", "v")]


def row_terms(b: Builder, p: Problem, out: str, dout: str, D: int, E: int, summed: bool = False) -> tuple[str, str]:
    """Row terms (2, B, H, padded Q), which are lse in base 2 and delta, and zeroed sums of dQ where it is summed."""
    rows = -(-p.Q // TERMS) * TERMS
    terms = b.array("terms", "float32", (2, p.B, p.H, rows))
    if summed:
        sums = b.array("dq_sum", "float32", (p.B, p.H, rows // TILE, TILE * D))
    else:
        sums = unread(b, "no_sums", "float32", 1, 1, 1, TILE * D)
    dlse = "dlse" if "dlse" in b else "lse"
    b.step(
        kernel("preprocess", p.dtype, E, D if summed else 0), out, dout, "lse", dlse, terms, sums, sinks(b),
        int("dlse" in b), int("sink_logits" in b),
    )  # fmt: skip
    return terms, sums


def run(
    b: Builder, p: Problem, scoring: Scoring, kind: Kernel, s: Schedule, inputs: Sequence[str | None], end: str | None,
    results: Mapping[str, tuple[int, float]],
) -> None:  # fmt: skip
    """Run a kernel of the backward, and add the parts of what it cuts.

    Args:
        results: to the head size that it is compiled for, and the factor of its sums.
    """
    found = {name: parts(b, f"part_{name}", s.slots, s.rows, size) for name, (size, _) in results.items()}
    b.step(
        kind, *inputs, *results, *s.arrays, *found.values(), end, tile_counter(b), *factors(scoring, True),
        scoring.scale, s.items, s.blocks,
    )  # fmt: skip
    if s.slots:
        for name, (size, factor) in results.items():
            b.step(kernel("sum_parts", p.dtype, size, s.rows), name, found[name], s.merges, factor)


def done(b: Builder, terms: str) -> Prepared:
    """The launch of a backward, with the gradient of the sinks where there are any."""
    if "sink_logits" not in b:
        return b.done("dq", "dk", "dv")
    b.function(Kernel(EDGE, "sink_gradient_of_rows"), terms, "lse", "sink_logits", returns={"dsink_logits": None})
    return b.done("dq", "dk", "dv", "dsink_logits")
