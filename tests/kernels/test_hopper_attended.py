"""What the host knows of rows that keep nothing, and of keys that nothing attends."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.cute.configurations import Clears
from gossamer.kernels.hopper.schedule.attended import clears, keys_kept, queries_kept
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BigBird, Causal, Dense, Dilated, Pattern, PerHead, SlidingWindow


def all_kept(dense: np.ndarray, block: int) -> bool:
    """By the definition: where a row of a tile of rows keeps something, all of them do."""
    for mask in dense:
        some = mask.any(1)
        for first in range(0, len(some), block):
            if some[first : first + block].any() and not some[first : first + block].all():
                return False
    return True


def check(layout: BlockLayout) -> None:
    """Compare what is said of a layout, and the words of its keys, with its dense mask."""
    (Bl, Hl), K = layout.lead, layout.K
    dense = layout.expand().reshape(-1, layout.Q, K)
    keys = all_kept(dense.transpose(0, 2, 1), layout.block_kv)
    assert keys_kept(layout) == keys
    assert queries_kept(layout) == all_kept(dense, layout.block_q)
    assert clears(layout) == (Clears.NOTHING if keys else Clears.KEYS)
    tiles = -(-K // layout.block_kv)
    for transposed, repeat in ((False, 1), (True, 1), (False, 2))[: 3 if layout.block_q >= layout.Q * 2 else 2]:
        pool = lists(layout, transposed, repeat=repeat).pool
        if not keys:
            words = pool[::-1][: Bl * Hl * tiles, : layout.block_kv // 32]
            found = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
            found = found.reshape(Bl * Hl, -1).astype(bool)
            assert (found[:, :K] == dense.any(1)).all() and found[:, K:].all()


@pytest.mark.parametrize("seed", range(40))
def test_random_masks(seed: int) -> None:
    r = np.random.default_rng(seed)
    lead, (Q, K) = (int(r.choice([1, 2])), int(r.choice([1, 3]))), (int(n) for n in r.integers(1, 300, 2))
    mask = r.random((*lead, Q, K)) < r.choice([0.03, 0.2, 0.9])
    mask[..., : r.integers(1, 100), : r.integers(1, 100)] = True
    if r.random() < 0.5:
        mask[..., r.integers(Q), :] = False
    if r.random() < 0.5:
        mask[..., r.integers(K)] = False
    check(from_dense(mask, block_q=64, block_kv=64))


@pytest.mark.parametrize(
    ("pattern", "Q", "K"),
    [(Causal(), 300, 300), (Causal(), 300, 200), (Causal(), 200, 300), (SlidingWindow(30), 300, 300),
     (SlidingWindow(30), 200, 300), (SlidingWindow(10, 40), 300, 500), (BigBird(32), 320, 320), (~Dense(), 90, 90),
     (Dense(), 100, 300), (SlidingWindow(40), 20, 300), (SlidingWindow(40), 1, 129),
     (Dilated(8, 0, 4), 300, 300), (PerHead([Causal(), SlidingWindow(9)]), 100, 300)],
    ids=str,
)  # fmt: skip
def test_patterns(pattern: Pattern, Q: int, K: int) -> None:
    check(pattern.layout(Q, K, block_q=64, block_kv=64))


def test_of_tensors_nothing_is_known() -> None:
    on = Causal().layout(300, 300, block_q=64, block_kv=64).to("cpu")
    assert clears(on) == Clears.NOTHING
    assert clears(BlockLayout(on.rows, _transpose=[on.columns])) == Clears.INTERVALS


def test_queries_matter_to_a_backward() -> None:
    layout = Causal().layout(300, 200, block_q=64, block_kv=64)
    assert clears(layout) == Clears.NOTHING and clears(layout, backward=True) == Clears.QUERIES
