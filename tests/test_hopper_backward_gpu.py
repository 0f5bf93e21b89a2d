"""The Hopper backward on a GPU against the float64 oracle, with NaN in every output before a kernel runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms, reasons
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.reference import oracle
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BigBird, BlockMask, Causal, Dense, Pattern, PerHead, SlidingWindow
from gossamer.testing import tolerance

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages())),
    pytest.mark.usefixtures("poison"),
]
NAMES = ("dq", "dk", "dv")
SIZES = (64, 80, 96, 128, 192, 256)
TILES = sorted(IMPLEMENTATION.capability.tiles or ())


class Call(NamedTuple):
    """The arguments of a backward, and its gradients in float64 and by plain attention in their own dtype."""

    problem: Problem
    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    layout: BlockLayout
    terms: Terms
    exact: list[Tensor]  # dq, dk, dv
    low: list[Tensor]

    def run(self, *, deterministic: bool = False, **options: object) -> tuple[Tensor, ...]:
        from gossamer.kernels.hopper.launch_backward import backward

        problem = Problem(**vars(self.problem) | {"deterministic": deterministic})
        return backward(problem, *self[1:10], **options)  # type: ignore[arg-type]

    def check(self, found: tuple[Tensor, ...]) -> None:
        for name, actual, exact, low in zip(NAMES, found, self.exact, self.low, strict=False):
            assert actual.shape == exact.shape and actual.dtype == self.q.dtype
            tolerance.check(name, actual, exact, low)


def prepare(
    layout: BlockLayout,
    B: int,
    H: int,
    G: int,
    D: int,
    E: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    swap: bool = False,
    scale: float | None = None,
    with_dlse: bool = False,
    **more: object,
) -> Call:
    from gossamer.kernels.hopper import launch

    Q, K, E = layout.Q, layout.K, E or D
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if swap else x

    q, k, v, dout = draw(B, H, Q, D), draw(B, G, K, D), draw(B, G, K, E), draw(B, H, Q, E)
    dlse = torch.randn((B, H, Q), generator=generator, device="cuda") if with_dlse else None
    terms = Terms(scale=D**-0.5 if scale is None else scale, q_offset=K - Q, **more)  # type: ignore[arg-type]
    mask = torch.from_numpy(np.ascontiguousarray(layout.expand())).cuda()

    def gradients(kind: torch.dtype, attend: object) -> list[Tensor]:
        leaves = [x.to(kind).detach().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*leaves, mask, terms)  # type: ignore[operator]
        loss = (out * dout).sum()
        if dlse is not None:
            loss = loss + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()
        return list(torch.autograd.grad(loss, leaves))

    exact, low = gradients(torch.float64, oracle), gradients(dtype, tolerance.plain)
    problem = Problem(B, H, G, Q, K, D, E, str(dtype).removeprefix("torch."), "cuda", 90)
    on = layout.to("cuda")
    out, lse = launch.forward(problem, q, k, v, on, terms)
    return Call(problem, dout, dlse, q, k, v, out, lse, on, terms, exact, low)


def compare(layout: BlockLayout, *sizes: int, split: int | None = None, **more: object) -> None:
    """Both modes of the backward against the oracle."""
    call = prepare(layout, *sizes, **more)  # type: ignore[arg-type]
    call.check(call.run(split=split))
    call.check(call.run(split=split, deterministic=True))


def build(pattern: Pattern, Q: int, K: int, D: int = 128) -> BlockLayout:
    block_q, block_kv = IMPLEMENTATION.tile(Problem(1, 1, 1, Q, K, D, D, "bfloat16", "cuda", 90, backward=True))
    return pattern.layout(Q, K, block_q=block_q, block_kv=block_kv)


def scattered(shape: tuple[int, ...], share: float, D: int = 128) -> BlockLayout:
    """Random pairs, with empty rows and columns and a region that is full."""
    mask = np.random.default_rng(0).random(shape) < share
    mask[..., :100, :300] = True
    mask[..., 40:60, :] = False
    mask[..., 70:90] = False
    block_q, block_kv = IMPLEMENTATION.tile(Problem(1, 1, 1, 1, 1, D, D, "bfloat16", "cuda", 90, backward=True))
    return from_dense(mask, block_q=block_q, block_kv=block_kv)


def small(D: int) -> Iterator[tuple[BlockLayout, int, int, int]]:
    """Every mask mode, ragged edges, grouped heads, layouts by head and by batch element."""
    yield build(Dense(), 512, 512, D), 1, 2, 2
    yield build(Causal(), 300, 777, D), 2, 4, 2
    yield build(SlidingWindow(300, 90), 1000, 1000, D), 2, 2, 1
    yield scattered((1, 4, 391, 517), 0.3, D), 2, 4, 2
    yield scattered((2, 1, 200, 900), 0.05, D), 2, 2, 1


def repeats(call: Call) -> None:
    """50 runs after one that is right: dk and dv have the same bits in all, and the sums of dq differ by rounding."""
    first = call.run()
    call.check(first)
    for _ in range(50):
        again = call.run()
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        assert (first[0].float() - again[0].float()).abs().max() <= 2**-7 * first[0].abs().max()


class TestPieces:
    """The kernels around the column kernel, each alone."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("E", [1, 33, 64, 96, 128, 200, 256])
    def test_row_terms(self, E: int, dtype: torch.dtype) -> None:
        from gossamer.kernels.hopper import compile as compiled
        from gossamer.kernels.hopper.config import padded
        from gossamer.kernels.hopper.launch import operand

        B, H, Q = 2, 3, 300
        out, dout = (operand(torch.randn(B, Q, H, E, device="cuda").to(dtype).transpose(1, 2)) for _ in range(2))
        lse, dlse = (
            torch.randn(B, Q, H, device="cuda").transpose(1, 2),
            torch.randn(B, H, 2 * Q, device="cuda")[..., ::2],
        )
        lse[:, 1, 5:9] = -torch.inf
        for zeroed, given in ((0, None), (padded(E), dlse)):
            rows = torch.empty(2, B, H, 384, device="cuda")
            sums = torch.empty(B, H, 6, 64 * max(1, zeroed), device="cuda")
            compiled.preprocess(str(dtype)[6:], padded(E), zeroed)(
                out, dout, lse, lse if given is None else given, rows, sums, int(given is not None)
            )
            delta = (out.double() * dout.double()).sum(-1) - (0.0 if given is None else given)
            empty = lse == -torch.inf
            torch.testing.assert_close(rows[0, :, :, :Q], torch.where(empty, torch.inf, lse * 1.4426950408889634))
            torch.testing.assert_close(rows[1, :, :, :Q], torch.where(empty, 0.0, delta).float(), rtol=1e-5, atol=1e-4)
            assert (rows[0, :, :, Q:] == torch.inf).all() and (rows[1, :, :, Q:] == 0).all()
            assert not zeroed or (sums == 0).all()

    @pytest.mark.parametrize("D", [1, 33, 64, 96, 128, 192, 256])
    def test_dq_from_its_sums(self, D: int) -> None:
        from gossamer.kernels.hopper import compile as compiled
        from gossamer.kernels.hopper.config import padded
        from gossamer.kernels.hopper.launch import empty

        B, H, Q, size = 2, 3, 300, padded(D)
        plain = torch.randn(B, H, 384, size, device="cuda")
        # (tile, warp, r, row, j, quad, c) to (tile, j, warp, row, quad, r, c): a warpgroup's accumulator.
        sums = plain.reshape(B, H, 6, 4, 2, 8, size // 8, 4, 2).permute(0, 1, 2, 6, 3, 5, 7, 4, 8)
        dq = empty(torch.empty(0, dtype=torch.bfloat16, device="cuda"), (B, H, Q, D))
        compiled.postprocess("bfloat16", size)(sums.reshape(B, H, 6, 64 * size).contiguous(), dq, 0.3)
        assert torch.equal(dq, (plain[:, :, :Q, :D] * 0.3).bfloat16())

    @pytest.mark.parametrize("D", [64, 128, 192])
    def test_parts_are_added_in_slot_order(self, D: int) -> None:
        from gossamer.kernels.hopper import compile as compiled

        # Tiles 0 and 2 of two heads, of 128 rows each, are split into 3 and 6 parts.
        parts = torch.randn(2 * 9, 128, D, device="cuda")
        split = [(head, tile, 9 * head + at, n) for head in range(2) for tile, at, n in ((0, 0, 3), (2, 3, 6))]
        merges = torch.tensor([(0, *fields, 0, 0, 0) for fields in split], dtype=torch.int32, device="cuda")
        result = torch.zeros(1, 2, 300, D, dtype=torch.bfloat16, device="cuda")
        compiled.sum_parts("bfloat16", D, 128)(result, parts, merges, 0.5)
        want = torch.zeros(1, 2, 384, D, device="cuda")
        for head, tile, first, count in split:
            for slot in range(first, first + count):
                want[0, head, 128 * tile : 128 * tile + 128] += parts[slot]
        assert torch.equal(result, (0.5 * want[:, :, :300]).bfloat16())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("D", SIZES)
    def test_dq_by_rows(self, D: int, dtype: torch.dtype) -> None:
        for layout, *heads in small(D):
            self.by_rows(prepare(layout, *heads, D, dtype=dtype, with_dlse=True))

    @pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 64), (192, 128)], ids=str)
    def test_dq_by_rows_of_other_tiles(self, tile: tuple[int, int]) -> None:
        """The forward is Triton's: it walks any tile."""
        from gossamer.kernels.triton.block import launch as triton

        for D in (64, 128):
            for pattern in (SlidingWindow(150, 40), BigBird(32), Causal()):
                call = prepare(build(pattern, 700, 700, D), 1, 4, 2, D)
                layout = pattern.layout(700, 700, block_q=tile[0], block_kv=tile[1]).to("cuda")
                out, lse = triton.forward(call.problem, call.q, call.k, call.v, layout, call.terms)
                self.by_rows(call._replace(layout=layout, out=out, lse=lse))

    def by_rows(self, call: Call, split: int | None = None) -> None:
        from gossamer.kernels.hopper import launch_backward
        from gossamer.kernels.rows import row_terms

        p = call.problem
        delta, lse = row_terms(call.dout, call.dlse, call.out, call.lse, torch.float32)
        rows = torch.stack([lse * launch_backward.LOG2E, delta]).contiguous()
        dq = torch.empty_like(call.q)
        launch_backward.query_gradient(p, call.q, call.k, call.v, call.dout, rows, call.layout, call.terms, dq, split)
        tolerance.check("dq", dq, call.exact[0], call.low[0])

    @pytest.mark.parametrize("split", [1, 3])
    def test_dq_by_split_rows(self, split: int) -> None:
        self.by_rows(prepare(scattered((1, 1, 640, 1664), 0.2), 2, 4, 2, 128), split)
        self.by_rows(prepare(build(Causal(), 5, 3000, 64), 2, 4, 2, 64), split)

    def test_dq_by_rows_of_score_terms(self) -> None:
        layout = build(Causal(), 500, 500)
        for more in ({"softcap": 5.0}, {"scale": -0.1}, {"scale": 0.0}, {"scale": 1.0}):
            self.by_rows(prepare(layout, 1, 2, 2, 128, **more))


