"""The lists of `topk_blocks` by operations of torch, which define them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.blocks.scores import bound_scores, mean_scores


class Which(NamedTuple):
    """Key blocks of each block of queries, (T, C) bool."""

    visible: Tensor
    always: Tensor


class Taken(NamedTuple):
    indices: Tensor
    covered: Tensor


def by_operations(
    q: Tensor, k: Tensor, block: int, n: int, scale: float, group: bool, bound: bool, causal: bool, local: int,
    first: int, top_p: float | None,
) -> Taken:  # fmt: skip
    """`indices` and `covered` of `SelectedBlocks`, lists of room for n.

    Args:
        group, bound: of `topk_blocks` per="group" and score="bound".
        local, first: at most the key blocks that there are.
    """
    Q, K = q.shape[2], k.shape[2]
    made = (bound_scores if bound else mean_scores)(q, k, block, scale, group).float()
    which = _which(-(-Q // block), -(-K // block), Q, K, block, causal, local, first, q.device)
    return _taken(made, which, n, top_p)


def _which(T: int, C: int, Q: int, K: int, block: int, causal: bool, local: int, first: int, device: Any) -> Which:
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
    return Which(visible, always & visible)


def _taken(score: Tensor, which: Which, n: int, top_p: float | None) -> Taken:
    """The n first of each list, as far as they are visible and `top_p` wants them."""
    C = score.shape[-1]
    score = score.masked_fill(~which.visible, -torch.inf)
    # An integer for each block in the order in which they are taken: its score, as bits, and then its place.
    ranked = score.masked_fill(score.isnan(), torch.inf) + 0.0
    bits = ranked.view(torch.int32)
    bits = torch.where(bits < 0, bits ^ (2**31 - 1), bits).masked_fill(which.always, 2**31 - 1)
    bits = bits.masked_fill(~which.visible, -(2**31)).long()
    place = torch.arange(C - 1, -1, -1, device=score.device)
    taken = ((bits << 32) + place).topk(n).values
    index = C - 1 - (taken & (2**32 - 1))

    def of_taken(x: Tensor) -> Tensor:
        return x.expand(score.shape).gather(-1, index)

    used = of_taken(which.visible)
    total = score.logsumexp(-1, keepdim=True)
    share = torch.where(used, (of_taken(score) - total).exp(), 0)
    if top_p is not None and top_p < 1:
        used = used & ((share.cumsum(-1) - share < top_p) | of_taken(which.always))
    covered = torch.where(used, share, 0).sum(-1).clamp(max=1)
    return Taken(torch.where(used, index, -1).int(), covered)
