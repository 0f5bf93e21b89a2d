"""layout="bshd": q, k, v and out as (B, positions, heads, size), against attention written for that order."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.torch import calls
from gossamer.torch.request import key_of

EMPTY = gs.SlidingWindow(3) & ~gs.Local(8)  # which leaves rows that keep nothing
PATTERNS = {
    "all": gs.Dense(), "causal": gs.Causal(), "window": gs.SlidingWindow(5, 2), "empty rows": EMPTY,
    "parts": gs.Dilated(3, 0, 8), "heads": gs.PerHead([gs.Causal(), gs.Dilated(1, 1, 4), gs.Local(7), EMPTY]),
    "LongNet": gs.LongNet([16, 64], [1, 4], heads=4), "blocks": gs.BigBird(8),
    "graph": gs.CSR.from_pattern(EMPTY, 70, 70),
}  # fmt: skip


def exact(q: Tensor, k: Tensor, v: Tensor, kept: Any, **terms: Any) -> tuple[Tensor, Tensor]:
    """(out (B, Q, H, E), lse (B, H, Q)) in float64 from q (B, Q, H, D), k (B, K, G, D) and v (B, K, G, E)."""
    q, k, v = (x.double() for x in (q, k, v))
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if "alibi_slopes" in terms:
        i = torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2]
        s = s + terms["alibi_slopes"].double()[:, None, None] * (torch.arange(s.shape[3]) - i)
    kept = torch.as_tensor(kept).broadcast_to(s.shape)
    if "key_lengths" in terms:
        kept = kept & (torch.arange(s.shape[3]) < torch.tensor(terms["key_lengths"])[:, None, None, None])
    s = s.masked_fill(~kept, -math.inf)
    if "sink_logits" in terms:
        sinks = terms["sink_logits"].double()[:, None, None].expand(*s.shape[:3], 1)
        s, v = torch.cat([s, sinks], -1), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("bhij,bjhe->bihe", p, v), lse


def inputs(B: int = 2, N: int = 70, H: int = 4, G: int = 2, D: int = 8, E: int = 16, **more: Any) -> list[Tensor]:
    """Leaves q (B, N, H, D), k (B, N, G, D) and v (B, N, G, E)."""
    g = torch.Generator().manual_seed(1)
    shapes = (B, N, H, D), (B, more.get("K", N), G, D), (B, more.get("K", N), G, E)
    dtype = more.get("dtype", torch.float32)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def same(x: list[Tensor], pattern: Any, kept: Any, **terms: Any) -> None:
    """Results and gradients are those of the definition, and lie as the inputs do."""
    options = {name: terms.pop(name) for name in ("implementation", "deterministic") if name in terms}
    sinks = [y for y in (terms.get("sink_logits"),) if y is not None]
    want = exact(*x, kept, **terms)
    found = gs.attention(*x, pattern, **terms, **options, layout="bshd", return_lse=True)
    g = torch.Generator().manual_seed(2)
    into = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) for y in found]
    into[1] = into[1].masked_fill(found[1] == -math.inf, 0.0)  # the lse of an empty row has no gradient
    tolerance = {"atol": 1e-10, "rtol": 1e-10} if x[0].dtype == torch.float64 else {"atol": 2e-4, "rtol": 2e-4}
    leaves = [*x, *sinks]
    right = torch.autograd.grad(want, leaves, [y.double() for y in into])
    for a, b in zip((*found, *torch.autograd.grad(found, leaves, into)), (*want, *right), strict=True):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)
        assert a.is_contiguous() and not a.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", [None, "blocked", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_against_the_definition(name: str, implementation: str | None, dtype: torch.dtype, poison: None) -> None:
    pattern, x = PATTERNS[name], inputs(dtype=dtype)
    for _ in range(2):  # the second call finds the first one's
        same(x, pattern, pattern.materialize(70, 70), implementation=implementation)
    lengths, sinks, slopes = (
        [3, 70],
        torch.tensor([0.0, 2.0, -50.0, 1.0], dtype=dtype),
        torch.tensor([0.1, 0.0, -0.2, 1.0]),
    )
    terms = {"key_lengths": lengths, "sink_logits": sinks.requires_grad_(), "alibi_slopes": slopes.to(dtype)}
    same(x, pattern, pattern.materialize(70, 70), implementation=implementation, **terms)


@pytest.mark.parametrize("name", ["parts", "heads", "LongNet"])
def test_in_parts(name: str, always: list[Any], poison: None) -> None:
    for B in (1, 2, 9):
        same(inputs(B), PATTERNS[name], PATTERNS[name].materialize(70, 70))
    turned = [
        y.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for y in inputs()
    ]  # (B, H, N, D)
    same(turned, PATTERNS[name], PATTERNS[name].materialize(70, 70))
    assert any(always)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_of_any_size(data: st.DataObject) -> None:
    """Sizes of 1, many more heads than positions, windows at their extremes, strides of every kind."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    B, G, N, K, D, E = pick(1, 2, 3), pick(1, 2), pick(1, 2, 33, 65), pick(1, 3, 64, 100), pick(1, 5, 8), pick(1, 8, 17)
    H = G * pick(1, 2, 24)
    pattern = pick(
        gs.SlidingWindow.of_size(1), gs.SlidingWindow.of_size(pick(2, 31, 32, 33, 10**9), sinks=pick(0, 1, 40)),
        gs.Causal(), gs.Dense(), gs.SlidingWindow(0, None),
    )  # fmt: skip
    kept = pattern.materialize(N, K)
    form = pick("pattern", "mask", "layout")
    given = {
        "pattern": pattern,
        "mask": torch.from_numpy(kept),
        "layout": pattern.layout(N, K, block_q=32, block_kv=32),
    }
    leaves = []
    for x in inputs(B, N, H, G, D, E, K=K, dtype=pick(torch.float32, torch.float64)):
        room = torch.full((2, *x.shape[:3], x.shape[3] + 3), math.nan, dtype=x.dtype)
        views = {
            "compact": x.detach(), "other order": x.detach().transpose(1, 2).contiguous().transpose(1, 2),
            "part of a row": room[1, ..., 2:-1].copy_(x.detach()), "columns": x.detach().mT.contiguous().mT,
        }  # fmt: skip
        leaves.append(views[pick(*views)].requires_grad_())
    q, k, v = leaves
    terms = {"key_lengths": [pick(0, 1, K // 2, K, K + 1, -1, 2**31, -(2**40), np.int8(3)) for _ in range(B)]}
    terms = terms if pick(True, False) else {}
    found = gs.attention(q, k, v, given[form], **terms, layout="bshd", return_lse=True)
    want = exact(q, k, v, kept, **{name: [int(n) for n in x] for name, x in terms.items()})
    weights = [torch.ones_like(y).masked_fill(y == -math.inf, 0.0) for y in found]
    for a, b in zip(
        (*found, *torch.autograd.grad(found, leaves, weights)),
        (*want, *torch.autograd.grad(want, leaves, [w.double() for w in weights])), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a.double(), b.double(), atol=1e-4, rtol=1e-4)
    assert all(y.is_contiguous() for y in found)


@pytest.mark.parametrize("dims", [2, 3])
def test_fewer_dimensions(dims: int) -> None:
    """(N, H, D) of one batch element, and (N, D), which is the same in both layouts."""
    forget_all()
    q, k, v = (x.detach()[0] if dims == 3 else x.detach()[0, :, 0] for x in inputs())
    for _ in range(2):
        out, lse = gs.attention(q, k, v, gs.Causal(), layout="bshd", return_lse=True)
        whole = [x[None] if dims == 3 else x[None, :, None] for x in (q, k, v)]
        want, want_lse = exact(*whole, gs.Causal().materialize(70, 70))
        torch.testing.assert_close(out.double(), want.reshape(out.shape), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse.reshape(lse.shape), atol=1e-5, rtol=1e-5)
        assert out.shape == (*q.shape[:-1], 16) and lse.shape == ((4, 70) if dims == 3 else (70,))
    assert len(calls.known) == 1


def test_merged_terms_and_reordered_graphs() -> None:
    x, pattern = inputs(), gs.Causal() | gs.Local(9)
    turned = [y.detach().transpose(1, 2) for y in x]
    graph = gs.CSR.from_pattern(gs.Dilated(3, 0, 8), 70, 70).reordered()
    for which, merge in (
        (pattern, "lse"),
        (gs.LongNet([16, 64], [1, 4], heads=4), "lse"),
        (graph, None),
        (graph | pattern, "lse"),
    ):
        out, lse = gs.attention(*x, which, layout="bshd", merge=merge, return_lse=True)
        want, want_lse = gs.attention(*turned, which, merge=merge, return_lse=True)
        torch.testing.assert_close((out, lse), (want.transpose(1, 2), want_lse), atol=1e-5, rtol=1e-5)
        assert out.is_contiguous() and lse.is_contiguous()
        assert torch.equal(gs.attention(*x, which, layout="bshd", merge=merge), out)
        one, one_lse = gs.attention(
            *(y[0, :, 0] for y in x), gs.Causal() | gs.Local(9), layout="bshd", merge="lse", return_lse=True
        )
        assert one.shape == (70, 16) and one_lse.shape == (70,)


def test_the_layout_is_part_of_the_key() -> None:
    """Where positions and heads are as many, shapes and strides tell nothing."""
    forget_all()
    q, k, v = (torch.randn(1, 6, 6, 4) for _ in range(3))
    options = None, None, None, None, False
    assert key_of(q, k, v, gs.Causal(), *options) != key_of(q, k, v, gs.Causal(), *options, (), True)
    for _ in range(2):
        one, other = gs.attention(q, k, v, gs.Causal()), gs.attention(q, k, v, gs.Causal(), layout="bshd")
        assert not torch.allclose(one, other)
        mask = torch.ones(6, 6).tril().bool()
        assert torch.allclose(gs.attention(q, k, v, mask, layout="bshd"), other, atol=1e-6)
        assert torch.allclose(gs.attention(q, k, v, mask, layout="bhnd"), one, atol=1e-6)
    assert len(calls.known) == 4
    name = "".join(["bh", "nd"])  # equal to the default, and another object
    assert torch.equal(gs.attention(q, k, v, gs.Causal(), layout=name), one)  # type: ignore[call-overload]
    assert len(calls.known) == 4


def test_under_the_compiler() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = gs.attention(q, k, v, EMPTY, layout="bshd", return_lse=True)
        return out.view(*q.shape[:2], -1).sum(-1) + lse.nan_to_num(neginf=0.0).sum(1)  # contiguous for the tracer too

    f = torch.compile(call, fullgraph=True, backend=counter)
    for N in (40, 50, 70, 33):
        x = inputs(N=N)
        found, want = f(*x), call(*x)
        into = torch.randn_like(want)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found, x, into), torch.autograd.grad(want, x, into))
    assert counter.frame_count <= 2


def test_under_the_compiler_with_lengths_in_a_list() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in inputs())

    def call(lengths: list[int]) -> Tensor:
        return gs.attention(q, k, v, gs.Causal(), key_lengths=lengths, layout="bshd")

    f = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 40], [5, 9], [0, 71], [40, 2]):
        torch.testing.assert_close(
            f(lengths), exact(q, k, v, gs.Causal().materialize(70, 70), key_lengths=lengths)[0].float()
        )


