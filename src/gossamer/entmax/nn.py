"""`SplashAttention`: exactly k keys a row, with alpha-entmax weights."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from gossamer.checks import integer
from gossamer.entmax.api import attended, unbatched
from gossamer.entmax.arguments import Names, check_alphas
from gossamer.entmax.calls import EntmaxOptions
from gossamer.entmax.checks import check_alpha
from gossamer.torch.arguments import describe, number

NAMES = Names("Q_idx", "K_idx")


class SplashAttention(nn.Module):
    """alpha-entmax over the `k_keep` largest scores of each query, by positions: `gossamer.entmax_attention`.

    Args:
        head_dim: D, the head size of Q and K.
        alpha: a number in [1, 2], or a tensor (H,) of them: an `nn.Parameter` is learned.
        k_keep: how many keys of each query are kept, ties to the lowest key; None is all.
        sm_scale: the scale of the scores, head_dim ** -0.5 by default: a number, or a tensor of shape (), of which an
            `nn.Parameter` is learned.

    Raises:
        ValueError: an argument is wrong, here or in a call.

    Examples:
        >>> layer = gs.nn.SplashAttention(head_dim=16, alpha=1.5, k_keep=8)
        >>> Q, K, V = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> positions = torch.arange(50).expand(2, 4, 50)
        >>> layer(Q, K, V, positions, positions).shape
        torch.Size([2, 4, 50, 16])
    """

    alpha: float | Tensor
    sm_scale: float | Tensor | None

    def __init__(
        self, head_dim: int, alpha: float | Tensor = 1.5, k_keep: int | None = 8,
        sm_scale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim = integer("head_dim", head_dim, minimum=1)
        self.k_keep = None if k_keep is None else integer("k_keep", k_keep, minimum=1, otherwise=" or None")
        if not isinstance(alpha, Tensor):
            alpha = number(alpha)
            check_alpha(alpha, describe)
        elif alpha.ndim > 1 or not alpha.is_floating_point():
            raise ValueError(
                f"alpha must be a number, or a tensor of floating point of shape (H,) or (); got {describe(alpha)}"
            )
        else:
            check_alphas(alpha)
        if not isinstance(sm_scale, Tensor):
            sm_scale = finite_or_none("sm_scale", sm_scale)
        elif sm_scale.ndim or not sm_scale.is_floating_point():
            raise ValueError(
                f"sm_scale must be a finite number, a tensor of floating point of shape () or None; "
                f"got {describe(sm_scale)}"
            )
        for name, x in (("alpha", alpha), ("sm_scale", sm_scale)):
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                self.register_buffer(name, x)
            else:
                setattr(self, name, x)

    def extra_repr(self) -> str:
        alpha, scale = (f"tensor {tuple(x.shape)}" if isinstance(x, Tensor) else x for x in (self.alpha, self.sm_scale))
        return f"head_dim={self.head_dim}, alpha={alpha}, k_keep={self.k_keep}, sm_scale={scale}"

    def forward(
        self, Q: Tensor, K: Tensor, V: Tensor, Q_idx: Tensor | None = None, K_idx: Tensor | None = None
    ) -> Tensor:
        """Attention of Q (B, H, Nq, D) over K (B, G, Nk, D) and V (B, G, Nk, E): (B, H, Nq, E).

        Args:
            Q: the queries.
            K: the keys, H a multiple of G.
            V: the values.
            Q_idx: positions of the queries, integers (int8, uint8, int16, int32 or int64) that broadcast to (B, H, Nq):
                a key is seen where its position is at most the query's. Nk - Nq + r for row r by default where K_idx is
                given.
            K_idx: positions of the keys, such integers that broadcast to (B, H, Nk); their number by default where
                Q_idx is given. Without both every key is seen.
        """
        if isinstance(Q, Tensor) and Q.shape[-1] != self.head_dim:
            raise ValueError(f"Q must have the head size of the module, head_dim={self.head_dim}; got {describe(Q)}")
        asked = EntmaxOptions(None, self.alpha, self.k_keep, False, Q_idx, K_idx, self.sm_scale, None)
        results, _, dims = attended("SplashAttention", NAMES, Q, K, V, asked, "lists")
        return unbatched(results.out, dims)


def finite_or_none(name: str, x: Any) -> float | None:
    """x as a finite number, or None.

    Raises:
        ValueError: it is neither.
    """
    x = number(x)
    if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x)):
        raise ValueError(f"{name} must be a finite number or None; got {describe(x)}")
    return x
