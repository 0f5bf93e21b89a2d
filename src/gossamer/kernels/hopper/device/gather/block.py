"""The parameters of the kernels of gather layouts, and what the roles of a block share.

What is gathered is a tensor in global memory, as it is; the rest is read and written by TMA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.tiles import Tma
from gossamer.cute.work import ItemRing
from gossamer.kernels.hopper.device.backward.block import ColumnBlock, QueryBlock
from gossamer.kernels.hopper.device.forward.block import RowBlock, StoringBlock


class GatherForwardArguments(NamedTuple):
    """The parameters of the forward kernel."""

    q: Tma | cute.Tensor  # (B, H, Q, D); a row source that is not of tiles has tensors as they are
    out: Tma | cute.Tensor  # (B, H, Q, E)
    k: cute.Tensor  # (B, G, K, D)
    v: cute.Tensor  # (B, G, K, E)
    lse: cute.Tensor  # (B, H, Q) float32
    work: cute.Tensor  # (n, ITEM) int32, see `RowItem`
    indices: cute.Tensor  # (columns,) int32
    bits: cute.Tensor  # (columns / 32, 64) int32: the words of a step, 32 columns of each row
    source: Any  # arrays of the row source; None of tiles
    sinks: cute.Tensor  # (H,) float32
    part_out: cute.Tensor  # (slots, 64, E) float32
    part_lse: cute.Tensor  # (slots, 64) float32
    lengths: cute.Tensor  # (B,) int32; not read without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    before: Float32  # factor of a score before the soft cap, or one that is not positive
    exponent: Float32  # factor of a score in exp2
    items: Int32  # of `work`
    has_sinks: Int32
    source_numbers: Any = None  # of the row source


class GatherForwardBlock(StoringBlock):
    """Of the forward kernel."""

    arguments: GatherForwardArguments
    ahead: ItemRing | None  # of the warps that gather, where they have their own
    s_words: cute.Tensor  # (64, 2, twice the stages) int32: of a step
    source: Any = None  # what the row source shares


class Float32Arguments(NamedTuple):
    """The parameters of the forward kernel for float32, after the kernel that splits K and V: see `SplitRows`."""

    q: Tma  # (B, H, Q, D) float32
    k: cute.Tensor  # (B, G, K, 2 size) float16
    v: cute.Tensor  # (B, G, K, 2 size) float16
    powers: cute.Tensor  # (B, G, K, 2) float32
    out: cute.Tensor  # (B, H, Q, E) float32
    lse: cute.Tensor  # (B, H, Q) float32
    # As of `GatherForwardArguments`.
    work: cute.Tensor
    indices: cute.Tensor
    bits: cute.Tensor
    sinks: cute.Tensor
    part_out: cute.Tensor
    part_lse: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    before: Float32
    exponent: Float32
    items: Int32
    has_sinks: Int32


class Float32Block(RowBlock):
    """Of the forward kernel for float32, whose results go to memory from registers."""

    arguments: Float32Arguments
    s_words: cute.Tensor  # (64, 2, twice the stages) int32: of a step
    s_powers: cute.Tensor  # (2, 64, twice the stages) float32: of a step's keys and values


class GatherQueryArguments(NamedTuple):
    """The parameters of the kernel of dQ."""

    q: Tma | cute.Tensor  # (B, H, Q, D); a row source that is not of tiles has tensors as they are
    dout: Tma | cute.Tensor  # (B, H, Q, E)
    dq: Tma | cute.Tensor  # (B, H, Q, D)
    source_result: Any  # what the row source writes besides; None of tiles
    k: cute.Tensor  # (B, G, K, D)
    v: cute.Tensor  # (B, G, K, E)
    terms: cute.Tensor  # (2, B, H, Qp) float32: lse in base 2, delta
    work: cute.Tensor  # (n, ITEM) int32, as for the forward
    indices: cute.Tensor  # (columns,) int32
    bits: cute.Tensor  # (columns / 32, 64) int32
    source: Any  # arrays of the row source; None of tiles
    part_dq: cute.Tensor  # (slots, 64, D) float32, without the scale
    lengths: cute.Tensor  # (B,) int32; not read without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    before: Float32  # factor of a score before the soft cap
    exponent: Float32  # factor of a score in exp2
    factor: Float32  # the scale
    items: Int32  # of `work`
    source_numbers: Any = None  # of the row source


class GatherQueryBlock(QueryBlock):
    """Of the kernel of dQ."""

    arguments: GatherQueryArguments
    ahead: ItemRing  # of the warps that gather
    s_words: cute.Tensor  # (64, 2, twice the stages) int32: of a step
    source: Any = None  # what the row source shares


class GatherGradientArguments(NamedTuple):
    """The parameters of the kernel of dQ, dK and dV by rows."""

    q: Tma  # (B, H, Q, D)
    dout: Tma  # (B, H, Q, E)
    dq: Tma  # (B, H, Q, D)
    k: cute.Tensor  # (B, G, K, D)
    v: cute.Tensor  # (B, G, K, E)
    terms: cute.Tensor  # (2, B, H, Qp) float32: lse in base 2, delta
    dk_sum: cute.Tensor  # (B, G, K, D after padding) float32, which the kernel adds to
    dv_sum: cute.Tensor  # (B, G, K, E after padding) float32
    # As of `GatherQueryArguments`.
    work: cute.Tensor
    indices: cute.Tensor
    bits: cute.Tensor
    part_dq: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    before: Float32
    exponent: Float32
    factor: Float32
    items: Int32


class GatherGradientBlock(GatherQueryBlock):
    """Of the kernel of dQ, dK and dV by rows."""

    arguments: GatherGradientArguments  # type: ignore[assignment]
    s_exchanged: cute.Tensor  # (64, 64, 2): P of a step, and dS
    ratio: Int32  # key heads have so many times as many heads of items


class GatherColumnArguments(NamedTuple):
    """The parameters of the kernel of dK and dV."""

    k: Tma | cute.Tensor  # (B, G, K, D); a row source that is not of tiles has tensors as they are
    v: Tma | cute.Tensor  # (B, G, K, E)
    dk: Tma | cute.Tensor  # (B, G, K, D)
    dv: Tma | cute.Tensor  # (B, G, K, E)
    source_result: Any  # what the row source writes besides; None of tiles
    q: cute.Tensor  # (B, H, Q, D)
    dout: cute.Tensor  # (B, H, Q, E)
    terms: cute.Tensor  # (2, B, H, Qp) float32: lse in base 2, delta
    work: cute.Tensor  # (n, ITEM) int32, see `ColumnItem`
    segments: cute.Tensor  # (m, SEGMENT) int32
    indices: cute.Tensor  # (rows,) int32
    bits: cute.Tensor  # (rows / 32, 64) int32: the words of a step, 32 queries of each key
    source: Any  # arrays of the row source; None of tiles
    part_dk: cute.Tensor  # (slots, 64, D) float32
    part_dv: cute.Tensor  # (slots, 64, E) float32
    lengths: cute.Tensor  # (B,) int32; not read without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    before: Float32  # factor of a score before the soft cap
    exponent: Float32  # factor of a score in exp2
    factor: Float32  # of dK: the scale
    items: Int32  # of `work`
    source_numbers: Any = None  # of the row source


class GatherColumnBlock(ColumnBlock):
    """Of the kernel of dK and dV."""

    arguments: GatherColumnArguments
    ahead: ItemRing  # of the warps that gather
    s_words: cute.Tensor  # (64, 2, stages) int32: of a step
    source: Any = None  # what the row source shares
