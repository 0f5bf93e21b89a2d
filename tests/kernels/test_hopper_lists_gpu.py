"""Lists of keys that heads share, on a GPU of compute capability 9.0, through the public call, against float64."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gossamer as gs
from gossamer.kernels.contract import Terms
from tests.support.hopper import ON_HOPPER
from tests.support.host_reads import nothing_waits
from tests.support.triton_cases import compare

pytestmark = ON_HOPPER
SEED = int(os.environ.get("LISTS_SEED", "0"))


class Case(NamedTuple):
    """Sizes, R query heads of each key head, entries of a list, and terms."""

    R: int
    D: int = 128
    E: int = 128
    B: int = 1
    G: int = 1
    Q: int = 77
    K: int = 300
    n: int = 90
    dtype: torch.dtype = torch.bfloat16
    lists: str = "own"  # of each batch element and key head; "shared" by all
    softcap: float | None = None
    sinks: bool = False
    causal: bool = False


CASES = [
    Case(1, B=2, G=2, Q=130, n=150),
    Case(1, 64, 64, G=3, Q=200, n=120, sinks=True),
    Case(2, 64, 64, G=2, Q=131),
    Case(3, B=2, G=2, sinks=True, causal=True),
    Case(8, 96, 96, B=2, softcap=3.0),
    Case(8, 96, 64, lists="shared", B=2, G=2, dtype=torch.float16),
    Case(12, 128, 40, n=1),
    Case(16, B=2, G=2, Q=301, K=500, causal=True),
    Case(16, 256, 256, Q=50, sinks=True),
    Case(16, 200, 136, Q=50, softcap=2.0),
    Case(16, 64, 64, Q=1, K=700, n=500),
    Case(48, 64, 64, Q=33),
    Case(64, Q=33, K=700, n=300, sinks=True, causal=True),
    Case(64, 64, 64, B=2, Q=40, dtype=torch.float16),
    Case(128, Q=20, sinks=True),
]


def draw(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(lists, dense mask (B, H, Q, K), [q, k, v, dout, dlse]): repeated, missing and wrong entries, empty rows."""
    c, g = case, torch.Generator("cuda").manual_seed(SEED)
    lead = (c.B, c.G) if c.lists == "own" else (1, 1)
    lists = torch.randint(
        -c.K // 8, c.K + c.K // 8, (*lead, c.Q, c.n), device="cuda", generator=g, dtype=torch.int32
    )  # fmt: skip
    lists[:, :, c.Q // 2] = -1
    lists[:, :, c.Q // 3, 1:] = lists[:, :, c.Q // 3, :1]
    listed = torch.where((lists >= 0) & (lists < c.K), lists, c.K).long()
    mask = torch.zeros(*lead, c.Q, c.K + 1, dtype=torch.bool, device="cuda").scatter_(3, listed, True)[..., : c.K]
    if c.causal:
        row = torch.arange(c.Q, device="cuda")[:, None] + c.K - c.Q
        mask = mask & (torch.arange(c.K, device="cuda") <= row)
    shapes = (c.R * c.G, c.Q, c.D), (c.G, c.K, c.D), (c.G, c.K, c.E), (c.R * c.G, c.Q, c.E)
    x = [torch.randn((c.B, *s), device="cuda", generator=g).to(c.dtype) for s in shapes]
    dlse = torch.randn((c.B, c.R * c.G, c.Q), device="cuda", generator=g)
    return lists, mask.expand(c.B, c.G, c.Q, c.K).repeat_interleave(c.R, 1), [*x, dlse]


def results(case: Case, lists: Tensor, inputs: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, ...]:
    """out, lse, and all gradients, of the public call."""
    q, k, v, dout, dlse = inputs
    chosen: Any = gs.Indices(lists) & gs.Causal() if case.causal else gs.Indices(lists)
    leaves = [x.detach().requires_grad_() for x in ((q, k, v) if sinks is None else (q, k, v, sinks))]
    given = {"softcap": case.softcap, "sink_logits": None if sinks is None else leaves[-1], "implementation": "hopper"}
    out, lse = gs.attention(*leaves[:3], chosen, return_lse=True, **given)
    some = lse != -torch.inf
    loss = (out.float() * dout.float()).sum() + (torch.where(some, lse, 0.0) * dlse).sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, poison: None) -> None:
    lists, mask, inputs = draw(case)
    sinks = torch.randn(inputs[0].shape[1], device="cuda") if case.sinks else None
    terms = Terms(case.D**-0.5, case.K - case.Q, case.softcap, sink_logits=sinks)
    compare(case, mask, terms, inputs, results(case, lists, inputs, sinks))


def test_it_is_chosen() -> None:
    """Where nothing is named; a deterministic call gathers for single queries, and gives the same bits."""
    case = Case(16, Q=200, K=400)
    lists, _, (q, k, v, dout, _) = draw(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plan = gs.explain(*leaves, gs.Indices(lists))
    assert (plan.implementation, plan.backward) == ("hopper", "hopper")
    plan = gs.explain(*leaves, gs.Indices(lists), deterministic=True)
    assert plan.implementation == plan.backward == "triton"
    first: Any = None
    for _ in range(5):
        out = gs.attention(*leaves, gs.Indices(lists), deterministic=True)
        found = (out, *torch.autograd.grad(out, leaves, dout))
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_the_forward_and_dq_are_the_same_bits() -> None:
    case = Case(16, B=2, Q=200, K=400)
    lists, _, inputs = draw(case)
    first = results(case, lists, inputs, None)
    for _ in range(10):
        again = results(case, lists, inputs, None)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


def test_a_graph_reads_lists_again() -> None:
    """Replayed over new lists it gives what an eager call gives; nothing waits for the device."""
    case = Case(16, Q=200, K=400)
    lists, _, inputs = draw(case)
    q, k, v = [x.requires_grad_() for x in inputs[:3]]

    def step() -> tuple[Tensor, ...]:
        out = gs.attention(q, k, v, gs.Indices(lists))
        return (
            out.detach(),
            *torch.autograd.grad(out, (q, k, v), inputs[3]),
        )  # no graph of gradients outlives the capture

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with nothing_waits():
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for _ in range(5):
        lists.copy_(torch.randint(-5, case.K, lists.shape, device="cuda", dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        want = step()
        assert all(torch.equal(a, b) for a, b in zip(held[:2], want[:2], strict=True))
        for a, b in zip(held[2:], want[2:], strict=True):  # sums in any order
            assert (a.float() - b.float()).abs().max() <= 0.02 * b.float().abs().max()
