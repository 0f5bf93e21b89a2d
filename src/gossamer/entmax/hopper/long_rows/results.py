"""The results of an item: out, and the statistics of its rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gossamer.cute.instructions import ROWS, of_row, pack

NEAR = 0.1  # a row whose |log(sum of weights)| stays over this has not converged


@cute.jit
def write_rows(rows, head, own, count):
    """Write the rows of a warpgroup, from number `own` on of the `count` of its head."""
    a, sums, dtype = rows.arguments, rows.sums, rows.block.s_q.element_type
    columns, quad = cute.size(a.out, mode=[1]), rows.thread.lane % 4
    for r in cutlass.range_constexpr(ROWS):
        F, bad = sums.F[r], rows.bad[r]
        factor = (Float32(1.0) if F == 0.0 else 1.0 / F) + bad
        number = Int64(head) * cute.size(a.q, mode=[2]) + rows.row[r]
        if own + rows.own_row + 8 * r < count:
            row_places = of_row(rows.o, r)
            for n in cutlass.range_constexpr(len(row_places) // 2):
                i = const_expr(row_places[2 * n])
                if 4 * n + quad < columns:
                    a.out[number, 4 * n + quad] = pack(rows.o[i] * factor, rows.o[i + 1] * factor, dtype)
            if const_expr(rows.config.requested) and quad == 0:
                log = cute.math.log(F)
                lam = sums.lam[r] + (log * F / sums.U[r] if cute.arch.fmax(log, -log) < NEAR else Float32.nan)
                lam = Float32.inf if F == 0.0 and bad == 0.0 else lam + bad
                a.lam[number] = lam
                a.support[number] = Int32(sums.size[r])
                a.certified[number] = cutlass.Uint8(1)
