"""Fixtures that several tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gossamer.kernels.hopper.store import ARCHITECTURE
from gossamer.memo import forget_all

# The compiler of the Hopper kernels asks for it when it is first imported, which a test may do before a kernel is made.
os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)


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
    forget_all()  # a call that was bound before would take its memory as it was then
    yield
    forget_all()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls are computed in parts whatever that costs; the splits that were taken."""
    from parts_cases import at_any_price, forget

    taken = at_any_price(monkeypatch)
    forget()
    yield taken
    forget()
