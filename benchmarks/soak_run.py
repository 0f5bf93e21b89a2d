"""Running random calls of torch: memory in which they run.

Every process that runs calls (`soak_outcomes.py`) enters `prepared` first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossamer.plan import partition

IN_PARTS = [False]  # whether the call of `attention` that is run is computed in parts; read by `prepared`


@contextmanager
def prepared() -> Iterator[None]:
    """Fill new memory with NaN, and choose parts, whatever they cost, for the calls for which `run` says so."""
    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Any) -> None:
        original = getattr(owner, name)
        kept.append((owner, name, original))
        setattr(owner, name, make(original))

    def fill(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.fill_(math.nan)
        return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

    def poisoned(original: Any) -> Any:
        return lambda *a, **k: fill(original(*a, **k))

    def cheap(original: Any) -> Any:
        return lambda *a: 0.0 if IN_PARTS[0] else original(*a)

    def parted(original: Any) -> Any:
        def cheaper(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
            if IN_PARTS[0]:
                cost.call = lambda *a, **k: math.inf
            return original(found, pattern, p, sizes, cost)

        return cheaper

    guards = torch._C._dynamo.guards  # by which bound launches allocate
    every = {
        torch: ("empty", "empty_like"),
        Tensor: ("new_empty",),
        guards: ("_empty_strided_cpu", "_empty_strided_cuda"),
    }
    for owner, names in every.items():
        for name in names:
            replace(owner, name, poisoned)
    replace(partition, "_classes_cost", cheap)
    replace(partition, "_cheaper", parted)
    try:
        yield
    finally:
        for owner, name, original in reversed(kept):
            setattr(owner, name, original)
