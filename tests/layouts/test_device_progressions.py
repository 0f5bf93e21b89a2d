"""Layouts made on a device from unions of progressions, against matrices written from their definition.

`DEVICE_LAYOUT_CASES=10000 pytest tests/layouts/test_device_progressions.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer.layouts.device import Progression, progression_layout
from gossamer.layouts.walk import expand
from gossamer.torch import device_arrays
from gossamer.torch.given_layouts import check_layout
from tests.layouts.test_device_layouts import NumpyArrays, draw_bounds, draw_size, kept_by_intervals, tensor, tensors_of

CASES = int(os.environ.get("DEVICE_LAYOUT_CASES", "400"))
CHUNKS = 4


class Case(NamedTuple):
    """Arguments of `progression_layout`, as numpy arrays."""

    union: list[tuple[np.ndarray, np.ndarray, int]]
    shift: np.ndarray
    K: int
    block_q: int
    block_kv: int
    reach: int


def kept(case: Case) -> np.ndarray:
    """(Bl, Hl, Q, K)."""
    found: Any = False
    for lo, hi, step in case.union:
        i = np.arange(lo.shape[-1]) + case.shift[..., None].astype(np.int64)
        found = found | kept_by_intervals(lo, hi, case.K) & ((i[..., None] - np.arange(case.K)) % step == 0)
    return found


def windows(rng: np.random.Generator, shift: np.ndarray, Q: int, K: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds that go by positions, of at most so many keys, perhaps within other bounds."""
    i = np.arange(Q) + shift[..., None]
    left = int(rng.integers(0, reach + 1))
    lo, hi = np.clip(i - left, 0, K), np.clip(i - left + reach, 0, K)
    if rng.random() < 0.4:
        outer_lo, outer_hi = draw_bounds(rng, shift.shape, Q, K)
        lo, hi = np.maximum(lo, outer_lo), np.minimum(hi, outer_hi)
    return lo, np.maximum(lo, hi)


def draw(rng: np.random.Generator) -> Case:
    lead, Q, K = tuple(int(x) for x in rng.integers(1, 3, 2)), draw_size(rng), draw_size(rng)
    block_q, block_kv = (int(x) for x in rng.choice([32, 64, 96, 128], 2))
    shift = rng.integers(-Q - 5, K + 5, lead)
    reach = int(rng.choice([0, 1, 5, 40, K]))
    union = []
    for _ in range(int(rng.integers(1, 4))):
        step = int(rng.choice([1, 1, 2, 3, 31, 32, 33, 64, 200]))
        bounds = windows(rng, shift, Q, K, reach) if reach < K else draw_bounds(rng, lead, Q, K)
        union.append((*bounds, step))
    reach = reach if reach < K else max(Q, K)
    return Case(union, shift, K, block_q, block_kv if rng.random() < 0.5 else block_q, reach)


def built(case: Case, xp: Any = device_arrays, to: Any = tensor) -> Any:
    union = [Progression(to(lo), to(hi), step) for lo, hi, step in case.union]
    return progression_layout(
        union, to(case.shift), case.K, block_q=case.block_q, block_kv=case.block_kv, reach=case.reach, xp=xp
    )


def check_walk(walk: Any, keep: np.ndarray) -> None:
    """It keeps what it is to; a tile of which everything is kept by one progression is full, and none twice."""
    walk = walk.on_host()
    assert (walk.rows, walk.columns) == keep.shape[2:] and walk.lead == keep.shape[:2]
    assert (expand(walk).reshape(keep.shape) == keep).all()
    for b, h, t in np.ndindex(*walk.full.counts.shape):
        listed = []
        for kind, tiles in walk.lists.items():
            start, count = tiles.starts[b, h, t], tiles.counts[b, h, t]
            assert 0 <= start <= start + count <= len(tiles.indices)
            columns = tiles.indices[start : start + count].tolist()
            assert columns == sorted(columns) and (kind != "interval" or not columns)
            listed += columns
        assert len(listed) == len(set(listed))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random(chunk: int) -> None:
    for seed in range(chunk, CASES, CHUNKS):
        case = draw(np.random.default_rng(seed))
        try:
            layout, keep = built(case), kept(case)
            check_walk(layout.rows, keep)
            check_walk(layout.columns, keep.swapaxes(-1, -2))
            check_layout(layout.rows, *tensors_of(keep))
            check_layout(layout.columns, *tensors_of(keep.swapaxes(-1, -2)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_other_frameworks_give_the_same() -> None:
    for seed in range(40):
        case = draw(np.random.default_rng(seed))
        expected, found = built(case), built(case, NumpyArrays(), lambda x: np.asarray(x, dtype=np.int32))
        for walk, other in ((found.rows, expected.rows), (found.columns, expected.columns)):
            for x, y in zip(walk.arrays(), other.arrays(), strict=True):
                assert x.dtype == np.int32
                assert (x == y.numpy()).all(), seed


def test_full_tiles_are_listed_as_such() -> None:
    """A causal window with a step beside it: bits on the edges alone, and where the step alone reaches."""
    i = np.arange(512)
    lo, hi = np.maximum(i - 255, 0)[None, None], (i + 1)[None, None]
    walk = built(Case([(lo, hi, 1)], np.zeros((1, 1), int), 512, 64, 64, 256)).rows
    assert walk.full.counts.flatten().tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert walk.bits.counts.flatten().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    first = np.zeros_like(lo)
    walk = built(Case([(lo, hi, 1), (first, hi, 128)], np.zeros((1, 1), int), 512, 64, 64, 512)).rows
    assert walk.full.counts.flatten().tolist() == [0, 1, 2, 3, 3, 3, 3, 3]


def test_wrong_arguments() -> None:
    x, shift = torch.zeros(1, 2, 64, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)

    def make(lo: Any = x, hi: Any = x, shift: Any = shift, K: int = 64, block: int = 32) -> Any:
        union = [Progression(lo, hi)]
        return progression_layout(union, shift, K, block_q=block, block_kv=32, reach=K, xp=device_arrays)

    with pytest.raises(ValueError, match="block_q must be"):
        make(block=33)
    with pytest.raises(ValueError, match="lo and hi must be of one shape"):
        make(lo=x[:, :1])
    with pytest.raises(ValueError, match="shift must be of shape"):
        make(shift=shift[:, :1])
    with pytest.raises(ValueError, match="K must be from 1"):
        make(K=0)


def test_more_bits_than_are_addressed_are_refused() -> None:
    with FakeTensorMode():
        x = torch.zeros(1, 1, 2**20, dtype=torch.int32)
        with pytest.raises(ValueError, match="can be addressed"):
            progression_layout(
                [Progression(x, x, 2)], x[..., 0], 2**20, block_q=128, block_kv=128, reach=2**20, xp=device_arrays
            )


def test_nothing_is_read_back() -> None:
    with FakeTensorMode():
        x = torch.zeros(1, 2, 70, dtype=torch.int32)
        layout = progression_layout(
            [Progression(x, x), Progression(x, x, 3)], x[..., 0], 99, block_q=32, block_kv=64, reach=40,
            xp=device_arrays,
        )  # fmt: skip
        assert layout.rows.bits.counts.shape == (1, 2, 3)
