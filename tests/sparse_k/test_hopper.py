"""The forward of SparseK attention for compute capability 9.0: compiled without a GPU, and on one against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gossamer.kernels.hopper import missing_packages
from gossamer.sparse_k import chunks, selection
from gossamer.sparse_k.hopper import compiled
from gossamer.sparse_k.hopper.configurations import SparseKConfig
from gossamer.sparse_k.launch import hopper as hopper_calls
from gossamer.sparse_k.launch import triton as triton_calls
from gossamer.sparse_k.launch.problem import Operands, Options
from tests.sparse_k.test_kernels import operands, wide
from tests.support.cubins import resources

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


def call(
    sizes: tuple[int, int, int, int, int, int, int] = (1, 4, 2, 2, 300, 64, 64), dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu", slope: float = 0.0, transposed: bool = False, **options: Any,
) -> tuple[Operands, Options]:  # fmt: skip
    """Sizes: B, H, G, U, N, D, E."""
    B, H, G, U, N, D, E = sizes

    def normal(heads: int, size: int) -> Tensor:
        if transposed:
            return torch.randn(B, N, heads, size, device=device).to(dtype).transpose(1, 2)
        return torch.randn(B, heads, N, size, device=device).to(dtype)

    u = torch.randn(B, U, N, device=device) + slope * torch.arange(N, device=device)
    return operands([normal(H, D), normal(G, D), normal(G, E), u], {"k_keep": 20, "window": 9} | options)


def test_reasons() -> None:
    def refused(*arguments: Any, **options: Any) -> str:
        return "; ".join(hopper_calls.reasons(*call(*arguments, **options)))

    assert "needs a GPU, not cpu" in refused()
    assert "float32" in refused(dtype=torch.float32)
    assert "multiples of 8 up to 128" in refused((1, 1, 1, 1, 30, 12, 64))
    assert "multiples of 8 up to 128" in refused((1, 1, 1, 1, 30, 64, 136))
    assert "no gate 'kv'" in refused(gate="kv")
    assert "the scale is positive" in refused(scale=0.0)
    with pytest.raises(ValueError, match="no kernel of SparseK attention as"):
        SparseKConfig("bfloat16", 96, True)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        SparseKConfig("bfloat16", 128, True, stages=3)


@needs_compiler
def test_a_call_passes_what_its_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.sparse_k.hopper import entries

    given: list[Any] = []
    monkeypatch.setattr(compiled, "forward", lambda config: lambda *arguments: given.extend((config, *arguments)))
    every = triton_calls.LiveLists(
        torch.zeros(2, 1, 300, dtype=torch.int32), torch.zeros(2, 1, 1, dtype=torch.int32), 300
    )
    monkeypatch.setattr(triton_calls, "live_keys", lambda last, o: every)
    monkeypatch.setattr(hopper_calls, "processors", lambda device: 132)
    x, o = call(transposed=True)
    tiles = triton_calls.LiveLists(
        torch.zeros(2, 3, 148, dtype=torch.int32), torch.zeros(2, 3, 2, dtype=torch.int32), 128
    )
    monkeypatch.setattr(triton_calls, "lists", lambda *arguments: tiles)
    hopper_calls.forward(x, o)
    config, *arguments = given
    wanted = entries.forward(config).arguments
    assert len(wanted) == len(arguments)
    sizes: dict[Any, int] = {}  # one symbol is one size
    for want, found in zip(wanted, arguments, strict=True):
        if isinstance(found, Tensor):
            assert str(found.dtype).removeprefix("torch.") == want.element_type.__name__.lower()
            for size, n in zip(want.shape, found.shape, strict=True):
                assert n == (size if isinstance(size, int) else sizes.setdefault(id(size), n))
        else:
            assert isinstance(found, float if type(want).__name__ == "Float32" else int)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("size", "gates"), [(64, False), (128, False), (128, True)])
def test_kernels_compile(size: int, gates: bool) -> None:
    registers, stack = resources(compiled.forward.object(SparseKConfig("bfloat16", size, gates)))
    assert registers and max(registers) <= 255
    assert not any(stack)


@needs_compiler
@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
class TestOnGpu:
    @pytest.mark.parametrize("part", range(4))
    def test_numbers(self, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(part)
        torch.manual_seed(part)
        for _ in range(6):
            # Lists that hold what lives, and lists that do not.
            monkeypatch.setattr(selection, "SUPPORT", draw.choice([1, 4]))
            H, G = draw.choice([(1, 1), (4, 2), (6, 2), (3, 3)])
            N = draw.choice([1, 5, 63, 64, 65, 127, 128, 129, 255, 300, 513, 1000, 1500, 3000])
            D, E = draw.choice([(128, 128), (128, 128), (64, 64), (40, 96), (8, 16), (128, 64), (96, 128)])
            check(
                *call(
                    (draw.choice([1, 2]), H, G, draw.choice([G, H]), N, D, E),
                    draw.choice([torch.bfloat16, torch.float16]), "cuda", draw.choice([0.0, 1e-3, 1e-2, -1e-2]),
                    draw.random() < 0.3, k_keep=draw.choice([1, 7, 100, 128, 200, 513, N]),
                    window=draw.choice([0, 1, 63, 64, 127, 128, 129, 200, 512, 5000]),
                    gate=draw.choice(["v", "v", None]), keep=draw.choice(["topk", "topk", "support"]),
                    straight_through=draw.random() < 0.3, scale=draw.choice([None, None, 1e-3, 2.0]),
                )
            )  # fmt: skip

    def test_thresholds_that_are_not_numbers_show(self) -> None:
        x, o = call((1, 2, 2, 2, 700, 128, 128), device="cuda", k_keep=100, window=64)
        x.tau[0, 1, 333] = torch.nan
        out, lse = hopper_calls.forward(x, o)
        assert out.isnan().any(-1).nonzero().tolist() == [[0, 1, 333]] == lse.isnan().nonzero().tolist()


def check(x: Operands, o: Options) -> None:
    """Against float64, in memory that holds no numbers; twice the same bits."""
    assert not hopper_calls.reasons(x, o)
    out, lse = exact = chunks.forward(wide(x), o)
    poison = [torch.full_like(t, torch.nan, dtype=x.q.dtype) for t in exact] * 2
    del poison
    found = hopper_calls.forward(x, o)
    for name, a, b in zip(("out", "lse"), found, (out, lse), strict=True):
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= 1e-2, (name, o, [t.shape for t in x], error)
    assert all(torch.equal(a, b) for a, b in zip(found, hopper_calls.forward(x, o), strict=True))
