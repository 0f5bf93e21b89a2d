"""The Hopper gather kernels on a GPU against the float64 oracle, with NaN in every output before a kernel runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import gossamer as gs
from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper.launch import gather as launch
from gossamer.kernels.reference import oracle
from gossamer.layouts.gather import build_gather
from gossamer.testing.graphs import proximity_graph
from gossamer.testing.tolerance import check, error, plain
from tests.support import launches
from tests.support.hopper import ON_HOPPER
from tests.support.triton_cases import CASES, Case, compare, make

pytestmark = ON_HOPPER


def hubs(Q: int, K: int) -> gs.CSR:
    """A few pairs a row, one row that sees everything, one key that everything sees, and rows that see nothing."""
    mask = np.random.default_rng(2).random((Q, K)) < 0.02
    mask[3] = mask[:, 5] = True
    mask[64:192] = mask[7] = False
    return gs.CSR(np.cumsum([0, *mask.sum(1)]), np.nonzero(mask)[1], K)


OWN = [
    Case("hubs", hubs(700, 900), H=2, G=1, Q=700, K=900, D=64, E=64, limit=2),
    Case("grouped", 0.02, B=2, H=4, G=2, Q=900, K=1100, D=64, E=64),
    Case("by-head", 0.05, H=4, G=2, lead=(1, 4), Q=500, K=500, D=96, E=40, limit=1),
    Case("odd-sizes", 0.05, H=2, G=1, Q=300, K=260, D=50, E=20),
    Case("by-batch", 0.1, B=2, H=2, G=1, lead=(2, 1), Q=170, K=190, D=128, E=128, terms={"lengths": (190, 31)}),
    Case("power-strided", gs.PowerStrided(2, 40), H=2, G=2, Q=2000, K=2000, D=128, E=128),
    Case("soft-cap", 0.05, H=2, G=2, Q=300, K=300, D=64, E=64, terms={"softcap": 3.0, "lengths": (211,)}),
]
NAMES = ("one-query", "nothing-kept", "negative-scale", "sink", "sink-split", "random-per-batch-and-head", "strided")
ALL = OWN + [case for case in CASES if case.name in NAMES]
SINGLE = [
    *OWN[:2],
    OWN[3],
    OWN[6],
    Case("odd-heads", 0.05, B=2, H=4, G=2, lead=(2, 4), Q=200, K=260, D=7, E=33, limit=1),
    *[case for case in CASES if case.name in NAMES],
]


def run(case: Case) -> tuple[Any, ...]:
    """The results of the kernels, and what they are compared with."""
    problem, _, mask, terms, (q, k, v, dout, dlse) = make(case, "cuda")
    pattern = gs.BlockMask(mask.cpu().numpy(), 1)
    layout = build_gather(pattern, case.Q, case.K, block_q=64, q_offset=terms.q_offset).to("cuda")
    given = launch, problem, layout, terms
    out, lse = launches.forward(*given, q, k, v, split=case.limit)
    gradients = launches.backward(*given, dout, dlse, q, k, v, out, lse, split=case.limit)
    return (mask, terms, (q, k, v, dout, dlse)), (out, lse, *gradients)


# Types take turns: each has kernels of its own.
@pytest.mark.parametrize(
    "case",
    [dataclasses.replace(case, dtype=(torch.bfloat16, torch.float16)[at % 2]) for at, case in enumerate(ALL)],
    ids=lambda case: case.name,
)
def test_case(case: Case, poison: None) -> None:
    against, found = run(case)
    compare(case, *against, found)


@pytest.mark.parametrize("case", OWN[:3], ids=lambda case: case.name)
def test_repeated_runs_give_the_same_bits(case: Case) -> None:
    case = dataclasses.replace(case, dtype=torch.bfloat16)
    first = run(case)[1]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first[:5], run(case)[1][:5], strict=True))


def forward(
    case: Case, change: Callable[..., tuple[torch.Tensor, ...]] = lambda *inputs: inputs
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor, Terms]:
    """(out, lse) of the float32 kernel, the same twice, with its inputs, mask and terms."""
    case = dataclasses.replace(case, dtype=torch.float32)
    problem, _, mask, terms, (q, k, v, *_) = make(case, "cuda")
    q, k, v = change(q, k, v)
    made = build_gather(gs.BlockMask(mask.cpu().numpy(), 1), case.Q, case.K, block_q=64, q_offset=terms.q_offset)
    layout = made.to("cuda")
    out, lse = launches.forward(launch, problem, layout, terms, q, k, v, split=case.limit)
    again = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    launches.forward(launch, problem, layout, terms, q, k, v, split=case.limit, into=again)
    for first, second in zip((out, lse), again, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    return out, lse, (q, k, v), mask, terms


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_float32(case: Case, poison: None) -> None:
    """The forward of numbers that are split in two."""
    out, lse, inputs, mask, terms = forward(case)
    exact, low = oracle(*(x.double() for x in inputs), mask, terms), plain(*inputs, mask, terms)
    for name, *values in zip(("out", "lse"), (out, lse), exact, low, strict=True):
        check(name, *values)


def powers(most: int, like: torch.Tensor) -> torch.Tensor:
    """Factors of rows, from 2^-most to 2^most."""
    drawn = torch.randint(-most, most + 1, like.shape[:3], generator=torch.Generator().manual_seed(0))
    return torch.exp2(drawn.float()).to(like.device)[..., None]


def columns(like: torch.Tensor) -> torch.Tensor:
    """Factors of columns, from 2^-8 to 2^8."""
    return torch.exp2(torch.linspace(-8, 8, like.shape[3], device=like.device))


# How far the exponents of values are from zero, and the inputs.
MAGNITUDES = {
    "values-unlike": (40, lambda q, k, v: (q, k, v * powers(40, v))),
    # As large as they may be.
    "values-large": (103, lambda q, k, v: (q, k, v / v.abs().amax(-1, keepdim=True) * (0.99 * 2.0**103))),
    "values-small": (100, lambda q, k, v: (q, k, v * 2.0**-100)),
    "values-zero": (98, lambda q, k, v: (q, k, v * (powers(1, v) > 1) * 2.0**60)),
    "keys-unlike": (0, lambda q, k, v: (q, k * powers(40, k) * 2.0**-40, v)),
    "keys-small": (0, lambda q, k, v: (q * 2.0**90, k * 2.0**-90, v)),
    "keys-large": (0, lambda q, k, v: (q * 2.0**-90, k * 2.0**90, v)),
    "columns-unlike": (0, lambda q, k, v: (q / columns(q), k * columns(k), v)),
}


@pytest.mark.parametrize("name", MAGNITUDES)
def test_float32_of_any_magnitude(name: str) -> None:
    """Relative to the largest number of each row of the result, whatever the other rows hold."""
    exponent, change = MAGNITUDES[name]
    out, lse, inputs, mask, terms = forward(Case("magnitudes", 0.1, G=1, Q=300, K=500, D=64, E=64), change)
    exact, low = oracle(*(x.double() for x in inputs), mask, terms), plain(*inputs, mask, terms)
    largest = exact[0].abs().amax(-1, keepdim=True).clamp(min=1e-300)
    # Exponents of values stand beside scores in float32, which rounds them by half a unit of their sum.
    rounding = (exponent + 16) * torch.finfo(torch.float32).eps / 2
    assert error(out / largest, exact[0] / largest) <= 2 * error(low[0] / largest, exact[0] / largest) + rounding
    assert error(lse, exact[1]) <= 2 * error(low[1], exact[1]) + 2 * rounding


@pytest.mark.parametrize("which", (0, 1), ids=("q", "k"))
def test_float32_of_nan(which: int) -> None:
    """It comes out where it is attended to, and nowhere else."""

    def spoil(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs[which][0, 0, 17, 5] = torch.nan
        return inputs

    out, lse, _, mask, _ = forward(Case("nan", 0.1, G=1, Q=300, K=500, D=64, E=64), spoil)
    hit = torch.zeros(lse.shape, dtype=torch.bool, device="cuda")
    if which == 0:
        hit[0, 0, 17] = True
    else:
        hit |= mask[..., 17]
    assert torch.equal(out.isnan(), hit[..., None].expand_as(out)) and torch.equal(lse.isnan(), hit)


def test_float32_is_chosen() -> None:
    """The public call gathers a graph in space so: forward alone."""
    graph = proximity_graph((5, 5, 4), 2.5)
    q, k, v = (torch.randn(1, 2, graph.num_keys, 64, device="cuda", requires_grad=True) for _ in range(3))
    plan = gs.explain(q, k, v, graph)
    assert (plan.implementation, plan.backward) == ("hopper", "triton")
    found = []
    for name in (None, "triton"):
        for _ in range(2):  # the second call of a kind is a known one
            out, lse = gs.attention(q, k, v, graph, implementation=name, return_lse=True)
        gradients = torch.autograd.grad((out * v.detach()).sum() + lse.sum(), (q, k, v))
        found.append((out.detach(), lse.detach(), *gradients))
    for first, second in zip(*found, strict=True):
        assert error(first, second) <= 4e-6 * max(1.0, float(second.abs().max()))
