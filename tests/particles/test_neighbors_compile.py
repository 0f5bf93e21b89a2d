"""The kernel of lists of neighbours compiles without a GPU and keeps to registers; launches over its lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.hopper.device.parameters import parameters
from gossamer.kernels.launch import RESULTS, Direction
from gossamer.particles.attend import Attending
from gossamer.particles.groups import launched, shapes_of
from gossamer.particles.kernels.attention.parameters import parameters as of_particles
from gossamer.particles.kernels.compiled import lists
from gossamer.particles.kernels.neighbors.configurations import ListsConfig
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


@needs_compiler
@pytest.mark.parametrize("periodic", [True, False])
def test_lists_compile(periodic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    registers, stack = resources(lists.object(ListsConfig(periodic)))
    assert max(registers) <= 255 and max(stack) == 0
    assert len(list((tmp_path / "particles").glob("lists-*.o"))) == 1


@pytest.mark.parametrize(
    ("direction", "bandwidth", "D", "dtype"),
    [
        ("forward", None, 64, "float16"),
        ("forward", 0.5, 20, "bfloat16"),
        ("backward", None, 20, "float16"),
        ("backward", 0.5, 128, "bfloat16"),
        ("forward", None, 64, "float32"),
    ],
)
def test_launches_take_lists_as_arguments(direction: Direction, bandwidth: float | None, D: int, dtype: str) -> None:
    """Nothing of the lists is in a launch but their shapes, and a kernel gets every array that it has."""
    N, H, T = 1000, 3, 16
    lists = {
        **shapes_of(N, 40, 192),
        "keys": (T * 192,),
        "particles": (64 * T,),
        "items": (T * H, 16),
        "column_items": (T * H, 16),
        "segments": (T, 8),
    }
    found = launched(direction, Attending(0.5, bandwidth, (1.0, None)), H, N, D, 64, dtype, 132, lists)
    launch = found.prepared.launch
    pulls = ("pull_rows", "pull_columns") if direction == "backward" else ()
    assert launch.results == (*RESULTS[direction], *pulls)
    assert launch.arguments == found.given and not launch.layout
    steps = [step for step in launch.steps if step.kernel.name in ("gather", "attention")]
    assert len(steps) == (1 if direction == "forward" else 2)
    for step in steps:
        (config,) = step.kernel.key
        arrays = [name for name in step.arguments if isinstance(name, str)]
        own = parameters("gather", config) if dtype == "float32" else of_particles(config)
        assert len(arrays) == len(own)
        assert {"keys", "bits"} < set(arrays) and ("particles" in arrays) == (dtype != "float32")
        assert config.gaussian == (bandwidth is not None)
    for name in pulls:
        assert launch.arrays[name].shape == ((H, N, 4) if bandwidth else (1, 1, 4))
