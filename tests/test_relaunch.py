"""Launches past Triton's look-up: what is looked up again, and what is not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

import gossamer as gs
from gossamer.kernels import relaunch
from gossamer.plan.problem import Problem


class Compiled:
    """A compiled kernel, whose grid has three numbers: grid, stream, function, metadata and three of hooks first."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[str, tuple[int, ...], object]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]):
        assert len(grid) == 3
        return lambda *arguments: self.calls.append(("hooked", grid, arguments))

    def run(self, x: int, y: int, z: int, *arguments) -> None:
        assert arguments[:6] == ("stream", "function", "metadata", None, None, None)
        self.calls.append(("known", (x, y, z), arguments[6:]))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)


class Kernel:
    """A Triton kernel that computes nothing and says how it was launched."""

    arg_names = ("size", "x", "scale", "y", "table", "FLAG")

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], object]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def compiled(**arguments):
            self.calls.append(("looked up", grid, arguments))
            return Compiled(self.calls)

        return compiled


def test_a_known_kernel_is_launched_past_the_look_up(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch, "MOST_KNOWN", 2)
    kernel, known, table = Kernel(), {}, torch.zeros(3)
    x, other = torch.zeros(2, 3), torch.zeros(2, 3)

    def run(key: str, x: torch.Tensor, scale: float) -> None:
        rest = {"size": 7, "table": table, "FLAG": True, "num_warps": 4}
        relaunch.launch(known, kernel, (3, 2), key, {"x": x, "y": None}, {"scale": scale}, lambda: rest)

    run("a", x, 0.5)
    run("a", other, 0.25)
    assert kernel.calls[0][:2] == ("looked up", (3, 2)) and kernel.calls[0][2]["x"] is x
    assert kernel.calls[1] == ("known", (3, 2, 1), (7, other.data_ptr(), 0.25, None, table.data_ptr(), True))
    for key in "abca":
        run(key, x, 0.5)
    assert [call[0] for call in kernel.calls[2:]] == ["known", "looked up", "looked up", "looked up"]


@pytest.mark.parametrize("change", ["stride", "offset", "dtype", "none"])
def test_the_key_tells_what_triton_compiles_for(change: str, streams: None) -> None:
    kernel, known, x = Kernel(), {}, torch.zeros(1, 2, 20, 17)
    changed = {"stride": x.transpose(1, 2), "offset": x[..., 1:], "dtype": x.half(), "none": None}[change]
    for given in (x, torch.ones_like(x), changed):
        relaunch.launch(known, kernel, (1,), None, {"x": given}, {}, dict)
    assert [call[0] for call in kernel.calls] == ["looked up", "known", "looked up"]


def test_a_profiler_sees_known_launches(streams: None) -> None:
    kernel, known, x = Kernel(), {}, torch.zeros(2, 3)
    seen = knobs.runtime.launch_enter_hook

    def run() -> str:
        relaunch.launch(known, kernel, (1,), None, {"x": x}, {}, dict)
        return kernel.calls[-1][0]

    def hook(metadata: object) -> None: ...

    assert [run(), run()] == ["looked up", "known"]
    seen.add(hook)
    try:
        assert run() == "hooked"
    finally:
        seen.remove(hook)
    assert run() == "known"


def test_threads_share_one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound call holds addresses of a schedule's tensors: one made at the same time must not take its place."""
    from gossamer.kernels.triton.block import schedule as block
    from gossamer.kernels.triton.gather import schedule as gather
    from gossamer.layouts import build_gather

    pattern = gs.SlidingWindow(9) | gs.Dilated(3, 0, 40)
    blocks = pattern.layout(300, 300, block_q=64, block_kv=64).to("cpu")
    gathers = build_gather(pattern, 300, 300, block_q=16).to("cpu")
    problem = Problem(1, 2, 1, 300, 300, 16, 16, "float32", "cpu")
    both = threading.Barrier(2)

    def late(make):
        def made(*arguments):
            both.wait(timeout=30)  # both threads have found nothing
            return make(*arguments)

        return made

    for module, name in (
        (block, "_make_schedule"),
        (block, "work_items"),
        (gather, "_make_launch"),
        (gather, "_make_work"),
    ):
        monkeypatch.setattr(module, name, late(getattr(module, name)))
    for ask in (
        lambda: block.schedule_of(blocks, False, 1, 2, 2, 2),
        lambda: gather.launch_of(problem, gathers, "forward", None, 2),
    ):
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: ask(), range(2))  # noqa: B023
        assert first is second is ask() and first.cut.slots > 0
