"""Rows whose list was split: parts of the forward combined by log-sum-exp, parts of a gradient added, in slot order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from gossamer.kernels.launch import Builder
from gossamer.kernels.relaunch import padded
from gossamer.kernels.scores import FLOOR
from gossamer.kernels.triton.arguments import arrays, listed, step
from gossamer.kernels.triton.config import GRADIENTS, ROWS_OF_A_PROGRAM, Direction
from gossamer.kernels.triton.row_access import (
    COUNT,
    FIRST,
    LEAD,
    MERGE,
    TILE,
    batch_and_head,
    copy_index,
    load_rows,
    store_row_results,
    store_rows,
)


@triton.jit
def decode_parts(
    merges, n_merges, heads, lead_heads, SUB: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr
):  # fmt: skip
    """What this program combines: (b, h, tile row, part of the tile row, first slot, number of slots)."""
    pid = tl.program_id(0)
    sub = pid % SUB
    pid = pid // SUB
    merge = merges + (pid % n_merges) * MERGE
    copy = pid // n_merges
    lead = tl.load(merge + LEAD)
    tile = tl.load(merge + TILE)
    first = tl.load(merge + FIRST)
    count = tl.load(merge + COUNT)
    b, h = batch_and_head(lead, copy, heads, lead_heads, B_FROM_GRID, H_FROM_GRID)
    return b, h, tile, sub, first, count


@triton.jit(do_not_specialize=["n_merges", "n_slots", "Q"])
def combine_parts_kernel(
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    part_acc,  # (copies, slots, TILE_ROWS, E)
    part_ml,  # (copies, slots, 2, TILE_ROWS)
    merges,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    n_merges, n_slots, H, Q, lead_heads,
    E: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, TILE_ROWS: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr,
):  # fmt: skip
    """out and lse of rows whose list was split, from their parts."""
    i_b, i_h, tile, sub, first, count = decode_parts(
        merges, n_merges, H, lead_heads, TILE_ROWS // R, B_FROM_GRID, H_FROM_GRID
    )
    row_start = tile * TILE_ROWS + sub * R
    if row_start >= Q:
        return
    o_r = sub * R + tl.arange(0, R)
    base = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + first
    b_acc = tl.zeros([R, BLOCK_E], tl.float32)
    b_l = tl.zeros([R], tl.float32)
    b_m = tl.full([R], FLOOR, tl.float32)
    for i_part in range(count):
        slot = base + i_part
        o_ml = part_ml + slot * (2 * TILE_ROWS) + o_r
        b_part = tl.load(o_ml)
        b_new = tl.maximum(b_m, b_part)
        b_shrink = tl.exp2(b_m - b_new)
        b_weight = tl.exp2(b_part - b_new)
        b_l = b_l * b_shrink + tl.load(o_ml + TILE_ROWS) * b_weight
        b_block = load_rows(part_acc + slot * (TILE_ROWS * E), sub * R, TILE_ROWS, E, R, E, BLOCK_E, True)
        b_acc = b_acc * b_shrink[:, None] + b_block * b_weight[:, None]
        b_m = b_new
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    store_row_results(
        out, lse, b_acc, b_l, b_m, b64, h64, Q, row_start, stride_ob, stride_oh, stride_on,
        stride_lb, stride_lh, stride_ln, R, E, BLOCK_E,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_merges", "n_slots", "rows"])
def sum_parts_kernel(
    result,  # (B, heads, rows, SIZE)
    part,  # (copies, slots, TILE_ROWS, SIZE)
    merges,
    stride_rb, stride_rh, stride_rn,
    n_merges, n_slots, heads, rows, lead_heads,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, R: tl.constexpr, TILE_ROWS: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr,
):  # fmt: skip
    """A gradient of rows whose list was split, from their parts."""
    i_b, i_h, tile, sub, first, count = decode_parts(
        merges, n_merges, heads, lead_heads, TILE_ROWS // R, B_FROM_GRID, H_FROM_GRID
    )
    row_start = tile * TILE_ROWS + sub * R
    if row_start >= rows:
        return
    base = copy_index(i_b, i_h, heads, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + first
    b_sum = tl.zeros([R, BLOCK_SIZE], tl.float32)
    for i_part in range(count):
        part_rows = part + (base + i_part) * (TILE_ROWS * SIZE)
        b_sum += load_rows(part_rows, sub * R, TILE_ROWS, SIZE, R, SIZE, BLOCK_SIZE, True)
    result += i_b.to(tl.int64) * stride_rb + i_h.to(tl.int64) * stride_rh
    store_rows(result, b_sum, row_start, rows, stride_rn, R, SIZE, BLOCK_SIZE)


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
        self, b: Builder, direction: Direction, function: Any, programs: int, values: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Add a kernel over all copies of the walk, and what combines the parts that it leaves.

        Args:
            programs: of one copy.
            values: arguments of the kernel, its results among them, but those that follow from the split.
        """
        D, E, unread = values["D"], values["E"], values["unread"]
        sizes: dict[str, int] = {
            "forward": {"part_acc": E, "part_ml": 2}, "dq": {"part": D}, "dkdv": {"part_dk": D, "part_dv": E},
        }[direction]  # fmt: skip
        shape = self.copies, self.slots, self.tile_rows
        parts = {name: b.array(name, "float32", (*shape, n)) if self.slots else unread for name, n in sizes.items()}
        more: dict[str, Any] = {
            "n_slots": self.slots, "HAS_SLOTS": self.slots > 0, "lead_heads": self.lead_heads,
            "TILE_ROWS": self.tile_rows, "B_FROM_GRID": self.b_from_grid, "H_FROM_GRID": self.h_from_grid,
        }  # fmt: skip
        step(b, function, (programs * self.copies,), {**values, **parts, **more}, options)
        if not self.slots:
            return
        rows, count = min(ROWS_OF_A_PROGRAM, self.tile_rows), len(self.merges)
        more |= {"n_merges": count, "R": rows} | listed(b, direction, {"merges": self.merges})
        grid = (self.tile_rows // rows * count * self.copies,)
        own = {"num_warps": 1 if rows == 1 else 4}
        if direction == "forward":
            step(b, combine_parts_kernel, grid, {**values, **parts, **more}, own)
            return
        for part, result in zip(parts.values(), [values[name] for name in GRADIENTS[direction]], strict=True):
            _, heads, length, size = b[result].shape
            sums = {"part": part, "heads": heads, "rows": length, "SIZE": size, "BLOCK_SIZE": padded(size)}
            step(b, sum_parts_kernel, grid, arrays(b, result=result) | sums | more, own)
