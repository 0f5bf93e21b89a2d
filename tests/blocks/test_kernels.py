"""The kernels of `topk_blocks`, against the operations of torch that define it.

`BLOCK_CASES=400 TRITON_INTERPRET=1 pytest tests/blocks/test_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.blocks import SelectedBlocks
from gossamer.blocks import api as blocks
from gossamer.blocks import lists as block_lists
from gossamer.blocks import operator as block_operator
from gossamer.memo import Memo
from tests.blocks.test_topk_blocks import case
from tests.support.host_reads import nothing_waits
from tests.support.processes import INTERPRETING, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

from gossamer.blocks.triton import launch

CASES = int(os.environ.get("BLOCK_CASES", "8" if INTERPRETING else "16"))
TYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
interprets = pytest.mark.skipif(not INTERPRETING, reason="interprets")


def by_operations(q: Tensor, k: Tensor, **options: Any) -> SelectedBlocks:
    """The definition, whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "choose", block_lists.by_operations)
        patch.setattr(blocks, "takes", lambda *_: False)
        patch.setattr(blocks, "known", Memo())
        return gs.topk_blocks(q, k, **options)


def by_kernels(q: Tensor, k: Tensor, **options: Any) -> SelectedBlocks:
    """The kernels, on a CPU as well."""

    def choose(*arguments: Any) -> block_lists.Taken:
        indices, covered = launch.choose_blocks(*arguments)
        assert indices.dtype == torch.int32 and covered.dtype == torch.float32
        return block_lists.Taken(indices, covered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "choose", choose)
        patch.setattr(blocks, "known", Memo())
        return gs.topk_blocks(q, k, **options)


def check(q: Tensor, k: Tensor, options: dict[str, Any], exact: bool) -> None:
    """Exact: scores have no rounding, so that all is equal but the last bits of shares."""
    found, wanted = by_kernels(q, k, **options), by_operations(q, k, **options)
    limit = 1e-5 if exact else 1e-3
    torch.testing.assert_close(found.covered, wanted.covered, atol=limit, rtol=0, equal_nan=True)
    if exact:
        assert torch.equal(found.indices, wanted.indices)
        return
    sets = [x.indices.sort(-1).values for x in (found, wanted)]
    same = (sets[0] == sets[1]).all(-1)
    assert same.float().mean() > 0.9 or int((~same).sum()) <= 1


