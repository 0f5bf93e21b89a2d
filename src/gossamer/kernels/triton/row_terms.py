"""What a backward needs of each query row: lse and delta, made once and padded to whole tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.launch import Builder
from gossamer.kernels.relaunch import Strides, padded
from gossamer.kernels.softmax import delta_of_rows, empty_rows
from gossamer.kernels.triton.arguments import arrays, operand, step
from gossamer.kernels.triton.config import ROWS_OF_A_PROGRAM
from gossamer.kernels.triton.row_access import load_rows
from gossamer.plan.problem import Problem


@triton.jit(do_not_specialize=["Q"])
def row_terms_kernel(
    dout,  # (B, H, Q, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    dlse,  # (B, H, Q)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    at_dout: Strides, at_out: Strides, at_lse: Strides, at_dlse: Strides,
    B, H, Q, padded_Q,
    E: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr,
    DLSE: tl.constexpr,
):  # fmt: skip
    """lse in base 2, and delta = rowsum(dout * out) - dlse.

    Rows past the last count as rows that keep nothing.
    """
    tiles = padded_Q // R
    i_bh = tl.program_id(0) // tiles
    row_start = tl.program_id(0) % tiles * R
    b64 = (i_bh // H).to(tl.int64)
    h64 = (i_bh % H).to(tl.int64)
    b_dout = load_rows(dout + b64 * at_dout.b + h64 * at_dout.h, row_start, Q, at_dout.n, R, E, BLOCK_E, True)
    b_out = load_rows(out + b64 * at_out.b + h64 * at_out.h, row_start, Q, at_out.n, R, E, BLOCK_E, True)
    b_delta = delta_of_rows(b_dout, b_out)
    o_r = row_start + tl.arange(0, R)
    o64 = o_r.to(tl.int64)
    if DLSE:
        dlse += b64 * at_dlse.b + h64 * at_dlse.h
        b_delta -= tl.load(dlse + o64 * at_dlse.n, mask=o_r < Q, other=0.0)
    lse += b64 * at_lse.b + h64 * at_lse.h
    b_lse = tl.load(lse + o64 * at_lse.n, mask=o_r < Q, other=float("-inf"))
    b_lse, b_delta = empty_rows(b_lse, b_delta)
    row_terms += i_bh.to(tl.int64) * padded_Q + o_r
    tl.store(row_terms, b_lse)
    tl.store(row_terms + padded_Q.to(tl.int64) * B * H, b_delta)


def row_terms(b: Builder, p: Problem, dout: str, padded_Q: int) -> str:
    """Add (2, B, H, padded_Q) float32: lse in base 2, and delta = rowsum(dout * out) - dlse."""
    rows = b.array("row_terms", "float32", (2, p.B, p.H, padded_Q))
    values = arrays(b, dout=dout, out=operand(b, "out"), lse="lse", dlse="dlse" if "dlse" in b else "lse") | {
        "row_terms": rows, "B": p.B, "H": p.H, "Q": p.Q, "padded_Q": padded_Q, "E": p.E, "BLOCK_E": padded(p.E),
        "R": ROWS_OF_A_PROGRAM, "DLSE": "dlse" in b,
    }  # fmt: skip
    step(b, row_terms_kernel, (p.B * p.H * padded_Q // ROWS_OF_A_PROGRAM,), values, {"num_warps": 4})
    return rows
