"""The message and the exit code of a command that fails: one line on standard error."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

EXTRAS = {"torch": "torch", "matplotlib": "plot", "jax": "jax", "h5py": "cosmos", "PIL": "cosmos"}
LONGEST = 200  # characters of what the user gave, in a message

# What a wrong option raises. typer holds click or depends on it, by its version, and this name is public in neither.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Refused(ValueError):
    """The user's input or machine does not allow what was asked; the message is all that is shown, exit code 2."""


class Failed(RuntimeError):
    """A command failed on the way; the message is all that is shown, with exit code 1."""


class Commands(TyperGroup):
    """A command group whose mistakes are one line on standard error, whoever finds them."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if not args:  # without a command the help is shown
            return super().make_context(info_name, args, parent, **extra)
        with _one_line():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        message: Any = error
        place = "" if message.ctx is None else f" ({message.ctx.command_path} --help tells more)"
        _say(shorten(message.format_message().rstrip("."), 2 * LONGEST) + place)
        raise typer.Exit(2) from None
    except Refused as error:
        _say(str(error))
        raise typer.Exit(2) from None
    except Failed as error:
        _say(str(error))
        raise typer.Exit(1) from None


def _say(message: str) -> None:
    typer.echo(f"gossamer: {' '.join(message.split())}", err=True)


def shorten(text: str, most: int = LONGEST) -> str:
    """`text` in at most so many characters: its middle is left out."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


def need(module: str, user: str) -> ModuleType:
    """Imports `module` for `user` (a command), or says which extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRAS[module.partition(".")[0]]
        raise Refused(f"{user} needs {module} ({error}); in a checkout of gossamer: pip install '.[{extra}]'") from None


def check_file(option: str, path: Path) -> None:
    """Makes the folder of `path`, and raises Refused where that file cannot be written; what it holds stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        if there and not (path.is_file() or path.is_dir()):
            # A device or a pipe: opening and closing it would end what is read at its other end.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            with path.open("ab"):
                pass
            if not there:
                os.unlink(os.path.realpath(path))
    except OSError as error:
        raise Refused(f"{option} {shorten(repr(str(path)))} cannot be written: {reason(error)}") from None


def check_picture(option: str, path: Path, user: str) -> None:
    """Check a picture file that `user` (a command) will draw: a .png file, and matplotlib is installed."""
    if path.suffix.lower() != ".png":
        raise Refused(f"{option} must name a .png file, got {shorten(repr(str(path)))}")
    need("matplotlib", user)
    check_file(option, path)


def reason(error: OSError) -> str:
    """The reason for which a file could not be written, in the system's words."""
    if isinstance(error, FileExistsError):  # of `mkdir`, where a file stands in the place of the folder
        return os.strerror(errno.ENOTDIR)
    return error.strerror or str(error)
