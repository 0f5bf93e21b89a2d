"""Random calls against float64: any composition, sizes, grouped heads and score terms, as one call and in parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_layouts import compositions, leaves

import gossamer as gs
from gossamer.kernels.contract import Terms
from gossamer.kernels.reference import oracle
from gossamer.torch import split


def patterns(data: st.DataObject, Q: int, K: int, B: int, H: int) -> gs.Pattern:
    """Shared by heads, by head, dilated in several ways, or by batch element."""
    shared = compositions(leaves(K, Q))
    dilated = st.builds(gs.Dilated, st.integers(0, 12), st.integers(0, 4), st.integers(1, 9))
    kinds: dict[str, Any] = {
        "shared": shared,
        "dilated": dilated,
        "heads": st.lists(dilated | leaves(K, Q), min_size=H, max_size=H).map(gs.PerHead),
        "mixture": st.booleans().map(lambda causal: gs.LongNet((8, 24), (1, 3), heads=H, causal=causal)),
    }
    pattern = data.draw(kinds[data.draw(st.sampled_from(sorted(kinds)), label="kind")], label="pattern")
    if data.draw(st.booleans(), label="documents"):
        ids = np.sort(np.random.default_rng(K).integers(0, 3, (B, K)), axis=1)
        pattern = pattern & gs.Document(ids)
    return pattern


def parts_at_any_price(patch: pytest.MonkeyPatch) -> None:
    cheaper = split._cheaper

    def take(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
        cost.call = lambda *a, **k: math.inf
        return cheaper(found, pattern, p, sizes, cost)

    patch.setattr(split, "_cheaper", take)
    patch.setattr(split, "_classes_cost", lambda *a: 0.0)
    patch.setattr(split, "_known", type(split._known)())


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_call_is_exact(data: st.DataObject) -> None:
    K = data.draw(st.sampled_from([1, 3, 40, 100, 129]), label="K")
    Q = data.draw(st.sampled_from([K, K, 1, 17, 150]), label="Q")
    B, G = data.draw(st.integers(1, 2), label="B"), data.draw(st.integers(1, 2), label="G")
    H = G * data.draw(st.integers(1, 2), label="heads of a key head")
    D, E = data.draw(st.sampled_from([(8, 8), (1, 5), (20, 3)]), label="sizes")
    pattern = patterns(data, Q, K, B, H)
    q_offset = data.draw(st.sampled_from([None, None, 0, 5, -9, K + 3]), label="q_offset")
    terms = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "softcap": st.just(2.0),
                "scale": st.sampled_from([-0.3, 0.0, 1.0]),
                "key_lengths": st.lists(st.integers(0, K + 1), min_size=B, max_size=B).map(torch.tensor),
                "alibi_slopes": st.just(torch.linspace(0.1, 0.4, H, dtype=torch.float64)),
                "sink_logits": st.just(torch.linspace(-1, 1, H, dtype=torch.float64)),
            },
        ),
        label="terms",
    )
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    given_terms = {"scale": D**-0.5, "q_offset": K - Q if q_offset is None else q_offset} | terms
    kept = pattern.materialize(Q, K, q_offset)
    exact = oracle(q, k, v, torch.from_numpy(kept), Terms(**given_terms))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="parts"):
            parts_at_any_price(patch)
        found = gs.attention(q, k, v, pattern, q_offset=q_offset, return_lse=True, **terms)
        assert gs.explain(q, k, v, pattern, q_offset=q_offset, **terms).density == pytest.approx(kept.mean(), abs=1e-12)
        results = []
        for out, lse in (found, exact):
            loss = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()
            results.append([out, lse, *torch.autograd.grad(loss, (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
