"""The Hopper backward on a GPU against the float64 oracle, with NaN in every output before a kernel runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper import IMPLEMENTATION
from gossamer.kernels.hopper.launch import backward
from gossamer.kernels.reference import oracle
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BigBird, BlockMask, Causal, Dense, PerHead, SlidingWindow
from gossamer.plan.capability import reasons
from gossamer.plan.problem import Problem
from gossamer.torch.bind import bind
from tests.support import launches, thorough
from tests.support.hopper_backward_cases import (
    ON_HOPPER,
    TILES,
    TYPES,
    build,
    compare,
    prepare,
    repeats,
    scattered,
    small,
)

pytestmark = ON_HOPPER


class TestBackward:
    @pytest.mark.parametrize(("D", "dtype"), TYPES, ids=str)
    def test_head_sizes_and_mask_modes(self, D: int, dtype: torch.dtype) -> None:
        for layout, *heads in small(D):
            compare(layout, *heads, D, dtype=dtype)

    @pytest.mark.parametrize("sizes", [(40, 24), (77, 33), (64, 128), (192, 128), (1, 1)], ids=str)
    def test_padded_sizes(self, sizes: tuple[int, int]) -> None:
        compare(build(Causal(), 500, 500, max(sizes)), 1, 2, 2, *sizes)

    @pytest.mark.parametrize("split", [1, 2, 5])
    def test_split_columns(self, split: int) -> None:
        compare(scattered((1, 1, 1664, 640), 0.2), 2, 4, 2, 128, split=split)
        compare(scattered((1, 4, 900, 300), 0.2, 64), 2, 4, 2, 64, split=split)

    def test_global_tokens(self) -> None:
        """Two key tiles that every query keeps: split without being asked to be."""
        compare(build(BigBird(128), 9000, 9000), 1, 2, 1, 128)

    @pytest.mark.parametrize("Q", [1, 5, 64, 65, 129])
    def test_few_queries(self, Q: int) -> None:
        compare(build(Causal(), Q, 3000), 2, 4, 2, 128)

    def test_another_pattern_for_each_head(self) -> None:
        pattern = PerHead([SlidingWindow(31), Causal(), Dense(), BigBird(32)])
        compare(build(pattern, 500, 500), 2, 4, 2, 128)
        compare(build(pattern, 500, 500), 1, 4, 1, 128)

    @pytest.mark.parametrize("more", [{"softcap": 5.0}, {"scale": -0.1}, {"scale": 0.0}, {"scale": 2.0}], ids=str)
    def test_score_terms(self, more: dict[str, float]) -> None:
        compare(build(Causal(), 500, 500), 1, 2, 2, 128, **more)
        compare(scattered((1, 1, 300, 300), 0.1, 64), 1, 2, 2, 64, **more)

    def test_sinks_and_lse(self) -> None:
        """The gradient of the sinks, and that of lse: both enter by the row terms."""
        sinks = torch.tensor([0.5, -2.0, -9.0, 3.0], device="cuda")
        layout = scattered((1, 1, 300, 300), 0.1)
        call = prepare(layout, 2, 4, 2, 128, with_dlse=True, sink_logits=sinks)
        assert call.dlse is not None
        leaf = sinks.double().requires_grad_()
        mask = torch.from_numpy(np.ascontiguousarray(layout.expand())).cuda()
        out, lse = oracle(call.q, call.k, call.v, mask, call.terms._replace(sink_logits=leaf))
        loss = (out * call.dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * call.dlse).sum()
        (want,) = torch.autograd.grad(loss, [leaf])
        # The kernels read `out` in bfloat16, each number off by up to 2^-9 of it: the deviation of a row's share.
        weight = torch.where(lse.isinf(), 0.0, (leaf[None, :, None] - lse).exp()).detach()
        rounding = 2**-9 * (weight**2 * ((out * call.dout) ** 2).sum(-1)).sum((0, 2)).sqrt().detach()
        for deterministic in (False, True):
            *found, dsink = call.run(deterministic=deterministic)
            call.check(tuple(found))
            assert ((dsink - want).abs() <= 1e-3 + 3 * rounding).all()

    @pytest.mark.parametrize("D", [64, 128, *thorough.more(96, 256)])
    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_tiles(self, tile: tuple[int, int], D: int) -> None:
        """Every tile that the capability lists: mask modes, ragged edges, layouts by head, split columns, no tiles.

        Soft caps and the other type have kernels of their own: one narrow and one wide head size has them.
        """
        problem = Problem(1, 4, 2, 700, 700, D, D, "bfloat16", "cuda", 90, backward=True, tile=tile)
        if why := reasons(problem, IMPLEMENTATION.capability):
            pytest.skip(why[0])
        blocks = {"block_q": tile[0], "block_kv": tile[1]}
        mask = np.random.default_rng(0).random((1, 4, 500, 777)) < 0.3
        mask[..., :100, :300], mask[..., 40:60, :], mask[..., 128:320] = True, False, False
        for pattern in (SlidingWindow(150, 40), BigBird(64), Causal(), ~Dense(), PerHead([Causal(), Dense()] * 2)):
            compare(pattern.layout(640, 640, **blocks), 1, 4, 2, D)
        compare(from_dense(mask, **blocks), 2, 4, 2, D, with_dlse=True)
        if D in (96, 256):
            compare(from_dense(mask, **blocks), 1, 4, 2, D, softcap=5.0, dtype=torch.float16)
        compare(Causal().layout(333, 900, **blocks), 1, 4, 2, D, split=3)
        compare(SlidingWindow(300).layout(5, 900, **blocks), 1, 4, 2, D)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_no_race_with_tiles(self, tile: tuple[int, int]) -> None:
        """As `test_no_race`, with more items than blocks and items without steps between them."""
        pattern = BlockMask(np.random.default_rng(0).random((125, 125)) < 0.1, 32)
        call = prepare(pattern.layout(4000, 4000, block_q=tile[0], block_kv=tile[1]), 1, 8, 4, 64)
        repeats(call)

    @pytest.mark.parametrize("D", [64, 128, *thorough.more(96, 192, 256)])
    def test_key_lengths(self, D: int) -> None:
        """Ends within a tile of each mask mode, at the edge of one, after the first key, and before it.

        In every tile for one head size.
        """
        for layout, B, H, G in small(D):
            for ends in ((layout.K - 90, 0), (128, 1), (300, layout.K), (65, 64)):
                lengths = torch.tensor(ends[:B], device="cuda")
                compare(layout, B, H, G, D, key_lengths=lengths, with_dlse=True)
        lengths = torch.tensor([450, 70], device="cuda", dtype=torch.int32)
        compare(scattered((1, 1, 1664, 640), 0.2, D), 2, 4, 2, D, split=2, key_lengths=lengths)
        for tile in TILES if D == 96 else ():
            problem = Problem(1, 4, 2, 700, 700, D, D, "bfloat16", "cuda", 90, backward=True, tile=tile)
            if not reasons(problem, IMPLEMENTATION.capability):
                for pattern in (BigBird(32), SlidingWindow(150, 40)):
                    layout = pattern.layout(700, 700, block_q=tile[0], block_kv=tile[1])
                    compare(layout, 2, 4, 2, D, key_lengths=lengths)

    @pytest.mark.parametrize("seed", range(24))
    def test_windows_of_any_width(self, seed: int) -> None:
        """Windows whose edges fall anywhere in a tile: a warpgroup leaves out steps of which its keys keep nothing."""
        draw = np.random.default_rng(seed)
        D = int(draw.choice([64, 96, 128, 128, 128]))
        Q, K = (int(n) for n in draw.integers(1, 1500, 2))
        left, right = (int(n) for n in draw.choice([0, 1, 31, 63, 64, 65, 127, 128, 129, 500], 2))
        B, G, ratio = (int(n) for n in draw.integers(1, 3, 3))
        more: dict[str, object] = {"softcap": 5.0} if draw.random() < 0.2 else {}
        if draw.random() < 0.3:
            more["key_lengths"] = torch.from_numpy(draw.integers(0, K + 1, B)).cuda()
        split = int(draw.integers(1, 4)) if draw.random() < 0.3 else None
        compare(build(SlidingWindow(left, right), Q, K, D), B, G * ratio, G, D, split=split, with_dlse=True, **more)

    def test_strides(self) -> None:
        compare(build(Causal(), 500, 500), 2, 3, 3, 128, swap=True)
        compare(build(Causal(), 500, 500, 64), 2, 4, 2, 64, swap=True, dtype=torch.float16)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_into(self, deterministic: bool) -> None:
        """Gradients into strided views, and into one that TMA cannot address; nothing beside them is written."""
        call = prepare(build(SlidingWindow(100), 500, 500), 2, 4, 2, 128)
        shapes = [x.shape for x in (call.q, call.k, call.v)]
        for pad in (8, 3):
            whole = [
                torch.full((B, N, 2, h, D + pad), 7.0, dtype=torch.bfloat16, device="cuda") for B, h, N, D in shapes
            ]
            into = tuple(x[:, :, 0, :, :-pad].transpose(1, 2) for x in whole)
            found = call.run(into=into, deterministic=deterministic)
            assert all(a is b for a, b in zip(found, into, strict=False))
            call.check(found)
            assert all((x[:, :, 1] == 7).all() and (x[..., -pad:] == 7).all() for x in whole)

    def test_nothing_to_attend(self) -> None:
        call = prepare(build(~Dense(), 200, 200), 1, 2, 2, 128)
        assert all((x == 0).all() for x in call.run()[:3])

    def test_deterministic_bits(self) -> None:
        blocks = BlockMask(np.random.default_rng(0).random((16, 16)) < 0.3, 128)
        for layout in (
            build(SlidingWindow(700), 2000, 2000),
            build(blocks, 2000, 2000),
            build(BigBird(64), 2000, 2000),
        ):
            call = prepare(layout, 1, 4, 2, 128)
            first = call.run(deterministic=True, split=3)
            for _ in range(3):
                again = call.run(deterministic=True, split=3)
                assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))

    def test_no_race(self) -> None:
        """dK and dV are the same bits every time; dQ, by unordered additions, the same to float32 rounding."""
        for layout, *sizes in (
            (build(SlidingWindow(700), 4000, 4000), 1, 8, 4, 128),
            (build(Causal(), 2000, 2000, 64), 2, 4, 4, 64),
        ):
            call = prepare(layout, *sizes)
            repeats(call)

    def test_made_on_the_device(self) -> None:
        """A layout that has no copy on the host: its items are made on the device.

        No dS is kept for lists that only the device knows, so dQ is added in another order than where it is.
        """
        layouts = build(SlidingWindow(200), 1000, 1000), scattered((1, 4, 500, 600), 0.1)
        for layout in layouts:
            known = prepare(layout, 2, 4, 2, 128)
            made = known._replace(layout=BlockLayout(known.layout.rows))
            first, second = (call.run(deterministic=True, most_kept=0) for call in (known, made))
            assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))
            _, *keeping = known.run(deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(keeping[:2], second[1:3], strict=True))
            made.check(second)
            made.check(made.run())

    def test_graph(self) -> None:
        call = prepare(build(SlidingWindow(200), 3000, 3000), 1, 8, 8, 128)
        given = {name: getattr(call, name) for name in ("dout", "q", "k", "v", "out", "lse")}
        scoring, p = Scoring(call.terms.scale, call.terms.q_offset), replace(call.problem, deterministic=True)
        made = launches.prepared(backward, p, call.layout, "backward", scoring, given)
        run = bind(made, call.q.device, tuple(given))
        want = run(*given.values())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(*given.values())
        for _ in range(3):
            for x in got:
                x.zero_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
