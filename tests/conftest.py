"""Fixtures that several tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.empty, empty_like and new_empty return is filled: NaN for floats, a large number for integers."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return x.fill_(float("nan"))
        return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _original=original, **k: fill(_original(*a, **k)))
    yield


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls are computed in parts whatever that costs; returns the splits that were taken."""
    from gossamer.torch import parts, split

    cheaper, forward, split_for = split._cheaper, parts.forward, parts.split_for
    taken: list[Any] = []

    def take(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
        cost.call = lambda *a, **k: math.inf
        return cheaper(found, pattern, p, sizes, cost)

    def run(found: Any, *rest: Any) -> Any:
        taken.append(found)
        return forward(found, *rest)

    def forgetful(plan: Any, terms: Any, handle: int) -> Any:
        """What it finds, forgotten by the plan."""
        plan.splits.clear()
        try:
            return split_for(plan, terms, handle)
        finally:
            plan.splits.clear()

    monkeypatch.setattr(split, "_cheaper", take)
    monkeypatch.setattr(split, "_classes_cost", lambda *a: 0.0)
    monkeypatch.setattr(parts, "forward", run)
    monkeypatch.setattr(split, "_known", split._known.copy())
    split._known.clear()
    monkeypatch.setattr(parts, "split_for", forgetful)
    return taken
