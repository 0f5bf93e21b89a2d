"""layout="bshd": q, k, v and out as (B, positions, heads, size), against attention written for that order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.torch import calls
from gossamer.torch.key import key_of
from tests.support.definition import dense

EMPTY = gs.SlidingWindow(3) & ~gs.Local(8)  # which leaves rows that keep nothing
PATTERNS = {
    "all": gs.Dense(), "window of 1": gs.SlidingWindow.of_size(1), "window": gs.SlidingWindow.of_size(33, sinks=40),
    "empty rows": EMPTY, "parts": gs.Dilated(3, 0, 8), "LongNet": gs.LongNet([16, 64], [1, 4], heads=4),
    "heads": gs.PerHead([gs.Causal(), gs.Dilated(1, 1, 4), gs.Local(7), EMPTY]),
}  # fmt: skip


def exact(q: Tensor, k: Tensor, v: Tensor, kept: Any, lengths: Any = 2**31) -> tuple[Tensor, Tensor]:
    """(out (B, Q, H, E), lse (B, H, Q)) in float64 from q (B, Q, H, D), k (B, K, G, D) and v (B, K, G, E)."""
    there = torch.arange(k.shape[1]) < torch.as_tensor(lengths)[..., None, None, None]
    out, lse = dense(*(x.double().transpose(1, 2) for x in (q, k, v)), torch.as_tensor(kept) & there)
    return out.transpose(1, 2), lse


def inputs(B: int = 2, N: int = 70, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Leaves q (B, N, 4, 8), k (B, N, 2, 8) and v (B, N, 2, 16)."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(B, N, *s, generator=g, dtype=dtype).requires_grad_() for s in ((4, 8), (2, 8), (2, 16))]


def same(x: list[Tensor], pattern: gs.Pattern, lengths: Any = 2**31, **options: Any) -> None:
    """Results and gradients are those of the definition, contiguous in the layout, the second time too."""
    for _ in range(2):
        want = exact(*x, pattern.materialize(70, 70), lengths)
        found = gs.attention(*x, pattern, **options, layout="bshd", return_lse=True)
        into = [torch.randn_like(y).masked_fill(y == -math.inf, 0.0) for y in found]
        right = torch.autograd.grad(want, x, [y.double() for y in into])
        for a, b in zip((*found, *torch.autograd.grad(found, x, into)), (*want, *right), strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=2e-4, rtol=2e-4)
            assert a.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_against_the_definition(name: str, implementation: str, dtype: torch.dtype, poison: None) -> None:
    same(inputs(dtype=dtype), PATTERNS[name], implementation=implementation)
    same(inputs(dtype=dtype), PATTERNS[name], [3, 70], key_lengths=[3, 70], implementation=implementation)


@pytest.mark.parametrize("name", ["parts", "heads", "LongNet"])
def test_in_parts(name: str, always: list[Any], poison: None) -> None:
    for B in (1, 2, 9):
        same(inputs(B), PATTERNS[name])
    same([y.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for y in inputs()], PATTERNS[name])
    assert any(always)


@pytest.mark.parametrize("dims", [2, 3])
def test_fewer_dimensions(dims: int) -> None:
    """(N, H, D) of one batch element, and (N, D), which is the same in both layouts."""
    forget_all()
    whole = [x.detach()[:1] if dims == 3 else x.detach()[:1, :, :1] for x in inputs()]
    want, want_lse = exact(*whole, gs.Causal().materialize(70, 70))
    for _ in range(2):
        x = [y[0] if dims == 3 else y[0, :, 0] for y in whole]
        out, lse = gs.attention(*x, gs.Causal(), layout="bshd", return_lse=True)
        shape, of_lse = ((70, 4, 16), (4, 70)) if dims == 3 else ((70, 16), (70,))
        torch.testing.assert_close(out.double(), want.view(shape), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse.view(of_lse), atol=1e-5, rtol=1e-5)
    assert len(calls.known) == 1


def test_merged_terms_and_reordered_graphs() -> None:
    x, union, longnet = inputs(), gs.Causal() | gs.Local(9), PATTERNS["LongNet"]
    graph = gs.CSR.from_pattern(gs.Dilated(3, 0, 8), 70, 70).reordered()
    for which, merge in ((union, "lse"), (longnet, "lse"), (graph, None), (graph | union, "lse")):
        out, lse = gs.attention(*x, which, layout="bshd", merge=merge, return_lse=True)
        want, want_lse = gs.attention(*(y.transpose(1, 2) for y in x), which, merge=merge, return_lse=True)
        torch.testing.assert_close((out, lse), (want.transpose(1, 2), want_lse), atol=1e-5, rtol=1e-5)
        assert out.is_contiguous() and lse.is_contiguous()
    one = gs.attention(*(y[0, :, 0] for y in x), union, layout="bshd", merge="lse", return_lse=True)
    assert [y.shape for y in one] == [(70, 16), (70,)]


def test_the_layout_is_part_of_the_key() -> None:
    """Where positions and heads are as many, shapes and strides tell nothing."""
    forget_all()
    q, k, v = (torch.randn(1, 6, 6, 4) for _ in range(3))
    options = None, None, None, None, False
    assert key_of(q, k, v, gs.Causal(), *options) != key_of(q, k, v, gs.Causal(), *options, (), True)
    mask, name = torch.ones(6, 6).tril().bool(), "".join(["bh", "nd"])  # equal to the default, and another object
    for _ in range(2):
        one, other = gs.attention(q, k, v, gs.Causal()), gs.attention(q, k, v, gs.Causal(), layout="bshd")
        assert not torch.allclose(one, other)
        torch.testing.assert_close(gs.attention(q, k, v, mask, layout="bshd"), other)
        torch.testing.assert_close(gs.attention(q, k, v, mask, layout=name), one)  # type: ignore[call-overload]
    assert len(calls.known) == 4


def test_under_the_compiler() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None) -> Tensor:
        out, lse = gs.attention(q, k, v, EMPTY, layout="bshd", key_lengths=lengths, return_lse=True)
        return out.view(*q.shape[:2], -1).sum(-1) + lse.nan_to_num(neginf=0.0).sum(1)  # contiguous for the tracer too

    f = torch.compile(call, fullgraph=True, backend=counter)
    for N, lengths in ((40, None), (50, None), (70, None), (33, None), (40, [3, 40]), (40, [0, 9]), (40, [41, 7])):
        x = inputs(N=N)
        found, want = f(*x, lengths), call(*x, lengths)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(want.sum(), x))
        assert counter.frame_count <= 2 or lengths


@pytest.mark.parametrize("whole", [list, tuple])
def test_lengths_in_a_list(whole: type) -> None:
    """Integers of any kind and size: those of a tensor, within [0, K]."""
    q, k, v = (x.detach() for x in inputs(5))
    values = whole([np.int8(-128), np.uint64(2**64 - 1), 10**30, np.int32(7), -(10**30)])
    out = gs.attention(q, k, v, key_lengths=values, layout="bshd")
    want, _ = exact(q, k, v, True, [0, 70, 70, 7, 0])
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    one = gs.attention(*(x[3].transpose(0, 1) for x in (q, k, v)), key_lengths=whole([7]))
    torch.testing.assert_close(one.transpose(0, 1), out[3])
    told = gs.explain(q, k, v, key_lengths=values, layout="bshd").problem
    assert told.score_terms == {"key_lengths"} and (told.H, told.Q) == (4, 70)


def test_explained_alike_in_both_layouts() -> None:
    x = inputs()
    for pattern in PATTERNS.values():
        told = gs.explain(*x, pattern, layout="bshd")
        assert told == gs.explain(*(y.transpose(1, 2) for y in x), pattern) and "look again" not in str(told)
    q, *_ = x
    told = gs.explain(q, q, q)  # read as 70 heads of 4 positions
    assert "more heads (H=70) than positions (Q=4)" in str(told) and "layout='bshd'" in str(told)
