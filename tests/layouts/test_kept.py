"""Which rows and keys of a layout keep anything, by the definition."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.device import block_list_layout
from gossamer.layouts.kept import every_row_kept, keeps_all, kept_of
from gossamer.patterns import BigBird, Causal, Pattern, PerHead, SlidingWindow
from tests.layouts.test_device_layouts import draw_bounds


def check(layout: BlockLayout) -> None:
    dense = layout.expand().reshape(*layout.lead, layout.Q, layout.K)
    some = dense.any(-1)
    kept = kept_of(layout)
    assert (kept.rows == some).all()
    assert (kept.first == np.where(some, dense.argmax(-1), layout.K)).all()
    assert (kept.keys == dense.any(-2)).all()
    assert keeps_all(layout) == (some.all(), dense.any(-2).all())
    assert not keeps_all(layout)[0] or every_row_kept(layout.rows.on_host(), listed=True)


@pytest.mark.parametrize("seed", range(30))
def test_random_masks(seed: int) -> None:
    r = np.random.default_rng(seed)
    lead, (Q, K) = (int(r.choice([1, 2])), int(r.choice([1, 3]))), (int(n) for n in r.integers(1, 200, 2))
    mask = r.random((*lead, Q, K)) < r.choice([0.03, 0.9])
    mask[..., : r.integers(1, 100), : r.integers(1, 100)] = True
    if r.random() < 0.5:
        mask[..., r.integers(Q), :] = False
    if r.random() < 0.5:
        mask[..., r.integers(K)] = False
    check(from_dense(mask, block_q=64, block_kv=32))


@pytest.mark.parametrize(
    ("pattern", "Q", "K"),
    [(Causal(), 300, 200), (Causal(), 200, 300), (SlidingWindow(10, 40), 300, 500), (BigBird(32), 320, 320),
     (~Causal(), 90, 90), (PerHead([Causal(), SlidingWindow(9)]), 100, 300)],
    ids=str,
)  # fmt: skip
def test_patterns_on_the_host_and_as_tensors(pattern: Pattern, Q: int, K: int) -> None:
    pytest.importorskip("torch")
    layout = pattern.layout(Q, K, block_q=64, block_kv=64)
    check(layout)
    on = layout.to("cpu")
    assert keeps_all(on) == keeps_all(BlockLayout(on.rows)) == keeps_all(layout)
    assert (kept_of(BlockLayout(on.rows)).keys == kept_of(layout).keys).all()


@pytest.mark.parametrize("seed", range(40))
def test_lists_that_leave_out_what_an_interval_meets(seed: int) -> None:
    torch = pytest.importorskip("torch")
    from gossamer.torch import device_arrays

    r = np.random.default_rng(seed)
    lead, block = (int(r.choice([1, 2])), int(r.choice([1, 3]))), int(r.choice([32, 64]))
    Q, K = (int(r.integers(1, 250)) for _ in range(2))
    rows, entries = -(-Q // block), -(-K // block)
    indices = torch.from_numpy(r.integers(-1, entries, (*lead, rows, int(r.integers(1, entries + 2)))))
    bounds = draw_bounds(r, lead, Q, K)
    lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in bounds)
    made = block_list_layout(indices, None, lo, hi, Q, K, block=block, xp=device_arrays)
    check(BlockLayout(made.rows.on_host()))
    assert (kept_of(made).keys == kept_of(BlockLayout(made.rows.on_host())).keys).all()
