"""alpha-entmax attention and exact top-k: the rows' weights are exactly zero but for a few keys that the scores choose.

`api.py`: the functions, whose arguments `arguments.py` checks and whose later calls `calls.py` knows. The definition,
in operations of torch that run on any device in chunks of rows, never N x N: `forward.py`, `backward.py`. `ways.py`:
which calls take the kernels, and why others do not; `launches.py` binds what `launch/` describes, `triton/` and
`hopper/` hold them. `nn.py`: the module. `explain.py`: what a call does.
"""

from gossamer.entmax.api import EntmaxAux, entmax_attention, topk_keys
from gossamer.entmax.explain import EntmaxExplanation, explain_entmax

__all__ = ["EntmaxAux", "EntmaxExplanation", "entmax_attention", "explain_entmax", "topk_keys"]
