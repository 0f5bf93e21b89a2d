"""Rows whose list was cut: parts of the forward joined by log-sum-exp, parts of a gradient added, in slot order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.relaunch import Known, launch, padded, strides
from gossamer.kernels.scores import FLOOR
from gossamer.kernels.triton.rows import batch_and_head, copy_index, load_rows, store_row_results, store_rows

ROWS = 32  # of a program, where a tile has as many


@triton.jit
def decode_merge(
    merges, n_merges, heads, lead_heads, SUB: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr
):  # fmt: skip
    """What this program merges: (b, h, tile row, part of the tile row, first slot, number of slots)."""
    pid = tl.program_id(0)
    sub = pid % SUB
    pid = pid // SUB
    merge = merges + (pid % n_merges) * 4
    copy = pid // n_merges
    lead = tl.load(merge)
    tile = tl.load(merge + 1)
    first = tl.load(merge + 2)
    count = tl.load(merge + 3)
    b, h = batch_and_head(lead, copy, heads, lead_heads, B_FROM_GRID, H_FROM_GRID)
    return b, h, tile, sub, first, count


@triton.jit(do_not_specialize=["n_merges", "n_slots", "Q"])
def merge_kernel(
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
    """out and lse of rows whose list was cut, from their parts."""
    i_b, i_h, tile, sub, first, count = decode_merge(
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
def sum_kernel(
    result,  # (B, heads, rows, SIZE)
    part,  # (copies, slots, TILE_ROWS, SIZE)
    merges,
    stride_b, stride_h, stride_n,
    n_merges, n_slots, heads, rows, lead_heads,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, R: tl.constexpr, TILE_ROWS: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr,
):  # fmt: skip
    """A gradient of rows whose list was cut, from their parts."""
    i_b, i_h, tile, sub, first, count = decode_merge(
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
    result += i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h
    store_rows(result, b_sum, row_start, rows, stride_n, R, SIZE, BLOCK_SIZE)


@dataclass(frozen=True)
class CutRows:
    """The rows of a walk whose lists were cut: where their parts are, and what joins them."""

    merges: Tensor  # (m, 4) int32: see `layouts.schedule.WorkItems`
    slots: int  # parts of one copy; 0 where no row is cut
    copies: int
    tile_rows: int
    lead_heads: int
    b_from_grid: bool
    h_from_grid: bool
    known: Known = field(default_factory=dict)  # launches of before

    def shape(self, size: int) -> tuple[int, int, int, int]:
        """Of the parts of rows of `size` numbers."""
        return self.copies, self.slots, self.tile_rows, size

    def part(self, size: int, like: Tensor) -> Tensor:
        """Memory for parts of rows, float32; `like`, which is never read, where no row is cut."""
        return torch.empty(self.shape(size), dtype=torch.float32, device=like.device) if self.slots else like

    def join(self, out: Tensor, lse: Tensor, parts: tuple[Tensor, Tensor]) -> None:
        """Write the cut rows of out (B, H, Q, E) and lse (B, H, Q), of any strides."""
        if not self.slots:
            return
        _, H, Q, E = out.shape
        launch(
            self.known, merge_kernel, self._grid, E, merged(out, lse, parts), {},
            lambda: {
                **strides("o", out), **strides("l", lse), "H": H, "Q": Q, "E": E, "BLOCK_E": padded(E), **self._fixed(),
            },
        )  # fmt: skip

    def add(self, part: Tensor, result: Tensor) -> None:
        """Write the cut rows of a gradient (B, heads, rows, size), of any strides."""
        if not self.slots:
            return
        _, heads, rows, size = result.shape
        launch(
            self.known, sum_kernel, self._grid, size, {"result": result, "part": part}, {},
            lambda: {
                **{f"stride_{axis}": result.stride(i) for i, axis in enumerate("bhn")}, "heads": heads, "rows": rows,
                "SIZE": size, "BLOCK_SIZE": padded(size), **self._fixed(),
            },
        )  # fmt: skip

    @property
    def _rows(self) -> int:
        """Of a program."""
        return min(ROWS, self.tile_rows)

    @property
    def _grid(self) -> tuple[int]:
        return (self.tile_rows // self._rows * self.merges.shape[0] * self.copies,)

    def _fixed(self) -> dict[str, Any]:
        """What both kernels are given for these rows."""
        return {
            "merges": self.merges, "n_merges": self.merges.shape[0], "n_slots": self.slots,
            "lead_heads": self.lead_heads, "R": self._rows, "TILE_ROWS": self.tile_rows,
            "B_FROM_GRID": self.b_from_grid, "H_FROM_GRID": self.h_from_grid, "num_warps": 1 if self._rows == 1 else 4,
        }  # fmt: skip


def merged(out: Any, lse: Any, parts: Any) -> dict[str, Any]:
    """The tensors of a launch that joins the parts of rows, or their kinds."""
    return {"out": out, "lse": lse, "part_acc": parts[0], "part_ml": parts[1]}
