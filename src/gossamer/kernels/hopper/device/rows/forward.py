"""out and lse of single rows, or of parts of rows that are cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import Opaque, within_keys
from gossamer.cute.instructions import LN2, LOG2E
from gossamer.kernels.hopper.device.rows.configurations import RowsConfig
from gossamer.kernels.hopper.device.rows.pieces import (
    Item,
    RowsKernel,
    Score,
    Table,
    add,
    blank,
    dot,
    pieces,
    places,
    select,
    write,
    write_part,
)

FLOOR = -3.4028234663852886e38  # where the maximum starts: finite, so that a row with nothing kept is no special case


class RowsArguments(NamedTuple):
    """What the kernel is called with."""

    q: Any  # (B, H, Q, D)
    k: Any  # (B, G, K, D)
    v: Any  # (B, G, K, E)
    out: Any  # (B, H, Q, E)
    lse: Any  # (B, H, Q)
    items: Any  # (n, ITEM): `layouts.items`
    indices: cute.Tensor
    sinks: Any  # (H,)
    part_out: Any  # (slots, 1, size)
    part_lse: Any  # (slots, 1)
    lengths: Any  # (B,)
    before: Any
    exponent: Any
    has_sinks: Any
    lead_heads: Any  # heads that have lists of their own, or 1
    copy_heads: Any  # heads that share lists, or 1
    slots: Any  # of one copy of the items


class RowsForward(RowsKernel):
    """out and lse."""

    def __init__(self, config: RowsConfig) -> None:
        super().__init__(config, ForwardRow)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, items: cute.Tensor,
        indices: cute.Tensor, sinks: cute.Tensor, part_out: cute.Tensor, part_lse: cute.Tensor, lengths: cute.Tensor,
        before: Float32, exponent: Float32, has_sinks: Int32, lead_heads: Int32, copy_heads: Int32, slots: Int32,
        copies: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `RowsArguments`."""
        arguments = RowsArguments(
            q, k, v, out, lse, items, indices, sinks, part_out, part_lse, lengths, before, exponent, has_sinks,
            lead_heads, copy_heads, slots,
        )  # fmt: skip
        self.launch(arguments, copies, stream)


class ForwardRow(Opaque):
    """The softmax of a row and its result."""

    def __init__(self, config: RowsConfig, arguments: RowsArguments, item: Item) -> None:
        a = arguments
        self.config, self.arguments, self.item = config, a, item
        self.score = Score(config, a.before, a.exponent)
        group = item.head // (cute.size(a.q, mode=[1]) // cute.size(a.k, mode=[1]))
        self.keys = Table(config, a.k, item.batch, group, item.lane)
        self.values = Table(config, a.v, item.batch, group, item.lane)
        self.query = Table(config, a.q, item.batch, item.head, item.lane).read(item.row, self.score.of_rows)
        self.total = pieces(config)
        self.state = cute.make_rmem_tensor((2,), Float32)  # the largest score so far, and the sum of the weights
        self.end = within_keys(a.lengths[item.batch]) if config.lengths else None

    @cute.jit
    def run(self):
        """All columns, then the results."""
        a, item = self.arguments, self.item
        self.state[0], self.state[1] = Float32(FLOOR), Float32(0.0)
        sink = Float32(FLOOR)
        if (a.has_sinks != 0) & ~item.cut:
            sink = a.sinks[item.head] * LOG2E
            if sink > FLOOR:
                self.state[0], self.state[1] = sink, Float32(1.0)
        columns = item.columns()
        item.listed(Int32(0), columns)
        keys, values = self.keys.of_step(), self.values.of_step()
        for step in cutlass.range(item.steps(), unroll=1):
            self.keys.fetch_step(columns, keys)
            self.values.fetch_step(columns, values)
            self.add(step, columns, keys, values)
        self.write()

    def add(self, step: Any, columns: Any, keys: Any, values: Any) -> None:
        """A step's columns; those of the next are loaded here, so that the loads of their rows do not wait."""
        c, item = self.config, self.item
        left = item.count - step * c.at_once
        there = [at < left for at in range(c.at_once)]
        if c.lengths:
            there = [here & (columns[at] < self.end) for at, here in enumerate(there)]
        item.listed(step + 1, columns)
        largest, scores = self.state[0], []
        for at in range(c.at_once):
            score, _ = self.score(dot(c, self.query, keys[None, None, at]))
            scores.append(select(there[at], score, -Float32.inf))
            largest = cute.arch.fmax(largest, scores[at])
        shrink = cute.math.exp2(self.state[0] - largest, fastmath=True)
        total = self.state[1] * shrink
        for piece in places(c):
            self.total[piece] = self.total[piece] * shrink
        for at in range(c.at_once):
            weight = cute.math.exp2(scores[at] - largest, fastmath=True)
            total = total + weight
            if c.lengths:
                blank(there[at], values[None, None, at])
            add(c, self.total, weight, values[None, None, at])
        self.state[0], self.state[1] = largest, total

    @cute.jit
    def write(self):
        """A row that kept nothing gives 0 and -inf."""
        a, item = self.arguments, self.item
        largest, total = self.state[0], self.state[1]
        empty = total == 0.0
        total = select(empty, Float32(1.0), total)
        lse = select(empty, -Float32.inf, (largest + cute.math.log2(total, fastmath=True)) * LN2)
        factor = 1.0 / total
        whole = item.there & ~item.cut
        write(a.out, item, self.total, factor)
        write_part(a.part_out, item, self.total, factor)
        if item.lane == 0:
            if whole:
                a.lse[item.batch, item.head, item.row] = lse
            if item.there & item.cut:
                a.part_lse[item.slot, 0] = lse
