"""SparseK, of a row and of each prefix, against its definition: sums over keys in rational numbers and in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gossamer as gs
from gossamer.sparse_k import operator as sparse_k
from gossamer.sparse_k import thresholds
from tests.support.modes import Largest, NothingIsRead

INF = math.inf


def exact_threshold(u: list[float], k: int) -> Fraction | float:
    """The least tau with sum_j clip(u_j - tau, 0, 1) <= k, in rational numbers."""
    keys = [Fraction(x) for x in u if x > -INF]
    if len(keys) <= k:
        return -INF

    def kept(tau: Fraction) -> Fraction:
        return sum((min(max(x - tau, Fraction(0)), Fraction(1)) for x in keys), Fraction(0))

    points = sorted({x - d for x in keys for d in (0, 1)})
    low, high = -1, len(points) - 1  # kept(points[high]) <= k < kept(points[low])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(points[middle]) <= k else (middle, high)
    end = points[high]
    interior = [x for x in keys if x >= end and x - 1 < end]
    over = sum(x - 1 >= end for x in keys)
    return (sum(interior, Fraction(0)) + over - k) / len(interior)


def by_sums(u: np.ndarray, k: int, add: Callable[[np.ndarray], float] = np.sum) -> float:
    """The same in float64, of finite keys, each sum over all of them."""
    if len(u) <= k:
        return -INF
    points = np.sort(np.concatenate([u, u - 1]))
    low, high = -1, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if add(np.clip(u - points[middle], 0, 1)) <= k else (middle, high)
    end = points[high]
    interior, over = u[(u >= end) & (u - 1 < end)], int((u - 1 >= end).sum())
    return float(end + (math.fsum(interior - end) + over - k) / len(interior))


def scores(draw: random.Random, N: int) -> list[float]:
    """Float32 numbers with ties, gaps of 1, keys that are not there, and numbers that drown others in a sum."""
    kind = draw.choice(["normal", "narrow", "wide", "whole", "quarters", "equal", "slope", "far", "tiny"])
    width = {"narrow": 1e-3, "wide": 50.0}.get(kind, 1.0)
    u = [draw.gauss(0, width) for _ in range(N)]
    if kind in ("whole", "quarters"):
        parts = 1 if kind == "whole" else 4
        u = [round(3 * x * parts) / parts for x in u]
    elif kind == "equal":
        u = [u[0]] * N
    elif kind == "slope":
        slope = draw.choice([0.01, -0.01, 1.0, -1.0])
        u = [x + slope * t for t, x in enumerate(u)]
    elif kind == "far":
        u = [x if draw.random() < 0.7 else draw.choice([1e30, -1e30, 1e6, -1e6, 2.0**24, 7e4]) for x in u]
    elif kind == "tiny":  # under one unit in the last place of 1, which u - 1 loses
        u = [draw.choice([1e-17, 1e-25, 3e-20, 0.0, -1e-17, 1e-40]) * draw.choice([1, 2, 3]) for _ in range(N)]
        u = [x if draw.random() < 0.8 else draw.choice([1.0, -1.0, 0.5]) for x in u]
    if draw.random() < 0.3:
        u = [-INF if draw.random() < 0.4 else x for x in u]
    return [float(np.float32(x)) for x in u]


def near(found: float, exact: Fraction | float, dtype: torch.dtype) -> bool:
    """Rounded once, and the steps in which scores of float32 are added; of float64 also from a score within 1 of it."""
    if exact == -INF:
        return found == -INF
    allowed = abs(exact) * Fraction(torch.finfo(dtype).eps) + Fraction(2) ** (-48 if dtype == torch.float32 else -52)
    return math.isfinite(found) and abs(Fraction(found) - exact) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_prefix_and_the_whole_row(dtype: torch.dtype) -> None:
    draw = random.Random(f"{dtype}")
    for _ in range(150):
        N = draw.choice([1, 2, 3, 7, 16, 25])
        u, k = scores(draw, N), draw.choice([1, 1, 2, 3, N - 1, N, N + 1, 2**40]) or 1
        if dtype == torch.float64 and draw.random() < 0.5:  # digits that float32 has not
            u = [x + draw.gauss(0, 1e-9) if abs(x) < 100 else x for x in u]
        given = torch.tensor(u, dtype=dtype)
        tau, last = gs.sparsek_causal(given, k)
        exact = [exact_threshold(u[: t + 1], k) for t in range(N)]
        assert all(near(x, y, dtype) for x, y in zip(tau.tolist(), exact, strict=True)), (u, k, tau, exact)
        for j in range(N):
            live = [t for t in range(j, N) if u[j] > tau[t]]
            assert live == list(range(j, int(last[j]) + 1)), (u, k, j)

        m, whole = gs.sparsek(given, k)
        assert near(float(whole), exact[-1], dtype)
        for x, found in zip(u, m.tolist(), strict=True):
            wanted = float(x > -INF) if exact[-1] == -INF or x == -INF else min(max(Fraction(x) - exact[-1], 0), 1)
            assert 0 <= found <= 1 and abs(Fraction(found) - Fraction(wanted)) <= torch.finfo(dtype).eps, (u, k)


@pytest.mark.parametrize("slope", [0.0, 1e-4, 1e-3, "ties", "equal"])
def test_every_step_of_a_long_row(slope: float | str) -> None:
    rng, N = np.random.default_rng(1), 4096
    u = rng.normal(size=N)
    u = np.round(8 * u) / 8 if slope == "ties" else 0 * u + 0.25 if slope == "equal" else u + slope * np.arange(N)
    for k, dtype in ((64, torch.float64), (700, torch.float32)):
        given = torch.from_numpy(u).to(dtype)
        tau, last = gs.sparsek_causal(given, k)
        keys, wanted = np.empty(0), np.empty(N)
        for t, x in enumerate(given.double().numpy()):
            keys = np.insert(keys, np.searchsorted(keys, x), x)
            wanted[t] = by_sums(keys, k)
        rounded = 6e-8 if dtype == torch.float32 else 1e-15
        np.testing.assert_allclose(tau.double(), wanted, rtol=rounded, atol=2e-13)  # the latter of these sums
        assert (tau.diff()[k:] >= 0).all() and (tau[:k] == -INF).all() and (tau[k:] > -INF).all()
        for t in (0, k - 1, k, 1000, N - 1):
            m = (given[: t + 1] - tau[t]).clamp(0, 1)
            assert abs(float(m.double().sum()) - min(k, t + 1)) < (1e-3 if dtype == torch.float32 else 1e-9)
            assert ((m > 0) == (last[: t + 1] >= t)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_which_all_is_kept_have_no_threshold(dtype: torch.dtype) -> None:
    """Also of scores that are the same once 1 is taken off, and at every step."""
    draw = random.Random(f"kept {dtype}")
    for _ in range(60):
        N = draw.choice([1, 2, 3, 8, 17])
        u = torch.tensor(
            [draw.choice([1e-17, -1e-17, 1e-22, 0.0, 5e-324, 2e-16, 1e-16]) for _ in range(N)], dtype=dtype
        )
        m, tau = gs.sparsek(u, N)
        assert tau == -INF and (m == 1).all() and (gs.sparsek_causal(u, N).tau == -INF).all(), u
        more = torch.cat([u, u.new_tensor([-0.5])])
        assert gs.sparsek(more, N).tau == gs.sparsek_causal(more, N).tau[-1] > -INF, u


def test_many_keys() -> None:
    """Where a sum of float64 loses digits: the result does not."""
    rng, N, k = np.random.default_rng(0), 50_000, 300
    u = rng.normal(size=(2, N)) * np.array([[1.0], [100.0]]) + np.arange(N) * np.array([[0.01], [0.0]])
    given = torch.from_numpy(u)
    tau = gs.sparsek_causal(given, k).tau
    assert (tau[:, k + 1 :].diff() >= 0).all()
    for t in (k, 1023, 1024, 32767, 40_000, N - 1):
        for row in range(2):
            prefix = u[row, : t + 1]
            wanted = exact_threshold(prefix.tolist(), k) if t < 2000 else by_sums(prefix, k, math.fsum)
            assert float(abs(Fraction(float(tau[row, t])) - Fraction(wanted))) <= 3e-16 * max(1, abs(wanted))
    np.testing.assert_array_equal(gs.sparsek(given, k).tau, tau[:, -1])


def test_nothing_but_the_rounding_of_sums_is_lost_beside_huge_scores() -> None:
    u = torch.tensor([1e30, 0.5, -1e30, 0.25, 0.75, -1e6])
    m, tau = gs.sparsek(u, 2)
    assert tau.item() == pytest.approx(1 / 6, rel=1e-7) and m[0] == 1 and m.sum().item() == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("N", [1, 2, 5, 16, 33])
def test_the_hard_top_k_of_each_prefix(N: int) -> None:
    draw = random.Random(N)
    for _ in range(40):
        u, k = scores(draw, N), draw.choice([1, 2, 3, N, N + 3])
        last = gs.last_topk(torch.tensor(u), k).tolist()
        for t in range(N):
            order = sorted((j for j in range(t + 1) if u[j] > -INF), key=lambda j: (-u[j], j))
            assert sorted(order[:k]) == [j for j in range(t + 1) if last[j] >= t], (u, k, t)


def test_shapes_strides_and_dimensions() -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.randn(3, 9, 4, generator=g)
    for dim in (-3, -2, -1, 0, 1, 2):
        m, tau = gs.sparsek(u, 2, dim)
        rows = u.movedim(dim, -1)
        assert m.shape == u.shape and tau.shape == rows.shape[:-1]
        for at in np.ndindex(*tau.shape):
            one = gs.sparsek(rows[at].clone(), 2)
            assert torch.equal(m.movedim(dim, -1)[at], one.m) and torch.equal(tau[at], one.tau)
    turned = u.transpose(1, 2).expand(2, 3, 4, 9)
    for f in (gs.sparsek_causal, lambda u, k: (gs.last_topk(u, k),)):
        for x, y in zip(f(turned, 2), f(turned.contiguous(), 2), strict=True):
            assert x.shape == turned.shape and torch.equal(x, y)
    assert gs.sparsek_causal(turned, 2).last.dtype == gs.last_topk(turned, 2).dtype == torch.int32


def test_numbers_that_are_none() -> None:
    nan = math.nan
    m, tau = gs.sparsek(torch.tensor([[1.0, nan, 2.0], [1.0, 2.0, INF]]), 1)
    assert m[0].isnan().all() and tau[0].isnan() and m[1].tolist() == [0, 0, 1] and tau[1] == 2
    assert gs.sparsek_causal(torch.tensor([3.0, 1.0, nan, 2.0]), 1).tau.isnan().tolist() == [False, False, True, True]
    assert gs.sparsek_causal(torch.tensor([3.0, INF, 1.0, 4.0, 2.0]), 2).last.tolist() == [2, 4, 1, 4, 3]
    assert gs.last_topk(torch.tensor([nan, 1.0, nan, 0.0, -INF]), 1).tolist() == [-1, 4, 1, 2, 3]


def gates(u: Tensor, k: int) -> Tensor:
    """m of each key at each step, (..., N, N)."""
    tau = gs.sparsek_causal(u, k).tau
    there = torch.ones(tau.shape[-1], tau.shape[-1], dtype=torch.bool).tril() & (u > -INF)[..., None, :]
    return torch.where(there, (u.masked_fill(u == -INF, 0)[..., None, :] - tau[..., None]).clamp(0, 1), 0)


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("width", [0.3, 3.0])
def test_gradcheck(k: int, width: float) -> None:
    g = torch.Generator().manual_seed(k)
    u = (width * torch.randn(2, 7, generator=g, dtype=torch.float64)).requires_grad_()
    for f in (
        lambda u: tuple(x for x in gs.sparsek(u, k) if x.isfinite().all()),
        lambda u: gs.sparsek(u.mT, min(k, 2) - 1 or 1, dim=0).m,
        lambda u: gates(u, k),
        lambda u: gs.sparsek_causal(u, k).tau[..., min(k, 6) :].nan_to_num(neginf=0),
    ):
        assert torch.autograd.gradcheck(f, u)
        assert torch.autograd.gradgradcheck(f, u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_with_ties(dtype: torch.dtype) -> None:
    """The mean over the interior keys; of m nothing and of tau that of the next scores, where there are none."""
    draw = random.Random(5)
    for _ in range(100):
        N, k = draw.choice([1, 5, 12, 17]), draw.choice([1, 2, 4])
        u = torch.tensor(scores(draw, N), dtype=dtype).requires_grad_()
        dtau = torch.randn(N, dtype=dtype, generator=torch.Generator().manual_seed(N))
        tau = gs.sparsek_causal(u, k).tau
        # What a loss makes of -inf may be NaN: it concerns no key.
        (found,) = torch.autograd.grad(tau, u, dtau.where(tau > -INF, torch.tensor(math.nan, dtype=dtype)))
        wanted = torch.zeros(N, dtype=torch.float64)
        for t in range(N):
            inside = [j for j in range(t + 1) if -INF < tau[t] < u[j] and u[j].double() - 1 < tau[t].double()]
            inside = inside or [j for j in range(t + 1) if u[j] == tau[t] > -INF]
            for j in inside:
                wanted[j] += dtau[t].double() / len(inside)
        torch.testing.assert_close(found.double(), wanted, atol=1e-6 if dtype == torch.float32 else 1e-13, rtol=0)

        m, last = gs.sparsek(u, k)
        (found,) = torch.autograd.grad(m, u, dtau, retain_graph=True)
        inside_m = [j for j in range(N) if 0 < m[j] < 1]
        mean = sum(dtau[j].double() for j in inside_m) / max(len(inside_m), 1)
        for j in range(N):
            assert abs(found[j].double() - (dtau[j].double() - mean if j in inside_m else 0)) < 1e-6
        if last > -INF:
            (found,) = torch.autograd.grad(last, u)
            assert found.sum().item() == pytest.approx(1, rel=1e-6)


def test_equal_gradients_of_both_forms() -> None:
    u = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tau = gs.sparsek_causal(u, 7).tau
    for t in (7, 8, 20, 39):
        weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        (one,) = torch.autograd.grad(tau[:, t], u, weights, retain_graph=True)
        (two,) = torch.autograd.grad(gs.sparsek(u[:, : t + 1], 7).tau, u, weights)
        torch.testing.assert_close(one, two, atol=1e-14, rtol=0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def loss(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, tau = gs.sparsek(u, 3, dim=0)
        steps, last = gs.sparsek_causal(u, 3)
        return (m * m).sum() + tau.clamp(min=-9).sum() + steps[..., 3:].square().sum(), last, gs.last_topk(u, 3)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((5, 30), (6, 21)):
        u = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        found, wanted = compiled(u), loss(u)
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)
        torch.testing.assert_close(*(torch.autograd.grad(x[0], u)[0] for x in (found, wanted)))


def every_function(u: Tensor) -> None:
    """The implementations, which an operator hides from a mode, in both directions."""

    class Saved:
        saved_tensors: tuple[Tensor, ...]

    ctx = Saved()
    m, tau = sparse_k.row_of(u, 5)
    ctx.saved_tensors = u, m, tau
    sparse_k._sparsek_backward(ctx, m, tau)
    tau, last = sparse_k.causal_of(u, 5)
    ctx.saved_tensors = u, tau, last
    sparse_k._sparsek_causal_backward(ctx, tau, None)
    sparse_k.largest_of(u, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_read_back(dtype: torch.dtype) -> None:
    with NothingIsRead():
        every_function(torch.randn(2, 37, dtype=dtype))
    with pytest.raises(AssertionError), NothingIsRead():
        torch.ones(1).item()
    with FakeTensorMode():  # which has no values to read
        every_function(torch.randn(2, 37, dtype=dtype))


def test_operators_are_registered_as_they_act() -> None:
    u = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for operator, leaf in (("sparsek", True), ("sparsek_causal", True), ("last_topk", False)):
        checked = torch.library.opcheck(
            getattr(torch.ops.gossamer, operator).default, (u.clone().requires_grad_(leaf), 3)
        )
        assert set(checked.values()) == {"SUCCESS"}


def test_memory_is_of_the_length() -> None:
    """No array is larger than three numbers of each breakpoint, two a key of a length that is a power of 2."""
    with Largest() as seen:
        thresholds.causal_thresholds(torch.zeros(1, 3000, dtype=torch.float64), 50)
    assert 3 * 2 * 3000 <= seen.elements <= 3 * 2 * 4096


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda u: gs.sparsek(u.bfloat16(), 2), "u must be a tensor .* float32 or float64.*got shape .*bfloat16"),
        (lambda u: gs.sparsek_causal(u.long(), 2), "u must be a tensor"),
        (lambda u: gs.last_topk([1.0], 2), "u must be a tensor"),
        (lambda u: gs.sparsek(u[0, 0], 2), "of at least one dimension"),
        (lambda u: gs.sparsek_causal(torch.nested.nested_tensor([u[0]]), 2), "nested"),
        (lambda u: gs.sparsek(u, 0), "k must be an integer of at least 1; got 0"),
        (lambda u: gs.sparsek_causal(u, 2.0), "k must be an integer"),
        (lambda u: gs.last_topk(u, True), "k must be an integer"),
        (lambda u: gs.sparsek(u, 2, dim=2), r"dim must be a dimension of u, in \[-2, 2\); got 2"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func itself
def test_forward_mode_and_transforms_are_refused() -> None:
    u = torch.randn(8)
    for function in (lambda u: gs.sparsek(u, 2).m, lambda u: gs.sparsek_causal(u, 2).tau):
        with pytest.raises(gs.Unsupported, match=r"torch\.func"):
            torch.func.jvp(function, (u,), (u,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(gs.Unsupported, match="forward-mode"):
            function(torch.autograd.forward_ad.make_dual(u, u))