def test_under_autocast() -> None:
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = gs.attention(*x, gs.Causal(), layout="bshd")
        want = gs.attention(*(y.transpose(1, 2) for y in x), gs.Causal())
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and torch.equal(out, want.transpose(1, 2))
    assert all(y.shape == g.shape for y, g in zip(x, torch.autograd.grad(out.float().sum(), x), strict=True))


@pytest.mark.parametrize("whole", [list, tuple])
def test_lengths_in_a_list(whole: type) -> None:
    """Integers of any kind and size: those of a tensor, within [0, K]."""
    q, k, v = (x.detach() for x in inputs(4))
    values = whole([np.int8(-128), np.uint64(2**64 - 1), 10**30, np.int32(7)])
    out = gs.attention(q, k, v, key_lengths=values, layout="bshd")
    want, _ = exact(q, k, v, True, key_lengths=[0, 70, 70, 7])
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(gs.attention(q, k, v, key_lengths=torch.tensor([0, 70, 70, 7]), layout="bshd"), out)
    one = gs.attention(*(x[0].transpose(0, 1) for x in (q, k, v)), key_lengths=whole([7]))
    assert torch.equal(one, gs.attention(*(x[:1].transpose(1, 2) for x in (q, k, v)), key_lengths=torch.tensor([7]))[0])
    told = gs.explain(q, k, v, key_lengths=values, layout="bshd")
    assert told.problem.score_terms == {"key_lengths"} and (told.problem.H, told.problem.Q) == (4, 70)


