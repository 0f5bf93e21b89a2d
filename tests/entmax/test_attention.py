"""`entmax_attention` against its definition: values, thresholds, supports, top-k, positions and patterns."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.entmax import chunks
from gossamer.entmax.thresholds import normalised
from gossamer.testing.tolerance import error
from tests.support import entmax_oracle as oracle

ALPHAS = (1.0, 1.02, 1.25, 1.5, 1.75, 2.0)
CAUSAL = np.tril(np.ones((40, 40), bool))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    B: int = 1, H: int = 2, G: int = 1, Q: int = 40, K: int = 40, D: int = 8, E: int = 5, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    return randn(B, H, Q, D, seed=1, size=size), randn(B, G, K, D, seed=2), randn(B, G, K, E, seed=3)


def check(found: Any, expected: oracle.Oracle, atol: float = 1e-12) -> None:
    """(out, aux) of a float64 call against the oracle."""
    out, aux = found
    np.testing.assert_allclose(out.detach().numpy(), expected.out, rtol=0, atol=atol)
    np.testing.assert_allclose(aux.tau.numpy(), expected.tau, rtol=0, atol=atol)
    assert (aux.support.numpy() == (expected.p > 0).sum(-1)).all()
    assert (aux.certified.numpy() == expected.certified).all()


@pytest.mark.parametrize("top_k", [None, 1, 7, 60])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_values(alpha: float, top_k: int | None) -> None:
    q, k, v = inputs(B=2, H=4, G=2, size=2.0)
    found = gs.entmax_attention(q, k, v, alpha=alpha, top_k=top_k, causal=True, return_aux=True)
    check(found, oracle.attention(q, k, v, CAUSAL, alpha=alpha, top_k=top_k))


@pytest.mark.parametrize("Q, K", [(1, 1), (1, 70), (33, 5), (130, 300), (257, 129)])
def test_sizes(Q: int, K: int) -> None:
    """More keys than groups of maxima, so that what is under the bound of a row is dropped."""
    q, k, v = inputs(H=1, Q=Q, K=K, size=3.0)
    i = np.arange(Q)[:, None] + K - Q
    mask = np.arange(K) <= i
    for top_k in (None, 3):
        found = gs.entmax_attention(q, k, v, gs.Causal(), top_k=top_k, return_aux=True)
        check(found, oracle.attention(q, k, v, mask, top_k=top_k))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_many_keys(size: float, alpha: float) -> None:
    q, k, v = inputs(H=1, Q=4, K=3000, size=size)
    check(gs.entmax_attention(q, k, v, alpha=alpha, return_aux=True), oracle.attention(q, k, v, alpha=alpha))


def test_alpha_of_each_head() -> None:
    q, k, v = inputs(H=6, G=2)
    alpha = torch.tensor([1.0, 1.5, 2.0, 1.01, 1.3, 1.5], dtype=torch.float64)
    expected = oracle.attention(q, k, v, alpha=alpha)
    check(gs.entmax_attention(q, k, v, alpha=alpha, return_aux=True), expected)
    check(gs.entmax_attention(q, k, v, alpha=alpha.float().double(), return_aux=True), expected, atol=1e-6)


def test_alpha_1_is_softmax() -> None:
    q, k, v = inputs(H=4, G=2)
    for pattern in (None, gs.Causal(), gs.SlidingWindow(9)):
        torch.testing.assert_close(gs.entmax_attention(q, k, v, pattern, alpha=1), gs.attention(q, k, v, pattern))


def test_forms_of_inputs() -> None:
    """Two and three dimensions, strides, a negative scale, another E, integers as alpha."""
    q, k, v = inputs(H=2, G=2, Q=9, K=11)
    expected = oracle.attention(q, k, v, alpha=2, scale=-0.7).out
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2).flip(3).flip(3) for x in (q, k, v)]
    for given in ((q, k, v), turned, [x[0] for x in (q, k, v)]):
        out = gs.entmax_attention(*given, alpha=2, scale=-0.7)
        np.testing.assert_allclose(out.numpy().reshape(expected.shape), expected, atol=1e-12)
    flat = gs.entmax_attention(q[0, 1], k[0, 1], v[0, 1], alpha=np.int64(2), scale=np.float64(-0.7))
    np.testing.assert_allclose(flat.numpy(), expected[0, 1], atol=1e-12)
    _, aux = gs.entmax_attention(q[0, 1], k[0, 1], v[0, 1], return_aux=True)
    assert [x.shape for x in aux] == [(9,)] * 3


PATTERNS = {
    "causal": gs.Causal(),
    "window": gs.SlidingWindow(9),
    "window with sinks": gs.SlidingWindow(9, sinks=2),
    "both sides": gs.SlidingWindow(7, 5),
    "document": gs.Document([0] * 60 + [1] * 50 + [0] * 30) & gs.Causal(),
    "dilated": gs.Dilated(4, 4, 3),
    "not": ~gs.SlidingWindow(100),
    "blocks": gs.BigBird(32),
    "heads": gs.PerHead([gs.Causal(), gs.SlidingWindow(3), gs.Dilated(5, 0, 2), gs.Dense()]),
    "batch": gs.PerBatch([gs.Causal(), gs.Local(64)]),
    "empty rows": gs.SlidingWindow(3) & ~gs.Local(20),
    "graph": gs.CSR.from_pattern(gs.Strided(17, 2), 140, 140).reordered(),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, causal: bool) -> None:
    """A pattern, its handle, its matrix as a mask, and its layout."""
    pattern = PATTERNS[name]
    q, k, v = inputs(B=2, H=4, G=2, Q=140, K=140, D=4, E=3, size=2.0)
    mask = pattern.materialize(140, 140)
    expected = oracle.attention(q, k, v, mask & np.tril(np.ones((140, 140), bool)) if causal else mask)
    layout = pattern.layout(140, 140, block_q=64, block_kv=32)
    for form in (pattern, pattern.handle, torch.from_numpy(mask), layout):
        check(gs.entmax_attention(q, k, v, form, causal=causal, return_aux=True), expected)


def test_structure_of_tensors() -> None:
    q, k, v = inputs(B=2, H=2, Q=100, K=100)
    ids = torch.tensor([[0] * 30 + [1] * 70, [0] * 100])
    mask = (ids[:, None, :, None] == ids[:, None, None]).numpy()
    check(gs.entmax_attention(q, k, v, gs.DocumentIds(ids), return_aux=True), oracle.attention(q, k, v, mask))
    G, Q, K = k.shape[1], q.shape[2], k.shape[2]
    listed = torch.randint(-1, K + 1, (G, Q, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(G, Q, K + 2, dtype=torch.bool).scatter(2, listed.where(listed >= 0, K + 1), True)[..., :K]
    mask = mask.repeat_interleave(q.shape[1] // G, 0).numpy()
    check(gs.entmax_attention(q, k, v, gs.Indices(listed), return_aux=True), oracle.attention(q, k, v, mask))


@pytest.mark.parametrize("seed", range(8))
def test_positions(seed: int) -> None:
    """Of any order, type and sign, for each head, with ties; Q and K differ, and a window restricts them."""
    draw = random.Random(seed)
    B, H, G, Q, K = 2, 4, 2, draw.choice([1, 7, 140]), draw.choice([5, 150])
    q, k, v = inputs(B, H, G, Q, K)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.int8, torch.int16, torch.int32, torch.int64])
    shapes_q, shapes_k = ((Q,), (H, Q), (B, 1, Q), (B, H, Q), (1,)), ((K,), (B, 1, K), (B, H, K), (B, G, K), (1, 1, 1))
    of_q, of_k = (
        torch.randint(-60, 60, draw.choice(shapes), generator=generator).to(dtype) for shapes in (shapes_q, shapes_k)
    )
    heads_k = of_k.repeat_interleave(2, 1) if of_k.ndim == 3 and of_k.shape[1] == G else of_k
    mask = (heads_k[..., None, :].long() <= of_q[..., :, None].long()).numpy()
    given = {"q_positions": of_q, "k_positions": of_k}
    check(gs.entmax_attention(q, k, v, **given, return_aux=True), oracle.attention(q, k, v, mask))
    near = gs.SlidingWindow(20, 20)
    both = mask & near.materialize(Q, K)
    found = gs.entmax_attention(q, k, v, near, causal=True, top_k=3, **given, return_aux=True)
    check(found, oracle.attention(q, k, v, both, top_k=3))


def test_positions_of_key_heads_without_a_batch() -> None:
    q, k, v = inputs(H=4, G=2)
    of_k = torch.randint(40, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = of_k.repeat_interleave(2, 0)[:, None] <= torch.arange(40)[:, None]
    expected = oracle.attention(q, k, v, mask[None])
    for x, batch in (((q, k, v), None), ((q[0], k[0], v[0]), 0)):
        out = gs.entmax_attention(*x, k_positions=of_k)
        np.testing.assert_allclose(out.numpy(), expected.out if batch is None else expected.out[0], atol=1e-12)


def test_positions_of_one_side() -> None:
    q, k, v = inputs(Q=7, K=12)
    i, j = torch.arange(5, 12), torch.arange(12)
    both = gs.entmax_attention(q, k, v, q_positions=i, k_positions=j)
    assert torch.equal(both, gs.entmax_attention(q, k, v, q_positions=i))
    assert torch.equal(both, gs.entmax_attention(q, k, v, k_positions=j))
    assert torch.equal(both, gs.entmax_attention(q, k, v, causal=True))


def test_empty_rows() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(H=2))
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[[0, 13]] = False
    for save in ("lists", "tau"):
        for top_k in (None, 4):
            out, aux = gs.entmax_attention(q, k, v, mask, top_k=top_k, save=save, return_aux=True)
            assert not out[:, :, [0, 13]].any() and not aux.support[:, :, [0, 13]].any()
            assert (aux.tau[:, :, [0, 13]] == torch.inf).all() and aux.certified[:, :, [0, 13]].all()
            dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
            assert not dq[:, :, [0, 13]].any() and dq[:, :, 1:13].any() and dk.isfinite().all() and dv.isfinite().all()
    out = gs.entmax_attention(q, k, v, torch.zeros(40, 40, dtype=torch.bool))
    assert not out.any() and not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("top_k", [None, 4])
def test_rows_without_a_number(top_k: int | None, wrong: float) -> None:
    q, k, v = inputs(H=1, Q=3, K=600)
    q[0, 0, 1] = wrong
    out = gs.entmax_attention(q, k.abs(), v, top_k=top_k)
    assert out[0, 0, 1].isnan().all() and out[0, 0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0])
def test_precision(alpha: float, dtype: torch.dtype) -> None:
    """The error of a call is at most twice that of the plain computation in float32, and the rounding of its result."""
    for size in (1.0, 8.0):
        q, k, v = (x.to(dtype) for x in inputs(H=2, Q=96, K=96, D=32, size=size))
        mask = torch.ones(96, 96, dtype=torch.bool).tril()
        exact = torch.from_numpy(oracle.attention(q, k, v, mask, alpha=alpha).out)
        low = oracle.plain(q.float(), k.float(), v.float(), mask, alpha)
        found = gs.entmax_attention(q, k, v, alpha=alpha, causal=True)
        assert found.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2 * exact.abs().max().item()
        assert error(found, exact) <= 2 * error(low, exact) + rounding


def test_autocast() -> None:
    q, k, v = (x.float() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = gs.entmax_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, gs.entmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


HARD = {
    "equal": torch.zeros(2000),
    "one": torch.tensor([3.0]),
    "two groups": torch.cat([torch.zeros(1000), torch.full((1000,), -0.5)]),
    "geometric": -torch.logspace(0, -15, 400, base=10),
    "squares": -(torch.linspace(0, 1.9, 500) ** 2),
    "far": torch.cat([torch.full((1,), 1e6), torch.randn(100)]),
    "far below": -1e6 + torch.randn(300),
    "close to the edge": torch.cat([torch.zeros(1), torch.full((1000,), -1 + 1e-9)]),
}


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.1, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("name", HARD)
def test_normalisers(name: str, alpha: float) -> None:
    """Rows that Newton's method, sums or roundings could fail on; padding changes nothing."""
    s = HARD[name].double()
    rows = torch.stack([s, s.flip(0), s + 7])
    a = torch.full((3,), alpha - 1, dtype=torch.float64)
    p, normaliser = normalised(rows, a)
    np.testing.assert_allclose(p.sum(1).numpy(), 1, rtol=1e-14)
    expected = oracle.entmax(s.numpy(), alpha)
    noise = 1e-13 + 4e-16 * float(s.abs().max())
    np.testing.assert_allclose(p[0].numpy(), expected, rtol=max(1e-9, 1e3 * noise), atol=20 * noise)
    np.testing.assert_allclose(p[1].flip(0).numpy(), p[0].numpy(), atol=20 * noise)
    padded = torch.cat([rows, torch.full((3, 50), -torch.inf, dtype=torch.float64)], 1)
    np.testing.assert_allclose(normalised(padded, a).normaliser.numpy(), normaliser.numpy(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_thresholds_rise_with_keys(alpha: float) -> None:
    s = randn(20, 64, seed=5, size=2.0)
    a = torch.full((20,), alpha - 1, dtype=torch.float64)
    found = torch.stack([normalised(s[:, :n], a).normaliser for n in (1, 2, 7, 30, 64)])
    assert (found.diff(dim=0) >= -1e-13).all()
    shifted = normalised(s + 100, a)
    np.testing.assert_allclose(shifted.normaliser - 100, found[-1], atol=1e-12)
    np.testing.assert_allclose(shifted.p, normalised(s, a).p, atol=1e-11)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(B=2, H=4, G=2, Q=150, K=170))
    patterns = (
        None,
        gs.Causal(),
        gs.SlidingWindow(30) | gs.Dilated(3, 3, 7),
        gs.PerHead([gs.Causal(), gs.Dense()] * 2),
    )

    def all_results() -> list[Tensor]:
        found: list[Tensor] = []
        for pattern in patterns:
            for save in ("lists", "tau"):
                out = gs.entmax_attention(q, k, v, pattern, save=save)
                found += [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
        return found

    expected = all_results()
    for size in (3000, 2**16):
        monkeypatch.setattr(chunks, "SCORES_AT_ONCE", size)
        for one, other in zip(all_results(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_windows_compute_their_own_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []

    def counted(o: Any, chunk: chunks.Chunk) -> Tensor:
        s = chunks_scores(o, chunk)
        pairs.append(s.numel())
        return s

    from gossamer.entmax import forward

    chunks_scores = forward.scores
    monkeypatch.setattr(forward, "scores", counted)
    x = randn(1, 1, 4096, 4, dtype=torch.float32)
    for pattern, most in (
        (gs.SlidingWindow(63), 4096 * 191),
        (gs.Causal(), 4096 * (4096 + 128) // 2),
        (gs.Dilated(3, 0, 500), 4096 * 4 * 128),
        (gs.BlockMask(np.eye(64, dtype=bool), 64), 4096 * 128),
    ):
        pairs.clear()
        gs.entmax_attention(x, x, x, pattern)
        assert 0 < sum(pairs) <= most


LARGE = """
import resource, torch, gossamer as gs
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
q, k = torch.randn(1, 1, 128, 16), torch.randn(1, 1, 131072, 16)
gs.entmax_attention(q[:, :, :2], k[:, :, :4096], k[:, :, :4096])
q, k = q.requires_grad_(), k.requires_grad_()
before = peak()
gs.entmax_attention(q, k, k, causal=True, alpha=1.1)
for options in ({"save": "lists"}, {"save": "tau"}, {"top_k": 32}):
    gs.entmax_attention(q, k, k, causal=True, **options).sum().backward()
gs.topk_keys(q, k, k_keep=64, causal=True)
print(peak() - before)
"""


def test_memory_of_many_keys() -> None:
    """128 queries over 131,072 keys: as one, 2**24 scores would take over 2 GiB in float64."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=120)
    gradients = 4 * 131072 * 16 * 4  # of k and v, once as they are made and once as they are added
    assert int(done.stdout) < 150 * chunks.SCORES_AT_ONCE + gradients


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0, 1e6])
def test_few_keys_at_three_halves(spread: float) -> None:
    """In float32, from any start, rows without a key and rows of one among them."""
    from gossamer.entmax.thresholds import of_halves

    s = torch.randn(64, 200) * spread + torch.randn(64, 1)
    s[:8] = s[:8].round()
    s[8, 1:] = -torch.inf
    s[9] = -torch.inf
    exact = normalised(s.double(), torch.full((64,), 0.5, dtype=torch.float64), same=0.5)
    for start in (None, exact.normaliser, exact.normaliser - 1, exact.normaliser + 1e-3):
        found = of_halves(s.clone(), start)
        assert found.p[9].eq(0).all() and found.normaliser[9] == torch.inf
        assert (found.p - exact.p).abs().max() <= 1e-6 * (1 + spread)  # the rounding of s / 2 - tau
        assert torch.allclose(found.normaliser, exact.normaliser, rtol=1e-6, atol=1e-6)
