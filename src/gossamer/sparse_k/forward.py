"""`attention_forward`: exact attention, dense or causal, and SparseK where scores of keys are given."""

from __future__ import annotations

from torch import Tensor

from gossamer.checks import boolean
from gossamer.patterns import Causal, Dense
from gossamer.sparse_k.attention import sparsek_attention
from gossamer.torch.api import attention
from gossamer.torch.arguments import describe


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, k_keep: int | None = None, scores: Tensor | None = None
) -> Tensor:
    """Exact attention, dense or causal, or SparseK attention over the keys that scores choose; with all gradients.

    Without scores `attention` over every key that the query may see; with them `sparsek_attention`, of which this is
    the call without a window: the `k_keep` keys of the largest scores at each step, values under SparseK's gate.

    Args:
        q: (B, H, Q, D), (H, Q, D) or (Q, D).
        k: (B, G, K, D) and so on, H a multiple of G. With scores K is at least Q.
        v: (B, G, K, E) and so on.
        causal: query r sees the keys up to r + K - Q; else all of them.
        k_keep: how many keys each query keeps, with scores.
        scores: of keys, float32 or float64: (B, G, K), or (B, H, K) for each query head; without the dimensions that q
            lacks. They have a gradient.

    Returns:
        (B, H, Q, E) and so on, in q's dtype.

    Raises:
        ValueError: an argument is wrong, or one of `k_keep` and `scores` is given without the other; `Unsupported`
            for torch.func, forward mode and a second derivative.

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 200, 16) for heads in (4, 2, 2))
        >>> gs.attention_forward(q, k, v).shape
        torch.Size([1, 4, 200, 16])
        >>> scores = torch.randn(1, 2, 200, requires_grad=True)
        >>> out = gs.attention_forward(q, k, v, k_keep=20, scores=scores)
        >>> out.sum().backward()
        >>> scores.grad.shape
        torch.Size([1, 2, 200])
    """
    causal = boolean("causal", causal)
    if (k_keep is None) != (scores is None):
        missing, given, value = ("scores", "k_keep", k_keep) if scores is None else ("k_keep", "scores", scores)
        raise ValueError(f"{missing} must be given with {given}: SparseK takes both; got {given}={describe(value)}")
    if k_keep is None or scores is None:
        return attention(q, k, v, Causal() if causal else Dense())
    return sparsek_attention(q, k, v, scores, k_keep=k_keep, causal=causal)
