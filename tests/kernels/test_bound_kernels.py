"""The kernels that find the interval of keys of each row, against the operations of torch that define it.

`BOUND_CASES=4000 TRITON_INTERPRET=1 pytest tests/kernels/test_bound_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gossamer as gs
from gossamer.patterns.reach import MOST, Reach, Rule
from gossamer.plan.arguments import most_offset
from gossamer.torch import device_arrays, fused_structure
from gossamer.torch.arguments import INTEGERS
from gossamer.torch.structure.base import Joined, Positions, Sizes, Structure
from gossamer.torch.structure.fused_bounds import fused_bounds
from gossamer.torch.structure.inputs import Inputs, _bounds
from tests.support.processes import INTERPRETING, LAUNCHES, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

from gossamer.kernels.structure import bounds as bounds_kernels

CASES = int(os.environ.get("BOUND_CASES", "60" if INTERPRETING else "200"))
FAR = 2**62


def typed(rng: np.random.Generator, numbers: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of a type that holds the numbers, of any strides."""
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    fits = [x for x in INTEGERS if torch.iinfo(x).min <= least and most <= torch.iinfo(x).max]
    x = torch.from_numpy(numbers.astype(np.int64)).to(fits[rng.integers(len(fits))])
    if x.ndim and rng.random() < 0.3:
        x = torch.stack([x, x + 1], -1)[..., 0]  # each other element
    return x.to(device) if x.is_contiguous() else torch.stack([x, x], -1).to(device)[..., 0]


