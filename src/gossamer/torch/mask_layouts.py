"""Layouts from dense boolean masks, and dense masks from layouts, by tensor operations on the mask's own device.

Nothing here reads a value back, so it runs inside a captured graph. The lists are padded to the number of tile
columns, and every tile has a place in the bit pool, whether it is listed or not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.layouts import BlockLayout, TileList, Walk
from gossamer.patterns.grid import WORD


def layout_of(mask: Tensor, Q: int, K: int, *, block_q: int, block_kv: int, transpose: bool) -> BlockLayout:
    """A layout of full and bits tiles from a boolean mask that broadcasts to (B, H, Q, K).

    Args:
        mask: boolean, at most four-dimensional; leading dimensions of 1 are shared.
        transpose: also build the columns.
    """
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask.expand(mask.shape[0], mask.shape[1], Q, K)
    rows = walk_of(mask, block_q, block_kv)
    return BlockLayout(rows, _transpose=[walk_of(mask.mT, block_kv, block_q)] if transpose else [])


def walk_of(mask: Tensor, block_rows: int, block_columns: int) -> Walk:
    """The walk over a boolean matrix (Bl, Hl, rows, columns)."""
    bl, hl, rows, columns = mask.shape
    T, C = -(-rows // block_rows), -(-columns // block_columns)
    padded = F.pad(mask, (0, C * block_columns - columns, 0, T * block_rows - rows))
    tiles = padded.view(bl, hl, T, block_rows, C, block_columns).transpose(3, 4)
    some = tiles.any(-1).any(-1)
    missing = F.pad(~mask, (0, C * block_columns - columns)) if C * block_columns > columns else ~mask
    # A tile is full when nothing that exists is missing and it does not reach past the last column.
    missing = F.pad(missing, (0, 0, 0, T * block_rows - rows))
    full = ~missing.view(bl, hl, T, block_rows, C, block_columns).transpose(3, 4).any(-1).any(-1)
    if columns % block_columns:
        full[..., C - 1] = False
    return Walk(
        rows, columns, block_rows, block_columns,
        full=_listed(full & some), interval=_empty(full), bits=_listed(some & ~full),
        lo=_none(mask, 1, 1, 0), hi=_none(mask, 1, 1, 0),
        pool_index=_places(some & ~full), pool=pack(tiles.reshape(-1, block_rows, block_columns)),
    )  # fmt: skip


def pack(tiles: Tensor) -> Tensor:
    """(P, R, C) bool -> (P, R, C // 32) int32; bit c of word w is column 32 w + c."""
    bit = torch.arange(8, device=tiles.device, dtype=torch.uint8)
    octets = (tiles.unflatten(-1, (-1, 8)).to(torch.uint8) << bit).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """(P, R, W) int32 -> (P, R, 32 W) bool."""
    bit = torch.arange(WORD, device=packed.device, dtype=torch.int32)
    return ((packed[..., None] >> bit) & 1).bool().flatten(-2)


def _order(listed: Tensor) -> Tensor:
    """(..., C) bool -> (..., C) tile columns, the listed ones first, ascending."""
    return torch.argsort((~listed).to(torch.uint8), dim=-1, stable=True)


def _listed(listed: Tensor) -> TileList:
    C = listed.shape[-1]
    starts = torch.arange(listed.shape[:-1].numel(), device=listed.device, dtype=torch.int32) * C
    return TileList(
        starts.view(listed.shape[:-1]), listed.sum(-1, dtype=torch.int32), _order(listed).flatten().to(torch.int32)
    )


def _empty(like: Tensor) -> TileList:
    """A list without a tile, and without padding: kernels read row bounds where an interval list has entries."""
    nothing = torch.zeros(like.shape[:-1], dtype=torch.int32, device=like.device)
    return TileList(nothing, nothing, nothing.new_zeros(0))


def _places(listed: Tensor) -> Tensor:
    """The place in the pool, which holds every tile, of each entry of the list."""
    C = listed.shape[-1]
    row = torch.arange(listed.shape[:-1].numel(), device=listed.device).view(*listed.shape[:-1], 1)
    return (row * C + _order(listed)).flatten().to(torch.int32)


def _none(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)


def dense_of(walk: Walk) -> Tensor:
    """The boolean matrix (Bl, Hl, rows, columns) of a walk of torch tensors, for the reference."""
    bl, hl = walk.lead
    T, C = walk.tiles, -(-walk.columns // walk.block_columns)
    br, bc = walk.block_rows, walk.block_columns
    device = walk.lo.device
    tiles = torch.zeros(bl * hl * T, C, br, bc, dtype=torch.bool, device=device)
    for kind, listed in walk.lists.items():
        counts = listed.counts.flatten().long()
        row = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        place = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
        place = place + listed.starts.flatten().long()[row]
        column = listed.indices[place].long()
        if kind == "full":
            tiles[row, column] = True
        elif kind == "bits":
            tiles[row, column] = unpack(walk.pool[walk.pool_index[place].long()])
        elif len(row):
            lo, hi = (F.pad(x, (0, T * br - walk.rows)).view(-1, br)[row] for x in (walk.lo, walk.hi))
            j = column[:, None] * bc + torch.arange(bc, device=device)
            tiles[row, column] = (j[:, None, :] >= lo[:, :, None]) & (j[:, None, :] < hi[:, :, None])
    dense = tiles.view(bl, hl, T, C, br, bc).transpose(3, 4).reshape(bl, hl, T * br, C * bc)
    return dense[:, :, : walk.rows, : walk.columns]


def packed_mask_of(mask: Tensor, Q: int, K: int) -> Tensor:
    """(Bl, Hl, Q, 4 ceil(K / 128)) int32, by `pack`, of a boolean mask that broadcasts to (B, H, Q, K)."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask.expand(mask.shape[0], mask.shape[1], Q, K)
    return pack(F.pad(mask, (0, -K % 128)).flatten(0, 1)).unflatten(0, mask.shape[:2])
