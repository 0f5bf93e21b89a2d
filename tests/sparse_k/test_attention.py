"""`sparsek_attention` by operations of torch against its definition, and what it promises of memory and the host."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gossamer as gs
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k import chunks
from tests.support.modes import Largest, NothingIsRead
from tests.support.sparsek import attention_by_definition, inputs, kept_by_definition


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a row, and several parts of the units of one."""
    monkeypatch.setattr(chunks, "QUERIES", 16)
    monkeypatch.setattr(chunks, "MOST", 2**12)


def results(function: Any, given: list[Tensor], options: dict[str, Any], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and u."""
    x = [t.clone().requires_grad_() for t in given]
    out, lse = function(*x, **options)
    found = torch.autograd.grad([out, lse], x, [dout, dlse], allow_unused=True)
    return [out, lse, *(torch.zeros_like(t) if g is None else g for t, g in zip(x, found, strict=True))]


def with_lse(*x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return gs.sparsek_attention(*x, return_lse=True, **options)


@pytest.mark.parametrize("seed", range(6))
def test_any_call_is_its_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists in every chunk, in some, or in none; behind a prefix, and with keys that are not there."""
    draw = random.Random(seed)
    for at in range(18):
        monkeypatch.setattr(chunks, "HARDLY_LONGER", draw.choice([0, 1, 2, 100]))
        given, options = inputs(draw, prefix=at % 2 == 1)
        q, _, v, _ = given
        dout, dlse = torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.randn(q.shape[:3], dtype=q.dtype)
        found = results(with_lse, given, options, dout, dlse)
        wanted = results(attention_by_definition, given, options, dout, dlse)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "du"), found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-8), (name, options, (a - b).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    """No further from float64 than twice what plain attention in that type is, and rounding."""
    given, _ = inputs(random.Random(3), torch.float32)
    *qkv, u = given
    options = {"k_keep": 5, "window": 3}
    low = [x.to(dtype) for x in qkv]
    out, lse = with_lse(*low, u, **options)
    exact, exact_lse = attention_by_definition(*(x.double() for x in low), u.double(), **options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    limit = 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= limit
    assert (lse.double() - exact_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("gate", ["v", "kv", "logit", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_float64_scores_are_differences_of_float64(dtype: torch.dtype, gate: str | None) -> None:
    """Far from 0, where float32 holds no difference of two scores: as of the same scores without the offset."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, heads, 40, 8).to(dtype) for heads in (4, 2, 2))
    u = torch.randn(1, 2, 40, dtype=torch.float64).mul(2**20).round().div(2**20)
    options = {"k_keep": 6, "window": 2, "gate": gate, "straight_through": gate is None}
    dout, dlse = torch.randn(1, 4, 40, 8).to(dtype), torch.randn(1, 4, 40)
    near, far = (results(with_lse, [q, k, v, u + offset], options, dout, dlse) for offset in (0.0, 2.0**20))
    assert near[1].dtype == far[1].dtype == torch.float32 and far[5].dtype == torch.float64
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "du"), near, far, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7), (name, (a - b).abs().max())
    rounded = results(with_lse, [q, k, v, (u + 2.0**20).float()], options, dout, dlse)
    assert not torch.allclose(near[5].float(), rounded[5], atol=1e-2)  # the gates that float32 makes of them are others


@pytest.mark.parametrize(
    "options",
    [{}, {"gate": "kv"}, {"gate": "logit"}, {"gate": None}, {"keep": "support"}, {"causal": False}],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, h, 13, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    u = torch.randn(1, 1, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: with_lse(*x, k_keep=4, window=2, **options), (*x, u))


def test_ties_keep_the_earlier_and_what_has_left_never_returns() -> None:
    N, k = 60, 4
    torch.manual_seed(0)
    u = torch.randint(0, 3, (2, N)).float()
    kept, _ = kept_by_definition(u, k, "topk", True)
    gone = torch.zeros(2, N, dtype=torch.bool)
    for t in range(N):
        of_step = kept[:, t]
        assert not (gone & of_step).any()
        gone[:, : t + 1] |= ~of_step[:, : t + 1]
    # Values of one column each show which keys a query has attended.
    q, v = torch.zeros(2, N, 1), torch.eye(N).expand(2, -1, -1)
    out = gs.sparsek_attention(q, q, v, u, k_keep=k, gate=None)
    seen = kept | torch.eye(N, dtype=torch.bool)
    assert torch.equal(out > 0, seen)
    assert torch.allclose(out, seen / seen.sum(-1, keepdim=True))


def test_all_keys_and_none() -> None:
    q, k, v = (torch.randn(2, heads, 70, 8) for heads in (4, 2, 2))
    u = torch.randn(2, 4, 70)
    dense = gs.attention(q, k, v, gs.Causal())
    assert torch.allclose(gs.sparsek_attention(q, k, v, u, k_keep=70), dense, atol=1e-5)
    assert torch.allclose(gs.sparsek_attention(q, k, v, u, k_keep=1, window=10**6), dense, atol=1e-5)
    none = gs.sparsek_attention(q, k, v, torch.full_like(u, -torch.inf), k_keep=5, window=9)
    assert torch.allclose(none, gs.attention(q, k, v, gs.SlidingWindow(9)), atol=1e-5)


def test_nan_shows_from_its_step_on() -> None:
    q, k, v = (torch.randn(1, 40, 4) for _ in range(3))
    u = torch.randn(1, 40)
    u[0, 30] = torch.nan
    out = gs.sparsek_attention(q, k, v, u, k_keep=5, window=2)
    assert out[:, :30].isfinite().all() and out[:, 30:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_rows_behind_a_prefix_are_those_of_the_whole(seed: int, dtype: torch.dtype) -> None:
    """Rows do not depend on which others there are: of infinite scores too, in pieces of any length."""
    draw = random.Random(seed)
    for _ in range(12):
        given, options = inputs(draw, torch.float64 if dtype == torch.float64 else torch.float32)
        *qkv, u = given
        u = torch.where(torch.rand_like(u) < draw.choice([0.0, 0.1, 0.3]), torch.inf, u)
        q, k, v = (x.to(dtype) for x in qkv)
        out, lse = with_lse(q, k, v, u, **options)
        N, at = u.shape[2], 0
        while at < N:
            end = draw.randint(at + 1, N)
            rows, row_lse = with_lse(q[:, :, at:end], k, v, u, q_offset=at, **options)
            limit = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps, "equal_nan": True}
            assert torch.allclose(rows, out[:, :, at:end], **limit), (options, at, end)
            assert torch.allclose(row_lse, lse[:, :, at:end], rtol=1e-5, atol=1e-5, equal_nan=True)
            if options.get("causal"):  # later keys are not there yet, and the default is the end
                k_, v_, u_ = (x[:, :, :end] for x in (k, v, u))
                shorter, _ = with_lse(q[:, :, at:end], k_, v_, u_, **options | {"k_keep": min(options["k_keep"], end)})
                assert torch.allclose(shorter, rows, **limit), (options, at, end)
            at = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_of_a_chunk_are_those_of_the_whole(dtype: torch.dtype) -> None:
    """From the scores that live at the end of its prefix, in any order, and its threshold: the same bits.

    Where no gate is inside (0, 1) the threshold is a score that does not live.
    """
    torch.manual_seed(1)
    for N, k, spread in ((3000, 100, 1.0), (900, 30, 0.01), (900, 30, 100.0), (300, 400, 1.0), (500, 7, 0.0)):
        u = spread * torch.randn(2, N, dtype=dtype)
        tau, last = gs.sparsek_causal(u, k)
        for P in (1, N // 3, N - 1):
            for row in range(2):
                alive = u[row, :P][last[row, :P] >= P - 1]
                alive = alive[torch.randperm(len(alive))]
                found = gs.sparsek_causal(torch.cat([alive, u[row, P:]]), k).tau[len(alive) :]
                assert torch.equal(torch.maximum(found, tau[row, P - 1]), tau[row, P:]), (N, k, spread, P)


def test_keys_that_are_not_there_are_never_read() -> None:
    """Results are those of each sequence without them; a query that attends nothing gives 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 40, 8) for heads in (4, 2, 2))
    u, lengths = torch.randn(3, 2, 40), [40, 17, 0]
    options = {"k_keep": 5, "window": 4}
    bad = [x.clone() for x in (k, v, u)]
    for b, length in enumerate(lengths):
        for x in bad:
            x[b, :, length:] = torch.nan
    out, lse = with_lse(q, *bad, key_lengths=lengths, **options)
    for form in (torch.tensor(lengths), torch.tensor(lengths).to(torch.uint8), torch.tensor([99, 17, -5])):
        assert torch.equal(gs.sparsek_attention(q, *bad, key_lengths=form, **options), out)
    for b, n in enumerate(lengths[:2]):
        alone = gs.sparsek_attention(*(x[b, :, :n] for x in (q, k, v, u)), **options)
        assert torch.allclose(out[b, :, :n], alone, atol=1e-6)
        last = gs.sparsek_attention(q[b, :, n - 1 : n], *(x[b, :, :n] for x in (k, v, u)), **options)
        assert torch.allclose(out[b, :, n - 1 : n], last, atol=1e-6)
    assert not out[2].any() and (lse[2] == -torch.inf).all()


def test_queries_that_attend_nothing_may_hold_anything() -> None:
    """In both directions, their cotangents too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 4) for _ in range(3))
    u, dout, dlse = torch.randn(2, 2, 20), torch.randn(2, 2, 20, 4), torch.randn(2, 2, 20)
    for x in (q, dout, dlse):
        x[1] = torch.nan
    for gate in ("v", "kv", "logit", None):
        options = {"k_keep": 3, "window": 2, "gate": gate, "key_lengths": [20, 0], "straight_through": gate is None}
        out, lse, *gradients = results(with_lse, [q, k, v, u], options, dout, dlse)
        assert out.isfinite().all() and not out[1].any() and (lse[1] == -torch.inf).all()
        assert all(g.isfinite().all() and g[0].any() and not g[1].any() for g in gradients)


def test_dimensions_types_and_autocast() -> None:
    q, k, v = (torch.randn(3, 40, 4) for _ in range(3))
    u = torch.randn(3, 40, dtype=torch.float64)
    out, lse = with_lse(q, k, v, u, k_keep=5)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:2])
    one, _ = with_lse(q[1], k[1], v[1], u[1], k_keep=5)
    assert torch.allclose(one, out[1], atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gs.sparsek_attention(q, k, v, u, k_keep=5).dtype == torch.bfloat16


def test_autocast_rounds_inputs_alone() -> None:
    """What is computed of them is as without it, in both directions."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 40, 8) for _ in range(3)]
    u, dout = torch.randn(1, 2, 40), torch.randn(1, 2, 40, 8).bfloat16()
    low = [x.bfloat16().requires_grad_() for x in given]
    u.requires_grad_()
    wanted = gs.sparsek_attention(*low, u, k_keep=5, window=2, gate="kv")
    gradients = torch.autograd.grad(wanted, [*low, u], dout)
    with torch.autocast("cpu", torch.bfloat16):
        leaves = [x.clone().requires_grad_() for x in given]
        out = gs.sparsek_attention(*leaves, u, k_keep=5, window=2, gate="kv")
        found = torch.autograd.grad(out, [*leaves, u], dout)
    assert torch.equal(out, wanted)
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(found, gradients, strict=True))


def test_memory_is_linear_and_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    N = 2048
    monkeypatch.setattr(chunks, "QUERIES", 128)
    monkeypatch.setattr(chunks, "MOST", 2**24)
    given = [torch.randn(1, 1, N, 4, requires_grad=True) for _ in range(3)]
    u = torch.randn(1, 1, N, requires_grad=True)
    with Largest() as largest, NothingIsRead():
        gs.sparsek_attention(*given, u, k_keep=64, window=32).sum().backward()
    assert largest.elements < N * N / 20


@pytest.mark.parametrize("more", [{}, {"q_offset": 7}, {"key_lengths": torch.tensor([31])}], ids=str)
@pytest.mark.parametrize("gate", ["v", None])
def test_compiled(gate: str | None, more: dict[str, Any]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
        return gs.sparsek_attention(q, k, v, u, k_keep=9, window=4, gate=gate, **more)

    torch._dynamo.reset()
    x = [torch.randn(1, 2, N, 4, requires_grad=True) for N in (40, 50, 50)]
    u = torch.randn(1, 2, 50, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    plain, found = (
        [out := f(*x, u), *torch.autograd.grad(out.sum(), [*x, u], allow_unused=gate is None)]
        for f in (attend, compiled)
    )
    for a, b in zip(plain, found, strict=True):
        assert (b is None or not b.any()) if a is None else torch.equal(a, b if b is not None else torch.zeros_like(a))


def test_shapes_without_values() -> None:
    with FakeTensorMode():
        q, u = torch.empty(2, 4, 30, 8), torch.empty(2, 2, 30)
        k, v = torch.empty(2, 2, 30, 8), torch.empty(2, 2, 30, 6)
        out, lse = with_lse(q, k, v, u, k_keep=3, window=1)
    assert (out.shape, lse.shape) == ((2, 4, 30, 6), (2, 4, 30))


def test_what_is_refused() -> None:
    q, k, v = (torch.randn(1, 2, 20, 4, requires_grad=True) for _ in range(3))
    u = torch.randn(1, 2, 20)
    for options, message in (
        ({"k_keep": 0}, "k_keep must be"),
        ({"k_keep": 2.5}, "k_keep must be"),
        ({"k_keep": 3, "window": -1}, "window must be"),
        ({"k_keep": 3, "keep": "largest"}, "keep must be one of 'topk', 'support'; got 'largest'"),
        ({"k_keep": 3, "gate": "q"}, "gate must be one of 'v', 'kv', 'logit', None; got 'q'"),
        ({"k_keep": 3, "causal": 1}, "causal must be"),
        ({"k_keep": 3, "gate": "kv", "straight_through": True}, "straight_through must be False with gate 'kv'"),
        ({"k_keep": 3, "return_lse": 1}, "return_lse must be"),
        ({"k_keep": 3, "scale": "a"}, "scale must be"),
    ):
        with pytest.raises(ValueError, match=message):
            gs.sparsek_attention(q, k, v, u, **options)
    for wrong in (u.bfloat16(), u[..., :-1], u[0], None, u[:, :, None].expand(1, 2, 3, 20)):
        with pytest.raises(ValueError, match="u must be scores of keys"):
            gs.sparsek_attention(q, k, v, wrong, k_keep=3)
    with pytest.raises(ValueError, match="at least as many positions as q, Q=20"):
        gs.sparsek_attention(q, k[:, :, :10], v[:, :, :10], u[..., :10], k_keep=3)
    for wrong in (-1, 6, 2.0, True, "0", torch.tensor([0, 0])):
        with pytest.raises(ValueError, match=r"q_offset must be an integer in \[0, K - Q\] = \[0, 5\]"):
            gs.sparsek_attention(q[:, :, :15], k, v, u, k_keep=3, q_offset=wrong)
    for wrong in ([20, 20], [2.0], 20, torch.ones(1), torch.ones(2, dtype=torch.int64), torch.ones(1, 1).long()):
        with pytest.raises(ValueError, match="key_lengths"):
            gs.sparsek_attention(q, k, v, u, k_keep=3, key_lengths=wrong)
    out = gs.sparsek_attention(q, k, v, u, k_keep=3)
    with pytest.raises(Unsupported, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda q: gs.sparsek_attention(q, k, v, u, k_keep=3).sum())(q)


def test_explain_of_a_prefix() -> None:
    q, k, u = torch.empty(1, 4, 30, 8), torch.empty(1, 2, 50, 8), torch.empty(1, 2, 50)
    plan = gs.explain_sparsek(q, k, k, u, k_keep=5, q_offset=7, key_lengths=[40])
    assert "Q=30 K=50 q_offset=7" in plan.problem and plan.implementation.startswith("chunks")
    for why in plan.reasons.values():
        assert {"has a query of every key: no prefix", "takes no key_lengths"} <= set(why)
    assert "q_offset" not in gs.explain_sparsek(q, q, q, torch.empty(1, 4, 30), k_keep=5).problem


def test_explain_takes_the_arguments_of_a_call() -> None:
    call, explain = (inspect.signature(f).parameters for f in (gs.sparsek_attention, gs.explain_sparsek))
    assert list(call) == list(explain)
