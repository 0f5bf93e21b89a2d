"""gossamer: exact attention over only the (query, key) pairs that a pattern keeps, with gradients.

Importing this package needs numpy alone; `gossamer.attention` needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gossamer import patterns
from gossamer.layouts import BlockLayout
from gossamer.patterns import *  # noqa: F403  (patterns.__all__ lists them, once)

__version__ = "0.1.0"

__all__ = [
    "BlockIndices",
    "BlockLayout",
    "DocumentIds",
    "EntmaxAux",
    "Indices",
    "PackedSequences",
    "PageBounds",
    "Pages",
    "Unsupported",
    "__version__",
    "attention",
    "attention_forward",
    "device_layout",
    "entmax_attention",
    "explain",
    "explain_entmax",
    "explain_sparsek",
    "from_flex",
    "last_topk",
    "merge",
    "nn",
    "sparsek",
    "sparsek_attention",
    "sparsek_causal",
    "to_flex",
    "topk_blocks",
    "topk_keys",
    "topk_pages",
    "varlen",
]
__all__ += patterns.__all__

# Where the names other than patterns are defined: those of torch are loaded on their first use.
_MODULES = {
    "BlockIndices": "gossamer.torch.structure",
    "DocumentIds": "gossamer.torch.structure",
    "Indices": "gossamer.torch.structure",
    "PackedSequences": "gossamer.torch.structure",
    "Pages": "gossamer.torch.structure",
    "EntmaxAux": "gossamer.entmax",
    "Unsupported": "gossamer.plan.problem",
    "attention": "gossamer.torch.api",
    "attention_forward": "gossamer.sparse_k",
    "device_layout": "gossamer.torch.device_layout",
    "entmax_attention": "gossamer.entmax",
    "explain": "gossamer.torch.explain",
    "explain_entmax": "gossamer.entmax",
    "merge": "gossamer.torch.merge",
    "nn": "gossamer.nn",
    "topk_keys": "gossamer.entmax",
    "varlen": "gossamer.torch.varlen",
    "last_topk": "gossamer.sparse_k",
    "sparsek": "gossamer.sparse_k",
    "explain_sparsek": "gossamer.sparse_k",
    "sparsek_attention": "gossamer.sparse_k",
    "sparsek_causal": "gossamer.sparse_k",
    "topk_blocks": "gossamer.blocks",
    "topk_pages": "gossamer.blocks",
    "PageBounds": "gossamer.blocks",
    "from_flex": "gossamer.integrations.flex",
    "to_flex": "gossamer.integrations.flex",
}
_OF_JAX = ("create_sparsity_mask", "sparse_attention")  # which is imported by its own name

if TYPE_CHECKING:  # what type checkers and editors see
    from gossamer import nn as nn
    from gossamer.blocks import PageBounds, topk_blocks, topk_pages
    from gossamer.entmax import EntmaxAux, entmax_attention, explain_entmax, topk_keys
    from gossamer.integrations.flex import from_flex, to_flex
    from gossamer.plan.problem import Unsupported
    from gossamer.sparse_k import (
        attention_forward,
        explain_sparsek,
        last_topk,
        sparsek,
        sparsek_attention,
        sparsek_causal,
    )
    from gossamer.torch.api import attention
    from gossamer.torch.device_layout import device_layout
    from gossamer.torch.explain import explain
    from gossamer.torch.merge import merge
    from gossamer.torch.structure import BlockIndices, DocumentIds, Indices, PackedSequences, Pages
    from gossamer.torch.varlen import varlen
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            where = f"; it is gossamer.jax.{name}, after `import gossamer.jax`" if name in _OF_JAX else ""
            raise AttributeError(f"module 'gossamer' has no attribute {name!r}{where}")
        try:
            module = importlib.import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"gossamer.{name} needs torch; in a checkout of gossamer: pip install '.[torch]'", name="torch"
            ) from error
        found = globals()[name] = module if name == "nn" else getattr(module, name)  # looked up once
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