@interprets
@pytest.mark.parametrize("layout", ["bhnd", "bshd"])
@pytest.mark.parametrize("score", ["mean", "bound"])
def test_repeated_calls_choose_by_other_numbers(score: Any, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a key is written down, and the next ones run that alone."""
    monkeypatch.setattr(blocks, "takes", lambda *_: True)
    monkeypatch.setattr(blocks, "known", Memo())
    ran: list[Any] = []
    choose = launch.choose_blocks
    monkeypatch.setattr(launch, "choose_blocks", lambda *given: (ran.append(given), choose(*given))[1])
    shape = (1, 2, 150, 16) if layout == "bhnd" else (1, 150, 2, 16)
    for seed in range(2):
        torch.manual_seed(seed)
        q, k = (torch.randn(shape) for _ in range(2))
        for given in ((q, k), (q, q)):  # one tensor is a key of its own
            options = {"causal": True, "topk": 2, "local": 1, "first": 0, "score": score, "layout": layout}
            found, wanted = gs.topk_blocks(*given, **options), by_operations(*given, **options)
            assert torch.equal(found.indices, wanted.indices)
            torch.testing.assert_close(found.covered, wanted.covered, atol=1e-5, rtol=0)
    assert len(ran) == 2


@interprets
@pytest.mark.parametrize("part", range(4))
def test_random_cases(part: int) -> None:
    for seed in range(part, CASES, 4):
        draw = random.Random(seed)
        exact = seed // 4 % 2 == 0
        q, k, _, options = case(draw, draw.choice(TYPES), exact)
        if q.dtype == torch.bfloat16 and options["score"] == "bound":
            q, k = q.half(), k.half()  # the interpreter has no products of bfloat16
        if draw.random() < 0.3:
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        if draw.random() < 0.2:
            q, k = (torch.stack([x, x], -1)[..., 0] for x in (q, k))
        with pytest.MonkeyPatch.context() as patch:
            if draw.random() < 0.4:
                patch.setattr(launch, "MOST_SCORES", draw.randrange(1, 40))  # a few blocks of queries at a time
            try:
                check(q, k, options, exact)
            except AssertionError as error:
                error.add_note(f"seed {seed}: {tuple(q.shape)}, {tuple(k.shape)}, {q.dtype}, {options}")
                raise


@interprets
@pytest.mark.parametrize(
    ("D", "block", "per", "score", "dtype"),
    [
        (1, 64, "head", "bound", torch.float16), (40, 128, "group", "bound", torch.float16),
        (160, 64, "head", "bound", torch.float16), (40, 64, "group", "bound", torch.float32),
        (1, 128, "group", "mean", torch.bfloat16), (96, 64, "head", "mean", torch.float16),
        (256, 64, "group", "mean", torch.bfloat16),
    ],
)  # fmt: skip
def test_head_sizes_and_groups(D: int, block: int, per: str, score: str, dtype: torch.dtype) -> None:
    q, k = (torch.randint(-2, 3, (1, H, 3 * block, D)).to(dtype) for H in (4, 2))
    options = {"causal": True, "topk": 2, "score": score, "per": per, "block_size": block, "scale": 0.5}
    check(q, k, options | {"local": 1, "first": 0}, exact=True)


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinities are subtracted
@pytest.mark.parametrize("score", ["mean", "bound"])
def test_numbers_that_are_not_finite(score: str) -> None:
    """NaN is the largest score, infinities are where they belong, both zeros are one number."""
    for seed in range(3):
        draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
        q, k = (torch.randint(-2, 3, (1, 2, 640, 4), generator=g).float() for _ in range(2))
        for x, wrong in ((k, math.nan), (k, math.inf), (k, -math.inf), (q, draw.choice([math.nan, math.inf, 1.0]))):
            x[0, 0, draw.randrange(640), draw.randrange(4)] = wrong
        k[0, 1, 64:128], k[0, 1, 192:256] = -0.0, 0.0
        check(q, k, {"causal": False, "topk": 4, "score": score, "local": 1, "first": 0, "scale": 1.0}, exact=True)


@interprets
def test_what_is_always_kept_is_before_what_is_not_finite() -> None:
    q, k = torch.ones(1, 1, 640, 4), torch.ones(1, 1, 640, 4)
    k[0, 0, :320] = math.nan
    options: dict[str, Any] = {"causal": True, "topk": 3, "local": 2, "first": 1}
    for choose in (by_kernels, by_operations):
        assert choose(q, k, **options).indices[0, 0, 9].tolist() == [0, 8, 9]


@interprets
def test_many_blocks_and_long_lists() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-2, 3, (1, 1, N, 2), generator=g).float() for N in (70, 64 * 2100))
    for topk in (1024, 100):
        check(q, k, {"causal": False, "topk": topk, "scale": 0.25}, exact=True)


COMPILE = """
import sys
from gossamer.blocks.triton import choose_kernel, score_kernels
from gossamer.kernels.relaunch import PLAIN, Pointer, compiled_for, parameters
from gossamer.kernels.triton.config import SHARED_MEMORY
sm = int(sys.argv[1])
def made(kernel, warps, kind="bfloat16", **values):
    types = dict.fromkeys(("q_means", "k_means", "scores", "covered"), "float32")
    types |= {"keys": "int64", "indices": "int32"}
    types |= dict.fromkeys(("q", "k", "least", "most"), kind)
    values |= dict.fromkeys(("scale", "top_p"), 0.5)
    signature = [
        field(*(PLAIN for _ in field._fields)) if field
        else Pointer(types[name], True) if name in types
        else values.get(name, PLAIN)
        for name, field in parameters(kernel).items()
    ]
    compiled = compiled_for(kernel, signature, {"num_warps": warps, "enable_fp_fusion": True}, sm)
    assert compiled.metadata.shared <= SHARED_MEMORY[sm], (kernel, values, compiled.metadata.shared)
    return compiled.asm["ptx"]
for kind, D, block in (("bfloat16", 128, 64), ("float16", 256, 128), ("float32", 80, 128)):
    sizes = block, D, 1 << (D - 1).bit_length()
    made(score_kernels.mean_kernel, 4, kind, FORM=score_kernels.MeanForm(2, *sizes))
    made(score_kernels.extremes_kernel, 4, kind, **dict(zip(("BLOCK", "D", "DP"), sizes)))
    made(score_kernels.mean_score_kernel, 4, kind, FORM=score_kernels.ScoreForm(True, *sizes, 16, 64, 64, "ieee"))
    form = score_kernels.BoundForm(2, True, kind != "float32", *sizes, 16, 128 if D == 128 else 64)
    made(score_kernels.bound_kernel, block // 16, kind, FORM=form)
for columns, held, warps in ((512, 64, 1), (16384, 2048, 16)):
    form = choose_kernel.ChoiceForm(True, True, 64, columns, held)
    ptx = made(choose_kernel.choose_kernel, warps, FORM=form).splitlines()
    at = [i for i, line in enumerate(ptx) if "st.global" in line and "b64" in line]
    read = min(i for i, line in enumerate(ptx) if "ld.global" in line and "b64" in line)
    # What other threads wrote is read, behind a barrier.
    assert any("bar" in line for line in ptx[max(at) : read])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, *more(90)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
@pytest.mark.parametrize("part", range(2))
def test_in_interpreter(part: int) -> None:
    tests = [f"test_random_cases[{i}]" for i in (0, 1)] if part else []
    in_interpreter(__file__, *(tests or ["test_random_cases[2]", "test_random_cases[3]", *OTHERS]))


OTHERS = [
    "test_repeated_calls_choose_by_other_numbers[mean-bshd]",
    "test_head_sizes_and_groups",
    "test_numbers_that_are_not_finite",
    "test_what_is_always_kept_is_before_what_is_not_finite",
    "test_many_blocks_and_long_lists",
]


@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiler_sees_one_operator() -> None:
    """And its shapes, without a GPU: whether kernels or operations choose is decided when it runs."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def choose(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        chosen = gs.topk_blocks(q, k, causal=True, topk=4, top_p=0.5, score="bound", per="group")
        return chosen.indices, chosen.covered

    with FakeTensorMode():
        q, k = (torch.empty(1, H, N, 8, device="cuda") for H, N in ((4, 300), (2, 500)))
        results = [choose(q, k), torch.compile(choose, fullgraph=True, backend=keep)(q, k)]
    for indices, covered in results:
        assert indices.shape == (1, 2, 5, 4) and indices.dtype == torch.int32 and indices.is_cuda
        assert covered.shape == (1, 2, 5) and covered.dtype == torch.float32
    called = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.gossamer.choose_blocks.default) == 1


class TestOnGPU:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("seed", range(40))
    def test_random(self, seed: int) -> None:
        draw = random.Random(seed)
        exact = seed % 2 == 0
        q, k, _, options = case(draw, draw.choice(TYPES), exact)
        assert block_operator.takes(q.cuda(), 4, 4)
        found, wanted = gs.topk_blocks(q.cuda(), k.cuda(), **options), gs.topk_blocks(q, k, **options)
        limit = 1e-5 if exact else 1e-3
        torch.testing.assert_close(found.covered.cpu(), wanted.covered, atol=limit, rtol=0)
        if exact:
            assert torch.equal(found.indices.cpu(), wanted.indices)

    def test_what_stays_on_operations(self) -> None:
        q, k = (torch.randn(1, 1, 256, 8, device="cuda") for _ in range(2))
        assert not block_operator.takes(q.double(), 4, 4)
        assert not block_operator.takes(q, launch.MOST_BLOCKS + 1, 4)
        assert not block_operator.takes(q, launch.MOST_BLOCKS, launch.MOST_LISTED + 1)
        assert gs.topk_blocks(q.double(), k.double(), causal=True, topk=3).indices.is_cuda

    @pytest.mark.parametrize("score", ["mean", "bound"])
    def test_steps_wait_for_nothing_and_graphs_follow_what_changes(self, score: Any) -> None:
        """Forward and backward of attention on what is chosen in the step; deterministic."""
        x = [torch.randn(1, 4, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        dout = torch.randn_like(x[0])

        def step() -> tuple[Tensor, ...]:
            chosen = gs.topk_blocks(*x[:2], causal=True, topk=6, top_p=0.9, score=score)
            out = gs.attention(*x, chosen, deterministic=True)
            return chosen.indices, chosen.covered, out.detach(), *torch.autograd.grad(out, x, dout)

        step()
        torch.cuda.synchronize()
        with nothing_waits():
            first = step()
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))
        graph, held = captured(step)
        for _ in range(20):
            with torch.no_grad():
                for y in x:
                    y.copy_(torch.randn_like(y))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(held, step(), strict=True))

    @pytest.mark.filterwarnings("ignore")  # of torch's compiler
    def test_compiled(self) -> None:
        def choose(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            chosen = gs.topk_blocks(q, k, causal=True, topk=5, score="bound", per="group")
            return chosen.indices, chosen.covered

        q, k = (torch.randn(2, H, 1000, 80, device="cuda", dtype=torch.float16) for H in (6, 2))
        for a, b in zip(torch.compile(choose, fullgraph=True)(q, k), choose(q, k), strict=True):
            assert torch.equal(a, b)
