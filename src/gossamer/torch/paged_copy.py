"""Copies of the pages that no kernel reads where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.torch.decoding import sees_on


def copied_pages(pool: Tensor, pages: Tensor, unseen: Tensor) -> Tensor:
    """The slots of pages behind one another, (n * size, G, width), 0 where unseen.

    Args:
        pool: (P, size, G, width).
        pages: (n,) int32, pages that exist.
        unseen: (n * size,) boolean.
    """
    if torch.compiler.is_compiling() or not sees_on(pool.device.type) or pool.stride(3) != 1:
        listed = pool.index_select(0, pages).flatten(0, 1)
        return listed.masked_fill_(unseen[:, None, None], 0)
    from gossamer.kernels.triton.paged.copy_slots import copy_slots

    return copy_slots(pool, pages, unseen)
