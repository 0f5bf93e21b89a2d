"""`SparseKAttention`: the attention of a layer by SparseK, with a score network of its own and a cache for decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.checks import integer
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.sparse_k.attention import sparsek_attention
from gossamer.sparse_k.cache import SparseKCache, add, empty
from gossamer.sparse_k.launch.problem import Gate
from gossamer.torch.arguments import describe
from gossamer.torch.transforms import uncast

GATES = ("v", "kv", "logit", None)
SPAN = 1024  # positions over which a slope of 1 raises scores by 1


class SparseKAttention(nn.Module):
    """Causal attention of a layer in which each query sees a window, and the keys that a learned score keeps.

    Of x (B, N, dim) it makes queries, keys, values, and a score of each key for each key head,

        u = w . x + slope * t / 1024,     t the position,

    in float32 (float64 of float64 inputs), and gives `sparsek_attention` of these through a last linear layer. w and
    the slope are learned; a slope over 0 prefers later keys. There is no position embedding beside the slope: what
    needs order has it in x.

    Args:
        dim: of x and of the result, a multiple of `heads`: queries, keys and values have dim / heads each.
        heads: H.
        kv_heads: G, by default H; H is a multiple of it.
        k_keep: how many keys are kept.
        window: how many keys before the query it sees in any case.
        gate: what SparseK's gate multiplies, as in `sparsek_attention`.
        straight_through: the gradient of u, as there.
        slope: of all heads at first.
        bias: whether the linear layers of queries, keys, values and results have a bias.

    Examples:
        >>> layer = gs.nn.SparseKAttention(dim=32, heads=4, kv_heads=2, k_keep=8, window=4).double()
        >>> x = torch.randn(2, 50, 32, dtype=torch.float64)
        >>> y = layer(x)
        >>> cache = None
        >>> for t in range(50):
        ...     y_t, cache = layer.step(x[:, t], cache)
        >>> torch.allclose(y_t, y[:, -1]), cache.kept.k.shape
        (True, torch.Size([2, 2, 8, 8]))
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None = None, *, k_keep: int, window: int = 0,
        gate: Gate | None = "v", straight_through: bool = False, slope: float = 0.0, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.heads = integer("dim", dim, minimum=1), integer("heads", heads, minimum=1)
        self.kv_heads = self.heads if kv_heads is None else integer("kv_heads", kv_heads, minimum=1)
        if self.dim % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"dim must be a multiple of heads, and heads of kv_heads; got dim={dim}, heads={heads}, "
                f"kv_heads={self.kv_heads}"
            )
        if gate not in GATES or (straight_through and gate in ("kv", "logit")):
            raise ValueError(
                f'gate must be one of {", ".join(map(repr, GATES))}, with straight_through "v" or None; got '
                f"{describe(gate)}, straight_through={straight_through}"
            )
        self.k_keep, self.window = integer("k_keep", k_keep, minimum=1), integer("window", window, minimum=0)
        self.gate, self.straight_through = gate, straight_through
        size = self.dim // self.heads
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k, self.v = (nn.Linear(dim, self.kv_heads * size, bias=bias) for _ in range(2))
        self.out = nn.Linear(dim, dim, bias=bias)
        self.score = nn.Linear(dim, self.kv_heads, bias=False)
        self.slope = nn.Parameter(torch.full((self.kv_heads,), float(slope)))

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, k_keep={self.k_keep}, window={self.window}, "
            f"gate={self.gate!r}"
        )

    def scores(self, x: Tensor, start: int = 0) -> Tensor:
        """The scores of keys (B, G, N) of x (B, N, dim), the first of which is at position `start`."""
        with uncast(x.device):
            wide = compute_dtype(x.dtype)
            u = F.linear(x.to(wide), self.score.weight.to(wide)).transpose(1, 2)
            t = torch.arange(start, start + x.shape[1], device=x.device).to(wide)
            return u + self.slope.to(wide)[:, None] * (t / SPAN)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) of x (B, N, dim)."""
        q, k, v = self._project(self._checked(x, 3))
        out = sparsek_attention(
            q, k, v, self.scores(x), k_keep=self.k_keep, window=self.window, gate=self.gate,
            straight_through=self.straight_through,
        )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2))

    def step(self, x_t: Tensor, cache: SparseKCache | None = None) -> tuple[Tensor, SparseKCache]:
        """The result of the next token, equal to `forward` over all tokens so far but for rounding.

        Args:
            x_t: (B, dim).
            cache: of the tokens before, of the same batch; None at the first.

        Returns:
            (B, dim), and the cache with this token. Its keys and values are window + 1 and k_keep in number, however
            many tokens there were; beside them are the scores of live keys, one number each.
        """
        x = self._checked(x_t, 2)[:, None]
        q, k, v = self._project(x)
        k, v, u = k[:, :, 0], v[:, :, 0], self.scores(x, 0 if cache is None else cache.position)[..., 0]
        if cache is None:
            cache = empty(k, v, u, self.k_keep, self.window)
        elif (cache.tau.shape, cache.near_k.shape[2], cache.kept.u.shape[2]) != (u.shape, self.window + 1, self.k_keep):
            raise ValueError(
                f"cache must be of this layer and of a batch of {len(x)}; it is of a batch of {len(cache.tau)} with "
                f"a window of {cache.near_k.shape[2] - 1} and {cache.kept.u.shape[2]} keys kept"
            )
        cache = add(cache, k, v, u, self.k_keep)
        out = self._attend(q[:, :, 0], cache)
        return self.out(out.to(q.dtype).flatten(1)), cache

    def _attend(self, q: Tensor, cache: SparseKCache) -> Tensor:
        """(B, H, E) of q (B, H, D) at the last token of a cache."""
        t, kept, wide = cache.position - 1, cache.kept, compute_dtype(q.dtype)
        with uncast(q.device):
            slots = torch.arange(self.window + 1, device=q.device)
            seen = t - (t - slots) % (self.window + 1) >= 0
            past = (kept.at >= 0) & (kept.at < t - self.window)
            m = torch.where(past, (kept.u - cache.tau[..., None]).clamp(0, 1), 1)
            m = torch.cat([torch.ones_like(m[..., :1]).expand(*m.shape[:2], len(slots)), m], 2)[:, :, None].to(wide)
            attended = torch.cat([seen.expand(*past.shape[:2], -1), past], 2)[:, :, None]
            k = torch.cat([cache.near_k, kept.k], 2).to(wide)
            v = torch.cat([cache.near_v, kept.v], 2).to(wide)
            s = (q.to(wide).unflatten(1, (self.kv_heads, -1)) * q.shape[-1] ** -0.5) @ k.mT
            if self.gate == "kv":
                s = s * m
            elif self.gate == "logit":
                s = s + m.log()
            p = s.masked_fill(~attended, -torch.inf).softmax(-1)
            return ((p * m if self.gate in ("v", "kv") else p) @ v).flatten(1, 2)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, G, N, D)."""
        heads = (self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads)
        q, k, v = (linear(x).unflatten(-1, (n, -1)).transpose(1, 2) for linear, n in heads)
        return q, k, v

    def _checked(self, x: Tensor, dims: int) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim != dims or x.shape[-1] != self.dim:
            shape = "(B, N, dim)" if dims == 3 else "(B, dim)"
            raise ValueError(f"x must be a tensor {shape} with dim={self.dim}; got {describe(x)}")
        return x
