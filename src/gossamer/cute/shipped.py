"""A kernel that is made in advance, as an operation lists it."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, cast

from gossamer.cute.store import Kernel


class Shipped(NamedTuple):
    """A kernel that `gossamer compile` makes and the tests compile: `kind` is its name in the module."""

    module: str  # of the operation's kernels
    kind: str
    arguments: tuple[Any, ...]
    dtype: str
    sizes: frozenset[tuple[int, int]]  # (D, E) that it serves

    @property
    def kernel(self) -> Kernel:
        """The kind of kernel."""
        return cast(Kernel, getattr(importlib.import_module(self.module), self.kind))
