"""The column kernel of the backward: warp-specialised, persistent, one walk of a layout's columns.

Warp 0 takes work items and keeps the rings of Q (with lse) and dO (with delta) filled by TMA; a stage of Q carries a
description of its step. Warps 1 and 2 send what the two other warpgroups leave in shared memory: dQ of every step by
bulk reduction, dK and dV at the end of an item. Each of those owns 64 keys: S^T = K Q^T, dP^T = V dO^T, then
dV += P^T dO and dK += dS^T Q with P^T and dS^T from registers. dQ = dS K needs the dS of both: it goes through shared
memory, and each computes half of dQ, one step later. Tiles of 64 x 64 have one consumer warpgroup and no dQ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device.backward.column_masks import TileColumnMasks
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.backward.fields import STAGES, STEP
from gossamer.kernels.hopper.device.backward.pair import PairConsumer
from gossamer.kernels.hopper.device.backward.produce import ColumnWork, Producer, Sender
from gossamer.kernels.hopper.device.backward.warpgroup import Factors, Lists
from gossamer.kernels.hopper.device.column_items import ColumnItem
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Opaque, Ring, RingPair, computing_thread
from gossamer.kernels.hopper.device.configurations import BackwardConfig
from gossamer.kernels.hopper.device.row_items import ITEM
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, ring_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import Tma, tile_layout, tma


class Arguments(NamedTuple):
    """Parameters of the kernel, in order."""

    q: Tma
    k: Tma
    v: Tma
    dout: Tma
    dk: Tma
    dv: Tma
    terms: cute.Tensor
    dq_sum: cute.Tensor | None
    items: cute.Tensor
    segments: cute.Tensor
    lists: Lists
    part_dk: cute.Tensor
    part_dv: cute.Tensor
    lengths: cute.Tensor | None
    tile_counter: cute.Tensor
    factors: Factors
    count: Int32


class Tiles(NamedTuple):
    """In shared memory, or their layouts there."""

    k: Any
    v: Any
    q: Any
    dout: Any


@dataclass(frozen=True, eq=False)
class Block(Opaque):
    """What the roles of a block share."""

    config: Any
    arguments: Any
    item: cute.Tensor
    steps: cute.Tensor  # descriptions, see `Step`
    lse: cute.Tensor  # (64, stages), beside Q
    delta: cute.Tensor  # beside dO
    k: Ring  # of items, as that of V
    v: Ring
    q: Ring
    dout: Ring
    tiles: Any
    dk: cute.Tensor  # where 64 rows of dK of each warpgroup leave the block, in 16 bits
    dv: cute.Tensor
    queries: Int32
    keys: Int32
    ratio: Any = None  # query heads of a key head
    ds: Any = None  # (step, 128, STAGES), for dQ
    staging: Any = None  # (4, thread, vectors, warpgroup) float32: shares of dQ
    p: Any = None  # of wide heads, from warpgroup to warpgroup

    @property
    def rings(self) -> Any:
        return (RingPair(self.k, self.v),), (self.q,), (self.dout,)

    @property
    def attended(self) -> Any:
        """Keys of the item's batch element that are attended at all."""
        return self.item[ColumnItem.KEYS] if self.config.lengths else self.keys


