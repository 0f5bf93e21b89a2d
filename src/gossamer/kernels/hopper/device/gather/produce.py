"""What the kernels that walk gathered rows do beside arithmetic: items, and the two warps that gather.

A thread copies 16 bytes of a row at a time (cp.async), to where the 128-byte swizzle of the products wants them, and
arrives at the stage's barrier when its copies are complete. Those are writes of the generic proxy: a consumer that has
waited for the barrier makes them visible to the products by a proxy fence.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import LayoutEnum

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import Env, load_item, ring, ticket, within_keys
from gossamer.kernels.hopper.device.forward.produce import Producer
from gossamer.kernels.hopper.device.gather.configurations import ROWS
from gossamer.kernels.hopper.device.row_items import (
    BATCH,
    BITS,
    BITSES,
    FIRST,
    FULLS,
    HEAD,
    INTERVALS,
    ITEM,
    TILE,
    VALID,
)

WORD = 32  # columns of a mask word
WORDS = 2 * ROWS  # of a step
PIECE = 16  # bytes of a copy
THREADS = 64  # that gather
PIECES = 8  # of a line
AT_ONCE = THREADS // PIECES  # rows
COPIES = ROWS // AT_ONCE  # rows of a stage that a thread copies from
AHEAD = 2  # descriptions of items, where the warps that gather have their own
LINE = 128  # bytes of a row that lie together in shared memory, their pieces permuted by the row


@dsl_user_op
def copy(
    to: Int32, start: Int64, row: Int32, stride: Int32, past: Boolean | bool, size: int, place: int = 0, line: int = 0,
    *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Copy `size` bytes of a row, `line` bytes from where it starts, to `place` bytes behind `to`, asynchronously.

    Nothing is read, and zeros are written, for a negative row, and where the copied columns are `past` the last one.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int32(to), Int64(start), Int32(row), Int32(stride), Boolean(past))]
    cached = "cg" if size == PIECE else "ca"
    llvm.inline_asm(
        None, operands,
        "{ .reg .pred p; .reg .b64 a; setp.lt.or.s32 p, $2, 0, $4; mad.wide.s32 a, $2, $3, $1; "
        f"cp.async.{cached}.shared.global [$0 + {place}], [a + {line}], {size}, p; }}",
        "r,l,r,r,b", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def smem_layout(kernel: Any, stages: int, columns: int | None = None) -> Any:
    """Tiles of 64 rows in shared memory."""
    size = columns or kernel.config.size
    atom = warpgroup.make_smem_layout_atom(
        hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kernel.dtype, size), kernel.dtype
    )
    return cute.tile_to_shape(atom, (ROWS, size, stages), (0, 1, 2))


def row_products(kernel: Any) -> tuple[Any, Any]:
    """S (64 rows by 64 columns), and what its 16 bits in registers are multiplied into (64 by the head size)."""
    major, one = cute.nvgpu.OperandMajorMode, (1, 1, 1)
    scores = hopper.make_trivial_tiled_mma(
        kernel.dtype, kernel.dtype, major.K, major.K, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, ROWS)
    )
    results = hopper.make_trivial_tiled_mma(
        kernel.dtype, kernel.dtype, major.K, major.MN, Float32, atom_layout_mnk=one,
        tiler_mn=(ROWS, kernel.config.size), a_source=warpgroup.OperandSource.RMEM,
    )  # fmt: skip
    return scores, results


def whole_tiles(tma: Any, shared: Any, source: Any, size: int) -> tuple[Any, Any]:
    """(to, from) of TMA loads of tiles of 64 rows."""
    tiles = cute.local_tile(source, (ROWS, size), (None, 0, None, None))
    return cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


@cute.jit
def role_of(warp_index, blocks: cutlass.Constexpr):
    """What a warp of the first warpgroup does: 0 and 1 serve, 2 and 3 gather.

    Warps of the same index share a scheduler, and those that gather issue most. So they are others in every other one
    of the `blocks` of a multiprocessor, which are as far apart as there are multiprocessors.
    """
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    return cute.arch.make_warp_uniform(warp_index ^ ((block * blocks // grid) & 1) * 2)


@cute.jit
def init_rings(bars, stages: cutlass.Constexpr):
    """Barriers of the rings of K and V."""
    for i in cutlass.range_constexpr(stages):
        for full, empty in ((bars.k_full, bars.k_empty), (bars.v_full, bars.v_empty)):
            cute.arch.mbarrier_init(full + i, THREADS)
            cute.arch.mbarrier_init(empty + i, 4)


def told_of(storage: Any) -> Env:
    """Descriptions of items for the warps that gather, with their barriers."""
    return Env(
        item=cute.make_tensor(storage.told.data_ptr(), cute.make_layout((ITEM, AHEAD))),
        full=storage.told_full.data_ptr(), empty=storage.told_empty.data_ptr(), stages=AHEAD,
    )  # fmt: skip


@cute.jit
def init_told(told):
    """Barriers of those descriptions."""
    for i in cutlass.range_constexpr(AHEAD):
        cute.arch.mbarrier_init(told.full + i, 1)
        cute.arch.mbarrier_init(told.empty + i, THREADS // 32)


@cute.jit
def step_words(env, words, slot, at, lengths: cutlass.Constexpr):
    """The mask words of step `at` of all lists, from `slot` of the ring, shifted to this thread's columns."""
    for n in cutlass.range_constexpr(ROWS // WORD):
        for r in cutlass.range_constexpr(instructions.ROWS):
            words[r, n] = Int32(cutlass.Uint32(env.pool[env.my_row + 8 * r, n, slot]) >> cutlass.Uint32(env.quad))
        if const_expr(lengths):
            within = instructions.below(env.length[0] - at * ROWS - n * WORD)
            for r in cutlass.range_constexpr(instructions.ROWS):
                words[r, n] = words[r, n] & within


class Filled:
    """A consumer of gathered stages."""

    @cute.jit
    def filled(self, bar, phase):
        """Wait until a stage was gathered, and make it visible to the products."""
        cute.arch.mbarrier_wait(bar, phase)
        cute.arch.fence_view_async_shared()


class Gatherer:
    """Two warps of which each thread copies the same piece of each line of eight of a stage's 64 rows."""

    config: Any

    def source(self, tensor: Any, shared: Any, thread: Any) -> Any:
        """What a thread needs to know of a tensor (B, heads, rows, columns) and the ring that its rows go to."""
        piece, row = thread % PIECES, thread // PIECES
        # A row may end before the padded size: with a piece, since its columns are a multiple of 8.
        past = [LINE * line + PIECE * piece >= 2 * cute.size(tensor, mode=[3]) for line in range(self.lines)]
        return Env(
            tensor=tensor, row=row, piece=piece, past=past, to=shared.toint() + row * LINE + (piece ^ row) * PIECE,
            stride=Int32(2 * tensor.stride[2]),
        )  # fmt: skip

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.config.size * 2 // LINE

    def start(self, source: Any, batch: Any, head: Any) -> Any:
        """The address of this thread's piece of row 0 of a head."""
        strides = source.tensor.stride
        at = 2 * (Int64(batch) * strides[0] + Int64(head) * strides[1])
        return source.tensor.iterator.toint() + at + PIECE * source.piece

    @cute.jit
    def listed(self, indices, row, first, to):
        """The columns of this thread's rows of the step whose list begins at `first`."""
        for j in cutlass.range_constexpr(COPIES):
            to[j] = indices[first + row + j * AT_ONCE]

    @cute.jit
    def fill(self, source, start, columns, stage):
        """Issue this thread's copies of a stage; rows that the list does not fill become zero."""
        to = source.to + stage * (ROWS * LINE * self.lines)
        for j in cutlass.range_constexpr(COPIES):
            for line in cutlass.range_constexpr(self.lines):
                place = const_expr((j * AT_ONCE + line * ROWS) * LINE)
                copy(to, start, columns[j], source.stride, source.past[line], PIECE, place, line * LINE)

    @cute.jit
    def fill_words(self, bits, shared, step, slot, thread):
        """Copy the words of a step: as many pieces as half of the threads."""
        if thread < WORDS * 4 // PIECE:
            from_ = bits.iterator.toint() + thread * PIECE
            to = shared.iterator.toint() + slot * (4 * WORDS) + thread * PIECE
            copy(to, from_, step, Int32(4 * WORDS), False, PIECE)

    @cute.jit
    def gather(self, k, v, s_k, s_v, bars, told, indices, bits, s_bits, ratio):
        """Fill the rings of K and V for item after item, as `told` says: its descriptions and their barriers."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        keys, values = self.source(k, s_k, thread), self.source(v, s_v, thread)
        columns, upcoming = cute.make_rmem_tensor((COPIES,), Int32), cute.make_rmem_tensor((COPIES,), Int32)
        upcoming.fill(-1)
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        cute.arch.mbarrier_wait(told.full, 0)
        running = told.item[VALID, 0]
        while running != 0:
            place = ring(turn, told.stages)[0]
            batch, group = told.item[BATCH, place], told.item[HEAD, place] // ratio
            at, steps = told.item[BITS, place], told.item[BITSES, place]
            self.heard(told, place)
            k_start, v_start = self.start(keys, batch, group), self.start(values, batch, group)
            if steps > 0:
                self.listed(indices, keys.row, at * ROWS, upcoming)
            for i in cutlass.range(steps, unroll=1):
                for j in cutlass.range_constexpr(COPIES):
                    columns[j] = upcoming[j]
                if i + 1 < steps:
                    self.listed(indices, keys.row, (at + i + 1) * ROWS, upcoming)
                stage, phase = ring(kv, c.stages)
                cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)
                self.fill(keys, k_start, columns, stage)
                self.fill_words(bits, s_bits, at + i, ring(kv, 2 * c.stages)[0], thread)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars.k_full + stage)
                cute.arch.mbarrier_wait(bars.v_empty + stage, phase ^ 1)
                self.fill(values, v_start, columns, stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars.v_full + stage)
                kv += 1
            turn += 1
            place, phase = ring(turn, told.stages)
            cute.arch.mbarrier_wait(told.full + place, phase)
            running = told.item[VALID, place]

    @cute.jit
    def tell(self, told, turn, word):
        """Publish a description, a word of each lane, for the warps that gather."""
        place, phase = ring(turn, told.stages)
        lane = cute.arch.lane_idx()
        cute.arch.mbarrier_wait(told.empty + place, phase ^ 1)
        if lane < ITEM:
            told.item[lane, place] = word
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(told.full + place)

    @cute.jit
    def heard(self, told, place):
        """This warp has read a description."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(told.empty + place)


class Places(Env):
    """The lists of a walk of gathered columns: steps follow one another in them."""

    def __getitem__(self, key: Any) -> Any:
        return key[1]


class Bits(Env):
    """Descriptions of items without full and interval tiles: what would walk those is left out of the kernel."""

    def __getitem__(self, key: Any) -> Any:
        field = key[0] if isinstance(key, tuple) else key
        return Int32(0) if field in (FULLS, INTERVALS) else self.item[key]


class Items:
    """Descriptions of items that walk gathered columns: as those of block layouts, with bits alone.

    BITS is the first step, counted over all lists, BITSES their number, FIRST the end of the list of columns.
    """

    config: Any
    listed_below = Producer.listed_below

    @cute.jit
    def draw(self, env, w):
        """This lane's word of the description of item `w`, its list cut at the length of its batch element."""
        word = load_item(env, w)
        if const_expr(self.config.lengths):
            lane = cute.arch.lane_idx()
            limit = within_keys(env.lengths[cute.arch.shuffle_sync(word, BATCH)])
            first = cute.arch.shuffle_sync(word, BITS) * ROWS
            kept = self.listed_below(env, first, cute.arch.shuffle_sync(word, FIRST) - first, limit)
            if lane == FIRST:
                word = first + kept
            if lane == BITSES:
                word = cute.ceil_div(kept, ROWS)
        return word


class Queries(Items):
    """Items that begin with their Q: of the forward kernels."""

    q_bytes: int

    @cute.jit
    def serve(self, env, tma_q, g_q, s_q, bars, item):
        """The warp that publishes items with their Q, as soon as there is room."""
        c = self.config
        to, from_ = whole_tiles(tma_q, s_q, g_q, c.size)
        lane = cute.arch.lane_idx()
        w, _, _ = cute.arch.block_idx()
        word = self.draw(env, w)
        turn, running = Int32(0), Int32(1)
        while running != 0:
            stage, phase = ring(turn, c.q_stages)
            cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
            if lane < ITEM:
                item[lane, stage] = word
            cute.arch.sync_warp()
            running = item[VALID, stage]
            bar = bars.q_full + stage
            if running != 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, self.q_bytes)
                at = from_[None, item[TILE, stage], item[HEAD, stage], item[BATCH, stage]]
                cute.copy(tma_q, at, to[None, stage], tma_bar_ptr=bar)
                word = self.draw(env, ticket(env))
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bar)
            turn += 1
