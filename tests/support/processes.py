"""Tests in processes of their own: whether Triton interprets is chosen when it is imported, once for a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]


def in_interpreter(file: str, *tests: str) -> None:
    """These tests of a file, with the kernels in Triton's interpreter, on the CPU."""
    assert tests, "of none, all tests of the repository would run"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    _run([*command, *(f"{file}::{test}" for test in tests)], {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


def compiled(script: str, *arguments: object, cache: Path) -> None:
    """A script that compiles kernels, with a cache that is thrown away; warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    _run(command, {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)})


def _run(command: list[str], more: dict[str, str]) -> None:
    environment = os.environ | more
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-4000:]


# The head of a script for `compiled`: modules launch by `launch`, and `compile_all` compiles what they would have run.
LAUNCHES = """
import sys
import torch
from gossamer.kernels import relaunch

work = []

def launch(function, grid, *given, **named):
    given += tuple(named.pop(name) for name in list(relaunch.parameters(function))[len(given):])
    facts = [relaunch.Pointer(str(x.dtype)[6:], True) if isinstance(x, torch.Tensor) else x for x in given]
    work.append((function, relaunch.without_values(function, facts), named))

def compile_all(number):
    assert len(work) == number
    for function, facts, options in work:
        relaunch.compiled_for(function, facts, {**options, "enable_fp_fusion": True}, int(sys.argv[1]))
"""


def triton_on_a_cpu(monkeypatch: pytest.MonkeyPatch, structure: Any, name: str) -> Iterator[None]:
    """The steps of a fixture: kernels in Triton compute calls on a CPU, and the function that makes structure fails."""
    from gossamer.kernels.triton import IMPLEMENTATION
    from gossamer.memo import forget_all
    from gossamer.torch import decoding

    def structured(*_: Any) -> Any:
        raise AssertionError("structure was made")

    limits = replace(IMPLEMENTATION.capability, devices=frozenset({"cpu"}), min_sm=None)
    monkeypatch.setattr(type(IMPLEMENTATION), "capability", limits)
    monkeypatch.setattr(structure, name, structured)
    for forget in (forget_all, decoding.sees_on.cache_clear):
        forget()
    yield
    for forget in (forget_all, decoding.sees_on.cache_clear):
        forget()
