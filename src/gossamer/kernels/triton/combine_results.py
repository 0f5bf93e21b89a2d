"""Results of two attentions over the same rows as one, in place: read and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.launch import Builder
from gossamer.kernels.relaunch import Strides, padded
from gossamer.kernels.scores import LN2, LOG2E
from gossamer.kernels.triton.arguments import arrays, operand, step
from gossamer.kernels.triton.config import ROWS_OF_A_PROGRAM
from gossamer.kernels.triton.row_access import load_rows, store_rows


@triton.jit(do_not_specialize=["heads", "rows"])
def combine_results_kernel(
    out,  # (B, heads, rows, E)
    lse,  # (B, heads, rows)
    part_out,  # (B, heads, rows, E)
    part_lse,  # (B, heads, rows)
    at_out: Strides, at_lse: Strides, at_part_out: Strides, at_part_lse: Strides,
    heads, rows,
    E: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """out and lse of the softmax over the keys of both."""
    tiles = tl.cdiv(rows, R)
    i_bh = tl.program_id(0) // tiles
    row_start = tl.program_id(0) % tiles * R
    b64 = (i_bh // heads).to(tl.int64)
    h64 = (i_bh % heads).to(tl.int64)
    o_r = row_start + tl.arange(0, R)
    o64 = o_r.to(tl.int64)
    lse += b64 * at_lse.b + h64 * at_lse.h + o64 * at_lse.n
    part_lse += b64 * at_part_lse.b + h64 * at_part_lse.h + o64 * at_part_lse.n
    b_lse = tl.load(lse, mask=o_r < rows, other=0.0)
    b_part = tl.load(part_lse, mask=o_r < rows, other=0.0)
    b_most = tl.maximum(b_lse, b_part)
    # A row that neither keeps anything in is 0 and -inf in both.
    b_most = tl.where(b_most == float("-inf"), 0.0, b_most)
    b_old = tl.exp2((b_lse - b_most) * LOG2E)
    b_new = tl.exp2((b_part - b_most) * LOG2E)
    b_sum = b_old + b_new
    b_one = tl.where(b_sum == 0.0, 1.0, b_sum)
    out += b64 * at_out.b + h64 * at_out.h
    part_out += b64 * at_part_out.b + h64 * at_part_out.h
    b_out = load_rows(out, row_start, rows, at_out.n, R, E, BLOCK_E, True).to(tl.float32)
    b_more = load_rows(part_out, row_start, rows, at_part_out.n, R, E, BLOCK_E, True).to(tl.float32)
    b_out = b_out * (b_old / b_one)[:, None] + b_more * (b_new / b_one)[:, None]
    tl.debug_barrier()  # every warp reads the lse of all rows: none may write them before the last has read
    store_rows(out, b_out, row_start, rows, at_out.n, R, E, BLOCK_E)
    tl.store(lse, tl.where(b_sum == 0.0, float("-inf"), b_most + tl.log2(b_one) * LN2), mask=o_r < rows)


def combine_results(b: Builder, out: str, lse: str, part_out: str, part_lse: str) -> None:
    """Merge part_out (B, heads, N, E) and part_lse (B, heads, N) into out and lse, in place; of any strides."""
    B, heads, rows, E = b[out].shape
    values = arrays(b, out=out, lse=lse, part_out=operand(b, part_out), part_lse=part_lse)
    values |= {"heads": heads, "rows": rows, "E": E, "BLOCK_E": padded(E), "R": ROWS_OF_A_PROGRAM}
    step(b, combine_results_kernel, (B * heads * triton.cdiv(rows, ROWS_OF_A_PROGRAM),), values, {"num_warps": 4})
