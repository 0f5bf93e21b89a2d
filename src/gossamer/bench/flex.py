"""FlexAttention's block masks for gossamer's patterns: the tiles from our layout, the pairs from a mask function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gossamer
from gossamer.bench.check import Inputs
from gossamer.patterns.compose import And, Not, Or

BLOCK = 128
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(inputs: Inputs) -> Any:
    """A torch BlockMask of the inputs' pattern; ValueError names a pattern that has no mask function here."""
    from torch.nn.attention.flex_attention import BlockMask

    pattern, q_offset = inputs.pattern, inputs.terms.q_offset
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    mask_mod = mask_function(pattern, Q, K, q_offset, inputs.q.device)
    block = BLOCK
    if isinstance(pattern, gossamer.BlockMask | gossamer.BigBird) and pattern.block in (64, 128):
        block = pattern.block
    rows = pattern.layout(Q, K, block_q=block, block_kv=block, q_offset=q_offset).rows
    columns = -(-K // block)
    full = _lists(rows, ("full",), columns, inputs.q.device)
    partial = _lists(rows, ("interval", "bits"), columns, inputs.q.device)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=(block, block), mask_mod=mask_mod, seq_lengths=(Q, K))


def _lists(rows: Any, kinds: tuple[str, ...], columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts (Bl, Hl, T) and indices (Bl, Hl, T, columns) of the tiles of some kinds, padded to all columns."""
    listed = np.zeros((*rows.lead, rows.tiles, columns), dtype=bool)
    for kind in kinds:
        tiles = getattr(rows, kind)
        counts, starts = tiles.counts.reshape(-1).astype(np.int64), tiles.starts.reshape(-1).astype(np.int64)
        before = np.cumsum(counts) - counts
        at = np.repeat(starts - before, counts) + np.arange(counts.sum())
        listed.reshape(-1, columns)[np.repeat(np.arange(len(counts)), counts), tiles.indices[at]] = True
    dense = torch.from_numpy(listed).to(device)
    indices = dense.int().argsort(dim=-1, descending=True, stable=True).int()
    return dense.sum(-1, dtype=torch.int32), indices.contiguous()


def mask_function(p: Any, Q: int, K: int, q_offset: int, device: torch.device) -> MaskMod:
    """`mask_mod(b, h, row, key)` of a pattern, in torch operations on index tensors."""

    def inner(pattern: Any) -> MaskMod:
        return mask_function(pattern, Q, K, q_offset, device)

    match p:
        case gossamer.Dense():
            return lambda b, h, r, j: j >= 0
        case gossamer.Causal():
            return lambda b, h, r, j: j <= r + q_offset
        case gossamer.SlidingWindow():
            return _window(p, q_offset)
        case gossamer.Local(block=block):
            return lambda b, h, r, j: (r + q_offset) // block == j // block
        case gossamer.BlockMask() | gossamer.BigBird(causal=False) if p.lead == (1, 1):
            return _block_lookup(p, Q, K, q_offset, device)
        case gossamer.Dilated(left=left, right=right, dilation=d):
            return lambda b, h, r, j: (
                ((r + q_offset - j) % d == 0) & (r + q_offset - j <= left * d) & (j - r - q_offset <= right * d)
            )
        case gossamer.Strided(stride=stride, local=local):
            return lambda b, h, r, j: (
                (j <= r + q_offset) & ((r + q_offset - j <= local) | ((r + q_offset - j) % stride == 0))
            )
        case gossamer.Document() if p.lead[0] == 1 and q_offset == 0:
            ids = torch.from_numpy(np.array(p.ids).reshape(-1)).to(device)
            return lambda b, h, r, j: ids[r] == ids[j]
        case And(left=one, right=other):
            first, second = inner(one), inner(other)
            return lambda b, h, r, j: first(b, h, r, j) & second(b, h, r, j)
        case Or(left=one, right=other):
            first, second = inner(one), inner(other)
            return lambda b, h, r, j: first(b, h, r, j) | second(b, h, r, j)
        case Not(pattern=one):
            first = inner(one)
            return lambda b, h, r, j: ~first(b, h, r, j)
    raise ValueError(f"no mask function is written for {type(p).__name__}")


def _window(p: gossamer.SlidingWindow, q_offset: int) -> MaskMod:
    left, right, sinks = p.left, p.right, p.sinks

    def mask(b: Tensor, h: Tensor, r: Tensor, j: Tensor) -> Tensor:
        i = r + q_offset
        kept = j >= 0
        if left is not None:
            kept = kept & (j >= i - left)
        if right is not None:
            kept = kept & (j <= i + right)
        if sinks:
            first = j < sinks
            kept = kept | (first & (j <= i) if right == 0 else first)
        return kept

    return mask


def _block_lookup(p: Any, Q: int, K: int, q_offset: int, device: torch.device) -> MaskMod:
    block = p.block
    i = np.arange(0, Q, block)[:, None] + q_offset
    matrix = torch.from_numpy(p.keep(i, np.arange(0, K, block)[None, :], Q, K, q_offset)).to(device)
    return lambda b, h, r, j: matrix[r // block, j // block]
