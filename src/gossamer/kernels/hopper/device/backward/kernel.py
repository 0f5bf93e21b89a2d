"""The column kernel of the backward: warp-specialised, persistent, one walk of a layout's columns.

Warp 0 takes work items and keeps the rings of Q (with lse) and dO (with delta) filled by TMA; a stage of Q carries a
description of its step. Warps 1 and 2 send what the two other warpgroups leave in shared memory: dQ of every step by
bulk reduction, dK and dV at the end of an item. Each of those owns 64 keys: S^T = K Q^T, dP^T = V dO^T, then
dV += P^T dO and dK += dS^T Q with P^T and dS^T from registers. dQ = dS K needs the dS of both: it goes through shared
memory, and each computes half of dQ, one step later. Tiles of 64 x 64 have one consumer warpgroup and no dQ.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute.clearing import landing_of
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, RingPair
from gossamer.cute.row_items import ITEM
from gossamer.cute.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout, tma
from gossamer.kernels.hopper.device.backward.block import ColumnArguments, ColumnBlock, TileColumnBlock
from gossamer.kernels.hopper.device.backward.common import STAGES, STEP
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.backward.masks import TileColumnMasks
from gossamer.kernels.hopper.device.backward.pair import PairConsumer
from gossamer.kernels.hopper.device.backward.produce import ColumnWork, Producer
from gossamer.kernels.hopper.device.backward.send import Sender
from gossamer.kernels.hopper.device.configurations import BackwardConfig


class ColumnKernel(Shell):
    """What the kernels of dK and dV over tiles have in common: arguments, and the warp that loads."""

    config: Any
    block_class: type[ColumnBlock] = TileColumnBlock
    stages: tuple[int, int]  # of the rings of Q and dO
    readers: tuple[int, int, int, int]  # arrivals that empty K, V, a stage of Q and one of dO
    ahead = 0  # descriptions of items for warps that gather
    exchanged = 0  # words of shared memory, for what warps or warpgroups tell one another
    pieces = 0  # of 64 keys, each an item of its own, of an item that is listed; 0: it is one item

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dq_sum: cute.Tensor,
        ds: cute.Tensor | None, dk: cute.Tensor, dv: cute.Tensor, work: cute.Tensor, segments: cute.Tensor,
        lists: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor, pool: cute.Tensor, part_dk: cute.Tensor,
        part_dv: cute.Tensor, lengths: cute.Tensor | None, tile_counter: cute.Tensor, before: Float32,
        exponent: Float32, factor: Float32, items: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `ColumnArguments`, but `items` are those that are listed."""
        c, held = self.config, self.layouts()
        arguments = ColumnArguments(
            q=tma(q, ROWS, c.D), k=tma(k, c.block_kv, c.D, layout=cute.select(held["k"], mode=[0, 1])),
            v=tma(v, c.block_kv, c.E), dout=tma(dout, ROWS, c.E), dk=tma(dk, ROWS, c.D, store=True),
            dv=tma(dv, ROWS, c.E, store=True), terms=terms, dq_sum=None if self.pieces else dq_sum, ds=ds,
            work=work,
            segments=segments, lists=lists, lo=lo, hi=hi, pool=pool, part_dk=part_dk, part_dv=part_dv, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, factor=factor,
            items=items * (self.pieces or 1),
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> dict[str, Any]:
        """Of the tiles in shared memory."""
        c, dtype = self.config, NUMBERS[self.config.dtype]
        q_stages, do_stages = self.stages
        # Half of 96 columns, which dQ takes from K, would end within a wider swizzle.
        within = c.D // 2 if c.D == 96 and c.block_kv == 128 else 0
        return {
            "k": tile_layout(dtype, c.block_kv, c.D, 1, within), "v": tile_layout(dtype, c.block_kv, c.E, 1),
            "q": tile_layout(dtype, c.step, c.D, q_stages), "dout": tile_layout(dtype, c.step, c.E, do_stages),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        c, (q_stages, do_stages) = self.config, self.stages
        tiles = {name: tile_memory(NUMBERS[c.dtype], layout) for name, layout in self.layouts().items()}
        return {
            **barriers(q=q_stages, do=do_stages, ahead=self.ahead, k=1, v=1, landed=int(c.clears > 0)),
            "item": array(Int32, ITEM), "ahead": array(Int32, ITEM * self.ahead),
            "steps": array(Int32, STEP * c.step // ROWS * q_stages), "lse": array(Float32, c.step * q_stages, 128),
            "delta": array(Float32, c.step * do_stages, 128), "exchanged": array(Int32, self.exchanged, 128), **tiles,
        }  # fmt: skip

    def block(self, arguments: Any, memory: Any) -> Any:
        c, a, halves = self.config, arguments, self.config.step // ROWS
        (q_stages, do_stages), (k_readers, v_readers, q_readers, do_readers) = self.stages, self.readers
        held = {f"s_{name}": tiles(getattr(memory, name), layout) for name, layout in self.layouts().items()}
        k, v = items_of(memory, "k", 1, k_readers), ring_of(memory, "v", 1, 1, v_readers)
        q = ring_of(memory, "q", q_stages, halves, q_readers)
        dout = ring_of(memory, "do", do_stages, halves, do_readers)
        landing = landing_of(memory, c.clears)
        return self.block_class(
            config=c, arguments=a, k=k, v=v, q=q, dout=dout, **held,
            rings=((RingPair(k, v),), (q,), (dout,), *[(landing,)] * (landing is not None)), landing=landing,
            item=k.item[None, 0], keys=self.keys(a),
            steps=words(memory.steps, STEP, halves * q_stages), lse=words(memory.lse, ROWS, halves * q_stages),
            delta=words(memory.delta, ROWS, halves * do_stages), s_dk=held["s_k"], s_dv=held["s_v"],
        )  # fmt: skip

    def keys(self, arguments: Any) -> Any:
        """How many there are of a head."""
        return cute.size(arguments.k.tensor, mode=[0])

    def prepared(self, block: Any) -> Any:
        """With the number of queries, and of query heads of a key head."""
        q, k = block.arguments.q.tensor, block.arguments.k.tensor
        block.queries, block.ratio = cute.size(q, mode=[0]), cute.size(q, mode=[2]) // cute.size(k, mode=[2])
        return block

    def produce(self, block: TileColumnBlock) -> None:
        """The warp that loads."""
        a = block.arguments
        work = ColumnWork(a.work, a.tile_counter, a.items, a.lengths, block.keys, self.config, self.pieces)
        Producer(block, work).produce()


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
        self.stages = c.q_stages, c.do_stages
        # Where K and V make room for dK and dV, who sends these gives them back.
        self.readers = (1, 1, 4, 4) if c.single else (8 + 2, 8, 8 + 2 * c.with_dq, 8)

    def layouts(self) -> dict[str, Any]:
        c, found = self.config, super().layouts()
        if c.with_dq:  # dS of each step, for dQ
            found["ds"] = tile_layout(NUMBERS[c.dtype], c.step, c.block_kv, STAGES)
        return found

    def memory(self) -> dict[str, Any]:
        c, dtype = self.config, NUMBERS[self.config.dtype]
        if c.single:
            return super().memory()
        return super().memory() | {
            "staging": array(Float32, c.step * c.D, 1024),
            "out": array(dtype, 0 if c.step > ROWS else c.block_kv * c.E, 1024),
        }

    def block(self, arguments: ColumnArguments, memory: Any) -> TileColumnBlock:
        """dK takes the place of a warpgroup's dQ, or of K; dV the rest of that place, its own, or that of V."""
        c, dtype = self.config, NUMBERS[self.config.dtype]
        block: TileColumnBlock = super().block(arguments, memory)
        dk, dv = tile_layout(dtype, ROWS, c.D), tile_layout(dtype, ROWS, c.E)
        apart = c.step * c.D  # of warpgroups, in staging memory
        dk_at, dv_at, dv_apart = memory.k.data_ptr(), memory.v.data_ptr(), ROWS * c.E
        if not c.single:
            dk_at, dv_at = memory.staging.data_ptr(), memory.out.data_ptr()
        if c.step > ROWS:
            dv_at, dv_apart = memory.staging.data_ptr() + ROWS * c.D // 2, apart
        dk_outer = cute.append(dk.outer, cute.make_layout(self.groups, stride=apart))
        dv_outer = cute.append(dv.outer, cute.make_layout(self.groups, stride=dv_apart))
        block.s_dk = cute.make_tensor(cute.recast_ptr(dk_at, dk.inner, dtype=dtype), dk_outer)
        block.s_dv = cute.make_tensor(cute.recast_ptr(dv_at, dv.inner, dtype=dtype), dv_outer)
        if c.with_dq:
            shares = 4, WARPGROUP, c.step * c.D // 2 // (4 * WARPGROUP), self.groups
            block.staging = words(memory.staging, *shares)
        return block

    @cute.jit
    def serve(self, block, warp):
        """One warp loads, one sends the results of each computing warpgroup."""
        if warp == 0:
            self.produce(block)
        elif warp <= self.groups:
            Sender(block, warp - 1).send(self.groups, self.config.with_dq)

    @cute.jit
    def compute(self, block):
        kind = ColumnConsumer if const_expr(self.config.single) else PairConsumer
        kind(block, TileColumnMasks(block)).consume()
