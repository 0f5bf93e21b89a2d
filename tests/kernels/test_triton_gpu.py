"""The Triton kernels on a GPU: the cases of the interpreter, larger and 16-bit ones, and repeated bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from gossamer.kernels.triton.block.config import TileConfig
from gossamer.patterns import BigBird, Causal, SlidingWindow
from tests.support.launches import backward, forward
from tests.support.triton_cases import CASES, Case, check, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch finds none"),
]

LARGE = [
    Case("large-window", SlidingWindow(300), H=4, G=2, Q=2000, K=2000, D=128, E=128, tile=(128, 128)),
    Case("large-bigbird", BigBird(64), H=4, G=4, Q=1900, K=1900, D=64, E=64, tile=(128, 128), limit=4),
    Case("large-causal", Causal(), H=2, G=2, Q=1000, K=1500, D=256, E=256, tile=(128, 128)),
    Case("large-random", 0.4, H=2, G=1, Q=1000, K=1000, D=96, E=192, tile=(128, 128)),
]
# In float32, and in either type of 16 bits in turn, which have the same code.
TYPED = [(x, dtype) for at, x in enumerate(LARGE) for dtype in ((torch.float16, torch.bfloat16)[at % 2], torch.float32)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=lambda x: x.name if isinstance(x, Case) else str(x))
def test_large(case: Case, dtype: torch.dtype) -> None:
    check(dataclasses.replace(case, dtype=dtype), "cuda")


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_descriptors(case: Case) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need compute capability 9.0")
    check(dataclasses.replace(case, dtype=torch.bfloat16), "cuda", tiles=TileConfig(64, 32, 4, 2, tma=True))


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_two_runs_give_the_same_bits(case: Case) -> None:
    from gossamer.kernels.triton.block import launch_block as launch

    problem, layout, _, terms, (q, k, v, dout, dlse) = make(dataclasses.replace(case, dtype=torch.bfloat16), "cuda")
    results = []
    for _ in range(2):
        out, lse = forward(launch, problem, layout, terms, q, k, v)
        results.append([out, lse, *backward(launch, problem, layout, terms, dout, dlse, q, k, v, out, lse)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
