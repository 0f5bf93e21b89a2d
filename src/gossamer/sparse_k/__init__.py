"""SparseK: the keys of the largest scores at each step, under differentiable gates, and attention over them.

`operator.py`: thresholds and gates, defined in `thresholds.py`, with kernels in `thresholds_triton/`. `attention.py`:
the attention over a window and gated keys, defined in `chunks.py`; `launch/` calls its kernels, `triton/` and
`hopper/` hold them. `nn.py` and `cache.py`: the module. `paged.py`: attention over a cache in pages whose keys bring
their scores along, `scored_keys.py`. `explain.py`: what a call does.
"""

from gossamer.sparse_k.attention import sparsek_attention
from gossamer.sparse_k.explain import SparseKExplanation, explain_sparsek
from gossamer.sparse_k.forward import attention_forward
from gossamer.sparse_k.operator import CausalSparseK, SparseK, last_topk, sparsek, sparsek_causal

__all__ = ["CausalSparseK", "SparseK", "SparseKExplanation", "attention_forward", "explain_sparsek", "last_topk"]
__all__ += ["sparsek", "sparsek_attention", "sparsek_causal"]
