"""Unions of the lists of neighbouring queries, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.gpu import processors
from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import power
from gossamer.kernels.structure.block_lists import WORD
from gossamer.kernels.structure.given import limits_of
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
    limits = limits_of(counts, lo, hi, starts)
    launch(
        union_kernel, (programs,), indices, *limits.arrays, starts, listed_counts, listed, bits, marks,
        UnionNumbers(groups, T, n, Q, K, Hl, room, *indices.stride(), *limits.strides),
        FORM=UnionForm(limits.counted, limits.bounded, block, power(n, WORD, MOST_ENTRIES),
                       power(words, LEAST_WORDS, MOST_WORDS)), num_warps=4,
    )  # fmt: skip
    return starts, listed_counts, listed, bits
