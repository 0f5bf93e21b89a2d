"""FlexAttention's block mask of a case: the tiles from our layout, the pairs from a formula or from bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import gossamer
from gossamer.patterns.grid import WORD
from gossamer.testing.inputs import Inputs

BLOCK = 128
BITS_BYTES = 2**33  # of a graph: a compiled mask function reads them by 32-bit offsets of 4-byte words


def block_mask(inputs: Inputs) -> tuple[Any, bool]:
    """A torch BlockMask of the inputs' pattern, and whether its function looks pairs up.

    Raises:
        ValueError: it would take too much memory.
    """
    from gossamer.integrations import flex
    from gossamer.integrations.mask_mods import by_formula, by_lookup

    pattern, q_offset, device = inputs.pattern, inputs.terms.q_offset, inputs.q.device
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    if isinstance(pattern, gossamer.CSR):
        return graph_mask(pattern, Q, K, device), True
    block = BLOCK
    if isinstance(pattern, gossamer.BlockMask | gossamer.BigBird) and pattern.block in (64, 128):
        block = pattern.block
    mask_mod = by_formula(pattern, Q, K, q_offset, device)
    layout = pattern.layout(Q, K, block_q=block, block_kv=block, q_offset=q_offset)
    looked_up = mask_mod is None
    return flex.block_mask(layout, by_lookup(layout, device) if mask_mod is None else mask_mod, device), looked_up


def graph_mask(graph: gossamer.CSR, Q: int, K: int, device: torch.device) -> Any:
    """A torch BlockMask of a graph, made on the device: one bit a pair of the whole matrix.

    Nearly every tile of a graph has bits of its own, so that a map of tiles would only be one more load.

    Raises:
        ValueError: the bits would take too much memory.
    """
    from torch.nn.attention.flex_attention import BlockMask

    from gossamer.integrations.flex import padded_lists

    width = -(-K // WORD)
    size = 4 * Q * width
    if size > BITS_BYTES:
        raise ValueError(f"a mask function of this graph would read {size / 2**30:.1f} GiB of bits")
    row = torch.from_numpy(np.repeat(np.arange(Q), np.diff(graph.indptr))).to(device)
    column = torch.from_numpy(graph.indices.astype(np.int64)).to(device)
    packed = torch.zeros(Q * width, dtype=torch.int32, device=device)
    bit = torch.ones_like(column, dtype=torch.int32) << (column % WORD).int()
    packed.index_add_(0, row * width + column // WORD, bit)  # no pair is listed twice: a sum of bits is their union
    bits = packed.view(Q, width)
    tiles, columns = -(-Q // BLOCK), -(-K // BLOCK)
    pairs = torch.bincount(row // BLOCK * columns + column // BLOCK, minlength=tiles * columns)
    pairs = pairs.view(1, 1, tiles, columns)
    whole = pairs == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *padded_lists((pairs > 0) & ~whole), *padded_lists(whole), BLOCK_SIZE=BLOCK, seq_lengths=(Q, K),
        mask_mod=lambda b, h, r, j: ((bits[r, j >> 5] >> (j & 31)) & 1) == 1,
    )  # fmt: skip
