"""Which rows gather together where queries have lists of their own, and layouts of such rows that enter a call."""

from __future__ import annotations

import pytest
import torch

import gossamer as gs
from gossamer.layouts.device import key_list_layout
from gossamer.layouts.gather import queries_of
from gossamer.plan.problem import Unsupported
from gossamer.torch import device_arrays
from gossamer.torch.arguments import Arguments
from gossamer.torch.given_layouts import check_layout, geometry_of, layout_from
from gossamer.torch.structure.groups import ALONE, _most_heads, group_of


def test_heads_of_a_tile() -> None:
    assert [queries_of(heads) for heads in (1, 2, 3, 5, 8, 12, 16, 33, 64)] == [64, 32, 16, 8, 8, 4, 4, 1, 1]
    assert [_most_heads(ratio) for ratio in (1, 7, 16, 64, 65, 96, 128)] == [1, 7, 16, 64, 13, 48, 64]
    for heads in (0, 65):
        with pytest.raises(ValueError, match="heads whose rows share a tile must be from 1 to 64"):
            queries_of(heads)


def test_on_a_cpu_each_query_gathers_for_itself() -> None:
    q, k = torch.randn(1, 16, 8, 4), torch.randn(1, 1, 9, 4)
    structure = gs.Indices(torch.zeros(8, 5, dtype=torch.int32)) & gs.Causal()
    assert structure.list_heads == 1
    rest = [None] * 8
    assert group_of(Arguments(q, k, k, *rest, False, False), structure.list_heads) == ALONE  # type: ignore[arg-type]


def test_given_layouts() -> None:
    lists = torch.randint(0, 50, (1, 2, 20, 7), dtype=torch.int32)
    made = key_list_layout(
        lists, None, None, None, 20, 50, block_q=4, heads=16, xp=device_arrays, transpose=False
    )  # fmt: skip
    again = layout_from(made.rows.arrays(), geometry_of(made))
    assert (again.rows.heads, again.rows.width, again.block_q) == (16, 64, 4)  # type: ignore[union-attr]
    assert (again.expand() == made.expand()).all()
    q, k = torch.randn(1, 32, 20, 8), torch.randn(1, 2, 50, 8)
    check_layout(again.rows, q, k)
    with pytest.raises(ValueError, match="must have heads a divisor of the inputs' 8 query heads for each key head"):
        check_layout(again.rows, q[:, :16], k)
    with pytest.raises(Unsupported, match="gathers no listed keys for groups of 4 of these queries of 16 heads"):
        gs.attention(q, k, k, made)
    with pytest.raises(ValueError, match="block_q of 16 heads must be 4; got 8"):
        key_list_layout(lists, None, None, None, 20, 50, block_q=8, heads=16, xp=device_arrays)
