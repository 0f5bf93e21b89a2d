"""What of the package a call enters, counted: most of what it costs on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import gossamer as gs


class Entered(NamedTuple):
    """What a call enters of the package: files, and named functions in them."""

    files: set[str]
    functions: set[tuple[str, str]]


def entered(run: Callable[[], Any]) -> Entered:
    """Every file and every named function of the package that a call enters."""
    root = f"{Path(gs.__file__).parent}/"
    functions: set[tuple[str, str]] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            functions.add((code.co_filename.removeprefix(root), code.co_qualname))

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Entered({file for file, _ in functions}, functions)
