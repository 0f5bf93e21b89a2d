"""A pool of pages as keys of a Hopper launch: what would be launched reads it where it lies."""

from __future__ import annotations

import pytest
import torch

import gossamer as gs
from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.hopper.launch.forward import forward
from gossamer.kernels.launch import operand_of
from gossamer.plan.problem import Problem
from gossamer.torch import paged
from gossamer.torch.arguments import AttentionOptions

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


@pytest.mark.parametrize("how", ["pshd", "phsd", "halves", "beside"])
def test_nothing_is_copied(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "IN_PLACE", {"cpu"})
    monkeypatch.setattr(paged, "tile_of", lambda *_: (64, 64))  # what Hopper takes for few queries
    P, page, G, D = 40, 64, 2, 64
    k = v = torch.randn(P, page, G, D).bfloat16()
    if how == "phsd":
        k = v = torch.randn(P, G, page, D).bfloat16()
    elif how == "halves":
        k, v = torch.randn(P, page, G, 2 * D).bfloat16().split(D, -1)
    elif how == "beside":
        k, v = torch.randn(P, 2, page, G, D).bfloat16().unbind(1)
    pages = gs.Pages(
        torch.randperm(P)[:9].view(3, 3), [130, 64, 190], page, page_layout="phsd" if how == "phsd" else "pshd"
    )
    q = torch.randn(3, 8, D).bfloat16()
    sequences = gs.PackedSequences([0, 1, 2, 3], pages=pages, pattern=gs.Causal())
    pool, ends = paged.paged_call(q, k, v, sequences, AttentionOptions(layout="bshd")).requests
    assert pool.arguments.k.data_ptr() == k.data_ptr() and ends.arguments.k.shape[2] == 2 * page
    a = pool.arguments
    layout = pool.attended.alive
    assert (layout.block_q, layout.block_kv) == (64, 64)
    problem = Problem(
        1, G, G, a.q.shape[2], a.k.shape[2], D, D, "bfloat16", "cuda", sm=90, processors=132, tile=(64, 64)
    )
    operands = {name: operand_of(getattr(a, name)) for name in ("q", "k", "v")}
    prepared = forward(problem, layout, Scoring(D**-0.5, 0, None), operands)
    arrays = prepared.launch.arrays
    assert arrays and all(torch.Size(array.shape).numel() < P * page * G * D for array in arrays.values())
    unaligned = operands | {"k": operands["k"]._replace(aligned=False)}
    copied = forward(problem, layout, Scoring(D**-0.5, 0, None), unaligned).launch.arrays
    assert any(torch.Size(array.shape).numel() >= P * page * G * D for array in copied.values()), "as it would be"
