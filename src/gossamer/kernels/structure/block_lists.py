"""Lists of blocks made ascending, and transposed, in three launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import power
from gossamer.kernels.structure.block_kernels import (
    ColumnForm,
    OrderForm,
    OrderNumbers,
    count_kernel,
    order_kernel,
    place_kernel,
)
from gossamer.kernels.structure.given import limits_of

WORD = 32
LISTS = 8  # of a program: as many words as are read at once
MOST_ENTRIES, MOST_WORDS = 128, 64  # of a list at a time
COLUMNS, ROWS = 8, 256  # of the transpose, at a time
SUMS = 1024


def block_lists(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, block: int,
    row_kinds: int, column_kinds: int, transpose: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The lists of `layouts.device.block_lists` in both directions: see `layouts.device.arrays.Fused`."""
    Bl, Hl, T, n = indices.shape
    C, lists = -(-K // block), Bl * Hl * T
    words = -(-C // WORD)
    new: dict[str, Any] = {"dtype": torch.int32, "device": indices.device}
    row_starts, row_counts = (torch.empty((row_kinds + more, Bl, Hl, T), **new) for more in range(2))
    row_indices = torch.empty(lists * n, **new)
    kept = transpose and column_kinds == 2 and lo is not None
    bits = torch.empty((1 + kept + row_kinds, Bl * Hl, words, T), **new)
    listed_bits, *before = bits
    kept_bits = listed_bits
    if kept:
        kept_bits, *before = before
    before, *_ = before
    limits = limits_of(counts, lo, hi, row_counts)
    groups = -(-T // LISTS)
    launch(
        order_kernel, (Bl * Hl * groups,), indices, *limits.arrays, row_starts, row_counts, row_indices,
        listed_bits, kept_bits, before,
        OrderNumbers(T, C, n, Q, K, Hl, groups, *indices.stride(), *limits.strides),
        FORM=OrderForm(limits.counted, limits.bounded, row_kinds, kept, block, LISTS,
                       power(n, WORD, MOST_ENTRIES), power(words, LISTS, MOST_WORDS)), num_warps=4,
    )  # fmt: skip
    if not transpose:
        none = torch.empty(0, **new)
        return row_starts, row_counts, row_indices, none, none, none
    groups = -(-C // COLUMNS)
    programs = Bl * Hl * groups
    starts, column_counts = (torch.empty((column_kinds + more, Bl, Hl, C), **new) for more in range(2))
    sums, column_indices = torch.empty(column_kinds * programs, **new), torch.empty(lists * n, **new)
    whole = Q // block
    form = ColumnForm(column_kinds, kept, power(T, WORD, ROWS), COLUMNS, SUMS)
    given, sizes = (listed_bits, kept_bits, column_counts, sums), (T, C, groups, whole)
    launch(count_kernel, (programs,), *given, *sizes, FORM=form, num_warps=4)
    launch(place_kernel, (programs,), *given, starts, column_indices, *sizes, FORM=form, num_warps=4)
    return row_starts, row_counts, row_indices, starts, column_counts, column_indices
