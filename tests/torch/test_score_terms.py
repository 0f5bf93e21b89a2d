"""Score terms at their extremes, each against float64: lengths of every integer type, slopes, factors, offsets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.capability import reasons
from gossamer.plan.problem import Problem
from gossamer.plan.table import load
from gossamer.torch.functions import int32_lengths
from tests.support.definition import dense
from tests.support.exact import CUDA, no_gpu
from tests.support.modes import Seen

N, H, D = 100, 2, 8
WRAPPING = (2**31 - 1, 2**31, 2**32 + 10, 2**63 - 1, -(2**31), -(2**32) + 5, -(2**63))
PARTS = [gs.Dilated(20, 0, 3), gs.LongNet((32, 64), (2, 4), heads=H), gs.PerHead([gs.Dilated(9, 0, 7), gs.Causal()])]


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu", n: int = N, d: int = D) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(2, H, n, d, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [x.to(device, dtype).requires_grad_() for x in made]


def exact(q: Tensor, k: Tensor, v: Tensor, keep: np.ndarray | Tensor, **terms: Any) -> list[Tensor]:
    """(out, dq, dk, dv) by the definition in float64, for a cotangent of ones; `keep` broadcasts to (B, H, Q, K)."""
    leaves = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    out, _ = dense(*leaves, keep, **terms)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def found(q: Tensor, k: Tensor, v: Tensor, pattern: Any, **options: Any) -> list[Tensor]:
    out = gs.attention(q, k, v, pattern, **options)
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


def check(results: list[Tensor], wanted: list[Tensor], most: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
        worst = float((a.double().cpu() - b).abs().max())
        assert worst <= most * max(1.0, float(b.abs().max())), f"{name}: {worst:.2e}"


def lengths_kept(pattern: gs.Pattern, lengths: list[int]) -> Tensor:
    below = torch.tensor([[j < n for j in range(N)] for n in lengths])
    return torch.from_numpy(pattern.materialize(N, N)) & below[:, None, None]


@pytest.mark.parametrize(
    ("pattern", "offset", "slope"), [(gs.Causal(), None, -1.0), (gs.Dense(), 0, -1.0), (gs.Dense(), -200, 1.0)], ids=str
)
def test_slopes_where_rows_do_not_fill_their_tile(pattern: gs.Pattern, offset: int | None, slope: float) -> None:
    """Rows of padding have no lse: exp2 of their scores would be infinite, and 0 times that NaN in dk and dv."""
    q, k, v = inputs()
    slopes = torch.tensor([slope, slope / 2])
    position = np.arange(N) + (offset or 0)
    wanted = exact(q, k, v, pattern.materialize(N, N, offset), slopes=slopes.double(), position=position)
    for name in ("blocked", "reference"):
        options = {"q_offset": offset, "alibi_slopes": slopes, "alibi_distance": "signed", "implementation": name}
        check(found(q, k, v, pattern, **options), wanted, 1e-4)


@pytest.mark.parametrize("pattern", [gs.Causal(), *PARTS], ids=str)
def test_lengths_past_32_bits(pattern: gs.Pattern, always: list[Any]) -> None:
    q, k, v = inputs()
    for n in WRAPPING:
        lengths = torch.tensor([n, 40])
        wanted = exact(q, k, v, lengths_kept(pattern, [n, 40]))
        check(found(q, k, v, pattern, key_lengths=lengths), wanted, 1e-5)
        if abs(n) < 2**31:
            check(found(q, k, v, pattern, key_lengths=lengths.int()), wanted, 1e-5)
    assert bool(always) == (pattern in PARTS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
def test_lengths_become_int32(device: str) -> None:
    """By one operation at most: the conversion clamps."""
    drawn = [0, 5, 90, 101, -1, *WRAPPING]
    wanted = torch.tensor([min(max(n, 0), N) for n in drawn], dtype=torch.int32)
    made = int32_lengths(N, torch.tensor(drawn, device=device))
    assert made.dtype == torch.int32 and torch.equal(made.cpu(), wanted)
    strided = torch.tensor([drawn, drawn], device=device).T[:, 0]
    assert torch.equal(int32_lengths(N, strided).cpu(), wanted)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        x = torch.tensor([torch.iinfo(dtype).min, 7, torch.iinfo(dtype).max], dtype=dtype, device=device)
        assert torch.equal(int32_lengths(N, x), x.to(torch.int32))
    given = torch.tensor(drawn, device=device)
    with Seen() as seen:
        int32_lengths(N, given)
    assert [name for name in seen.names if "empty" not in name] == ["aten.clamp.Tensor_out"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_slopes_that_require_grad_are_refused_in_any_mode(dtype: torch.dtype) -> None:
    slopes = torch.ones(H, dtype=dtype, requires_grad=True)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(ValueError, match="alibi_slopes must be a constant"):
            gs.attention(*inputs(), gs.Causal(), alibi_slopes=slopes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_slopes_have_no_derivative_in_torch_func() -> None:
    q, k, v = (x.detach() for x in inputs())
    slopes = torch.rand(H)
    for pattern in (gs.Causal(), gs.Dilated(9, 0, 3)):

        def total(s: Tensor, pattern: gs.Pattern = pattern) -> Tensor:
            return gs.attention(q, k, v, pattern, alibi_slopes=s).sum()

        with pytest.raises(ValueError, match="alibi_slopes must be a constant"):
            torch.func.grad(total)(slopes)
        with pytest.raises(ValueError, match="no forward-mode derivative"):
            torch.func.jvp(total, (slopes,), (slopes,))


def test_sinks_of_16_bits_have_a_gradient_of_16_bits() -> None:
    q, k, v = inputs()
    gradients = []
    for dtype in (torch.float64, torch.bfloat16):
        sinks = torch.tensor([0.5, -1.0], dtype=dtype, requires_grad=True)
        for _ in range(2):  # the second call is known
            sinks.grad = None
            gs.attention(q, k, v, gs.Causal(), sink_logits=sinks).sum().backward()
        assert sinks.grad is not None and sinks.grad.dtype == dtype
        gradients.append(sinks.grad.double())
    torch.testing.assert_close(*gradients, rtol=2**-8, atol=0)


def test_numbers_of_numpy() -> None:
    q, k, v = inputs()
    plain = gs.attention(q, k, v, gs.SlidingWindow(9), scale=0.5, softcap=3.0, q_offset=4)
    for number, integer in ((np.float32, np.int64), (np.float64, np.int8), (np.float16, np.uint64)):
        options = {"scale": number(0.5), "softcap": number(3.0), "q_offset": integer(4)}
        assert torch.equal(gs.attention(q, k, v, gs.SlidingWindow(9), **options), plain)
        assert gs.explain(q, k, v, gs.SlidingWindow(9), **options).problem.score_terms == {"q_offset", "softcap"}
    with pytest.raises(ValueError, match=r"scale must be a number, a tensor of shape \(\) or None; got .*True"):
        gs.attention(q, k, v, scale=np.bool_(True))
    with pytest.raises(ValueError, match=r"scale must be a number, a tensor of shape \(\) or None; got .*timedelta64"):
        gs.attention(q, k, v, scale=np.timedelta64(3))
    assert torch.equal(gs.attention(q, k, v, scale=np.longdouble(0.5)), gs.attention(q, k, v, scale=0.5))
    with pytest.raises(ValueError, match=r"q_offset must be an int"):
        gs.attention(q, k, v, q_offset=np.float32(4))


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        (
            {"scale": 1e39},
            r"scale must be a finite number up to 8\.5e\+37 in magnitude, as float32 holds, .*; got 1e\+39",
        ),
        ({"scale": math.nan}, r"scale must .*; got nan"),
        ({"softcap": 1e39}, r"softcap must .* from 5\.4e-20 to 1\.8e\+19 in float32.*; got 1e\+39"),
        ({"softcap": 1e-39}, r"softcap must .*; got 1e-39"),
        ({"softcap": 1e-15, "scale": 1e35}, r"scale / softcap must be up to 8\.5e\+37; got 9\.9+e\+49"),
        ({"q_offset": 2**31 - 5}, r"q_offset must be an integer up to 2\*\*31 - 2\*\*16 - max\(Q, K\) = 2147418012"),
        ({"q_offset": torch.tensor(2**40)}, r"q_offset must be an integer up to .*; got a tensor of 1099511627776"),
        ({"scale": 10**5000}, r"scale must be a number of at most 2\*\*53"),
        ({"q_offset": -(10**5000)}, r"q_offset must be an integer over -2\*\*31"),
    ],
)
def test_what_float32_cannot_hold_is_refused(options: dict[str, Any], expected_text: str) -> None:
    for call in (gs.attention, gs.explain):
        with pytest.raises(ValueError, match=expected_text):
            call(*inputs(), gs.Causal(), **options)


def test_float64_holds_more() -> None:
    q, k, v = inputs(torch.float64)
    assert gs.attention(q * 1e-150, k, v, scale=1e150).isfinite().all()
    assert gs.attention(q, k, v, softcap=1e100).isfinite().all()


@pytest.mark.parametrize("softcap", [1e-19, 1e-8, 1e8, 1e19])
def test_soft_caps_at_their_ends(softcap: float) -> None:
    """A tiny cap leaves the mean of the kept values, a huge one the scores as they are."""
    q, k, v = inputs()
    keep = gs.Causal().materialize(N, N)
    wanted = exact(q, k, v, keep) if softcap > 1 else exact(q * 0, k, v, keep)
    for name in ("blocked", "reference"):
        out = gs.attention(q, k, v, gs.Causal(), softcap=softcap, implementation=name)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        torch.testing.assert_close(out.double(), wanted[0], rtol=1e-5, atol=1e-5)
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_an_offset_that_nothing_reads_is_refused() -> None:
    q, k, v = inputs()
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    csr = gs.CSR.from_torch(mask.float().to_sparse_coo())
    blocks = gs.BlockMask(np.ones((2, 2), bool), 64)
    layout = gs.Causal().layout(N, N, block_q=64, block_kv=64)
    flex = gs.to_flex(gs.Causal(), N, N)
    every = [
        mask,
        csr,
        blocks,
        layout,
        flex,
        mask.float().to_sparse_csr(),
        csr | blocks,
        ~csr,
        gs.PerHead([csr, blocks]),
        gs.BigBird(8),
        gs.BigBird(8, causal=True),
    ]
    for given in every:
        for offset in (5, np.int64(5), torch.tensor(5)):
            for call in (gs.attention, gs.explain):
                with pytest.raises(ValueError, match=r"q_offset must be left out with .*; got 5"):
                    call(q, k, v, given, q_offset=offset)
        gs.attention(q, k, v, given, q_offset=0)  # that of a call without one
        if given is not layout:  # which knows its own
            gs.attention(q, k, v, given, q_offset=5, alibi_slopes=torch.ones(H), alibi_distance="signed")  # of them
    both = gs.attention(q, k, v, csr & gs.SlidingWindow(9), q_offset=5)
    keep = mask.numpy() & gs.SlidingWindow(9).materialize(N, N, 5)
    torch.testing.assert_close(both.double(), exact(q, k, v, keep)[0], rtol=1e-5, atol=1e-5)


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also where a row keeps nothing, alone and in a merge."""
    q, k, v = inputs()
    pattern = gs.CSR(np.repeat([0, 3], [51, 50]), np.array([0, 5, 9]), N)  # one row keeps anything
    sinks = torch.full((H,), -math.inf)
    wanted = exact(q, k, v, pattern.materialize(N, N))
    for name in ("blocked", "reference"):
        check(found(q, k, v, pattern, sink_logits=sinks, implementation=name), wanted, 1e-5)
    union = {"pattern": pattern | gs.SlidingWindow(3), "merge": "lse"}
    plain, sunk = found(q, k, v, **union), found(q, k, v, **union, sink_logits=sinks)
    assert all(torch.equal(a, b) for a, b in zip(plain, sunk, strict=True))


