"""What a command says when it cannot do what was asked: one line, exit code 2."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

EXTRAS = {"torch": "torch", "matplotlib": "plot", "scipy": "dev"}


class Refused(ValueError):
    """The user's input or machine does not allow what was asked; the message is all that is shown."""


class Commands(TyperGroup):
    """A command group whose `Refused` errors become one line on standard error and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Refused as error:
            typer.echo(f"gossamer: {error}", err=True)
            raise typer.Exit(2) from None


def need(module: str, user: str) -> ModuleType:
    """Imports `module` for `user` (a command), or says which extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRAS[module.partition(".")[0]]
        raise Refused(f"{user} needs {module} ({error}); in a checkout of gossamer: pip install '.[{extra}]'") from None
