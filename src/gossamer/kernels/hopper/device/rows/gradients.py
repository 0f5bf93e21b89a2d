"""dQ of single rows, and dK and dV by the transposed lists: the same inputs give the same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import Opaque, within_keys
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
    select,
    word,
    write,
    write_part,
)


class RowsGradientArguments(NamedTuple):
    """What both kernels are called with; `made` and `parts` are dQ's, or dK's and dV's."""

    q: Any  # (B, H, Q, D)
    k: Any  # (B, G, K, D)
    v: Any  # (B, G, K, E)
    dout: Any  # (B, H, Q, E)
    terms: Any  # (2, B, H, padded Q): lse in base 2, delta
    made: Any
    items: Any  # (n, ITEM): `layouts.items`
    indices: cute.Tensor
    parts: Any  # (slots, 1, size)
    lengths: Any  # (B,)
    before: Any
    exponent: Any
    scale: Any
    lead_heads: Any  # heads that have lists of their own, or 1
    copy_heads: Any  # heads that share lists, or 1
    slots: Any  # of one copy of the items


class RowsQuery(RowsKernel):
    """dQ."""

    def __init__(self, config: RowsConfig) -> None:
        super().__init__(config, QueryRow)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dq: cute.Tensor,
        items: cute.Tensor, indices: cute.Tensor, part_dq: cute.Tensor, lengths: cute.Tensor, before: Float32,
        exponent: Float32, scale: Float32, lead_heads: Int32, copy_heads: Int32, slots: Int32, copies: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """As in `RowsGradientArguments`."""
        arguments = RowsGradientArguments(
            q, k, v, dout, terms, (dq,), items, indices, (part_dq,), lengths, before, exponent, scale, lead_heads,
            copy_heads, slots,
        )  # fmt: skip
        self.launch(arguments, copies, stream)


class RowsColumns(RowsKernel):
    """dK and dV, of the heads that have lists of their own."""

    def __init__(self, config: RowsConfig) -> None:
        super().__init__(config, KeyRow)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dk: cute.Tensor,
        dv: cute.Tensor, items: cute.Tensor, indices: cute.Tensor, part_dk: cute.Tensor, part_dv: cute.Tensor,
        lengths: cute.Tensor, before: Float32, exponent: Float32, scale: Float32, lead_heads: Int32, copy_heads: Int32,
        slots: Int32, copies: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `RowsGradientArguments`."""
        arguments = RowsGradientArguments(
            q, k, v, dout, terms, (dk, dv), items, indices, (part_dk, part_dv), lengths, before, exponent, scale,
            lead_heads, copy_heads, slots,
        )  # fmt: skip
        self.launch(arguments, copies, stream)


class QueryRow(Opaque):
    """dQ of a row."""

    def __init__(self, config: RowsConfig, arguments: RowsGradientArguments, item: Item) -> None:
        a = arguments
        self.config, self.arguments, self.item = config, a, item
        self.score = Score(config, a.before, a.exponent)
        group = item.head // (cute.size(a.q, mode=[1]) // cute.size(a.k, mode=[1]))
        self.keys = Table(config, a.k, item.batch, group, item.lane)
        self.values = Table(config, a.v, item.batch, group, item.lane)
        self.query = Table(config, a.q, item.batch, item.head, item.lane).read(item.row, self.score.of_rows)
        self.dout = Table(config, a.dout, item.batch, item.head, item.lane).read(item.row, Float32(1.0))
        self.lse, self.delta = [a.terms[at, item.batch, item.head, item.row] for at in range(2)]
        self.total = pieces(config)
        self.end = within_keys(a.lengths[item.batch]) if config.lengths else None

    @cute.jit
    def run(self):
        """All columns, then dQ."""
        a, item = self.arguments, self.item
        columns = item.columns()
        item.listed(Int32(0), columns)
        keys, values = self.keys.of_step(), self.values.of_step()
        for step in cutlass.range(item.steps(), unroll=1):
            self.keys.fetch_step(columns, keys)
            self.values.fetch_step(columns, values)
            self.add(step, columns, keys, values)
        (dq,), (part,) = a.made, a.parts
        write(dq, item, self.total, a.scale)
        write_part(part, item, self.total, Float32(1.0))

    def add(self, step: Any, columns: Any, keys: Any, values: Any) -> None:
        """A step's columns; those of the next are loaded here."""
        c, item = self.config, self.item
        left = item.count - step * c.at_once
        there = [at < left for at in range(c.at_once)]
        if c.lengths:
            there = [here & (columns[at] < self.end) for at, here in enumerate(there)]
        item.listed(step + 1, columns)
        for at in range(c.at_once):
            if c.lengths:
                blank(there[at], keys[None, None, at])
                blank(there[at], values[None, None, at])
            score, slope = self.score(dot(c, self.query, keys[None, None, at]))
            weight = cute.math.exp2(score - self.lse, fastmath=True)
            share = weight * (dot(c, self.dout, values[None, None, at]) - self.delta)
            share = select(there[at], share, Float32(0.0))  # a row that keeps nothing may hold anything
            add(c, self.total, share * slope, keys[None, None, at])


