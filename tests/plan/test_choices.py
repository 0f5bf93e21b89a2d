"""What is chosen for a case changes with the estimates alone, and never unseen."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support.choices import GRAPHS, MOST_EDGES, choices, every, held

FEWER_EDGES = MOST_EDGES // 2


def test_the_choice_for_every_case_and_row() -> None:
    """Written by `python tests/support/choices.py --write`; graphs of 4 to 8 million pairs are written alone."""
    found, kept = choices(FEWER_EDGES), held()
    left_out = {name for name, edges in GRAPHS.items() if edges > FEWER_EDGES}
    assert len(left_out) == 3
    assert kept.keys() == {f"{case.name} {dtype}" for case, dtype in every()}
    want = {key: value for key, value in kept.items() if key.split()[0] not in left_out}
    changed = {key: (want.get(key), value) for key, value in found.items() if want.get(key) != value}
    assert not changed and found.keys() == want.keys(), f"was, is: {changed}"
