"""ALiBi: both published forms where keys are after their query, slopes of each batch element, and who is asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.patterns import Pattern
from gossamer.patterns.ahead import keeps_ahead
from gossamer.patterns.grid import Sizes

B, H, G, N, D = 2, 4, 2, 70, 8


def inputs(Q: int = N, K: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v."""
    g = torch.Generator().manual_seed(4)
    shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, D)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def slopes(each: bool) -> Tensor:
    one = torch.tensor([0.5, 0.03, -0.02, 0.0], dtype=torch.float64)
    return torch.stack([one, one.flip(0) * 0.7]) if each else one


def by_definition(x: list[Tensor], mask: np.ndarray, of: Tensor, distance: str, offset: int) -> list[Tensor]:
    """out and the gradients of its sum, pair by pair."""
    q, k, v = (y.detach().double().requires_grad_() for y in x)
    Q, K = q.shape[2], k.shape[2]
    rows = []
    for b in range(B):
        for h in range(H):
            slope = of[b, h] if of.ndim == 2 else of[h]
            s = q[b, h] @ k[b, h // (H // G)].T * D**-0.5
            bias = torch.zeros(Q, K, dtype=torch.float64)
            for r in range(Q):
                for j in range(K):
                    i = r + offset
                    bias[r, j] = slope * (j - i) if distance == "signed" else -slope * abs(i - j)
            s = (s + bias).masked_fill(~torch.from_numpy(np.broadcast_to(mask, (B, H, Q, K))[b, h].copy()), -math.inf)
            p = torch.nan_to_num(s.softmax(-1))
            rows.append(p @ v[b, h // (H // G)])
    out = torch.stack(rows).view(B, H, Q, D)
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


def found(x: list[Tensor], pattern: Any, **options: Any) -> list[Tensor]:
    out = gs.attention(*x, pattern, **options)
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]


PATTERNS: dict[str, Pattern] = {
    "dense": gs.Dense(),
    "window": gs.SlidingWindow(9, 6),
    "dilated": gs.Dilated(6, 4, 5),
    "graph": gs.CSR.from_pattern(gs.Strided(7, 3) | gs.Local(10), N, N),
    "heads": gs.PerHead([gs.Dense(), gs.Causal(), gs.SlidingWindow(3, 9), gs.Dilated(4, 9, 3)]),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("distance", ["signed", "absolute"])
@pytest.mark.parametrize("each", [False, True])
def test_both_forms(name: str, distance: str, each: bool) -> None:
    pattern, x = PATTERNS[name], inputs()
    for offset in (0, 13):
        if name == "graph" and offset:
            continue
        wanted = by_definition(x, pattern.materialize(N, N, offset), slopes(each), distance, offset)
        for implementation in (None, "blocked", "reference"):
            results = found(
                x, pattern, q_offset=offset, alibi_slopes=slopes(each), alibi_distance=distance,
                implementation=implementation,
            )  # fmt: skip
            for a, b in zip(results, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("each", [False, True])
def test_masks_layouts_and_structure(each: bool) -> None:
    """They are asked, but where no key is after any query: by a rule of positions, or by the sizes."""
    x, mask = inputs(), PATTERNS["window"].materialize(N, N)
    for distance in ("signed", "absolute"):
        wanted = by_definition(x, mask, slopes(each), distance, 0)
        layout = PATTERNS["window"].layout(N, N, block_q=64, block_kv=64)
        for given in (torch.from_numpy(mask), layout):
            results = found(x, given, alibi_slopes=slopes(each), alibi_distance=distance)
            for a, b in zip(results, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
            with pytest.raises(ValueError, match=r'alibi_distance must be "signed".*a mask or a layout'):
                gs.attention(*x, given, alibi_slopes=slopes(each))
        started = mask & (np.arange(N) >= np.array([3, 0])[:, None, None, None])
        wanted = by_definition(x, started, slopes(each), distance, 0)
        options: dict[str, Any] = {"alibi_slopes": slopes(each), "alibi_distance": distance, "key_starts": [3, 0]}
        for a, b in zip(found(x, PATTERNS["window"], **options), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    of_causal = found(x, gs.Causal(), alibi_slopes=slopes(each), key_starts=[3, 0])
    for distance in ("signed", "absolute"):
        same = found(x, gs.Causal(), alibi_slopes=slopes(each), key_starts=[3, 0], alibi_distance=distance)
        assert all(torch.equal(a, b) for a, b in zip(of_causal, same, strict=True))
    with pytest.raises(ValueError, match="alibi_distance"):
        gs.attention(*x, gs.SlidingWindow(4, 1), alibi_slopes=slopes(each), key_starts=[3, 0])
    with pytest.raises(ValueError, match="alibi_distance"):
        gs.attention(*x, gs.DocumentIds(torch.zeros(N, dtype=torch.int64)), alibi_slopes=slopes(each))
    gs.attention(*x, gs.DocumentIds(torch.zeros(N, dtype=torch.int64)) & gs.Causal(), alibi_slopes=slopes(each))
    one = [y.detach() for y in inputs(1, N)]  # the last query: every key is before it
    for given in (None, torch.ones(1, N, dtype=torch.bool)):
        gs.attention(*one, given, alibi_slopes=slopes(each))


@pytest.mark.parametrize("merge", [None, "lse"])
def test_who_is_asked(merge: str | None) -> None:
    """By the pattern and the position of its rows, not by a name."""
    q, k, v = (y.detach() for y in inputs())
    asked: dict[Any, bool] = {
        gs.Causal(): False, gs.SlidingWindow(5): False, gs.Dense(): True, gs.Local(8): True,
        gs.Local(8) & gs.Causal(): False, gs.Causal() | gs.SlidingWindow(2, 1): True, ~gs.Causal(): True,
        gs.Strided(4, 2): False, gs.Longformer(8, (0,)): True, gs.Dilated(3, 0, 4): False,
        gs.PerHead([gs.Causal(), gs.Causal(), gs.Causal(), gs.SlidingWindow(1, 1)]): True,
        gs.LongNet((16, 32), (2, 4), heads=H): False, gs.LongNet((16, 32), (2, 4), heads=H, causal=False): True,
        gs.Neighborhood((7, 10), 1): True, gs.Neighborhood((7, 10), ((2, 0), 0)): False,
        gs.Neighborhood((7, 10), (2, 1), causal=(True, False)): True,
        gs.CSR.from_pattern(gs.Causal(), N, N): False, gs.CSR.from_pattern(gs.SlidingWindow(1, 1), N, N): True,
    }  # fmt: skip
    for pattern, asks in asked.items():
        options: dict[str, Any] = {"alibi_slopes": slopes(False)}
        if merge and not (isinstance(pattern, gs.LongNet) or " | " in repr(pattern)):
            continue
        if not asks:
            first, *rest = (
                gs.attention(q, k, v, pattern, alibi_distance=d, merge=merge, **options)
                for d in (None, "signed", "absolute")
            )
            assert all(torch.equal(first, other) for other in rest), pattern
            continue
        with pytest.raises(ValueError, match=r"alibi_distance must be .* which keeps keys after the query \(j > i\)"):
            gs.attention(q, k, v, pattern, merge=merge, **options)
        if merge is None:
            with pytest.raises(ValueError, match="alibi_distance must be"):
                gs.explain(q, k, v, pattern, **options)
        gs.attention(q, k, v, pattern, alibi_distance="signed", merge=merge, **options)


def test_of_a_reordered_graph_slopes_are_refused_as_ever() -> None:
    q, k, v = (y.detach() for y in inputs())
    with pytest.raises(ValueError, match="alibi_slopes must be None with a reordered pattern"):
        gs.attention(q, k, v, PATTERNS["graph"].reordered(), alibi_slopes=slopes(False), alibi_distance="signed")  # type: ignore[attr-defined]


SIZES = [(20, 20, 0), (7, 30, 23), (30, 7, -23), (20, 20, 5), (20, 20, -5), (1, 20, 19), (9, 20, 30), (150, 150, 0)]


@pytest.mark.parametrize("sizes", SIZES)
def test_keeps_ahead_is_what_the_matrix_says(sizes: tuple[int, int, int]) -> None:
    Q, K, offset = sizes
    rng = np.random.default_rng(Q + K)
    every = [
        gs.Dense(), gs.Causal(), gs.SlidingWindow(3), gs.SlidingWindow(0, 4), gs.SlidingWindow(2, 0, 3), gs.Local(6),
        gs.Local(6) & gs.Causal(), gs.Dilated(2, 1, 3), gs.Dilated(2, 0, 3), gs.Strided(5, 1), ~gs.Dense(),
        ~gs.SlidingWindow(None, None), gs.Longformer(4, (0, 5), 2), gs.Longformer(0, ()), gs.PowerStrided(2, 1),
        gs.Document(rng.integers(0, 3, K)), gs.Document(rng.integers(0, 3, K)) & gs.SlidingWindow(5),
        gs.Predicate(lambda i, j: (i - j) % 7 == 3), gs.Predicate(lambda i, j: i == j + 2),
        gs.BlockMask(np.tril(np.ones((-(-Q // 16), -(-K // 16)), bool), -1), 16),
        gs.CSR.from_pattern(gs.Predicate(lambda i, j: i == j), Q, K, offset),
        (gs.Causal() & ~gs.Local(3)) | gs.SlidingWindow(0), gs.Neighborhood((K,), 2, "shift" if K > 5 else "cut"),
        gs.Neighborhood((K,), 2, causal=True), gs.PerHead([gs.Causal(), gs.SlidingWindow(0)]),
        gs.PerHead([gs.Causal(), gs.SlidingWindow(0, 1)]),
    ]  # fmt: skip
    for pattern in every:
        mask = pattern.materialize(Q, K, offset)
        ahead = np.arange(K)[None] > np.arange(Q)[:, None] + offset
        assert keeps_ahead(pattern, Sizes(Q, K, offset)) == bool((mask & ahead).any()), pattern


def test_of_many_tokens_it_is_quick() -> None:
    """Whoever keeps a key ahead says so in the first rows; a window of a million tokens is an interval."""
    assert not keeps_ahead(gs.SlidingWindow(100) & gs.Local(4096), Sizes(2**20, 2**20, 0))
    assert keeps_ahead(gs.Neighborhood((32, 64, 64), (3, 6, 6)), Sizes(2**17, 2**17, 0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alibi_distance": "absolute"}, "alibi_distance must be None without alibi_slopes; got 'absolute'"),
        ({"alibi_slopes": torch.ones(H), "alibi_distance": "other"}, "be \"signed\".* or None; got 'other'"),
        ({"alibi_slopes": torch.ones(H), "alibi_distance": 1}, "got 1 "),
        ({"alibi_slopes": torch.ones(H), "alibi_distance": ["signed"]}, r"got \['signed'\]"),
        ({"alibi_slopes": torch.ones(B + 1, H)}, r"have shape \(H,\) = \(4,\), or \(B, H\) = \(2, 4\)"),
        ({"alibi_slopes": torch.ones(B, H, 1)}, r"\(B, H\) = \(2, 4\); got shape \(2, 4, 1\)"),
        ({"alibi_slopes": torch.ones(B)}, r"\(B, H\) = \(2, 4\)"),
        ({"sink_logits": torch.ones(H), "alibi_distance": "signed"}, "must be None without alibi_slopes"),
        ({"key_lengths": [3, 4], "alibi_distance": "signed"}, "must be None without alibi_slopes"),
    ],
)
def test_errors(options: dict[str, Any], says: str) -> None:
    x = [y.detach().float() for y in inputs()]
    for f in (gs.attention, gs.explain):
        with pytest.raises(ValueError, match=says):
            f(*x, gs.Causal(), **options)


def test_repeated_calls_tell_the_forms_apart() -> None:
    """Each is found again under its own key, and Hopper refuses slopes of either form."""
    x = [y.detach().float() for y in inputs()]
    of, first = slopes(True).float(), {}
    for _ in range(2):
        for distance in ("signed", "absolute"):
            for given in (of, of[0], of[0][None].expand(B, H)):
                out = gs.attention(*x, alibi_slopes=given, alibi_distance=distance)
                key = distance, given.ndim, given.stride()
                assert torch.equal(first.setdefault(key, out), out)
    assert torch.allclose(first["signed", 1, (1,)], first["signed", 2, (0, 1)], atol=1e-6)
    assert not torch.allclose(first["signed", 1, (1,)], first["absolute", 1, (1,)], atol=1e-3)
    told = gs.explain(*x, alibi_slopes=of, alibi_distance="absolute")
    assert told.problem.score_terms == {"alibi_slopes", "alibi_distance"}
    assert any("does not compute alibi_distance, alibi_slopes" in why for why in told.reasons["hopper"])


@pytest.mark.parametrize("given", ["pattern", "mask", "starts"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_compiled_function(given: str) -> None:
    torch._dynamo.reset()
    pattern: Any = torch.ones(N, N, dtype=torch.bool) if given == "mask" else gs.Dense()
    more: dict[str, Any] = {"key_starts": torch.tensor([2, 0])} if given == "starts" else {}

    def f(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        return gs.attention(q, k, v, pattern, alibi_slopes=s, alibi_distance="absolute", **more)

    x, s = inputs(), slopes(True)
    wanted = f(*x, s)
    out = torch.compile(f, fullgraph=True, backend="aot_eager")(*x, s)
    for a, b in zip(torch.autograd.grad(out.sum(), x), torch.autograd.grad(wanted.sum(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-11)
    if given == "pattern":
        with pytest.raises(ValueError, match="alibi_distance must be"):
            torch.compile(lambda q, k, v, s: gs.attention(q, k, v, pattern, alibi_slopes=s), backend="aot_eager")(
                *[y.detach() for y in x], s
            )
