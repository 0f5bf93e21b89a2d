"""The entry of every kind of kernel of entmax, as the compiler is called for it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from gossamer.cute.common import NUMBERS
from gossamer.cute.entry import Entry, compact, strided
from gossamer.entmax.hopper.long_rows.columns import LongRowsColumns
from gossamer.entmax.hopper.long_rows.configurations import LongRowsColumnsConfig, LongRowsConfig
from gossamer.entmax.hopper.long_rows.kernel import LongRows
from gossamer.entmax.hopper.support.columns import ColumnLists
from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.entmax.hopper.support.kernel import SupportLists


def support_lists(config: SupportConfig) -> Entry:
    """The kernel that makes the lists of supports, or of the k largest scores."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, Q, K = s(), s(), s()
    rows, L = s(), s()
    return Entry(
        SupportLists(config), strided(n, B, s(), Q), strided(n, B, s(), K), compact(Float32, s()), compact(Int32, s()),
        compact(Int32, s()), compact(Int32, rows, L), compact(Float32, s(), s()), compact(Int32, s()),
        compact(Float32, s()), compact(Int32, s()), compact(Uint8, s()), Float32(1), *[Int32(1)] * 7,
    )  # fmt: skip


def long_rows(config: LongRowsConfig) -> Entry:
    """The kernel of out and of the normalisers of rows without a list."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, H, G, Q, K, rows = s(), s(), s(), s(), s(), s()
    return Entry(
        LongRows(config), strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), compact(Float32, H),
        compact(Int32, s()), compact(Int32, s()), compact(Int32, s(), Q), compact(Int32, s()), compact(Int32, 2),
        compact(Int32, rows, s()), compact(Float32, s()), compact(Int32, s()), compact(Uint8, s()),
        *[Float32(1)] * 2, *[Int32(1)] * 3,
    )  # fmt: skip


def long_rows_columns(config: LongRowsColumnsConfig) -> Entry:
    """The kernel that adds these rows to dK and dV."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, H, G, Q, K, keys = s(), s(), s(), s(), s(), s()
    return Entry(
        LongRowsColumns(config), strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q),
        compact(Float32, H), compact(Int32, s()), compact(Int32, s()), compact(Int32, s(), Q), compact(Int32, s()),
        compact(Int32, 2), compact(Float32, s()), compact(Float32, s()), compact(Int32, keys, s()),
        compact(Int32, keys, s()), Float32(1), *[Int32(1)] * 2,
    )  # fmt: skip


def column_lists(keys: int, chunks: int, fill: bool) -> Entry:
    """The kernel that turns lists of rows into lists of keys: it counts the pairs of cells, or places them."""
    s = cute.sym_int
    rows = s()
    return Entry(
        ColumnLists(keys, chunks, fill), compact(Int32, rows, s()), compact(Int32, rows),
        compact(Int32, s()), compact(Int32, s()), compact(Int32, s()), Int32(1), Int32(1),
    )  # fmt: skip
