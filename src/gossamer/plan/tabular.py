"""The print form of explanations."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Lines of names and values, the values one below the other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
