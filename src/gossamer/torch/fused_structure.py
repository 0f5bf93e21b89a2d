"""Operators that make structure on a GPU by kernels: opaque to a compiler, which needs their shapes alone."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.layouts.device.arrays import BlockLists

library = torch.library.Library("gossamer", "FRAGMENT")
library.define(
    "block_lists(Tensor indices, Tensor? counts, Tensor? lo, Tensor? hi, SymInt Q, SymInt K, int block, int row_kinds, "
    "int column_kinds, bool transpose) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@cache
def available() -> bool:
    """Whether Triton is installed, which the kernels are written in."""
    try:
        importlib.import_module("gossamer.kernels.structure.block_lists")
    except ImportError:
        return False
    return True


def _block_lists(*arguments: Any) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.block_lists import block_lists

    return block_lists(*arguments)


def _fake_block_lists(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, block: int,
    row_kinds: int, column_kinds: int, transpose: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    Bl, Hl, T, n = indices.shape
    C, room = -(-K // block), Bl * Hl * T * n
    columns = [(column_kinds, Bl, Hl, C)] * 2 + [(room,)] if transpose else [(0,)] * 3
    return tuple(
        indices.new_empty(shape, dtype=torch.int32) for shape in (*[(row_kinds, Bl, Hl, T)] * 2, (room,), *columns)
    )


library.impl("block_lists", _block_lists, "CUDA")
torch.library.register_fake("gossamer::block_lists", _fake_block_lists, lib=library)


class _Kernels:
    """A `layouts.device.Fused` of tensors on a GPU."""

    def block_lists(self, *arguments: Any) -> BlockLists:
        return BlockLists(*torch.ops.gossamer.block_lists.default(*arguments))


kernels = _Kernels()
