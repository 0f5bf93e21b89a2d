"""Operators that make structure on a GPU by kernels: opaque to a compiler, which needs their shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.packages import has_triton
from gossamer.layouts.device.arrays import BlockLists, IntervalLists, KeyUnions
from gossamer.patterns.reach import Bounds
from gossamer.torch.key import recorded

TRITON = has_triton()  # as a compiler reads it

library = torch.library.Library("gossamer", "FRAGMENT")
library.define(
    "block_lists(Tensor indices, Tensor? counts, Tensor? lo, Tensor? hi, SymInt Q, SymInt K, int block, int row_kinds, "
    "int column_kinds, bool transpose) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "key_unions(Tensor indices, Tensor? counts, Tensor? lo, Tensor? hi, SymInt Q, SymInt K, int block, SymInt room) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "interval_lists(Tensor lo, Tensor hi, SymInt K, int block_q, int block_kv, bool transpose) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define("turned_intervals(Tensor lo, Tensor hi, SymInt columns) -> (Tensor, Tensor)")


def _block_lists(*arguments: Any) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.block_lists import block_lists

    return block_lists(*arguments)


def _fake_block_lists(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, block: int,
    row_kinds: int, column_kinds: int, transpose: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    Bl, Hl, T, n = indices.shape
    C, room = -(-K // block), Bl * Hl * T * n
    rows = [*((row_kinds + more, Bl, Hl, T) for more in range(2)), (room,)]
    columns = [*((column_kinds + more, Bl, Hl, C) for more in range(2)), (room,)] if transpose else [(0,)] * 3
    return tuple(indices.new_empty(shape, dtype=torch.int32) for shape in (*rows, *columns))


def _key_unions(*arguments: Any) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.unions import key_unions

    return key_unions(*arguments)


def _fake_key_unions(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, block: int, room: int
) -> tuple[Tensor, ...]:
    Bl, Hl, _, _ = indices.shape
    T = -(-Q // block)
    entries = Bl * Hl * T * room
    shapes = ((Bl, Hl, T), (Bl, Hl, T), (entries,), (entries // 32, block))
    return tuple(indices.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _interval_lists(*arguments: Any) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.intervals import interval_lists

    return interval_lists(*arguments)


def _fake_interval_lists(
    lo: Tensor, hi: Tensor, K: int, block_q: int, block_kv: int, transpose: bool
) -> tuple[Tensor, ...]:
    Bl, Hl, Q = lo.shape
    T, C = -(-Q // block_q), -(-K // block_kv)
    columns, keys = (C, K) if transpose else (0, 0)
    room = (1 + transpose) * Bl * Hl * 2 * (T + C) + max(T, C)
    shapes = ((5, Bl, Hl, T), (5, Bl, Hl, columns), *[(Bl, Hl, keys)] * 2, (room,))
    return tuple(lo.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _turned_intervals(lo: Tensor, hi: Tensor, columns: int) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.intervals import turned

    return turned(lo, hi, columns)


def _fake_turned_intervals(lo: Tensor, hi: Tensor, columns: int) -> tuple[Tensor, ...]:
    *lead, _ = lo.shape
    return tuple(lo.new_empty((*lead, columns), dtype=torch.int32) for _ in range(2))


library.impl("key_unions", _key_unions, "CUDA")
torch.library.register_fake("gossamer::key_unions", _fake_key_unions, lib=library)
library.impl("interval_lists", _interval_lists, "CUDA")
torch.library.register_fake("gossamer::interval_lists", _fake_interval_lists, lib=library)
library.impl("turned_intervals", _turned_intervals, "CUDA")
torch.library.register_fake("gossamer::turned_intervals", _fake_turned_intervals, lib=library)
library.impl("block_lists", _block_lists, "CUDA")
torch.library.register_fake("gossamer::block_lists", _fake_block_lists, lib=library)


def _at_once(x: Tensor) -> bool:
    """Whether kernels are launched here: the dispatcher, which modes and compilers need, takes as long as they do."""
    return type(x) is Tensor and not recorded()


class _Kernels:
    """A `layouts.device.Fused` of tensors on a GPU."""

    def block_lists(self, indices: Tensor, *more: Any) -> BlockLists:
        function = _block_lists if _at_once(indices) else torch.ops.gossamer.block_lists.default
        return BlockLists(*function(indices, *more))

    def key_unions(self, indices: Tensor, *more: Any) -> KeyUnions:
        function = _key_unions if _at_once(indices) else torch.ops.gossamer.key_unions.default
        return KeyUnions(*function(indices, *more))

    def interval_lists(self, lo: Tensor, *more: Any) -> IntervalLists:
        function = _interval_lists if _at_once(lo) else torch.ops.gossamer.interval_lists.default
        return IntervalLists(*function(lo, *more))

    def turned(self, lo: Tensor, *more: Any) -> Bounds:
        function = _turned_intervals if _at_once(lo) else torch.ops.gossamer.turned_intervals.default
        return Bounds(*function(lo, *more))


kernels = _Kernels()
