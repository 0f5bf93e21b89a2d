"""The options of a call of `entmax_attention` or `topk_keys`: all but its tensors q, k, v and alpha."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.torch.request import ResolvedPattern

IMPLEMENTATIONS = ("kernels", "torch")
MOST_LISTED = 96  # keys of a row that kernels keep as a list, where top_k does not say how many


class Positions(NamedTuple):
    """A query sees the keys whose positions are at most its own; they broadcast to batch elements and heads."""

    q: Tensor
    k: Tensor


class Options(NamedTuple):
    """The options of a call: all but q, k, v and alpha."""

    attended: ResolvedPattern
    q_positions: Tensor | None
    k_positions: Tensor | None
    top_k: int | None
    causal: bool
    scale: float | None
    implementation: str | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that say which keys a row may see."""
        return self.q_positions, self.k_positions, *self.attended.data

    def over(self, tensors: tuple[Tensor | None, ...]) -> Options:
        """The same options with other `tensors`."""
        q_positions, k_positions, *data = tensors
        attended = self.attended._replace(data=tuple(x for x in data if x is not None))
        return self._replace(attended=attended, q_positions=q_positions, k_positions=k_positions)

    def positions(self, q: Tensor, k: Tensor) -> Positions | None:
        """The positions of q (B, H, Q, D) and k (B, G, K, D), broadcast to query heads; None where none are given."""
        q_positions, k_positions = self.q_positions, self.k_positions
        if q_positions is None and k_positions is None:
            return None
        (_, H, Q, _), (_, G, K, _) = q.shape, k.shape
        if q_positions is None:
            q_positions = torch.arange(K - Q, K, device=q.device)
        if k_positions is None:
            k_positions = torch.arange(K, device=q.device)
        if k_positions.ndim > 1 and k_positions.shape[-2] == G != H and G > 1:
            k_positions = k_positions.repeat_interleave(H // G, -2)
        return Positions(q_positions, k_positions)
