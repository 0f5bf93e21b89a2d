"""The keys of the largest scores of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.entmax.arguments import operands_of
from gossamer.entmax.chunks import chunks, row_numbers, scores
from gossamer.entmax.options import Options
from gossamer.entmax.selection import largest
from gossamer.entmax.ways import by_kernels, kernel_call
from gossamer.torch.transforms import uncast


def keys_of_rows(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """(B, H, Q, top_k) int32: the keys of each row of q (B, H, Q, D) ascending, then -1 where it sees fewer."""
    B, H, Q, _ = q.shape
    K = k.shape[2]
    if by_kernels(q, k, k, None, options) and 0 not in q.shape and K:
        return keys_by_kernels(q, k, options)
    assert options.top_k is not None
    keys = torch.full((B * H * Q, options.top_k), -1, dtype=torch.int32, device=q.device)
    if 0 in q.shape or K == 0:
        return keys.view(B, H, Q, options.top_k)
    with torch.no_grad(), uncast(q.device):
        o = operands_of(q, k, k, torch.ones(H, device=q.device), options)
        for chunk in chunks(o):
            picked = largest(scores(o, chunk).flatten(0, 2), options.top_k)
            assert picked.columns is not None
            # K stands for no key, and sorts last.
            kept = torch.where(picked.s == -torch.inf, K, chunk.seen.keys[picked.columns]).sort(1).values
            keys[row_numbers(o, chunk), : kept.shape[1]] = torch.where(kept == K, -1, kept).to(torch.int32)
    return keys.view(B, H, Q, -1)


def keys_by_kernels(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """The keys of each row, by the kernels."""
    from gossamer.entmax.launch import forward as launch

    with torch.no_grad(), uncast(q.device):
        call = kernel_call(q, k, k, torch.ones(q.shape[1], device=q.device), 1.0, options)
        return launch.top_keys(call)
