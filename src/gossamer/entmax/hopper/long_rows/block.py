"""The parameters of the kernel of long rows, and the memory that its roles share."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import Block, Ring
from gossamer.cute.tiles import Tma


class LongRowsArguments(NamedTuple):
    """The parameters of the kernel of long rows."""

    q: cute.Tensor  # (B, H, Q, D)
    k: Tma  # (B, G, K, D), by steps of keys
    k_sample: Tma  # the same, eight keys at once
    v: Tma  # (B, G, K, E)
    steepness: cute.Tensor  # (H,) float32: alpha - 1
    lo: cute.Tensor  # (Q,) int32, non-decreasing; not read without intervals
    hi: cute.Tensor  # (Q,) int32
    row_list: cute.Tensor  # (B H, Q) int32: the rows of each head, ascending
    row_counts: cute.Tensor  # (B H,) int32
    drawn: cute.Tensor  # (1,) int32: tiles taken; zero before
    out: cute.Tensor  # (B H Q, E / 2) int32: pairs of 16-bit numbers, to write
    lam: cute.Tensor  # (B H Q,) float32, to write
    support: cute.Tensor  # (B H Q,) int32, to write
    certified: cute.Tensor  # (B H Q,) uint8, to write
    scale: Float32  # positive
    near: Float32  # the bound of |log(sum of weights)| before the last step
    offset: Int32  # of causal: key j is seen by row r where j <= r + offset
    few: Int32  # up to so many tiles of 64 rows, the warpgroups of a block share the keys of one tile


class TileItem(IntEnum):
    """The words of an item in shared memory, in the order in which they are published."""

    VALID = 0
    HEAD = 1
    FIRST = 2  # its first row, in the list of its head


class Pass(IntEnum):
    """The kind of the pass that begins, which the consumers tell the producer."""

    SUMS = 0
    OUT = 1


class LongRowsBlock(Block):
    """The barriers and the shared memory of a block."""

    arguments: LongRowsArguments
    items: Ring
    k: Ring
    v: Ring
    decided: Ring  # only its full barriers are used
    s_item: cute.Tensor  # (TileItem, 2)
    s_decided: cute.Tensor  # (1,) int32: a `Pass`
    s_q: cute.Tensor  # (64, D, groups)
    s_k: cute.Tensor  # (step, D, k_stages)
    s_v: cute.Tensor  # (step, E, v_stages)
    s_o: cute.Tensor  # (128, E / 2, groups - 1) float32: out of parts of the keys, as threads hold it
    s_sums: cute.Tensor  # (64, SUMS, groups, 2) float32
