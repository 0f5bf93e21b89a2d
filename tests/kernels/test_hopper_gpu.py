"""The Hopper kernels on a GPU against the float64 oracle, with NaN in every output before a kernel runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.hopper import IMPLEMENTATION
from gossamer.kernels.hopper.launch import forward as launch
from gossamer.kernels.reference import oracle
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BigBird, BlockMask, Causal, Dense, Pattern, SlidingWindow
from gossamer.plan.problem import Problem
from gossamer.torch.bind import bind
from tests.support import launches
from tests.support.hopper import ON_HOPPER, PROCESSORS

pytestmark = ON_HOPPER
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def inputs(B: int, H: int, G: int, Q: int, K: int, D: int, E: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((B, H, Q, D), (B, G, K, D), (B, G, K, E))
    return [torch.randn(s, generator=g, device="cuda").to(dtype) for s in shapes]


def compare(
    layout: BlockLayout,
    B: int,
    H: int,
    G: int,
    D: int,
    E: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    split: int | None = None,
    swap: bool = False,
    scale: float | None = None,
    repeat: int = 1,
    key_lengths: list[int] | None = None,
    **terms: object,
) -> None:
    Q, K = layout.Q, layout.K
    q, k, v = inputs(B, H, G, Q, K, D, E or D, dtype)
    if swap:  # (B, N, H, D) storage
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    lengths = None if key_lengths is None else torch.tensor(key_lengths, device="cuda")
    scale = D**-0.5 if scale is None else scale
    given = Terms(scale=scale, q_offset=K - Q, key_lengths=lengths, **terms)  # type: ignore[arg-type]
    keep = torch.from_numpy(np.ascontiguousarray(layout.expand())).cuda()
    if lengths is not None:
        keep = keep & (torch.arange(K, device="cuda") < lengths[:, None, None, None])
    want, want_lse = oracle(q, k, v, keep, given)
    p = Problem(B, H, G, Q, K, D, E or D, str(dtype).removeprefix("torch."), "cuda", 90, PROCESSORS)
    on, first = layout.to("cuda"), None
    for _ in range(repeat):
        out, lse = launches.forward(launch, p, on, given, q, k, v, split=split)
        if first is None:
            first = out
            finite = torch.isfinite(want_lse)
            assert torch.isfinite(out).all()
            assert torch.equal(lse == -math.inf, want_lse == -math.inf)
            assert (out.double() - want).abs().max() <= 4 * UNIT[dtype] * want.abs().max().clamp_min(1e-3)
            assert not finite.any() or (lse.double() - want_lse)[finite].abs().max() <= 1e-3
        assert torch.equal(first, out)


def build(pattern: Pattern, Q: int, K: int, D: int = 128, tile: tuple[int, int] | None = None) -> BlockLayout:
    block_q, block_kv = tile or IMPLEMENTATION.tile(Problem(1, 1, 1, Q, K, D, D, "bfloat16", "cuda", 90))
    return pattern.layout(Q, K, block_q=block_q, block_kv=block_kv)


def scattered(shape: tuple[int, ...], share: float, D: int, tile: tuple[int, int] | None = None) -> BlockLayout:
    rng = np.random.default_rng(0)
    mask = rng.random(shape) < share
    mask[..., 40:60, :] = False
    mask[..., :100, :300] = True
    block_q, block_kv = tile or IMPLEMENTATION.tile(Problem(1, 1, 1, 1024, 1024, D, D, "bfloat16", "cuda", 90))
    return from_dense(mask, block_q=block_q, block_kv=block_kv)


@pytest.mark.usefixtures("poison")
class TestForward:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
    def test_head_sizes_and_mask_modes(self, D: int, dtype: torch.dtype) -> None:
        compare(build(Dense(), 512, 512, D), 1, 2, 2, D, dtype=dtype)
        compare(build(Causal(), 300, 777, D), 2, 4, 2, D, dtype=dtype)
        compare(build(SlidingWindow(300, 90), 1000, 1000, D), 2, 2, 1, D, dtype=dtype)
        compare(scattered((1, 3, 391, 517), 0.3, D), 2, 3, 3, D, dtype=dtype)
        compare(scattered((2, 1, 200, 900), 0.05, D), 2, 2, 1, D, dtype=dtype)

    @pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
    def test_small_tiles(self, D: int) -> None:
        tile = (64, 64)
        blocks = BlockMask(np.random.default_rng(0).random((30, 30)) < 0.3, 64)
        compare(build(Causal(), 300, 777, D, tile), 2, 4, 2, D)
        compare(build(SlidingWindow(300, 90), 1000, 1000, D, tile), 2, 2, 1, D, dtype=torch.float16)
        compare(build(BigBird(64), 2000, 2000, D, tile), 1, 2, 2, D)
        compare(build(blocks, 1900, 1900, D, tile), 1, 8, 8, D, repeat=20)
        compare(scattered((1, 3, 391, 517), 0.3, D, tile), 2, 3, 3, D)
        compare(scattered((2, 1, 200, 900), 0.05, D, tile), 2, 2, 1, D, split=3)

    @pytest.mark.parametrize("tile", [(64, 64), None], ids=str)
    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_key_lengths(self, D: int, tile: tuple[int, int] | None) -> None:
        lengths = [0, 1, 64, 333, 500]
        compare(build(Dense(), 300, 500, D, tile), 5, 2, 2, D, key_lengths=lengths)
        compare(build(Causal(), 300, 500, D, tile), 5, 2, 1, D, key_lengths=lengths)
        compare(build(SlidingWindow(100, 40), 500, 500, D, tile), 5, 2, 2, D, key_lengths=lengths)
        compare(scattered((1, 2, 391, 500), 0.3, D, tile), 5, 2, 2, D, key_lengths=lengths)
        compare(scattered((5, 1, 391, 500), 0.3, D, tile), 5, 2, 2, D, key_lengths=lengths, split=2)

    @pytest.mark.parametrize("sizes", [(40, 24), (77, 33), (64, 128), (192, 128), (1, 1)], ids=str)
    def test_padded_sizes(self, sizes: tuple[int, int]) -> None:
        compare(build(Causal(), 500, 500, max(sizes)), 1, 2, 2, *sizes)

    @pytest.mark.parametrize("split", [1, 2, 3, 5])
    def test_split_rows(self, split: int) -> None:
        sinks = torch.tensor([0.5, -2.0], device="cuda")
        layout = scattered((1, 1, 640, 1664), 0.2, 128)
        compare(layout, 2, 2, 1, 128, split=split)
        compare(layout, 2, 2, 2, 128, split=split, sink_logits=sinks)

    @pytest.mark.parametrize("Q", [1, 5, 64, 65, 129])
    def test_few_queries(self, Q: int) -> None:
        compare(build(Causal(), Q, 3000), 2, 4, 2, 128)
        compare(build(Causal(), Q, 3000), 2, 4, 2, 128, split=4)
        compare(build(Causal(), Q, 3000, 64), 2, 4, 4, 64, split=4)

    @pytest.mark.parametrize("Q", [1, 7, 16])
    def test_query_heads_as_rows(self, Q: int) -> None:
        """Few queries of grouped heads share a tile, unless a head's own layout or sink forbids it."""
        for tile in ((64, 64), (128, 128)):
            compare(build(Causal(), Q, 3000, 128, tile), 2, 8, 2, 128, split=4)
            compare(build(SlidingWindow(200), Q, 3000, 128, tile), 2, 8, 2, 128, key_lengths=[2900, 3000])
            compare(scattered((2, 1, Q, 900), 0.3, 128, tile), 2, 8, 2, 128, swap=True)
            compare(scattered((2, 8, Q, 900), 0.3, 128, tile), 2, 8, 2, 128)
            compare(build(Causal(), Q, 3000, 128, tile), 2, 8, 2, 40, 33)  # rows of out are padded, then copied
            compare(build(Causal(), Q, 300, 128, tile), 1, 4, 2, 128, sink_logits=torch.arange(4.0, device="cuda"))

    def test_score_terms(self) -> None:
        layout = build(Causal(), 500, 500)
        compare(layout, 1, 2, 2, 128, softcap=5.0)
        compare(layout, 1, 2, 2, 128, scale=-0.1)
        compare(layout, 1, 2, 2, 128, scale=0.0)
        compare(
            scattered((1, 1, 300, 300), 0.1, 128), 1, 2, 2, 128, sink_logits=torch.tensor([0.5, -2.0], device="cuda")
        )

    @pytest.mark.parametrize("D", [64, 128])
    def test_scores_that_grow(self, D: int) -> None:
        """The reference of the exponentials is raised many times, and by far; powers are too large for float32."""
        compare(build(Causal(), 600, 600, D), 1, 2, 2, D, scale=2.0)
        compare(build(Dense(), 300, 1500, D), 1, 2, 2, D, scale=5.0)
        compare(build(Dense(), 300, 1500, D), 1, 2, 2, D, scale=40.0, dtype=torch.float16)
        compare(build(SlidingWindow(200), 600, 600, D), 1, 2, 2, D, scale=20.0)

    def test_strides(self) -> None:
        compare(build(Causal(), 500, 500), 2, 3, 3, 128, swap=True)

    @pytest.mark.parametrize(("D", "E", "split"), [(128, 128, None), (64, 64, 2), (40, 23, None)])
    def test_into_views(self, D: int, E: int, split: int | None) -> None:
        """Every third position of a tensor is a problem of its own: inputs and results are views, the rest is kept."""
        layout = build(SlidingWindow(300), 500, 500, max(D, E)).to("cuda")
        whole = [x.transpose(1, 2).contiguous() for x in inputs(1, 2, 2, 1500, 1500, D, E, torch.bfloat16)]
        q, k, v = (x[:, 1::3].transpose(1, 2) for x in whole)
        out, lse = torch.full((1, 1500, 2, E), math.nan, dtype=q.dtype, device="cuda"), torch.zeros(1, 1500, 2)
        lse = lse.cuda()
        p = Problem(1, 2, 2, 500, 500, D, E, "bfloat16", "cuda", 90, PROCESSORS)
        terms = Terms(scale=0.1, q_offset=0)
        into = out[:, 1::3].transpose(1, 2), lse[:, 1::3].transpose(1, 2)
        got = launches.forward(launch, p, layout, terms, q, k, v, split=split, into=into)
        want = launches.forward(launch, p, layout, terms, *(x.contiguous() for x in (q, k, v)), split=split)
        assert got[0] is into[0] and got[1] is into[1]
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        for i in (0, 2):
            assert out[:, i::3].isnan().all() and (lse[:, i::3] == 0).all()

    def test_no_race(self) -> None:
        blocks = BlockMask(np.random.default_rng(0).random((32, 32)) < 0.3, 128)
        compare(build(SlidingWindow(700), 4000, 4000), 1, 8, 4, 128, repeat=50)
        compare(build(blocks, 4000, 4000), 2, 4, 4, 64, repeat=50)

    def test_made_on_the_device(self) -> None:
        """A layout that has no copy on the host: its items are made on the device."""
        layout = build(SlidingWindow(200), 1000, 1000)
        q, k, v = inputs(2, 2, 2, 1000, 1000, 128, 128, torch.bfloat16)
        p = Problem(2, 2, 2, 1000, 1000, 128, 128, "bfloat16", "cuda", 90, PROCESSORS)
        terms = Terms(scale=0.1, q_offset=0)
        made = BlockLayout(layout.to("cuda").rows)
        found = [launches.forward(launch, p, where, terms, q, k, v) for where in (made, layout.to("cuda"))]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_graph(self) -> None:
        layout = build(SlidingWindow(200), 3000, 3000).to("cuda")
        q, k, v = inputs(1, 8, 8, 3000, 3000, 128, 128, torch.bfloat16)
        p = Problem(1, 8, 8, 3000, 3000, 128, 128, "bfloat16", "cuda", 90, PROCESSORS)
        given = {"q": q, "k": k, "v": v}
        made = launches.prepared(launch, p, layout, "forward", Scoring(0.1, 0), given)
        call = bind(made, q.device, tuple(given))
        want = call(q, k, v)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(q, k, v)[0]
        for _ in range(3):
            got.zero_()
            graph.replay()
            assert torch.equal(got, want)
