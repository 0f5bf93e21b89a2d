"""The parameters of the backward kernels of block layouts, and what the roles of a block share."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.clearing import Landing
from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import Block, Ring
from gossamer.cute.tiles import Tma
from gossamer.cute.work import ItemRing


class ColumnArguments(NamedTuple):
    """The parameters of the column kernels of block layouts. Tiles and pool entries have `block_kv` keys."""

    q: Tma  # (B, H, Q, D)
    k: Tma  # (B, G, K, D)
    v: Tma  # (B, G, K, E)
    dout: Tma  # (B, H, Q, E)
    dk: Tma  # (B, G, K, D)
    dv: Tma  # (B, G, K, E)
    terms: cute.Tensor  # (2, B, H, Qp) float32: lse in base 2, delta
    dq_sum: cute.Tensor | None  # (B, H, Qp / 64, 64 * D) float32; wide heads have none
    ds: cute.Tensor | None  # (pairs of tiles, 64 * 64): dS as `keep` has it, where the configuration keeps it
    work: cute.Tensor  # (n, ITEM) int32, see `ColumnItem`
    segments: cute.Tensor  # (m, SEGMENT) int32
    lists: cute.Tensor  # (1 to 3, entries) int32: tile row; pool entry where there are tiles of bits; place of dS
    lo: cute.Tensor  # (Bl * Hl, K) int32: the first query that a key keeps
    hi: cute.Tensor  # the one behind the last
    pool: cute.Tensor  # (P * keys of a tile, block_q / 32) int32: a bit a pair
    part_dk: cute.Tensor  # (slots, keys of a tile, D) float32
    part_dv: cute.Tensor  # (slots, keys of a tile, E) float32
    lengths: cute.Tensor | None  # (B,) int32, None without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    before: Float32  # factor of a score before the soft cap
    exponent: Float32  # factor of a score in exp2
    factor: Float32  # of dK: the scale
    items: Int32  # that are drawn


class ColumnBlock(Block):
    """What the roles of a column kernel share, of tiles or of gathered rows."""

    k: ItemRing  # one stage: K, with the description of its item
    v: Ring  # one stage
    q: Ring  # Q of a step, with `steps` and `lse`
    dout: Ring  # dO of a step, with `delta`
    s_k: cute.Tensor  # (block_kv, D, 1)
    s_v: cute.Tensor  # (block_kv, E, 1)
    s_q: cute.Tensor  # (step, D, stages)
    s_dout: cute.Tensor  # (step, E, stages)
    s_dk: cute.Tensor  # (64, D, warpgroups): dK of each warpgroup, in 16 bits, before it leaves by TMA
    s_dv: cute.Tensor  # (64, E, warpgroups)
    item: cute.Tensor  # (ITEM,) int32: the description of the item
    steps: cute.Tensor  # (STEP, halves of stages) int32: descriptions, see `Step`
    lse: cute.Tensor  # (64, halves of stages) float32
    delta: cute.Tensor  # (64, halves of stages) float32
    keys: Int32  # K
    ratio: Int32  # query heads of a key head
    landing: Landing | None = None  # of tiles that are cleared, where the configuration `clears`

    @property
    def attended(self) -> Any:
        """Keys of the item's batch element that are attended at all."""
        return self.item[ColumnItem.KEYS] if self.config.lengths else self.keys


class TileColumnBlock(ColumnBlock):
    """Of block layouts. The last two are there where the kernel adds dQ."""

    arguments: ColumnArguments
    queries: Int32  # Q
    s_ds: cute.Tensor  # (step, block_kv, STAGES)
    staging: cute.Tensor  # (4, thread, vectors, warpgroup) float32: shares of dQ


class WideBlock(TileColumnBlock):
    """Of wide heads."""

    p: cute.Tensor  # (4, thread, vectors, stages) int32: P of a step, in 16 bits


class QueryArguments(NamedTuple):
    """The parameters of the kernel of dQ by rows."""

    q: Tma  # (B, H, Q, D)
    dout: Tma  # (B, H, Q, E)
    k: Tma  # (B, G, K, D)
    v: Tma  # (B, G, K, E)
    dq: Tma  # (B, H, Q, D)
    terms: cute.Tensor  # (2, B, H, Qp) float32: lse in base 2, delta
    work: cute.Tensor  # (n, ITEM) int32, as for the forward
    lists: cute.Tensor  # (1 or 2, entries) int32: tile column; pool entry where there are tiles of bits
    lo: cute.Tensor  # (Bl * Hl, Q) int32: the first key that a row keeps
    hi: cute.Tensor  # the one behind the last
    pool: cute.Tensor  # (P * block_q, block_kv / 32) int32: a bit a pair
    part_dq: cute.Tensor  # (slots, block_q, D) float32, without the scale
    lengths: cute.Tensor | None  # (B,) int32, None without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    before: Float32  # factor of a score before the soft cap
    exponent: Float32  # factor of a score in exp2
    factor: Float32  # the scale
    items: Int32  # of `work`


class QueryBlock(Block):
    """What the roles of a kernel of dQ share, of tiles or of gathered columns."""

    q: ItemRing  # one stage: an item with its Q and dO, and room for its dQ
    k: Ring
    v: Ring
    s_q: cute.Tensor  # (64, D, warpgroups)
    s_dout: cute.Tensor  # (64, E, warpgroups)
    s_k: cute.Tensor  # (step, D, stages)
    s_v: cute.Tensor  # (step, E, stages)
    item: cute.Tensor  # (ITEM,) int32: the description of the item
    landing: Landing | None = None  # of tiles that are cleared, where the configuration `clears`


class TileQueryBlock(QueryBlock):
    """Of block layouts."""

    arguments: QueryArguments
