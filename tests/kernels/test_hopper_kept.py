"""The Hopper backward that keeps dS, on a CPU: which calls take it, how much memory, and heads in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.hopper.launch.kept import ENOUGH, FREE, LEAST, Kept, kept
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BlockMask, Causal, PerHead, SlidingWindow
from gossamer.plan.problem import Problem
from tests.support import launches
from tests.support.hopper_backward_stand_in import stand_in

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


def problem(layout: BlockLayout, B: int, H: int, G: int, D: int, **more: Any) -> Problem:
    return Problem(B, H, G, layout.Q, layout.K, D, D, "bfloat16", "cuda", 90, 132, **more)


def blocks(n: int, tile: int = 64) -> BlockLayout:
    """All pairs of n x n tiles, as one block mask."""
    return BlockMask(np.ones((n, n), bool), tile).layout(n * tile, n * tile, block_q=tile, block_kv=tile)


def test_which_calls_keep_it() -> None:
    small, large = blocks(8), blocks(8, 128)
    assert kept(problem(small, 1, 2, 2, 128), small) == Kept(2, 128)
    assert kept(problem(large, 1, 2, 2, 128), large) is None  # dQ is added in memory
    assert kept(problem(large, 1, 2, 2, 128, deterministic=True), large) == Kept(2, 512)
    assert kept(problem(large, 1, 2, 2, 256), large) == Kept(2, 512)
    assert kept(problem(small, 1, 2, 2, 128), BlockLayout(small.to("cpu").rows)) is None  # only a device knows it
    both = PerHead([SlidingWindow(100), Causal()] * 2).layout(512, 512, block_q=64, block_kv=64)
    assert kept(problem(both, 1, 4, 2, 128), both) is None  # several heads have the same entries
    assert kept(problem(small, 1, 2, 2, 64), small) is None  # as fast without
    assert IMPLEMENTATION.kept_bytes(problem(small, 1, 2, 2, 128), small) == 128 * 2 * 64**2


def test_memory() -> None:
    """Heads in equal shares: no more than have enough, in no more memory than the tensors of the call have."""
    layout = blocks(128)  # 128 MiB a head
    pairs, most = 128 * 128, 2 * 64**2 * 128 * 128
    p = problem(layout, 8, 8, 8, 128)
    found = kept(p, layout)
    assert found == Kept(6, 6 * pairs) and found.pairs >= ENOUGH
    tensors = 2 * 8 * (8 + 8) * layout.Q * 2 * 128
    assert found.bytes <= 2 * tensors
    assert kept(replace(p, B=2), layout) is None  # 2 heads fit: less than LEAST
    assert kept(replace(p, B=1, H=2, G=2), layout) == Kept(2, 2 * pairs)  # all of them, in FREE
    assert kept(replace(p, H=32), layout) == Kept(2, 8 * pairs)  # 4 query heads of each key head
    assert kept(replace(p, H=64, G=1, B=1), layout) is None
    for heads, shared in ((3, 3), (63, 32), (64, 64), (2000, 64)):
        assert kept(p, layout, heads * most) == Kept(shared, shared * pairs)
    assert kept(p, layout, most - 1) is None
    assert LEAST < ENOUGH and 2 * most == FREE


@pytest.mark.parametrize(("lead", "tile"), [((1, 1), 64), ((1, 1), 128), ((1, 6), 64), ((2, 1), 128), ((2, 6), 64)])
@pytest.mark.parametrize("split", [None, 2])
def test_heads_in_turn(
    lead: tuple[int, int], tile: int, split: int | None, monkeypatch: pytest.MonkeyPatch, on_a_cpu: None
) -> None:
    """Heads of several batch elements in the same memory are what dQ by rows makes of them."""
    launch, (B, H, G, D) = stand_in(monkeypatch), (2, 6, 3, 72)
    mask = np.random.default_rng(0).random((*lead, 300, 400)) < 0.1
    mask[..., :128, :256], mask[..., 64:192, 128:300] = True, False
    layout = from_dense(mask, block_q=tile, block_kv=tile).to("cpu")
    p = replace(problem(layout, B, H, G, D, deterministic=True), device="cpu", processors=40)
    x = [torch.randn(B, h, n, D).bfloat16() for h, n in ((H, 300), (H, 300), (G, 400), (G, 400), (H, 300))]
    given = (x[0], None, *x[1:], torch.randn(B, H, 300))
    whole = kept(p, layout, 2**40)
    assert whole is not None
    want = launches.backward(launch, p, layout, Terms(0.2, 100), *given, most_kept=0)
    for heads in (whole.heads, 4, 1):
        most = whole.bytes // whole.heads * heads
        found = launches.backward(launch, p, layout, Terms(0.2, 100), *given, most_kept=most, split=split)
        for actual, wanted in zip(found, want, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))
