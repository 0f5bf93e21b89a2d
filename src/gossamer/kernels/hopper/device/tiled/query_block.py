"""The parameters of the kernel of dQ of tiles of rows, and what its roles share."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.kernels.hopper.device.common import Block, Ring
from gossamer.kernels.hopper.device.tiles import Tma


class TiledQueryArguments(NamedTuple):
    """The parameters. Those of rows and keys are as in `TiledArguments`."""

    q: cute.Tensor  # (B, H, Q, D)
    k: Tma  # (B, G, K, D), by steps of keys
    k_sample: Tma  # the same, eight keys at once
    v: Tma  # (B, G, K, E)
    v_sample: Tma
    dout: cute.Tensor  # (B, H, Q, E)
    steepness: cute.Tensor
    lo: cute.Tensor
    hi: cute.Tensor
    row_list: cute.Tensor
    row_counts: cute.Tensor
    drawn: cute.Tensor
    lam: cute.Tensor  # (B H Q,) float32
    delta: cute.Tensor  # (B H Q,) float32, to write
    dq: cute.Tensor  # (B H Q, D / 2) int32: pairs of 16-bit numbers, to write
    scale: Float32  # positive
    offset: Int32
    few: Int32


class TiledQueryBlock(Block):
    """What the roles share, as in `TiledBlock`."""

    arguments: TiledQueryArguments
    items: Ring
    k: Ring
    v: Ring
    s_item: cute.Tensor
    s_q: cute.Tensor
    s_dout: cute.Tensor  # (64, E, groups)
    s_k: cute.Tensor
    s_v: cute.Tensor
    s_o: cute.Tensor  # (128, D / 2, groups - 1) float32: dQ of parts of the keys
    s_sums: cute.Tensor
