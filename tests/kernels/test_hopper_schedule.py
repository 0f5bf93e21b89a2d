"""The work items of the Hopper kernels: every listed tile of every head once, in an order that keeps blocks busy."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gossamer.cute.column_items import ColumnItem
from gossamer.cute.merges import PartMerge
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.cuts import START, item_limit, whole_rounds
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.kernels.hopper.schedule.rows import work
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import KINDS
from gossamer.patterns import BigBird, Causal, Document, Pattern, PerHead, SlidingWindow

Row = tuple[int, int, int]


@pytest.mark.parametrize(
    ("rows", "longest", "processors", "limit"),
    [
        (32, 512, 264, 64),  # 8 parts of each row: 256 items in one round
        (128, 256, 132, 256),  # one part each: a second one would mean a second round for 4 blocks
        (100, 256, 132, 52),  # 500 items in four rounds
        (1, 512, 264, 12),  # merging the parts ends what more of them gain
        (264, 5, 264, 5),
        (128, 16, 264, 16),  # joining 256 parts takes longer than eight tiles
        (1, 1, 132, 1),
        (1, 0, 132, 0),
    ],
)
def test_whole_rounds(rows: int, longest: int, processors: int, limit: int) -> None:
    assert whole_rounds(rows, longest, processors) == limit


@pytest.mark.parametrize(("keys", "limit"), [(256, 4), (512, 8), (1024, 1), (2048, 2), (4096, 3), (8192, 4)])
def test_one_query_is_cut_further(keys: int, limit: int) -> None:
    """Of 8 key heads, in tiles of 64 keys; the parts of a row or four cost little."""
    assert whole_rounds(8, keys // 64, 264, True) == limit <= whole_rounds(8, keys // 64, 264)
    layout = Causal().layout(1, keys, block_q=64, block_kv=64).to("cpu")
    assert int(work(layout, 8, 8, 264).items[:, 5:10:2].sum(1).max()) == limit


@pytest.mark.parametrize(
    ("lengths", "copies", "limit"),
    [
        ([64] * 64, 3, 32),  # 192 rows are one round and a half; their halves are three rounds of half the length
        ([64] * 64, 4, 64),  # 1.94 rounds: nothing to gain
        (list(range(1, 65)), 8, 64),  # causal: short rows fill the ends
        ([1024] + [8] * 1023, 1, 69),  # a row of 15 shares
        ([1024] + [8] * 1023, 16, 76),  # of 0.93 shares, but of 15 shares of a head
        (list(range(1, 257)), 8, 256),  # causal: a head takes 249
        ([150] * 4 + [40] * 224, 8, 79),  # four rows longer than a head takes,
        ([150] * 32 + [40] * 224, 8, 150),  # or too many to merge
        (list(range(1, 513)), 3, 512),  # most rows of a head take longer than the others together
        ([0] * 200, 2, 1),
        ([], 2, 1),
    ],
)
def test_limit(lengths: list[int], copies: int, limit: int) -> None:
    assert item_limit(np.array(lengths, dtype=np.int64), 1, copies, 132) == limit
    assert item_limit(np.array(lengths, dtype=np.int64), 1, copies, 132, 1) == 1


def tiles_of(layout: BlockLayout, copies: int, heads: int, split: int | None) -> dict[Row, list[int]]:
    """(batch, head, tile row) to the places of its tiles in the lists; checks slots and merges on the way."""
    found = work(layout, copies, heads, 132, split)
    tiles: dict[Row, list[int]] = {}
    slots: dict[Row, list[int]] = {}
    for item in found.items.tolist():
        row, ranges = (item[0], item[1], item[2]), zip(item[4:10:2], item[5:10:2], strict=True)
        assert row not in tiles or item[3] >= 0
        tiles.setdefault(row, []).extend(place for at, n in ranges for place in range(at, at + n))
        if item[3] >= 0:
            slots.setdefault(row, []).append(item[3])
    merged = {(b, h, t): list(range(first, first + n)) for b, h, t, first, n, *_ in found.merges.tolist() if n}
    assert merged == {row: sorted(some) for row, some in slots.items()}
    assert sorted(slot for some in slots.values() for slot in some) == list(range(found.slots))
    return tiles


@pytest.mark.parametrize("pattern", [Causal(), SlidingWindow(300), BigBird(64)], ids=str)
@pytest.mark.parametrize("split", [None, 3])
@pytest.mark.parametrize("where", [lambda made: made, lambda made: BlockLayout(made.rows)], ids=("host", "device"))
def test_items_hold_every_tile_once(
    pattern: Pattern, split: int | None, where: Callable[[BlockLayout], BlockLayout]
) -> None:
    layout = where(pattern.layout(2000, 2000, block_q=64, block_kv=64).to(torch.device("cpu")))
    one = tiles_of(layout, 1, 1, split)
    places = sorted(place for some in one.values() for place in some)
    assert places == list(range(lists(layout).lists.shape[1]))
    assert len(one) == layout.rows.tiles
    every = tiles_of(layout, 6, 3, split)
    want = {(b, h, t): sorted(some) for (_, _, t), some in one.items() for b in range(2) for h in range(3)}
    assert {row: sorted(some) for row, some in every.items()} == want


@pytest.mark.parametrize("pattern", [Causal(), BigBird(64), PerHead([SlidingWindow(300), Causal()])], ids=str)
@pytest.mark.parametrize("split", [None, 3])
def test_of_numpy_arrays(pattern: Pattern, split: int | None) -> None:
    """As JAX has them: the same numbers, without a tensor."""
    made = pattern.layout(2000, 2000, block_q=64, block_kv=64)
    there = made.to("cpu")
    _, heads = pattern.lead
    copies = (2, 1) if heads > 1 else (4, 2)
    for of in (lambda x: work(x, *copies, 132, split), lambda x: column_work(x, *copies, 1, 132, split)):
        found, want = of(made), of(there)
        assert isinstance(found.items, np.ndarray) and found.slots == want.slots
        for x, y in ((found.items, want.items), (found.merges, want.merges)):
            assert x.dtype == np.int32 and (x == y.numpy()).all()
        assert (found.segments is None) == (want.segments is None)
        assert found.segments is None or (found.segments == want.segments.numpy()).all()
    for walk, transposed, blocks in ((made.rows, False, 0), (made.rows, False, 132), (made.columns, True, 0)):
        found, want = lists(made, transposed, blocks), lists(there, transposed, blocks)
        for name, x in found._asdict().items():
            y = getattr(want, name).numpy()
            unread = name != "lists" and not getattr(walk, name).size  # one row, of anything
            assert x.dtype == np.int32 and x.shape == y.shape and (unread or (x == y).all())


@pytest.mark.parametrize("keys", [1, 40, 4096, 8192])
@pytest.mark.parametrize("Q", [1, 3])
def test_a_step_of_decoding_is_cut_by_capacity(Q: int, keys: int) -> None:
    """Where only the device knows the lengths of lists, their rows have the parts of the longest possible list."""
    K = 8192
    host = Document([0] * keys + [1] * (K - keys)).layout(Q, K, block_q=64, block_kv=64, q_offset=0)
    known = Causal().layout(1, K, block_q=64, block_kv=64).to("cpu")
    walk, reach = host.rows.on_device("cpu"), torch.arange(K // 64, dtype=torch.int32)
    capacity = walk.full._replace(indices=reach)  # the list has room for every tile
    layout = BlockLayout(walk.with_arrays([*capacity, *walk.arrays()[3:]]))
    found = tiles_of(layout, 8, 8, None)
    listed = sum(int(tiles.counts.sum()) for tiles in walk.lists.values())
    assert len(found) == 8 and all(len(places) == len(set(places)) == listed for places in found.values())
    made, longest = work(layout, 8, 8, 132), work(known, 8, 8, 132).items[:, 5:10:2].sum(1).max()
    assert made.slots == len(made.items) and made.items[:, 5:10:2].sum(1).max() <= longest


def test_heads_with_lists_of_their_own() -> None:
    """A list for each of two batch elements, which three heads share."""
    mask = np.random.default_rng(0).random((2, 1, 512, 512)) < 0.0005
    layout = from_dense(mask, block_q=64, block_kv=64).to("cpu")
    items = work(layout, 3, 3, 132, 1000).items.tolist()
    assert sorted((item[0], item[1], item[2]) for item in items) == [
        (b, h, t) for b in range(2) for h in range(3) for t in range(8)
    ]
    assert all(item[10] == item[0] for item in items)


def test_heads_of_their_own_lists_are_cut_and_ordered_like_those_that_share_one() -> None:
    """Per head or shared, the same items in the same order."""
    shared = BigBird(128).layout(16384, 16384, block_q=128, block_kv=128).to("cpu")
    own = PerHead([BigBird(128)] * 16).layout(16384, 16384, block_q=128, block_kv=128).to("cpu")
    one, other = work(shared, 16, 16, 132), work(own, 1, 1, 132)
    words = [0, 1, 2, 3, 5, 7, 9]
    assert own.lead == (1, 16) and one.slots == other.slots > 0
    assert torch.equal(one.items[:, words], other.items[:, words]) and torch.equal(one.merges, other.merges)


PATTERNS = {
    "window": lambda: SlidingWindow(2048),
    "global": lambda: BigBird(128),
    "causal": lambda: Causal(),
    "documents": lambda: Document.from_cu_seqlens([0, 2000, 5000, 16384]) & Causal(),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("made_there", [False, True])
def test_blocks_end_together(name: str, made_there: bool) -> None:
    """Blocks that draw items in their order end within about one item of the mean."""
    layout = PATTERNS[name]().layout(16384, 16384, block_q=128, block_kv=128).to(torch.device("cpu"))
    if made_there:
        layout = BlockLayout(layout.rows)
    found = work(layout, 16, 16, 132)
    lengths = found.items[:, 5:10:2].sum(1)
    assert ends(lengths) < 1.01 * float((lengths + START).sum()) / 132 + float(lengths.median())
    if name != "causal":  # whose last head has short rows of all lengths
        whole = work(layout, 16, 16, 132, 1000).items
        whole = whole[torch.argsort(whole[:, 1], stable=True)]
        assert ends(lengths) < ends(whole[:, 5:10:2].sum(1))
    # Of about the same length, a head's items follow one another.
    some = lengths == lengths.mode().values
    heads = found.items[some, 1].tolist()
    assert heads == sorted(heads)


@pytest.mark.parametrize("pattern", [Causal(), SlidingWindow(300), BigBird(64)], ids=str)
def test_every_other_round_is_listed_backwards(pattern: Pattern) -> None:
    """A warm cache is used from its end; intervals keep their order, and rows their tiles."""
    layout = pattern.layout(2000, 2000, block_q=64, block_kv=64).to("cpu")
    assert layout.host is not None
    rows = layout.host.rows
    there, back = lists(layout).lists, lists(layout, blocks=3).lists
    lengths = sum(getattr(rows, kind).counts.reshape(-1).astype(int) for kind in KINDS)
    order = np.argsort(-lengths, kind="stable").tolist()
    base = turned = 0
    for kind in KINDS:
        tiles = getattr(rows, kind)
        for row, (start, count) in enumerate(zip(tiles.starts.reshape(-1), tiles.counts.reshape(-1), strict=True)):
            some = slice(base + int(start), base + int(start) + int(count))
            backwards = kind != "interval" and order.index(row) // 3 % 2 == 1
            assert torch.equal(back[:, some], there[:, some].flip(1) if backwards else there[:, some])
            turned += backwards and count > 1
        base += len(tiles.indices)
    assert turned > 0
    made_there = BlockLayout(layout.rows.with_arrays(layout.rows.arrays()))
    columns, *entries = lists(made_there, blocks=3).lists  # what goes with a tile is that of bits alone
    expected, *_ = there
    assert torch.equal(columns, expected)
    assert len(entries) == (len(rows.bits.indices) > 0)


def ends(lengths: torch.Tensor) -> int:
    """When the last of 132 blocks ends that draw items of these lengths, in tiles."""
    busy = [0] * 132
    for length in lengths.tolist():
        heapq.heapreplace(busy, busy[0] + length + START)
    return max(busy)


def test_items_and_merges_share_their_first_words() -> None:
    """The copies of items and merges for every head are made by one function, for rows and for columns."""
    first = list(RowItem)[:4]
    assert [word.name for word in first] == ["BATCH", "HEAD", "TILE", "SLOT"]
    assert first == list(ColumnItem)[:4] == list(PartMerge)[:4]
    assert [word.name for word in list(ColumnItem)[:4]] == ["BATCH", "GROUP", "TILE", "SLOT"]
    assert [word.name for word in list(PartMerge)[:4]] == ["BATCH", "HEAD", "TILE", "SLOT"]
