"""The work of the Hopper column kernel: items and segments cover every listed tile of every query head once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.kernels.hopper.schedule.rows import Work, sharing
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk, iterate

Covered = dict[tuple[int, int, int], list[tuple[int, int, int]]]


def layout_of(lead: tuple[int, int]) -> BlockLayout:
    """Full, bits and empty tiles; other lists for each batch element and head of `lead`."""
    mask = np.random.default_rng(0).random((*lead, 640, 900)) < 0.2
    mask[..., :128, :] = True
    mask[..., 256:384, 256:512] = False
    return from_dense(mask, block_q=128, block_kv=128).to("cpu")


def made(layout: BlockLayout, split: int | None = None) -> Work:
    """The work of two batch elements of four query heads and two key heads."""
    copies, heads = sharing(2, 2, layout.columns)
    return column_work(layout, copies, heads, 2, 132, split)


def covered(layout: BlockLayout, work: Work) -> Covered:
    """(batch, key head, key tile) to (query head of the group, query tile, pool entry), in the order of the slots."""
    entries, found = lists(layout, True).lists.tolist(), defaultdict(list)
    Bl, Hl = layout.lead
    for item in sorted(work.items.tolist(), key=lambda item: item[3]):
        batch, group, tile, _, first, count, valid = item[:7]
        assert valid == 1
        for head, lead, *ranges in work.segments[first : first + count].tolist():
            assert lead == (batch if Bl > 1 else 0) * Hl + (group * 2 + head if Hl > 1 else 0)
            for kind, (at, n) in enumerate(zip(ranges[::2], ranges[1::2], strict=True)):
                for i in range(at, at + n):
                    found[batch, group, tile].append((head, entries[0][i], entries[1][i] if kind == 2 else -1))
    return found


def wanted(walk: Walk) -> Covered:
    found = defaultdict(list)
    Bl, Hl = walk.lead
    for b, h, t, _, column, entry in iterate(walk):
        for batch in [b] if Bl > 1 else range(2):
            for head in [h] if Hl > 1 else range(4):
                found[batch, head // 2, t].append((head % 2, column, entry))
    return found


@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("split", [1, 3, 1000, None])
def test_items_cover_the_lists(lead: tuple[int, int], split: int | None) -> None:
    layout = layout_of(lead)
    assert layout.host is not None
    work, want = made(layout, split), wanted(layout.host.columns)
    found = covered(layout, work)
    assert {key: sorted(tiles) for key, tiles in want.items()} == {k: sorted(t) for k, t in found.items() if t}
    # Heads follow one another, also from one slot to the next.
    assert all([head for head, _, _ in tiles] == sorted(head for head, _, _ in tiles) for tiles in found.values())
    assert len({tuple(item[:3]) for item in work.items.tolist()}) == 2 * 2 * -(-900 // 128)
    cut = [item for item in work.items.tolist() if item[3] >= 0]
    assert sorted(item[3] for item in cut) == list(range(work.slots))
    assert work.slots == int(work.merges[:, 4].sum())
    for batch, group, tile, first, count, *_ in work.merges.tolist():
        slots = [item[3] for item in cut if item[:3] == [batch, group, tile]]
        assert sorted(slots) == list(range(first, first + count))


@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
def test_made_on_the_device(lead: tuple[int, int]) -> None:
    """Without a copy on the host: the same lists, unsplit, longest first."""
    layout = layout_of(lead)
    there = BlockLayout(layout.rows)
    work = made(there)
    assert covered(there, work) == covered(layout, made(layout, 1000))
    lengths = [
        int(work.segments[first : first + count, 3::2].sum()) for first, count in work.items[:, 4:6].tolist()
    ]  # fmt: skip
    classes = [int(2 * np.log2(max(n, 1))) for n in lengths]
    assert classes == sorted(classes, reverse=True) and work.slots == 0
