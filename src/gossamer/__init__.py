"""gossamer: exact attention over only the (query, key) pairs that a pattern keeps, with gradients.

Importing this package needs numpy alone; `gossamer.attention` needs torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PATTERNS = (
    "Pattern", "Dense", "Causal", "SlidingWindow", "Local", "BlockMask", "BigBird", "Longformer", "Dilated",
    "DilatedSegment", "Strided", "PowerStrided", "LongNet", "Document", "CSR", "Tree", "Predicate", "PerHead",
)  # fmt: skip

# Public name -> the module that defines it; loaded on first use.
_PUBLIC = dict.fromkeys(_PATTERNS, "gossamer.patterns") | {
    "BlockLayout": "gossamer.layouts",
    "Unsupported": "gossamer.kernels.contract",
    "attention": "gossamer.torch",
    "explain": "gossamer.torch",
    "merge": "gossamer.torch",
    "from_flex": "gossamer.integrations.flex",
    "to_flex": "gossamer.integrations.flex",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)  # looked up once
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
