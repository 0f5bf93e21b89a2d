"""The parameters of the kernel of supports, and the memory that its roles share."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import Block, Ring
from gossamer.cute.tiles import Tma


class SupportArguments(NamedTuple):
    """The parameters of the kernel of supports."""

    q: Tma  # (B, H, Q, D)
    k: Tma  # (B, G, K, D)
    steepness: cute.Tensor  # (H,) float32: alpha - 1
    lo: cute.Tensor  # (Q,) int32, non-decreasing; not read without intervals
    hi: cute.Tensor  # (Q,) int32
    list_keys: cute.Tensor  # (rows, L) int32
    list_weights: cute.Tensor  # (rows, L) float32
    list_counts: cute.Tensor  # (B H Q,) int32: -1 of a row that has no list
    lam: cute.Tensor  # (B H Q,) float32
    support: cute.Tensor  # (B H Q,) int32
    certified: cute.Tensor  # (B H Q,) uint8
    scale: Float32  # positive
    first_block: Int32  # the number of the first block of rows that is computed
    offset: Int32  # of causal: key j is seen by row r where j <= r + offset
    keep: Int32  # one more than the number of largest scores that are kept
    every: Int32  # one tile of so many is in the sample that gives the first bounds
    first_listed: Int32  # the row whose list is the first one
    requested: Int32  # whether lam, support and certified are written


class SupportBlock(Block):
    """The barriers and the shared memory of a block."""

    arguments: SupportArguments
    q: Ring  # a stage for each warpgroup
    k: Ring
    s_q: cute.Tensor  # (64, D, groups)
    s_k: cute.Tensor  # (step, D, stages)
    s_candidates: cute.Tensor  # (bytes of a place / 4, places) int32: see `candidates.py`
    s_going: cute.Tensor  # (4, groups) int32: the warps that have rows to look at
