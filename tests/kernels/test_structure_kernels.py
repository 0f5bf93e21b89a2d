"""The kernels that make structure on a GPU, against the array operations that define what they give.

`STRUCTURE_CASES=300 TRITON_INTERPRET=1 pytest tests/kernels/test_structure_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.layouts.device import block_list_layout
from gossamer.layouts.walk import KINDS
from gossamer.torch import device_arrays
from tests.layouts.test_device_layouts import draw_bounds, draw_size
from tests.support.processes import INTERPRETING, in_interpreter

pytest.importorskip("triton")

from gossamer.kernels.structure import block_lists as block_lists_kernels
from gossamer.layouts.device.arrays import BlockLists

CASES = int(os.environ.get("STRUCTURE_CASES", "60"))
COUNT_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Kernels:
    """A `Fused` without the operators, whose kernels are of GPUs alone."""

    def block_lists(self, *arguments):
        return BlockLists(*block_lists_kernels.block_lists(*arguments))


class ArraysWithKernels:
    """torch's operations, with the kernels for tensors of any device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(device_arrays, name)

    def fused(self, like):
        return Kernels()


with_kernels = ArraysWithKernels()


def draw_lists(rng):
    """(indices, counts, lo, hi, Q, K, block): unsorted, repeated, -1, far away, some empty."""
    lead = tuple(int(x) for x in rng.integers(1, 4, 2))
    block = int(rng.choice([32, 64, 96]))
    Q, K = draw_size(rng), draw_size(rng) * int(rng.choice([1, 1, 7]))
    T, C = -(-Q // block), -(-K // block)
    n = int(rng.choice([0, 1, 2, C, 40, rng.integers(1, C + 3)]))
    wide = rng.random() < 0.3
    indices = rng.integers(-2, C + 2, (*lead, T, n))
    if rng.random() < 0.3:
        far = [2**31 - 1, -(2**31), *([2**32, -(2**32) + 1, 2**40] if wide else [])]
        indices = np.where(rng.random(indices.shape) < 0.3, rng.choice(far, indices.shape), indices)
    if rng.random() < 0.1:
        indices[:] = -1
    indices = torch.from_numpy(indices).to(torch.int64 if wide else torch.int32)
    counts = None
    if rng.random() < 0.5:
        counts = torch.from_numpy(rng.integers(-1 if rng.random() < 0.5 else 0, n + 3, (*lead, T)))
        counts = counts.to(COUNT_TYPES[rng.integers(5)]) if counts.min() >= 0 else counts
    lo = hi = None
    if rng.random() < 0.6:
        bounds = draw_bounds(rng, tuple(x if rng.random() < 0.5 else 1 for x in lead), Q, K)
        lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in bounds)
    return indices, counts, lo, hi, Q, K, block


def listed(tiles):
    """Of every list its entries."""
    counts, starts = tiles.counts.reshape(-1).tolist(), tiles.starts.reshape(-1).tolist()
    return [tiles.indices[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]


def check_walks(found, expected, padded):
    """The same arrays; entries that no list refers to only where they are `padded`."""
    for kind in KINDS:
        one, other = found.lists[kind], expected.lists[kind]
        assert torch.equal(one.starts, other.starts)
        assert torch.equal(one.counts, other.counts)
        assert one.indices.shape == other.indices.shape
        assert torch.equal(one.indices, other.indices) if padded else listed(one) == listed(other)
    for one, other in zip(found.arrays(), expected.arrays(), strict=True):
        assert one.dtype == other.dtype == torch.int32
        assert one.shape == other.shape
    for name in ("lo", "hi", "pool_index", "pool"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def check_lists(indices, counts, lo, hi, Q, K, block, transpose=True):
    given = indices, counts, lo, hi, Q, K
    found = block_list_layout(*given, block=block, xp=with_kernels, transpose=transpose)
    expected = block_list_layout(*given, block=block, xp=device_arrays, transpose=transpose)
    check_walks(found.rows, expected.rows, True)
    if transpose:
        check_walks(found.columns, expected.columns, False)


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_lists(chunk):
    for seed in range(chunk, CASES, 4):
        try:
            check_lists(*draw_lists(np.random.default_rng(seed)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
def test_in_interpreter():
    in_interpreter(__file__, "test_random_lists")