def test_explained_alike_in_both_layouts() -> None:
    x = inputs()
    for pattern in PATTERNS.values():
        told = gs.explain(*x, pattern, layout="bshd")
        other = gs.explain(*(y.transpose(1, 2) for y in x), pattern)
        assert dataclasses.asdict(told) == dataclasses.asdict(other) and str(told) == str(other)
        assert "look again" not in str(told)
    told = gs.explain(*inputs(H=4, G=4), gs.Causal())  # read as 70 heads of 4 positions
    assert "more heads (H=70) than positions (Q=4)" in str(told) and "layout='bshd'" in str(told)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch finds none")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("implementation", [None, "dense", "hopper", "triton", "blocked"])
@pytest.mark.parametrize("name", PATTERNS)
def test_on_a_gpu(name: str, implementation: str | None, dtype: torch.dtype) -> None:
    """Results and gradients of the default layout, in memory of the other one."""
    pattern, x = PATTERNS[name], [y.detach().cuda().to(dtype).requires_grad_() for y in inputs(D=64, E=64)]
    options: dict[str, Any] = {"implementation": implementation, "key_lengths": [3, 70], "deterministic": True}
    try:
        want, want_lse = gs.attention(*(y.transpose(1, 2) for y in x), pattern, **options, return_lse=True)
    except gs.Unsupported as refused:
        pytest.skip(str(refused))
    dout = torch.randn(want.transpose(1, 2).shape, device="cuda").to(dtype)
    right = torch.autograd.grad(want, x, dout.transpose(1, 2))
    for _ in range(2):
        out, lse = gs.attention(*x, pattern, **options, layout="bshd", return_lse=True)
        found = torch.autograd.grad(out, x, dout)
        assert all(y.is_contiguous() for y in (out, lse, *found))
        torch.testing.assert_close((out, lse, *found), (want.transpose(1, 2), want_lse, *right), atol=2e-2, rtol=2e-2)
