"""Key blocks that scores choose, as functions of tensors on their device, which read nothing back to the host.

From torch: `api.py`, the function. The definition, in operations of torch: `scores.py`, `lists.py`. `operator.py`: the
operator that takes the kernels of `triton/` where they compute a call. From JAX: `in_jax.py`, the function, and
`lists_jax.py`, the definition. What both check: `checks.py`. What is of torch is loaded on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see
    from gossamer.blocks.api import SelectedBlocks, topk_blocks

__all__ = ["SelectedBlocks", "topk_blocks"]
_MODULES = {"SelectedBlocks": "gossamer.blocks.api", "topk_blocks": "gossamer.blocks.api"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)  # looked up once
    return found
