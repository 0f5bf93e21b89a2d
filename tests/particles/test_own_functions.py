"""Radial kernels that users write: numbers, derivatives, digests, what is refused, and kernels that are compiled."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import particles as gp
from gossamer.kernels.hopper import missing_packages
from gossamer.particles.kernels.radial.functions import digest
from tests.particles import oracle
from tests.particles.test_torch import DEVICES

FACTOR = 3.0


def spline(s: Any, xp: Any, h: float) -> Any:
    """The cubic spline of smoothed particles."""
    u = xp.sqrt(s) / h
    return xp.where(u < 1, 1 - 1.5 * u**2 + 0.75 * u**3, xp.where(u < 2, 0.25 * (2 - u) ** 3, 0.0))


def gaussian(s: Any, xp: Any, h: float) -> Any:
    return xp.exp(s * -0.5 / h**2)


def plummer(s: Any, xp: Any, softening: float) -> Any:
    return xp.rsqrt(s + softening**2) ** 3


def of_all(s: Any, xp: Any, a: float, b: float) -> Any:
    waves = xp.sin(a * s) * xp.cos(s) + xp.tanh(s - b) / (1 + s)
    return waves + xp.log(2 + s) * xp.abs(s - 0.31) - xp.minimum(s, 0.2) + xp.maximum(0.3, s) ** -2 - FACTOR


def shell(s: Any, xp: Any, a: float) -> Any:
    bump = 1 + a * (s - 0.01) * (0.03 - s)
    return xp.where((s > 0.01) & (s <= 0.03) | (s == 0), bump, xp.where(FACTOR > 2, 1.0, s))


OWN: list[tuple[Callable[..., Any], tuple[float, ...]]] = [
    (spline, (0.11,)),
    (gaussian, (0.08,)),
    (plummer, (0.05,)),
    (of_all, (0.7, 0.2)),
    (shell, (900.0,)),
]


@pytest.mark.parametrize(("function", "numbers"), OWN)
def test_values_and_slopes(function: Callable[..., Any], numbers: tuple[float, ...]) -> None:
    """Of numpy, torch and differences."""
    s, e = np.random.default_rng().uniform(1e-3, 1, 1000), 1e-7
    kernel = gp.RadialKernel(function, *numbers)
    found = kernel.formula.both(s, np)
    bent = (np.abs(s[:, None] - [0.31, 0.2, 0.3, 0.01, 0.03]) < 1e-5).any(1)  # where there is none
    wanted = (kernel.formula.of(s + e, np) - kernel.formula.of(s - e, np)) / (2 * e)
    assert (np.abs(found.slope - wanted) <= 1e-5 * (1 + np.abs(wanted)) + 1e9 * bent).all()
    assert (found.value == kernel.formula.of(s, np)).all()
    again = kernel.formula.both(torch.as_tensor(s), torch)
    np.testing.assert_allclose(again.value, found.value, rtol=1e-12)
    np.testing.assert_allclose(again.slope, found.slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("function", "numbers"), OWN)
def test_sums_and_gradients(function: Callable[..., Any], numbers: tuple[float, ...], device: str) -> None:
    """Against sums over all pairs in float64, which torch differentiates."""
    N, d, radius, box = 300, 3, 0.22, (1.0, None, 0.9)
    kernel = gp.RadialKernel(function, *numbers)
    x = torch.rand(N, d, device=device) * torch.tensor([1.0, 1.2, 0.9], device=device)
    values, mass = torch.randn(N, 2, device=device), torch.rand(N, device=device)
    weights, pushes = torch.randn(N, 2, device=device), torch.randn(N, d, device=device)

    def of_pairs(x: torch.Tensor, values: torch.Tensor, mass: torch.Tensor) -> list[torch.Tensor]:
        step = x[None] - x[:, None]
        for axis, size in enumerate(box):
            if size is not None:
                step = step - size * torch.round(step / size) * (torch.arange(d, device=device) == axis)
        s = (step * step).sum(-1)
        near, apart = s <= radius**2, (s > 0) & (s <= radius**2)
        f = kernel.formula.of(torch.where(apart, s, torch.ones_like(s)), torch)
        at_zero = kernel.formula.of(torch.zeros_like(s), torch)
        w = torch.where(apart, f, torch.where(near, at_zero, torch.zeros_like(s)))
        return [w @ values, torch.einsum("ij,ijd,j->id", torch.where(apart, f, torch.zeros_like(s)), step, mass)]

    def of_cells(x: torch.Tensor, values: torch.Tensor, mass: torch.Tensor) -> list[torch.Tensor]:
        cells = gp.Cells.build(x, radius, box)
        return [gp.radial_sum(cells, values, kernel), gp.radial_force(cells, mass, kernel)]

    results = []
    for call, dtype in ((of_pairs, torch.float64), (of_cells, torch.float32)):
        inputs = [one.to(dtype).requires_grad_() for one in (x, values, mass)]
        out = call(*inputs)
        total = sum((o * w).sum() for o, w in zip(out, (weights, pushes), strict=True))
        results.append([*out, *torch.autograd.grad(total, inputs)])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def test_digests() -> None:
    def first(s: Any, xp: Any) -> Any:
        return 2.0 * xp.exp(-s)

    def second(s: Any, xp: Any) -> Any:
        return 3.0 * xp.exp(-s)

    def made(n: float) -> Callable[..., Any]:
        return lambda s, xp: n * xp.exp(-s) * math.pi * FACTOR

    def calls(inner: Any) -> Callable[..., Any]:
        return lambda s, xp: inner(s, xp)

    names = [digest(f) for f in (first, second, made(1.0), made(2.0), calls(first), calls(second), spline, of_all)]
    assert len(set(names)) == len(names)
    assert digest(made(1.0)) == digest(made(1.0))
    assert digest(calls(first)) == digest(calls(first))
    before = digest(of_all)
    globals()["FACTOR"] = 4.0
    try:
        assert digest(of_all) != before
    finally:
        globals()["FACTOR"] = 3.0
    assert digest(of_all) == before


def branches(s: Any, xp: Any) -> Any:
    return s if s else 1


@pytest.mark.parametrize(
    ("error", "said", "function", "numbers"),
    [
        (TypeError, "no branches.*xp.where", branches, ()),
        (AttributeError, "may call exp, log, .*; got xp.erf", lambda s, xp: xp.erf(s), ()),
        (TypeError, "whole numbers of at most 64", lambda s, xp: s**0.5, ()),
        (TypeError, "computes with r\\^2 and numbers; got list", lambda s, xp: s * [1.0], ()),
        (TypeError, "got OWN, which is of the type list: give numbers", lambda s, xp: s * len(OWN), ()),
        (TypeError, "function must be a function", 3.0, ()),
        (TypeError, "missing 1 required positional", lambda s, xp, h: s * h, ()),
        (TypeError, "known before anything is compiled", lambda s, xp, h: s * h, (torch.ones((), requires_grad=True),)),
        (TypeError, "known before anything is compiled", lambda s, xp, h: s * h, (torch.ones(1),)),
        (TypeError, "no branches", lambda s, xp, h: s if s < h else h, (1.0,)),
        (TypeError, "no branches", lambda s, xp, h: s if h < 2 else 2 * s, (1.0,)),
        (TypeError, "no branches", lambda s, xp: s if s else 1.0, ()),
        (TypeError, "no branches", lambda s, xp: s if s == 0 else 1.0, ()),
        (TypeError, "no branches", lambda s, xp: xp.where(s < 1 and s > 0.5, s, 1), ()),
        (TypeError, "no branches", lambda s, xp: max(s, 1.0), ()),
        (TypeError, "by no other functions", lambda s, xp: math.exp(s), ()),
        (TypeError, "by no other functions", lambda s, xp: abs(s), ()),
        (TypeError, "takes a comparison first; got Number", lambda s, xp: xp.where(s, s, 1), ()),
        (TypeError, "joined with conditions; got int", lambda s, xp: xp.where((s < 1) & 1, s, 1), ()),
        (ValueError, "at most 10 numbers; got 11", lambda s, xp, *n: s, range(11)),
    ],
)
def test_what_is_refused(error: type[Exception], said: str, function: Any, numbers: Any) -> None:
    with pytest.raises(error, match=said):
        gp.RadialKernel(function, *numbers)


COMPILE = """
import sys
import gossamer.particles.kernels.compiled as compiled
from gossamer import particles as gp
from gossamer.particles.calls import call_of
from tests.particles.test_own_functions import OWN
if sys.argv[1] == "again":
    compiled.radial.build = None  # what is on disk is read
