"""FlexAttention's masks: `from_flex` reads a block mask or a mask function, `to_flex` makes a block mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gossamer.integrations.flex_mask import FlexMask, MaskMod, call, depends, device_of
from gossamer.integrations.mask_mods import by_formula, by_lookup
from gossamer.layouts import BlockLayout, TileList, Walk
from gossamer.layouts.build import build, unique_tiles
from gossamer.patterns import Pattern
from gossamer.patterns.grid import WORD
from gossamer.patterns.validate import integer, optional_integer, show
from gossamer.torch.validate import describe

# Pairs of partial tiles on which a mask function is evaluated at once.
PAIRS_AT_ONCE = 2**24
LARGEST_BLOCK = 1024

_converted: WeakKeyDictionary[Any, dict[tuple[int, int], BlockLayout]] = WeakKeyDictionary()


@overload
def from_flex(mask: BlockMask, *, B: int | None = None, H: int | None = None) -> BlockLayout: ...


@overload
def from_flex(
    mask: MaskMod, Q: int, K: int | None = None, *, B: int | None = None, H: int | None = None, device: Any = None
) -> Pattern: ...


def from_flex(
    mask: BlockMask | MaskMod,
    Q: int | None = None,
    K: int | None = None,
    *,
    B: int | None = None,
    H: int | None = None,
    device: Any = None,
) -> BlockLayout | Pattern:
    """What FlexAttention attends to: a torch `BlockMask` as a numpy BlockLayout, a mask function as a Pattern.

    Of a block mask, which is not kept, full blocks are taken as they are; its mask function is evaluated on the pairs
    of its partial blocks alone, some blocks at a time, on the mask's own device.

    The pattern of a mask function composes like any other. It is evaluated when a layout is built, 2**22 pairs at a
    time, on all Q x K of them (for each batch element and head that it tells apart) unless it is composed by & with a
    pattern that has fewer. It equals only one of the same function object: keep it, and its layout is built once.
    Tensors that the function reads are read then, and not again.

    Args:
        mask: a block mask with blocks whose edges are multiples of 32 up to 1024; or a function
            mask_mod(b, h, q_idx, kv_idx) of integer tensors that returns a boolean one, as `create_block_mask` takes it
            (`and_masks(...)` makes one). q_idx counts rows from 0, whatever `q_offset` is.
        Q, K: for a function, the rows and keys that it is for; K is Q by default.
        B: batch elements, for a function that tells them apart (of a block mask, while its lists do not).
        H: query heads, likewise.
        device: for a function, where it is evaluated; by default where its tensors are, as far as its closures, globals
            and arguments show them, else on the CPU. Positions go there and booleans come back.

    Raises:
        ValueError: it is neither, or another argument is wrong or missing; a block mask is sliced, or its blocks or
            lists cannot be a layout; a function raises, or returns no booleans.
    """
    B, H = optional_integer("B", B, minimum=1, none="all alike"), optional_integer("H", H, minimum=1, none="all alike")
    if isinstance(mask, BlockMask):
        if (Q, K, device) != (None, None, None):
            raise ValueError("Q, K and device must be left out for a BlockMask, which has its own")
        return _layout_of(mask, B, H)
    if not callable(mask):
        raise ValueError(
            f"mask must be a torch BlockMask or a function mask_mod(b, h, q_idx, kv_idx); got {describe(mask)}"
        )
    if Q is None:
        raise ValueError(f"Q must be the number of query rows that the function {show(mask)} is for")
    Q = integer("Q", Q, minimum=1)
    K = Q if K is None else integer("K", K, minimum=1)
    device = device_of(mask) if device is None else _device(device)
    lead = []
    apart = call(depends, mask, device)
    for name, given, of_own in zip(("B", "H"), (B, H), apart, strict=True):
        if of_own and given is None:
            raise ValueError(f"{name} must be given: {_apart(name)}")
        lead.append(given if of_own and given is not None else 1)
    return FlexMask(mask, Q, K, lead[0], lead[1], device)


def _apart(name: str) -> str:
    return f"mask tells {'batch elements' if name == 'B' else 'query heads'} apart"


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be one of torch's; got {describe(given)}") from None


def _layout_of(mask: BlockMask, B: int | None, H: int | None) -> BlockLayout:
    block_q, block_kv = mask.BLOCK_SIZE
    Q, K = (int(n) for n in mask.seq_lengths)
    tiles, columns = -(-Q // block_q), -(-K // block_kv)
    _check(mask, block_q, block_kv, tiles)
    leads = tuple(mask.kv_num_blocks.shape[:2])
    lead = []
    apart = depends(mask.mask_mod, mask.kv_num_blocks.device)
    for name, has, given, of_own in zip(("B", "H"), leads, (B, H), apart, strict=True):
        if given is None and of_own and has == 1:
            raise ValueError(f"{name} must be given: the function of {_apart(name)}, its lists do not")
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
    ragged = full[:, 3] == columns - 1 if K % block_kv else torch.zeros(len(full), dtype=torch.bool, device=full.device)
    kept += _evaluated(lambda b, h, r, j: j >= 0, full[ragged], Q, K, block_q, block_kv)
    whole = [full[~ragged].cpu().numpy(), *(at[state == 2] for at, state, _ in kept)]
    mixed = [at[state == 1] for at, state, _ in kept]
    words = [w[state == 1] for _, state, w in kept]
    return _layout(tuple(lead), Q, K, block_q, block_kv, whole, mixed, words)


def layout_for(mask: BlockMask, q: Tensor) -> BlockLayout:
    """The layout of a block mask for queries (B, H, Q, D), made once and kept as long as the mask."""
    if torch.compiler.is_compiling():
        raise ValueError("pattern, a torch BlockMask, must be turned into from_flex(mask) outside torch.compile")
    kept = _converted.setdefault(mask, {})
    key = (q.shape[0], q.shape[1])
    if key not in kept:
        kept[key] = from_flex(mask, B=q.shape[0], H=q.shape[1])
    return kept[key]


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
    if mask.kv_num_blocks.ndim != 3 or mask.kv_num_blocks.shape[2] != tiles:
        raise ValueError(
            f"pattern, a torch BlockMask, must have lists (B, H, {tiles}) for its {mask.seq_lengths[0]} queries; "
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
    """For chunks of tiles: (their places (n, 4), 0 empty, 1 mixed or 2 full (n,), their words)."""
    from gossamer.torch.masks import pack

    device = at.device
    over_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_pairs = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_pairs, in_dims=(0, 0, 0, 0))
    for chunk in at.split(max(1, PAIRS_AT_ONCE // (block_q * block_kv))):
        if not len(chunk):
            continue
        rows = chunk[:, 2, None] * block_q + torch.arange(block_q, device=device)
        keys = chunk[:, 3, None] * block_kv + torch.arange(block_kv, device=device)
        exists = (rows < Q)[:, :, None] & (keys < K)[:, None, :]
        # Indices that exist: a mask function may read tensors by them.
        index = (x.int() for x in (chunk[:, 0], chunk[:, 1], rows.clamp(max=Q - 1), keys.clamp(max=K - 1)))
        kept = over_tiles(*index).expand(exists.shape)
        if kept.dtype != torch.bool:
            raise ValueError(f"pattern, a torch BlockMask, must have a boolean mask function; it returns {kept.dtype}")
        kept = kept & exists
        fits = (chunk[:, 3] + 1) * block_kv <= K
        whole = (kept | ~exists).all(-1).all(-1) & fits
        state = kept.any(-1).any(-1).int() + whole.int()
        words = pack(kept).cpu().numpy().view(np.uint32)
        yield chunk.cpu().numpy(), state.cpu().numpy(), words


def _layout(
    lead: tuple[int, ...], Q: int, K: int, block_q: int, block_kv: int,
    whole: list[np.ndarray], mixed: list[np.ndarray], words: list[np.ndarray],
) -> BlockLayout:  # fmt: skip
    shape = (*lead, -(-Q // block_q))
    full, _ = _list(np.concatenate(whole), shape)
    none = np.zeros((0, 4), dtype=np.int64)
    bits, order = _list(np.concatenate([none, *mixed]), shape)
    width = block_kv // WORD
    pool, pool_index = unique_tiles(np.concatenate([np.zeros((0, block_q, width), np.uint32), *words]))
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
    order = np.lexsort(at.T[::-1])
    row = np.ravel_multi_index(tuple(at[:, :3].T), shape)
    counts = np.bincount(row, minlength=int(np.prod(shape)))
    starts = np.cumsum(counts) - counts
    lists = (starts.reshape(shape), counts.reshape(shape), at[order, 3])
    return TileList(*(x.astype(np.int32) for x in lists)), order


def to_flex(
    pattern: Pattern | BlockLayout,
    Q: int | None = None,
    K: int | None = None,
    *,
    q_offset: int | None = None,
    block_size: int | tuple[int, int] = 128,
    device: Any = "cpu",
) -> BlockMask:
    """A torch `BlockMask` that keeps the same pairs, for `flex_attention`; never built from a Q x K array.

    Its mask function is the pattern's formula where it has one, and otherwise reads the layout's bits, so that every
    pattern has one. Rows are counted from 0 there; `q_offset` is folded into it.

    Args:
        pattern: a Pattern, or a BlockLayout, which has its own Q, K and blocks.
        Q, K: positions of a pattern's queries and keys; K is Q by default.
        q_offset: position of query row 0, K - Q by default.
        block_size: edge of the blocks, or (query, key) edges; multiples of 32.
        device: where the block mask's tensors are.

    Raises:
        ValueError: `pattern` is neither, or another argument is wrong: sizes are missing, or given for a BlockLayout,
            which has them.
    """
    if not isinstance(pattern, (Pattern, BlockLayout)):
        raise ValueError(f"pattern must be a Pattern or a BlockLayout; got {describe(pattern)}")
    device = _device(device)
    edges = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(edges) != 2 or not all(isinstance(edge, int) and edge > 0 and edge % WORD == 0 for edge in edges):
        raise ValueError(
            f"block_size must be a positive multiple of {WORD}, or (query, key) edges that are; "
            f"got {describe(block_size)}"
        )
    if isinstance(pattern, BlockLayout):
        if (Q, K, q_offset) != (None, None, None):
            raise ValueError("Q, K and q_offset must be left out for a BlockLayout, which has its own")
        layout, mask_mod = pattern, None
    else:
        if Q is None:
            raise ValueError(f"Q must be the number of query rows of {show(pattern)}")
        sizes = pattern._sizes(Q, Q if K is None else K, q_offset)
        layout = build(pattern, *sizes[:2], block_q=edges[0], block_kv=edges[1], q_offset=sizes.q_offset)
        mask_mod = by_formula(pattern, *sizes, device)
    return block_mask(layout, by_lookup(layout, device) if mask_mod is None else mask_mod, device)


def block_mask(layout: BlockLayout, mask_mod: MaskMod, device: torch.device) -> BlockMask:
    """A torch `BlockMask` with the tiles of a layout and a mask function that keeps its pairs."""
    rows = layout.rows.on_host()
    lists = [_block_lists(rows, kinds, device) for kinds in (("interval", "bits"), ("full",))]
    return BlockMask.from_kv_blocks(
        *lists[0], *lists[1], BLOCK_SIZE=(rows.block_rows, rows.block_columns), mask_mod=mask_mod,
        seq_lengths=(rows.rows, rows.columns),
    )  # fmt: skip


def _block_lists(rows: Walk, kinds: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts (Bl, Hl, T) and indices (Bl, Hl, T, columns) of the tiles of some kinds, padded to all columns."""
    columns = -(-rows.columns // rows.block_columns)
    found = np.zeros((*rows.lead, rows.tiles, columns), dtype=bool)
    for kind in kinds:
        tiles = rows.lists[kind]
        row, at = tiles.listed()
        found.reshape(-1, columns)[row, tiles.indices[at]] = True
    return padded_lists(torch.from_numpy(found).to(device))


def padded_lists(found: Tensor) -> tuple[Tensor, Tensor]:
    """Counts (Bl, Hl, T) and indices (Bl, Hl, T, columns) of the tiles that are set (Bl, Hl, T, columns)."""
    indices = (~found).to(torch.uint8).argsort(dim=-1, stable=True).int()
    return found.sum(-1, dtype=torch.int32), indices.contiguous()
