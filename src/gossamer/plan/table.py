"""The implementations, in the order in which they are tried. A failed import is a reason, not an unknown name."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from gossamer.plan.capability import Candidate

NAMES = ("small", "hopper", "triton", "blocked", "reference")

LAYOUTS = ("dense", "packed_mask", "block")


@cache
def load(name: str) -> Candidate | str:
    """The implementation called `name`, or why its module cannot be imported."""
    if name not in NAMES:
        raise ValueError(f"implementation={name!r} is not one of {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f"gossamer.kernels.{name}")
    except Exception as error:  # a broken Triton or torch raises more than ImportError
        return f"cannot be imported: {type(error).__name__}: {error}"
    candidate = cast(Candidate, module.IMPLEMENTATION)
    assert candidate.name == name, f"the implementation {name!r} of the table calls itself {candidate.name!r}"
    assert candidate.layout in LAYOUTS, (
        f"the layout of {name} must be one of {', '.join(LAYOUTS)}; it is {candidate.layout!r}"
    )
    return candidate


def available(name: str) -> list[str]:
    """The reasons for which `name` cannot run on this machine; empty when it can."""
    candidate = load(name)
    return [candidate] if isinstance(candidate, str) else candidate.unavailable()
