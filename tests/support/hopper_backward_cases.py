"""Backward calls on a Hopper GPU, with their gradients by the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper import IMPLEMENTATION
from gossamer.kernels.hopper.launch import backward
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import Causal, Dense, Pattern, SlidingWindow
from gossamer.plan.problem import Problem
from gossamer.testing import tolerance
from tests.support import hopper, launches
from tests.support.hopper import PROCESSORS

ON_HOPPER = [*hopper.ON_HOPPER, pytest.mark.usefixtures("poison")]
NAMES = ("dq", "dk", "dv")
SIZES = (64, 80, 96, 128, 192, 256)
# The other type has kernels of its own, of the same code: a size of each kind.
TYPES = [*((D, torch.bfloat16) for D in SIZES), *((D, torch.float16) for D in (64, 128, 256))]
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
        problem = replace(self.problem, deterministic=deterministic)
        tensors = self.dout, self.dlse, self.q, self.k, self.v, self.out, self.lse
        return launches.backward(backward, problem, self.layout, self.terms, *tensors, **options)  # type: ignore[arg-type]

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
    Q, K, E = layout.Q, layout.K, E or D
    generator = torch.Generator(device="cuda").manual_seed(0)

    def laid(x: Tensor) -> Tensor:
        return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) if swap else x.to(dtype)

    def draw(*shape: int) -> Tensor:
        return laid(torch.randn(shape, generator=generator, device="cuda"))

    q, k, v, dout = draw(B, H, Q, D), draw(B, G, K, D), draw(B, G, K, E), draw(B, H, Q, E)
    dlse = torch.randn((B, H, Q), generator=generator, device="cuda") if with_dlse else None
    terms = Terms(scale=D**-0.5 if scale is None else scale, q_offset=K - Q, **more)  # type: ignore[arg-type]
    mask = torch.from_numpy(np.ascontiguousarray(layout.expand())).cuda()

    given = q, k, v, mask, terms, dout, *(() if dlse is None else (dlse,))
    exact, low = (results(*given) for results in (tolerance.exact_results, tolerance.plain_results))
    problem = Problem(B, H, G, Q, K, D, E, str(dtype).removeprefix("torch."), "cuda", 90, PROCESSORS)
    out, lse = laid(exact[0]), exact[1].float()  # not the forward's, of which each case would compile a kernel
    return Call(problem, dout, dlse, q, k, v, out, lse, layout.to("cuda"), terms, exact[2:5], low[2:5])


def compare(layout: BlockLayout, *sizes: int, split: int | None = None, **more: object) -> None:
    """Both modes of the backward against the oracle, and that which keeps no dS."""
    call = prepare(layout, *sizes, **more)  # type: ignore[arg-type]
    call.check(call.run(split=split))
    call.check(call.run(split=split, deterministic=True))
    call.check(call.run(split=split, deterministic=True, most_kept=0))


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
