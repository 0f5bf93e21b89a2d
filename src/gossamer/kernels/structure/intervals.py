"""Tiles of one interval of keys for each query, of both directions, in two launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import power
from gossamer.kernels.structure.interval_kernels import (
    CountNumbers,
    IntervalForm,
    PlaceNumbers,
    count_tiles_kernel,
    place_tiles_kernel,
    turn_kernel,
)

SUMS = 256  # counts that are added at a time
COLUMNS = 256  # intervals that are turned by a program


def turned(lo: Tensor, hi: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows that keep each column: `layouts.device.walks.transposed`."""
    *lead, rows = lo.shape
    lo, hi = lo.contiguous(), hi.contiguous()
    column_lo, column_hi = (torch.empty((*lead, columns), dtype=torch.int32, device=lo.device) for _ in range(2))
    programs = -(-columns // COLUMNS)
    launch(
        turn_kernel, (lo.numel() // rows * programs,), lo, hi, column_lo, column_hi, rows, columns, programs,
        rows.bit_length(), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
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
    of_rows, of_columns = torch.empty((5, Bl, Hl, T), **new), torch.empty((5, Bl, Hl, listed), **new)
    every, tiles = (1 + transpose) * leads * room, max(T, C)
    indices = torch.empty(every + tiles, **new)
    grid = (leads * (T + listed),)
    form = IntervalForm(block_q, block_kv, power(block_q), power(block_kv), SUMS)
    # Kernels read no pointer of a side that is not asked for, but each has to be one.
    unread = () if transpose else (lo, lo)
    given = lo, hi, *(unread or (column_lo, column_hi)), of_rows, of_columns if transpose else lo
    numbers = CountNumbers(Q, K, T, C, leads, Q.bit_length(), every)
    launch(count_tiles_kernel, grid, *given, numbers, FORM=form, num_warps=4)
    places = PlaceNumbers(Q, K, T, C, leads, room, every, tiles)
    launch(place_tiles_kernel, grid, *given, indices, places, FORM=form, num_warps=4)
    return of_rows, of_columns, column_lo, column_hi, indices
