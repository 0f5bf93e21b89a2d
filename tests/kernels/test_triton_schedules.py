"""Launches in Triton over layouts of numpy's arrays, as JAX makes them: those over tensors, and no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gossamer as gs
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import BYTES, Direction, Operand, compact
from gossamer.layouts.build import build
from gossamer.layouts.gather import build_gather
from gossamer.plan.problem import Problem
from tests.repository.test_imports import run

pytest.importorskip("triton")

from gossamer.kernels.triton import IMPLEMENTATION

B, H, G, N = 2, 4, 2, 300


def mask(share: float) -> gs.BlockMask:
    return gs.BlockMask(np.random.default_rng(0).random((B, 1, N, N)) < share, 1)


CASES: dict[str, tuple[gs.Pattern, int, int]] = {  # a pattern, queries of a tile or group, and a head size
    "window": (gs.SlidingWindow(40, 3), 64, 64),
    "documents": (gs.Document(np.arange(B * N).reshape(B, N) // 70), 64, 40),
    "random": (mask(0.3), 128, 64),
    "wide": (gs.BigBird(64) | gs.Causal(), 64, 320),
    "rows": (mask(0.02), 1, 64),
    "groups of rows": (mask(0.05), 16, 32),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_arrays_are_those_of_tensors(case: str, dtype: str, direction: Direction) -> None:
    pattern, rows, D = CASES[case]
    gathers = rows < 64
    layout: Any = (
        build_gather(pattern, N, N, block_q=rows) if gathers else build(pattern, N, N, block_q=rows, block_kv=64)
    )
    operands = {
        name: Operand(dtype, (B, heads, N, D), compact((B, heads, N, D)))
        for name, heads in (("dout", H), ("q", H), ("k", G), ("v", G), ("out", H))
    }
    operands["lse"] = Operand("float32", (B, H, N), compact((B, H, N)))
    given = operands if direction == "backward" else {name: operands[name] for name in "qkv"}
    p = Problem(B, H, G, N, N, D, D, dtype, "cuda", 90, 132, backward=direction == "backward")
    ours, wanted = (IMPLEMENTATION.prepare(p, x, direction, Scoring(0.1, 0), given) for x in (layout, layout.to("cpu")))
    assert ours.launch == wanted.launch and ours.layout.keys() == wanted.layout.keys()
    for name, x in ours.layout.items():
        other = wanted.layout[name]
        assert isinstance(x, np.ndarray) and x.dtype == np.int32 and x.flags.c_contiguous
        assert BYTES[str(x.dtype)] == other.element_size() and np.array_equal(x, other.numpy())


DESCRIBE = """
import sys
import numpy as np
import gossamer as gs
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Operand, compact, names_of
from gossamer.kernels.ptx import call_of
from gossamer.kernels.triton import IMPLEMENTATION
from gossamer.layouts.build import build
from gossamer.layouts.gather import build_gather
from gossamer.plan.problem import Problem

p = Problem(1, 2, 2, 300, 300, 64, 64, "float32", "cuda", 90, 132)
given = {name: Operand("float32", (1, 2, 300, 64), compact((1, 2, 300, 64))) for name in "qkv"}
sparse = gs.BlockMask(np.random.default_rng(0).random((300, 300)) < 0.02, 1)
for layout in (build(gs.Causal(), 300, 300, block_q=128, block_kv=128), build_gather(sparse, 300, 300, block_q=1)):
    for step in IMPLEMENTATION.prepare(p, layout, "forward", Scoring(0.1, 0), given).launch.steps:
        places = {name: at for at, name in enumerate(dict.fromkeys(names_of(step.arguments)))}
        call = call_of(IMPLEMENTATION.function(step.kernel.name), step, 90, places, len(places))
        print(call.name, call.text.count(".entry"))
assert "torch" not in sys.modules
"""


def test_calls_are_described_and_compiled_without_torch() -> None:
    found = set(run(DESCRIBE, blocked=("torch",)).splitlines())
    assert {"forward_kernel 1", "rows_forward_kernel 1"} < found and all(line.endswith(" 1") for line in found)
