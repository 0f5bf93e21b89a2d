"""Tiles in shared memory, what copies them there and back by TMA, and the products that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from gossamer.cute.clearing import Landing
from gossamer.cute.common import ROWS, Opaque, Ring
from gossamer.cute.configurations import queries_of

LINE = 64  # columns of 16 bits that lie together in shared memory: the width of the swizzle


def tile_layout(dtype: Any, rows: int, columns: int, stages: int | None = None, within: int = 0) -> Any:
    """Tiles as products read them; their swizzle is the widest that divides `within` columns, or all of them."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, within or columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    if stages is None:
        return cute.tile_to_shape(atom, (rows, columns), (0, 1))
    return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))


def transposed(tiles: Any, rows: int, columns: int, *stages: int) -> Any:
    """The transpose of tiles in shared memory."""
    order = (1, 0, 2) if stages else (1, 0)
    return cute.composition(tiles, cute.make_ordered_layout((columns, rows, *stages), order=order))


class Tma(NamedTuple):
    """A tensor (rows, columns, head, batch) in coordinates, and what copies tiles of it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def tma(tensor: Any, rows: int, columns: int, *, store: bool = False, layout: Any = None) -> Tma:
    """TMA loads or stores of tiles of a tensor (batch, head, rows, columns).

    Args:
        layout: of a tile in shared memory, where it is not `tile_layout`.
    """
    operation = cpasync.CopyBulkTensorTileS2GOp() if store else cpasync.CopyBulkTensorTileG2SOp()
    by_rows = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [2, 3, 1, 0]))
    layout = layout or tile_layout(tensor.element_type, rows, columns)
    return Tma(*cpasync.make_tiled_tma_atom(operation, by_rows, layout, (rows, columns)))


def packed_tma(tensor: Any, heads: int, queries: int, columns: int, *, store: bool = False) -> Tma:
    """TMA loads or stores of `queries` rows of `heads` heads that follow one another, as the first rows of a tile.

    Row n of a tile is head n % heads of query n // heads; a head in coordinates is so many of the tensor's. The tensor
    is read where it is: a map of one more dimension.
    """
    operation = cpasync.CopyBulkTensorTileS2GOp() if store else cpasync.CopyBulkTensorTileG2SOp()
    (B, H, Q, size), (batch, head, query, _) = tensor.shape, tensor.stride
    by_rows = cute.make_layout(
        ((heads, Q), size, H // heads, B), stride=((head, query), 1, head * heads, batch)
    )  # fmt: skip
    swizzle = tile_layout(tensor.element_type, ROWS, columns).inner
    layout = cute.make_composed_layout(swizzle, 0, packed_rows(heads, queries, columns))
    to = cute.make_tensor(tensor.iterator, by_rows)
    return Tma(*cpasync.make_tiled_tma_atom(operation, to, layout, ((heads, queries), columns)))


def packed_rows(heads: int, queries: int, columns: int, stages: int | None = None) -> Any:
    """The rows of a tile of 64 that some queries of some heads are, in shared memory; without the swizzle."""
    shape, stride = ((heads, queries), (LINE, columns // LINE)), ((LINE, LINE * heads), (1, LINE * ROWS))
    if stages is None:
        return cute.make_layout(shape, stride=stride)
    return cute.make_layout((*shape, stages), stride=(*stride, ROWS * columns))


def partition(tma: Tma, shared: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """(in shared memory, in global memory) of the tiles that TMA copies.

    Args:
        shared: (64, columns, stages), or without stages.
    """
    packed, *_ = tma.tensor.shape
    if isinstance(packed, tuple):
        heads, _ = packed
        queries = queries_of(heads)
        stages = cute.size(shared, mode=[2]) if cute.rank(shared) > 2 else None
        shared = cute.make_tensor(shared.iterator, packed_rows(heads, queries, columns, stages))
        tiles = cute.local_tile(tma.tensor, ((heads, queries), columns), (None, 0, None, None))
    else:
        tiles = cute.local_tile(tma.tensor, (rows, columns), (None, 0, None, None))
    return cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def copied_bytes(to: Any) -> int:
    """The bytes of a tile that TMA copies and counts at a barrier: fewer than it has where heads do not fill its rows.

    Args:
        to: in shared memory, as `partition` gives it.
    """
    return int(cute.size(to, mode=[0])) * int(to.element_type.width) // 8


def rows_of(tma: Tma) -> Any:
    """The number of rows of a head."""
    rows, *_ = tma.tensor.shape
    return rows[-1] if isinstance(rows, tuple) else rows


@dataclass(frozen=True, eq=False)
class TileLoader(Opaque):
    """One warp that fills a ring with tiles of a tensor, by TMA."""

    ring: Ring
    atom: cute.CopyAtom
    to: Any
    from_: Any
    bytes: int  # of a tile
    shared: Any
    landing: Landing | None = None  # of tiles of which rows are cleared

    @cute.jit
    def load(self, n, tile, head, batch, missing=None):
        """Fill the n-th use of the ring, when there is room. `missing`: the rows that become zero, as `Landing` has."""
        stage, phase = self.ring.place(n)
        full = self.ring.full + stage
        self.ring.wait_empty(stage, phase)
        self.fill(stage, full, tile, head, batch, missing)

    @cute.jit
    def fill(self, stage, full, tile, head, batch, missing=None):
        """Fill a stage, whose barrier `full` is; `missing` as in `load`."""
        if const_expr(missing is None):
            self.issue(stage, full, tile, head, batch)
        else:
            dirty = cute.arch.vote_any_sync(missing != 0)
            self.issue(stage, self.landing.target(full, dirty), tile, head, batch)
            if dirty:
                self.landing.clear(full, self.shared[None, None, stage], missing)

    @cute.jit
    def issue(self, stage, full, tile, head, batch):
        """Issue the copy of a tile to a stage, which arrives at the barrier `full`."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        cute.copy(self.atom, self.from_[None, tile, head, batch], self.to[None, stage], tma_bar_ptr=full)


