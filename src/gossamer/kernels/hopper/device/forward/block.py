"""The parameters of the forward kernel, and what the roles of a block of the forward kernels share."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.clearing import Landing
from gossamer.cute.common import Block, Ring
from gossamer.cute.tiles import Tma
from gossamer.cute.work import ItemRing


class ForwardArguments(NamedTuple):
    """The parameters of the forward kernel of block layouts."""

    q: Tma  # (B, H, Q, D)
    k: Tma  # (B, G, K, D)
    v: Tma  # (B, G, K, E)
    out: Tma  # (B, H, Q, E)
    lse: cute.Tensor  # (B, H, Q) float32
    work: cute.Tensor  # (n, ITEM) int32, see `RowItem`
    lists: cute.Tensor  # (1 or 2, entries) int32: tile column; pool entry where there are tiles of bits
    lo: cute.Tensor  # (Bl * Hl, Q) int32: the first key that a row keeps
    hi: cute.Tensor  # the one behind the last
    pool: cute.Tensor  # (P * block_q, block_kv / 32) int32: a bit a pair
    sinks: cute.Tensor  # (H,) float32
    part_out: cute.Tensor  # (slots, block_q, E) float32
    part_lse: cute.Tensor  # (slots, block_q) float32
    lengths: cute.Tensor  # (B,) int32; not read without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    before: Float32  # factor of a score before the soft cap, or one that is not positive
    exponent: Float32  # factor of a score in exp2
    items: Int32  # of `work`
    has_sinks: Int32


class RowBlock(Block):
    """What the roles of a forward kernel share, of tiles or of gathered columns."""

    items: ItemRing  # descriptions, with Q
    k: Ring
    v: Ring
    s_q: cute.Tensor  # (64, D, stages): a tile for each warpgroup in each stage
    s_k: cute.Tensor  # (step, D, stages)
    s_v: cute.Tensor  # (step, E, stages)
    landing: Landing | None = None  # of tiles that are cleared, where the configuration `clears`


class StoringBlock(RowBlock):
    """Of kernels whose results leave by TMA."""

    s_o: cute.Tensor  # (64, E, stages): results, in the place of Q
    bounds: cute.Tensor | None = None  # (block_q, 2, stages) int32: intervals of an item's rows, where there are any


class ForwardBlock(StoringBlock):
    """Of block layouts."""

    arguments: ForwardArguments
