"""`SparseKAttention`: the attention of a layer by SparseK, with a score network of its own and a cache for decoding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.checks import integer
from gossamer.sparse_k.attention import sparsek_attention
from gossamer.sparse_k.autograd import sparse_k_forward
from gossamer.sparse_k.cache import Entries, SparseKCache
from gossamer.sparse_k.launch.problem import Gate, Options
from gossamer.sparse_k.scored_keys import scores_of_tokens
from gossamer.torch.arguments import INTEGERS, Lengths, describe
from gossamer.torch.arguments import lengths as as_tensor

GATES = ("v", "kv", "logit", None)


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
        >>> with torch.no_grad():
        ...     y_prompt, cache = layer.prefill(x[:, :49])
        ...     y_t, cache = layer.step(x[:, 49], cache)
        >>> torch.allclose(y_prompt, y[:, :49]), torch.allclose(y_t, y[:, -1])
        (True, True)
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

    def scores(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """The scores of keys (B, G, N) of x (B, N, dim), the first of which is at position start (B,), or 0."""
        t = torch.arange(x.shape[1], device=x.device)
        if start is not None:
            t = t + start[:, None]
        return scores_of_tokens(x, self.score.weight, self.slope, t).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) of x (B, N, dim)."""
        q, k, v = self._project(self._checked(x, 3))
        out = sparsek_attention(
            q, k, v, self.scores(x), k_keep=self.k_keep, window=self.window, gate=self.gate,
            straight_through=self.straight_through,
        )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2))

    def prefill(
        self, x: Tensor, cache: SparseKCache | None = None, lengths: Lengths | None = None
    ) -> tuple[Tensor, SparseKCache]:
        """The results of the next tokens, equal to those of `forward` over all tokens so far but for rounding.

        Args:
            x: (B, m, dim), any number of tokens: a prompt, or a part of one.
            cache: of the tokens before, of the same batch; None at the first. Its memory is written.
            lengths: (B,) integers, a tensor or a list: x is padded, and sequence b has lengths[b] tokens of it, the
                first ones. None: all of them. With lengths the cache is copied once in a call.

        Returns:
            (B, m, dim), 0 at padding, and the cache with these tokens. It has the keys and values of the window and of
            `k_keep` keys, and up to a quarter of these (or 64) besides, however many tokens there were.

        Raises:
            ValueError: an argument is none of these, or the cache is of another layer, batch, type or device.
        """
        x = self._checked(x, 3)
        q, k, v = self._project(x)
        B, m = x.shape[:2]
        counts = _counts(lengths, q)
        start = torch.zeros(B, dtype=torch.int64, device=x.device) if cache is None else cache.lengths
        if cache is not None:
            self._check_cache(cache, k)
        at = start[:, None, None] + torch.arange(m, device=x.device)
        tokens = Entries(k, v, self.scores(x, start), at.expand(B, self.kv_heads, m))
        if cache is None:
            cache = SparseKCache(tokens, self.k_keep, self.window)
        if not m:
            return self.out(q.transpose(1, 2).flatten(2)), cache
        call = cache.add(q, tokens, counts)
        n = call.u.shape[2]
        options = Options(
            min(self.window, n), self.gate, True, q.shape[3] ** -0.5, False, min(self.k_keep, n), True, n - m
        )
        out = sparse_k_forward(*call, *options, None)[0].transpose(1, 2).flatten(2)
        if counts is None:
            return self.out(out), cache
        place = torch.arange(m, device=x.device)
        own = (place + m - counts[:, None]).clamp(max=m - 1)[..., None].expand(out.shape)
        return self.out(out.gather(1, own)).masked_fill((place >= counts[:, None])[..., None], 0), cache

    def step(self, x_t: Tensor, cache: SparseKCache | None = None) -> tuple[Tensor, SparseKCache]:
        """The result of the next token: `prefill` of one.

        Args:
            x_t: (B, dim).
            cache: of the tokens before, of the same batch; None at the first. Its memory is written.

        Returns:
            (B, dim), and the cache with this token.
        """
        y, cache = self.prefill(self._checked(x_t, 2)[:, None], cache)
        return y[:, 0], cache

    def _check_cache(self, cache: SparseKCache, k: Tensor) -> None:
        held = cache.entries.k
        own = (self.window, self.k_keep, *k.shape[:2], k.shape[3], k.dtype, k.device)
        if own != (cache.window, cache.k_keep, *held.shape[:2], held.shape[3], held.dtype, held.device):
            raise ValueError(
                f"cache must be of this layer and of a batch of {len(k)}; it is of a batch of {len(held)} with a "
                f"window of {cache.window} and {cache.k_keep} keys kept, {describe(held)}"
            )

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


def _counts(lengths: Lengths | None, q: Tensor) -> Tensor | None:
    """The number of tokens of each sequence, (B,) in [0, m] of q (B, H, m, D); None: all."""
    counts = as_tensor(lengths, q, "lengths")
    if counts is None:
        return None
    right = isinstance(counts, Tensor) and counts.shape == q.shape[:1] and counts.dtype in INTEGERS
    if not right or counts.device != q.device:
        raise ValueError(
            f"lengths must be (B,) = ({len(q)},) integers on {q.device}, a list of them or None; got {describe(counts)}"
        )
    return counts.long().clamp(0, q.shape[2])
