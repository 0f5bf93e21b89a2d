"""Operators that make structure on a GPU by kernels: opaque to a compiler, which needs their shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.packages import has_triton
from gossamer.layouts.device.arrays import BlockLists, IntervalLists, KeyRows, KeyUnions
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
    "key_rows(Tensor indices, Tensor? counts, Tensor? lo, Tensor? hi, SymInt Q, SymInt K, bool transpose) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "interval_lists(Tensor lo, Tensor hi, SymInt K, int block_q, int block_kv, bool transpose) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define("turned_intervals(Tensor lo, Tensor hi, SymInt columns) -> (Tensor, Tensor)")
# The numbers are in two lists: `kernels.structure.bounds` says what each is.
library.define(
    "row_bounds(int kind, Tensor? told, Tensor? told_keys, Tensor? used, Tensor? offset, Tensor? key_starts, "
    "Tensor? key_lengths, SymInt[] sizes, SymInt[] reach) -> (Tensor, Tensor)"
)
library.define(
    "page_tiles(Tensor edges, Tensor used, Tensor table, SymInt[] sizes, SymInt[] reaches, SymInt[] steps) -> Tensor[]"
)


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


def _key_rows(*arguments: Any) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.key_rows import key_rows

    return key_rows(*arguments)


def _fake_key_rows(
    indices: Tensor, counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, Q: int, K: int, transpose: bool
) -> tuple[Tensor, ...]:
    Bl, Hl, _, n = indices.shape
    entries, keys = Bl * Hl * Q * n, K if transpose else 0
    shapes = [(Bl, Hl, Q)] * 2, [(entries,)], [(Bl, Hl, keys)] * 2, [(entries if transpose else 0,)]
    return tuple(indices.new_empty(shape, dtype=torch.int32) for kind in shapes for shape in kind)


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


def _row_bounds(*arguments: Any) -> tuple[Tensor, ...]:
    from gossamer.kernels.structure.bounds import row_bounds

    return row_bounds(*arguments)


def _fake_row_bounds(
    kind: int, told: Tensor | None, told_keys: Tensor | None, used: Tensor | None, offset: Tensor | None,
    key_starts: Tensor | None, key_lengths: Tensor | None, sizes: Sequence[int], reach: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    from gossamer.kernels.structure.bounds import leads_of

    vectors = offset, key_starts, key_lengths
    like, *_ = (x for x in (told, *vectors) if x is not None)
    shape = leads_of(kind, told, *vectors), 1, sizes[0]
    return tuple(like.new_empty(shape, dtype=torch.int32) for _ in range(2))


def _page_tiles(*arguments: Any) -> list[Tensor]:
    from gossamer.kernels.structure.pages import page_tiles

    return page_tiles(*arguments)


def _fake_page_tiles(
    edges: Tensor, used: Tensor, table: Tensor, sizes: Sequence[int], reaches: Sequence[int], steps: Sequence[int]
) -> list[Tensor]:
    from gossamer.kernels.structure.pages import PageSizes

    return PageSizes(*sizes).made(used.shape[0], edges.device)


library.impl("page_tiles", _page_tiles, "CUDA")
torch.library.register_fake("gossamer::page_tiles", _fake_page_tiles, lib=library)
library.impl("row_bounds", _row_bounds, "CUDA")
torch.library.register_fake("gossamer::row_bounds", _fake_row_bounds, lib=library)
library.impl("key_unions", _key_unions, "CUDA")
torch.library.register_fake("gossamer::key_unions", _fake_key_unions, lib=library)
library.impl("key_rows", _key_rows, "CUDA")
torch.library.register_fake("gossamer::key_rows", _fake_key_rows, lib=library)
library.impl("interval_lists", _interval_lists, "CUDA")
torch.library.register_fake("gossamer::interval_lists", _fake_interval_lists, lib=library)
library.impl("turned_intervals", _turned_intervals, "CUDA")
torch.library.register_fake("gossamer::turned_intervals", _fake_turned_intervals, lib=library)
library.impl("block_lists", _block_lists, "CUDA")
torch.library.register_fake("gossamer::block_lists", _fake_block_lists, lib=library)


def _run(function: Callable[..., Any], operator: Callable[..., Any], *arguments: Any) -> Any:
    """The function, which launches here, or its operator, which modes and compilers see.

    Crossing the dispatcher takes as long as the launches.
    """
    plain = all(type(x) is Tensor for x in arguments if isinstance(x, Tensor))
    return (function if plain and not recorded() else operator)(*arguments)


class _Kernels:
    """A `layouts.device.Fused` of tensors on a GPU."""

    def block_lists(self, *arguments: Any) -> BlockLists:
        return BlockLists(*_run(_block_lists, torch.ops.gossamer.block_lists.default, *arguments))

    def key_unions(self, *arguments: Any) -> KeyUnions:
        return KeyUnions(*_run(_key_unions, torch.ops.gossamer.key_unions.default, *arguments))

    def key_rows(self, *arguments: Any) -> KeyRows:
        return KeyRows(*_run(_key_rows, torch.ops.gossamer.key_rows.default, *arguments))

    def interval_lists(self, *arguments: Any) -> IntervalLists:
        return IntervalLists(*_run(_interval_lists, torch.ops.gossamer.interval_lists.default, *arguments))

    def turned(self, lo: Tensor, hi: Tensor, columns: int) -> Bounds:
        return Bounds(*_run(_turned_intervals, torch.ops.gossamer.turned_intervals.default, lo, hi, columns))

    def row_bounds(self, *arguments: Any) -> Bounds:
        """Of `structure.fused_bounds`; the arguments are those of the operator."""
        return Bounds(*_run(_row_bounds, torch.ops.gossamer.row_bounds.default, *arguments))

    def page_tiles(self, *arguments: Any) -> list[Tensor]:
        """Of `structure.fused_pages`; the arguments are those of the operator."""
        made: list[Tensor] = _run(_page_tiles, torch.ops.gossamer.page_tiles.default, *arguments)
        return made


kernels = _Kernels()
