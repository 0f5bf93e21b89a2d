"""Gather layouts against dense masks; when they are chosen; token trees."""

from __future__ import annotations

import numpy as np
import pytest

import gossamer as gs
from gossamer.layouts.gather import WIDTHS, GatherLayout, build_gather, expand_gather
from gossamer.testing.cases import SMALL
from gossamer.testing.cases import Case as Named

ROWS = tuple(WIDTHS)


@pytest.mark.parametrize("block_q", ROWS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_layout_and_its_transpose_are_the_pattern(case: Named, block_q: int) -> None:
    pattern = case.pattern()
    mask = pattern.materialize(case.Q, case.K, case.q_offset)
    layout = build_gather(pattern, case.Q, case.K, block_q=block_q, q_offset=case.q_offset)
    assert np.array_equal(layout.expand(), mask)
    assert np.array_equal(expand_gather(layout.columns), np.swapaxes(mask, -1, -2))
    assert layout.stats.useful_pairs * np.prod(layout.lead) == mask.sum()
    for walk in (layout.rows, layout.columns):
        assert (walk.starts % walk.width == 0).all() and len(walk.indices) % walk.width == 0
    on_device = GatherLayout(layout.to("cpu").rows)
    assert np.array_equal(expand_gather(on_device.columns.on_host()), expand_gather(layout.columns))


def test_builds_in_parts_give_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.layouts import gather

    pattern = (gs.PowerStrided(3, 5) | gs.BigBird(32)) & ~gs.Local(8)
    whole = [build_gather(pattern, 700, 700, block_q=rows) for rows in ROWS]
    monkeypatch.setattr(gather, "PAIRS_AT_ONCE", gather.ROWS_AT_ONCE**2)
    for rows, layout in zip(ROWS, whole, strict=True):
        for part, all_of_it in (
            (build_gather(pattern, 700, 700, block_q=rows).rows, layout.rows),
            (build_gather(pattern, 700, 700, block_q=rows).columns, layout.columns),
        ):
            assert all(np.array_equal(a, b) for a, b in zip(part.arrays(), all_of_it.arrays(), strict=True))


def test_rows_of_a_group_are_checked() -> None:
    with pytest.raises(ValueError, match="block_q of a gather layout must be one of 1, 16, 32, 64, got 8"):
        build_gather(gs.Causal(), 40, 40, block_q=8)
