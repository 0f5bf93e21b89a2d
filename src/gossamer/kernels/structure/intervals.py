"""Tiles of one interval of keys for each query, of both directions, in two launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.structure.interval_kernels import (
    count_tiles_kernel,
    place_tiles_kernel,
    reach_kernel,
    turn_kernel,
)

SUMS = 256  # counts that are added at a time
COLUMNS = 256  # intervals that are turned by a program


def power_of_two(n: int) -> int:
    """The least that holds n."""
    return 1 << (n - 1).bit_length()


def reach_bounds(
    like: Tensor, offset: Tensor | None, first: int, most: int, starts: Tensor | None, lengths: Tensor | None,
    outer_lo: Tensor | None, outer_hi: Tensor | None, B: int, Q: int, K: int, left: int | None, right: int | None,
    block: int | None, below: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The interval of keys of each row, lo and hi (B, 1, Q) int32.

    Args:
        like: a tensor on the device.
        offset, starts, lengths: (B or 1,) integers; positions are first + offset, which counts as `most` beyond it.
        outer_lo, outer_hi: (B or 1, 1, Q) int32, within which the intervals are.
        left, right, block, below: of the reach; None where it has no such limit.
    """
    lo, hi = (torch.empty((B, 1, Q), dtype=torch.int32, device=like.device) for _ in range(2))
    vectors = {"offset": offset, "starts": starts, "lengths": lengths}
    given: dict[str, Any] = {name: lo if x is None else x for name, x in vectors.items()}
    given |= {f"of_{name}": 0 if x is None or x.numel() == 1 else x.stride(0) for name, x in vectors.items()}
    given |= {f"HAS_{name.upper()}": x is not None for name, x in vectors.items()}
    if outer_lo is not None and outer_hi is not None:
        outer_lo, outer_hi = outer_lo.contiguous(), outer_hi.contiguous()
    numbers = {"left": left, "right": right, "block": block, "below": below}
    given |= {name: 0 if x is None else x for name, x in numbers.items()}
    given |= {f"HAS_{name.upper()}": x is not None for name, x in numbers.items()}
    rows = min(COLUMNS, power_of_two(Q))
    reach_kernel[(B * -(-Q // rows),)](
        **given, outer_lo=lo if outer_lo is None else outer_lo, outer_hi=lo if outer_hi is None else outer_hi,
        of_outer=0 if outer_lo is None or outer_lo.shape[0] == 1 else Q, HAS_OUTER=outer_lo is not None, lo=lo, hi=hi,
        first=first, most=most, rows=Q, keys=K, programs=-(-Q // rows), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return lo, hi


def turned(lo: Tensor, hi: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows that keep each column: `layouts.device.walks.transposed`."""
    *lead, rows = lo.shape
    lo, hi = lo.contiguous(), hi.contiguous()
    column_lo, column_hi = (torch.empty((*lead, columns), dtype=torch.int32, device=lo.device) for _ in range(2))
    programs = -(-columns // COLUMNS)
    turn_kernel[(lo.numel() // rows * programs,)](
        lo, hi, column_lo, column_hi, rows, columns, programs, rows.bit_length(), COLUMNS=COLUMNS, num_warps=4
    )
    return column_lo, column_hi


def interval_lists(
    lo: Tensor, hi: Tensor, K: int, block_q: int, block_kv: int, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `layouts.device.arrays.Fused`."""
    Bl, Hl, Q = lo.shape
    lo, hi, leads = lo.contiguous(), hi.contiguous(), Bl * Hl
    T, C = -(-Q // block_q), -(-K // block_kv)
    room, listed = 2 * (T + C), C if transpose else 0
    new: dict[str, Any] = {"dtype": torch.int32, "device": lo.device}
    column_lo, column_hi = (torch.empty((Bl, Hl, K if transpose else 0), **new) for _ in range(2))
    of_rows, of_columns = torch.empty((4, Bl, Hl, T), **new), torch.empty((4, Bl, Hl, listed), **new)
    indices = torch.empty((1 + transpose) * leads * room, **new)
    grid = (leads * (T + listed),)
    blocks = {"BLOCK_ROWS": block_q, "BLOCK_COLUMNS": block_kv}
    blocks |= {"ROWS": power_of_two(block_q), "COLUMNS": power_of_two(block_kv)}
    # Kernels read no pointer of a side that is not asked for, but each has to be one.
    unread = () if transpose else (lo, lo)
    given = lo, hi, *(unread or (column_lo, column_hi)), of_rows, of_columns if transpose else lo
    count_tiles_kernel[grid](*given, Q, K, T, C, leads, Q.bit_length(), **blocks, num_warps=4)
    place_tiles_kernel[grid](*given, indices, Q, K, T, C, leads, room, **blocks, SUMS=SUMS, num_warps=4)
    return of_rows, of_columns, column_lo, column_hi, indices
