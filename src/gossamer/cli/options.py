"""Numbers on the command line: a wrong one is told with its option, what was given and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

from gossamer.cli.errors import shorten

Number = TypeVar("Number", int, float)


def integer(least: int, most: int) -> Callable[[str], int]:
    """The parser of an option that takes an integer within [least, most]."""
    return _within(int, "an integer", least, most)


def number(least: float, most: float) -> Callable[[str], float]:
    """The parser of an option that takes a number within [least, most]."""
    return _within(float, "a number", least, most)


def _within(kind: Callable[[str], Number], word: str, least: Number, most: Number) -> Callable[[str], Number]:
    def read(given: str) -> Number:
        try:
            value = kind(given)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:  # which no NaN is
            raise typer.BadParameter(f"must be {word} from {least} to {most}, got {shorten(repr(given))}")
        return value

    return read
