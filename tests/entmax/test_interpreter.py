"""The Triton kernels of `entmax_attention` and `topk_keys` in Triton's interpreter, on the CPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.memo import forget_all
from tests.support.processes import INTERPRETING, in_interpreter

SEEDS = 8
PARTS = 4

pytest.importorskip("triton")
# The interpreter computes by numpy, which warns of a division by zero where a GPU gives inf or NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if INTERPRETING:
    from gossamer.entmax import ways
    from gossamer.entmax.launch import backward as gradient
    from gossamer.entmax.launch import calls, selection
    from tests.support import entmax_oracle as oracle
    from tests.support.entmax_cases import aux_of, call, check, results
    from tests.support.modes import NothingIsRead

    @pytest.fixture(autouse=True)
    def nothing_is_known() -> None:
        """Sizes that tests change are no part of keys."""
        forget_all()

    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_random_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "BUFFER", (128, 8, 32)[seed % 3])
        monkeypatch.setattr(calls, "MOST_LISTED", (96, 8, 20)[seed % 3])
        given = call(seed, "cpu", [torch.float16, torch.float32], [1, 33, 70, 130])
        check(given)

    @pytest.mark.parametrize("seed", range(6))
    def test_topk_against_a_stable_sort(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Small integers, whose scores are exact: many ties, rows that see few keys or none, k over K."""
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        monkeypatch.setattr(selection, "BUFFER", (128, 8)[seed % 2])
        Q, K, span = draw.choice([33, 80]), draw.choice([1, 40, 150]), draw.choice([1, 3, 40])
        n, scale = draw.choice([1, 2, 8, 64, 200]), draw.choice([1.0, 0.125, -2.0])
        dtype = draw.choice([torch.float16, torch.float32])
        q, k = (torch.randint(-span, span + 1, (1, 2, x, 3), generator=generator).to(dtype) for x in (Q, K))
        of_q, of_k = (torch.randint(-1, K, (1, 2, x), generator=generator) for x in (Q, K))
        found = gs.topk_keys(q, k, k_keep=n, scale=scale, q_positions=of_q, k_positions=of_k, implementation="kernels")
        for h, r in np.ndindex(2, Q):
            keys = np.nonzero((of_k[0, h] <= of_q[0, h, r]).numpy())[0]
            s = scale * (k[0, h, keys].double() @ q[0, h, r].double()).numpy()
            kept = np.sort(keys[np.argsort(-s, kind="stable")[:n]])
            expected = np.full(n, -1)
            expected[: len(kept)] = kept
            assert (found[0, h, r].numpy() == expected).all()

    @pytest.mark.parametrize("top_k", [None, 3])
    def test_what_is_no_number_stays_in_its_row(top_k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        for size in (128, 8):
            forget_all()
            monkeypatch.setattr(selection, "BUFFER", size)
            g = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(1, 1, 40, 8, generator=g) for _ in range(3))
            q[0, 0, 3, 0], q[0, 0, 30, 2] = torch.nan, torch.inf
            out, aux = aux_of(q, k, v, causal=True, top_k=top_k)
            bad = out.isnan().all(-1)[0, 0]
            assert bad.nonzero().flatten().tolist() == [3, 30]
            clean = q.clone()
            clean[0, 0, [3, 30]] = 1.0
            expected, _ = aux_of(clean, k, v, causal=True, top_k=top_k)
            torch.testing.assert_close(out[0, 0, ~bad], expected[0, 0, ~bad])
            assert aux.tau[0, 0, 3].isnan()

    def test_the_certificate_is_exact() -> None:
        g = torch.Generator().manual_seed(3)
        q, k = (torch.randint(-2, 3, (1, 2, 60, 4), generator=g).float() for _ in range(2))
        for alpha in (1.0, 1.5, 2.0):
            _, full = aux_of(q, k, k, alpha=alpha, causal=True, scale=0.25)
            for n in (1, 2, 5):
                _, aux = aux_of(q, k, k, alpha=alpha, top_k=n, causal=True, scale=0.25)
                assert torch.equal(aux.certified, full.support <= n)

    def test_a_heavy_key_among_many_costs_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
        """Its dS nearly cancels, and is what is rounded to 16 bits: dQ is off by what that does to dS."""
        monkeypatch.setattr(calls, "MOST_LISTED", 8)  # no row has a list
        g = torch.Generator().manual_seed(4)
        q, k, v, dout = (torch.randn(1, 1, n, 8, generator=g).half() for n in (40, 200, 200, 40))
        q[..., 0], k[..., 77, 0] = 4.0, 3.0
        v[..., 77, :] = 4.0
        given = [q, k, v, dout]
        _, _, (dq, _, _) = results(*given, options={"alpha": 1.0, "scale": 1.0, "pattern": None})
        q, k, v, dout = (x.double() for x in given)
        p, dp = (q @ k.mT).softmax(-1), dout @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        limit = 2.0**-11 * (ds.abs() @ k.abs() + (ds @ k).abs()) + 2.0**-20 * dp.abs().amax(-1, keepdim=True)
        assert bool(((dq.double() - ds @ k).abs() <= limit).all())

    def test_as_the_module_calls_it() -> None:
        """`SplashAttention` of 40 positions in float32, by kernels."""
        g = torch.Generator().manual_seed(5)
        Q, K, V = (torch.randn(2, 2, 40, 64, generator=g) for _ in range(3))
        index = torch.arange(40).expand(2, 2, 40)
        out, _ = aux_of(Q, K, V, alpha=1.5, top_k=8, scale=0.125, q_positions=index, k_positions=index)
        mask = np.tril(np.ones((40, 40), bool))
        expected = oracle.attention(Q, K, V, mask, alpha=1.5, top_k=8, scale=0.125)
        np.testing.assert_allclose(out.numpy(), expected.out, rtol=0, atol=5e-6)

    def test_nothing_is_read_and_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "MOST_LISTED", 16)  # some rows have no list
        for top_k, save in ((None, "lists"), (4, "lists"), (None, "tau")):
            given = call(7, "cpu", [torch.float32], [70])
            given["options"] |= {"alpha": 1.5, "top_k": top_k, "save": save, "pattern": gs.SlidingWindow(60)}
            first = results(**given)
            with NothingIsRead():
                second = results(**given)
            for one, other in zip((first[0], *first[1], *first[2]), (second[0], *second[1], *second[2]), strict=True):
                assert torch.equal(one, other)

    def test_parts_of_a_call_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
        g = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 2, 140, 16, generator=g) for _ in range(3))
        for top_k in (None, 6):
            forget_all()
            expected = aux_of(q, k, v, causal=True, top_k=top_k)
            with monkeypatch.context() as patch:
                patch.setattr(calls, "ROWS_OF_A_PART", 64)
                patch.setattr(calls, "PAIRS_OF_A_PART", 1)
                patch.setattr(calls, "BYTES_OF_A_PART", 1)
                forget_all()
                found = aux_of(q, k, v, causal=True, top_k=top_k)
            assert torch.equal(found[0], expected[0])
            assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))

    def test_keys_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
        """One key has a weight in every row, so that its list is computed in parts, however few there may be."""
        g = torch.Generator().manual_seed(2)
        q, k, v = (torch.randn(1, 1, n, 16, generator=g) for n in (1200, 40, 40))
        k[0, 0, 7] += 2
        q[..., :] += 1
        given = {"q": q, "k": k, "v": v, "dout": torch.randn(1, 1, 1200, 16, generator=g)}
        for long, half in ((1024, 2048), (64, 8)):
            forget_all()
            monkeypatch.setattr(gradient, "LONG", long)
            monkeypatch.setattr(gradient, "HALF", half)
            check(given | {"options": {"alpha": 1.5, "top_k": 8, "scale": None, "pattern": None}})

    def test_reasons() -> None:
        x = torch.zeros(1, 2, 40, 8)

        def of(pattern: object = None, **options: object) -> list[str]:
            from gossamer.entmax.arguments import given

            q = options.pop("q", x)
            found = given("test", q, q, q, pattern, 1.5, options.pop("top_k", None), False, None, None, None, None)
            return ways.reasons(found.q, found.k, found.v, found.options)

        assert of() == of(gs.SlidingWindow(3)) == []
        assert "float64" in of(q=x.double())[0]
        assert "300 keys" in of(top_k=300)[0]
        assert "one run of keys" in of(gs.Dilated(3, 0, 2))[0]
        assert "a mask" in of(torch.ones(40, 40, dtype=torch.bool))[0]

else:

    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(PARTS))
    def test_in_the_interpreter(part: int) -> None:
        tests = [f"test_random_calls[{seed}]" for seed in range(SEEDS)][part::PARTS]
        if part == 0:
            tests += ["test_topk_against_a_stable_sort", "test_reasons"]
        if part == 1:
            tests += [
                "test_what_is_no_number_stays_in_its_row",
                "test_the_certificate_is_exact",
                "test_a_heavy_key_among_many_costs_no_precision",
                "test_as_the_module_calls_it",
            ]
        if part == 2:
            tests += ["test_nothing_is_read_and_bits_are_the_same", "test_parts_of_a_call_change_nothing"]
        if part == 3:
            tests += ["test_keys_of_many_rows"]
        in_interpreter(__file__, *tests)
