"""What the host knows of rows that keep nothing, and of keys that nothing attends."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.kernels.hopper.schedule.attended import FEW, keeps_all, reaches_all
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BigBird, Causal, Dense, Dilated, Pattern, PerHead, SlidingWindow


def all_kept(layout: BlockLayout) -> bool:
    """By the definition: every row of a tile that keeps something keeps something, and so does every column."""
    dense = layout.expand().reshape(-1, layout.Q, layout.K)
    for mask in dense:
        for x, block in ((mask, layout.block_q), (mask.T, layout.block_kv)):
            some = x.any(1)
            for first in range(0, len(some), block):
                if some[first : first + block].any() and not some[first : first + block].all():
                    return False
    return True


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
    layout = from_dense(mask, block_q=64, block_kv=32)
    assert keeps_all(layout) == all_kept(layout)


@pytest.mark.parametrize(
    ("pattern", "Q", "K"),
    [(Causal(), 300, 300), (Causal(), 300, 200), (Causal(), 200, 300), (SlidingWindow(30), 300, 300),
     (SlidingWindow(30), 200, 300), (SlidingWindow(10, 40), 300, 500), (BigBird(32), 320, 320), (~Dense(), 90, 90),
     (Dense(), 100, 300), (Dilated(8, 0, 4), 300, 300), (PerHead([Causal(), SlidingWindow(9)]), 100, 300)],
    ids=str,
)  # fmt: skip
def test_patterns(pattern: Pattern, Q: int, K: int) -> None:
    layout = pattern.layout(Q, K, block_q=64, block_kv=64)
    assert keeps_all(layout) == all_kept(layout)


def test_intervals_that_reach_all() -> None:
    assert reaches_all(Causal().layout(300, 300, block_q=64, block_kv=64))
    assert reaches_all(BigBird(32).layout(320, 320, block_q=64, block_kv=64))
    late = SlidingWindow(30)
    assert not reaches_all(late.layout(200, 300, block_q=64, block_kv=64))
    assert not reaches_all(Causal().layout(200, 300, block_q=64, block_kv=64, q_offset=0))
    assert reaches_all(late.layout(FEW, 300, block_q=64, block_kv=64))  # no cache around a window of few queries


def test_of_tensors_nothing_is_known() -> None:
    layout = Causal().layout(300, 300, block_q=64, block_kv=64)
    on = layout.to("cpu")
    assert keeps_all(on) and reaches_all(on)
    alone = BlockLayout(on.rows, _transpose=[on.columns])
    assert not keeps_all(alone) and not reaches_all(alone)
