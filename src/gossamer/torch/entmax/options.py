"""What a call of `entmax_attention` or `topk_keys` is, beside its tensors q, k, v and alpha."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gossamer.torch.request import ResolvedPattern

IMPLEMENTATIONS = ("kernels", "torch")


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
