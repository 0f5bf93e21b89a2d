"""Random calls against float64: any composition, sizes, grouped heads and score terms, as one call and in parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.kernels.contract import Terms
from gossamer.kernels.reference import oracle
from gossamer.torch import calls, parts, plan, split

Draw = random.Random
CALLS = 60  # of a test

SHARED: list[Callable[[Draw, int, int], gs.Pattern]] = [
    lambda r, Q, K: gs.Causal(),
    lambda r, Q, K: gs.SlidingWindow(r.randrange(60), r.randrange(20), r.choice([0, 0, 3])),
    lambda r, Q, K: gs.SlidingWindow(r.choice([None, 9]), r.choice([None, 4])),
    lambda r, Q, K: gs.Local(1 + r.randrange(70)),
    lambda r, Q, K: gs.Dilated(r.randrange(20), r.randrange(9), 1 + r.randrange(12)),
    lambda r, Q, K: gs.Strided(2 + r.randrange(40), r.randrange(40)),
    lambda r, Q, K: gs.Longformer(r.randrange(40), {r.randrange(K), r.randrange(K)}, 1 + r.randrange(8)),
    lambda r, Q, K: gs.PowerStrided(2 + r.randrange(3), r.randrange(20)),
    lambda r, Q, K: gs.Predicate(lambda i, j: (5 * i + j) % 7 == 0),
    lambda r, Q, K: gs.CSR.from_torch((torch.rand(Q, K) < 0.05).to_sparse_coo()),
    lambda r, Q, K: gs.Document(np.sort(np.random.default_rng(r.randrange(99)).integers(0, 4, (1, K)))),
    lambda r, Q, K: gs.PerHead([gs.Dilated(r.randrange(9), 0, 1 + r.randrange(9))]),
    lambda r, Q, K: gs.BigBird(16, random_blocks=1) if Q == K else gs.Dense(),
    lambda r, Q, K: gs.Tree([r.randrange(-1, t) for t in range(Q)]) if Q <= K else gs.Causal(),
]


def pattern_of(r: Draw, Q: int, K: int, B: int, H: int, deep: int = 0) -> gs.Pattern:
    """Shared, by head or by batch element, and compositions of these."""
    how = r.random()
    if deep > 1 or how < 0.45:
        return r.choice(SHARED)(r, Q, K)
    if how < 0.6:
        return gs.PerHead([r.choice(SHARED[:6])(r, Q, K) for _ in range(H)])
    if how < 0.65:
        return gs.LongNet((8, 24), (1, 3), heads=H, causal=r.random() < 0.5)
    if how < 0.7:
        return gs.BlockMask(np.random.default_rng(r.randrange(99)).random((H, -(-Q // 16), -(-K // 16))) < 0.4, 16)
    if how < 0.75:
        return gs.Document(np.sort(np.random.default_rng(r.randrange(99)).integers(0, 4, (B, K)), axis=1))
    one = pattern_of(r, Q, K, B, H, deep + 1)
    if how < 0.8:
        return ~one
    other = pattern_of(r, Q, K, B, H, deep + 1)
    return one & other if how < 0.88 else one | other


def one_call(seed: int) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    B, G, K = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([1, 3, 40, 100, 129])
    H, Q, (D, E) = G * r.choice([1, 2]), r.choice([K, K, 1, 17, 150]), r.choice([(8, 8), (1, 5), (20, 3)])
    pattern, q_offset = pattern_of(r, Q, K, B, H), r.choice([None, None, 0, 5, -9, K + 3])
    optional: dict[str, Any] = {
        "softcap": 2.0,
        "scale": r.choice([-0.3, 0.0, 1.0]),
        "key_lengths": torch.tensor([r.randrange(K + 2) for _ in range(B)]),
        "alibi_slopes": torch.rand(H, dtype=torch.float64),
        "sink_logits": torch.randn(H, dtype=torch.float64),
    }
    terms = {name: value for name, value in optional.items() if r.random() < 0.2}
    shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    kept = pattern.materialize(Q, K, q_offset)
    values: dict[str, Any] = {"scale": D**-0.5, "q_offset": K - Q if q_offset is None else q_offset} | terms
    exact = oracle(q, k, v, torch.from_numpy(kept), Terms(**values))
    found = gs.attention(q, k, v, pattern, q_offset=q_offset, return_lse=True, **terms)
    assert gs.explain(q, k, v, pattern, q_offset=q_offset, **terms).density == pytest.approx(kept.mean(), abs=1e-12)
    results = []
    for out, lse in (found, exact):
        loss = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()
        results.append([out, lse, *torch.autograd.grad(loss, (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda said: f"{said}\n{seed}: {pattern!r} {values}")


def at_any_price(patch: pytest.MonkeyPatch) -> list[split.Split]:
    """Parts are taken whatever they cost; the splits that were."""
    cheaper, forward, taken = split._cheaper, parts.forward, []

    def take(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
        cost.call = lambda *a, **k: math.inf
        return cheaper(found, pattern, p, sizes, cost)

    def run(found: Any, *rest: Any) -> Any:
        taken.append(found)
        return forward(found, *rest)

    patch.setattr(split, "_cheaper", take)
    patch.setattr(split, "_classes_cost", lambda *a: 0.0)
    patch.setattr(parts, "forward", run)
    return taken


def forget() -> None:
    """Plans and calls remember how they were computed."""
    split._known.clear()
    plan._plans.clear()
    calls.forget()


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("first", [0, CALLS])
def test_any_call_is_exact(first: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = at_any_price(monkeypatch) if in_parts else []
    forget()
    for seed in range(first, first + CALLS):
        one_call(seed)
    forget()
    assert len(taken) >= 8 or not in_parts
