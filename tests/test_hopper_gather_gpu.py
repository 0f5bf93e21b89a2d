"""The Hopper gather kernels on a GPU against the float64 oracle, with NaN in every output before a kernel runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton_cases import CASES, Case, compare, make

import gossamer as gs
from gossamer.kernels.hopper import missing_packages
from gossamer.layouts.gather import build_gather

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages())),
]


def hubs(Q: int, K: int) -> gs.CSR:
    """A few pairs a row, one row that sees everything, one key that everything sees, and rows that see nothing."""
    mask = np.random.default_rng(2).random((Q, K)) < 0.02
    mask[3] = mask[:, 5] = True
    mask[64:192] = mask[7] = False
    return gs.CSR(np.cumsum([0, *mask.sum(1)]), np.nonzero(mask)[1], K)


OWN = [
    Case("hubs", hubs(700, 900), H=2, G=1, Q=700, K=900, D=64, E=64, split=2),
    Case("grouped", 0.02, B=2, H=4, G=2, Q=900, K=1100, D=64, E=64),
    Case("by-head", 0.05, H=4, G=2, lead=(1, 4), Q=500, K=500, D=96, E=40, split=1),
    Case("odd-sizes", 0.05, H=2, G=1, Q=300, K=260, D=50, E=20),
    Case("by-batch", 0.1, B=2, H=2, G=1, lead=(2, 1), Q=170, K=190, D=128, E=128, terms={"lengths": (190, 31)}),
    Case("power-strided", gs.PowerStrided(2, 40), H=2, G=2, Q=2000, K=2000, D=128, E=128),
    Case("soft-cap", 0.05, H=2, G=2, Q=300, K=300, D=64, E=64, terms={"softcap": 3.0, "lengths": (211,)}),
]
NAMES = ("one-query", "nothing-kept", "negative-scale", "sink", "sink-split", "random-per-batch-and-head", "strided")
ALL = OWN + [case for case in CASES if case.name in NAMES]


def run(case: Case) -> tuple[Any, ...]:
    """The results of the kernels, and what they are compared with."""
    from gossamer.kernels.hopper.gather import launch

    problem, _, mask, terms, (q, k, v, dout, dlse) = make(case, "cuda")
    pattern = gs.BlockMask(mask.cpu().numpy(), 1)
    layout = build_gather(pattern, case.Q, case.K, block_q=64, q_offset=terms.q_offset).to("cuda")
    out, lse = launch.forward(problem, q, k, v, layout, terms, split=case.split)
    gradients = launch.backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, split=case.split)
    return (mask, terms, (q, k, v, dout, dlse)), (out, lse, *gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_case(case: Case, dtype: torch.dtype, poison: None) -> None:
    case = dataclasses.replace(case, dtype=dtype)
    against, found = run(case)
    compare(case, *against, found)


@pytest.mark.parametrize("case", OWN[:3], ids=lambda case: case.name)
def test_repeated_runs_give_the_same_bits(case: Case) -> None:
    case = dataclasses.replace(case, dtype=torch.bfloat16)
    first = run(case)[1]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first[:5], run(case)[1][:5], strict=True))
