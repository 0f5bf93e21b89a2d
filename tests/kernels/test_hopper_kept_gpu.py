"""The Hopper backward that keeps dS, on a GPU against the float64 oracle, with NaN in all memory before it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.launch import backward
from gossamer.kernels.hopper.launch.kept import PAIR, kept
from gossamer.layouts import from_dense
from gossamer.patterns import BlockMask, Causal, SlidingWindow
from gossamer.torch.bind import bind
from tests.support import launches
from tests.support.hopper_backward_cases import ON_HOPPER, Call, prepare

pytestmark = ON_HOPPER


def draw(seed: int, D: int, tile: tuple[int, int]) -> tuple[Call, int | None]:
    """A random call, and what splits its rows and columns."""
    r = np.random.default_rng(seed)
    B, G, ratio = (int(x) for x in r.integers(1, 4, 3))
    Q, K = (int(x) for x in r.integers(1, 900, 2))
    blocks = {"block_q": tile[0], "block_kv": tile[1]}
    lead = (int(r.choice([1, 1, B])), int(r.choice([1, 1, G * ratio])))
    kind = r.integers(4)
    if kind == 0:
        mask = r.random((*lead, Q, K)) < 0.2
        mask[..., :130, :300], mask[..., 320:400, :], mask[..., 70:200] = True, False, False
        layout = from_dense(mask, **blocks)
    elif kind == 1:
        layout = BlockMask(r.random((*lead, -(-Q // 64), -(-K // 64))) < r.random(), 64).layout(Q, K, **blocks)
    elif kind == 2:
        layout = SlidingWindow(int(r.integers(0, 300)), int(r.integers(0, 50))).layout(Q, K, **blocks)
    else:
        layout = Causal().layout(Q, K, **blocks)
    more: dict[str, object] = {"softcap": 5.0} if r.random() < 0.2 else {}
    if r.random() < 0.3:
        more["key_lengths"] = torch.from_numpy(r.integers(0, K + 1, B)).cuda()
    if r.random() < 0.2:
        more["sink_logits"] = torch.from_numpy(r.normal(size=G * ratio)).float().cuda()
    dtype = torch.float16 if r.random() < 0.25 else torch.bfloat16
    swap, dlse = (bool(x) for x in r.random(2) < 0.5)
    call = prepare(layout, B, G * ratio, G, D, dtype=dtype, swap=swap, with_dlse=dlse, **more)  # type: ignore[arg-type]
    return call, int(r.integers(1, 4)) if r.random() < 0.3 else None


# Draws in bfloat16 without lengths and soft caps, which share their kernels.
PLAIN = (0, 1, 2, 5, 7, 8, 9, 10)
# Other calls have kernels of their own, for which head sizes and tiles take turns.
FLOAT16, CAPPED, LENGTHS = (3, 11), (4,), (6,)
SEEDS: dict[tuple[int, tuple[int, int]], tuple[int, ...]] = {
    (80, (64, 64)): (*PLAIN, *LENGTHS),
    (96, (192, 128)): (*PLAIN, *CAPPED),
    (96, (128, 128)): (*PLAIN, *LENGTHS),
    (128, (64, 64)): (*PLAIN, *CAPPED),
    (128, (128, 128)): (*PLAIN, *FLOAT16),
    (192, (64, 64)): (*PLAIN, *FLOAT16),
    (256, (128, 128)): (*PLAIN, *CAPPED),
}


@pytest.mark.parametrize(("D", "tile"), SEEDS, ids=str)
def test_kept(D: int, tile: tuple[int, int]) -> None:
    for seed in SEEDS[D, tile]:
        try:
            check_kept(seed, D, tile)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def check_kept(seed: int, D: int, tile: tuple[int, int]) -> None:
    """All heads at once and a few at a time are the same bits in every run; so are dK and dV without."""
    call, split = draw(seed, D, tile)
    p = replace(call.problem, deterministic=True)
    whole = kept(p, call.layout, 2**40)
    found = call.run(split=split, deterministic=True, most_kept=2**40)
    call.check(found)
    for heads in () if whole is None else (whole.heads, -(-whole.heads // 2), 1):
        assert whole is not None
        most = 2 * PAIR * (whole.pairs // whole.heads) * heads
        again = call.run(split=split, deterministic=True, most_kept=most)
        call.check(again)
        if split is not None and call.layout.rows.lead == (1, 1):  # else other columns may be cut
            assert all(torch.equal(a, b) for a, b in zip(found[:3], again[:3], strict=True))


@pytest.mark.parametrize(("D", "tile"), [(128, (64, 64)), (96, (192, 128)), (256, (128, 128))])
def test_graph_and_repeats(D: int, tile: tuple[int, int]) -> None:
    """More items than blocks, heads in turn in the same memory, replayed by a graph: the same bits every time."""
    pattern = BlockMask(np.random.default_rng(0).random((125, 125)) < 0.2, 32)
    call = prepare(pattern.layout(4000, 4000, block_q=tile[0], block_kv=tile[1]), 1, 8, 4, D)
    given = {name: getattr(call, name) for name in ("dout", "q", "k", "v", "out", "lse")}
    scoring, p = Scoring(call.terms.scale, call.terms.q_offset), replace(call.problem, deterministic=True)
    whole = kept(p, call.layout, 2**40)
    assert whole is not None
    made = launches.prepared(backward, p, call.layout, "backward", scoring, given, most_kept=whole.bytes // 2)
    assert [step.kernel.name for step in made.launch.steps].count("kept") == 2
    run = bind(made, call.q.device, tuple(given))
    want = run(*given.values())
    call.check(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*given.values())
    for _ in range(30):
        for x in got:
            x.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
