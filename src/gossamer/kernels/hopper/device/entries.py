"""The entry of every kind of kernel, as the compiler is called for it: without a GPU and without tensors.

An entry takes a configuration and gives the kernel and the types of its arguments, buffers and numbers one after the
other, which the compiler makes a function of. To add one, write such a function here and register it in
`hopper.compiled`.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from gossamer.cute.column_items import SEGMENT
from gossamer.cute.common import NUMBERS
from gossamer.cute.entry import Entry, compact, lengths_of, loose, strided
from gossamer.cute.merges import MERGE
from gossamer.cute.row_items import ITEM
from gossamer.kernels.hopper.device.backward import around
from gossamer.kernels.hopper.device.backward.keep import PAIR
from gossamer.kernels.hopper.device.backward.kept import Kept
from gossamer.kernels.hopper.device.backward.kernel import Backward
from gossamer.kernels.hopper.device.backward.query import QueryGradient
from gossamer.kernels.hopper.device.backward.wide import Wide
from gossamer.kernels.hopper.device.configurations import (
    BackwardConfig,
    ForwardConfig,
    KeptConfig,
    QueryConfig,
    WideConfig,
)
from gossamer.kernels.hopper.device.forward.kernel import Forward
from gossamer.kernels.hopper.device.forward.merge import Merge
from gossamer.kernels.hopper.device.gather.columns import GatherColumns
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.float32.forward import Float32Forward
from gossamer.kernels.hopper.device.gather.forward import GatherForward
from gossamer.kernels.hopper.device.gather.gradients import GatherGradients
from gossamer.kernels.hopper.device.gather.query import GatherQuery
from gossamer.kernels.hopper.device.rows.configurations import RowsConfig
from gossamer.kernels.hopper.device.rows.forward import RowsForward
from gossamer.kernels.hopper.device.rows.gradients import RowsColumns, RowsQuery
from gossamer.kernels.hopper.device.rows.words import Word


def forward(config: ForwardConfig) -> Entry:
    """The forward kernel of a configuration, and the merge of its parts."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    H, G, Q = s(), s(), s()
    rows, lists = compact(Int32, s(), s()), compact(Int32, s(), s())
    return Entry(
        Forward(c),
        strided(n, s(), H, Q), strided(n, s(), G, s()), strided(n, s(), G, s()), strided(n, s(), H, Q),
        loose(Float32, s(), H, Q), compact(Int32, s(), ITEM), lists, rows, compact(Int32, s(), s()),
        compact(Int32, s(), c.block_kv // 32), compact(Float32, s()),
        compact(Float32, s(), c.block_q, c.E), compact(Float32, s(), c.block_q), compact(Int32, s(), MERGE),
        compact(Int32, s()), compact(Int32, 1), Float32(1), Float32(1), *[Int32(1)] * 4,
    )  # fmt: skip


def backward(config: BackwardConfig) -> Entry:
    """The column kernel of a configuration."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B, H, G, K = s(), s(), s(), s()
    bounds = compact(Int32, s(), s())
    return Entry(
        Backward(c),
        strided(n, B, H, s()), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, s()),
        compact(Float32, 2, s(), s(), s(divisibility=128)), compact(Float32, s(), s(), s(), 64 * c.D),
        _pairs(n) if c.keeps else None, strided(n, B, G, K), strided(n, B, G, K), compact(Int32, s(), ITEM),
        compact(Int32, s(), SEGMENT), compact(Int32, s(), s()), bounds, bounds, compact(Int32, s(), c.block_q // 32),
        compact(Float32, s(), c.block_kv, c.D), compact(Float32, s(), c.block_kv, c.E), lengths_of(c),
        compact(Int32, 1), *[Float32(1)] * 3, *[Int32(1)] * 2,
    )  # fmt: skip


def kept(config: KeptConfig) -> Entry:
    """dQ from dS that the column kernel has kept."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B = s()
    return Entry(
        Kept(c), _pairs(n), strided(n, B, s(), s()), strided(n, B, s(), s()), compact(Int32, s(), ITEM),
        compact(Int32, s(), s()), compact(Float32, s(), c.block_q, c.D), lengths_of(c), compact(Int32, 1), Float32(1),
        *[Int32(1)] * 2,
    )  # fmt: skip


def wide(config: WideConfig) -> Entry:
    """dK and dV of wide heads."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B, H, G, Q, K = s(), s(), s(), s(), s()
    bounds = compact(Int32, s(), s())
    return Entry(
        Wide(c), strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q),
        compact(Float32, 2, B, H, s()), compact(Float32, s(), s(), s(), 64 * c.D), _pairs(n) if c.keeps else None,
        strided(n, B, G, K), strided(n, B, G, K), compact(Int32, s(), ITEM), compact(Int32, s(), SEGMENT),
        compact(Int32, s(), s()), bounds, bounds, compact(Int32, s(), c.block_q // 32),
        compact(Float32, s(), c.tile_kv, c.D), compact(Float32, s(), c.tile_kv, c.E), lengths_of(c), compact(Int32, 1),
        *[Float32(1)] * 3, *[Int32(1)] * 2,
    )  # fmt: skip


def merge(dtype: str, E: int, block_q: int) -> Entry:
    """The merge of the parts of gathered rows."""
    s = cute.sym_int
    return Entry(
        Merge(E, block_q), strided(NUMBERS[dtype], s(), s(), s()), loose(Float32, s(), s(), s()),
        compact(Float32, s(), block_q, E), compact(Float32, s(), block_q), compact(Int32, s(), MERGE),
        compact(Float32, s()), Int32(1),
    )  # fmt: skip


def preprocess(dtype: str, E: int, zeroed: int) -> Entry:
    """Row terms of the backward; zeroes sums of dQ of `zeroed` columns (0: none)."""
    n, s = NUMBERS[dtype], cute.sym_int
    B, H, Q = s(), s(), s()
    return Entry(
        around.Preprocess(E, zeroed), strided(n, B, H, Q), strided(n, B, H, Q),
        *[loose(Float32, B, H, Q) for _ in range(2)],
        compact(Float32, 2, B, H, s()), compact(Float32, s(), s(), s(), 64 * zeroed if zeroed else s()),
        compact(Float32, s()), Int32(1), Int32(1),
    )  # fmt: skip


def postprocess(dtype: str, D: int) -> Entry:
    """dQ from its float32 sums."""
    n, s = NUMBERS[dtype], cute.sym_int
    B, H = s(), s()
    return Entry(
        around.postprocess, compact(Float32, B, H, s(), 64 * D), strided(n, B, H, s()), Float32(1),
    )  # fmt: skip


def query_gradient(config: QueryConfig) -> Entry:
    """dQ by rows."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B, H, G, Q, K = s(), s(), s(), s(), s()
    rows = compact(Int32, s(), s())
    return Entry(
        QueryGradient(c), strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q),
        compact(Float32, 2, B, H, s()), strided(n, B, H, Q), compact(Int32, s(), ITEM), compact(Int32, s(), s()), rows,
        rows, compact(Int32, s(), c.block_kv // 32), compact(Float32, s(), c.block_q, c.D), lengths_of(c),
        compact(Int32, 1), *[Float32(1)] * 3, *[Int32(1)] * 2,
    )  # fmt: skip


GATHER = {"forward": GatherForward, "query": GatherQuery, "columns": GatherColumns, "gradients": GatherGradients}


def gather(config: GatherConfig) -> Entry:
    """A kernel over gathered columns: the forward, dQ, or dK and dV."""
    kernel = Float32Forward if config.dtype == "float32" else GATHER[config.direction]
    return Entry(kernel(config), *gather_arguments(config))


def gather_arguments(config: GatherConfig, more_lists: tuple[Any, ...] = (), pull: tuple[Any, ...] = ()) -> list[Any]:
    """The types of the arguments of such a kernel.

    Args:
        more_lists: of lists behind those that all have; pull: of what is written behind the gradients.
    """
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B, H, G, Q, K = s(), s(), s(), s(), s()
    inputs = strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q)
    items, lists = compact(Int32, s(), ITEM), (compact(Int32, s()), compact(Int32, s(), c.queries), *more_lists)
    terms, part, lengths = compact(Float32, 2, B, H, s()), compact(Float32, s(), 64, c.size), compact(Int32, s())
    tile_counter, numbers = compact(Int32, 1), [Float32(1)] * 3 + [Int32(1)] * 2
    if c.direction == "forward":
        halves: list[Any] = []
        if c.dtype == "float32":
            halves = [*[compact(Float16, B, G, K, 2 * c.size)] * 2, compact(Float32, B, G, K, 2)]
        return [
            *inputs[:3], *halves, inputs[3], loose(Float32, B, H, Q), items, *lists, compact(Float32, s()), part,
            compact(Float32, s(), 64), lengths, tile_counter, *[Float32(1)] * 2, *[Int32(1)] * 3,
        ]  # fmt: skip
    if c.direction == "columns":
        return [
            *inputs, terms, strided(n, B, G, K), strided(n, B, G, K), *pull, items, compact(Int32, s(), SEGMENT),
            *lists, part, compact(Float32, s(), 64, c.size), lengths, tile_counter, *numbers,
        ]  # fmt: skip
    sums = [compact(Float32, B, G, K, c.size)] * 2 if c.direction == "gradients" else []
    return [
        *inputs, terms, *sums, strided(n, B, H, Q), *pull, items, *lists, part, lengths, tile_counter, *numbers,
    ]  # fmt: skip


