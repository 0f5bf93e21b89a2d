"""What is no tensor, or none that fits, gives a ValueError that says so, or a result."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import gossamer as gs

JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**70, 2.5, float("nan"), "mean", "", [1, 2], {}, gs.Causal(), torch.float32,
    torch.zeros(()), torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 70), torch.zeros(1, 2, 70, 4),
    torch.zeros(1, 3, 70, 4), torch.zeros(1, 2, 70, 4, dtype=torch.float16), torch.zeros(2, 3, dtype=torch.int32),
    torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.zeros(1, 1, 1, 2, 70, 4),
    torch.zeros(2, 70, dtype=torch.float64).to("meta"),
)  # fmt: skip
RIGHT = torch.zeros(1, 2, 70, 4)
CALLS: dict[str, Any] = {
    "sparsek": (gs.sparsek, {"u": RIGHT, "k": 2, "dim": -1}),
    "sparsek_causal": (gs.sparsek_causal, {"u": RIGHT, "k": 2}),
    "last_topk": (gs.last_topk, {"u": RIGHT, "k": 2}),
    "topk_blocks": (
        gs.topk_blocks,
        {"q": RIGHT, "k": RIGHT, "causal": True, "block_size": 64, "topk": 4, "top_p": 0.5, "score": "mean",
         "local": 1, "first": 1, "per": "head", "scale": 1.0, "layout": "bhnd"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_malformed_arguments(name: str) -> None:
    function, right = CALLS[name]
    draw, refused = random.Random(name), 0
    function(**right)
    one_wrong = [{argument: x} for argument in right for x in JUNK]
    several = [{argument: draw.choice(JUNK) for argument in right if draw.random() < 0.4} for _ in range(200)]
    for wrong in one_wrong + several:
        try:
            function(**(right | wrong))
        except ValueError as error:
            refused += 1
            assert any(str(argument) in str(error) for argument in right), (wrong, error)
    assert refused > len(one_wrong) // 2