class KeyRow(Opaque):
    """dK and dV of a row: the sums over the query heads of its key head, or of one of them."""

    def __init__(self, config: RowsConfig, arguments: RowsGradientArguments, item: Item) -> None:
        a = arguments
        dk, _ = a.made
        self.config, self.arguments, self.item = config, a, item
        self.score = Score(config, a.before, a.exponent)
        heads = cute.size(dk, mode=[1])
        self.members = cute.size(a.q, mode=[1]) // heads
        group = item.head // (heads // cute.size(a.k, mode=[1]))
        self.key = Table(config, a.k, item.batch, group, item.lane).read(item.row, self.score.of_rows)
        self.value = Table(config, a.v, item.batch, group, item.lane).read(item.row, Float32(1.0))
        self.of_keys, self.of_values = pieces(config), pieces(config)
        self.past: Any = None
        if config.lengths:
            self.past = item.row >= within_keys(a.lengths[item.batch])
            for row in (self.key, self.value):
                blank(~self.past, row)

    @cute.jit
    def run(self):
        """All queries of all heads, then both gradients. Keys past the length have none."""
        a, item = self.arguments, self.item
        columns = item.columns()
        for member in cutlass.range(self.members, unroll=1):
            self.of_head(item.head * self.members + member, columns)
        (dk, dv), (part_of_keys, part_of_values) = a.made, a.parts
        write(dk, item, self.of_keys, a.scale)
        write(dv, item, self.of_values, Float32(1.0))
        write_part(part_of_keys, item, self.of_keys, Float32(1.0))
        write_part(part_of_values, item, self.of_values, Float32(1.0))

    @cute.jit
    def of_head(self, head: Int32, columns: cute.Tensor):
        """The queries of a head."""
        a, item = self.arguments, self.item
        queries = Table(self.config, a.q, item.batch, head, item.lane)
        douts = Table(self.config, a.dout, item.batch, head, item.lane)
        terms = [a.terms[kind, item.batch, head, None].iterator.toint() for kind in range(2)]
        item.listed(Int32(0), columns)
        rows, gradients = queries.of_step(), douts.of_step()
        for step in cutlass.range(item.steps(), unroll=1):
            queries.fetch_step(columns, rows)
            douts.fetch_step(columns, gradients)
            self.add(step, terms, columns, rows, gradients)

    def add(self, step: Any, terms: Any, columns: Any, rows: Any, gradients: Any) -> None:
        """A step's queries; those of the next are loaded here. `terms`: where lse and delta of the head begin."""
        c, item = self.config, self.item
        left = item.count - step * c.at_once
        there = [at < left for at in range(c.at_once)]
        if c.lengths:
            there = [here & ~self.past for here in there]
        of_rows = [[word(Float32, start, columns[at]) for at in range(c.at_once)] for start in terms]
        item.listed(step + 1, columns)
        for at, (lse, delta) in enumerate(zip(*of_rows, strict=True)):
            if c.lengths:  # all keys of such a query are past the length
                blank(lse != Float32.inf, rows[None, None, at])
                blank(lse != Float32.inf, gradients[None, None, at])
            score, slope = self.score(dot(c, self.key, rows[None, None, at]))
            weight = select(there[at], cute.math.exp2(score - lse, fastmath=True), Float32(0.0))
            share = weight * (dot(c, self.value, gradients[None, None, at]) - delta)
            share = select(there[at], share, Float32(0.0))
            add(c, self.of_values, weight, gradients[None, None, at])
            add(c, self.of_keys, share * slope, rows[None, None, at])
