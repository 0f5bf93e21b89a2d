"""The blocked implementation on a CPU: blocks of rows, what torch's flash operator does at its edges, and its calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.blocked import bmm, flash, flash_tiles
from gossamer.kernels.blocked.intervals import IntervalBlocks, Intervals, blocks_of, clipped, intervals_of
from gossamer.memo import forget_all
from gossamer.plan.problem import Problem

DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 7, 400))
PATTERNS = {
    "dense": gs.Dense(), "causal": gs.Causal(), "window": gs.SlidingWindow(37), "both sides": gs.SlidingWindow(70, 9),
    "local": gs.Local(32), "local causal": gs.Local(32) & gs.Causal(), "wide": gs.SlidingWindow(200, 300),
    "documents": gs.Document(DOCUMENTS) & gs.Causal(),
    "one position": gs.SlidingWindow(0), "mask": gs.Causal(),
}  # fmt: skip


def expanded(blocks: list[IntervalBlocks], Q: int, K: int) -> np.ndarray:
    """How often blocks have each pair."""
    times = np.zeros((Q, K), np.int64)
    for x in blocks:
        for n in range(x.n):
            i, j = np.arange(x.rows)[:, None], np.arange(x.keys)
            kept = j <= i if x.causal else np.ones((x.rows, x.keys), bool)
            if x.bounds is not None:
                lo, hi = x.bounds
                kept = (j >= lo[:, None]) & (j < hi[:, None])
            row, key = x.row + n * x.step, x.key + n * x.move
            times[row : row + x.rows, key : key + x.keys] += kept
    return times


def blocks(pattern: gs.Pattern, Q: int, K: int, backward: bool, heads: int = 64) -> list[IntervalBlocks]:
    found = intervals_of(pattern.layout(Q, K, block_q=64, block_kv=64))
    assert found is not None
    (one,) = found
    made = blocks_of(one, backward, heads)
    assert made is not None
    return made


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("Q", [400, 131])
def test_blocks_have_every_pair_once(name: str, backward: bool, Q: int) -> None:
    pattern, K = PATTERNS[name], Q if name in ("documents", "mask") else 400
    if name == "documents":
        pattern = gs.Document(DOCUMENTS[:Q]) & gs.Causal()
    elif name == "mask":
        pattern = gs.BlockMask(np.tri(-(-Q // 16), dtype=bool), 16)
    for heads in (1, 64):
        made = blocks(pattern, Q, K, backward, heads)
        kept = pattern.materialize(Q, K)
        assert (expanded(made, Q, K) == kept).all()
        for length in (0, 1, 95, 399, 400):
            left = [y for x in made for y in clipped(x, length)]
            assert (expanded(left, Q, K) == kept & (np.arange(K) < length)).all()


def test_rows_of_any_intervals() -> None:
    """Also of none, and where bounds jump."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        Q, K = rng.integers(1, 90), rng.integers(1, 90)
        lo = np.sort(rng.integers(0, K, Q))
        hi = np.maximum(np.sort(rng.integers(0, K + 1, Q)), lo)
        empty = rng.random(Q) < 0.1
        lo, hi = np.where(empty, 0, lo), np.where(empty, 0, hi)
        made = blocks_of(Intervals(lo, hi), False, 1)
        j = np.arange(K)
        if made is not None:
            assert (expanded(made, Q, K) == ((j >= lo[:, None]) & (j < hi[:, None]))).all()


def test_what_has_no_intervals() -> None:
    for pattern in (gs.BigBird(32), gs.SlidingWindow(9, sinks=4), gs.Dilated(3, 0, 4)):
        assert intervals_of(pattern.layout(640, 640, block_q=32, block_kv=32)) is None


def calls(run: Any) -> list[dict[str, Any]]:
    """The calls of the operator that `run` makes: the shapes of q and k, whether causal, and whether masked."""
    found = []

    def seen(original: Any, at: int) -> Any:
        def call(*arguments: Any, attn_mask: Tensor | None = None, **more: Any) -> Any:
            q, k, *rest = arguments[at:]
            found.append({"q": tuple(q.shape), "k": tuple(k.shape), "causal": rest[-1], "mask": attn_mask is not None})
            return original(*arguments, attn_mask=attn_mask, **more)

        return call

    patches = [
        mock.patch.object(module, name, seen(getattr(module, name), at))
        for module in (flash, flash_tiles)
        for name, at in (("flash", 0), ("flash_backward", 1))
    ]
    for patch in patches:
        patch.start()
    try:
        run()
    finally:
        for patch in patches:
            patch.stop()
    return found


