"""alpha-entmax attention and exact top-k: the rows' weights are exactly zero but for a few keys that the scores choose.

From torch: `api.py`, the functions, whose arguments `arguments.py` checks and whose later calls `calls.py` knows. The
definition, in operations of torch that run on any device in chunks of rows, never N x N: `forward.py`, `backward.py`.
`ways.py`: which calls take the kernels, and why others do not; `launches.py` binds what `launch/` describes, `triton/`
and `hopper/` hold them. `nn.py`: the module. `explain.py`: what a call does.

From JAX: `in_jax.py`, the function; the definition in `lax`, over the tiles of a pattern: `rows_jax.py`,
`selection_jax.py`, `thresholds_jax.py`. What both check: `checks.py`. What is of torch is loaded on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see
    from gossamer.entmax.api import EntmaxAux, entmax_attention, topk_keys
    from gossamer.entmax.explain import EntmaxExplanation, explain_entmax

__all__ = ["EntmaxAux", "EntmaxExplanation", "entmax_attention", "explain_entmax", "topk_keys"]
_MODULES = {
    "EntmaxAux": "gossamer.entmax.api",
    "EntmaxExplanation": "gossamer.entmax.explain",
    "entmax_attention": "gossamer.entmax.api",
    "explain_entmax": "gossamer.entmax.explain",
    "topk_keys": "gossamer.entmax.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)  # looked up once
    return found
