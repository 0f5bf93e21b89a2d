"""Attention computed in parts, over views of its tensors: exact, few calls, and taken where that is cheaper."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.plan import partition
from gossamer.plan.table import load
from gossamer.testing.cases import Case
from tests.support.exact import no_gpu
from tests.support.parts_cases import CASES, at_any_price, check, forget


def test_heads_as_views() -> None:
    assert partition.progressions([0, 2, 4, 5, 9]) == [(0, 3, 2), (5, 2, 4)]
    for group in (1, 2, 4):
        for members in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6], [1, 2, 3, 7], [4, 5, 6, 7], [0, 1, 4, 5]):
            seen = []
            for h in partition.head_runs(members, group):
                assert h.number % h.key_number == 0
                for n in range(h.number):
                    head = h.start + n * h.step
                    assert head // group == h.key_start + n // (h.number // h.key_number) * h.key_step
                    seen.append(head)
            assert sorted(seen) == members
    assert len(partition.head_runs([0, 2, 4, 6], 1)) == len(partition.head_runs([2, 3, 4, 5], 2)) == 1


def parameters() -> list[Any]:
    found = [("blocked", "cpu", "float64"), ("blocked", "cpu", "float32")]
    gpu = [("triton", "cuda", "bfloat16"), ("hopper", "cuda", "bfloat16"), ("blocked", "cuda", "float32")]
    return [pytest.param(*x, id="-".join(x)) for x in found] + [
        pytest.param(*x, id="-".join(x), marks=[pytest.mark.gpu, no_gpu]) for x in gpu
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("name", "device", "dtype"), parameters())
def test_parts_are_exact(
    name: str, device: str, dtype: str, case: Case, poison: None, always: list[partition.Partition]
) -> None:
    check(name, device, dtype, case, always)


@pytest.mark.parametrize("name", ["longformer", "several", "longnet", "per_head_one_key_head", "odd_sizes"])
def test_parts_of_kernels_that_write_16_bits_alone(
    name: str, always: list[partition.Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Hopper do: results go through tensors of the inputs' type where they are joined in float32."""
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    kind = type(blocked)
    monkeypatch.setattr(kind, "capability", replace(blocked.capability, float32_results=False))

    prepare = kind.prepare

    def narrow(self: Any, problem: Any, layout: Any, direction: Any, scoring: Any, operands: Any) -> Any:
        written = [operands[x] for x in ("dq", "dk", "dv", *("out",) * (direction == "forward")) if x in operands]
        assert written and all(x.dtype == "bfloat16" for x in written)
        return prepare(self, problem, layout, direction, scoring, operands)

    monkeypatch.setattr(kind, "prepare", narrow)
    check("blocked", "cpu", "bfloat16", next(c for c in CASES if c.name == name), always)


def test_calls_are_few(always: list[partition.Partition]) -> None:
    """All classes of equal size in one call, of every batch element where these lie at one stride."""
    seen = []
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    original = type(blocked).prepare

    def prepare(self: Any, problem: Any, *rest: Any) -> Any:
        seen.append((problem.B, problem.H, problem.Q))
        return original(self, problem, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(blocked), "prepare", prepare)
        x = torch.randn(3, 2, 130, 8)
        gs.attention(x, x, x, gs.Dilated(5, 0, 4), implementation="blocked")
        assert seen == [(2, 6, 33), (2, 6, 32)]
        seen.clear()
        y = torch.randn(3, 130, 2, 8).transpose(1, 2)
        gs.attention(y, y, y, gs.Dilated(5, 0, 4), implementation="blocked")
        assert seen == [(3, 2, 33)] * 2 + [(3, 2, 32)] * 2  # the two classes of a run are fewer than the batch


