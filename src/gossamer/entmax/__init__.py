"""alpha-entmax attention and exact top-k: the rows' weights are exactly zero but for a few keys that the scores choose.

The operator is an edge of torch: torch operations that run on any device, in chunks of rows, never N x N.
"""

from gossamer.entmax.api import EntmaxAux, entmax_attention, topk_keys
from gossamer.entmax.explain import EntmaxExplanation, explain_entmax

__all__ = ["EntmaxAux", "EntmaxExplanation", "entmax_attention", "explain_entmax", "topk_keys"]
