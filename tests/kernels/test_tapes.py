"""Launches of calls that repeat, of kernels that are stood in for: found in order, else Triton's own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gossamer.kernels import relaunch
from gossamer.kernels.tapes import Tape, launch, launches_on


class Standing:
    """Stands for a kernel of x, n and SIZE: what Triton launches of it itself."""

    def __init__(self) -> None:
        self.own: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.own.append((grid, arguments, options))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled for, and what such launches got."""
    got: list[Any] = []

    def launcher(function: Any, programs: relaunch.Programs) -> Any:
        got.append(programs)
        return lambda *arguments: got.append(arguments)

    monkeypatch.setattr(relaunch, "launcher", launcher)
    monkeypatch.setattr(relaunch, "parameters", lambda function: {"x": None, "n": None, "SIZE": None})
    return got


def test_a_call_that_repeats_runs_what_was_recorded(run: list[Any]) -> None:
    kernel, tape, x, y = Standing(), Tape(), torch.zeros(4), torch.zeros(5)[1:]
    with tape.play():
        launch(kernel, (2,), x, 3, SIZE=8, num_warps=4)
        launch(kernel, (2, 1), y, 3, SIZE=16)
    first, of_first, second, of_second = run
    assert first == relaunch.Programs((2,), (("num_warps", 4),), (relaunch.Pointer("float32", True), 3, 8))
    assert second == relaunch.Programs((2, 1), (), (relaunch.Pointer("float32", False), 3, 16))
    assert of_first == (x.data_ptr(), 3, 8) and of_second == (y.data_ptr(), 3, 16)
    del run[:]
    z = torch.zeros(4)
    with tape.play():
        launch(kernel, (2,), z, 3, SIZE=8, num_warps=4)
        launch(kernel, (2, 1), y, 4, SIZE=16)
    assert run == [(z.data_ptr(), 3, 8), (y.data_ptr(), 4, 16)] and not kernel.own
    launch(kernel, (2,), x, 3, SIZE=8)  # without a tape
    assert kernel.own == [((2,), (x, 3), {"SIZE": 8})] and len(run) == 2


def test_launches_that_differ_are_tritons_own(run: list[Any]) -> None:
    kernel, other, tape, x = Standing(), Standing(), Tape(), torch.zeros(4)
    with tape.play():
        launch(kernel, (2,), x, 3, SIZE=8)
    del run[:]
    with tape.play():
        launch(other, (2,), x, 3, SIZE=8)
        launch(kernel, (2,), x, 3, SIZE=8)  # one more
    with tape.play():
        launch(kernel, (3,), x, 3, SIZE=8)
    assert not run and len(other.own) == 1 and len(kernel.own) == 2


def test_what_fails_is_recorded_again_and_tapes_nest(run: list[Any]) -> None:
    kernel, tape, inner, x = Standing(), Tape(), Tape(), torch.zeros(4)
    with pytest.raises(ZeroDivisionError), tape.play():
        launch(kernel, (2,), x, 3, SIZE=8)
        _ = 1 // 0
    assert tape.launches is None
    with tape.play():
        launch(kernel, (1,), x, 3, SIZE=8)
        with inner.play():
            launch(kernel, (2,), x, 3, SIZE=8)
        launch(kernel, (3,), x, 3, SIZE=8)
    assert tape.launches is not None and [one.grid for one in tape.launches] == [(1,), (3,)]
    assert inner.launches is not None and [one.grid for one in inner.launches] == [(2,)]


def test_a_tape_is_of_a_thread(run: list[Any]) -> None:
    kernel, tape, x = Standing(), Tape(), torch.zeros(4)
    with tape.play():
        other = threading.Thread(target=lambda: launch(kernel, (2,), x, 3, SIZE=8))
        other.start()
        other.join()
        launch(kernel, (1,), x, 3, SIZE=8)
    assert len(kernel.own) == 1 and tape.launches is not None and len(tape.launches) == 1
    with launches_on(torch.device("cpu"))():
        launch(kernel, (1,), x, 3, SIZE=8)
    assert len(kernel.own) == 2