def test_no_class_that_has_queries_and_keys() -> None:
    q, k = torch.randn(2, 1, 8, requires_grad=True), torch.randn(2, 3, 8)
    out, lse = gs.attention(q, k, k, gs.Dilated(4, 6, 7), q_offset=33, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all() and not torch.autograd.grad(out.sum(), q)[0].any()


def test_the_cheaper_way_is_taken_and_told() -> None:
    x = torch.randn(1, 2, 4096, 16)
    explanation = gs.explain(x, x, x, gs.Dilated(15, 0, 16))
    assert len(explanation.parts) == 1 and "16 views of plain windows" in explanation.parts[0]
    assert "16 views of plain windows" in str(explanation)
    plain = gs.explain(x, x, x, gs.SlidingWindow(15))
    assert not plain.parts
    assert explanation.useful_flops == pytest.approx(gs.Dilated(15, 0, 16).density(4096, 4096) * 4096**2 * 2 * 64)
    assert explanation.executed_flops < 1.05 * plain.executed_flops
    small = torch.randn(1, 2, 64, 16)
    assert not gs.explain(small, small, small, gs.Dilated(15, 0, 16)).parts
    assert not gs.explain(x, x, x, gs.Dilated(15, 0, 16), implementation="reference").parts
    heads = gs.explain(x, x, x, gs.PerHead([gs.SlidingWindow(63), gs.Dilated(31, 0, 64)]))
    assert len(heads.parts) == 2 and heads.useful_flops == pytest.approx(heads.density * 4096**2 * 2 * 64)


def test_longest_part_first() -> None:
    x = torch.randn(1, 3, 8192, 16)
    pattern = gs.PerHead([gs.Dilated(15, 0, 64), gs.Dilated(255, 0, 16), gs.SlidingWindow(63)])
    explanation = gs.explain(x, x, x, pattern)
    assert "left=255" in explanation.parts[0] and len(explanation.parts) == 3


def drawn(case: Case, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves q, k and v, and gradients of out and lse."""
    c = case
    leaves = [
        torch.randn(c.B, heads, n, size, device=device, dtype=dtype, requires_grad=True)
        for heads, n, size in ((c.H, c.Q, c.D), (c.G, c.K, c.D), (c.G, c.K, c.E))
    ]
    return (
        leaves,
        torch.randn(c.B, c.H, c.Q, c.E, device=device, dtype=dtype),
        torch.randn(c.B, c.H, c.Q, device=device),
    )


def results(case: Case, leaves: list[Tensor], dout: Tensor, dlse: Tensor | None, name: str) -> list[Tensor]:
    out, lse = gs.attention(*leaves, case.pattern(), return_lse=True, implementation=name, deterministic=True)
    if dlse is None:
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    lse = torch.where(lse.isinf(), 0.0, lse)
    return [out.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


@pytest.mark.parametrize("name", ["one_row_more", "more_queries", "odd_sizes", "per_head", "longformer", "longnet"])
@pytest.mark.parametrize(
    ("by", "device", "dtype"),
    [
        ("blocked", "cpu", torch.float32),
        pytest.param("hopper", "cuda", torch.bfloat16, marks=[pytest.mark.gpu, no_gpu]),
    ],
)
def test_repeated_calls_in_parts(
    by: str, device: str, dtype: torch.dtype, name: str, always: list[partition.Partition]
) -> None:
    """The same bits as those of first calls, of other inputs and gradients than were bound; none of these is held."""
    case = next(c for c in CASES if c.name == name)
    given = drawn(case, device, dtype)
    results(case, *given, by)
    held = [ref(x) for x in (*given[0], *given[1:])]
    del given
    gc.collect()
    assert not any(x() is not None for x in held)
    leaves, dout, dlse = drawn(case, device, dtype)
    spread = torch.stack((dout, dout), -1)[..., 0]  # strides of its own
    for some in ((dout, dlse), (dout, None), (spread, dlse)):
        found = results(case, leaves, *some, by)
        forget_all()
        assert all(torch.equal(a, b) for a, b in zip(found, results(case, leaves, *some, by), strict=True))
        results(case, *drawn(case, device, dtype), by)
    assert always


@pytest.mark.parametrize("lengths", [None, [15, 31, 0]])
@pytest.mark.parametrize("Q", [1, 31])
def test_queries_whose_heads_are_the_fastest_dimension(
    monkeypatch: pytest.MonkeyPatch, Q: int, lengths: list[int] | None
) -> None:
    """Rows that keep nothing are cleared in a copy that lies as they do; torch pads it into memory of channels last."""
    at_any_price(monkeypatch)
    forget()
    q, k, v = (torch.randn(3, 2, n, d, dtype=torch.float64) for n, d in ((Q, 2), (31, 2), (31, 5)))
    pattern = gs.Strided(10, 14) | gs.Dilated(6, 4, 4)
    for order in itertools.permutations(range(4)):
        back = [order.index(n) for n in range(4)]
        x, y = (t.permute(order).contiguous().permute(back) for t in (q, v))
        found = gs.attention(x, k, y, pattern, key_lengths=lengths, implementation="blocked")
        wanted = gs.attention(q, k, v, pattern, key_lengths=lengths, implementation="reference")
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
