"""Heads wider than 256, by slices of D and E: from a problem and a layout to kernel arguments.

The scores of the listed tiles of some tile rows are kept between kernels, at most about SCRATCH_BYTES of them, so the
memory does not grow with the sequence. Gradients of keys are added up over the passes in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gossamer.kernels.arrays import Array, placed, words
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared, compact
from gossamer.kernels.triton.arguments import arrays, listed, operand, row_results, step, terms, vector
from gossamer.kernels.triton.wide.kernels import gradient_kernel, output_kernel, products_kernel
from gossamer.kernels.triton.wide.parameters import GradientForm, OutputForm, ProductForm
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.kept import keeps_all
from gossamer.layouts.walk import Walk
from gossamer.memo import Memos
from gossamer.plan.problem import Problem

KERNELS = (products_kernel, output_kernel, gradient_kernel)
OPTIONS = {"num_warps": 8, "num_stages": 2}
SCRATCH_BYTES = 2**28
BLOCK = 256  # of D or E in one program of a result


def product_step(dtype: str, sm: int) -> int:
    """How much of D or E one product of scores takes; 64 float32 numbers spill kilobytes before sm_90."""
    return 32 if dtype == "float32" and sm < 90 else 64


class Pass(NamedTuple):
    """The tile rows [first, first + rows)."""

    first: int
    rows: int
    most: int  # tiles of a lead
    arrays: dict[str, Array]  # by the kernels' names


class Order(NamedTuple):
    """How a gradient reads the tiles of a pass: which of `Pass.arrays` it takes."""

    order: str
    order_begins: str
    starts: str


ROW_ORDER = Order("in_order", "zeros", "row_starts")
COLUMN_ORDER = Order("by_column", "column_begins", "column_starts")


class Tiles(NamedTuple):
    """Every listed tile of a layout, (n, 4) int32: tile row, tile column, kind, entry of the pool; and the passes."""

    table: Array
    passes: tuple[Pass, ...]
    unkept: bool  # whether the layout has queries or keys that are of no pair


_tiles: Memos[Tiles] = Memos()  # of layouts


def tiles_of(layout: BlockLayout, most: int) -> Tiles:
    """The tiles of a layout in passes of about `most` tiles for each lead; a layout made on a device is read back."""
    walk, device = (layout if layout.host is None else layout.host).rows, layout.device

    def make() -> Tiles:
        return _make_tiles(walk.on_host(), most, device, not all(keeps_all(layout)))

    return _tiles.of(layout).get_or_make(most, make)


def _make_tiles(walk: Walk, most: int, device: Any, unkept: bool) -> Tiles:
    leads, T = math.prod(walk.lead), walk.tiles
    C = -(-walk.columns // walk.block_columns)
    parts = []
    for kind, (name, tiles) in enumerate(walk.lists.items()):
        row, at = tiles.listed()
        entry = walk.pool_index[at] if name == "bits" else np.zeros(len(at), dtype=np.int64)
        parts.append((row, tiles.indices[at], np.full(len(at), kind), entry))
    row, columns, kinds, entries = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.lexsort((columns, row))
    row, columns = row[order], columns[order]
    table = np.stack((row % T, columns, kinds[order], entries[order]), axis=1)
    starts = np.searchsorted(row, np.arange(leads * T + 1))
    by_row = np.stack([starts[lead * T : (lead + 1) * T + 1] for lead in range(leads)])  # (leads, T + 1)

    def move(x: np.ndarray) -> Array:
        return placed(words(x.astype(np.int32)), device)

    passes, first = [], 0
    while first < T:
        last = first + 1
        while last < T and (by_row[:, last + 1] - by_row[:, first]).max() <= most:
            last += 1
        begins, ends = by_row[:, first], by_row[:, last]
        orders, column_starts = [], []
        for begin, end in zip(begins, ends, strict=True):
            column = columns[begin:end]
            order = np.argsort(column, kind="stable")
            orders.append(order)
            column_starts.append(np.searchsorted(column[order], np.arange(C + 1)))
        counts = ends - begins
        made = {
            "begins": begins,  # (leads,) into the table
            "counts": counts,  # (leads,)
            "row_starts": by_row[:, first : last + 1] - begins[:, None],  # (leads, rows + 1)
            "in_order": np.arange(max(1, counts.max())),
            "zeros": np.zeros(leads),
            "by_column": np.concatenate(orders),  # slots by tile column, lead after lead
            "column_begins": np.cumsum(counts) - counts,  # (leads,)
            "column_starts": np.stack(column_starts),  # (leads, tile columns + 1)
        }
        passes.append(Pass(first, last - first, int(counts.max()), {name: move(x) for name, x in made.items()}))
        first = last
    return Tiles(move(table), tuple(passes), unkept)


class _Call:
    """What every launch of a call shares."""

    def __init__(self, p: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand]) -> None:
        self.p, self.b, self.walk = p, Builder(operands), layout.rows
        walk, short = self.walk, p.dtype == "float32"
        rows, columns = walk.block_rows, walk.block_columns
        self.edges = [min(64 if short else 128, n & -n) for n in (rows, columns)]  # of a program that makes products
        self.cuts = [min(64, n) for n in self.edges]  # of one that makes results, rows and columns of tiles
        self.block = BLOCK // 2 if short else BLOCK
        self.tiles = tiles_of(layout, max(1, SCRATCH_BYTES // (p.B * p.H * rows * columns * 4)))
        Bl, Hl = walk.lead
        own = {"tiles": self.tiles.table, "lo": walk.lo, "hi": walk.hi, "pool": walk.pool}
        self.values = terms(self.b, p, scoring, unread=None) | {
            **arrays(self.b, **{name: operand(self.b, name) for name in ("q", "k", "v")}),
            **listed(self.b, "layout", {name: words(x) for name, x in own.items()}),
            "lead_b": Hl if Bl > 1 else 0, "lead_h": 1 if Hl > 1 else 0, "TILE_ROWS": rows, "TILE_COLUMNS": columns,
            "STEP": product_step(p.dtype, p.sm or 80), "BLOCK": self.block,
            "CLEAR": self.tiles.unkept or "key_lengths" in self.b,  # lengths may leave queries nothing
            "PRECISION": "tf32x3" if short else "ieee",
        }  # fmt: skip

    def scratch(self, name: str, dtype: str) -> str:
        """A place for the tiles of any pass, of all heads."""
        most = max(1, *(done.most for done in self.tiles.passes))
        return self.b.array(name, dtype, (self.p.B * self.p.H, most, self.walk.block_rows, self.walk.block_columns))

    def passes(self) -> Iterator[tuple[Pass, dict[str, Any]]]:
        """Each pass, and its arguments."""
        for at, done in enumerate(self.tiles.passes):
            own = listed(self.b, f"pass_{at}", done.arrays)
            yield done, own | {"slots": max(1, done.most), "first_row": done.first, "n_rows": done.rows}

    def products(self, done: Pass, values: Mapping[str, Any], **places: str) -> None:
        """Scores of a pass into `first`, or P into it and dS into `second`."""
        p, walk, (R, C) = self.p, self.walk, self.edges
        grid = done.most * p.B * p.H, walk.block_rows // R * (walk.block_columns // C)
        step(self.b, products_kernel, grid, {**self.values, **values, **places, "R": R, "C": C}, OPTIONS, ProductForm)

    def outputs(self, done: Pass, values: Mapping[str, Any], scores: str) -> None:
        """out and lse of a pass."""
        p, (R, C) = self.p, self.cuts
        grid = done.rows * (self.walk.block_rows // R) * p.B * p.H, -(-p.E // self.block)
        own = {**self.values, **values, "scores": scores, "R": R, "C": C}
        step(self.b, output_kernel, grid, own, OPTIONS, OutputForm)

    def gradient(
        self, values: Mapping[str, Any], weights: str, x: str, result: str, factor: float, *, keys: bool, add: bool
    ) -> None:
        """dQ of a pass, or its share of the gradients of keys or values."""
        p, walk, order, (R, C) = self.p, self.walk, COLUMN_ORDER if keys else ROW_ORDER, self.cuts
        group = p.H // p.G
        size = self.b[result].shape[-1]
        more = {
            "weights": weights, **arrays(self.b, x=x, result=result), "factor": factor, "SIZE": size, "ADD": add,
            "TRANSPOSED": keys, **{name: values[own] for name, own in order._asdict().items()},
        }  # fmt: skip
        if keys:
            count, resident, heads, R, C = -(-p.K // walk.block_columns), walk.block_columns, p.G, C, R
            more |= {"rows": p.K, "columns": p.Q, "first_row": 0, "n_rows": count, "MEMBERS": group, "X_GROUP": 1}
        else:
            count, resident, heads = values["n_rows"], walk.block_rows, p.H
            more |= {"rows": p.Q, "columns": p.K, "MEMBERS": 1, "X_GROUP": group}
        grid = count * (resident // R) * p.B * heads, -(-size // self.block)
        step(self.b, gradient_kernel, grid, {**self.values, **values, **more, "R": R, "C": C}, OPTIONS, GradientForm)


def forward(p: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand]) -> Prepared:
    """out and lse."""
    call = _Call(p, layout, scoring, operands)
    b, scores = call.b, call.scratch("scores", "float32")
    call.values |= row_results(b, p) | {"sinks": vector(b, "sink_logits", None)}
    unread = {"dout": "v", "delta": "lse", "second": scores, "BACKWARD": False}
    for done, values in call.passes():
        call.products(done, values | unread, first=scores)
        call.outputs(done, values, scores)
    return b.done("out", "lse")


def backward(p: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand]) -> Prepared:
    """dq, dk and dv, and dsink_logits where there are sinks."""
    call = _Call(p, layout, scoring, operands)
    b, values = call.b, call.values
    rows = Operand("float32", (p.B, p.H, p.Q), compact((p.B, p.H, p.Q)))
    made: dict[str, Operand | None] = {"delta": rows, "full_lse": rows}
    dlse = "dlse" if "dlse" in b else None
    b.function(Kernel(EDGE, "rows_of_results"), "dout", dlse, "out", "lse", returns=made)
    several = len(call.tiles.passes) > 1
    dq = b.result("dq", p.dtype, b["q"].shape)
    dk, dv = (  # over several passes the sums stay in float32
        b.result(f"d{x}", p.dtype, b[x].shape, in_place=not several, made="float32" if several else None)
        for x in ("k", "v")
    )
    weights, shares = call.scratch("weights", p.dtype), call.scratch("shares", p.dtype)
    values |= {"dout": b.contiguous("dout"), "delta": "delta", "lse": "full_lse", "BACKWARD": True}
    for done, own in call.passes():
        add, scale = done.first > 0, float(scoring.scale)
        call.products(done, own, first=weights, second=shares)
        call.gradient(own, shares, values["k"], dq, scale, keys=False, add=False)
        call.gradient(own, shares, values["q"], dk, scale, keys=True, add=add)
        call.gradient(own, weights, values["dout"], dv, 1.0, keys=True, add=add)
    if "sink_logits" not in operands:
        return b.done("dq", "dk", "dv")
    b.function(Kernel(EDGE, "sink_gradient"), "delta", "full_lse", "sink_logits", returns={"dsink_logits": None})
    return b.done("dq", "dk", "dv", "dsink_logits")
