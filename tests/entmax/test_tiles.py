"""The Hopper kernels of rows without a list on a GPU, over any rows of any head, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from gossamer.entmax.launch import overflow_rows as overflow
from gossamer.entmax.launch.calls import Facts, KernelCall, Stats
from gossamer.kernels.launch import Builder, operand_of
from gossamer.torch.bind import bind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
LIMITS = {torch.bfloat16: (4e-3, 6e-3), torch.float16: (5e-4, 8e-4)}  # of out, and of gradients


class Case(NamedTuple):
    """Sizes, the size of scores, what rows see (0: every key, 1: causal, 2: a window), and how many have no list."""

    shape: tuple[int, int, int]  # B, H, G
    Q: int
    K: int
    D: int
    E: int
    dtype: torch.dtype
    alpha: float
    sigma: float
    bounds: int
    share: float


CASES = [
    Case((1, 4, 2), 1000, 1000, 64, 64, torch.bfloat16, 1.5, 0.3, 1, 1.0),
    Case((1, 4, 4), 900, 1300, 64, 64, torch.bfloat16, 1.5, 0.5, 1, 0.1),
    Case((2, 2, 1), 700, 3000, 64, 64, torch.bfloat16, 1.25, 1.0, 1, 0.5),
    Case((1, 3, 1), 1025, 2000, 64, 64, torch.float16, 1.7, 0.2, 2, 0.5),
    Case((1, 2, 2), 513, 1111, 64, 40, torch.bfloat16, 2.0, 0.1, 1, 1.0),
    Case((1, 2, 2), 300, 5000, 40, 64, torch.bfloat16, 1.7, 0.1, 1, 0.9),
    Case((1, 3, 3), 600, 1500, 128, 128, torch.bfloat16, 1.25, 1.0, 0, 0.6),
    Case((1, 2, 1), 400, 900, 96, 128, torch.float16, 1.6, 0.2, 2, 1.0),
    Case((1, 2, 1), 300, 200, 64, 64, torch.bfloat16, 1.5, 0.1, 1, 1.0),  # the first rows see nothing
]


class Given(NamedTuple):
    """A call, its rows without a list, and gradients."""

    facts: Facts
    q: Tensor
    k: Tensor
    v: Tensor
    window: tuple[Tensor, ...]  # lo and hi, where they bound the keys
    rows: Tensor  # (B, H, Q) bool
    dout: Tensor
    dk: Tensor
    dv: Tensor

    @property
    def listed(self) -> dict[str, Tensor]:
        """What a kernel of lists writes of the rows without one."""
        rows = self.rows.flatten(0, 1)
        order = torch.argsort((~rows).int(), dim=1, stable=True).int()
        zeros = torch.zeros(2, dtype=torch.int32, device="cuda")
        return {"row_list": order, "row_counts": rows.sum(1).int(), "pair_counts": zeros, "zeros": zeros}


def given(case: Case) -> Given:
    """The tensors of a case; of dK and dV what lists would have given."""
    (B, H, G), Q, K = case.shape, case.Q, case.K
    g = torch.Generator().manual_seed(0)
    tile_sizes = (H, Q, case.D), (G, K, case.D), (G, K, case.E), (H, Q, case.E), (G, K, case.D), (G, K, case.E)
    q, k, v, dout, dk, dv = (torch.randn(B, *x, generator=g) for x in tile_sizes)
    rows = torch.rand(B, H, Q, generator=g) < case.share
    rows[0, 1] &= H < 3  # a head without any
    q, k, v, dout, dk, dv = (x.to(case.dtype).cuda() for x in (case.sigma * q, k, v + 1, dout, dk, dv))
    offset, at = K - Q, torch.arange(Q) + K - Q
    lo, hi = ((at + n).clamp(0, K).int().cuda() for n in (-300, 1))
    a = case.alpha - 1
    facts = Facts(q.device, a, case.D**-0.5, None, case.bounds, offset)
    return Given(facts, q, k, v, (lo, hi) if case.bounds == 2 else (), rows.cuda(), dout, dk, dv)


def described(x: Given, arrays: dict[str, Tensor]) -> KernelCall:
    """The call as its launches are described, given arrays besides q, k and v."""
    b = Builder({name: operand_of(t) for name, t in {"q": x.q, "k": x.k, "v": x.v, **arrays}.items()})
    b.layout(**dict(zip(("lo", "hi"), x.window, strict=False)))
    return KernelCall(b, x.facts)


ROWS = overflow.OverflowRows("row_list", "row_counts", "pair_counts", "zeros")


class Exact(NamedTuple):
    """In float64."""

    out: Tensor
    lam: Tensor
    support: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(x: Given) -> Exact:
    """From the definition, by bisection."""
    c, (_, H, Q, _), (_, G, K, _) = x.facts, x.q.shape, x.k.shape
    q, k, v, dout = x.q.double(), *(t.double().repeat_interleave(H // G, 1) for t in (x.k, x.v)), x.dout.double()
    j, row = torch.arange(K, device="cuda"), torch.arange(Q, device="cuda")[:, None]
    seen = torch.ones(Q, K, dtype=torch.bool, device="cuda")
    if c.bounds == 1:
        seen = j <= row + c.offset
    elif x.window:
        lo, hi = x.window
        seen = (j >= lo[:, None]) & (j < hi[:, None])
    a = float(c.same or 0.0)
    s = (c.scale * (q @ k.mT)).masked_fill(~seen, -torch.inf)
    top = s.amax(-1, keepdim=True)
    low, width = a * torch.where(top == -torch.inf, 0.0, top) - 1, 1.0
    for _ in range(50):
        width /= 2
        total = ((a * s - low - width).clamp_(min=0) ** (1 / a)).sum(-1, keepdim=True)
        low = torch.where(total >= 1, low + width, low)
    w = (a * s - low).clamp_(min=0)
    p = w ** (1 / a)
    lam = torch.where(top == -torch.inf, torch.inf, (low + 1) / a)[..., 0]
    u = torch.where(w > 0, w ** (1 / a - 1), 0.0) * x.rows[..., None]
    dp = dout @ v.mT
    delta = (u * dp).sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp_(min=1e-30)
    ds = c.scale * u * (dp - delta)
    dk, dv = ((t.mT @ y).unflatten(1, (G, H // G)).sum(2) for t, y in ((ds, q), (p * x.rows[..., None], dout)))
    return Exact(p @ v, lam, (w > 0).sum(-1), ds @ k, dk + x.dk.double(), dv + x.dv.double())


class Told(NamedTuple):
    """Of rows (B, H, Q)."""

    lam: Tensor
    support: Tensor
    certified: Tensor


def forward(x: Given) -> tuple[Tensor, Told]:
    """Out and what is told, where memory was NaN before."""
    arrays = x.listed
    c = described(x, arrays)
    c.b.array("out", c.dtype, (c.B, c.H, c.Q, c.E), torch.nan)
    for name, dtype, fill in (("lam", "float32", torch.nan), ("support", "int32", -7), ("certified", "uint8", 0)):
        c.b.array(name, dtype, (c.rows,), fill)
    overflow.long_rows(c, ROWS, Stats("lam", "support", "certified", True))
    run = bind(c.b.done("out", "lam", "support", "certified"), x.q.device, ("q", "k", "v", *arrays))
    out, lam, support, certified = run(x.q, x.k, x.v, *arrays.values())
    return out, Told(*(t.view(c.B, c.H, c.Q) for t in (lam, support, certified.bool())))


def backward(x: Given, lam: Tensor) -> tuple[Tensor, ...]:
    """dQ, where memory was NaN before, and dK and dV, which are added to."""
    arrays = {**x.listed, "dout": x.dout, "lam": lam.reshape(-1), "dk_before": x.dk, "dv_before": x.dv}
    c = described(x, arrays)
    c.b.array("dq", c.dtype, (c.B, c.H, c.Q, c.D), torch.nan)
    c.b.array("alpha_terms", "float32", (1, 1, 1))
    for name, size in (("dk", c.D), ("dv", c.E)):
        c.b.array(name, c.dtype, (c.B, c.G, c.K, size))
        c.b.copy(f"{name}_before", name)
    overflow.long_rows_backward(c, ROWS, "dout", False)
    run = bind(c.b.done("dq", "dk", "dv"), x.q.device, ("q", "k", "v", *arrays))
    return run(x.q, x.k, x.v, *arrays.values())


def error(found: Tensor, expected: Tensor) -> float:
    """Euclidean, relative."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("few", [0, 4], ids=["tiles of a warpgroup", "tiles of a block"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_rows(case: Case, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "FEW", few)
    x = given(case)
    assert overflow.by_hopper(described(x, {"dout": x.dout}), "dout") is not None
    expected, rows = exact(x), x.rows
    out, stats = forward(x)
    of_out, of_gradients = LIMITS[case.dtype]
    assert error(out[rows], expected.out[rows]) < of_out
    assert out[~rows].isnan().all()
    there = rows & expected.lam.isfinite()
    assert torch.equal(stats.lam[rows].isinf(), expected.lam[rows].isinf())
    assert error(stats.lam[there], expected.lam[there]) < 1e-6
    # Scores at the very end of a support may be on either side of it.
    assert (stats.support != expected.support)[rows].float().mean() < 0.02
    assert torch.equal(stats.certified, rows)
    gradients = backward(x, stats.lam)
    assert gradients[0][~rows].isnan().all()
    assert error(gradients[0][rows], expected.dq[rows]) < of_gradients
    for one, other in zip(gradients[1:], (expected.dk, expected.dv), strict=True):
        assert error(one, other) < of_gradients
    for _ in range(5):
        again, told = forward(x)
        assert torch.equal(again[rows], out[rows])
        assert torch.equal(told.lam[rows], stats.lam[rows])
        for one, other in zip(backward(x, stats.lam), gradients, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("few", [0, 4])
def test_a_score_that_is_no_number_is_in_its_rows_alone(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "FEW", few)
    x = given(Case((1, 2, 2), 600, 600, 64, 64, torch.bfloat16, 1.5, 0.3, 1, 1.0))
    x.k[0, :, 300, 3] = torch.nan
    x.q[0, 1, 20] = torch.inf
    out, stats = forward(x)
    expected = torch.zeros(1, 2, 600, dtype=torch.bool, device="cuda")
    expected[..., 300:] = True
    expected[0, 1, 20] = True
    assert torch.equal(out.isnan().all(-1), expected)
    assert torch.equal(out.isnan().any(-1), expected)
    assert torch.equal(stats.lam.isnan(), expected)
