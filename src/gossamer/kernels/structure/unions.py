"""Unions of the lists of neighbouring queries, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.gpu import processors
from gossamer.kernels.relaunch import launch, power
from gossamer.kernels.structure.block_lists import WORD
from gossamer.kernels.structure.union_kernels import UnionForm, UnionNumbers, union_kernel

MOST_ENTRIES = 1024  # of a list at a time
LEAST_WORDS, MOST_WORDS = 8, 64  # and of a row of bits
PROGRAMS = 16  # of a multiprocessor
MARKS = 2**23  # words that programs mark keys in, which the level-2 cache holds


def key_unions(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, block: int, room: int
) -> tuple[Tensor, ...]:
    """See `layouts.device.arrays.Fused`."""
    Bl, Hl, _, n = indices.shape
    T, words = -(-Q // block), -(-K // WORD)
    groups = Bl * Hl * T
    new: dict[str, Any] = {"dtype": torch.int32, "device": indices.device}
    starts, listed_counts = (torch.empty((Bl, Hl, T), **new) for _ in range(2))
    listed, bits = torch.empty(groups * room, **new), torch.empty((groups * room // WORD, block), **new)
    most = max(1, MARKS // (block * words))
    if indices.is_cuda:
        most = min(most, PROGRAMS * processors(indices.device))
    programs = min(groups, most)
    marks = torch.empty((programs, block, words), **new)
    count_strides = (0, 0, 0) if counts is None else counts.stride()
    bound_strides: tuple[int, ...] = (0, 0, 0)
    if lo is not None and hi is not None:
        lo, hi = lo.contiguous(), hi.contiguous()
        bound_strides = tuple(0 if size == 1 else stride for size, stride in zip(lo.shape, lo.stride(), strict=True))
    unread = starts  # a pointer that is not read still needs an array
    launch(
        union_kernel, (programs,), indices, unread if counts is None else counts, unread if lo is None else lo, unread
        if hi is None else hi, starts, listed_counts, listed, bits, marks,
        UnionNumbers(groups, T, n, Q, K, Hl, room, *indices.stride(), *count_strides, *bound_strides),
        FORM=UnionForm(counts is not None, lo is not None, block, power(n, WORD, MOST_ENTRIES),
                       power(words, LEAST_WORDS, MOST_WORDS)), num_warps=4,
    )  # fmt: skip
    return starts, listed_counts, listed, bits
