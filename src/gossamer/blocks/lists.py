"""The lists of `topk_blocks` by operations of torch, which define them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.blocks.scores import bound_scores, mean_scores


class BlockMasks(NamedTuple):
    """The key blocks that each block of queries sees, and those that it always keeps: (T, C) bool."""

    visible: Tensor
    always: Tensor


class Taken(NamedTuple):
    indices: Tensor
    covered: Tensor


def by_operations(
    q: Tensor, k: Tensor, block: int, n: int, scale: float, group: bool, bound: bool, causal: bool, local: int,
    first: int, top_p: float | None,
) -> Taken:  # fmt: skip
    """`indices` and `covered` of `SelectedBlocks`, with lists of n places.

    Args:
        group, bound: of `topk_blocks` per="group" and score="bound".
        local, first: at most the key blocks that there are.
    """
    Q, K = q.shape[2], k.shape[2]
    scores = (bound_scores if bound else mean_scores)(q, k, block, scale, group).float()
    masks = _block_masks(-(-Q // block), -(-K // block), Q, K, block, causal, local, first, q.device)
    return _take_first(scores, masks, n, top_p)


def _block_masks(
    T: int, C: int, Q: int, K: int, block: int, causal: bool, local: int, first: int, device: Any
) -> BlockMasks:
    key_block = torch.arange(C, device=device)
    row = torch.arange(T, device=device)[:, None] * block
    begin = row + (K - Q)
    end = (row + block).clamp(max=Q) - 1 + (K - Q)  # of the last row
    visible = key_block * block <= end if causal else torch.ones((T, C), dtype=torch.bool, device=device)
    low = torch.div(begin.clamp(min=0), block, rounding_mode="floor")
    high = torch.div(end, block, rounding_mode="floor")
    always = key_block < first
    if local:
        near = (key_block > low - local) & (key_block < high + (1 if causal else local))
        always = always | (near & (end >= 0))
    return BlockMasks(visible, always & visible)


def _take_first(score: Tensor, masks: BlockMasks, n: int, top_p: float | None) -> Taken:
    """The first n blocks of each list that are visible, and that `top_p` takes."""
    C = score.shape[-1]
    score = score.masked_fill(~masks.visible, -torch.inf)
    # Blocks are ordered by one integer each: the bits of the score, then the place.
    ranked = score.masked_fill(score.isnan(), torch.inf) + 0.0
    bits = ranked.view(torch.int32)
    bits = torch.where(bits < 0, bits ^ (2**31 - 1), bits).masked_fill(masks.always, 2**31 - 1)
    bits = bits.masked_fill(~masks.visible, -(2**31)).long()
    place = torch.arange(C - 1, -1, -1, device=score.device)
    taken = ((bits << 32) + place).topk(n).values
    index = C - 1 - (taken & (2**32 - 1))

    def gathered(x: Tensor) -> Tensor:
        return x.expand(score.shape).gather(-1, index)

    used = gathered(masks.visible)
    total = score.logsumexp(-1, keepdim=True)
    share = torch.where(used, (gathered(score) - total).exp(), 0)
    if top_p is not None and top_p < 1:
        used = used & ((share.cumsum(-1) - share < top_p) | gathered(masks.always))
    covered = torch.where(used, share, 0).sum(-1).clamp(max=1)
    return Taken(torch.where(used, index, -1).int(), covered)
