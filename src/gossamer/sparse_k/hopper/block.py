"""The parameters of the kernel of SparseK attention, and the memory that its roles share."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.tiles import Tma
from gossamer.kernels.hopper.device.forward.block import StoringBlock


class SparseKArguments(NamedTuple):
    """The parameters of the kernel."""

    q: Tma  # (B, H, N, D)
    out: Tma  # (B, H, N, E)
    k: cute.Tensor  # (B, G, N, D)
    v: cute.Tensor  # (B, G, N, E)
    lse: cute.Tensor  # (B, H, N) float32
    u: cute.Tensor  # (B U, N) float32: scores of keys
    tau: cute.Tensor  # (B U, N) float32: thresholds of queries
    last: cute.Tensor  # (B U, N) int32: the last query that keeps each key
    lists: cute.Tensor  # (B U, tiles, room) int32: keys that live in a tile of queries, through all of it first
    counts: cute.Tensor  # (B U, tiles, 2) int32: the number of those that live through it, and of all
    every: cute.Tensor  # (B U, 1, N) int32: keys that live in any tile, for tiles whose list is too short
    ends: cute.Tensor  # (B U, 1, n) int32: the last one is the number of these
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    exponent: Float32  # factor of a score in exp2
    window: Int32  # keys before a query that it attends ungated
    items: Int32


class SparseKBlock(StoringBlock):
    """The barriers and the shared memory of a block."""

    arguments: SparseKArguments
    s_terms: tuple[cute.Tensor, ...]  # (128, slots) each: scores of a step's keys, the keys, the last that keep them
