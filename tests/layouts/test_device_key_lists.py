"""Gather layouts made on a device from lists of keys, against matrices written from their definition.

`DEVICE_LAYOUT_CASES=10000 pytest tests/layouts/test_device_key_lists.py -k random` draws more cases.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer.layouts.device import key_list_layout
from gossamer.layouts.gather import WIDTHS, expand_gather, queries_of
from gossamer.torch import device_arrays
from tests.layouts.test_device_layouts import NumpyArrays, draw_bounds, draw_size, kept_by_intervals, tensor

CASES = int(os.environ.get("DEVICE_LAYOUT_CASES", "400"))
CHUNKS = 4
FAR = 2**31 - 1


def kept(indices, counts, lo, hi, K):
    """(Bl, Hl, Q, K), pair by pair."""
    keep = np.zeros((*indices.shape[:3], K), dtype=bool)
    for at in np.ndindex(*indices.shape[:3]):
        listed = indices[at].tolist()
        for j in listed if counts is None else listed[: counts[at]]:
            if 0 <= j < K:
                keep[(*at, j)] = True
    return keep if lo is None else keep & kept_by_intervals(lo, hi, K)


def draw(rng):
    """(indices, counts, lo, hi, Q, K, block_q, heads)."""
    lead, Q, K = tuple(int(x) for x in rng.integers(1, 4, 2)), draw_size(rng), draw_size(rng)
    Q = Q if rng.random() < 0.5 else int(rng.integers(1, 70))
    n = int(rng.choice([0, 1, 2, 7, 32, 33, rng.integers(1, K + 1)]))
    near = rng.integers(0, K, (*lead, Q, 1)) + rng.integers(-3, 4, (*lead, Q, n))
    anywhere = rng.integers(*[(-2, K + 3), (0, K), (0, 1), (-1, 1)][rng.integers(4)], (*lead, Q, n))
    indices = near if rng.random() < 0.3 else anywhere
    if n and rng.random() < 0.2:
        indices[rng.random(indices.shape) < 0.2] = rng.choice([FAR, -FAR - 1, K, -1])
    counts = rng.integers(0, n + 1, (*lead, Q)) if rng.random() < 0.5 else None
    lo = hi = None
    if rng.random() < 0.4:
        lo, hi = draw_bounds(rng, tuple(x if rng.random() < 0.5 else 1 for x in lead), Q, K)
    heads = int(rng.choice([2, 3, 7, 16, 33, 64])) if rng.random() < 0.5 else 1
    block_q = queries_of(heads) if heads > 1 else int(rng.choice([1, 16, 32, 64]))
    return indices, counts, lo, hi, Q, K, block_q, heads


def built(indices, counts, lo, hi, Q, K, block_q, heads=1, xp=device_arrays, to=tensor):
    return key_list_layout(to(indices), to(counts), to(lo), to(hi), Q, K, block_q=block_q, heads=heads, xp=xp)


def check_walk(walk, keep, block_rows):
    """It keeps what it is to, gathers a column for nobody in vain, and pads its lists as kernels read them."""
    host = walk.on_host()
    assert (host.rows, host.columns, host.block_rows, host.lead) == (*keep.shape[2:], block_rows, keep.shape[:2])
    assert (expand_gather(host).reshape(keep.shape) == keep).all()
    assert all(x.dtype == torch.int32 for x in walk.arrays())
    width = WIDTHS[block_rows] if walk.heads == 1 else 64
    assert walk.width == width
    assert (host.starts % width == 0).all()
    assert len(host.indices) % width == 0
    for at in np.ndindex(*host.counts.shape):
        b, h, t = at
        band = keep[b, h, t * block_rows : (t + 1) * block_rows]
        start, count = host.starts[at], host.counts[at]
        assert 0 <= start <= start + count <= len(host.indices)
        assert host.indices[start : start + count].tolist() == np.flatnonzero(band.any(0)).tolist()
        if walk.has_bits:
            padded = -(-count // width) * width
            assert (host.indices[start + count : start + padded] == -1).all()
            words = host.bits[start // 32 : (start + padded) // 32]
            assert int(np.bitwise_count(words).sum()) == band.sum()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random(chunk):
    for seed in range(chunk, CASES, CHUNKS):
        indices, counts, lo, hi, _, K, block_q, heads = case = draw(np.random.default_rng(seed))
        try:
            layout, keep = built(*case), kept(indices, counts, lo, hi, K)
            assert layout.rows.heads == heads
            check_walk(layout.rows, keep, block_q)
            check_walk(layout.columns, keep.swapaxes(-1, -2), 1)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_other_frameworks_give_the_same():
    for seed in range(60):
        case = draw(np.random.default_rng(seed))
        plain = lambda x: None if x is None else np.asarray(x, dtype=np.int32)  # noqa: E731
        expected, found = built(*case), built(*case, NumpyArrays(), plain)
        for walk, other in ((found.rows, expected.rows), (found.columns, expected.columns)):
            for x, y in zip(walk.arrays(), other.arrays(), strict=True):
                assert x.dtype == np.int32
                assert (x == y.numpy()).all(), seed


@pytest.mark.parametrize("block_q", [16, 64])
def test_room_is_met_exactly_by_lists_without_a_common_key(block_q):
    Q, n = 2 * block_q, 8
    indices = np.random.default_rng(0).permutation(Q * n).reshape(1, 1, Q, n)
    layout = built(indices, None, None, None, Q, Q * n, block_q)
    assert layout.rows.counts.tolist() == [[[block_q * n] * 2]]
    assert len(layout.rows.indices) == 2 * block_q * n
    check_walk(layout.rows, kept(indices, None, None, None, Q * n), block_q)


def test_room_is_no_more_than_all_keys():
    indices = np.tile(np.arange(40), (1, 1, 64, 1))
    layout = built(indices, None, None, None, 64, 40, 64)
    assert layout.rows.indices.shape == (64,)
    check_walk(layout.rows, np.ones((1, 1, 64, 40), dtype=bool), 64)


def test_wide_integers_are_masked_before_they_are_narrowed():
    indices = torch.tensor([2**32, 1, -(2**32), 2**33 + 1]).reshape(1, 1, 1, 4)
    layout = key_list_layout(indices, None, None, None, 1, 64, xp=device_arrays)
    assert layout.rows.counts.item() == 1
    assert (layout.expand() == (np.arange(64) == 1)).all()


def test_wrong_arguments():
    indices = torch.zeros(2, 2, 5, 3, dtype=torch.int32)

    def make(indices=indices, counts=None, lo=None, hi=None, Q=5, K=9, block_q=1):
        return key_list_layout(indices, counts, lo, hi, Q, K, block_q=block_q, xp=device_arrays)

    with pytest.raises(ValueError, match="indices must be of shape"):
        make(indices[:, :, :1])
    with pytest.raises(ValueError, match="indices must be of shape"):
        make(indices[0])
    with pytest.raises(ValueError, match="counts must be of shape"):
        make(counts=torch.zeros(2, 1, 5))
    with pytest.raises(ValueError, match="both be given"):
        make(lo=torch.zeros(1, 1, 5))
    with pytest.raises(ValueError, match="K must be from 1"):
        make(K=0)
    for block_q in (0, 8, True):
        with pytest.raises(ValueError, match="block_q must be one of"):
            make(block_q=block_q)


def test_more_entries_than_are_addressed_are_refused():
    with FakeTensorMode():
        indices = torch.zeros(8, 8, 2**15, 2**11, dtype=torch.int32)
        with pytest.raises(ValueError, match="can be addressed"):
            key_list_layout(indices, None, None, None, 2**15, 2**15, xp=device_arrays)


def test_nothing_is_read_back():
    """Traced without values, the layout comes out with all its shapes."""
    with FakeTensorMode():
        indices, bound = torch.zeros(1, 2, 70, 9, dtype=torch.int32), torch.zeros(1, 1, 70, dtype=torch.int32)
        for block_q in (1, 64):
            layout = key_list_layout(indices, None, bound, bound, 70, 99, block_q=block_q, xp=device_arrays)
            assert layout.rows.counts.shape == (1, 2, -(-70 // block_q))
            assert layout.columns.counts.shape == (1, 2, 99)
