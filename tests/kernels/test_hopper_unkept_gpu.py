"""NaN and infinities in rows that keep nothing and in keys that nothing attends reach no result of a Hopper kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper.launch import backward, forward, gather
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout, build_gather
from gossamer.patterns import Causal, SlidingWindow
from gossamer.plan.problem import Problem
from tests.support import launches, thorough
from tests.support.hopper import PROCESSORS
from tests.support.hopper_backward_cases import ON_HOPPER

pytestmark = ON_HOPPER
POISONS = math.nan, math.inf, -math.inf
NAMES = "out", "lse", "dq", "dk", "dv", "dsink"
LAYOUTS: dict[str, Callable[..., BlockLayout]] = {
    # The first rows keep nothing.
    "more queries": lambda **blocks: Causal().layout(700, 300, **blocks),
    # The first keys are not attended, nor are the last.
    "late window": lambda **blocks: SlidingWindow(100).layout(300, 900, q_offset=450, **blocks),
    "rows without bits": lambda **blocks: scattered((1, 1), **blocks),
    # Keys in tiles of bits, and around the windows of a few queries.
    "keys without bits": lambda **blocks: scattered((2, 1), keys=True, **blocks),
    "few queries": lambda **blocks: SlidingWindow(40).layout(20, 700, q_offset=300, **blocks),
    "by head": lambda **blocks: scattered((1, 4), **blocks),
}  # fmt: skip


def scattered(lead: tuple[int, int], keys: bool = False, **blocks: int) -> BlockLayout:
    """Tiles of bits, of which some rows keep nothing, and some keys nothing attends if that is asked for."""
    mask = np.random.default_rng(0).random((*lead, 300, 400)) < 0.2
    mask[..., :100, :300], mask[..., 120:160, :], mask[..., 250, :] = True, False, False
    if keys:
        mask[..., 5::7], mask[..., 130:190] = False, False
    return from_dense(mask, **blocks)


def results(
    layout: Any, problem: Problem, terms: Terms, given: tuple[Tensor, ...], split: int | None
) -> list[tuple[Tensor, ...]]:
    """Results of both directions, in each way in which dQ is made; the first adds it in any order."""
    q, k, v, dout, dlse = given
    if isinstance(layout, GatherLayout):
        of_layout = gather, problem, layout, terms
        out, lse = launches.forward(*of_layout, q, k, v, split=split)
        return [(out, lse, *launches.backward(*of_layout, dout, dlse, q, k, v, out, lse, split=split))]
    out, lse = launches.forward(forward, problem, layout, terms, q, k, v, split=split)
    found: list[tuple[Tensor, ...]] = []
    for more in ({}, {"deterministic": True}, {"deterministic": True, "most_kept": 0}):
        p = replace(problem, deterministic="deterministic" in more)
        given, kept = (dout, dlse, q, k, v, out, lse), more.get("most_kept")
        gradients = launches.backward(backward, p, layout, terms, *given, split=split, most_kept=kept)
        found.append((out, lse, *gradients))
    return found


def check(
    layout: Any, B: int, H: int, G: int, D: int, *, keep: Tensor | None = None, dtype: torch.dtype = torch.bfloat16,
    split: int | None = None, lengths: tuple[int, ...] | None = None, **more: Any,
) -> None:  # fmt: skip
    """Compare the bits of results with those of zeros in the poisoned places."""
    Q, K = layout.Q, layout.K
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, heads, n, D, generator=g, device="cuda").to(dtype)
        for heads, n in ((H, Q), (G, K), (G, K), (H, Q))
    )
    dlse = torch.randn(B, H, Q, generator=g, device="cuda")
    ends = None if lengths is None else torch.tensor(lengths, device="cuda", dtype=torch.int32)
    if keep is None:
        keep = torch.from_numpy(np.ascontiguousarray(layout.expand())).cuda().expand(B, H, Q, K)
    if ends is not None:
        keep = keep & (torch.arange(K, device="cuda") < ends[:, None, None, None])
    rows, keys = ~keep.any(-1), ~keep.any(2).view(B, G, H // G, K).any(2)
    assert rows.any() or keys.any()
    terms = Terms(scale=D**-0.5, q_offset=K - Q, key_lengths=ends, **more)
    problem = Problem(B, H, G, Q, K, D, D, str(dtype).removeprefix("torch."), "cuda", 90, PROCESSORS)
    on = layout.to("cuda")

    def run(value: float) -> list[tuple[Tensor, ...]]:
        of_rows = [x.masked_fill(rows[..., None], value) for x in (q, dout)]
        of_keys = [x.masked_fill(keys[..., None], value) for x in (k, v)]
        # The lse of a row that keeps nothing is its sink.
        given = (
            of_rows[0],
            *of_keys,
            of_rows[1],
            dlse if terms.sink_logits is not None else dlse.masked_fill(rows, value),
        )
        return results(on, problem, terms, given, split)

    zeros = run(0.0)
    assert all(x.isfinite().all() for name, x in zip(NAMES, zeros[0], strict=False) if name != "lse")
    for value in POISONS:
        for way, (want, found) in enumerate(zip(zeros, run(value), strict=True)):
            for name, clean, poisoned in zip(NAMES, want, found, strict=False):
                if name == "dq" and way == 0 and len(zeros) > 1:
                    assert (poisoned - clean).abs().max() <= 2**-7 * clean.abs().max(), (value, name, way)
                else:
                    assert torch.equal(poisoned, clean), (value, name, way)


@pytest.mark.parametrize("name", LAYOUTS)
def test_block_layouts(name: str) -> None:
    check(LAYOUTS[name](block_q=128, block_kv=128), 2, 4, 2, 128)


@pytest.mark.parametrize("name", LAYOUTS)
def test_key_lengths(name: str) -> None:
    """Ends within a tile, at the edge of one, after one key, and before all."""
    layout = LAYOUTS[name](block_q=128, block_kv=128)
    for ends in ((layout.K - 90, 0), (256, 1), (layout.K, 65)):
        check(layout, 2, 4, 2, 128, lengths=ends)


# Lengths have kernels of their own, of which every second call has some.
@pytest.mark.parametrize(
    ("D", "tile", "dtype", "lengths"),
    [(64, (192, 128), torch.bfloat16, None), (128, (64, 64), torch.float16, None),
     (256, (128, 128), torch.bfloat16, (250, 65)), *thorough.more((96, (128, 128), torch.float16, (250, 65)))],
    ids=str,
)  # fmt: skip
def test_other_kernels(D: int, tile: tuple[int, int], dtype: torch.dtype, lengths: tuple[int, int] | None) -> None:
    for name in ("more queries", "late window", "by head"):
        layout = LAYOUTS[name](block_q=tile[0], block_kv=tile[1])
        check(layout, 2, 4, 2, D, dtype=dtype, lengths=lengths)


def test_split_and_softcap() -> None:
    """Parts of rows and columns that are cut."""
    for name in ("more queries", "by head"):
        layout = LAYOUTS[name](block_q=128, block_kv=128)
        check(layout, 2, 4, 2, 128, split=2)
        check(layout, 2, 4, 2, 128, lengths=(250, 65), split=2)
    check(LAYOUTS["by head"](block_q=128, block_kv=128), 2, 4, 2, 128, softcap=5.0)


def test_sinks() -> None:
    """The lse of a row that keeps nothing is its sink: its gradient is that of the sink."""
    sinks = torch.tensor([0.5, -2.0, 20.0, 3.0], device="cuda")
    for name in ("more queries", "rows without bits"):
        check(LAYOUTS[name](block_q=128, block_kv=128), 2, 4, 2, 128, sink_logits=sinks)
    check(LAYOUTS["more queries"](block_q=128, block_kv=128), 2, 4, 2, 128, sink_logits=sinks, lengths=(250, 0))


@pytest.mark.parametrize("D", [64, 128])
def test_gathered_keys(D: int) -> None:
    """Groups of 64 rows, of which some keep nothing; keys that nobody lists, and those past a length."""
    mask = np.random.default_rng(0).random((1, 4, 300, 400)) < 0.05
    mask[..., 40:60, :], mask[..., 128:192, :], mask[..., 100:140], mask[..., ::7] = False, False, False, False
    layout = build_gather(gs.BlockMask(mask, 1), 300, 400, block_q=64)
    keep = torch.from_numpy(mask).cuda().expand(2, -1, -1, -1)
    for more in ({}, {"lengths": (230, 1)}, {"sink_logits": torch.randn(4, device="cuda")}):
        check(layout, 2, 4, 2, D, keep=keep, **more)


@pytest.mark.parametrize("R", [3, 16])
def test_lists_that_heads_share(R: int) -> None:
    """Queries without a list, in groups with others that have one, and keys that nobody lists."""
    g = torch.Generator(device="cuda").manual_seed(0)
    Q, K, D = 77, 300, 128
    lists = torch.randint(50, 250, (1, 1, Q, 40), generator=g, device="cuda", dtype=torch.int32)
    lists[:, :, ::3], lists[:, :, 20:30] = -1, -1
    listed = torch.where(lists < 0, K, lists)[0, 0].long()
    keep = torch.zeros(Q, K + 1, dtype=torch.bool, device="cuda").scatter_(1, listed, True)[:, :K]
    rows, keys = ~keep.any(1)[:, None], ~keep.any(0)[:, None]
    q, dout = (torch.randn(1, R, Q, D, generator=g, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 1, K, D, generator=g, device="cuda").bfloat16() for _ in range(2))

    def run(value: float) -> list[Tensor]:
        leaves = [q.masked_fill(rows, value), k.masked_fill(keys, value), v.masked_fill(keys, value)]
        leaves = [x.requires_grad_() for x in leaves]
        out = gs.attention(leaves[0], leaves[1], leaves[2], gs.Indices(lists), implementation="hopper")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.masked_fill(rows, value))]

    zeros = run(0.0)
    for value in POISONS:
        for name, clean, poisoned in zip(("out", "dq", "dk", "dv"), zeros, run(value), strict=True):
            if name in ("out", "dq"):
                assert torch.equal(poisoned, clean), (value, name)
            else:  # added in any order
                assert (poisoned - clean).abs().max() <= 2**-7 * clean.abs().max(), (value, name)


def attended(
    pattern: Any, rows: Tensor, keys: Tensor, D: int, deterministic: bool, value: float, **more: Any
) -> list[Tensor]:
    """out and gradients of a call whose structure is made on the device; `value` where nothing is kept."""
    g = torch.Generator(device="cuda").manual_seed(0)
    N = len(rows)
    q, k, v, dout = (torch.randn(2, heads, N, D, generator=g, device="cuda").bfloat16() for heads in (4, 2, 2, 4))
    leaves = [q.masked_fill(rows[:, None], value), *(x.masked_fill(keys[:, None], value) for x in (k, v))]
    leaves = [x.requires_grad_() for x in leaves]
    options: dict[str, Any] = {"implementation": "hopper", "deterministic": deterministic} | more
    out = gs.attention(leaves[0], leaves[1], leaves[2], pattern, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.masked_fill(rows[:, None], value))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_made_on_the_device(D: int, deterministic: bool) -> None:
    """Padding before and behind packed documents, and before the keys of sequences."""
    N, at = 700, torch.arange(700, device="cuda")
    edges = torch.tensor([70, 200, 333, 520], device="cuda")
    outside = (at < 70) | (at >= 520)
    starts = torch.full((2,), 200, device="cuda")
    cases: tuple[tuple[Any, Tensor, Tensor, dict[str, Any]], ...] = (
        (gs.DocumentIds.from_cu_seqlens(edges, N) & gs.Causal(), outside, outside, {}),
        (gs.Causal(), at < 200, at < 200, {"key_starts": starts}),
        (gs.SlidingWindow(50), (at < 200) | (at > 499), (at < 200) | (at >= 450),
         {"key_starts": starts, "key_lengths": starts + 250}),
    )  # fmt: skip
    for pattern, rows, keys, more in cases:
        zeros = attended(pattern, rows, keys, D, deterministic, 0.0, **more)
        assert all(x.isfinite().all() for x in zeros)
        for value in POISONS:
            found = attended(pattern, rows, keys, D, deterministic, value, **more)
            for name, clean, poisoned in zip(("out", "dq", "dk", "dv"), zeros, found, strict=True):
                if name == "dq" and not deterministic:
                    assert (poisoned - clean).abs().max() <= 2**-7 * clean.abs().max(), (pattern, value)
                else:
                    assert torch.equal(poisoned, clean), (pattern, value, name)
