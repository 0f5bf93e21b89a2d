"""Launches of Triton kernels in calls that repeat: recorded once, run past Triton's own look-up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import local
from typing import Any, NamedTuple

import torch

from gossamer.kernels.launch import ALIGNMENT


class _Launched(NamedTuple):
    """A launch that was recorded."""

    function: Any
    grid: tuple[int, ...]
    run: Callable[..., None]
    arrays: tuple[int, ...]  # which arguments are tensors
    constants: tuple[Any, ...]  # what comes behind the arguments


class Tape:
    """The launches of a call, which are those of all calls of its shapes, strides, types, alignment and options.

    An operation that is not described as a `Launch` runs its code within `play()`, and launches by `launch`. What the
    first call was compiled for is not looked up again. A launch that differs is Triton's own.
    """

    def __init__(self) -> None:
        self.launches: tuple[_Launched, ...] | None = None

    def play(self) -> _Playing:
        """Within it launches of this thread are recorded, or found in order."""
        return _Playing(self)


def launches_on(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What gives the context in which calls of one kind launch: of a tape on a GPU."""
    return Tape().play if device.type == "cuda" else nullcontext


_thread = local()


class _Playing:
    __slots__ = ("at", "before", "launches", "made", "tape")

    def __init__(self, tape: Tape) -> None:
        self.tape, self.launches, self.at = tape, tape.launches, 0
        self.made: list[_Launched] = []

    def __enter__(self) -> None:
        self.before = getattr(_thread, "playing", None)
        _thread.playing = self

    def __exit__(self, kind: Any, *error: Any) -> None:
        _thread.playing = self.before
        if kind is None and self.launches is None:
            self.tape.launches = tuple(self.made)

    def run(self, function: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self.launches is None:
            self.made.append(_launched(function, grid, arguments, options))
        at, known = self.at, self.made if self.launches is None else self.launches
        self.at += 1
        if at >= len(known) or known[at].function is not function or known[at].grid != grid:
            function[grid](*arguments, **options)
            return
        launched = known[at]
        given = list(arguments)
        for at in launched.arrays:
            given[at] = given[at].data_ptr()
        launched.run(*given, *launched.constants)


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """function[grid](*arguments, **options), past Triton's look-up in a call that has a tape.

    Args:
        arguments: tensors and numbers, by place.
        options: constants of the kernel, which are its last parameters, and options of the launch.
    """
    playing = getattr(_thread, "playing", None)
    if playing is None:
        function[grid](*arguments, **options)
    else:
        playing.run(function, grid, arguments, options)


def _launched(function: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> _Launched:
    from gossamer.kernels.relaunch import Pointer, Programs, launcher, parameters

    names = list(parameters(function))[len(arguments) :]
    constants = tuple(options[name] for name in names)
    arrays = tuple(at for at, x in enumerate(arguments) if isinstance(x, torch.Tensor))
    facts = list(arguments)
    for at in arrays:
        x = arguments[at]
        facts[at] = Pointer(str(x.dtype).removeprefix("torch."), x.data_ptr() % ALIGNMENT == 0)
    of_launch = tuple((name, x) for name, x in options.items() if name not in names)
    run = launcher(function, Programs(grid, of_launch, (*facts, *constants)))
    return _Launched(function, grid, run, arrays, constants)
