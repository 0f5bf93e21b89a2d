"""FlexAttention's masks: `from_flex` reads a block mask or a mask function, `to_flex` makes a block mask."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gossamer.checks import integer, optional_integer, show, whole
from gossamer.integrations.flex_mask import FlexMask, call, device_of
from gossamer.integrations.mask_mods import by_formula, by_lookup
from gossamer.layouts import BlockLayout, Walk
from gossamer.layouts.build import build
from gossamer.patterns import Pattern
from gossamer.patterns.grid import WORD
from gossamer.torch.arguments import describe
from gossamer.torch.block_mask import MaskMod, apart_by, depends, layout_of


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
    """A mask of FlexAttention as gossamer's own: a torch `BlockMask` as a numpy BlockLayout, a function as a Pattern.

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
        Q: for a function, the rows that it is for.
        K: for a function, the keys that it is for; Q by default.
        B: batch elements, for a function that tells them apart (of a block mask, while its lists do not).
        H: query heads, likewise.
        device: for a function, where it is evaluated; by default where its tensors are, as far as its closures, globals
            and arguments show them, else on the CPU. Positions go there and booleans come back.

    Raises:
        ValueError: it is neither, or another argument is wrong or missing; a block mask is sliced, or its blocks or
            lists cannot be a layout; a function raises, or returns no booleans.

    Examples:
        >>> def causal(b, h, q_idx, kv_idx):
        ...     return q_idx >= kv_idx
        ...
        >>> pattern = gs.from_flex(causal, 4) & gs.SlidingWindow(1)
        >>> pattern.materialize(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
    """
    B, H = optional_integer("B", B, minimum=1, none="all alike"), optional_integer("H", H, minimum=1, none="all alike")
    if isinstance(mask, BlockMask):
        if (Q, K, device) != (None, None, None):
            raise ValueError("Q, K and device must be left out for a BlockMask, which has its own")
        return layout_of(mask, B, H)
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
    for name, given, own in zip(("B", "H"), (B, H), apart, strict=True):
        if own and given is None:
            raise ValueError(f"{name} must be given: {apart_by(name)}")
        lead.append(given if own and given is not None else 1)
    return FlexMask(mask, Q, K, lead[0], lead[1], device)


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be one of torch's; got {describe(given)}") from None


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
        Q: positions of a pattern's queries.
        K: positions of its keys; Q by default.
        q_offset: position of query row 0, K - Q by default.
        block_size: edge of the blocks, or (query, key) edges; multiples of 32.
        device: where the block mask's tensors are.

    Raises:
        ValueError: `pattern` is neither, or another argument is wrong: sizes are missing, or given for a BlockLayout,
            which has them.

    Examples:
        >>> mask = gs.to_flex(gs.SlidingWindow(100), 512)
        >>> mask.shape, mask.BLOCK_SIZE
        ((1, 1, 512, 512), (128, 128))
    """
    if not isinstance(pattern, (Pattern, BlockLayout)):
        raise ValueError(f"pattern must be a Pattern or a BlockLayout; got {describe(pattern)}")
    device = _device(device)
    given = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    edges = [whole(edge) or 0 for edge in given]
    if len(edges) != 2 or not all(edge > 0 and edge % WORD == 0 for edge in edges):
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
    visited = np.zeros((*rows.lead, rows.tiles, columns), dtype=bool)
    for kind in kinds:
        tiles = rows.lists[kind]
        row, at = tiles.listed()
        visited.reshape(-1, columns)[row, tiles.indices[at]] = True
    return padded_lists(torch.from_numpy(visited).to(device))


def padded_lists(visited: Tensor) -> tuple[Tensor, Tensor]:
    """Counts (Bl, Hl, T) and indices (Bl, Hl, T, columns) of the tiles that are set (Bl, Hl, T, columns)."""
    indices = (~visited).to(torch.uint8).argsort(dim=-1, stable=True).int()
    return visited.sum(-1, dtype=torch.int32), indices.contiguous()
