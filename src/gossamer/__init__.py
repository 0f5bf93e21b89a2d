"""gossamer: exact attention over only the (query, key) pairs that a pattern keeps, with gradients.

Importing this package needs numpy alone; `gossamer.attention` needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CSR",
    "BigBird",
    "BlockLayout",
    "BlockMask",
    "Causal",
    "Dense",
    "Dilated",
    "DilatedSegment",
    "Document",
    "Local",
    "LongNet",
    "Longformer",
    "Neighborhood",
    "Pattern",
    "PerBatch",
    "PerHead",
    "PowerStrided",
    "Predicate",
    "SlidingWindow",
    "Strided",
    "Tree",
    "Unsupported",
    "__version__",
    "attention",
    "explain",
    "from_flex",
    "merge",
    "to_flex",
]

# The modules that define public names other than patterns.
_MODULES = {
    "BlockLayout": "gossamer.layouts",
    "Unsupported": "gossamer.kernels.contract",
    "attention": "gossamer.torch",
    "explain": "gossamer.torch",
    "merge": "gossamer.torch",
    "from_flex": "gossamer.integrations.flex",
    "to_flex": "gossamer.integrations.flex",
}

if TYPE_CHECKING:  # what type checkers and editors see; at run time a name is loaded on its first use
    from gossamer.integrations.flex import from_flex, to_flex
    from gossamer.kernels.contract import Unsupported
    from gossamer.layouts import BlockLayout
    from gossamer.patterns import (
        CSR,
        BigBird,
        BlockMask,
        Causal,
        Dense,
        Dilated,
        DilatedSegment,
        Document,
        Local,
        Longformer,
        LongNet,
        Neighborhood,
        Pattern,
        PerBatch,
        PerHead,
        PowerStrided,
        Predicate,
        SlidingWindow,
        Strided,
        Tree,
    )
    from gossamer.torch.api import attention
    from gossamer.torch.explain import explain
    from gossamer.torch.merge import merge
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
        try:
            module = importlib.import_module(_MODULES.get(name, "gossamer.patterns"))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"gossamer.{name} needs torch: pip install 'gossamer[torch]'", name="torch") from error
        found = globals()[name] = getattr(module, name)  # looked up once
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
