"""Tests that CI leaves out: more types, sizes and architectures of what a test shows already."""

from __future__ import annotations

from typing import Any

import pytest


def more(*values: Any) -> list[Any]:
    """These values as parameters of a test that `make thorough` runs alone; a tuple is of several names."""
    marks = pytest.mark.thorough
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks) for value in values]
