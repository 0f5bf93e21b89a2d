"""The keys of the largest scores of each row."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from gossamer.entmax.calls import RowsCall, autocast_enabled
from gossamer.entmax.chunks import scores
from gossamer.entmax.launches import Launch, bound, tensors_of
from gossamer.entmax.selection import largest
from gossamer.torch.transforms import uncast


class TopkCall(RowsCall):
    """Runs every call of one key of `topk_keys`."""

    def __call__(self, q: Tensor, k: Tensor, *tensors: Tensor | None) -> Tensor:
        """(B, H, Q, top_k) int32: the keys of each row of q (B, H, Q, D) ascending, then -1 where it sees fewer."""
        (B, H, Q, _), K, n = q.shape, k.shape[2], self.options.top_k
        assert n is not None
        with torch.no_grad(), uncast(q.device) if autocast_enabled() else nullcontext():
            if self.kernels and not self.empty:
                return self._by_kernels(q, k, tensors)
            keys = torch.full((B * H * Q, n), -1, dtype=torch.int32, device=q.device)
            if not self.empty:
                o = self.operands(q, k, k, None, tensors)
                for chunk in o.chunks:
                    picked = largest(scores(o, chunk).flatten(0, 2), n)
                    assert picked.columns is not None
                    # K stands for no key, and sorts last.
                    kept = torch.where(picked.s == -torch.inf, K, chunk.keys[picked.columns]).sort(1).values
                    keys[chunk.rows, : kept.shape[1]] = torch.where(kept == K, -1, kept).to(torch.int32)
            return keys.view(B, H, Q, n)

    def _by_kernels(self, q: Tensor, k: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """The keys of each row, by the kernels."""
        given = tensors_of(q, k, k, None, self.options_of(tensors))
        listed, counts = bound(Launch("keys", 0.0, self.scale, self.options, True), given)(*given.values())
        K, place = k.shape[2], torch.arange(listed.shape[1], device=q.device)
        keys = torch.where(place < counts[:, None], listed, K).sort(1).values
        return torch.where(keys == K, -1, keys).view(*q.shape[:3], -1)