of = ("sum", "sum_slopes"), ("sum_slopes",), ("force", "force_slopes"), ("sum",), ("sum_slopes",)
for (function, numbers), terms in zip(OWN, of, strict=True):
    for term in terms:
        config, _ = call_of(term, gp.RadialKernel(function, *numbers), 0.2, (1.0, None, None))
        assert compiled.radial.object(config)
        assert call_of(term, gp.RadialKernel(function, *(2 * n for n in numbers)), 0.2, (1.0,))[0] == config
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "GOSSAMER_CACHE_DIR": str(tmp_path)}
    for time in ("first", "again"):
        subprocess.run([sys.executable, "-c", COMPILE, time], check=True, env=environment)
    assert len(list((tmp_path / "particles").glob("radial-*.o"))) == 7


def test_conditions() -> None:
    """Joined, and of equality, which is of numbers and not of objects; a number that is known chooses as well."""

    def several(s: Any, xp: Any, a: float) -> Any:
        within = (s > 0.2) & (s <= 0.8) | (s == 0.1)
        return xp.where(within, s * a, xp.where(s != 0.9, 0.0, 7.0)) + xp.where(FACTOR > 2, s, 100.0)

    s = np.array([0.1, 0.15, 0.2, 0.5, 0.8, 0.85, 0.9])
    found = gp.RadialKernel(several, 3.0).formula.both(s, np)
    inside = np.array([True, False, False, True, True, False, False])
    np.testing.assert_allclose(found.value, np.where(inside, 3 * s, np.where(s == 0.9, 7.0, 0.0)) + s)
    np.testing.assert_allclose(found.slope, np.where(inside, 4.0, 1.0))
    again = gp.RadialKernel(several, 3.0).formula.both(torch.as_tensor(s), torch)
    np.testing.assert_allclose(again.value, found.value)


def test_the_gaussian_written_by_hand() -> None:
    x, v = torch.rand(200, 2), torch.randn(200)
    cells = gp.Cells.build(x, 0.3, 1.0)
    wanted = oracle.gaussian_sum(x.numpy(), cells.box, 0.3, 0.1, v.numpy())
    for kernel in (gp.Gaussian(0.1), gp.RadialKernel(gaussian, 0.1)):
        np.testing.assert_allclose(gp.radial_sum(cells, v, kernel), wanted, atol=1e-5)
    assert repr(gp.RadialKernel(gaussian, 0.1)) == "RadialKernel(gaussian, 0.1)"
    assert gp.RadialKernel(gaussian, 0.1) == gp.RadialKernel(gaussian, 0.1) != gp.RadialKernel(gaussian, 0.2)
