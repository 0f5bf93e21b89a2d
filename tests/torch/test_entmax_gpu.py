"""The kernels of entmax on a GPU, against operations of torch in float64."""

from __future__ import annotations

import pytest
import torch

import gossamer as gs
from tests.support.entmax_cases import LIMITS, assert_close, call, check, results
from tests.support.host_reads import nothing_waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed: int) -> None:
    check(call(seed, "cuda", [torch.float16, torch.bfloat16, torch.float32], [1, 70, 300, 1000]))


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("N", [300, 2000])
def test_calls_as_they_are_computed_by_default(N: int, size: float) -> None:
    """entmax-1.5, causal, in bfloat16: by lists, or where one does not hold a support by operations of torch."""
    generator = torch.Generator().manual_seed(N)
    q, k, v, dout = (torch.randn(1, n, N, 64, generator=generator).cuda() for n in (2, 1, 1, 2))
    x = {"q": (size * q).bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "dout": dout.bfloat16()}
    for save in ("lists", "tau"):
        inputs = [x[name].detach().requires_grad_() for name in "qkv"]
        out = gs.entmax_attention(*inputs, causal=True, save=save)
        found = torch.autograd.grad(out, inputs, x["dout"])
        exact = [t.detach().double().requires_grad_() for t in inputs]
        wide = gs.entmax_attention(*exact, causal=True)
        expected = torch.autograd.grad(wide, exact, x["dout"].double())
        for name, one, other in zip(("out", "dq", "dk", "dv"), (out, *found), (wide, *expected), strict=True):
            assert_close(name, one, other, LIMITS[torch.bfloat16])


def test_nothing_is_read_and_bits_are_the_same() -> None:
    given = call(3, "cuda", [torch.bfloat16], [1000])
    for options in ({"top_k": None}, {"top_k": 8}, {"top_k": None, "save": "tau"}):
        given["options"] |= {"alpha": 1.5, "pattern": None, "causal": True} | options
        first = results(**given)
        with nothing_waits():
            for _ in range(50):
                again = results(**given)
        for one, other in zip((first[0], *first[1], *first[2]), (again[0], *again[1], *again[2]), strict=True):
            assert torch.equal(one, other)