def tile_loader(
    ring: Ring, tma: Tma, shared: Any, rows: int, columns: int, landing: Landing | None = None
) -> TileLoader:
    """`shared`: a tile for each stage of the ring."""
    to, from_ = partition(tma, shared, rows, columns)
    return TileLoader(ring, tma.atom, to, from_, copied_bytes(to), shared, landing)


def product_of(
    dtype: Any, columns: int, *, transposed: bool = False, registers: bool = False, rows: int = ROWS,
    first_transposed: bool = False,
) -> Any:  # fmt: skip
    """A product of 64 rows of a warpgroup by so many columns, in float32.

    Args:
        transposed: the second factor lies as its transpose; else both lie along what is summed.
        registers: the first factor is in registers.
        first_transposed: it lies as its transpose, in shared memory.
    """
    major = cute.nvgpu.OperandMajorMode
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    lie = [major.MN if turned else major.K for turned in (first_transposed, transposed)]
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, *lie, Float32, atom_layout_mnk=(1, 1, 1),
        tiler_mn=(rows, columns), a_source=source,
    )  # fmt: skip


def accumulator(mma: Any, columns: int) -> Any:
    """Registers for the result of a product of 64 rows."""
    return cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((ROWS, columns)), Float32)


def first_factor(mma: Any, tiles: Any) -> Any:
    """Tiles in shared memory as the first factor of a product."""
    return mma.get_slice(0).make_fragment_A(mma.get_slice(0).partition_A(tiles))


def held_factor(mma: Any, columns: int) -> Any:
    """Registers for 64 rows as the first factor of a product."""
    thread_mma = mma.get_slice(0)
    return thread_mma.make_fragment_A(thread_mma.partition_shape_A((ROWS, columns)))


def hold(mma: Any, tile: Any, registers: Any, thread: Any) -> None:
    """Read a tile in shared memory into registers; `thread`: of its warpgroup."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), tile.element_type)
    mine = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    cute.copy(atom, mine.partition_S(tile), mine.retile(registers))


def second_factor(mma: Any, tiles: Any) -> Any:
    """Tiles in shared memory as the second factor of a product."""
    return mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(tiles))


@cute.jit
def issue(mma, acc, a, b, accumulate: cutlass.Constexpr, first: cutlass.Constexpr = 0, end: cutlass.Constexpr = None):
    """Issue acc (+)= a b as one group of asynchronous products, of all blocks of what is summed or of some."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    count = cutlass.const_expr(cute.size(a, mode=[2]))
    for i in cutlass.range_constexpr(first, count if end is None else end):
        cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
