"""The kernels of single rows in numpy, for `stand_in`: from their definition, a row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gossamer.layouts.items import BEGIN, END, LEAD, SLOT, TILE

LOG2E = 1 / np.log(2)
Array = Any


class Item(NamedTuple):
    """An item of a copy."""

    batch: int
    head: int
    row: int
    columns: Array
    slot: int  # of all copies, -1 where the row is not cut


def items_of(items: Array, indices: Array, numbers: tuple[int, ...]) -> Iterator[Item]:
    """Every item of every copy."""
    lead_heads, copy_heads, slots, copies = numbers
    for copy in range(copies):
        for words in items.tolist():
            batch = words[LEAD] // lead_heads + copy // copy_heads
            head = words[LEAD] % lead_heads + copy % copy_heads
            slot = words[SLOT] + copy * slots if words[SLOT] >= 0 else -1
            yield Item(batch, head, words[TILE], indices[words[BEGIN] : words[END]], slot)


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def rows(key: Any, *a: Any) -> None:
    (c,) = key
    if c.direction == "forward":
        forward(c, *a)
    else:
        gradients(c, *a)


def gradients(c: Any, *a: Any) -> None:
    q, k, v, dout, terms, *rest = a
    made, rest = rest[: 2 if c.direction == "columns" else 1], rest[2 if c.direction == "columns" else 1 :]
    items, indices, *rest = rest
    parts, (lengths, before, exponent, scale, *numbers) = rest[: len(made)], rest[len(made) :]
    end = lengths if c.lengths else [k.shape[2]] * k.shape[0]
    for item in items_of(items, indices, tuple(numbers)):
        b, h = item.batch, item.head
        if c.direction == "query":
            g = h * k.shape[1] // q.shape[1]
            j = item.columns[item.columns < end[b]]
            p, ds = pairs(c, before, exponent, wide(q[b, h, item.row]), wide(k[b, g, j]), wide(v[b, g, j]),
                          wide(dout[b, h, item.row]), *(x[b, h, item.row] for x in terms))  # fmt: skip
            sums = [ds @ wide(k[b, g, j])]
        else:
            heads = made[0].shape[1]
            g, members = h * k.shape[1] // heads, q.shape[1] // heads
            sums = [np.zeros(k.shape[3]), np.zeros(v.shape[3])]
            i = item.columns if item.row < end[b] else item.columns[:0]
            for of in range(h * members, (h + 1) * members):
                p, ds = pairs(c, before, exponent, wide(q[b, of, i]), wide(k[b, g, item.row]), wide(v[b, g, item.row]),
                              wide(dout[b, of, i]), *(x[b, of, i] for x in terms))  # fmt: skip
                sums = [sums[0] + ds @ wide(q[b, of, i]), sums[1] + p @ wide(dout[b, of, i])]
        for x, part, total, factor in zip(made, parts, sums, (scale, 1.0), strict=False):
            if item.slot < 0:
                x[b, h, item.row] = total * factor
            else:
                part[item.slot] = 0.0
                part[item.slot, 0, : len(total)] = total


def pairs(c: Any, before: float, exponent: float, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array
          ) -> tuple[Array, Array]:  # fmt: skip
    """P and dS of one query and some keys, or of one key and some queries."""
    score, slope = scores(c, before, exponent, (q * k).sum(-1))
    p = np.exp2(score - lse)
    return p, p * ((dout * v).sum(-1) - delta) * slope


def scores(c: Any, before: float, exponent: float, product: Array) -> tuple[Array, Array]:
    """In base 2, and their derivatives."""
    x = product * before
    if c.score != "softcap":
        return x * exponent, np.ones_like(x)
    t = np.tanh(x)
    return t * exponent, 1 - t * t


def forward(c: Any, q: Array, k: Array, v: Array, out: Array, lse: Array, items: Array, indices: Array, sinks: Array,
            part_out: Array, part_lse: Array, lengths: Array, before: float, exponent: float, has_sinks: int,
            *numbers: int) -> None:  # fmt: skip
    for item in items_of(items, indices, numbers):
        b, h = item.batch, item.head
        g = h * k.shape[1] // q.shape[1]
        j = item.columns[item.columns < lengths[b]] if c.lengths else item.columns
        score, _ = scores(c, before, exponent, wide(k[b, g, j]) @ wide(q[b, h, item.row]))
        score, values = score / LOG2E, wide(v[b, g, j])
        if has_sinks and item.slot < 0:
            score, values = np.append(score, sinks[h]), np.concatenate([values, np.zeros((1, v.shape[3]))])
        top = score.max(initial=-np.inf)
        weights = np.exp(score - top) if len(score) else score
        total = weights.sum()
        o = weights @ values / total if total else np.zeros(v.shape[3])
        of_row = top + np.log(total) if total else -np.inf
        if item.slot < 0:
            out[b, h, item.row], lse[b, h, item.row] = o, of_row
        else:
            part_out[item.slot] = 0.0  # its memory may hold what no conversion takes
            part_out[item.slot, 0, : len(o)], part_lse[item.slot, 0] = o, of_row
