"""The masks of partial tiles: which pairs of a tile are dropped, from intervals and from bits.

Equal interval tiles are found once, when the plan is made. While all masks together are small they are kept as
booleans; otherwise each batch of tiles makes its own from the row bounds and the packed masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

KEEP_BYTES = 16 << 20  # masks kept as booleans, in all


@dataclass(frozen=True)
class Masks:
    """Mask i of a layout: intervals first, then the bit pool, then "none kept", then "all kept"."""

    bounds: Tensor  # (U, 2, block_q) int16: columns [lo, hi) of the tile, relative to its first
    packed: Tensor  # (P, block_q, block_kv // 8) uint8
    block_kv: int
    kept: Tensor | None  # (U + P + 2, block_q, block_kv) bool: True where dropped; None when over KEEP_BYTES

    @property
    def none(self) -> int:
        """The mask that drops every pair."""
        return len(self.bounds) + len(self.packed)

    @property
    def all(self) -> int:
        """The mask that drops nothing."""
        return self.none + 1

    def dropped(self, ids: Tensor) -> Tensor:
        """ids (...,) int64 -> (..., block_q, block_kv) bool, True where a pair is dropped."""
        if self.kept is not None:
            return self.kept[ids] if ids.numel() > 1 else self.kept.narrow(0, int(ids), 1).view(*ids.shape, *self.edge)
        flat, U = ids.reshape(-1), len(self.bounds)
        out = (flat != self.all)[:, None, None].expand(-1, *self.edge).contiguous()
        (at,) = torch.nonzero(flat < U, as_tuple=True)
        if len(at):
            out[at] = outside(self.bounds[flat[at]], self.block_kv)
        (at,) = torch.nonzero((flat >= U) & (flat < self.none), as_tuple=True)
        if len(at):
            out[at] = zero_bits(self.packed[flat[at] - U])
        return out.view(*ids.shape, *self.edge)

    @property
    def edge(self) -> tuple[int, int]:
        """(block_q, block_kv)."""
        return self.bounds.shape[-1], self.block_kv


def outside(bounds: Tensor, block_kv: int) -> Tensor:
    """(n, 2, block_q) -> (n, block_q, block_kv) bool: columns outside [lo, hi)."""
    j = torch.arange(block_kv, device=bounds.device, dtype=bounds.dtype)
    lo, hi = bounds[..., None].unbind(1)
    return (j < lo) | (j >= hi)


def zero_bits(packed: Tensor) -> Tensor:
    """(n, block_q, W) uint8 -> (n, block_q, 8 W) bool: bits that are zero, the lowest first."""
    bit = torch.tensor([1 << b for b in range(8)], dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] & bit) == 0).flatten(-2)


def make_masks(bounds: np.ndarray, pool: Tensor, block_q: int, block_kv: int) -> tuple[Masks, np.ndarray]:
    """(masks, mask of each interval tile); bounds (n, 2, block_q), pool (P, block_q, block_kv // 32) int32."""
    rows = np.ascontiguousarray(bounds.astype(np.int16)).reshape(-1, 2 * block_q)
    unique, inverse = unique_rows(rows)
    table = torch.from_numpy(unique.reshape(-1, 2, block_q)).to(pool.device)
    packed = pool.reshape(-1).view(torch.uint8).view(len(pool), block_q, block_kv // 8)
    count = len(unique) + len(packed) + 2
    kept = None
    if count * block_q * block_kv <= KEEP_BYTES:
        everything = torch.ones(1, block_q, block_kv, dtype=torch.bool, device=pool.device)
        kept = torch.cat([outside(table, block_kv), zero_bits(packed), everything, ~everything])
    return Masks(table, packed, block_kv, kept), inverse


def unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct rows, which one each row is), comparing rows as bytes."""
    if not len(rows):
        return rows, np.zeros(0, np.int64)
    _, first, inverse = np.unique(rows.view(f"V{rows.strides[0]}").reshape(-1), return_index=True, return_inverse=True)
    return rows[first], inverse.reshape(-1)
