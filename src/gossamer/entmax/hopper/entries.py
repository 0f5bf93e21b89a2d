"""The entry of every kind of kernel of entmax, as the compiler is called for it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from gossamer.cute.common import NUMBERS
from gossamer.cute.entry import Entry, compact, strided
from gossamer.entmax.hopper.long_rows.columns import TiledColumns
from gossamer.entmax.hopper.long_rows.configurations import TiledColumnsConfig, TiledConfig
from gossamer.entmax.hopper.long_rows.kernel import Tiled
from gossamer.entmax.hopper.support.columns import ColumnLists
from gossamer.entmax.hopper.support.configurations import SelectConfig
from gossamer.entmax.hopper.support.kernel import Select


def select(config: SelectConfig) -> Entry:
    """The lists of alpha-entmax or of the k largest scores."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, Q, K = s(), s(), s()
    rows, L = s(), s()
    return Entry(
        Select(config), strided(n, B, s(), Q), strided(n, B, s(), K), compact(Float32, s()), compact(Int32, s()),
        compact(Int32, s()), compact(Int32, rows, L), compact(Float32, s(), s()), compact(Int32, s()),
        compact(Float32, s()), compact(Int32, s()), compact(Uint8, s()), Float32(1), *[Int32(1)] * 7,
    )  # fmt: skip


def tiled(config: TiledConfig) -> Entry:
    """Out and normalisers of the rows of alpha-entmax that have no list."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, H, G, Q, K, rows = s(), s(), s(), s(), s(), s()
    return Entry(
        Tiled(config), strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), compact(Float32, H),
        compact(Int32, s()), compact(Int32, s()), compact(Int32, s(), Q), compact(Int32, s()), compact(Int32, 2),
        compact(Int32, rows, s()), compact(Float32, s()), compact(Int32, s()), compact(Uint8, s()),
        *[Float32(1)] * 2, *[Int32(1)] * 3,
    )  # fmt: skip


def tiled_columns(config: TiledColumnsConfig) -> Entry:
    """What these rows add to dK and dV."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, H, G, Q, K, keys = s(), s(), s(), s(), s(), s()
    return Entry(
        TiledColumns(config), strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q),
        compact(Float32, H), compact(Int32, s()), compact(Int32, s()), compact(Int32, s(), Q), compact(Int32, s()),
        compact(Int32, 2), compact(Float32, s()), compact(Float32, s()), compact(Int32, keys, s()),
        compact(Int32, keys, s()), Float32(1), *[Int32(1)] * 2,
    )  # fmt: skip


def column_lists(keys: int, chunks: int, fill: bool) -> Entry:
    """The lists of keys from those of rows: the counts of cells, or their places."""
    s = cute.sym_int
    rows = s()
    return Entry(
        ColumnLists(keys, chunks, fill), compact(Int32, rows, s()), compact(Int32, rows),
        compact(Int32, s()), compact(Int32, s()), compact(Int32, s()), Int32(1), Int32(1),
    )  # fmt: skip