class ColumnKernel(Shell):
    """What the kernels of dK and dV over tiles have in common: arguments, and the warp that loads."""

    config: Any
    readers: tuple[int, int, int, int]  # arrivals that empty K, V, a stage of Q and one of dO
    pieces = 0  # of 64 keys, each an item of its own, of an item that is listed; 0: it is one item

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32
        dq_sum: cute.Tensor,  # (B, H, Qp / 64, 64 * D) float32; wide heads leave it alone
        dk: cute.Tensor,  # (B, G, K, D)
        dv: cute.Tensor,  # (B, G, K, E)
        work: cute.Tensor,  # (n, ITEM) int32
        segments: cute.Tensor,  # (m, SEGMENT) int32
        lists: cute.Tensor,  # (2, entries): tile column; pool entry
        lo: cute.Tensor,  # (Bl * Hl, K)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * rows of a tile, block_q / 32)
        part_dk: cute.Tensor,  # (slots, rows of a tile, D) float32
        part_dv: cute.Tensor,  # (slots, rows of a tile, E) float32
        lengths: cute.Tensor | None,  # (B,) int32, None without `lengths` in the configuration
        tile_counter: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # factor of dK
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c, held = self.config, self.layouts()
        self.launch(
            Arguments(
                tma(q, ROWS, c.D), tma(k, c.block_kv, c.D, layout=cute.select(held.k, mode=[0, 1])),
                tma(v, c.block_kv, c.E), tma(dout, ROWS, c.E), tma(dk, ROWS, c.D, store=True),
                tma(dv, ROWS, c.E, store=True), terms, None if self.pieces else dq_sum, work, segments,
                Lists(lists, lo, hi, pool), part_dk, part_dv, lengths, tile_counter, Factors(before, exponent, factor),
                items * (self.pieces or 1),
            ),
            blocks, stream,
        )  # fmt: skip

    def layouts(self) -> Tiles:
        """Of the tiles in shared memory."""
        c, dtype = self.config, NUMBERS[self.config.dtype]
        # Half of 96 columns, which dQ takes from K, would end within a wider swizzle.
        within = c.D // 2 if c.D == 96 and c.block_kv == 128 else 0
        return Tiles(
            tile_layout(dtype, c.block_kv, c.D, 1, within), tile_layout(dtype, c.block_kv, c.E, 1),
            tile_layout(dtype, c.step, c.D, c.q_stages), tile_layout(dtype, c.step, c.E, c.do_stages),
        )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        return self.word_memory() | self.tile_memory()

    def word_memory(self) -> dict[str, Any]:
        """Barriers, descriptions and row terms."""
        c, halves = self.config, self.config.step // ROWS
        return {
            **barriers(q=c.q_stages, do=c.do_stages, k=1, v=1),
            "item": array(Int32, ITEM),
            "steps": array(Int32, STEP * halves * c.q_stages),
            "lse": array(Float32, c.step * c.q_stages, 128),
            "delta": array(Float32, c.step * c.do_stages, 128),
        }

    def tile_memory(self) -> dict[str, Any]:
        dtype = NUMBERS[self.config.dtype]
        return {name: tile_memory(dtype, layout) for name, layout in self.layouts()._asdict().items()}

    def block(self, arguments: Arguments, memory: Any) -> Block:
        c, a, halves = self.config, arguments, self.config.step // ROWS
        k_readers, v_readers, q_readers, do_readers = self.readers
        held = Tiles(*[tiles(getattr(memory, name), x) for name, x in self.layouts()._asdict().items()])
        dk, dv = self.results(memory)
        return Block(
            config=c, arguments=a, tiles=held, dk=dk, dv=dv,
            item=words(memory.item, ITEM), steps=words(memory.steps, STEP, halves * c.q_stages),
            lse=words(memory.lse, ROWS, halves * c.q_stages), delta=words(memory.delta, ROWS, halves * c.do_stages),
            k=ring_of(memory, "k", 1, 1, k_readers), v=ring_of(memory, "v", 1, 1, v_readers),
            q=ring_of(memory, "q", c.q_stages, halves, q_readers),
            dout=ring_of(memory, "do", c.do_stages, halves, do_readers),
            queries=cute.size(a.q.tensor, mode=[0]), keys=cute.size(a.k.tensor, mode=[0]),
            **self.exchanged(memory),
        )  # fmt: skip

    def prepared(self, block: Block) -> Block:
        a = block.arguments
        return replace(block, ratio=cute.size(a.q.tensor, mode=[2]) // cute.size(a.k.tensor, mode=[2]))

    def results(self, memory: Any) -> tuple[Any, Any]:
        """Where dK and dV leave the block."""
        raise NotImplementedError

    def exchanged(self, memory: Any) -> dict[str, Any]:
        """What warpgroups tell one another."""
        return {}

    def produce(self, block: Block) -> None:
        """The warp that loads."""
        a = block.arguments
        work = ColumnWork(a.items, a.tile_counter, a.count, a.lengths, block.keys, self.config, self.pieces)
        Producer(self.config, block, work).produce()


class Backward(ColumnKernel):
    """The kernel of one configuration."""

    config: BackwardConfig

    def __init__(self, config: BackwardConfig) -> None:
        self.config = c = config
        self.groups = c.block_kv // ROWS
        self.threads = WARPGROUP * (self.groups + 1)
        self.registers = 24, 232 if c.single else 240
        self.blocks = c.blocks
        self.carveout = 100 if self.blocks > 1 else None
        self.sends_dq = c.with_dq and c.reduce == "bulk"
        # Where K and V make room for dK and dV, who sends these gives them back.
        self.readers = (1, 1, 4, 4) if c.single else (8 + 2, 8, 8 + 2 * self.sends_dq, 8)

    def memory(self) -> dict[str, Any]:
        c, dtype = self.config, NUMBERS[self.config.dtype]
        if c.single:
            return super().memory()
        ds = cute.cosize(self.ds_layout()) if c.with_dq else 0
        return super().memory() | {
            "ds": array(dtype, ds, 1024),
            "staging": array(Float32, c.step * c.D, 1024),
            "out": array(dtype, 0 if c.step > ROWS else c.block_kv * c.E, 1024),
        }

    def ds_layout(self) -> Any:
        return tile_layout(NUMBERS[self.config.dtype], self.config.step, self.config.block_kv, STAGES)

    def results(self, memory: Any) -> tuple[Any, Any]:
        """dK takes the place of a warpgroup's dQ, or of K; dV the rest of that place, its own, or that of V."""
        c, dtype = self.config, NUMBERS[self.config.dtype]
        dk, dv = tile_layout(dtype, ROWS, c.D), tile_layout(dtype, ROWS, c.E)
        apart = c.step * c.D  # of warpgroups, in staging memory
        dk_at, dv_at, dv_apart = memory.k.data_ptr(), memory.v.data_ptr(), ROWS * c.E
        if not c.single:
            dk_at, dv_at = memory.staging.data_ptr(), memory.out.data_ptr()
        if c.step > ROWS:
            dv_at, dv_apart = memory.staging.data_ptr() + ROWS * c.D // 2, apart
        dk_outer = cute.append(dk.outer, cute.make_layout(self.groups, stride=apart))
        dv_outer = cute.append(dv.outer, cute.make_layout(self.groups, stride=dv_apart))
        return (
            cute.make_tensor(cute.recast_ptr(dk_at, dk.inner, dtype=dtype), dk_outer),
            cute.make_tensor(cute.recast_ptr(dv_at, dv.inner, dtype=dtype), dv_outer),
        )

    def exchanged(self, memory: Any) -> dict[str, Any]:
        if not self.config.with_dq:
            return {}
        vectors = self.config.step * self.config.D // 2 // (4 * WARPGROUP)
        staging = words(memory.staging, 4, WARPGROUP, vectors, self.groups)
        return {"ds": tiles(memory.ds, self.ds_layout()), "staging": staging}

    @cute.jit
    def serve(self, block, warp):
        """One warp loads, one sends the results of each computing warpgroup."""
        if warp == 0:
            self.produce(block)
        elif warp <= self.groups:
            Sender(self.config, block, warp - 1).send(self.groups, self.sends_dq)

    @cute.jit
    def compute(self, block):
        masks = TileColumnMasks(self.config, computing_thread(), block)
        if const_expr(self.config.single):
            ColumnConsumer(self.config, block, masks).consume()
        else:
            PairConsumer(self.config, block, masks).consume()
