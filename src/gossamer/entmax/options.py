"""What a call of `entmax_attention` or `topk_keys` is, beside its tensors q, k, v and alpha."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.torch.request import ResolvedPattern

IMPLEMENTATIONS = ("kernels", "torch")


class Positions(NamedTuple):
    """A query sees the keys whose positions are not over its own; of fewer dimensions than heads where they share."""

    of_q: Tensor
    of_k: Tensor


class Options(NamedTuple):
    """What a call is, beside q, k, v and alpha."""

    attended: ResolvedPattern
    q_positions: Tensor | None
    k_positions: Tensor | None
    top_k: int | None
    causal: bool
    scale: float | None
    implementation: str | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that say what a row may see."""
        return self.q_positions, self.k_positions, *self.attended.data

    def over(self, q_positions: Tensor | None, k_positions: Tensor | None, *data: Tensor) -> Options:
        """The same call by other `tensors`."""
        attended = self.attended._replace(data=data)
        return self._replace(attended=attended, q_positions=q_positions, k_positions=k_positions)

    def positions(self, q: Tensor, k: Tensor) -> Positions | None:
        """Those of q (B, H, Q, D) and k (B, G, K, D), which broadcast to query heads; None where none are given."""
        of_q, of_k = self.q_positions, self.k_positions
        if of_q is None and of_k is None:
            return None
        (_, H, Q, _), (_, G, K, _) = q.shape, k.shape
        if of_q is None:
            of_q = torch.arange(K - Q, K, device=q.device)
        if of_k is None:
            of_k = torch.arange(K, device=q.device)
        if of_k.ndim > 1 and of_k.shape[-2] == G != H and G > 1:
            of_k = of_k.repeat_interleave(H // G, -2)
        return Positions(of_q, of_k)
