"""The kernel that makes the structure of sequences over pages, against the operations of torch that define it.

`PAGE_CASES=4000 TRITON_INTERPRET=1 pytest tests/kernels/test_page_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer.patterns.reach import Reach, Rule
from gossamer.torch import device_arrays, fused_structure
from gossamer.torch.structure.base import narrow, sorted_edges
from gossamer.torch.structure.fused_pages import fused_tiles
from gossamer.torch.structure.page_tiles import Made, Sequences, listed_tiles, query_tiles
from tests.kernels.test_bound_kernels import draw_edges, draw_reach, extreme, typed
from tests.support.processes import INTERPRETING, LAUNCHES, compiled, in_interpreter

pytest.importorskip("triton")

from gossamer.kernels.structure import pages as page_kernels

CASES = int(os.environ.get("PAGE_CASES", "120"))
WILD = (-1, -(2**31), 2**31 - 1)


class Given(NamedTuple):
    """What `fused_tiles` takes."""

    edges: Tensor
    used: Tensor
    table: Tensor
    reaches: tuple[Reach, ...]
    tile: tuple[int, int]
    facts: tuple[int, ...]
    between: int | None


def draw(rng: np.random.Generator, device: torch.device) -> Given:
    """Sequences over pages, of which tables name some that do not exist."""
    tile = int(rng.choice([32, 64, 64, 96, 128])), int(rng.choice([32, 64, 64, 96, 128]))
    size = int(rng.choice([1, 16, 24, 32, 64, 64, 128, 20]))
    R, n, P = (int(rng.integers(1, most)) for most in (rng.choice([3, 6, 9]), min(16, 200 // size + 3), 30))
    slots, G, ratio = n * size, 2, int(rng.choice([1, 2, 3, 4, 6]))
    T = int(rng.choice([1, rng.integers(1, 20), rng.integers(1, 150)]))
    if rng.random() < 0.6:  # lengths of a usual step
        lengths = rng.choice([0, 1, 1, 3, rng.integers(0, 50)], R)
        edges = np.concatenate([[0], lengths.cumsum()])
        T = max(1, int(edges[-1]) + int(rng.choice([0, 0, 3])))
    else:
        edges = draw_edges(rng, R + 1, T)
    used = rng.integers(0, slots + 1, R) if rng.random() < 0.7 else extreme(rng, slots, R)
    table = rng.integers(0, P, (R, n))
    table = np.where(rng.random((R, n)) < rng.choice([0, 0.1]), rng.choice(WILD, (R, n)), table)
    reaches = tuple(
        draw_reach(rng, slots)._replace(step=int(rng.choice([1, 1, 1, 2, 3, 8, 31, 32, 33, 70, slots])))
        for _ in range(int(rng.choice([1, 1, 2, 3])))
    )
    if rng.random() < 0.3:  # a window with sinks
        left = int(rng.integers(0, slots + 1))
        reaches = (Reach(left, 0), Reach(None, 0, first=int(rng.integers(0, 80))))
    _, block_kv = tile
    in_place = size % block_kv == 0 and rng.random() < 0.7
    between = size + block_kv * int(rng.choice([0, 0, 1, 3])) if in_place else None
    told = (typed(rng, x, device) for x in (edges, used, table))
    return Given(*told, Rule(reaches).seeing, tile, (T, G * ratio, G, P, size), between)


def by_operations(given: Given) -> tuple[Made, Tensor]:
    """The same by operations, and which tiles have queries."""
    (T, H, G, _, size), (R, n), (block_q, _) = given.facts, given.table.shape, given.tile
    of = Sequences(sorted_edges(given.edges, T), narrow(given.used, 0, n * size), given.reaches, n * size)
    seen = of.seen().view(R, n, size)
    made = listed_tiles(of, seen, given.table, given.tile, given.facts, given.between, False)
    return made, query_tiles(of, T, H // G, block_q).there


def entries(starts: Tensor, counts: Tensor, n: int) -> Tensor:
    """The entries that lists refer to, of n."""
    which = torch.arange(n, device=starts.device)[:, None]
    starts, counts = starts.view(-1), counts.view(-1)
    return ((which >= starts) & (which < starts + counts)).any(1)


def check(given: Given) -> None:
    """All that a list refers to is the same, and so is all else."""
    found, (want, there) = fused_tiles(*given), by_operations(given)
    assert found is not None and torch.equal(found.place, want.place)
    T, H, G, _, _ = given.facts
    for one, other, most in ((found.token, want.token, T), (found.head, want.head, H // G)):
        (rows,) = one.shape
        of_tiles = there.repeat_interleave(rows // len(there))
        assert one.dtype == torch.int32 and torch.equal(one[of_tiles], other[of_tiles])
        assert other.shape == one.shape and bool(((one >= 0) & (one < most)).all())
    assert len(found.parts) == len(want.parts) == 1 + (given.between is not None)
    for one, other in zip(found.parts, want.parts, strict=True):
        assert (one.copied is None) == (other.copied is None)
        for x, y in zip(one.copied or (), other.copied or (), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
        rows, wanted = one.layout.rows, other.layout.rows
        assert (rows.rows, rows.columns) == (wanted.rows, wanted.columns)
        for x, y in zip(rows.arrays(), wanted.arrays(), strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype == torch.int32
        for kind in ("full", "bits"):
            lists, of_lists = rows.lists[kind], wanted.lists[kind]
            assert torch.equal(lists.starts, of_lists.starts) and torch.equal(lists.counts, of_lists.counts)
            named = entries(lists.starts, lists.counts, len(lists.indices))
            assert torch.equal(lists.indices[named], of_lists.indices[named])
        assert torch.equal(rows.pool_index, wanted.pool_index)
        assert torch.equal(rows.pool[named], wanted.pool[named])


@contextmanager
def small_programs(patch: pytest.MonkeyPatch, rng: np.random.Generator) -> Iterator[None]:
    """Few elements for each program, so that there are many of them."""
    with patch.context() as m:
        m.setattr(page_kernels, "EDGES", (2, int(rng.choice([4, 16]))))
        m.setattr(page_kernels, "TILES", (1, int(rng.choice([8, 32]))))
        m.setattr(page_kernels, "CHUNK", int(rng.choice([256, 1024])))
        m.setattr(page_kernels, "BITS", int(rng.choice([1, 4])))
        m.setattr(page_kernels, "SPLIT", int(rng.choice([1, 1, 3])))
        yield


def draws(numbers: range, monkeypatch: pytest.MonkeyPatch, device: str, small: bool = True) -> None:
    for seed in numbers:
        rng = np.random.default_rng(seed)
        try:
            if small:
                with small_programs(monkeypatch, rng):
                    check(draw(rng, torch.device(device)))
            else:
                check(draw(rng, torch.device(device)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_structures(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_arrays, "fused", lambda like: fused_structure.kernels)
    draws(range(chunk, CASES, 4), monkeypatch, "cpu")
