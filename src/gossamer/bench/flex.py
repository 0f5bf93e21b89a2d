"""FlexAttention's block mask of a case: the tiles from our layout, the pairs from a formula or the layout's bits."""

from __future__ import annotations

from typing import Any

import numpy as np

import gossamer
from gossamer.bench.check import Inputs

BLOCK = 128
BITS_BYTES = 2**30  # the largest pool of bits that is made for a pattern without a formula


def block_mask(inputs: Inputs) -> tuple[Any, bool]:
    """A torch BlockMask of the inputs' pattern, and whether its function looks pairs up.

    Raises:
        ValueError: it would take too much memory.
    """
    from gossamer.integrations import flex
    from gossamer.integrations.mask_mods import by_formula, by_lookup

    pattern, q_offset, device = inputs.pattern, inputs.terms.q_offset, inputs.q.device
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    block = BLOCK
    if isinstance(pattern, gossamer.BlockMask | gossamer.BigBird) and pattern.block in (64, 128):
        block = pattern.block
    mask_mod = by_formula(pattern, Q, K, q_offset, device)
    if mask_mod is None and isinstance(pattern, gossamer.CSR):
        # Nearly every tile of a graph has bits of its own.
        row = np.repeat(np.arange(Q), np.diff(pattern.indptr)) // block
        size = len(np.unique(row * -(-K // block) + pattern.indices // block)) * block * block // 8
        if size > BITS_BYTES:
            raise ValueError(f"a mask function of this graph would read {size / 2**30:.1f} GiB of bits")
    layout = pattern.layout(Q, K, block_q=block, block_kv=block, q_offset=q_offset)
    looked_up = mask_mod is None
    return flex.block_mask(layout, by_lookup(layout, device) if mask_mod is None else mask_mod, device), looked_up
