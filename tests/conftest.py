"""Fixtures that several tests share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gossamer.cute.store import ARCHITECTURE
from gossamer.memo import forget_all
from tests.support.launches import poisoned

# The compiler of the Hopper kernels asks for it when it is first imported, which a test may do before a kernel is made.
os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)


@pytest.fixture
def poison() -> Iterator[None]:
    """As `launches.poisoned`, in all of a test."""
    forget_all()  # a call that was bound before would take its memory as it was then
    with poisoned():
        yield
    forget_all()


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bound launch asks of CUDA, answered where torch has none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)  # where it has a name
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


@pytest.fixture
def fresh_compiler() -> None:
    """Nothing is compiled by torch.compile yet. A reset imports modules of torch whose own code warns, at first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo
        import torch._inductor.cudagraph_trees
    torch._dynamo.reset()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls are computed in parts whatever that costs; the splits that were taken."""
    from tests.support.parts_cases import at_any_price, forget

    taken = at_any_price(monkeypatch)
    forget()
    yield taken
    forget()