class TestBackward:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("D", SIZES)
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
        out, lse = oracle(call.q, call.k, call.v, mask, replace(call.terms, sink_logits=leaf))
        loss = (out * call.dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * call.dlse).sum()
        (want,) = torch.autograd.grad(loss, [leaf])
        for deterministic in (False, True):
            *found, dsink = call.run(deterministic=deterministic)
            call.check(tuple(found))
            torch.testing.assert_close(dsink.double(), want, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("D", [64, 96, 128, 256])
    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_tiles(self, tile: tuple[int, int], D: int) -> None:
        """Every tile that the capability lists: mask modes, ragged edges, layouts by head, split columns, no tiles."""
        problem = Problem(1, 4, 2, 700, 700, D, D, "bfloat16", "cuda", 90, backward=True, tile=tile)
        if why := reasons(problem, IMPLEMENTATION.capability):
            pytest.skip(why[0])
        blocks = {"block_q": tile[0], "block_kv": tile[1]}
        mask = np.random.default_rng(0).random((1, 4, 500, 777)) < 0.3
        mask[..., :100, :300], mask[..., 40:60, :], mask[..., 128:320] = True, False, False
        for pattern in (SlidingWindow(150, 40), BigBird(64), Causal(), ~Dense(), PerHead([Causal(), Dense()] * 2)):
            compare(pattern.layout(640, 640, **blocks), 1, 4, 2, D)
        compare(from_dense(mask, **blocks), 2, 4, 2, D, with_dlse=True)
        compare(from_dense(mask, **blocks), 1, 4, 2, D, softcap=5.0, dtype=torch.float16)
        compare(Causal().layout(333, 900, **blocks), 1, 4, 2, D, split=3)
        compare(SlidingWindow(300).layout(5, 900, **blocks), 1, 4, 2, D)

    @pytest.mark.parametrize("tile", TILES, ids=str)
    def test_no_race_with_tiles(self, tile: tuple[int, int]) -> None:
        """As `test_no_race`, with more items than blocks and items without steps between them."""
        pattern = BlockMask(np.random.default_rng(0).random((125, 125)) < 0.1, 32)
        call = prepare(pattern.layout(4000, 4000, block_q=tile[0], block_kv=tile[1]), 1, 8, 4, 64)
        repeats(call)

    @pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
    def test_key_lengths(self, D: int) -> None:
        """Ends within a tile of each mask mode, at the edge of one, after the first key, and before it."""
        for layout, B, H, G in small(D):
            for ends in ((layout.K - 90, 0), (128, 1), (300, layout.K), (65, 64)):
                lengths = torch.tensor(ends[:B], device="cuda")
                compare(layout, B, H, G, D, key_lengths=lengths, with_dlse=True)
        lengths = torch.tensor([450, 70], device="cuda", dtype=torch.int32)
        compare(scattered((1, 1, 1664, 640), 0.2, D), 2, 4, 2, D, split=2, key_lengths=lengths)
        for tile in TILES:
            problem = Problem(1, 4, 2, 700, 700, D, D, "bfloat16", "cuda", 90, backward=True, tile=tile)
            if not reasons(problem, IMPLEMENTATION.capability):
                for pattern in (BigBird(32), SlidingWindow(150, 40)):
                    layout = pattern.layout(700, 700, block_q=tile[0], block_kv=tile[1])
                    compare(layout, 2, 4, 2, D, key_lengths=lengths)

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
        from gossamer.kernels.hopper import launch_backward

        for Q, K in ((0, 100), (100, 0)):
            q, k, v, dout = (torch.ones(1, 2, n, 64, dtype=torch.bfloat16, device="cuda") for n in (Q, K, K, Q))
            lse, sinks = torch.ones(1, 2, Q, device="cuda"), torch.ones(2, device="cuda")
            p, terms = Problem(1, 2, 2, Q, K, 64, 64, "bfloat16", "cuda", 90), Terms(0.1, 0, sink_logits=sinks)
            layout = build(Dense(), 100, 100).to("cuda")
            *found, dsink = launch_backward.backward(p, dout, lse, q, k, v, 0 * dout, lse, layout, terms)
            assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
            assert all((x == 0).all() for x in found)
            assert torch.equal(dsink, torch.full((2,), float(Q), device="cuda"))  # lse is the sink, and dlse 1
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
        """A layout that has no copy on the host: its items are made on the device."""
        layouts = build(SlidingWindow(200), 1000, 1000), scattered((1, 4, 500, 600), 0.1)
        for layout in layouts:
            call = prepare(layout, 2, 4, 2, 128)
            made = BlockLayout(call.layout.rows)
            first, second = call.run(deterministic=True), call._replace(layout=made).run(deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))
            call._replace(layout=made).check(call._replace(layout=made).run())

    def test_graph(self) -> None:
        call = prepare(build(SlidingWindow(200), 3000, 3000), 1, 8, 8, 128)
        want = call.run(deterministic=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call.run(deterministic=True)
        for _ in range(3):
            for x in got[:3]:
                x.zero_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
