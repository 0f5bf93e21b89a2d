"""The parameters of the kernel of dK and dV of long rows, and the memory that its roles share."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import Block, Ring
from gossamer.cute.tiles import Tma
from gossamer.kernels.hopper.device.gather.serve import CopiedRing


class LongRowsColumnsArguments(NamedTuple):
    """The parameters of the kernel of dK and dV; those of rows and keys are as in `LongRowsArguments`."""

    q: cute.Tensor  # (B, H, Q, D)
    k: Tma  # (B, G, K, D)
    v: Tma  # (B, G, K, E)
    dout: cute.Tensor  # (B, H, Q, E)
    steepness: cute.Tensor
    lo: cute.Tensor
    hi: cute.Tensor
    row_list: cute.Tensor
    row_counts: cute.Tensor
    drawn: cute.Tensor  # (2,) int32: the second counts the tiles of keys that are taken; zero before
    lam: cute.Tensor  # (B H Q,) float32
    delta: cute.Tensor  # (B H Q,) float32
    dk: cute.Tensor  # (B G K, D / 2) int32: pairs of 16-bit numbers, to add to
    dv: cute.Tensor  # (B G K, E / 2) int32, to add to
    scale: Float32  # positive
    offset: Int32


class ColumnItem(IntEnum):
    """The words of an item in shared memory, in the order in which they are published."""

    VALID = 0
    LEAD = 1  # the key head, counted over batch elements
    TILE = 2  # the tile of its keys


class Kind(IntEnum):
    """The kind of a stage of rows: every row sees every key of the block, or not every one, or the item is over."""

    FULL = 0
    MASKED = 1
    END = 2


class LongRowsColumnsBlock(Block):
    """The barriers and the shared memory of a block."""

    arguments: LongRowsColumnsArguments
    items: Ring
    keys: Ring  # K and V of an item, in one stage
    rows: CopiedRing  # Q, dO and the terms of rows
    s_item: cute.Tensor  # (ColumnItem, 2)
    s_k: cute.Tensor  # (64, D, groups)
    s_v: cute.Tensor  # (64, E, groups)
    s_q: cute.Tensor  # (step, D, stages)
    s_dout: cute.Tensor  # (step, E, stages)
    s_kind: cute.Tensor  # (2, stages) int32: a `Kind` for each half of the rows
    s_line: cute.Tensor  # (step, stages) float32: 1 - a lam
    s_delta: cute.Tensor  # (step, stages) float32
    s_lo: cute.Tensor  # (step, stages) int32: the keys [lo, hi) that a row sees
    s_hi: cute.Tensor  # (step, stages) int32