def extreme(rng: np.random.Generator, most: int, shape: tuple[int, ...] | int | None = None) -> np.ndarray:
    """Numbers around [0, most], some far from it."""
    numbers = rng.integers(-most // 4 - 2, most + most // 4 + 3, shape)
    far = rng.choice([-FAR, FAR, -(2**31), MOST, 2**32 + 3, 0, most], shape)
    return np.where(rng.random(shape) < (0.3 if rng.random() < 0.3 else 0), far, numbers)


def draw_reach(rng: np.random.Generator, K: int) -> Reach:
    distances = [None, 0, 1, 5, K, -3, -K, MOST - 1, MOST, 1 - MOST, int(rng.integers(-K, K + 1))]
    left, right = (distances[rng.integers(len(distances))] for _ in range(2))
    first = [None, None, 0, 3, K, K + 7][rng.integers(6)]
    block = [0, 0, 0, 1, 7, 64, K, MOST, int(rng.integers(1, K + 2))][rng.integers(9)]
    return Reach(left, right, (block,) if block else (), first)


def draw_edges(rng: np.random.Generator, n: int, most: int) -> np.ndarray:
    """(n,) edges, of which some decrease or are outside."""
    numbers = rng.integers(0, most + 1, n) if rng.random() < 0.7 else extreme(rng, most, n)
    return np.sort(numbers) if rng.random() < 0.7 else numbers


def draw(rng: np.random.Generator, device: torch.device) -> Inputs:
    """What says the bounds of rows by one reach."""
    B, Q, K = (int(rng.choice([1, x, rng.integers(1, y)])) for x, y in ((2, 4), (64, 300), (64, 300)))
    rule = Rule((Reach() if rng.random() < 0.5 else draw_reach(rng, K),))  # many reaches leave no key
    kind = ["positions", "ids", "ids", "edges", "sequences"][rng.integers(5)]
    vectors: list[Tensor | None] = [None, None, None]
    q_offset, most = None, most_offset(Q, K)
    length, n = K, int(rng.choice([1, 2, 5, rng.integers(1, 60)]))
    if kind != "sequences":
        way = rng.random()
        if way < 0.2:
            q_offset = int(rng.choice([-most, most, 0, rng.integers(-Q - 3, K + 3)]))
        elif way < 0.6:
            vectors[0] = typed(rng, extreme(rng, K, None if way < 0.3 else (B,)), device)
        if q_offset is not None or vectors[0] is not None:
            length += int(rng.choice([0, 1, rng.integers(0, 99)]))
    for at in (1, 2):
        if rng.random() < 0.3 or (kind == "positions" and at == 2 and vectors[0] is vectors[1] is None):
            vectors[at] = typed(rng, extreme(rng, K, (B,)), device)
    structure: Structure
    if kind == "sequences":
        used = typed(rng, extreme(rng, K, n), device) if rng.random() < 0.5 else None
        edges = (typed(rng, draw_edges(rng, n + 1, most), device) for most in (Q, K))
        structure = gs.PackedSequences(*edges, seqused_k=used)
        structure.rule = rule
    elif kind == "positions":
        structure = Positions(rule)
    elif kind == "edges":
        structure = gs.DocumentIds.from_cu_seqlens(typed(rng, draw_edges(rng, n, length), device), length)
        structure = Joined((structure,), rule)
    else:
        shape = [(length,), (1, length), (B, length)][rng.integers(3)]
        often = rng.choice([0, 0.01, 0.03, 0.1, 0.9])  # runs that are longer than chunks too
        numbers = (rng.random(shape) < often).cumsum(-1) % 100
        structure = Joined((gs.DocumentIds(typed(rng, numbers, device)),), rule)
    return Inputs(structure, Sizes(B, 1, 1, Q, K), device, q_offset, *vectors)


def check(inputs: Inputs) -> None:
    """Both bounds are those of the operations."""
    reach, vectors = inputs.structure.rule.reaches[0], (inputs.offset, inputs.key_starts, inputs.key_lengths)
    want = _bounds(inputs)(reach)
    interval = fused_bounds(inputs.structure, inputs.sizes, inputs.q_offset, vectors, inputs.device)
    assert interval is not None
    for found, wanted in zip(interval(reach), want, strict=True):
        assert found.dtype == torch.int32 and found.is_contiguous()
        assert torch.equal(found, wanted)


@contextmanager
def small_programs(patch: pytest.MonkeyPatch, rng: np.random.Generator) -> Iterator[None]:
    """Few elements for each program, so that there are many of them."""
    with patch.context() as m:
        m.setattr(bounds_kernels, "CHUNK", int(rng.choice([16, 32, 128])))
        m.setattr(bounds_kernels, "SUMS", int(rng.choice([2, 4, 16])))
        m.setattr(bounds_kernels, "EDGES", (4, int(rng.choice([4, 8, 64]))))
        yield


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_bounds(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_arrays, "fused", lambda like: fused_structure.kernels)
    for seed in range(chunk, CASES, 4):
        rng = np.random.default_rng(seed)
        try:
            with small_programs(monkeypatch, rng):
                check(draw(rng, torch.device("cpu")))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
def test_in_interpreter() -> None:
    in_interpreter(__file__, "test_random_bounds")


COMPILE = f"""{LAUNCHES}
from gossamer.kernels.structure import bounds, told

bounds.launch = launch
wide, narrow, edges = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.uint8), torch.zeros(9).int()
sizes, reach = (900, 800, 1000, -7, 2**30), (-1, 800, 1, 0, 700, 90, 600)
bounds.row_bounds(told.NOTHING, None, None, None, wide, narrow, wide, sizes, (*reach, 64))
bounds.row_bounds(told.NOTHING, None, None, None, None, wide, None, sizes, (*reach, 0))
for ids in (torch.zeros(2, 1000).int(), torch.zeros(1000).byte()):
    bounds.row_bounds(told.IDS, ids, None, None, wide, None, None, sizes, (*reach, 0))
bounds.row_bounds(told.DOCUMENTS, edges, None, None, None, None, narrow, sizes, (*reach, 0))
bounds.row_bounds(told.SEQUENCES, edges, edges.long(), narrow, None, None, None, sizes, (*reach, 7))
bounds.row_bounds(told.SEQUENCES, edges, edges, None, None, None, None, sizes, (*reach, 0))
compile_all(12)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, *more(80, 100)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


def test_shapes_under_a_mode() -> None:
    """There the operator is seen, which tells shapes alone, also of one number on the host."""
    with FakeTensorMode():
        ids, offset = torch.zeros(2, 900, dtype=torch.int32, device="cuda"), torch.zeros((), dtype=torch.int64)
        structure = gs.DocumentIds(ids) & gs.Causal()
        vectors = offset, None, None
        interval = fused_bounds(structure, Sizes(2, 1, 1, 700, 800), None, vectors, ids.device)
        assert interval is not None
        for x in interval(structure.rule.reaches[0]):
            assert x.shape == (2, 1, 700) and x.dtype == torch.int32 and x.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("small", [True, False])
def test_random_bounds_on_a_gpu(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        try:
            if small:
                with small_programs(monkeypatch, rng):
                    check(draw(rng, torch.device("cuda")))
            else:
                check(draw(rng, torch.device("cuda")))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
