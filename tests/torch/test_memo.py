"""What is kept, and what goes first."""

from __future__ import annotations

import gc
import linecache
from weakref import ref

import pytest

from gossamer.memo import LEAST, Memo, Memos, forget_all


def test_what_was_asked_for_stays() -> None:
    kept: Memo[int] = Memo(3)
    for key in "abc":
        kept.put(key, ord(key))
    assert kept.get("a") == ord("a") and kept.get("z") is None
    kept.put("d", 0)
    assert "a" in kept and "b" not in kept and len(kept) == 3
    kept.put("e", 0)
    assert "c" not in kept and kept.put("e", 5) == 0
    kept.clear()
    assert len(kept) == 0 and kept.get("a") is None


def test_many_small_ones_or_few_large_ones() -> None:
    kept: Memo[int] = Memo(2, 5, 100)
    for key in range(8):
        kept.put(key, key, 10)
    assert [key in kept for key in range(8)] == [False] * 6 + [True] * 2  # none of them has come back
    for _ in range(3):
        for key in range(5):
            kept.put(key, key, 10)
    assert [key in kept for key in range(8)] == [True] * 5 + [False] * 3
    for key in range(8, 12):
        kept.put(key, key, 90)
    assert [key in kept for key in range(12)] == [False] * 10 + [True] * 2  # two, though they are too large together


def test_room_grows_for_what_comes_back_alone() -> None:
    kept: Memo[int] = Memo(4, 32)
    for key in range(500):
        kept.put(key, key)
    assert len(kept) == 4
    made = []
    for turn in range(6):
        for key in "abcdefghijklmnopqrstuvwxyz":  # a layer each
            if kept.get(key) is None:
                kept.put(key, turn)
                made.append(turn)
    assert made.count(0) == 26 and set(made) <= {0, 1} and len(kept) == 26
    kept.clear()
    for key in range(500):
        kept.put(key, key)
    assert len(kept) == 4


def test_all_asked_for_and_no_room() -> None:
    kept: Memo[int] = Memo(2)
    for key in range(9):
        kept.put(key, key)
        assert kept.get(key) == key
    assert len(kept) == 2


class Owner:
    """Something that a memo goes with."""


def test_a_memo_goes_with_its_owner() -> None:
    memos: Memos[int] = Memos()
    owner, other = Owner(), Owner()
    for key in range(2 * LEAST):
        memos.of(owner).put(key, key)
    memos.of(other).put(0, 5)
    assert len(memos.of(owner)) == LEAST and memos.of(other).get(0) == 5
    forget_all()
    assert len(memos.of(owner)) == len(memos.of(other)) == 0
    memos.of(owner).put(0, 1)
    of_owner, of_other = ref(memos.of(owner)), ref(memos.of(other))
    del owner
    gc.collect()
    assert of_owner() is None and of_other() in Memo._every
    memos.clear()
    assert memos.of(other).get(0) is None


def test_lines_of_a_launch_go_with_it() -> None:
    bind = pytest.importorskip("gossamer.torch.bind")
    call = bind._compiled("def make():\n    def call():\n        return 1\n    return call\n")()
    file = call.__code__.co_filename
    bind._compiled.cache_clear()
    gc.collect()
    assert call() == 1 and linecache.getline(file, 3) == "        return 1\n"  # a traceback would show it
    del call
    gc.collect()
    assert file not in linecache.cache
