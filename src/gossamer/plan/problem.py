"""The static facts of a call, and the error of one that nothing computes.

Framework names are strings here ("bfloat16", "cuda"), so that torch and JAX share the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# "alibi_distance" is there where slopes count |i - j|, which is not what they count without it.
SCORE_TERMS = ("q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes", "alibi_distance")


class Unsupported(ValueError):
    """No implementation, or not the one asked for, can run the problem. The message lists every reason.

    Examples:
        >>> q = torch.randn(1, 2, 8, 4)
        >>> try:
        ...     gs.attention(q, q, q, implementation="hopper")
        ... except gs.Unsupported as error:
        ...     print(str(error).partition(":")[0])
        implementation='hopper' cannot compute this problem
    """


@dataclass(frozen=True)
class Problem:
    """The static facts of one call: shapes, types, and which features it uses. No data.

    Shapes: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E).
    """

    B: int
    H: int
    G: int
    Q: int
    K: int
    D: int
    E: int
    dtype: str  # "float16", "bfloat16", "float32", "float64"
    device: str  # "cpu", "cuda"
    sm: int | None = None  # compute capability of a CUDA device: 80, 89, 90, 100
    processors: int = 1  # streaming multiprocessors of a CUDA device; 1 elsewhere
    score_terms: frozenset[str] = frozenset()  # subset of SCORE_TERMS
    backward: bool = False
    deterministic: bool = False
    tile: tuple[int, int] | None = None  # (block_q, block_kv) of a layout that the user made
    gather: int | None = None  # queries of a group, of a gather layout that is given: lists that only a device knows
    gather_heads: int = 1  # query heads of each whose rows gather together
    softcap: float | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no pair of a query and a key."""
        return 0 in (self.B, self.H, self.Q, self.K)

    def with_elements(self) -> Problem:
        """This problem where each size is at least 1: an implementation refuses it for all other reasons."""
        B, G, Q, K = (max(1, n) for n in (self.B, self.G, self.Q, self.K))
        return replace(self, B=B, H=self.H or G, G=G, Q=Q, K=K)