def test_hopper_leaves_wide_soft_caps_to_others() -> None:
    capability = load("hopper").capability
    for softcap, refused in ((50.0, False), (1024.0, False), (1e4, True)):
        problem = Problem(1, 2, 2, 64, 64, 64, 64, "bfloat16", "cuda", 90, frozenset({"softcap"}), softcap=softcap)
        assert bool(reasons(problem, capability)) == refused


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("name", [None, "hopper", "triton", "small", "blocked"])
@pytest.mark.parametrize("pattern", [gs.Causal(), gs.SlidingWindow(300), gs.Dense(), *PARTS], ids=str)
def test_lengths_on_a_gpu(pattern: gs.Pattern, name: str | None) -> None:
    """Lengths of every size, forward and backward, in bfloat16, and of every integer type of one pattern.

    Triton compiles for each type.
    """
    n, d = 517, 64
    q, k, v = inputs(torch.bfloat16, "cuda" if CUDA else "cpu", n, d)
    keep = torch.from_numpy(pattern.materialize(n, n))
    for number in (*WRAPPING, 0, 300):
        lengths = torch.tensor([number, 130], device=q.device)
        below = torch.tensor([[j < one for j in range(n)] for one in (number, 130)])
        wanted = exact(q, k, v, keep & below[:, None, None])
        kinds = [lengths]
        if pattern == gs.Causal():
            kinds += [lengths.int()] * (-(2**31) <= number < 2**31) + [lengths.short()] * (abs(number) < 2**15)
        for given in kinds:
            for _ in range(2):  # the second call is bound
                try:
                    check(found(q, k, v, pattern, key_lengths=given, implementation=name), wanted, 2e-2)
                except gs.Unsupported:
                    assert name is not None
