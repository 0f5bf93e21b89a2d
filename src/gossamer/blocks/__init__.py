"""Key blocks that scores choose, as functions of tensors on their device, which read nothing back to the host.

From torch: `api.py`, the function, and `pages.py`, which chooses pages of a cache. The definition, in operations of
torch: `scores.py`, `lists.py`. `operator.py`: the operator that takes the kernels of `triton/` where they compute a
call. From JAX: `in_jax.py`, the function, and `lists_jax.py`, the definition. What both check: `checks.py`. What is of
torch is loaded on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see
    from gossamer.blocks.api import SelectedBlocks, topk_blocks
    from gossamer.blocks.pages import PageBounds, TopkPages, topk_pages

__all__ = ["PageBounds", "SelectedBlocks", "TopkPages", "topk_blocks", "topk_pages"]
_MODULES = dict.fromkeys(("SelectedBlocks", "topk_blocks"), "gossamer.blocks.api")
_MODULES |= dict.fromkeys(("PageBounds", "TopkPages", "topk_pages"), "gossamer.blocks.pages")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)  # looked up once
    return found
