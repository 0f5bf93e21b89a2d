"""Layouts from torch's own block masks, those of FlexAttention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.layouts import BlockLayout, TileList, Walk
from gossamer.memo import Memos
from gossamer.patterns.grid import WORD
from gossamer.patterns.tiles import unique_tiles
from gossamer.torch.mask_layouts import pack

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Operations that read no value of their tensor: torch's own mask of everything is `batch.new_ones(())`.
_SHAPE_ONLY = re.compile(r"aten\.(new_(ones|zeros|full|empty)|(ones|zeros|full|empty)_like)\b")
# Pairs of partial tiles on which a mask function is evaluated at once.
PAIRS_AT_ONCE = 2**24
LARGEST_BLOCK = 1024

_converted: Memos[BlockLayout] = Memos()  # of block masks


def layout_of(mask: BlockMask, B: int | None, H: int | None) -> BlockLayout:
    """Its numpy layout; B and H are those of the inputs, or None where the lists or the function say them.

    Raises:
        ValueError: the block mask is sliced, or its blocks or lists cannot be a layout.
    """
    block_q, block_kv = mask.BLOCK_SIZE
    Q, K = (int(n) for n in mask.seq_lengths)
    tiles, columns = -(-Q // block_q), -(-K // block_kv)
    _check(mask, block_q, block_kv, tiles)
    leads = tuple(mask.kv_num_blocks.shape[:2])
    lead = []
    told_apart = depends(mask.mask_mod, mask.kv_num_blocks.device)
    for name, has, given, of_own in zip(("B", "H"), leads, (B, H), told_apart, strict=True):
        if given is None and of_own and has == 1:
            raise ValueError(f"{name} must be given: the function of {apart_by(name)}, its lists do not")
        wanted = has if given is None else given
        if 1 < has != wanted > 1:
            raise ValueError(f"pattern, a torch BlockMask, has lists for {name}={has}, the inputs have {name}={wanted}")
        lead.append(max(has, wanted) if of_own else has)
    partial = _tiles(mask.kv_num_blocks, mask.kv_indices, tuple(lead), tiles, columns)
    full = torch.zeros(0, 4, dtype=torch.int64, device=partial.device)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _tiles(mask.full_kv_num_blocks, mask.full_kv_indices, tuple(lead), tiles, columns)
    both = torch.cat((partial, full))
    if len(torch.unique(both, dim=0)) != len(both):
        raise ValueError("pattern, a torch BlockMask, lists a block twice: partial and full blocks must be disjoint")

    kept = list(_evaluated(mask.mask_mod, partial, Q, K, block_q, block_kv))
    # A tile that reaches past the last key is never full in a layout: its bits say which keys exist.
    _, _, _, column = full.T
    ragged = column == columns - 1 if K % block_kv else torch.zeros_like(column, dtype=torch.bool)
    kept += _evaluated(lambda b, h, r, j: j >= 0, full[ragged], Q, K, block_q, block_kv)
    whole = [full[~ragged].cpu().numpy(), *(at[state == 2] for at, state, _ in kept)]
    mixed = [at[state == 1] for at, state, _ in kept]
    packed = [w[state == 1] for _, state, w in kept]
    return _layout(tuple(lead), Q, K, block_q, block_kv, whole, mixed, packed)


def layout_for(mask: BlockMask, q: Tensor) -> BlockLayout:
    """The layout of a block mask for queries (B, H, Q, D), made once and kept as long as the mask."""
    if torch.compiler.is_compiling():
        raise ValueError("pattern, a torch BlockMask, must be turned into from_flex(mask) outside torch.compile")
    B, H, _, _ = q.shape
    return _converted.of(mask).get_or_make((B, H), lambda: layout_of(mask, B, H))


def _check(mask: BlockMask, block_q: int, block_kv: int, tiles: int) -> None:
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError(
            "pattern, a torch BlockMask, is a slice of another one (mask[...]): torch drops the mask function of a "
            "slice, so its partial blocks are unknown; make a block mask for these rows"
        )
    for block in (block_q, block_kv):
        if block % WORD or not 0 < block <= LARGEST_BLOCK:
            raise ValueError(
                f"pattern, a torch BlockMask, must have a BLOCK_SIZE of multiples of {WORD} up to {LARGEST_BLOCK}; "
                f"got {(block_q, block_kv)}"
            )
    Q, _ = mask.seq_lengths
    if mask.kv_num_blocks.ndim != 3 or mask.kv_num_blocks.shape[2] != tiles:
        raise ValueError(
            f"pattern, a torch BlockMask, must have lists (B, H, {tiles}) for its {Q} queries; "
            f"got {tuple(mask.kv_num_blocks.shape)}"
        )


def _tiles(counts: Tensor, indices: Tensor, lead: tuple[int, ...], tiles: int, columns: int) -> Tensor:
    """(n, 4): batch element, head, tile row and tile column of every listed block."""
    used = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
    b, h, t, _ = at = used.nonzero().T
    column = indices[tuple(at)].long()
    if bool(((column < 0) | (column >= columns)).any()) or bool((counts > indices.shape[-1]).any()):
        raise ValueError(f"pattern, a torch BlockMask, must list block columns in [0, {columns})")
    found = torch.stack((b, h, t, column), 1)
    for axis in (0, 1):  # lists shared by heads that the mask function tells apart
        if counts.shape[axis] < lead[axis]:
            copies = found.repeat(lead[axis], 1)
            copies[:, axis] = torch.arange(lead[axis], device=counts.device).repeat_interleave(len(found))
            found = copies
    return found


def _evaluated(
    mask_mod: MaskMod, at: Tensor, Q: int, K: int, block_q: int, block_kv: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For chunks of tiles: (their places (n, 4), 0 empty, 1 mixed or 2 full (n,), their packed masks)."""
    device = at.device
    over_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_pairs = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_pairs, in_dims=(0, 0, 0, 0))
    for chunk in at.split(max(1, PAIRS_AT_ONCE // (block_q * block_kv))):
        if not len(chunk):
            continue
        batch, head, row, column = chunk.T
        rows = row[:, None] * block_q + torch.arange(block_q, device=device)
        keys = column[:, None] * block_kv + torch.arange(block_kv, device=device)
        exists = (rows < Q)[:, :, None] & (keys < K)[:, None, :]
        # Indices that exist: a mask function may read tensors by them.
        index = (x.int() for x in (batch, head, rows.clamp(max=Q - 1), keys.clamp(max=K - 1)))
        kept = over_tiles(*index).expand(exists.shape)
        if kept.dtype != torch.bool:
            raise ValueError(f"pattern, a torch BlockMask, must have a boolean mask function; it returns {kept.dtype}")
        kept = kept & exists
        fits = (column + 1) * block_kv <= K
        whole = (kept | ~exists).all(-1).all(-1) & fits
        state = kept.any(-1).any(-1).int() + whole.int()
        packed = pack(kept).cpu().numpy().view(np.uint32)
        yield chunk.cpu().numpy(), state.cpu().numpy(), packed


def _layout(
    lead: tuple[int, ...], Q: int, K: int, block_q: int, block_kv: int,
    whole: list[np.ndarray], mixed: list[np.ndarray], packed: list[np.ndarray],
) -> BlockLayout:  # fmt: skip
    shape = (*lead, -(-Q // block_q))
    full, _ = _list(np.concatenate(whole), shape)
    none = np.zeros((0, 4), dtype=np.int64)
    bits, order = _list(np.concatenate([none, *mixed]), shape)
    width = block_kv // WORD
    pool, pool_index = unique_tiles(np.concatenate([np.zeros((0, block_q, width), np.uint32), *packed]))
    interval, _ = _list(none, shape)
    nothing = np.zeros((1, 1, 0), dtype=np.int32)
    return BlockLayout(
        Walk(
            Q, K, block_q, block_kv, full=full, interval=interval, bits=bits, lo=nothing, hi=nothing,
            pool_index=pool_index[order].astype(np.int32), pool=pool,
        )
    )  # fmt: skip


def _list(at: np.ndarray, shape: tuple[int, ...]) -> tuple[TileList, np.ndarray]:
    """The list of tiles at (n, 4) places, and the order in which it has them."""
    batch, head, tile, column = at.T
    order = np.lexsort((column, tile, head, batch))
    row = np.ravel_multi_index((batch, head, tile), shape)
    counts = np.bincount(row, minlength=int(np.prod(shape)))
    starts = np.cumsum(counts) - counts
    lists = (starts.reshape(shape), counts.reshape(shape), column[order])
    return TileList(*(x.astype(np.int32) for x in lists)), order


def depends(mask_mod: MaskMod, device: torch.device) -> tuple[bool, bool]:
    """Whether a mask function reads the batch element, and the head."""
    from torch.fx.experimental.proxy_tensor import make_fx

    index = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    nodes = list(make_fx(lambda b, h, i, j: torch.vmap(mask_mod)(b, h, i, j))(*index).graph.nodes)

    def reaches(node: Any) -> bool:
        values = (user for user in node.users if not _SHAPE_ONLY.match(str(user.target)))
        return any(user.op == "output" or reaches(user) for user in values)

    b, h, *_ = (reaches(node) for node in nodes if node.op == "placeholder")
    return b, h


def apart_by(name: str) -> str:
    """What a mask function does that reads the index called `name`."""
    return f"mask tells {'batch elements' if name == 'B' else 'query heads'} apart"
