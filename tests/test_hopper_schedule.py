"""The work items of the Hopper kernels: every listed tile once, and whole rounds where rows are few."""

from __future__ import annotations

import pytest
import torch

from gossamer.kernels.hopper.schedule import lists, whole_rounds, work
from gossamer.patterns import BigBird, Causal, Pattern, SlidingWindow


@pytest.mark.parametrize(
    ("rows", "longest", "processors", "limit"),
    [
        (32, 512, 264, 64),  # 8 parts of each row: 256 items in one round
        (128, 256, 132, 256),  # one part each: a second one would mean a second round for 4 blocks
        (100, 256, 132, 52),  # 500 items in four rounds
        (1, 512, 264, 12),  # merging the parts ends what more of them gain
        (264, 5, 264, 5),
        (1, 1, 132, 1),
        (1, 0, 132, 0),
    ],
)
def test_whole_rounds(rows: int, longest: int, processors: int, limit: int) -> None:
    assert whole_rounds(rows, longest, processors) == limit


@pytest.mark.parametrize("pattern", [Causal(), SlidingWindow(300), BigBird(64)], ids=str)
@pytest.mark.parametrize("copies", [1, 8])
def test_items_hold_every_tile_once(pattern: Pattern, copies: int) -> None:
    layout = pattern.layout(2000, 2000, block_q=64, block_kv=64).to(torch.device("cpu"))
    for split in (None, 3):
        found = work(layout, copies, 132, split)
        first, count = found.items[:, 4:10:2], found.items[:, 5:10:2]
        listed = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(first.flatten().tolist(), count.flatten().tolist(), strict=True)]
        )
        assert torch.equal(listed.sort().values, torch.arange(lists(layout).listed))
