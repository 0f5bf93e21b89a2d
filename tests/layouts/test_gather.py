"""Gather layouts against dense masks; when they are chosen; token trees."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.layouts.gather import WIDTHS, GatherLayout, build_gather, expand_gather
from gossamer.memo import forget_all
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.plan.table import load
from gossamer.testing.cases import SMALL
from gossamer.testing.cases import Case as Named

GROUP_SIZES = tuple(WIDTHS)


@pytest.mark.parametrize("block_q", GROUP_SIZES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_layout_and_its_transpose_are_the_pattern(case: Named, block_q: int) -> None:
    pattern = case.pattern()
    mask = pattern.materialize(case.Q, case.K, case.q_offset)
    layout = build_gather(pattern, case.Q, case.K, block_q=block_q, q_offset=case.q_offset)
    assert np.array_equal(layout.expand(), mask)
    assert np.array_equal(expand_gather(layout.columns), np.swapaxes(mask, -1, -2))
    assert layout.stats.useful_pairs * np.prod(layout.lead) == mask.sum()
    for walk in (layout.rows, layout.columns):
        assert (walk.starts % walk.width == 0).all() and len(walk.indices) % walk.width == 0
    on_device = GatherLayout(layout.to("cpu").rows)
    assert np.array_equal(expand_gather(on_device.columns.on_host()), expand_gather(layout.columns))


def test_builds_in_parts_give_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.layouts import gather
    from gossamer.patterns import pairs

    pattern = (gs.PowerStrided(3, 5) | gs.BigBird(32)) & ~gs.Local(8)
    whole = [build_gather(pattern, 700, 700, block_q=rows) for rows in GROUP_SIZES]
    for module in (gather, pairs):
        monkeypatch.setattr(module, "PAIRS_AT_ONCE", pairs.ROWS_AT_ONCE**2)
    for rows, layout in zip(GROUP_SIZES, whole, strict=True):
        for part, all_of_it in (
            (build_gather(pattern, 700, 700, block_q=rows).rows, layout.rows),
            (build_gather(pattern, 700, 700, block_q=rows).columns, layout.columns),
        ):
            assert all(np.array_equal(a, b) for a, b in zip(part.arrays(), all_of_it.arrays(), strict=True))


def test_rows_of_a_group_are_checked() -> None:
    with pytest.raises(ValueError, match="block_q of a gather layout must be one of 1, 16, 32, 64, got 8"):
        build_gather(gs.Causal(), 40, 40, block_q=8)


def test_the_cheapest_layout_is_chosen_without_building_one() -> None:
    from gossamer.kernels.triton.gather.config import GATHERS
    from gossamer.layouts import cache
    from gossamer.plan.choice import cheapest
    from gossamer.plan.costs import costs_of
    from gossamer.plan.problem import Problem
    from gossamer.testing.graphs import proximity_graph, random_graph

    costs = costs_of(Problem(1, 1, 1, 1, 1, 64, 64, "bfloat16", "cuda", sm=90, processors=132))
    tiles = (costs.tile("hopper", 128, 128), costs.tile("triton", 64, 64))
    gathers = tuple(costs.gather("triton", choice) for choice in GATHERS if "bfloat16" in choice.dtypes)
    cache.clear_cache()

    def chosen(pattern: gs.Pattern, N: int) -> int | tuple[int, int]:
        at = cheapest(pattern, N, N, tiles=tiles, gathers=gathers, q_offset=0)
        return tiles[at][:2] if at < len(tiles) else gathers[at - len(tiles)].choice.block_q

    assert chosen(gs.SlidingWindow(4096), 65536) == (128, 128)
    assert chosen(gs.BigBird(64), 16384) == (64, 64)
    assert chosen(gs.Causal() & gs.Document(np.arange(8192) // 1000), 8192) == (128, 128)
    assert chosen(random_graph(20000, 16), 20000) == 1
    assert chosen(gs.PowerStrided(2), 131072) == 1
    assert chosen(proximity_graph((5, 5, 4), 2.5), 2**14) == 16
    assert not cache._layouts


@pytest.mark.parametrize("block_q", GROUP_SIZES)
def test_estimates_of_short_sequences_are_exact(block_q: int) -> None:
    from gossamer.plan.estimate import Sample

    for pattern in (gs.BigBird(64), gs.PowerStrided(2, 4), gs.PerHead([gs.SlidingWindow(31), gs.Dilated(8, 0, 4)])):
        sample = Sample(pattern, pattern._sizes(900, 900))
        gathered, copies = build_gather(pattern, 900, 900, block_q=block_q).stats, np.prod(pattern.lead)
        found = sample.gathers(block_q)
        assert found[:2] == pytest.approx((gathered.gathered * copies, gathered.executed_pairs * copies))
        tiles, stats = sample.tiles(64, 128), pattern.layout(900, 900, block_q=64, block_kv=128).stats
        assert tiles[:2] == pytest.approx((stats.useful_pairs * copies, stats.executed_pairs * copies))


def ancestors(parents: list[int], prompt: int) -> np.ndarray:
    """The dense mask of a tree, from its definition."""
    mask = np.zeros((len(parents), prompt + len(parents)), dtype=bool)
    mask[:, :prompt] = True
    for row in range(len(parents)):
        node = row
        while node >= 0:
            mask[row, prompt + node] = True
            node = parents[node]
    return mask


@pytest.mark.parametrize("prompt", [0, 1, 77])
@pytest.mark.parametrize("nodes", [1, 26, 150])
def test_tree(nodes: int, prompt: int) -> None:
    parents = [int(np.random.default_rng(t).integers(-1, t)) for t in range(nodes)]
    pattern, mask = gs.Tree(parents), ancestors(parents, prompt)
    assert np.array_equal(pattern.materialize(nodes, nodes + prompt), mask)
    assert np.array_equal(pattern.layout(nodes, nodes + prompt, block_q=32, block_kv=64).expand(), mask)
    assert np.array_equal((pattern & ~gs.Local(4)).layout(nodes, nodes + prompt, block_q=32, block_kv=64).expand(),
                          (pattern & ~gs.Local(4)).materialize(nodes, nodes + prompt))  # fmt: skip
    for block_q in GROUP_SIZES:
        assert np.array_equal(build_gather(pattern, nodes, nodes + prompt, block_q=block_q).expand(), mask)
    assert pattern.density(nodes, nodes + prompt) == pytest.approx(mask.mean())
    assert pattern == gs.Tree(torch.tensor(parents)) and hash(pattern) == hash(gs.Tree(parents))


@pytest.mark.parametrize("q_offset", [-30, -4, 0, 7, 61, 93, 100, 300])
def test_tree_in_a_cache_of_fixed_size(q_offset: int) -> None:
    """The prompt ends where the tree begins; what would be outside the cache is not there."""
    parents, K = [int(np.random.default_rng(t).integers(-1, t)) for t in range(40)], 100
    whole = np.pad(ancestors(parents, max(q_offset, 0)), ((0, 0), (0, K)))
    mask = whole[:, -min(q_offset, 0) :][:, :K]
    pattern = gs.Tree(parents)
    assert np.array_equal(pattern.materialize(40, K, q_offset), mask)
    assert np.array_equal(pattern.layout(40, K, block_q=32, block_kv=32, q_offset=q_offset).expand(), mask)
    for block_q in GROUP_SIZES:
        assert np.array_equal(build_gather(pattern, 40, K, block_q=block_q, q_offset=q_offset).expand(), mask)
    q, k = torch.randn(2, 40, 8), torch.randn(2, K, 8)
    given = torch.from_numpy(mask)
    torch.testing.assert_close(gs.attention(q, k, k, pattern, q_offset=q_offset), gs.attention(q, k, k, given))


def test_tree_refuses() -> None:
    with pytest.raises(ValueError, match=r"parents\[t\] must be in \[-1, t\), got parents\[1\] = 1"):
        gs.Tree([-1, 1])
    with pytest.raises(ValueError, match="at least one node"):
        gs.Tree([])
    with pytest.raises(ValueError, match="Tree has 3 nodes, needs Q=4"):
        gs.Tree([-1, 0, 0]).materialize(4, 4)


def shuffled(graph: gs.CSR) -> gs.CSR:
    """The same graph with its nodes numbered at random."""
    nodes = graph.num_keys
    number = np.random.default_rng(4).permutation(nodes)
    rows = np.repeat(np.arange(nodes), np.diff(graph.indptr))
    return gs.CSR._from_pairs(number[rows], number[graph.indices], nodes, nodes)


def test_reordering_brings_neighbours_together_and_undoes_itself() -> None:
    pytest.importorskip("scipy")
    from gossamer.testing.graphs import proximity_graph

    graph = shuffled(proximity_graph((3, 3, 2), 1.2))
    ordered = graph.reordered()
    N = graph.num_keys
    assert np.array_equal(ordered.materialize(N, N), graph.materialize(N, N)) and ordered != graph
    before, after = (build_gather(p, N, N, block_q=16).stats.gathered for p in (graph, ordered.inner))
    assert after < 0.7 * before
    q, k, v = (torch.randn(2, 2, N, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = []
    for pattern in (graph, ordered):
        out, lse = gs.attention(q, k, v, pattern, return_lse=True)
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
        results.append([out, lse, *gradients])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*results, strict=True))
    single = gs.attention(q[0, 0], k[0, 0], v[0, 0], ordered)
    assert torch.allclose(single, results[0][0][0, 0], atol=1e-12)
    explained = gs.explain(q, k, v, ordered)
    assert explained.density == pytest.approx(len(graph.indices) / N**2)
    assert str(explained) == str(gs.explain(q, k, v, ordered.handle)) and "rows of a reordered graph" in str(explained)
    with pytest.raises(ValueError, match="alibi_slopes must be None with a reordered pattern"):
        gs.attention(q, k, v, ordered, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="as many rows as keys, got 1 and 3"):
        gs.CSR([0, 1], [2], 3).reordered()


def test_an_order_is_kept_through_compositions() -> None:
    pytest.importorskip("scipy")
    from gossamer.testing.graphs import proximity_graph

    graph = shuffled(proximity_graph((3, 3, 2), 1.2))
    ordered, N = graph.reordered(), graph.num_keys
    near, far = gs.SlidingWindow(0), gs.Predicate(lambda i, j: (i + j) % 3 > 0)
    many = [
        (ordered | near, graph | near),
        (near | ordered, near | graph),
        (ordered & far, graph & far),
        (~gs.Causal() & ordered, ~gs.Causal() & graph),
        (gs.CSR([*range(N + 1)], range(N), N) | ordered, graph | near),
        (ordered | (ordered & far), graph),
        ((ordered | gs.Dilated(1, 1, 7)) & ~far | gs.Longformer(0, (5,)),
         (graph | gs.Dilated(1, 1, 7)) & ~far | gs.Longformer(0, (5,))),
    ]  # fmt: skip
    q, k, v = (torch.randn(1, 2, N, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for joined, plain in many:
        assert isinstance(joined, ReorderedCSR) and np.array_equal(joined.order, ordered.order)
        assert np.array_equal(joined.materialize(N, N), plain.materialize(N, N))
        results = []
        for pattern in (joined, plain):
            out, lse = gs.attention(q, k, v, pattern, return_lse=True)
            kept = torch.where(lse.isinf(), 0.0, lse).sum()
            results.append([out, lse, *torch.autograd.grad(out.square().sum() + kept, (q, k, v))])
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*results, strict=True))
    before, after = (build_gather(p, N, N, block_q=16).stats.gathered for p in (graph | near, (ordered | near).inner))
    assert after < 0.7 * before
    assert ordered | near == near | ordered != ordered | gs.CSR([*range(N + 1)], range(N), N)
    apart = [gs.attention(q, k, v, p, merge="lse") for p in (ordered | near, graph | near)]
    assert torch.allclose(*apart, atol=1e-12)
    assert not torch.allclose(apart[0], gs.attention(q, k, v, gs.SlidingWindow(0) | ordered), atol=1e-3)
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    tiles_alone = replace(blocked.capability, gathers=())
    with mock.patch.object(type(blocked), "capability", tiles_alone):
        forget_all()
        for pattern in (ordered, ordered | near):
            assert "CSR.reordered()" not in str(gs.explain(q, k, v, pattern))
        assert "CSR.reordered()" in str(gs.explain(q, k, v, graph))
    forget_all()


def test_what_an_order_cannot_be_kept_through_is_refused() -> None:
    pytest.importorskip("scipy")
    N = 20_000
    ring = gs.CSR.from_edge_index(np.stack([np.arange(N), (np.arange(N) * 7 + 1) % N]), N)
    ordered, other = ring.reordered(), gs.CSR([*range(N + 1)], range(N), N).reordered()
    for refused, message in (
        (lambda: ~ordered, r"~ of CSR\(20000x20000, .*\.reordered\(\) would lose its order.* take ~ of the CSR"),
        (lambda: gs.Causal() & ~ordered, "would lose its order"),
        (lambda: gs.PerHead([ordered, ring]), r"patterns must not hold CSR.*\.reordered\(\): .* Give the CSR pattern"),
        (lambda: gs.PerBatch([ordered]), r"patterns must not hold CSR.*\.reordered\(\)"),
        (lambda: ordered | gs.PerHead([gs.Causal()] * 2), r"a pattern that is joined with CSR.* must be one that all"),
        (
            lambda: ordered & gs.PerBatch([gs.Causal()] * 2),
            r"joined with CSR.* must be one that all batch elements and",
        ),
        (lambda: ordered | other, r"two orders: .*CSR\.from_pattern\(joined, 20000, 20000\)\.reordered\(\)"),
        (lambda: gs.Causal() | ordered, r"must keep at most 67108864 pairs to be listed; Causal\(\) keeps more"),
        (lambda: ordered | (gs.Causal() | gs.Dilated(3, 0, 9)), "keeps more"),
        (lambda: ordered | gs.Tree([-1]), "Tree has 1 nodes, needs Q=20000"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


def test_any_pattern_becomes_a_list() -> None:
    from tests.patterns.test_patterns import DEFINITIONS

    for Q, K, q_offset in ((150, 150, None), (70, 200, None), (200, 70, 3), (40, 40, -9)):
        for pattern, _ in DEFINITIONS.values():
            listed = gs.CSR.from_pattern(pattern, Q, K, q_offset)
            assert type(listed) is gs.CSR
            assert np.array_equal(listed.materialize(Q, K), pattern.materialize(Q, K, q_offset))
    with pytest.raises(ValueError, match="pattern must be one that all batch elements and query heads share"):
        gs.CSR.from_pattern(gs.PerHead([gs.Causal(), gs.Dense()]), 9, 9)
    with pytest.raises(ValueError, match=r"pattern must be one that .* got None"):
        gs.CSR.from_pattern(None, 9, 9)
    for dense in (gs.Causal(), gs.Causal() | gs.Dilated(3, 0, 9)):
        with pytest.raises(ValueError, match="pattern must keep at most 2147483647 pairs to be listed"):
            gs.CSR.from_pattern(gs.Dense() & dense, 2**17, 2**17)


def test_a_plan_takes_the_gather_layout_for_a_graph() -> None:
    pytest.importorskip("triton")
    from gossamer.plan.advice import ways
    from gossamer.plan.plan import Plan
    from gossamer.plan.problem import Problem
    from gossamer.plan.table import load
    from gossamer.testing.graphs import random_graph
    from gossamer.torch.planning import select_layout

    def plan_for(N: int, dtype: str) -> Plan:
        problem = Problem(1, 2, 2, N, N, 64, 64, dtype, "cuda", sm=90)
        return Plan(problem, (load("triton"),), ())  # type: ignore[arg-type]

    def layout_of(pattern: gs.Pattern, N: int, dtype: str) -> object:
        return select_layout(plan_for(N, dtype), pattern, 0, torch.device("cpu")).layout

    graph, window = random_graph(20000, 8), gs.SlidingWindow(300)
    for dtype in ("bfloat16", "float32"):
        layout = layout_of(graph, 20000, dtype)
        assert isinstance(layout, GatherLayout) and layout.block_q == 1 and layout.device == torch.device("cpu")
        assert layout_of(graph, 20000, dtype) is layout
        assert isinstance(layout_of(window, 4000, dtype), gs.BlockLayout)
    plan = Plan(Problem(1, 2, 2, 20000, 20000, 64, 64, "bfloat16", "cuda", sm=90), (load("triton"),), ())  # type: ignore[arg-type]
    found = dict(ways(plan, graph, 0))
    assert next(iter(found)) == "triton gather 1" and "triton 64 x 64" in found
    assert found["triton 128 x 128"] > 10 * found["triton gather 1"]
    assert list(dict(ways(plan, gs.SlidingWindow(4000), 0))) == ["triton 128 x 128"]


def test_neighbours_are_gathered_by_hopper() -> None:
    pytest.importorskip("triton")
    from gossamer.plan.advice import ways
    from gossamer.plan.plan import Plan
    from gossamer.plan.problem import Problem
    from gossamer.plan.table import load
    from gossamer.testing.graphs import proximity_graph

    def best(backward: bool, D: int) -> str:
        problem = Problem(1, 2, 2, 2**14, 2**14, D, D, "bfloat16", "cuda", sm=90, backward=backward)
        plan = Plan(problem, (load("hopper"), load("triton")), ())
        found = dict(ways(plan, proximity_graph((5, 5, 4), 2.5), 0))
        return min(found, key=lambda name: found[name])

    assert {best(backward, D) for backward in (False, True) for D in (64, 128)} == {"hopper gather 64"}
    assert best(False, 192) == best(True, 192) == "triton gather 16"
