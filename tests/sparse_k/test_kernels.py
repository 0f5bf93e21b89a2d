"""Triton kernels of SparseK attention and of thresholds, in the interpreter and on a GPU, against operations
of torch in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.processes import INTERPRETING, in_interpreter

pytest.importorskip("triton")

from gossamer.sparse_k import chunks, selection
from gossamer.sparse_k import operator as sparse_k
from gossamer.sparse_k.launch import triton as triton_calls
from gossamer.sparse_k.launch.problem import Operands, Options
from gossamer.sparse_k.thresholds_triton import launch as prefixes
from tests.support.host_reads import nothing_waits
from tests.support.sparsek import inputs

GPU = torch.cuda.is_available() and not INTERPRETING
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")]


def by_torch(u: Tensor, k: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """tau, and the last steps of the support and of the hard top-k, without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(prefixes, "available", lambda u: False)
        tau, last = torch.ops.gossamer.sparsek_causal(u, k)
        return tau, last, torch.ops.gossamer.last_topk(u, k)


def check_thresholds(u: Tensor, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and gradients but for the order of sums."""
    tau, last, of_topk = by_torch(u, k, monkeypatch)
    found, of_support = torch.ops.gossamer.sparsek_causal(u, k)
    kept_tau, kept = torch.ops.gossamer.sparsek_kept(u, k)
    for a, b in ((found, tau), (kept_tau, tau), (of_support, last), (kept, of_topk)):
        differ = a.nan_to_num(nan=3e38) != b.nan_to_num(nan=3e38)
        assert not differ.any(), (k, u, differ.nonzero().tolist(), a[differ].tolist(), b[differ].tolist())
    if u.isnan().any():
        return  # nor are gradients numbers
    dtau = torch.randn_like(u)
    du = prefixes.thresholds_backward(u, tau, dtau)
    wanted = sparse_k.threshold_gradient(u, tau, last, dtau)
    assert torch.allclose(du, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def operands(given: list[Tensor], options: dict[str, Any]) -> tuple[Operands, Options]:
    """As `sparsek_attention` makes them."""
    q, k, v, u = given
    o = {"scale": None, "straight_through": False, "window": 0, "keep": "topk", "gate": "v"} | options
    how = selection.Selection(o["k_keep"], o["keep"], True, o["straight_through"], u.shape[2])
    kept = how.of(u, selection.OPERATORS)
    scale = q.shape[3] ** -0.5 if o["scale"] is None else o["scale"]
    window = min(o["window"], q.shape[2])
    return (
        Operands(q, k, v, u, kept.tau, kept.last, kept.last_gated),
        Options(window, o["gate"], True, scale, o["straight_through"], how.room, how.certain),
    )


def wide(x: Operands) -> Operands:
    return Operands(*(t if t is None or not t.is_floating_point() else t.double() for t in x))


def check_attention(given: list[Tensor], options: dict[str, Any], limit: float) -> None:
    """Both directions against float64; errors are relative to the largest number of a result."""
    x, o = operands(given, options)
    assert not triton_calls.reasons(x, o)
    out, lse = triton_calls.forward(x, o)
    exact, exact_lse = chunks.forward(wide(x), o)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = [out, lse, *triton_calls.backward(dout, dlse, out, lse, x, o)]
    wanted = [exact, exact_lse, *chunks.backward(dout.double(), dlse.double(), exact, exact_lse, wide(x), o)]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "du", "dtau"), found, wanted, strict=True):
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= limit, (name, options, [t.shape for t in given], error)


def check_compiled_gradient(name: str, device: str) -> None:
    """A compiler traces the gradient of thresholds on tensors without numbers, which no kernel reads."""
    u = torch.randn(2, 40, device=device, requires_grad=True)
    operator = getattr(torch.ops.gossamer, name).default

    def loss(u: Tensor) -> Tensor:
        tau, _ = operator(u, 3)
        weights = torch.arange(1.0, u.shape[1] + 1, device=u.device)
        return (torch.where(tau > -torch.inf, tau, 0.0) * weights).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(u), u)[0] for f in (compiled, loss))
    assert torch.equal(found, wanted)
    assert wanted.abs().sum() > 1


if INTERPRETING:

    @pytest.fixture(autouse=True)
    def small(monkeypatch: pytest.MonkeyPatch) -> None:
        """Several tiles, chunks, lists and prefixes of few keys."""
        for name, number in {"NODE": 4, "CHUNK": 8, "EDGES": 8, "LEAST": 16, "BLOCK": 16, "LANES": 4}.items():
            monkeypatch.setattr(prefixes, name, number)
        for name, number in {"RANGE": 64, "CHUNK": 32, "STREAMED": 16, "PLACES": 16}.items():
            monkeypatch.setattr(triton_calls, name, number)
        monkeypatch.setattr(triton_calls, "tiles", lambda kernel, x: triton_calls.Tiles(16, 16, 4, 1))
        monkeypatch.setattr(triton_calls, "chunk_size", lambda o, N, tile: 16)

    @pytest.mark.parametrize("part", range(2))
    def test_thresholds(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from tests.sparse_k.test_operator import scores

        draw = random.Random(part)
        for _ in range(4):
            N = draw.choice([1, 3, 17, 40, 70])
            u = torch.tensor([scores(draw, N) for _ in range(2)])
            if draw.random() < 0.2:
                u[0, N // 2] = torch.nan
            if draw.random() < 0.2:
                u[1, torch.rand(N) < 0.2] = torch.inf
            k = min(N, draw.choice([1, 2, 5, N // 2 + 1, N]))
            check_thresholds(u, k, monkeypatch)
            # Scores of one integer, whose order is known, and halves of a step.
            near_whole = torch.where(u > 1, u.round(), 1e-18 * u)
            close = [near_whole, u.sign() + 1e-18 * torch.randn(2, N), 2.0**-58 * u.round()]
            check_thresholds(draw.choice(close), k, monkeypatch)

    @pytest.mark.parametrize("part", range(2))
    def test_attention(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(part)
        for _ in range(7):
            given, options = inputs(draw, torch.float32)
            options["causal"] = True
            # Lists that hold what lives, and lists that do not.
            monkeypatch.setattr(selection, "SUPPORT", draw.choice([1, 4]))
            check_attention(given, options, 2e-5)

    @pytest.mark.usefixtures("fresh_compiler")
    @pytest.mark.parametrize("part", range(2))
    def test_compiled_gradient(part: int) -> None:
        check_compiled_gradient(("sparsek_causal", "sparsek_kept")[part], "cpu")


else:

    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(2))
    @pytest.mark.parametrize("name", ["thresholds", "attention", "compiled_gradient"])
    def test_interpreted(name: str, part: int) -> None:
        in_interpreter("tests/sparse_k/test_kernels.py", f"test_{name}[{part}]")


@pytest.mark.parametrize(("N", "k"), [(5000, 300), (70000, 1024)], ids=str)
@pytest.mark.parametrize("slope", [0.0, 1e-3])
class TestThresholdsOnGpu:
    pytestmark = on_gpu

    def test_same_bits(self, N: int, k: int, slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        u = torch.randn(3, N, device="cuda") + slope * torch.arange(N, device="cuda")
        check_thresholds(u, k, monkeypatch)
        check_thresholds((4 * u).round() / 4, k, monkeypatch)
        tiny = torch.where(u > 1, u.round(), 1e-17 * u)  # the same once 1 is taken off
        check_thresholds(tiny, k, monkeypatch)
        check_thresholds(tiny, N, monkeypatch)


@pytest.mark.parametrize("name", ["sparsek_causal", "sparsek_kept"])
@pytest.mark.usefixtures("fresh_compiler")
class TestCompiledOnGpu:
    pytestmark = on_gpu

    def test_gradient(self, name: str) -> None:
        check_compiled_gradient(name, "cuda")


@pytest.mark.parametrize(
    ("dtype", "sizes", "options"),
    [
        (torch.bfloat16, (1, 2, 2, 2, 128, 128), {"k_keep": 200, "window": 100}),
        (torch.float16, (1, 4, 2, 4, 64, 32), {"k_keep": 100, "gate": "kv"}),
        (torch.bfloat16, (1, 2, 1, 1, 64, 64), {"k_keep": 50, "gate": "logit", "keep": "support", "window": 20}),
        (torch.bfloat16, (1, 2, 1, 1, 64, 64), {"k_keep": 50, "gate": None, "straight_through": True}),
        (torch.bfloat16, (1, 2, 1, 1, 64, 64), {"k_keep": 50, "straight_through": True, "window": 20}),
        (torch.bfloat16, (1, 1, 1, 1, 64, 64), {"k_keep": 20, "keep": "support"}),
        (torch.float32, (2, 2, 1, 1, 40, 72), {"k_keep": 50, "window": 33}),
        (torch.bfloat16, (1, 1, 1, 1, 256, 256), {"k_keep": 100, "window": 20}),
    ],
    ids=str,
)
class TestAttentionOnGpu:
    pytestmark = on_gpu

    def test_numbers(self, dtype: torch.dtype, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        B, H, G, U, D, E = sizes
        N = 1500
        q, k, v = (torch.randn(B, h, N, d, device="cuda", dtype=dtype) for h, d in ((H, D), (G, D), (G, E)))
        u = torch.randn(B, U, N, device="cuda")
        check_attention([q, k, v, u], options, 3e-5 if dtype == torch.float32 else 2e-2)


class TestCallsOnGpu:
    pytestmark = on_gpu

    def test_same_bits_without_synchronisation_and_compiled(self) -> None:
        import gossamer as gs

        torch.manual_seed(0)
        x = [torch.randn(1, 2, 3000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        x.append(torch.randn(1, 2, 3000, device="cuda", requires_grad=True))

        def run() -> list[Tensor]:
            out = gs.sparsek_attention(*x, k_keep=128, window=64)
            return [out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))]

        first = run()
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(50):
                with nothing_waits():
                    again = run()
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        finally:
            torch.use_deterministic_algorithms(False)
        compiled = torch.compile(lambda *x: gs.sparsek_attention(*x, k_keep=128, window=64), fullgraph=True)
        out = compiled(*x)
        again = [out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    def test_scores_of_float64_keep_their_differences(self) -> None:
        import gossamer as gs

        torch.manual_seed(0)
        q, k, v = (torch.randn(1, heads, 600, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        u = torch.randn(1, 2, 600, device="cuda", dtype=torch.float64).mul(2**20).round().div(2**20)
        options: dict[str, Any] = {"k_keep": 64, "window": 16, "return_lse": True}
        explained = gs.explain_sparsek(q, k, v, u, **options)
        assert "scores of torch.float64" in str(explained) and explained.implementation.startswith("chunks")
        near, far = (gs.sparsek_attention(q, k, v, u + offset, **options) for offset in (0.0, 2.0**20))
        for a, b in zip(near, far, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)