def inputs(B: int, H: int, G: int, N: int, D: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, N, D), (B, G, N, D), (B, G, N, D)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2)])
@pytest.mark.parametrize(("pattern", "causal"), [(gs.Dense(), False), (gs.Causal(), True)])
def test_a_whole_problem_is_one_call_without_a_mask(pattern: gs.Pattern, causal: bool, H: int, G: int) -> None:
    x = inputs(2, H, G, 600)

    def run() -> None:
        out = gs.attention(*x, pattern)
        torch.autograd.grad(out.sum(), x)

    found = calls(run)
    assert len(found) == 2
    assert all(call["causal"] is causal and not call["mask"] for call in found)


@pytest.mark.parametrize("most", [1 << 40, 1 << 16])
@pytest.mark.parametrize(("H", "G"), [(4, 4), (8, 2), (2, 1)])
def test_a_window_is_a_few_calls_of_views(H: int, G: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "CHUNK_BYTES", most)
    x = inputs(2, H, G, 900)
    found = calls(lambda: gs.attention(*[y.detach() for y in x], gs.SlidingWindow(40)))
    assert all(call["k"][2] <= 96 for call in found)
    assert len(found) <= 12 or most == 1 << 16
    want = gs.attention(*x, gs.SlidingWindow(40), implementation="reference")
    got = gs.attention(*x, gs.SlidingWindow(40), implementation="blocked")
    for a, b in zip(
        (got, *torch.autograd.grad(got.square().sum(), x)), (want, *torch.autograd.grad(want.square().sum(), x)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


def test_a_group_of_heads_gathers_its_keys_once() -> None:
    x = [y.detach() for y in inputs(1, 8, 2, 512)]
    found = calls(lambda: gs.attention(*x, gs.BigBird(64)))
    assert found and all(call["q"][1] == 4 for call in found)


def test_lengths_read_no_key_behind_them() -> None:
    x = [y.detach() for y in inputs(3, 4, 4, 400)]
    for y in x[1:]:
        y[0, :, 70:] = torch.nan
        y[1, :, :] = torch.nan
    lengths = torch.tensor([70, 0, 400])
    for pattern in (gs.Dense(), gs.Causal(), gs.SlidingWindow(33)):
        out, lse = gs.attention(*x, pattern, key_lengths=lengths, return_lse=True)
        assert not out.isnan().any() and not lse.isnan().any()
        assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


OPERATOR_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", OPERATOR_TYPES, ids=str)
def test_the_operator_gives_0_where_a_mask_drops_a_row(dtype: torch.dtype) -> None:
    """Which the plans count on: out 0, an lse that is to be replaced, and gradients of 0 with an lse of +inf."""
    q, k, v, dout = (torch.randn(1, 2, 40, 8).to(dtype) for _ in range(4))
    mask = torch.zeros(1, 1, 40, 40, dtype=torch.promote_types(dtype, torch.float32))
    mask[:, :, 7], mask[:, :, :, :33] = -torch.inf, -torch.inf
    out, lse = flash.flash(q, k, v, 0.0, False, attn_mask=mask)
    assert (out[:, :, 7] == 0).all() and not lse.isnan().any()
    lse[:, :, 7] = torch.inf
    dq, dk, dv = flash.flash_backward(dout, q, k, v, out, lse, 0.0, False, attn_mask=mask)
    assert (dq[:, :, 7] == 0).all() and (dk[:, :, :33] == 0).all() and (dv[:, :, :33] == 0).all()
    assert not any(x.isnan().any() for x in (dq, dk, dv))


def test_what_the_operator_is_not_asked() -> None:
    p = Problem(B=1, H=1, G=1, Q=4, K=4, D=8, E=8, dtype="float32", device="cpu")
    terms = bmm.Terms(1.0, 0)
    assert flash.computes(p, terms)
    assert not any(flash.computes(replace(p, **{name: 0}), terms) for name in ("B", "Q", "K", "D", "E"))
    assert not flash.computes(replace(p, device="cuda"), terms)
    for wrong in ({"scale": 0.0}, {"scale": -1.0}, {"softcap": 2.0}, {"alibi_slopes": torch.ones(1)}):
        assert not flash.computes(p, terms._replace(**wrong))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Plans hold the sizes of chunks that a test has set."""
    forget_all()
    yield
    forget_all()
