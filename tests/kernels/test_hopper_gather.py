"""The items of the Hopper gather kernels cover every step of every list once, in both walks."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

import gossamer as gs
from gossamer.cute.configurations import queries_of as queries_of_kernels
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.rows import sharing, work
from gossamer.layouts.gather import GatherLayout, GatherWalk, build_gather, queries_of


def test_kernels_and_layouts_agree_on_the_queries_of_a_tile() -> None:
    """What kernels are made from imports no layouts, and layouts import no kernels: both say it."""
    for heads in range(1, 65):
        assert queries_of_kernels(heads) == queries_of(heads)


LEADS = [(1, 1), (1, 4), (2, 1), (2, 4)]
BATCH, HEADS, GROUPS, Q, K = 2, 4, 2, 300, 420
RATIO = HEADS // GROUPS


def layout_of(lead: tuple[int, int], known: bool = True) -> GatherLayout:
    """Other lists for each batch element and head; some long, some empty. `known`: to the host."""
    mask = np.random.default_rng(0).random((*lead, Q, K)) < 0.01
    mask[..., 70, :] = mask[..., :, 5] = True
    mask[..., 128:192, :] = False
    layout = build_gather(gs.BlockMask(mask, 1), Q, K, block_q=64).to("cpu")
    return layout if known else GatherLayout(layout.rows, _transpose=[layout.columns])


def steps(walk: GatherWalk, lead: int, group: int) -> list[int]:
    """The steps of a list, counted over all lists."""
    start = int(walk.starts.reshape(-1, walk.tiles)[lead, group]) // walk.width
    count = int(walk.counts.reshape(-1, walk.tiles)[lead, group])
    return list(range(start, start + -(-count // walk.width)))


def lead_of(walk: GatherWalk, batch: int, head: int) -> int:
    """Which of a walk's lists a head reads."""
    Bl, Hl = walk.lead
    return (batch if Bl > 1 else 0) * Hl + (head if Hl > 1 else 0)


def check_slots(items: list[list[int]], merges: list[list[int]], slots: int) -> None:
    """Every slot is written by one item, and merged with the others of its list."""
    cut = [item for item in items if item[3] >= 0]
    assert sorted(item[3] for item in cut) == list(range(slots))
    merges = merges if slots else []
    assert sum(merge[4] for merge in merges) == slots
    for *where, first, count, _, _, _ in merges:
        assert sorted(item[3] for item in cut if item[:3] == where) == list(range(first, first + count))


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(("split", "known"), [(1, True), (3, True), (1000, True), (None, True), (None, False)])
def test_items_cover_the_rows(lead: tuple[int, int], split: int | None, known: bool) -> None:
    layout = layout_of(lead, known)
    made = work(layout, *sharing(HEADS, BATCH, layout.rows), 264, split)
    walk, items, found = layout.rows.on_host(), made.items.tolist(), defaultdict(list)
    for item in sorted(items, key=lambda item: item[3]):
        batch, head, group, *_ = item
        first, count, valid, end = item[8], item[9], item[11], item[13]
        at = lead_of(walk, batch, head)
        assert valid == 1 and item[10] == at
        found[batch, head, group] += list(range(first, first + count))
        listed = walk.indices[first * walk.width : end]  # the columns of the item, without what fills its last step
        assert (listed >= 0).all() and (walk.indices[end : (first + count) * walk.width] == -1).all()
    every = {(b, h, t): lead_of(walk, b, h) for b, h, t in np.ndindex(BATCH, HEADS, walk.tiles)}
    assert dict(found) == {key: steps(walk, at, key[2]) for key, at in every.items()}
    check_slots(items, made.merges.tolist(), made.slots)
    assert (made.slots > 0) == (split in (1, 3)) or split is None


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(("split", "known"), [(1, True), (3, True), (1000, True), (None, True), (None, False)])
def test_items_cover_the_columns(lead: tuple[int, int], split: int | None, known: bool) -> None:
    layout = layout_of(lead, known)
    made = column_work(layout, *sharing(GROUPS, BATCH, layout.columns), RATIO, 264, split)
    walk, items, found = layout.columns.on_host(), made.items.tolist(), defaultdict(list)
    for item in sorted(items, key=lambda item: item[3]):
        batch, group, tile, _, first, count, valid = item[:7]
        assert valid == 1
        found[batch, group, tile] += []
        for head, at, *_, begin, number in made.segments[first : first + count].tolist():
            assert at == lead_of(walk, batch, RATIO * group + head)
            found[batch, group, tile] += [(head, step) for step in range(begin, begin + number)]
    for (batch, group, tile), steps_of in found.items():
        leads = [lead_of(walk, batch, RATIO * group + head) for head in range(RATIO)]
        assert steps_of == [(head, step) for head in range(RATIO) for step in steps(walk, leads[head], tile)]
    assert len(found) == BATCH * GROUPS * walk.tiles
    check_slots(items, made.merges.tolist(), made.slots)
