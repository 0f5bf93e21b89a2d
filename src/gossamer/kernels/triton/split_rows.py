"""Rows whose list was split: parts of the forward combined by log-sum-exp, parts of a gradient added, in slot order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from gossamer.kernels.launch import Builder
from gossamer.kernels.relaunch import Strides, padded
from gossamer.kernels.scores import FLOOR
from gossamer.kernels.triton.arguments import arrays, listed, step
from gossamer.kernels.triton.config import GRADIENTS, ROWS_OF_A_PROGRAM, Direction
from gossamer.kernels.triton.groups import ForwardResults, ResultStrides
from gossamer.kernels.triton.row_access import (
    COUNT,
    FIRST,
    LEAD,
    MERGE,
    TILE,
    batch_and_head,
    load_rows,
    slot_of,
    store_row_results,
    store_rows,
)


class PartForm(NamedTuple):
    """What the kernels of split rows are compiled for."""

    SIZE: int
    BLOCK_SIZE: int
    R: int
    TILE_ROWS: int
    B_FROM_GRID: bool
    H_FROM_GRID: bool


@triton.jit
def decode_parts(merges, n_merges, heads, lead_heads, FORM: tl.constexpr):
    """What this program combines: (b, h, tile row, part of the tile row, first slot, number of slots)."""
    SUB: tl.constexpr = FORM.TILE_ROWS // FORM.R
    pid = tl.program_id(0)
    sub = pid % SUB
    pid = pid // SUB
    merge = merges + (pid % n_merges) * MERGE
    copy = pid // n_merges
    lead = tl.load(merge + LEAD)
    tile = tl.load(merge + TILE)
    first = tl.load(merge + FIRST)
    count = tl.load(merge + COUNT)
    b, h = batch_and_head(lead, copy, heads, lead_heads, FORM.B_FROM_GRID, FORM.H_FROM_GRID)
    return b, h, tile, sub, first, count


@triton.jit(do_not_specialize=["n_merges", "n_slots", "Q"])
def combine_parts_kernel(
    results: ForwardResults, merges, strides: ResultStrides, n_merges, n_slots, Q, H, lead_heads, FORM: tl.constexpr
):
    """out and lse of rows whose list was split, from their parts."""
    R: tl.constexpr = FORM.R
    E: tl.constexpr = FORM.SIZE
    TILE_ROWS: tl.constexpr = FORM.TILE_ROWS
    i_b, i_h, tile, sub, first, count = decode_parts(merges, n_merges, H, lead_heads, FORM)
    row_start = tile * TILE_ROWS + sub * R
    if row_start >= Q:
        return
    o_r = sub * R + tl.arange(0, R)
    base = slot_of(i_b, i_h, H, n_slots, first, FORM)
    b_acc = tl.zeros([R, FORM.BLOCK_SIZE], tl.float32)
    b_l = tl.zeros([R], tl.float32)
    b_m = tl.full([R], FLOOR, tl.float32)
    for i_part in range(count):
        slot = base + i_part
        o_ml = results.part_ml + slot * (2 * TILE_ROWS) + o_r
        b_part = tl.load(o_ml)
        b_new = tl.maximum(b_m, b_part)
        b_shrink = tl.exp2(b_m - b_new)
        b_weight = tl.exp2(b_part - b_new)
        b_l = b_l * b_shrink + tl.load(o_ml + TILE_ROWS) * b_weight
        part_acc = results.part_acc + slot * (TILE_ROWS * E)
        b_block = load_rows(part_acc, sub * R, TILE_ROWS, E, R, E, FORM.BLOCK_SIZE, True)
        b_acc = b_acc * b_shrink[:, None] + b_block * b_weight[:, None]
        b_m = b_new
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    store_row_results(results, strides, b_acc, b_l, b_m, b64, h64, Q, row_start, R, E, FORM.BLOCK_SIZE)


@triton.jit(do_not_specialize=["n_merges", "n_slots", "rows"])
def sum_parts_kernel(
    result,  # (B, heads, rows, SIZE)
    part,  # (copies, slots, TILE_ROWS, SIZE)
    merges,
    at_result: Strides,
    n_merges, n_slots, rows, heads, lead_heads,
    FORM: tl.constexpr,
):  # fmt: skip
    """A gradient of rows whose list was split, from their parts."""
    R: tl.constexpr = FORM.R
    SIZE: tl.constexpr = FORM.SIZE
    TILE_ROWS: tl.constexpr = FORM.TILE_ROWS
    i_b, i_h, tile, sub, first, count = decode_parts(merges, n_merges, heads, lead_heads, FORM)
    row_start = tile * TILE_ROWS + sub * R
    if row_start >= rows:
        return
    base = slot_of(i_b, i_h, heads, n_slots, first, FORM)
    b_sum = tl.zeros([R, FORM.BLOCK_SIZE], tl.float32)
    for i_part in range(count):
        part_rows = part + (base + i_part) * (TILE_ROWS * SIZE)
        b_sum += load_rows(part_rows, sub * R, TILE_ROWS, SIZE, R, SIZE, FORM.BLOCK_SIZE, True)
    result += i_b.to(tl.int64) * at_result.b + i_h.to(tl.int64) * at_result.h
    store_rows(result, b_sum, row_start, rows, at_result.n, R, SIZE, FORM.BLOCK_SIZE)


@dataclass(frozen=True)
class SplitRows:
    """The rows of a walk whose lists were split: where their parts are, and what combines them."""

    merges: Any  # (m, MERGE) int32: see `layouts.items`
    slots: int  # parts of one copy; 0 where no row is split
    copies: int
    tile_rows: int
    lead_heads: int
    b_from_grid: bool
    h_from_grid: bool

    def step(
        self, b: Builder, direction: Direction, function: Any, grid: tuple[int, ...], values: Mapping[str, Any],
        form: Any, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Add a kernel over all copies of the walk, and what combines the parts that it leaves.

        Args:
            grid: of the kernel.
            values: arguments of the kernel, its results among them, but those that follow from the split.
            form: the NamedTuple of what the kernel is compiled for.
        """
        unread = values["unread"]
        sizes: dict[str, int] = {
            "forward": {"part_acc": values["E"], "part_ml": 2}, "dq": {"part": values["D"]},
            "dkdv": {"part_dk": values["D"], "part_dv": values["E"]},
        }[direction]  # fmt: skip
        shape = self.copies, self.slots, self.tile_rows
        parts = {name: b.array(name, "float32", (*shape, n)) if self.slots else unread for name, n in sizes.items()}
        given: dict[str, Any] = {
            **values, **parts, "n_slots": self.slots, "HAS_SLOTS": self.slots > 0, "lead_heads": self.lead_heads,
            "TILE_ROWS": self.tile_rows, "B_FROM_GRID": self.b_from_grid, "H_FROM_GRID": self.h_from_grid,
        }  # fmt: skip
        step(b, function, grid, given, options, form)
        if not self.slots:
            return
        rows, count = min(ROWS_OF_A_PROGRAM, self.tile_rows), len(self.merges)
        given |= {"n_merges": count, "R": rows} | listed(b, direction, {"merges": self.merges})
        grid = (self.tile_rows // rows * count * self.copies,)
        own = {"num_warps": 1 if rows == 1 else 4}

        def combine(kernel: Any, size: int, **more: Any) -> None:
            whole = given | more | {"SIZE": size, "BLOCK_SIZE": padded(size)}
            step(b, kernel, grid, whole, own, PartForm)

        if direction == "forward":
            combine(combine_parts_kernel, values["E"])
            return
        for part, result in zip(parts.values(), [values[name] for name in GRADIENTS[direction]], strict=True):
            _, heads, length, size = b[result].shape
            combine(sum_parts_kernel, size, part=part, heads=heads, rows=length, **arrays(b, result=result))
