"""The lists of keys of each query in order, and their transpose, in one launch each and a sort between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.structure.given import limits_of
from gossamer.kernels.structure.key_kernels import ColumnNumbers, RowForm, RowNumbers, columns_kernel, rows_kernel

LEAST_ENTRIES = 16  # of a list, as a program sorts it
ENTRIES = 1024  # that a program sorts, of one list or of several
KEYS = 256  # of a program that searches for them


def key_rows(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, transpose: bool
) -> tuple[Tensor, ...]:
    """See `layouts.device.arrays.Fused`."""
    Bl, Hl, _, n = indices.shape
    heads = Bl * Hl
    lists, N = heads * Q, max(LEAST_ENTRIES, 1 << (n - 1).bit_length())
    new: dict[str, Any] = {"dtype": torch.int32, "device": indices.device}
    starts, listed_counts = (torch.empty((Bl, Hl, Q), **new) for _ in range(2))
    listed = torch.empty(lists * n, **new)
    codes = torch.empty(lists * n if transpose else 0, **new)
    limits = limits_of(counts, lo, hi, starts)
    several = max(1, ENTRIES // N)
    numbers = RowNumbers(lists, Q, n, K, Hl, heads * K, *indices.stride(), *limits.strides)
    form = RowForm(limits.counted, limits.bounded, transpose, several, N)
    launch(
        rows_kernel, (-(-lists // several),), indices, *limits.arrays, starts, listed_counts, listed,
        codes if transpose else listed, numbers, FORM=form, num_warps=min(8, max(4, N // 256)),
    )  # fmt: skip
    shape, entries = (Bl, Hl, K) if transpose else (Bl, Hl, 0), len(codes)
    column_starts, column_counts = (torch.empty(shape, **new) for _ in range(2))
    queries = torch.empty_like(codes)
    if transpose:
        ordered, places = torch.sort(codes, stable=True)
        programs = -(-heads * K // KEYS)
        launch(
            columns_kernel, (programs - (-entries // KEYS),), ordered, places, column_starts, column_counts, queries,
            ColumnNumbers(heads * K, entries, programs, n, Q, entries.bit_length()), BLOCK=KEYS, num_warps=4,
        )  # fmt: skip
    return starts, listed_counts, listed, column_starts, column_counts, queries