def rows(config: RowsConfig) -> Entry:
    """A kernel over the columns of single rows: the forward, dQ, or dK and dV."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B, H, G, Q, K = s(), s(), s(), s(), s()
    q, k, v, dout = strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q)
    lists, part = (compact(Int32, s(), len(Word)), compact(Int32, s())), compact(Float32, s(), 1, c.size)
    lengths, numbers = compact(Int32, s()), [Int32(1)] * 4
    if c.direction == "forward":
        return Entry(
            RowsForward(c), q, k, v, dout, loose(Float32, B, H, Q), *lists, compact(Float32, s()), part,
            compact(Float32, s(), 1), lengths, *[Float32(1)] * 2, Int32(1), *numbers,
        )  # fmt: skip
    given, terms, factors = (q, k, v, dout), compact(Float32, 2, B, H, s()), [Float32(1)] * 3
    if c.direction == "query":
        return Entry(RowsQuery(c), *given, terms, strided(n, B, H, Q), *lists, part, lengths, *factors, *numbers)
    made = [strided(Float32 if c.shares else n, B, heads, K) for heads in [s() if c.shares else G] * 2]
    parts = part, compact(Float32, s(), 1, c.size)
    return Entry(RowsColumns(c), *given, terms, *made, *lists, *parts, lengths, *factors, *numbers)


def sum_parts(dtype: str, size: int, block: int) -> Entry:
    """The sum of the parts of split tiles of `block` rows."""
    s = cute.sym_int
    return Entry(
        around.sum_parts, strided(NUMBERS[dtype], s(), s(), s()), compact(Float32, s(), block, size),
        compact(Int32, s(), MERGE), Float32(1),
    )  # fmt: skip


def _pairs(dtype: Any) -> Any:
    """dS of pairs of tiles; their number times their size may pass 32 bits."""
    return make_fake_tensor(dtype, (cute.sym_int(), PAIR), (cute.sym_int64(divisibility=PAIR), 1), assumed_align=16)
